"""Lists the parameters of a model, each once with every module that holds it, and refuses unshardable ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from yafsdp_cc.forms.subclasses import PLAIN, plain_parameter, subclass_of, tensors_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

Path = tuple[nn.Module, ...]
"""Modules on the way from the root, which comes first, to a module, which comes last."""


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """One distinct parameter: its first full name, and every (owner, attribute) that holds it."""

    name: str
    parameter: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]

    @property
    def held(self) -> nn.Parameter:
        """The parameter that modules hold; it differs from ``parameter`` if it is of a tensor subclass."""
        module, attribute = self.sites[0]
        held = module._parameters[attribute]
        assert held is not None
        return held

    @property
    def numel(self) -> int:
        return present(self.parameter).numel()


Paths = Mapping[OwnedParameter, tuple[Path, ...]]
"""For each parameter every path from the root to a module that holds it."""


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
    """Return every parameter that is not ignored, in module order, with each way from the root to one of its owners.

    For a parameter of a tensor subclass, the plain one is returned that is sharded in its place (``forms.subclasses``).

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
    """Return the number of elements of all these parameters."""
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
    # parameters may share an allocation, as an LSTM's weights do, but no byte of it
    for extents in by_storage.values():
        extents.sort(key=lambda extent: extent[0])
        for (_, end, name), (start, _, other) in pairwise(extents):
            if start < end and name != other:
                raise ValueError(
                    f"{other!r} shares memory with {name!r} without being the same nn.Parameter. To tie them, assign "
                    "one nn.Parameter to both; to keep them apart, clone one"
                )
