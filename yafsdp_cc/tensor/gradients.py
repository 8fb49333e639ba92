"""Gradients that autograd brings to sharded parameters outside of the engine, combined over data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial

from yafsdp_cc.forms.subclasses import as_plain
from yafsdp_cc.ranks.mesh import all_groups, all_reduce_over

if TYPE_CHECKING:
    from yafsdp_cc.engine.layout import ShardSpec

GradReduction: TypeAlias = Literal["mean", "sum", "same"]
"""Way to combine data-parallel ranks' gradients; "same": they are equal, and each rank uses its own."""


def reduction_of(spec: ShardSpec, placements: Sequence[Any] | None) -> GradReduction:
    """Return how ranks' gradients are combined if ``placements`` are their ``grad_placements``.

    Raises:
        NotImplementedError: ``placements`` ask for a reduction other than a sum or mean.
    """
    found = () if placements is None else placements[: spec.mesh.ndim]  # placements of tensor parallelism come last
    kinds = {each.reduce_op if isinstance(each, Partial) else "same" for each in found}
    partial = kinds - {"same"}
    if partial - {"sum", "avg"} or len(partial) > 1:
        raise NotImplementedError(f"grad_placements={placements} of {spec}: pass Replicate(), Partial() or nothing")
    return "sum" if partial == {"sum"} else "same" if kinds == {"same"} else "mean"


def reduced(
    spec: ShardSpec, grad: torch.Tensor, groups: Sequence[dist.ProcessGroup], reduction: GradReduction
) -> torch.Tensor:
    """Return the contiguous mean or sum of ``grad`` over the ranks of ``groups``; with "same" the rank's own."""
    world = math.prod(group.size() for group in groups)
    if world == 1 or reduction == "same":
        return grad.contiguous()
    precise = torch.promote_types(grad.dtype, torch.float32)
    total = grad.to(precise, copy=True, memory_format=torch.contiguous_format)
    all_reduce_over(groups, total, dist.ReduceOp.SUM, spec.mesh)
    return (total / world if reduction == "mean" else total).to(grad.dtype)


def own_part(spec: ShardSpec, whole: torch.Tensor, reduction: GradReduction) -> torch.Tensor:
    """Return this rank's elements of the mean or sum of a whole gradient over the data-parallel ranks."""
    whole = as_plain(whole)
    part = whole if spec.tensor_parallel is None else spec.tensor_parallel.local_of(whole)
    own = spec.local_of(reduced(spec, part, all_groups(spec.mesh), reduction))
    return own if spec.bounds is None else own.clone()  # a view would keep the whole gradient alive


def plain_grad(spec: ShardSpec, grad: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of the mean over ranks of ``grad``, a plain gradient of ``global_shape``; if all
    elements are one number, as in the gradient of a sum, the mean of that number."""
    if not any(grad.stride()):
        return _means.of(spec, grad.as_strided((), ()))
    return own_part(spec, grad, "mean")


class _Means:
    """Caches means over ranks of gradients that are one number in all elements, such as the factor of a penalty.

    The terms of a sum over all parameters get the same number, the same tensor: its mean is computed once per backward.
    """

    def __init__(self) -> None:
        self._task = -1
        self._known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, spec: ShardSpec, number: torch.Tensor) -> torch.Tensor:
        """Return the mean of the 0-d tensor ``number`` over ranks. A collective, unless the mean is in the cache."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._known = task, {}
        key = (spec.mesh, number.data_ptr(), number.dtype, number._version)
        if key not in self._known:
            precise = number.double()  # in fp64 the mean of equal numbers is exact
            mean = reduced(spec, precise, all_groups(spec.mesh), "mean").to(number.dtype)
            self._known[key] = (number, mean)  # keep ``number`` alive, or another tensor could get its address
        return self._known[key][1]


_means = _Means()
