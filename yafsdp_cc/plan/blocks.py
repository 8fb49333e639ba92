"""The blocks of a model: what its author names as such, or else what is repeated in it and holds most parameters."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from yafsdp_cc.plan.parameters import OwnedParameter, Path, total, walk, within

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
EDGES = {nn.Embedding, nn.Linear, *CONVOLUTIONS}

Paths = Mapping[OwnedParameter, tuple[Path, ...]]


def find_blocks(model: nn.Module, paths_of: Paths) -> list[nn.Module]:
    """The blocks the model names itself, else its repeated ones: whichever hold most of what is neither embedding nor
    head. What the model names is taken even if it holds less, when nothing better is found."""
    named = _without_stages(named_blocks(model))
    if named and _most(named, paths_of):
        return named
    repeated = repeated_blocks(model, paths_of)
    if repeated or named:
        return repeated or named
    raise ValueError(_no_blocks(model, paths_of))


def is_edge(module: nn.Module) -> bool:
    """A layer that reads its weight in its own ``forward`` only: one that can be gathered alone."""
    kind = type(module)
    conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return (kind in EDGES or conv1d) and not module._modules


def matches(pattern: str, name: str) -> bool:
    """Whether a module's name fits a dotted pattern, in which ``*`` stands inside one component."""
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


def is_called(module: nn.Module) -> bool:
    """Whether the module has a ``forward`` at all: a ModuleList has none, and so cannot gather anything."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def named_blocks(model: nn.Module) -> list[nn.Module]:
    """What ``_fsdp_plan`` (``layers.*``) and ``_no_split_modules`` (class names) of the model or a sub-model match.

    Only modules that sit in a list: both also name embeddings and heads, which are units of another kind.
    """
    found: dict[nn.Module, None] = {}
    for owner in model.modules():
        patterns = [key for key in getattr(owner, "_fsdp_plan", None) or () if "*" in str(key)]
        classes = set(getattr(owner, "_no_split_modules", None) or ())
        if not patterns and not classes:
            continue
        for name, path in walk(owner):
            named = type(path[-1]).__name__ in classes or any(matches(str(pattern), name) for pattern in patterns)
            if named and _listed(path):
                found[path[-1]] = None
    return list(dict.fromkeys(path[-1] for path in _outermost(model, found)))


def repeated_blocks(model: nn.Module, paths_of: Paths) -> list[nn.Module]:
    """The outermost repeated members of lists, when they hold most parameters.

    Blocks made of other modules go before single layers, so the convolutions between two stages stay outside.
    """
    level = _level(model)
    composite = [member for member in level if member._modules]
    if composite and _most(composite, paths_of):
        return _without_stages(composite)
    held = total(within(level, paths_of))
    return level if 2 * held >= total(paths_of) and level else []


def describe(modules: Iterable[nn.Module], model: nn.Module) -> str:
    """How often and where: ``x32, model.layers.*``."""
    wanted = set(modules)
    names = [name for name, path in walk(model) if path[-1] in wanted]
    patterns = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    places = ", ".join(patterns[:2]) + (", ..." if len(patterns) > 2 else "")
    return f"x{len(names)}, {places or 'the model itself'}"


def by_class(modules: Iterable[nn.Module]) -> dict[type[nn.Module], list[nn.Module]]:
    """Modules grouped by class, in the order first seen."""
    groups: defaultdict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for module in modules:
        groups[type(module)].append(module)
    return dict(groups)


def repeated_classes(model: nn.Module) -> str:
    """The repeated composite blocks, in words: ``Block (x32, layers.*)``."""
    groups = by_class(member for member in _level(model) if member._modules) or by_class(_level(model))
    found = [f"{kind.__name__} ({describe(members, model)})" for kind, members in groups.items()]
    return f" Repeated blocks found: {', '.join(found)}." if found else ""


def _listed(path: Path) -> bool:
    """Whether the last module is a member of a list, and not merely a list in a list."""
    return len(path) > 1 and isinstance(path[-2], LISTS) and type(path[-1]) not in LISTS and is_called(path[-1])


def _outermost(model: nn.Module, chosen: Iterable[nn.Module]) -> Iterator[Path]:
    wanted = set(chosen)
    return (path for _, path in walk(model) if path[-1] in wanted and wanted.isdisjoint(path[:-1]))


def _level(model: nn.Module) -> list[nn.Module]:
    """The outermost members of lists whose class is repeated. One module called twice counts as repeated."""
    members = [path[-1] for _, path in walk(model) if _listed(path)]
    repeats = Counter(map(type, members))
    repeated = [member for member in members if repeats[type(member)] > 1]
    return list(dict.fromkeys(path[-1] for path in _outermost(model, repeated)))


def _most(blocks: Iterable[nn.Module], paths_of: Paths) -> bool:
    """Whether these hold at least half of the parameters, those of embeddings, heads and the like left out."""
    inside = set(within(blocks, paths_of))
    rest = [owned for owned in paths_of if owned not in inside and not all(is_edge(site) for site, _ in owned.sites)]
    return total(inside) >= total(rest)


def _without_stages(level: list[nn.Module]) -> list[nn.Module]:
    """The same, but for the stages of a hierarchical network their blocks."""
    return [block for stages in by_class(level).values() for block in _blocks_of(stages) or stages]


def _blocks_of(stages: list[nn.Module]) -> list[nn.Module]:
    """The members of one class that these are mostly lists of, if these differ much in size.

    Equal members are never opened: the experts of a mixture sit in those, and not every rank calls the same ones.
    """
    sizes = [_numel([stage]) for stage in stages]
    if max(sizes) < 2 * min(sizes):
        return []
    inner = [_members(stage) for stage in stages]
    for kind in by_class(member for members in inner for member in members):
        blocks = [[member for member in members if type(member) is kind] for members in inner]
        together = [block for members in blocks for block in members]
        if all(blocks) and len(together) >= 2 * len(stages) and 2 * _numel(together) >= sum(sizes):
            return together
    return []


def _numel(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for parameter in {p for module in modules for p in module.parameters()})


def _members(stage: nn.Module) -> list[nn.Module]:
    members = [path[-1] for _, path in walk(stage) if _listed(path)]
    return list(dict.fromkeys(path[-1] for path in _outermost(stage, members)))


def _large(model: nn.Module, paths_of: Paths) -> list[list[nn.Module]]:
    """The classes below the root that hold at least a tenth of the parameters, in module order; no edges."""
    below = [module for module in model.modules() if module is not model and is_called(module) and not is_edge(module)]
    groups = by_class(module for module in below if type(module) not in LISTS).values()
    return [members for members in groups if 10 * total(within(members, paths_of)) >= total(paths_of)]


def _no_blocks(model: nn.Module, paths_of: Paths) -> str:
    large = _large(model, paths_of)
    lines = [
        f"\n  {type(members[0]).__name__} ({describe(members, model)}): {total(within(members, paths_of)):,} parameters"
        for members in large
    ]
    most = [members for members in large if _most(members, paths_of)]
    listed = {path[-1] for _, path in walk(model) if _listed(path)}
    innermost = [members for members in most if members[0] in listed][-1:] or most[-1:]
    example = "".join(f"units=[{type(members[0]).__name__!r}], or " for members in innermost)
    return (
        f"units='auto' finds no repeated blocks that hold most of this model's {total(paths_of):,} parameters. Say "
        f"what to gather together: {example}units=[model] for a single unit. Candidates:{''.join(lines) or ' none'}"
    )
