"""The units of a model: which modules are gathered together, and which of their parameters each one brings.

    role    | what                                              | gathered
    block   | the repeated blocks, or what the caller named     | around the forward of its modules
    edge    | a large embedding or linear layer outside them    | likewise, in slots of its own
    root    | whatever is left                                  | around the forward of the model

Norms, biases and other small parameters leave their unit for the small group, which is replicated.

An edge is gathered when its own ``forward`` runs. In a model that reads the weight of an embedding or head from
elsewhere without tying it, name the root as well (``units=["Block", model]``): then there are no edges.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, NamedTuple

from torch import nn

from yafsdp_cc.plan.blocks import by_class, describe, find_blocks, is_called, is_edge, matches, repeated_classes
from yafsdp_cc.plan.parameters import OwnedParameter, Path, check_shardable, present, survey, total, walk

Role = Literal["block", "edge", "root"]
Entry = str | type[nn.Module] | nn.Module | Sequence[nn.Module]
Units = str | type[nn.Module] | nn.Module | Collection[Entry] | Callable[[str, nn.Module], bool]
"""``"auto"``; class names, ``*`` patterns over module names, or classes; modules; or a predicate (name, module)."""

ROOT = "(root)"
SMALL = 256
"""Parameters of fewer elements are small, whatever their shape."""
SMALL_VECTOR = 2**20
"""So are vectors and scalars of up to this many."""
EDGE = 65_536
"""An embedding or head of fewer elements stays with the root, and so does one of under 1 % of the parameters ..."""
LARGE_EDGE = 2**24
"""... unless it has this many: in a very large model 1 % is more than the largest block."""


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """What is gathered and reduced together: the modules whose forward needs it, and its parameters in module order."""

    name: str
    modules: tuple[nn.Module, ...]
    role: Role
    parameters: tuple[OwnedParameter, ...]

    @property
    def numel(self) -> int:
        return total(self.parameters)


class Division(NamedTuple):
    """Every parameter that is not ignored, in exactly one place: its unit, or the small group."""

    units: tuple[UnitSpec, ...]
    small: tuple[OwnedParameter, ...]


def find_units(model: nn.Module, units: Units = "auto", ignored: Collection[nn.Parameter] = ()) -> Division:
    """Divide the parameters of ``model`` into units, in module order (an outer one before those nested in it, the root
    last), and the small group.

    A parameter belongs to the innermost unit that contains all of its owners. ``units=[model]`` makes a single unit.
    Raises ``ValueError`` for a parameter that cannot be sharded and for an entry of ``units`` that matches nothing.
    """
    paths_of = survey(model, ignored)
    if not paths_of:
        raise ValueError(
            "nothing to shard: every parameter of this model is in ignored_params"
            if any(True for _ in model.parameters())
            else f"nothing to shard: this model ({type(model).__name__}) has no parameters"
        )
    check_shardable(paths_of)
    auto = isinstance(units, str) and units == "auto"
    chosen = _Choice(model)
    division = _divide(model, chosen.groups(find_blocks(model, paths_of) if auto else units), paths_of)
    if auto:
        _warn_of_large_unit(division)
    return division


def is_small(parameter: nn.Parameter) -> bool:
    """Whether the parameter is replicated in the small group rather than sharded in a unit."""
    numel = present(parameter).numel()
    return numel < SMALL or (parameter.ndim <= 1 and numel <= SMALL_VECTOR)


class _Choice:
    """Reads the caller's ``units`` against the modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.given: dict[nn.Module, object] = {}

    def groups(self, units: Units) -> list[tuple[nn.Module, ...]]:
        """The modules of each unit named."""
        if isinstance(units, nn.ModuleList):
            entries: list[Entry] = list(units)
        elif isinstance(units, (str, type, nn.Module)):
            entries = [units]
        elif isinstance(units, Collection):
            entries = list(units)
        elif not callable(units):
            raise TypeError(f'units takes "auto", class names, classes, modules or a predicate; got {units!r}')
        else:
            entries = [module for module, name in self.names.items() if units(name, module)]
            if not entries:
                raise ValueError(
                    f"the units predicate accepts none of {len(self.names)} modules.{repeated_classes(self.model)}"
                )
        if not entries:
            raise ValueError(f"units is empty: use units=[model] for a single unit.{repeated_classes(self.model)}")
        return [group for entry in entries for group in self._read(entry)]

    def _read(self, entry: Entry) -> list[tuple[nn.Module, ...]]:
        if isinstance(entry, (str, type)):
            matched = self._matched(entry)
            fresh = [module for module in matched if not isinstance(self.given.get(module), (str, type))]
            return [self._claim((module,), entry) for module in fresh]
        return [self._claim((entry,) if isinstance(entry, nn.Module) else tuple(entry), entry)]

    def _matched(self, entry: str | type[nn.Module]) -> list[nn.Module]:
        found = [module for module, name in self.names.items() if _fits(entry, name, module)]
        if found:
            return found
        text = entry if isinstance(entry, str) else entry.__qualname__
        raise ValueError(f"plan entry {text!r} matches no module.{self._nearest(text)}")

    def _nearest(self, text: str) -> str:
        classes = {kind.__name__: describe(found, self.model) for kind, found in by_class(self.names).items()}
        paths = {pattern: about for about in classes.values() for pattern in about.split(", ")[1:]}
        near = get_close_matches(text, [*classes, *paths], n=1)
        if not near:
            return repeated_classes(self.model)
        return f" Did you mean {near[0]!r} ({classes.get(near[0]) or paths[near[0]]})?"

    def _claim(self, group: tuple[nn.Module, ...], entry: Entry) -> tuple[nn.Module, ...]:
        for module in group:
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"units: {module!r} is not a module; a list inside the list is one unit of several modules"
                )
            kind = type(module).__name__
            if module not in self.names:
                raise ValueError(f"units names a {kind} that is not a part of this model ({type(self.model).__name__})")
            name = self.names[module] or "the model itself"
            if module in self.given:
                raise ValueError(f"units names {name!r} ({kind}) twice: a module belongs to one unit")
            if not is_called(module) and module is not self.model:
                raise ValueError(
                    f"{name!r} is a {kind}, which has no forward that could gather it: name its members instead, "
                    f"for example units=['{name}.*']"
                )
            self.given[module] = entry
        self._check_side_by_side(group)
        return group

    def _check_side_by_side(self, group: tuple[nn.Module, ...]) -> None:
        for _, path in walk(self.model):
            inside = [module for module in path if module in group]
            if len(inside) > 1:
                outer, inner = (self.names[module] or "the model itself" for module in inside[:2])
                raise ValueError(f"{inner!r} is inside {outer!r}: one unit needs only the outer of the two")


def _fits(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    kind = type(module)
    return entry in (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}") or matches(entry, name)


def _divide(
    model: nn.Module, groups: list[tuple[nn.Module, ...]], paths_of: dict[OwnedParameter, tuple[Path, ...]]
) -> Division:
    alone = (model,) in groups  # the caller made the root a unit: it takes all that is left, edges too
    group_of = {module: group for group in groups for module in group if group != (model,)}
    small = tuple(owned for owned in paths_of if is_small(owned.parameter))
    members: dict[tuple[nn.Module, ...], list[OwnedParameter]] = {}
    for owned, paths in paths_of.items():
        if not is_small(owned.parameter):
            members.setdefault(_home(paths, group_of), []).append(owned)

    left = members.pop((), [])
    edges = {} if alone else _edges(left, total(paths_of))
    taken = {owned for edge in edges.values() for owned in edge}
    mixed = any(module._modules for group in members for module in group)
    names = {module: name for name, module in model.named_modules()}
    position = {module: index for index, module in enumerate(names)}

    def spec(modules: tuple[nn.Module, ...], parameters: list[OwnedParameter], role: Role) -> UnitSpec:
        return UnitSpec(names[modules[0]], modules, role, tuple(parameters))

    found = [
        spec(group, parameters, "edge" if mixed and not any(module._modules for module in group) else "block")
        for group, parameters in members.items()
    ]
    found += [spec((module,), parameters, "edge") for module, parameters in edges.items()]
    found.sort(key=lambda unit: position[unit.modules[0]])
    if rest := tuple(owned for owned in left if owned not in taken):
        found.append(UnitSpec(ROOT, (model,), "root", rest))
    return Division(tuple(found), small)


def _home(paths: Iterable[Path], group_of: dict[nn.Module, tuple[nn.Module, ...]]) -> tuple[nn.Module, ...]:
    """The innermost group on every way to the parameter; none is the root."""
    chains = [[group_of[module] for module in path if module in group_of] for path in paths]
    shared = set(chains[0]).intersection(*chains[1:])
    return next((group for group in reversed(chains[0]) if group in shared), ())


def _edges(left: list[OwnedParameter], whole: int) -> dict[nn.Module, list[OwnedParameter]]:
    """Embeddings, heads and the like outside all units, if they are large and tied to nothing."""
    owners: dict[nn.Module, list[OwnedParameter]] = {}
    for owned in left:
        owner, _ = owned.sites[0]
        if len(owned.sites) == 1 and is_edge(owner):
            owners.setdefault(owner, []).append(owned)
    return {owner: mine for owner, mine in owners.items() if total(mine) >= max(EDGE, min(LARGE_EDGE, whole / 100))}


def _warn_of_large_unit(division: Division) -> None:
    whole = total(division.small) + sum(unit.numel for unit in division.units)
    for unit in division.units:
        if 2 * unit.numel > whole:
            largest = max(unit.parameters, key=lambda owned: owned.numel)
            advice = (
                f"Most of it is {largest.name!r}, one tensor: nothing smaller can be gathered"
                if 2 * largest.numel > unit.numel
                else "Name smaller units, for example units=['Block'] for a class or units=['layers.*'] for a path"
            )
            warnings.warn(
                f"unit {unit.name!r} holds {unit.numel / whole:.0%} of all parameters, and is gathered in one piece: "
                f"little memory is saved. {advice}",
                stacklevel=3,
            )
