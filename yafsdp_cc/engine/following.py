"""Whole weights that every rank keeps in a slot, and how they follow their shards: by what changed, said in few bits.

    gathered exactly    at first, and when something else than optimizer steps has changed the shards
    told the change     when steps alone have (engine.steps); what few bits leave out is said by later changes

So a forward sees weights that are near those of the optimizer, and on all ranks the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.steps import BEHIND, UNKNOWN, watch
from yafsdp_cc.engine.tensor import flat_dtensor
from yafsdp_cc.engine.windows import ENCODED
from yafsdp_cc.wire.change import Padding
from yafsdp_cc.wire.shortfall import Shortfall, said_of_noise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.lanes import Start
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.engine.supply import Supply
    from yafsdp_cc.engine.tensor import FlatDTensor
    from yafsdp_cc.wire.change import EncodedChange


class Following:
    """The weights in one unit's home slot."""

    def __init__(self, supply: Supply, change: EncodedChange) -> None:
        self._supply = supply
        self._change = change
        self.flats: Sequence[Flat] = [flat for flat in supply.flats if flat.compute in ENCODED]
        self.shortfalls: dict[Flat, Shortfall] = {}
        """Of messages, where somebody wants to know."""
        watch(self.flats)
        self._padding = {}
        for flat in self.flats:
            change.room.reserve(flat.layout.chunk, flat.compute)
            extents = [(extent.offset, extent.end) for extent in flat.layout.extents]
            place = supply.gather.world, supply.gather.rank
            self._padding[flat] = Padding(extents, flat.layout.chunk, *place, change.codec.block, supply.root.device)

    @property
    def stamp(self) -> tuple[int, ...]:
        """The versions of what is kept."""
        slot = self._supply.home.slot
        return slot.stamp if slot.owner is self._supply else (UNKNOWN,) * len(self._supply.flats)

    def start(self, flat: Flat, before: int, message: Tensor, whole: Tensor) -> Start | None:
        """What tells ``whole``, of version ``before``, how the shards have changed; None: gather them exactly."""
        if flat.always_exact or flat.steps is None or not flat.steps.lead(before, flat.master._version):
            return None
        gather, shortfall = self._supply.gather, self.shortfalls.get(flat)
        return partial(self._change.send, message, whole, flat.master, self._padding[flat], gather, shortfall)

    def watch(self, flat: Flat) -> Shortfall:
        """Look at messages of a flat's changes from the next one on, until ``shortfalls`` has none of it."""
        codec = self._change.codec
        self.shortfalls[flat] = shortfall = Shortfall(self._supply.root.device, said_of_noise(codec.name, codec.block))
        return shortfall

    def kept(self, flat: Flat) -> tuple[Tensor, bool] | None:
        """This rank's chunk of the kept weights, and whether the next forward is told of steps since.

        None where the next forward sees the shards' own values.
        """
        supply, steps = self._supply, flat.steps
        if not supply.root.is_warm or steps is None or not steps.known:
            return None
        place, now = supply.flats.index(flat), flat.master._version
        before = self.stamp[place]
        if before != now and not steps.lead(before, now):
            return None
        supply.root.journal.wait(supply.home.slot.ready)
        return self._change.gather.own(supply.home.wholes[place]), before != now

    def resume(self, flat: Flat, parts: Mapping[str, Tensor], behind: bool) -> None:
        """Keep what ``kept`` once returned, given by the names of parameters. A collective."""
        supply, gather, lane = self._supply, self._change.gather, self._supply.root.gather_lane
        slot, place, now = supply.home.slot, supply.flats.index(flat), flat.master._version
        if not supply.root.is_warm or slot.users or flat.steps is None:
            return  # the next gather is exact: none is encoded yet, or somebody reads what is there
        supply.root.journal.wait(slot.ready)
        whole = supply.home.wholes[place]
        own = gather.own(whole).zero_()
        for piece in flat.pieces:
            piece.range_of(own).copy_(parts[piece.cut.name])
        lane.follow(lane.reached())
        lane.issue(slot.ready, partial(gather.exchange, whole, own), after=slot.free)
        supply.root.journal.write(supply.gather_note)
        supply.root.counters.gathered_bytes += gather.sent_bytes(whole)
        supply.root.journal.wait(slot.ready)
        stamp = list(self.stamp)
        stamp[place] = BEHIND if behind else now
        flat.steps.resume(stamp[place], now)
        slot.owner, slot.stamp = supply, tuple(stamp)
        slot.fills += 1


@torch.no_grad()
def kept_weights(root: Root) -> dict[str, FlatDTensor]:
    """Weights that ranks keep and the next forward builds on, cut like the parameters, by full names."""
    found = {}
    for following, flat in all_following(root):
        if (kept := following.kept(flat)) is not None:
            for piece in flat.pieces:
                found[piece.cut.name] = flat_dtensor(piece.range_of(kept[0]).contiguous(), piece.cut)
    return found


def names_behind(root: Root) -> list[str]:
    """Of the parameters in ``kept_weights``, those whose last steps are still to be told; alike on all ranks."""
    return [
        piece.cut.name
        for following, flat in all_following(root)
        if (kept := following.kept(flat)) is not None and kept[1]
        for piece in flat.pieces
    ]


def room_for_kept(root: Root) -> dict[str, FlatDTensor]:
    """Zeros in the form of ``kept_weights``."""
    return {
        piece.cut.name: flat_dtensor(torch.zeros_like(piece.local, dtype=flat.compute, device=root.device), piece.cut)
        for _, flat in all_following(root)
        for piece in flat.pieces
    }


@torch.no_grad()
def restore_kept(root: Root, kept: Mapping[str, FlatDTensor], behind: Sequence[str]) -> None:
    """Keep what ``kept_weights`` once returned, wherever it has all of a buffer. A collective."""
    for following, flat in all_following(root):
        names = [piece.cut.name for piece in flat.pieces]
        if all(name in kept for name in names):
            parts = {name: kept[name].to_local() for name in names}
            following.resume(flat, parts, not set(names).isdisjoint(behind))


def all_following(root: Root) -> Iterator[tuple[Following, Flat]]:
    """All weights that are told of changes, and by what."""
    for unit in root.units:
        if unit.following is not None:
            for flat in unit.following.flats:
                yield unit.following, flat
