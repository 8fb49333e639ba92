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

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from torch import nn

from yafsdp_cc.engine.spec import Role
from yafsdp_cc.forms.subclasses import subclass_of
from yafsdp_cc.sharding.blocks import by_class, describe, find_blocks, is_called, is_edge, matches, repeated_classes
from yafsdp_cc.sharding.parameters import (
    OwnedParameter,
    Path,
    Paths,
    check_shardable,
    find_parameters,
    present,
    total,
    walk,
)

TAKE_TURNS = ("block", "nested")
"""Roles with many units, which take two buffers in turn. Units of another role share one buffer."""
Entry = str | type[nn.Module] | nn.Module | Sequence[nn.Module]
Units = str | type[nn.Module] | nn.Module | Collection[Entry] | Callable[[str, nn.Module], bool]
"""``"auto"``; class names, ``*`` patterns over module names, or classes; modules; or a predicate (name, module)."""

ROOT = "(root)"
SMALL = 256
"""Number of elements below which a parameter is small, whatever its shape."""
SMALL_VECTOR = 2**20
"""Number of elements up to which a vector or scalar is small."""
EDGE = 65_536
"""Elements below which an embedding or head belongs to the root; so does one with under 1 % of the parameters."""
LARGE_EDGE = 2**24
"""Elements from which an embedding or head is always an edge: 1 % of a very large model exceeds its largest block."""


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
    """Raise if ``module`` cannot gather the parameters of a unit."""
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
    # if the caller made the root a unit, it takes all remaining parameters, those of edges too
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
    """Return the innermost group that is on every path to the parameter; () if there is none but the root."""
    chains = [[group_of[module] for module in path if module in group_of] for path in paths]
    shared = set(chains[0]).intersection(*chains[1:])
    return next((group for group in reversed(chains[0]) if group in shared), ())


def _edges(left: list[OwnedParameter], whole: int) -> dict[nn.Module, list[OwnedParameter]]:
    """Return large embeddings, heads and the like that are outside of all units and not tied."""
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
