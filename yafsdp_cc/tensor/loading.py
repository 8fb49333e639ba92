"""Sharded parameters get values from state dicts of any form, and memory when they leave the meta device.

With ``load_state_dict(assign=True)`` torch replaces the module's parameter. A sharded parameter must stay a range of
its shard, so the values are copied into the shard; a parameter on the meta device is allocated first. The caller sees
no difference: the assigned tensor and the parameter show the same elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils
import torch.distributed.checkpoint.state_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from yafsdp_cc.engine.param import owner_of
from yafsdp_cc.engine.spec import spec_of
from yafsdp_cc.forms.offload import HostFlatParam
from yafsdp_cc.forms.subclasses import PLAIN, check_plain, subclass_of, with_grad_dtype
from yafsdp_cc.ranks.checks import refused_together
from yafsdp_cc.tensor.dtensor import FlatDTensor, flat_dtensor
from yafsdp_cc.tensor.unwritten import makes_empty, mark_unwritten

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.engine.param import FlatParam, FSDPParam
    from yafsdp_cc.engine.spec import ParamGroupSpec

# Out of the meta device, and to another dtype -------------------------------------------------------------------------


@torch.no_grad()
def apply_to_shards(spec: ParamGroupSpec, fn: Callable[[Tensor], Tensor]) -> None:
    """Give shards on the meta device the memory, and all shards the dtype, that ``fn`` makes of them.

    ``fn`` is the argument of ``nn.Module._apply``: ``torch.empty_like`` on a device, or ``Tensor.to`` a dtype. The
    dtype may change only in groups that have not been gathered or reduced yet, and have no gradients.

    Raises:
        RuntimeError: ``fn`` allocates on a device, and the group's shards belong in host memory.
    """
    for part in spec.parts:
        if (converted := fn(part.sharded)).dtype != part.sharded.dtype:
            _convert(part, converted, spec.policy)
        waiting = [param for param in part.params if param.local.is_meta]
        if waiting:
            _materialize(part, waiting, fn)


def _convert(part: FlatParam, converted: Tensor, policy: MixedPrecisionPolicy) -> None:
    """Make ``converted`` the shard; dtypes of forward and reduces that ``policy`` leaves open become its dtype."""
    part.compute_dtype = policy.param_dtype or converted.dtype
    part.reduce_dtype = policy.reduce_dtype or part.compute_dtype
    part.sharded_grad = None
    if isinstance(part, HostFlatParam) and not converted.is_meta:
        converted = part.host.zeros(converted.numel(), converted.dtype).copy_(converted)
    part.use_sharded(converted)
    for param in part.params:
        local = param.local_range(converted)
        # a parameter that was sharded on the meta device and has no values yet stays on it
        param.local = local.to("meta") if param.local.is_meta else local
        _show(param.parameter, param)


def _materialize(part: FlatParam, params: Sequence[FSDPParam], fn: Callable[[Tensor], Tensor]) -> None:
    """Allocate ``params``, which are on the meta device; other parameters of ``part`` may stay on it for now."""
    if part.sharded.is_meta:
        shard = fn(part.sharded)
        if isinstance(part, HostFlatParam):
            if not shard.is_cpu:
                raise RuntimeError(
                    f"'{part.name}' was sharded with CPUOffloadPolicy and so belongs to host memory, "
                    f'not to {shard.device}: call model.to_empty(device="cpu"), and move the buffers where they are '
                    "used"
                )
            shard = part.host.zeros(shard.numel(), shard.dtype)
        part.use_sharded(shard)
    for param in params:
        param.local = param.local_range(part.sharded)
        _show(param.parameter, param)
        if makes_empty(fn):
            mark_unwritten(param.parameter, param.local)


def _leave_meta(part: FlatParam, param: FSDPParam) -> None:
    device = "cpu" if isinstance(part, HostFlatParam) else part.device
    _materialize(part, [param], functools.partial(torch.zeros_like, device=device))


def _show(tensor: Tensor, param: FSDPParam) -> None:
    """Make ``tensor`` show the elements of ``param``, and remain the same object."""
    fresh = with_grad_dtype(flat_dtensor(param.local, param.spec, tensor.requires_grad), tensor)
    fresh.__dict__.update(vars(tensor) | {"_local_tensor": param.local, "shard_spec": param.spec})
    torch.utils.swap_tensors(tensor, fresh)
    tensor._backward_hooks = tensor._backward_hooks  # registers again hooks that ``swap_tensors`` gave to ``fresh``


@torch.no_grad()
def take_back(specs: Sequence[ParamGroupSpec]) -> None:
    """Move parameters into their shards that were sharded on the meta device and have got memory of their own since.

    ``to_empty`` on a module that is not sharded itself gives its parameters memory of their own, for example when
    adapters are initialised after ``fully_shard``.
    """
    for part in (part for spec in specs for part in spec.parts):
        for param in part.params:
            values = param.parameter._local_tensor  # type: ignore[attr-defined]
            if param.is_held and not values.is_meta and param.local.is_meta and values.dtype == param.local.dtype:
                _leave_meta(part, param)
                param.local.copy_(values)


# load_state_dict(assign=True) ----------------------------------------------------------------------------------------


@torch.no_grad()
def take_over(param: FSDPParam, value: Tensor) -> None:
    """Copy the elements of ``value``, a full tensor or a DTensor, to ``param``, which leaves the meta device for it.

    ``take_over`` is a collective where ``value`` is a DTensor: ranks exchange rows, or gather other placements. The
    DTensor shows the elements of ``param`` afterwards, and its own memory is freed.
    """
    if value is param.parameter or (value.is_meta and param.local.is_meta):
        return
    if value.is_meta:
        raise ValueError(f"'{param.spec.name}' has values, and its new value is on the meta device: leave it out")
    if value.dtype != param.local.dtype:
        raise ValueError(
            f"load_state_dict(assign=True) would make {value.dtype} of '{param.spec.name}', which is sharded as "
            f"{param.local.dtype}: leave assign out to have values cast, or choose the dtype before sharding, with "
            "model.to(dtype)"
        )
    if param.local.is_meta:
        spec = cast("ParamGroupSpec", spec_of(param.unit))
        _leave_meta(next(part for part in spec.parts if param in part.params), param)
    param.parameter.copy_(value)
    if type(value) is DTensor:
        with suppress(RuntimeError):  # other references to ``value`` forbid a swap: leave it unchanged
            _show(value, param)


def follow_assignments(spec: ParamGroupSpec) -> Iterator[Any]:
    """Let hooks on modules copy assigned values into the parameters of ``spec``; yield the handles of the hooks."""
    held: dict[nn.Module, list[tuple[str, FSDPParam]]] = {}
    for param in spec.params:
        for module, attribute in param.sites:
            held.setdefault(module, []).append((attribute, param))
    for module, params in held.items():
        yield module.register_load_state_dict_pre_hook(functools.partial(_take_over_assigned, params))


def _take_over_assigned(
    params: Sequence[tuple[str, FSDPParam]],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: Any,
) -> None:
    """Copy values, if ``assign=True``, into ``params`` and put these into ``state_dict``, for ``module`` to assign."""
    for attribute, param in params:
        value, subclass = state_dict.get(prefix + attribute), subclass_of(param.parameter)
        if subclass is None or not isinstance(value, Tensor) or type(value) in PLAIN or isinstance(value, DTensor):
            continue
        if value.shape != param.parameter.shape:
            raise ValueError(
                f"'{param.spec.name}' is sharded as the bytes of a {subclass.name}, and the state dict has a "
                f"{type(value).__name__} of {list(value.shape)} itself: load it into the plain model, before shard(), "
                "or load a state dict of a sharded model"
            )
    if not metadata.get("assign_to_params_buffers"):
        return
    for attribute, param in params:
        value = state_dict.get(prefix + attribute)
        if not isinstance(value, Tensor) or value.shape != param.parameter.shape:
            continue  # torch's own message explains the mismatch
        if module._parameters.get(attribute) is not param.parameter:
            raise ValueError(
                f"load_state_dict(assign=True) inside whole_parameters, or after '{param.spec.name}' was replaced, "
                "would assign to what is not the sharded parameter: do it outside"
            )
        take_over(param, value)
        state_dict[prefix + attribute] = param.parameter


# torch's state dict functions ----------------------------------------------------------------------------------------


@functools.cache
def patch_torch() -> None:
    """Let torch's state dict functions fill sharded parameters from full state dicts.

    ``shard`` and ``fully_shard`` call ``patch_torch``; later calls do nothing. ``set_optimizer_state_dict`` with
    ``full_state_dict=True``, and ``set_model_state_dict`` with ``broadcast_from_rank0=True``, take from each whole
    tensor the slice along a dimension that a placement names. A flat range is no such slice, and torch has no hook that
    a tensor could implement. ``patch_torch`` replaces three functions:

    * ``torch.distributed._state_dict_utils._distribute_tensors``, which divides what rank 0 has broadcast;
    * ``torch.distributed.checkpoint.state_dict._broadcast_state_dict``, which does so for tensors without dimensions,
      and sends others in the order of their memory (``channels_last``, ``.t()``), which other ranks do not have;
    * ``torch.distributed.checkpoint.state_dict._distribute_state_dict``, which divides what every rank has.

    The replacements fill a ``FlatDTensor`` by ``copy_``, which knows its range, or, on the meta device, allocate the
    parameter and fill it; they handle all other tensors as torch does.
    """
    utils: Any = torch.distributed._state_dict_utils
    state_dict: Any = torch.distributed.checkpoint.state_dict
    scatter = utils._distribute_tensors
    broadcast, distribute = state_dict._broadcast_state_dict, state_dict._distribute_state_dict

    @functools.wraps(scatter)
    def distribute_tensors(local: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            pair = local.get(key)
            if isinstance(pair, tuple) and type(pair[0]) is FlatDTensor:
                local[key] = _filled(*pair)
        scatter(local, keys, *args, **kwargs)

    @functools.wraps(broadcast)
    def broadcast_state_dict(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        scalars = {key: x for key, x in local.items() if type(x) is FlatDTensor and x.dim() == 0}
        for sharded in (x for x in local.values() if type(x) is FlatDTensor):
            check_plain(
                sharded.shard_spec,
                sharded._local_tensor,
                "broadcast_from_rank0=True",
                "leave that out, and load the full state dict on every rank",
            )
        with refused_together(*filter(None, [dist.group.WORLD])):
            if shard := next((key for key, x in full.items() if type(x) is FlatDTensor and not dist.get_rank()), ""):
                raise ValueError(
                    f"broadcast_from_rank0=True takes rank 0's whole tensors, and '{shard}' is sharded: pass what "
                    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) returns"
                )
            full = {key: x.contiguous() if isinstance(x, Tensor) else x for key, x in full.items()}
        broadcast(full, local, *args, **kwargs)
        for key, scalar in scalars.items():
            if isinstance(local.get(key), torch.Tensor):  # torch has put a plain tensor in place of ``scalar``
                local[key] = _filled(scalar, local[key])

    @functools.wraps(distribute)
    def distribute_state_dict(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # copying from a DTensor is a collective: follow the order of ``full``, which is the same on every rank
        filled = [key for key, x in full.items() if type(local.get(key)) is FlatDTensor and isinstance(x, torch.Tensor)]
        for key in filled:
            local[key] = _filled(local[key], full[key])
        distribute({key: x for key, x in full.items() if key not in filled}, local, *args, **kwargs)

    utils._distribute_tensors = distribute_tensors
    state_dict._broadcast_state_dict = broadcast_state_dict
    state_dict._distribute_state_dict = distribute_state_dict


def _filled(target: FlatDTensor, value: Tensor) -> Tensor:
    """Return ``target`` with the elements of ``value``; on the meta device, only a parameter can be filled."""
    owner = owner_of(target.shard_spec)
    if target.is_meta and owner is not None and cast("Tensor", target) is owner.parameter:
        take_over(owner, value.to(target.dtype))
    else:
        target.copy_(value)
    return target
