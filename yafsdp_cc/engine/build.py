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
from yafsdp_cc.wire.exchange import Gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.plan import Division, OwnedParameter, Role

    Prepare: TypeAlias = Callable[[Sequence[OwnedParameter]], None]


class _Kind(NamedTuple):
    """Parameters that can share a flat buffer."""

    dtype: torch.dtype
    trainable: bool


def build(model: nn.Module, division: Division, mesh: DeviceMesh, root: Root, prepare: Prepare, *, keep: bool) -> None:
    """Shard ``model`` in place under ``root``, one unit at a time, so that little of it is whole at once.

    ``prepare`` gives a unit's parameters their values on this rank; ``keep`` gives every block its own weight slot.
    """
    builder = _Builder(mesh, root, prepare)
    units = [Unit(root, spec.name, spec.role, spec.modules, builder.flats(spec.parameters)) for spec in division.units]
    words = sum(len(unit.pieces) for unit in units) + len(division.small) + Journal.width()
    reduce = root.reductions.exchange
    small = SmallGroup(
        builder.small_blocks(division.small),
        words,
        # Its exchange is on the lane of the gradients, and so in their communicator throughout.
        root.gather if reduce.group is root.gather.group else Gather(reduce.group, root.device),
        reduce,
        root.device,
        root.reductions.lane.ticket(),
    )
    own = next((unit for unit in units if unit.role == "root"), None)
    slots: dict[Role, int] = {"block": len(units) if keep else 2, "edge": 1, "root": 1}
    root.adopt(units, small, slots, own)
    for unit in units:
        for module in unit.modules:
            if unit is not own:
                adopt(module, root, unit)
    adopt(model, root, root)
    root.watch(model)
    model.register_load_state_dict_pre_hook(_refuse_assignment)


def _refuse_assignment(module: nn.Module, _: object, __: str, metadata: dict[str, object], *___: object) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            f"load_state_dict(assign=True) on a sharded {type(module).__name__} would cut its parameters off from the "
            "engine: leave assign out, and the values are copied"
        )


class _Builder:
    """Cuts parameters."""

    def __init__(self, mesh: DeviceMesh, root: Root, prepare: Prepare) -> None:
        self._mesh = mesh
        self._root = root
        self._prepare = prepare

    def flats(self, owned: Sequence[OwnedParameter]) -> list[Flat]:
        """The flats of one unit."""
        self._prepare(owned)
        kinds: dict[_Kind, list[OwnedParameter]] = defaultdict(list)
        for each in owned:
            kinds[_Kind(each.parameter.dtype, each.parameter.requires_grad)].append(each)
        return [self._flat(kind.dtype, members) for kind, members in kinds.items()]

    def small_blocks(self, owned: Sequence[OwnedParameter]) -> list[SmallBlock]:
        """The blocks of the small group."""
        self._prepare(owned)
        dtypes: dict[torch.dtype, list[OwnedParameter]] = defaultdict(list)
        for each in owned:
            dtypes[each.parameter.dtype].append(each)
        blocks: list[SmallBlock] = []
        for dtype, members in dtypes.items():
            layout = Layout.of([each.parameter.shape for each in members], 1)
            master = torch.zeros(layout.numel, dtype=dtype, device=self._root.device)
            pieces = []
            for each, extent in zip(members, layout.extents, strict=True):
                piece = Piece(Cut(each.name, each.parameter.shape, self._mesh, None), each.sites, extent)
                piece.span = (extent.offset, extent.end)
                local = master.narrow(0, extent.offset, extent.numel).view(extent.shape)
                self._replace(piece, local, each.parameter, each.parameter.detach())
                pieces.append(piece)
            start = blocks[-1].end if blocks else 0
            blocks.append(SmallBlock(pieces, master, self._compute(dtype), start))
        return blocks

    def _flat(self, dtype: torch.dtype, owned: Sequence[OwnedParameter]) -> Flat:
        root = self._root
        layout = Layout.of([each.parameter.shape for each in owned], root.world)
        master = torch.zeros(layout.chunk, dtype=dtype, device=root.device)
        pieces = []
        for each, extent in zip(owned, layout.extents, strict=True):
            cut = Cut(each.name, each.parameter.shape, self._mesh, layout.bounds(extent))
            piece = Piece(cut, each.sites, extent)
            start, end = piece.span = layout.owned(extent, root.gather.rank)
            first, last = cut.owned
            whole = each.parameter.detach().reshape(-1)
            self._replace(piece, master.narrow(0, start, end - start), each.parameter, whole[first:last])
            pieces.append(piece)
        compute = self._compute(dtype)
        return Flat(pieces, layout, master, compute, root.policy.reduce_dtype or compute)

    def _compute(self, dtype: torch.dtype) -> torch.dtype:
        return self._root.policy.param_dtype or dtype if dtype.is_floating_point else dtype

    @torch.no_grad()
    def _replace(self, piece: Piece, local: Tensor, whole: nn.Parameter, values: Tensor) -> None:
        """Put the sharded parameter where the whole one was, and free that."""
        local.copy_(values)
        parameter = nn.Parameter(flat_dtensor(local, piece.cut), requires_grad=whole.requires_grad)
        parameter.__dict__.update(whole.__dict__)  # what users and frameworks have noted on it
        piece.parameter, piece.local = parameter, local
        piece.install(parameter)
        whole.data = whole.new_empty(0)
