"""Operations on sharded tensors besides element-wise ones and norms: initialisation, views, sums, comparisons.

Handlers are called as ``handler(func, args, kwargs)``, like those in ``tensor/dtensor.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._prims_common import infer_size
from torch.distributed.tensor import Replicate

from yafsdp_cc.forms.subclasses import tensors_of
from yafsdp_cc.ranks.mesh import all_groups, all_reduce_over, broadcast_over
from yafsdp_cc.tensor import reductions
from yafsdp_cc.tensor.dtensor import (
    HANDLERS,
    FlatDTensor,
    arguments_of_whole,
    aten,
    check_is_real,
    increment_version,
    operand,
    refused,
    specs_in,
    summand_of,
    wrap,
    written_arguments,
)
from yafsdp_cc.tensor.reductions import LazyReduction
from yafsdp_cc.tensor.refusals import refusal


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``normal_``, ``randn_like`` and the like: every rank draws the whole tensor and keeps its part, so that
    ranks with one seed have the values of the plain tensor."""
    if specs_in(args[1:]):  # sharded probabilities, say, are of this rank's elements alone
        return refused(func, args, kwargs)
    flat: FlatDTensor = args[0]
    spec, local = flat.shard_spec, flat._local_tensor
    drawn = spec.local_of_full(func(local.new_empty(spec.global_shape), *args[1:], **kwargs))
    if written_arguments(func):
        local.copy_(drawn)
        increment_version((local,))
    else:
        flat = wrap(drawn.clone(), spec)
    # ranks that hold the same elements take the values of the first such rank: the ranks' seeds may differ
    groups = all_groups(spec.mesh) if spec.bounds is None else all_groups(spec.mesh)[1:]
    for part in tensors_of(flat._local_tensor):
        broadcast_over(groups, part, spec.mesh)
    if spec.tensor_parallel is not None:
        parallel = spec.tensor_parallel
        broadcast_over(parallel.groups_of(Replicate), flat._local_tensor, parallel.mesh)
    return flat


def _of_own_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``detach``, views of another shape, and ``new_zeros`` and the like of the tensor's own shape."""
    flat, size, *rest = (*args, None)[: max(len(args), 2)]
    local, spec = flat._local_tensor, flat.shard_spec
    if func is aten.detach.default and torch.is_inference_mode_enabled():
        with torch.inference_mode(flat.is_inference()):  # as in torch: an inference tensor only if ``flat`` is one
            return wrap(local, spec)
    if size is not None and tuple(size) != tuple(spec.global_shape):
        if func is aten.expand.default and not spec.shape:
            return refused(func, args, kwargs)
        if spec.tensor_parallel is not None or func._schema.name not in ("aten::view", "aten::_unsafe_view"):
            raise refusal(func, spec, f" of shape {list(size)}")
        # ``spec.bounds`` remain: they count row-major elements, whose order a view keeps
        spec = replace(spec, shape=torch.Size(infer_size(size, spec.numel)))
        return wrap(local.view(spec.local_shape), spec)
    if func._schema.name.startswith("aten::new_"):
        if func is aten.new_empty_strided.default:
            rest = [local.stride()]
        local = func(local, local.shape, *rest, **kwargs)
    return wrap(local, spec)


def _assign_where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
    """Handle ``x[mask] = number`` with a mask of x's shape, which Rprop uses."""
    target, indices, value, *accumulate = args
    mask = indices[0] if len(indices) == 1 else None
    if any(accumulate) or type(target) is not FlatDTensor or type(mask) is not FlatDTensor or mask.dtype != torch.bool:
        raise refusal(func, specs_in(args)[0])
    value = operand(func, target.shard_spec, value)
    target.masked_fill_(mask, value.to(target.device).reshape(()))
    return target


def _concatenate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Handle ``parameters_to_vector``: gather whole tensors and concatenate them."""
    if any(x.dim() != 1 for x in args[0]):
        raise refusal(func, specs_in(args)[0])
    result: torch.Tensor = func([x._full() if isinstance(x, FlatDTensor) else x for x in args[0]], *args[1:], **kwargs)
    return result


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyReduction:
    """Handle the sum or mean of all elements, by a lazy reduction."""
    flat: FlatDTensor = args[0]
    given = arguments_of_whole(func, args, kwargs)
    count = flat.numel() if func._schema.name == "aten::mean" else 1
    dtype = given.get("dtype") or (flat.dtype if flat.is_floating_point() else torch.int64)
    check_is_real(func, flat)
    if count > 1 and not dtype.is_floating_point:
        raise refusal(func, flat.shard_spec, f" of {flat.dtype}", "pass dtype=torch.float32, as torch wants it")

    def of_locals(locals_: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [local.sum(dtype=torch.float64) / count for local in locals_]

    return reductions.reduce_lazily([summand_of(flat, dtype)], reductions.SUM, of_locals)[0]


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Handle ``equal`` and ``allclose`` of tensors sharded alike; all ranks get the same answer by one all-reduce."""
    first, second, *rest = args
    spec = specs_in(args)[0]
    if func is aten.equal.default and first.shape != second.shape:
        return False
    ours = func(operand(func, spec, first), operand(func, spec, second), *rest, **kwargs)
    differs = torch.tensor(float(not ours), device=first.device)
    all_reduce_over(spec.groups, differs, dist.ReduceOp.MAX, spec.mesh)
    return not differs.item()


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].shard_spec.bounds is not None:
        raise refusal(func, args[0].shard_spec)
    return func(args[0]._local_tensor)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle GradScaler's check for infinities: one on any rank is found on all ranks, so that all skip the step."""
    tensors, found_inf, inverse_scale = args
    locals_ = [x._local_tensor if type(x) is FlatDTensor else x for x in tensors]
    specs = specs_in(tensors)
    for kind in {spec.mesh.device_type for spec in specs} - {found_inf.device.type}:
        # gradients are in host memory: wait for the copies of ``found_inf`` and ``inverse_scale`` to it
        torch.get_device_module(kind).synchronize()
    func(locals_, found_inf, inverse_scale)
    increment_version(locals_)
    # Replicas that take steps by themselves have different gradients: reduce ``found_inf`` over replicas, too.
    across = dict.fromkeys(group for spec in specs for group in (*spec.groups, *all_groups(spec.mesh)))
    all_reduce_over(across, found_inf, dist.ReduceOp.MAX, specs[0].mesh)


HANDLERS.update(
    {
        **dict.fromkeys(("detach", "alias", "view", "_unsafe_view", "expand"), _of_own_shape),
        **dict.fromkeys(("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"), _of_own_shape),
        **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _draw),
        **dict.fromkeys(("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_"), _draw),
        **dict.fromkeys(("equal", "allclose"), _equal),
        **dict.fromkeys(("sum", "mean"), _sum),
        "random_": _draw,
        "cat": _concatenate,
        "index_put_": _assign_where,
        "_local_scalar_dense": _item,
        "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    }
)
