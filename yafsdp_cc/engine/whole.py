"""Whole parameters outside of a forward: all of them to be read or edited, or one unit after another."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yafsdp_cc.engine.module import ShardedModule, root_of
from yafsdp_cc.engine.tensor import _all_gather, flat_dtensor
from yafsdp_cc.wire.exchange import backend_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yafsdp_cc.engine.flat import Piece
    from yafsdp_cc.engine.root import Root


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
    root = root_of(model)
    check_at_rest(root, "whole_parameters")
    pieces = [*(piece for unit in root.units for piece in unit.pieces), *root.small.pieces]
    wholes = [flat_dtensor(piece.local, piece.cut).uncut() for piece in pieces]
    for piece, whole in zip(pieces, wholes, strict=True):
        piece.install(nn.Parameter(whole, requires_grad=piece.parameter.requires_grad))
    try:
        yield
    finally:
        for piece, whole in zip(pieces, wholes, strict=True):
            if write:
                with torch.no_grad():
                    piece.parameter.copy_(whole)
            piece.install(piece.parameter)


@torch.no_grad()
def whole_units(root: Root, *, everywhere: bool) -> Iterator[tuple[Piece, Tensor | None]]:
    """Every parameter with its whole value, unit by unit in module order, and the small ones last.

    Of a tensor-parallel one, the box that this rank has held.
    Values are plain, in the parameter's own dtype and shape, on the engine's device (in host memory where gloo brings
    them to one rank), and gone when the next is asked for: take a copy. At any time a rank holds one buffer of a unit,
    or none where it receives nothing. A collective: go through it to the end, on all ranks.

    Args:
        root: of a sharded model.
        everywhere: give every rank the values; otherwise only the first of the mesh, and the others None.
    """
    replicas = root.drafts[0].ranks.replicas
    is_first = replicas is None or replicas.rank() == 0
    receives = everywhere or (is_first and root.gather.rank == 0)
    for unit in root.units:
        for flat in unit.flats:
            takes_part = everywhere or is_first
            buffer = _gathered(flat.master.to(root.device), root.gather.group, everywhere) if takes_part else None
            for piece in flat.pieces:
                extent = piece.extent
                yield piece, None if buffer is None else buffer[extent.offset : extent.end].view(extent.shape)
            del buffer  # before there is another
    for piece in root.small.pieces:
        yield piece, piece.local.detach() if receives else None


def first_of(root: Root) -> bool:
    """Whether this rank is the first of all that hold a part of the model."""
    replicas = root.drafts[0].ranks.replicas
    divided = [piece.cut.parallel for draft in root.drafts for piece in draft.pieces]
    return (
        root.gather.rank == 0
        and (replicas is None or replicas.rank() == 0)
        and all(parallel is None or parallel.is_first for parallel in divided)
    )


def ranks_of_model(root: Root) -> list[int]:
    """The global ranks that hold a part of the model."""
    meshes = [piece.cut.global_mesh for draft in root.drafts for piece in draft.pieces]
    largest = max(meshes, key=lambda mesh: mesh.size(), default=root.drafts[0].ranks.mesh)
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
        _all_gather(buffer.view(torch.uint8), part, group=group)
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
    root = root_of(model)
    for piece in (piece for draft in root.drafts for piece in draft.pieces):
        module, attribute = piece.sites[0]
        if module._parameters.get(attribute) is not piece.parameter:
            raise RuntimeError(
                f"{what} inside whole_parameters, or after '{piece.cut.name}' was replaced, would write to what is not "
                "the sharded parameter: do it outside"
            )


def check_at_rest(root: Root, what: str) -> None:
    """Raise a ``RuntimeError`` inside a forward or a backward."""
    if root.passage is not None or torch._C._current_graph_task_id() != -1:
        raise RuntimeError(f"{what} inside a forward or backward: weights are whole there already")
