"""Replaces parts of torch, on import, that would take sharded tensors for ordinary DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._library import simple_registry
from torch.distributed.tensor import DTensor

from yafsdp_cc.tensor.dtensor import FlatDTensor, FlatShard, flat_dtensor
from yafsdp_cc.tensor.reductions import LazyReduction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def _call_dispatch_of_subclasses() -> None:
    """Make torch call ``__torch_dispatch__`` of FlatDTensor and LazyReduction, as torch before 2.12 never does.

    Torch takes these subclasses for DTensor itself, whose operations are in C++ (pytorch/pytorch#177716), but first
    looks for a rule that the operator registered for the tensor's class: ``find`` returns one for each of them.
    """
    holder: Any = simple_registry.GenericTorchDispatchRuleHolder
    known = holder.find

    def find(self: Any, kind: Any) -> Any:
        is_ours = kind is FlatDTensor or kind is LazyReduction
        return kind.__torch_dispatch__.__func__ if is_ours else known(self, kind)

    holder.find = find


if torch.__version__ < "2.12":
    _call_dispatch_of_subclasses()


def _from_local(
    torch_s: Callable[..., DTensor],
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **options: Any,
) -> DTensor:
    """Do as torch's ``DTensor.from_local``; make a ``FlatDTensor`` of a flat range that has its parameter's placements.

    Averages of weights keep local tensors, and call ``from_local`` on them; torch's would read the range as rows.

    Raises:
        ValueError: a flat range has the placements of rows.
    """
    spec: Any = next((each.spec for each in placements or () if isinstance(each, FlatShard)), None)
    shape = options.get("shape")
    is_range = spec is not None and not isinstance(spec, str) and local_tensor.shape == spec.local_shape
    if is_range and shape in (None, spec.global_shape):
        return flat_dtensor(local_tensor, spec)
    if shape is not None and len(shape) != local_tensor.ndim and not local_tensor.is_meta:
        raise ValueError(
            f"DTensor.from_local was given {list(local_tensor.shape)} as a part of {list(shape)}: no slice along a "
            "dimension, perhaps a flat range, to_local() of a sharded parameter p or as long as that. Pass "
            "p.placements, which know the range, or copy p itself, p.detach().clone()"
        )
    return torch_s(local_tensor, device_mesh, placements, **options)


DTensor.from_local = staticmethod(functools.partial(_from_local, DTensor.from_local))  # type: ignore[method-assign]
