"""Finds the blocks of a model: those that its author names, or else repeated modules that hold most parameters."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn

from yafsdp_cc.sharding.parameters import Paths, total, walk, within

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SMALL_MODEL = 1 << 22
"""Number of parameters up to which a model without repeated blocks is one unit: 16 MiB in fp32."""
EDGES = {nn.Embedding, nn.Linear, *CONVOLUTIONS}


def find_blocks(model: nn.Module, paths_of: Paths) -> list[nn.Module]:
    """Return the blocks that the model names if they hold most parameters beside embeddings and heads; else its
    repeated blocks; else the named blocks all the same; else the model itself if it is small."""
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
    """Return whether the module has a ``forward``: a ModuleList has none, and so no hook can gather for it."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def named_blocks(model: nn.Module) -> list[nn.Module]:
    """Return modules that ``_fsdp_plan`` (``layers.*``) or ``_no_split_modules`` (class names) of the model, or of a
    part of it, names.

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
    """Return the outermost repeated members of lists, if they hold most parameters.

    Blocks with submodules are preferred to single layers, so that convolutions between two stages stay outside.
    """
    repeated = _repeated(model)
    composite = [module for module in repeated if module._modules]
    if composite and _hold_most(composite, paths_of):
        return _without_stages(composite)
    return repeated if 2 * total(within(repeated, paths_of)) >= total(paths_of) else []


def describe(modules: Iterable[nn.Module], model: nn.Module) -> str:
    """Describe how many modules there are, and where: ``x32, model.layers.*``."""
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
    """Describe the repeated composite blocks: ``Block (x32, layers.*)``."""
    repeated = _repeated(model)
    groups = by_class([module for module in repeated if module._modules] or repeated)
    found = [f"{kind.__name__} ({describe(members, model)})" for kind, members in groups.items()]
    return f" Repeated blocks found: {', '.join(found)}." if found else ""


def _listed(model: nn.Module) -> list[nn.Module]:
    """Return the entries of every ModuleList and Sequential, except entries that are plain lists themselves."""
    paths = [path for _, path in walk(model) if len(path) > 1 and isinstance(path[-2], LISTS)]
    return [path[-1] for path in paths if type(path[-1]) not in LISTS and is_called(path[-1])]


def _outermost(model: nn.Module, chosen: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules of ``chosen`` that are inside no other one of ``chosen``, in the model's order."""
    wanted = set(chosen)
    paths = [path for _, path in walk(model) if path[-1] in wanted and wanted.isdisjoint(path[:-1])]
    return list(dict.fromkeys(path[-1] for path in paths))


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Return modules in ``ModuleList``s whose class occurs twice or more there, also one that is called twice, without
    those inside of others."""
    listed = _listed(model)
    repeats = Counter(map(type, listed))
    return _outermost(model, [module for module in listed if repeats[type(module)] > 1])


def _hold_most(blocks: Iterable[nn.Module], paths_of: Paths) -> bool:
    """Return whether ``blocks`` hold at least half of the parameters, those of embeddings and heads left out."""
    inside = set(within(blocks, paths_of))
    rest = [owned for owned in paths_of if owned not in inside and not all(is_edge(site) for site, _ in owned.sites)]
    return total(inside) >= total(rest)


def _without_stages(blocks: list[nn.Module]) -> list[nn.Module]:
    """Return ``blocks`` with the stages of a hierarchical network replaced by the blocks inside."""
    return [block for stages in by_class(blocks).values() for block in _blocks_of(stages) or stages]


def _blocks_of(stages: list[nn.Module]) -> list[nn.Module]:
    """Return the modules of one class that make up most of ``stages``, if the stages differ much in size.

    Stages of equal size are never opened: they contain the experts of a mixture, and ranks call different experts.
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
    """Return an error that suggests units: classes below the root that hold at least a tenth of the parameters."""
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
    """Return the modules of each class that holds at least a tenth of the parameters."""
    groups = by_class(modules).values()
    return [members for members in groups if 10 * total(within(members, paths_of)) >= total(paths_of)]
