"""Residuals as state: cut like the parameters for any number of ranks, and as they are for the same ranks.

A residual is what one rank has still to say to another; how it is divided among ranks means nothing. So what is saved
is its sum over ranks at the owner of each element, divided by their number: a tensor cut like the parameter. Whoever
loads it starts with empty residuals and adds it to the next sum, multiplied by its own number of ranks; nothing that
was to be said is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from yafsdp_cc.compression import AUTO
from yafsdp_cc.engine.ranks import groups
from yafsdp_cc.engine.tensor import flat_dtensor
from yafsdp_cc.wire.chunks import ChunkSum

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.engine.tensor import FlatDTensor
    from yafsdp_cc.wire.shared import SharedSum


@torch.no_grad()
def mean_residuals(root: Root) -> dict[str, FlatDTensor]:
    """What all ranks have still to say of each parameter, per rank, fp32, by full names. A collective.

    In units of gradients of an unscaled loss.
    """
    found = {}
    units = root.drafts[0].ranks.mesh.size() * _loss_scale(root)
    for flat, encoded in encoded_of(root):
        if encoded.residual is None and encoded.owed is None:
            continue
        unsaid = _summed(root, encoded).div_(units)
        for piece in flat.pieces:
            found[piece.cut.name] = flat_dtensor(piece.range_of(unsaid).contiguous(), piece.cut)
    return found


def room_for_residuals(root: Root) -> dict[str, FlatDTensor]:
    """Zeros in the form of ``mean_residuals``."""
    return {
        piece.cut.name: flat_dtensor(torch.zeros_like(piece.local, dtype=torch.float32), piece.cut)
        for flat, _ in encoded_of(root)
        for piece in flat.pieces
    }


@torch.no_grad()
def owe(root: Root, residuals: Mapping[str, FlatDTensor]) -> None:
    """Empty all residuals, and have what ``mean_residuals`` once returned added to the next sums."""
    for flat, encoded in encoded_of(root):
        encoded.forget()
        owed = torch.zeros(flat.layout.chunk, dtype=torch.float32, device=root.device)
        for piece in flat.pieces:
            piece.range_of(owed).copy_(residuals[piece.cut.name].to_local())
        if encoded.momentum is not None:  # fades like the rest of it
            encoded.momentum.values.add_(owed, alpha=encoded.momentum.share / encoded.momentum.beta)
        else:
            # Every replica adds what it owes to the sum over its shard, or all of them the same to the sum over all.
            ranks = root.world if isinstance(encoded, ChunkSum) else root.drafts[0].ranks.mesh.size()
            encoded.owed = owed.mul_(ranks * _loss_scale(root))
        if encoded.residual is not None:
            encoded.residual.clear()


def raw_residuals(root: Root) -> dict[str, Any]:
    """This rank's residuals as they are, with what tells whether they fit."""
    return {
        flat.pieces[0].cut.name: {
            "fits": _form(root, flat, encoded),
            **({} if (residual := encoded.residual) is None else {"values": residual.values.cpu()}),
            **({} if residual is None else {"scales": residual.scales.cpu()}),
            "owed": torch.zeros(0) if (owed := encoded.waiting) is None else owed.cpu(),
            "loss_scale": _loss_scale(root),
            **({} if flat.lowrank is None else {"lowrank": (flat.lowrank.factors.cpu(), flat.lowrank.sends_right)}),
        }
        for flat, encoded in encoded_of(root)
        if encoded.residual is not None and flat.codec != AUTO
    }


@torch.no_grad()
def restore_residuals(root: Root, raw: Mapping[str, Any]) -> bool:
    """Take ``raw_residuals`` of the same ranks; whether they fit, else nothing is changed.

    Where codecs are chosen, those of the checkpoint may not be those of now: what it still had to say is owed.
    """
    if any(flat.codec == AUTO for flat, _ in encoded_of(root)):
        return False
    ours = {pair[0].pieces[0].cut.name: pair for pair in encoded_of(root) if pair[1].residual is not None}
    if ours.keys() != raw.keys() or any(raw[name]["fits"] != _form(root, *pair) for name, pair in ours.items()):
        return False
    for name, (flat, encoded) in ours.items():
        encoded.forget()
        if flat.lowrank is not None:
            factors, flat.lowrank.sends_right = raw[name]["lowrank"]
            flat.lowrank.factors.copy_(factors)
        if encoded.residual is not None:
            encoded.residual.values.copy_(raw[name]["values"])
            encoded.residual.scales.copy_(raw[name]["scales"])
        owed = raw[name]["owed"]
        encoded.owed = owed.to(root.device) if owed.numel() else None
        _multiply(encoded, _loss_scale(root) / raw[name]["loss_scale"])
    return True


@torch.no_grad()
def rescale(root: Root, loss_scale: float) -> None:
    """Bring all residuals into the units of another loss scale."""
    assert root.compressed is not None
    factor, root.compressed.loss_scale = loss_scale / root.compressed.loss_scale, loss_scale
    for _, encoded in encoded_of(root):
        _multiply(encoded, factor)


def _multiply(encoded: ChunkSum | SharedSum, factor: float) -> None:
    if encoded.residual is not None:
        encoded.residual.multiply(factor)
    if encoded.owed is not None:
        encoded.owed.mul_(factor)


def _loss_scale(root: Root) -> float:
    assert root.compressed is not None
    return root.compressed.loss_scale


def encoded_of(root: Root) -> Iterator[tuple[Flat, ChunkSum | SharedSum]]:
    """All that is ever encoded, and by what exchange."""
    for flat in (flat for unit in root.units for flat in unit.flats):
        replicas = root.reductions.replicas
        encoded = root.reductions.encoded_of(flat) or (None if replicas is None else replicas.encoded_of(flat))
        if encoded is not None:
            yield flat, encoded


def _form(root: Root, flat: Flat, encoded: ChunkSum | SharedSum) -> list[Any]:
    ranks = [group.size() for group in groups(root.drafts[0].ranks.mesh)]
    names = [piece.cut.name for piece in flat.pieces]
    residual = encoded.residual
    kept = [] if residual is None else [list(residual.values.shape), str(residual.values.dtype), residual.block]
    factors = 0 if flat.lowrank is None else flat.lowrank.factors.numel()
    return [ranks, names, *kept, factors]


def _summed(root: Root, encoded: ChunkSum | SharedSum) -> Tensor:
    """The sum over all ranks of what they have still to say of this rank's chunk."""
    shard, *replicas = groups(root.drafts[0].ranks.mesh)
    total = encoded.unsaid()
    if isinstance(encoded, ChunkSum):
        parts = torch.empty_like(total)
        dist.all_to_all_single(parts, total, group=shard)
        total = parts.sum(0)
    for group in replicas:
        dist.all_reduce(total, group=group)
    return total
