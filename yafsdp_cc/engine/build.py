"""From a plain model to a sharded one: each unit's parameters are made equal on all ranks, cut, and let go."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from yafsdp_cc.engine.flat import Flat, Piece
from yafsdp_cc.engine.journal import Journal
from yafsdp_cc.engine.layout import Layout
from yafsdp_cc.engine.module import adopt
from yafsdp_cc.engine.small import SmallBlock, SmallGroup
from yafsdp_cc.engine.tensor import Cut, flat_dtensor
from yafsdp_cc.engine.unit import Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.plan import Division, OwnedParameter, Role


class _Kind(NamedTuple):
    """Parameters that can share a flat buffer."""

    dtype: torch.dtype
    trainable: bool


def build(model: nn.Module, division: Division, mesh: DeviceMesh, root: Root, *, keep: bool) -> None:
    """Shard ``model`` in place under ``root``. ``keep``: every block has a weight slot of its own."""
    units = [
        Unit(root, spec.name, spec.role, spec.modules, _flats(spec.parameters, mesh, root)) for spec in division.units
    ]
    pieces = sum(len(unit.pieces) for unit in units) + len(division.small)
    blocks = _small_blocks(division.small, mesh, root)
    small = SmallGroup(
        blocks, pieces + Journal.width(), root.gather, root.reduce, root.device, root.reduce_lane.ticket()
    )
    own = next((unit for unit in units if unit.role == "root"), None)
    slots: dict[Role, int] = {"block": len(units) if keep else 2, "edge": 1, "root": 1}
    root.adopt(units, small, slots, own)
    for unit in units:
        for module in unit.modules:
            if unit is not own:
                adopt(module, root, unit)
    adopt(model, root, root)


def _compute_dtype(dtype: torch.dtype, root: Root) -> torch.dtype:
    return root.policy.param_dtype or dtype if dtype.is_floating_point else dtype


def _group(owned: Iterable[OwnedParameter]) -> dict[_Kind, list[OwnedParameter]]:
    groups: dict[_Kind, list[OwnedParameter]] = defaultdict(list)
    for each in owned:
        groups[_Kind(each.parameter.dtype, each.parameter.requires_grad)].append(each)
    return groups


def _flats(owned: Sequence[OwnedParameter], mesh: DeviceMesh, root: Root) -> list[Flat]:
    return [_flat(kind, members, mesh, root) for kind, members in _group(owned).items()]


@torch.no_grad()
def _flat(kind: _Kind, owned: Sequence[OwnedParameter], mesh: DeviceMesh, root: Root) -> Flat:
    layout = Layout.of([each.parameter.shape for each in owned], root.world)
    master = torch.zeros(layout.chunk, dtype=kind.dtype, device=root.device)
    pieces = []
    for each, extent in zip(owned, layout.extents, strict=True):
        bounds = layout.bounds(extent)
        cut = Cut(each.name, each.parameter.shape, mesh, bounds)
        piece = Piece(cut, each.sites, extent)
        start, end = piece.span = layout.owned(extent, root.gather.rank)
        local = master.narrow(0, start, end - start)
        first, last = cut.owned
        local.copy_(each.parameter.detach().reshape(-1)[first:last])
        _replace(piece, local, kind.trainable, each)
        pieces.append(piece)
    compute = _compute_dtype(kind.dtype, root)
    return Flat(pieces, layout, master, compute, root.policy.reduce_dtype or compute)


@torch.no_grad()
def _small_blocks(owned: Sequence[OwnedParameter], mesh: DeviceMesh, root: Root) -> list[SmallBlock]:
    by_dtype: dict[torch.dtype, list[OwnedParameter]] = defaultdict(list)
    for each in owned:
        by_dtype[each.parameter.dtype].append(each)
    blocks: list[SmallBlock] = []
    for dtype, members in by_dtype.items():
        layout = Layout.of([each.parameter.shape for each in members], 1)
        master = torch.zeros(layout.numel, dtype=dtype, device=root.device)
        pieces = []
        for each, extent in zip(members, layout.extents, strict=True):
            piece = Piece(Cut(each.name, each.parameter.shape, mesh, None), each.sites, extent)
            piece.span = (extent.offset, extent.end)
            local = master.narrow(0, extent.offset, extent.numel).view(extent.shape)
            local.copy_(each.parameter.detach())
            _replace(piece, local, each.parameter.requires_grad, each)
            pieces.append(piece)
        start = blocks[-1].end if blocks else 0
        blocks.append(SmallBlock(pieces, master, _compute_dtype(dtype, root), start))
    return blocks


def _replace(piece: Piece, local: Tensor, trainable: bool, owned: OwnedParameter) -> None:
    """Put the sharded parameter where the whole one was."""
    parameter = nn.Parameter(flat_dtensor(local, piece.cut), requires_grad=trainable)
    parameter.__dict__.update(owned.parameter.__dict__)  # what users and frameworks have noted on it
    piece.parameter, piece.local = parameter, local
    piece.install(parameter)
