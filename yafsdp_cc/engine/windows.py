"""A unit's parameters as they lie in a slot: typed views, made once for each pair of unit and slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.layout import align

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.slots import Slot
    from yafsdp_cc.engine.unit import Unit
    from yafsdp_cc.wire.change import EncodedChange
    from yafsdp_cc.wire.encoded import EncodedGather

ENCODED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that may be gathered encoded."""

_START = 128
"""Bytes: where a flat may begin in a slot."""


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end = align(end + size, _START)
    return starts, end


def weight_bytes(flats: Sequence[Flat], encoded: EncodedGather | EncodedChange | None) -> int:
    """Bytes of a weight slot that holds these flats, and the messages that they are gathered by if ``encoded``."""
    wholes = [flat.layout.numel * flat.compute.itemsize for flat in flats]
    return _starts([*wholes, *_message_bytes(flats, encoded)])[1]


def _message_bytes(flats: Sequence[Flat], encoded: EncodedGather | EncodedChange | None) -> list[int]:
    if encoded is None:
        return []
    return [encoded.message_bytes(flat.layout.numel) if flat.compute in ENCODED else 0 for flat in flats]


def gradient_bytes(flats: Sequence[Flat]) -> int:
    """Bytes of a gradient slot that holds these flats."""
    return _starts([flat.layout.numel * flat.wire.itemsize for flat in flats])[1]


def told_of_wholes(units: Sequence[Unit], sums_are_steps: bool) -> str:
    """What it costs to keep whole gradients of ``units`` across micro-batches, and what costs less.

    ``sums_are_steps`` says that no sum may be made but for a step, as where it is of momentum.
    """
    size = sum(gradient_bytes([flat for flat in unit.flats if flat.trainable]) for unit in units)
    cheaper = (
        "Steps with exact sums want them, and zero_stage=1 has them in its plan"
        if sums_are_steps
        else "Left on, each micro-batch is reduced into the shard and costs none"
    )
    return (
        f"set_requires_gradient_sync(False) keeps whole gradients on every rank: {size} bytes more per rank. {cheaper}"
    )


def _carve(slot: Slot, flats: Sequence[Flat], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    numels = [flat.layout.numel for flat in flats]
    starts, _ = _starts([numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)])
    return [slot.typed(*place) for place in zip(starts, numels, dtypes, strict=True)]


def _views(flats: Sequence[Flat], wholes: Sequence[Tensor]) -> list[Tensor]:
    return [
        whole.narrow(0, piece.extent.offset, piece.extent.numel).view(piece.extent.shape)
        for flat, whole in zip(flats, wholes, strict=True)
        for piece in flat.pieces
    ]


class Weights:
    """Whole weights of a unit in a weight slot.

    The slot is filled through ``wholes`` and read through ``views``, which have version counters of their own: to
    autograd, a refill between forward and backward is invisible. The engine sees to it that the slot holds the unit
    again before a saved view is read.
    """

    def __init__(
        self,
        slot: Slot,
        flats: Sequence[Flat],
        encoded: EncodedGather | EncodedChange | None = None,
        *,
        spilled: bool = False,
    ) -> None:
        self.slot = slot
        self.spilled = spilled
        self.wholes = _carve(slot, flats, [flat.compute for flat in flats])
        sizes = _message_bytes(flats, encoded)
        starts, _ = _starts([*(whole.nbytes for whole in self.wholes), *sizes])
        places = zip(starts[len(flats) :], sizes, strict=True)
        self.messages = [slot.typed(start, size, torch.uint8) if size else None for start, size in places]
        """What each flat is gathered by, if encoded; else none."""
        self._aliases = [whole.data for whole in self.wholes]
        self._versions = [alias._version for alias in self._aliases]
        self.views = _views(flats, self._aliases)
        # For ops run again during the backward: leaves that want a gradient where the parameter did.
        self.leaves = [view.detach() for view in self.views]

    def edited(self) -> bool:
        """Whether something has been written through the views since the last time."""
        before, self._versions = self._versions, [alias._version for alias in self._aliases]
        return before != self._versions


class GradientSpace:
    """Whole gradients of a unit in a gradient slot."""

    def __init__(self, slot: Slot, flats: Sequence[Flat]) -> None:
        self.slot = slot
        self.flats = flats
        self.wholes = _carve(slot, flats, [flat.wire for flat in flats])
        self.targets = _views(flats, self.wholes)
        self.gaps = [
            whole.narrow(0, start, end - start)
            for flat, whole in zip(flats, self.wholes, strict=True)
            for start, end in flat.layout.gaps
        ]
