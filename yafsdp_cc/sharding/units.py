"""Divides a model into units: modules that are gathered together, and the parameters that belong to each unit.

    role    | what                                              | gathered
    block   | the repeated blocks, or what the caller named     | around the forward of its modules
    edge    | a large embedding or linear layer outside them    | likewise, in buffers of its own
    root    | whatever is left                                  | around the forward of the model

Norms, biases and other small parameters leave their unit: they are replicated.

An edge is gathered when its own ``forward`` runs. In a model that reads the weight of an embedding or head from
elsewhere without tying it, name the root as well (``units=["Block", model]``): then there are no edges.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from yafsdp_cc.engine.spec import Role
from yafsdp_cc.forms.subclasses import PLAIN, plain_parameter, subclass_of, tensors_of

TAKE_TURNS = ("block", "nested")
"""Roles with many units, which take buffers in turn, two by default. Units of any other role share one buffer."""
Entry = str | type[nn.Module] | nn.Module | Sequence[nn.Module]
Units = str | type[nn.Module] | nn.Module | Collection[Entry] | Callable[[str, nn.Module], bool]
"""Argument ``units``: "auto"; class names, module names with ``*``, classes; modules; a predicate (name, module)."""

ROOT = "(root)"
SMALL = 256
"""Number of elements below which a parameter is small, whatever its shape."""
SMALL_VECTOR = 2**20
"""Number of elements up to which a vector or scalar is small."""
EDGE = 65_536
"""Number of elements below which an embedding or head belongs to the root, as does one under 1 % of the model."""
LARGE_EDGE = 2**24
"""Elements from which an embedding or head is always an edge: 1 % of a very large model exceeds its largest block."""


# Parameters: each once, with every module that holds it ---------------------------------------------------------------

Path = tuple[nn.Module, ...]
"""Modules on the way down from the root module, the first, to some module, the last."""


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """One distinct parameter: its first full name, and every (owner, attribute) that holds it."""

    name: str
    parameter: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]

    @property
    def held(self) -> nn.Parameter:
        """The parameter that modules hold, which for one of a tensor subclass is not ``parameter``, a plain one."""
        module, attribute = self.sites[0]
        held = module._parameters[attribute]
        assert held is not None
        return held

    @property
    def numel(self) -> int:
        return present(self.parameter).numel()


Paths = Mapping[OwnedParameter, tuple[Path, ...]]
"""For each parameter every path from the root module to a module that holds the parameter."""


def present(parameter: nn.Parameter) -> Tensor:
    """Return this rank's elements of a parameter: its local tensor if tensor parallelism has made it a DTensor."""
    part: Tensor = getattr(parameter, "_local_tensor", parameter)
    return part


def walk(module: nn.Module, name: str = "", above: Path = ()) -> Iterator[tuple[str, Path]]:
    """Yield every path to every module, in ``named_modules`` order: a module registered twice is visited twice."""
    if module in above:
        return
    path = (*above, module)
    yield name, path
    for attribute, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{name}.{attribute}" if name else attribute, path)


def find_parameters(model: nn.Module, ignored: Collection[nn.Parameter] = ()) -> Paths:
    """Return every parameter that is not ignored, in module order, with each path from the root to one of its owners.

    In place of a parameter of a tensor subclass, return the plain one that is sharded for it (``forms.subclasses``).

    Raises:
        ValueError: a parameter is of a tensor subclass that cannot be sharded.
    """
    skipped = {id(parameter) for parameter in ignored}
    names: dict[nn.Parameter, str] = {}
    paths: defaultdict[nn.Parameter, list[Path]] = defaultdict(list)
    sites: defaultdict[nn.Parameter, dict[tuple[nn.Module, str], None]] = defaultdict(dict)
    for prefix, path in walk(model):
        for attribute, parameter in path[-1].named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in skipped:
                names.setdefault(parameter, f"{prefix}.{attribute}" if prefix else attribute)
                paths[parameter].append(path)
                sites[parameter][path[-1], attribute] = None
    return {
        OwnedParameter(name, plain_parameter(name, p), tuple(sites[p])): tuple(paths[p]) for p, name in names.items()
    }


def total(owned: Iterable[OwnedParameter]) -> int:
    """Return the number of elements of all parameters in ``owned``."""
    return sum(parameter.numel for parameter in owned)


def within(modules: Iterable[nn.Module], paths_of: Paths) -> list[OwnedParameter]:
    """Return the parameters that a module inside one of ``modules`` holds."""
    wanted = set(modules)
    return [owned for owned, paths in paths_of.items() if any(not wanted.isdisjoint(path) for path in paths)]


def check_shardable(parameters: Iterable[OwnedParameter]) -> None:
    """Raise a ``ValueError`` that names the first parameter which cannot be cut across ranks, and the remedy."""
    by_storage: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for owned in parameters:
        parameter = owned.parameter
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{owned.name!r} has no shape yet (a lazy module): run one forward pass before sharding")
        if (kind := type(present(parameter))) not in PLAIN and subclass_of(parameter) is None:
            raise ValueError(
                f"{owned.name!r} is a DTensor around a {kind.__module__}.{kind.__qualname__}: parameters of tensor "
                "subclasses are sharded where tensor parallelism has not divided them before. Leave it out of "
                "parallelize_module, or pass it in ignored_params"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(
                f"{owned.name!r} is {parameter.dtype} and requires a gradient, but only floating-point gradients are "
                "reduced: store its real view (torch.view_as_real), freeze it with requires_grad_(False), or pass it "
                "in ignored_params"
            )
        if parameter.layout is not torch.strided:
            raise ValueError(f"{owned.name!r} is {parameter.layout}, not dense: pass it in ignored_params")
        for part in tensors_of(present(parameter)):
            if not part.numel():
                continue
            reach = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
            start = int(part.storage_offset()) * part.itemsize
            by_storage[part.untyped_storage()._cdata].append((start, start + int(reach) * part.itemsize, owned.name))
    # parameters may share an allocation, as an LSTM's weights do, but no byte in it
    for extents in by_storage.values():
        extents.sort(key=lambda extent: extent[0])
        for (_, end, name), (start, _, other) in pairwise(extents):
            if start < end and name != other:
                raise ValueError(
                    f"{other!r} shares memory with {name!r} without being the same nn.Parameter. To tie them, assign "
                    "one nn.Parameter to both; to keep them apart, clone one"
                )


# Units ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """Modules that are gathered and reduced together, and the parameters that their forwards need, in module order."""

    name: str
    modules: tuple[nn.Module, ...]
    role: Role
    parameters: tuple[OwnedParameter, ...]

    @property
    def numel(self) -> int:
        return total(self.parameters)


class Division(NamedTuple):
    """Every parameter that is not ignored, in exactly one place: in its unit, or among the replicated ones."""

    units: tuple[UnitSpec, ...]
    replicated: tuple[OwnedParameter, ...]

    @property
    def parameters(self) -> list[OwnedParameter]:
        return [*(each for unit in self.units for each in unit.parameters), *self.replicated]


def find_units(model: nn.Module, units: Units = "auto", ignored: Collection[nn.Parameter] = ()) -> Division:
    """Divide the parameters of ``model`` into units, in module order (an outer one before those nested in it, the root
    last), and replicated ones.

    A parameter belongs to the innermost unit that contains all of its owners. ``units=[model]`` makes a single unit.
    Raises ``ValueError`` for a parameter that cannot be sharded and for an entry of ``units`` that matches nothing.
    """
    paths_of = find_parameters(model, ignored)
    if not paths_of:
        raise ValueError(
            "nothing to shard: every parameter of this model is in ignored_params"
            if any(True for _ in model.parameters())
            else f"nothing to shard: this model ({type(model).__name__}) has no parameters"
        )
    check_shardable(paths_of)
    auto = isinstance(units, str) and units == "auto"
    division = _divide(model, _groups_of(find_blocks(model, paths_of) if auto else units, model), paths_of)
    if auto:
        _warn_of_large_unit(division)
    return division


def is_small(parameter: nn.Parameter) -> bool:
    """Return whether the parameter is replicated rather than sharded in a unit."""
    if subclass_of(parameter) is not None:
        return False
    numel = present(parameter).numel()
    return numel < SMALL or (parameter.ndim <= 1 and numel <= SMALL_VECTOR)


def _groups_of(units: Units, model: nn.Module) -> list[tuple[nn.Module, ...]]:
    """Return the modules of each unit that the caller names, once each."""
    names = {module: name for name, module in model.named_modules()}
    if isinstance(units, nn.ModuleList):
        entries: list[Entry] = list(units)
    elif isinstance(units, (str, type, nn.Module)):
        entries = [units]
    elif isinstance(units, Collection):
        entries = list(units)
    elif callable(units):
        entries = [module for module, name in names.items() if units(name, module)]
        if not entries:
            raise ValueError(f"the units predicate accepts none of {len(names)} modules.{repeated_classes(model)}")
    else:
        raise TypeError(f'units takes "auto", class names, classes, modules or a predicate; got {units!r}')
    if not entries:
        raise ValueError(f"units is empty: use units=[model] for a single unit.{repeated_classes(model)}")
    groups: list[tuple[nn.Module, ...]] = []
    entry_of: dict[nn.Module, Entry] = {}
    for entry in entries:
        if isinstance(entry, nn.Module):
            found: list[tuple[nn.Module, ...]] = [(entry,)]
        elif isinstance(entry, (str, type)):
            matched = [module for module, name in names.items() if _fits(entry, name, module)]
            if not matched:
                raise ValueError(_no_match(entry, model))
            found = [(module,) for module in matched if not isinstance(entry_of.get(module), (str, type))]
        else:
            found = [tuple(entry)]
        for group in found:
            for module in group:
                _check_module(module, model, names)
                name = names[module] or "the model itself"
                if module in entry_of:
                    kind = type(module).__name__
                    raise ValueError(f"units names {name!r} ({kind}) twice: a module belongs to one unit")
                entry_of[module] = entry
            for _, path in walk(model) if len(group) > 1 else ():
                nested = [names[module] or "the model itself" for module in path if module in group]
                if len(nested) > 1:
                    raise ValueError(f"{nested[1]!r} is inside {nested[0]!r}: one unit needs only the outer of the two")
        groups += found
    return groups


def _fits(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    kind = type(module)
    return entry in (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}") or matches(entry, name)


def _no_match(entry: str | type[nn.Module], model: nn.Module) -> str:
    text = entry if isinstance(entry, str) else entry.__qualname__
    known = {kind.__name__: describe(found, model) for kind, found in by_class(model.modules()).items()}
    known |= {pattern: about for about in [*known.values()] for pattern in about.split(", ")[1:]}
    near = get_close_matches(text, known, n=1)
    hint = f" Did you mean {near[0]!r} ({known[near[0]]})?" if near else repeated_classes(model)
    return f"units={text!r} matches no module.{hint}"


def _check_module(module: nn.Module, model: nn.Module, names: Mapping[nn.Module, str]) -> None:
    """Raise an error if ``module`` cannot be a unit: it must be in ``model`` and have a forward for hooks."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"units: {module!r} is not a module; a list inside the list is one unit of several modules")
    kind = type(module).__name__
    if module not in names:
        raise ValueError(f"units names a {kind} that is not a part of this model ({type(model).__name__})")
    if not is_called(module) and module is not model:
        raise ValueError(
            f"{names[module]!r} is a {kind}, which has no forward that could gather it: name its members instead, "
            f"for example units=['{names[module]}.*']"
        )


def _divide(model: nn.Module, groups: list[tuple[nn.Module, ...]], paths_of: Paths) -> Division:
    group_of = {module: group for group in groups for module in group if group != (model,)}
    members: dict[tuple[nn.Module, ...], list[OwnedParameter]] = {}
    for owned, paths in paths_of.items():
        if not is_small(owned.parameter):
            members.setdefault(_innermost(paths, group_of), []).append(owned)
    left = members.pop((), [])
    # if the caller made the root a unit, the root takes all remaining parameters, those of edges too
    edges = {} if (model,) in groups else _edges(left, total(paths_of))
    mixed = any(module._modules for group in members for module in group)
    enclosed = {inner for group in members for module in group for inner in module.modules() if inner is not module}
    names = {module: name for name, module in model.named_modules()}
    found = [UnitSpec(names[edge], (edge,), "edge", tuple(parameters)) for edge, parameters in edges.items()]
    for group, parameters in members.items():
        is_edge_like = mixed and not any(module._modules for module in group)
        role: Role = "block" if not is_edge_like else "nested" if group[0] in enclosed else "edge"
        found.append(UnitSpec(names[group[0]], group, role, tuple(parameters)))
    position = {module: index for index, module in enumerate(names)}
    found.sort(key=lambda unit: position[unit.modules[0]])
    in_edges = {owned for parameters in edges.values() for owned in parameters}
    if rest := tuple(owned for owned in left if owned not in in_edges):
        found.append(UnitSpec(ROOT, (model,), "root", rest))
    return Division(tuple(found), tuple(owned for owned in paths_of if is_small(owned.parameter)))


def _innermost(paths: Iterable[Path], group_of: dict[nn.Module, tuple[nn.Module, ...]]) -> tuple[nn.Module, ...]:
    """Return the innermost group with modules on every one of a parameter's ``paths``; () if only the root is."""
    chains = [[group_of[module] for module in path if module in group_of] for path in paths]
    shared = set(chains[0]).intersection(*chains[1:])
    return next((group for group in reversed(chains[0]) if group in shared), ())


def _edges(left: list[OwnedParameter], whole: int) -> dict[nn.Module, list[OwnedParameter]]:
    """Return large embeddings, heads and the like that are outside of all units and not tied, with their parameters."""
    owners: dict[nn.Module, list[OwnedParameter]] = {}
    for owned in left:
        owner, _ = owned.sites[0]
        if len(owned.sites) == 1 and is_edge(owner):
            owners.setdefault(owner, []).append(owned)
    return {owner: mine for owner, mine in owners.items() if total(mine) >= max(EDGE, min(LARGE_EDGE, whole / 100))}


def _warn_of_large_unit(division: Division) -> None:
    whole = total(division.replicated) + sum(unit.numel for unit in division.units)
    for unit in division.units:
        if 2 * unit.numel > whole:
            largest = max(unit.parameters, key=lambda owned: owned.numel)
            advice = (
                f"Most of it is {largest.name!r}, one tensor: nothing smaller can be gathered"
                if 2 * largest.numel > unit.numel
                else "Name smaller units, for example units=['Block'] for a class or units=['layers.*'] for a path"
            )
            warnings.warn(
                f"unit {unit.name!r} holds {unit.numel / whole:.0%} of all parameters, and is gathered as a whole: "
                f"little memory is saved. {advice}",
                stacklevel=3,
            )


# Blocks: those that the author of a model names, or else repeated modules that hold most parameters -------------------

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SMALL_MODEL = 1 << 22
"""Number of parameters up to which a model without repeated blocks is one unit: 16 MiB in fp32."""
EDGES = {nn.Embedding, nn.Linear, *CONVOLUTIONS}


def find_blocks(model: nn.Module, paths_of: Paths) -> list[nn.Module]:
    """Return the blocks that the model names if they hold most parameters beside embeddings and heads; else its
    repeated blocks; without these, the named blocks all the same; else the model itself if it is small."""
    named = _without_stages(named_blocks(model))
    if named and _hold_most(named, paths_of):
        return named
    blocks = repeated_blocks(model, paths_of) or named
    if not blocks and total(paths_of) <= SMALL_MODEL:
        return [model]
    if not blocks:
        raise ValueError(_no_blocks(model, paths_of))
    return blocks


def is_edge(module: nn.Module) -> bool:
    """Return whether ``module`` is a layer that reads its weight only in its ``forward``, and can be gathered alone."""
    kind = type(module)
    conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return (kind in EDGES or conv1d) and not module._modules


def matches(pattern: str, name: str) -> bool:
    """Return whether a module's name fits a dotted pattern, in which ``*`` stands inside one component."""
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


def is_called(module: nn.Module) -> bool:
    """Return whether the module has a ``forward``: hooks cannot gather for a ModuleList, which has none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def named_blocks(model: nn.Module) -> list[nn.Module]:
    """Return modules named by ``_fsdp_plan`` (``layers.*``) or ``_no_split_modules`` (class names) of the model or of
    a part of it.

    Only modules in a list count: both attributes also name embeddings and heads, which are units of another kind.
    """
    found: set[nn.Module] = set()
    for owner in model.modules():
        patterns = [str(key) for key in getattr(owner, "_fsdp_plan", None) or () if "*" in str(key)]
        classes = set(getattr(owner, "_no_split_modules", None) or ())
        for name, path in walk(owner) if patterns or classes else ():
            if type(path[-1]).__name__ in classes or any(matches(pattern, name) for pattern in patterns):
                found.add(path[-1])
    return _outermost(model, found.intersection(_listed(model)))


def repeated_blocks(model: nn.Module, paths_of: Paths) -> list[nn.Module]:
    """Return the outermost repeated modules in lists of modules, if these hold most parameters.

    Blocks with submodules are preferred to single layers, so that convolutions between two stages stay outside.
    """
    repeated = _repeated(model)
    composite = [module for module in repeated if module._modules]
    if composite and _hold_most(composite, paths_of):
        return _without_stages(composite)
    return repeated if 2 * total(within(repeated, paths_of)) >= total(paths_of) else []


def describe(modules: Iterable[nn.Module], model: nn.Module) -> str:
    """Return how many modules these are, and where in ``model``: ``x32, model.layers.*``."""
    wanted = set(modules)
    names = [name for name, path in walk(model) if path[-1] in wanted]
    patterns = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    places = ", ".join(patterns[:2]) + (", ..." if len(patterns) > 2 else "")
    return f"x{len(names)}, {places or 'the model itself'}"


def by_class(modules: Iterable[nn.Module]) -> dict[type[nn.Module], list[nn.Module]]:
    """Return modules grouped by class, in the order first seen."""
    groups: defaultdict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for module in modules:
        groups[type(module)].append(module)
    return dict(groups)


def repeated_classes(model: nn.Module) -> str:
    """Return a sentence on the model's repeated blocks: ``Repeated blocks found: Block (x32, layers.*).`` or ""."""
    repeated = _repeated(model)
    groups = by_class([module for module in repeated if module._modules] or repeated)
    found = [f"{kind.__name__} ({describe(members, model)})" for kind, members in groups.items()]
    return f" Repeated blocks found: {', '.join(found)}." if found else ""


def _listed(model: nn.Module) -> list[nn.Module]:
    """Return the entries of all lists of modules (``LISTS``) that have a forward and are no plain lists themselves."""
    paths = [path for _, path in walk(model) if len(path) > 1 and isinstance(path[-2], LISTS)]
    return [path[-1] for path in paths if type(path[-1]) not in LISTS and is_called(path[-1])]


def _outermost(model: nn.Module, chosen: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules of ``chosen`` that are inside no other module of ``chosen``, in module order."""
    wanted = set(chosen)
    paths = [path for _, path in walk(model) if path[-1] in wanted and wanted.isdisjoint(path[:-1])]
    return list(dict.fromkeys(path[-1] for path in paths))


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Return modules in lists (``LISTS``) whose class occurs there twice or more (one module in two places counts),
    without those inside of other such modules."""
    listed = _listed(model)
    repeats = Counter(map(type, listed))
    return _outermost(model, [module for module in listed if repeats[type(module)] > 1])


def _hold_most(blocks: Iterable[nn.Module], paths_of: Paths) -> bool:
    """Return whether ``blocks`` hold at least half of the parameters, those of embeddings and heads left out."""
    inside = set(within(blocks, paths_of))
    rest = [owned for owned in paths_of if owned not in inside and not all(is_edge(site) for site, _ in owned.sites)]
    return total(inside) >= total(rest)


def _without_stages(blocks: list[nn.Module]) -> list[nn.Module]:
    """Return ``blocks`` with the stages of a hierarchical network replaced by the blocks inside the stages."""
    return [block for stages in by_class(blocks).values() for block in _blocks_of(stages) or stages]


def _blocks_of(stages: list[nn.Module]) -> list[nn.Module]:
    """Return the modules of one class that make up most of ``stages``, if the stages differ much in size.

    Stages of equal size stay units: they contain the experts of a mixture, and ranks call different experts.
    """
    sizes = [_numel([stage]) for stage in stages]
    if max(sizes) < 2 * min(sizes):
        return []
    inner = [_outermost(stage, _listed(stage)) for stage in stages]
    for kind in by_class(member for members in inner for member in members):
        blocks = [[member for member in members if type(member) is kind] for members in inner]
        together = [block for members in blocks for block in members]
        if all(blocks) and len(together) >= 2 * len(stages) and 2 * _numel(together) >= sum(sizes):
            return together
    return []


def _numel(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for parameter in {p for module in modules for p in module.parameters()})


def _no_blocks(model: nn.Module, paths_of: Paths) -> str:
    """Return an error message that suggests units: classes below the root with at least a tenth of the parameters."""
    called = [module for module in model.modules() if module is not model and is_called(module)]
    below = [module for module in called if type(module) not in LISTS]
    large = _large_classes([module for module in below if not is_edge(module)], paths_of)
    large = large or _large_classes(below, paths_of)
    candidates = "".join(
        f"\n  {type(members[0]).__name__} ({describe(members, model)}): {total(within(members, paths_of)):,} parameters"
        for members in large
    )
    most = [members for members in large if _hold_most(members, paths_of)]
    listed = _listed(model)
    innermost = [members for members in most if members[0] in listed][-1:] or most[-1:]
    example = "".join(f"units=[{type(members[0]).__name__!r}], or " for members in innermost)
    listing = f" Candidates:{candidates}" if candidates else ""
    return (
        f"units='auto' finds no repeated blocks that hold most of this model's {total(paths_of):,} parameters. Say "
        f"what to gather together: {example}units=[model] for a single unit.{listing}"
    )


def _large_classes(modules: Iterable[nn.Module], paths_of: Paths) -> list[list[nn.Module]]:
    """Return the modules of each class whose modules together hold at least a tenth of the parameters."""
    groups = by_class(modules).values()
    return [members for members in groups if 10 * total(within(members, paths_of)) >= total(paths_of)]
