"""Whole parameters outside of a forward: to read or edit all of them, one group after another, or for good."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yafsdp_cc.engine.dtensor import all_gather_single, flat_dtensor
from yafsdp_cc.engine.mesh import backend_of
from yafsdp_cc.engine.module import ShardedModule, is_root, make_plain, require_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.state import FSDPState

Model = TypeVar("Model", bound=nn.Module)

_OURS = ("_local_tensor", "shard_spec", "_is_param")
"""What the ``__dict__`` of a sharded parameter holds beside the notes of users and frameworks."""


@contextmanager
def whole_parameters(model: nn.Module, *, write: bool = False) -> Iterator[None]:
    """While it is open, the parameters of a sharded ``model`` are whole and plain, in their own dtype, on every rank.

    Tensor-parallel ones are the DTensors that ``parallelize_module`` has made.
    ``named_parameters()``, attributes and ``state_dict()`` all show them; they are copies of the whole model, so mind
    the memory. A collective: enter on all ranks.

    Args:
        model: what was given to ``shard``.
        write: keep what was changed; every rank must make the same changes, and each keeps those to its own part.

    Raises:
        ValueError: ``model`` is not sharded.
        RuntimeError: entered inside a forward or a backward.
    """
    state = require_state(model)
    check_at_rest(state, "whole_parameters")
    wholes = [flat_dtensor(param.local, param.spec).unsharded() for param in state.params]
    for param, whole in zip(state.params, wholes, strict=True):
        param.set_parameter(nn.Parameter(whole, requires_grad=param.parameter.requires_grad))
    try:
        yield
    finally:
        for param, whole in zip(state.params, wholes, strict=True):
            if write:
                with torch.no_grad():
                    param.parameter.copy_(whole)
            param.set_parameter(param.parameter)


@torch.no_grad()
def whole_params_by_group(state: FSDPState, *, everywhere: bool) -> Iterator[tuple[FSDPParam, Tensor | None]]:
    """Yield every parameter with its whole value, group by group in module order, and the replicated ones last.

    Of a tensor-parallel one, the local tensor that this rank has held. Values are plain, in the parameter's own dtype
    and shape, on the engine's device (in host memory where gloo brings them to one rank), and gone when the next one is
    asked for: take a copy. At any time a rank holds one buffer of a group, or none where it receives nothing. A
    collective: go through it to the end, on all ranks.

    Args:
        state: of a sharded model.
        everywhere: give every rank the values; otherwise only the first of the mesh, and the others None.
    """
    info = state.info
    is_first_replica = info.replicate_group is None or info.replicate_group.rank() == 0
    receives = everywhere or (is_first_replica and info.shard_group.rank() == 0)
    for flat in state.flats:
        takes_part = everywhere or is_first_replica
        buffer = _gathered(flat.sharded.to(state.device), info.shard_group, everywhere) if takes_part else None
        for param in flat.params:
            extent = param.extent
            yield param, None if buffer is None else buffer[extent.offset : extent.end].view(extent.shape)
        del buffer  # before there is another
    for param in state.replicated.params:
        yield param, param.local.detach() if receives else None


def is_first_of_model(state: FSDPState) -> bool:
    """Return whether this rank is the first of all that hold a part of the model."""
    info = state.info
    parallel = [param.spec.tensor_parallel for param in state.params]
    return (
        info.shard_group.rank() == 0
        and (info.replicate_group is None or info.replicate_group.rank() == 0)
        and all(each is None or each.is_first for each in parallel)
    )


def ranks_of_model(state: FSDPState) -> list[int]:
    """Return the global ranks that hold a part of the model."""
    meshes = [param.spec.global_mesh for param in state.params]
    largest = max(meshes, key=lambda mesh: mesh.size(), default=state.info.mesh)
    members: list[int] = largest.mesh.flatten().tolist()
    return members


def _gathered(shard: Tensor, group: dist.ProcessGroup, everywhere: bool) -> Tensor | None:
    if not everywhere and backend_of(group, shard.device) != "nccl":
        shard = shard.cpu()  # gloo sends messages from host memory only
    part = shard.view(torch.uint8)  # bytes: not every dtype is carried
    if not everywhere and group.rank() > 0:
        _complete([dist.P2POp(dist.isend, part, group=group, group_peer=0)])
        return None
    buffer = shard.new_empty(shard.numel() * group.size())
    if everywhere:
        all_gather_single(buffer.view(torch.uint8), part, group=group)
        return buffer
    # One message from each, right to its place: a gather would receive into a second buffer.
    own, *parts = buffer.view(torch.uint8).view(group.size(), -1)
    own.copy_(part)
    _complete([dist.P2POp(dist.irecv, part, group=group, group_peer=peer) for peer, part in enumerate(parts, start=1)])
    return buffer


def _complete(messages: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def check_shows_shards(model: nn.Module, what: str) -> None:
    """Raise a ``RuntimeError`` inside ``whole_parameters``, whose copies ``what`` would write to."""
    if not isinstance(model, ShardedModule):
        return
    for param in (param for spec in require_state(model).specs for param in spec.params):
        module, attribute = param.sites[0]
        if module._parameters.get(attribute) is not param.parameter:
            raise RuntimeError(
                f"{what} inside whole_parameters, or after '{param.spec.name}' was replaced, would write to what is "
                "not the sharded parameter: do it outside"
            )


def check_at_rest(state: FSDPState, what: str) -> None:
    """Raise a ``RuntimeError`` inside a forward or a backward."""
    if state.iteration is not None or torch._C._current_graph_task_id() != -1:
        raise RuntimeError(f"{what} inside a forward or backward: weights are whole there already")


def unshard_model(model: Model, *, rank0_only: bool = False, device: torch.device | str | None = None) -> Model:
    """Undo ``shard``: whole, plain parameters again, the model's own classes, none of the engine's hooks.

    A collective, one group at a time: beside the plain model a rank holds its shards and one group. Gradients are
    dropped. An optimizer goes on holding the sharded parameters, and their memory: make a new one.

    Args:
        model: what was given to ``shard``.
        rank0_only: whole parameters on the first rank of the mesh alone; elsewhere they are on the meta device.
        device: where parameters and buffers shall be; None: where they were. ``"cpu"`` is for models that are larger
            than one GPU.

    Returns:
        The same object.

    Raises:
        ValueError: ``model`` is not what was given to ``shard``.
        RuntimeError: called inside a forward or a backward.
    """
    state = require_state(model)
    check_at_rest(state, "unshard_model")
    if not is_root(model):
        raise ValueError(f"this {type(model).__name__} is a part of a sharded model: unshard the whole of it")
    _replace_parameters(state, rank0_only, device)
    for module in list(model.modules()):
        if isinstance(module, ShardedModule):
            make_plain(module)
        if device is not None:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
    state.retire()
    del state
    gc.collect()  # groups and their buffers refer to each other
    return model


def _replace_parameters(state: FSDPState, rank0_only: bool, device: torch.device | str | None) -> None:
    for param, whole in whole_params_by_group(state, everywhere=not rank0_only):
        sharded, parallel = param.parameter, param.spec.tensor_parallel
        if whole is None:
            values = torch.empty(param.spec.shape, dtype=sharded.dtype, device="meta")
        else:
            values = whole.to(device or sharded.device, copy=True)
        if parallel is not None:
            values = parallel.wrap_unsharded(values)
        plain = nn.Parameter(values, requires_grad=sharded.requires_grad)
        plain.__dict__.update({name: note for name, note in vars(sharded).items() if name not in _OURS})
        param.set_parameter(plain)
