"""Preallocated buffers that units take in turn.

A slot has one owner at a time. Its content is made by an operation on the lane (``ready``), and it may be refilled
once its last user is through with it (``free``). Units of one role alternate over the slots of one ring, so unit k
is computed in one slot while unit k + 1 is gathered into the other:

    slot 0   | gather 0 | forward 0 | gather 2 | forward 2 | …
    slot 1              | gather 1  | forward 1 | gather 3 | …

Alternation is what makes it fast; the owner, checked at run time, is what makes it right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.engine.lanes import Lane, Marker
    from yafsdp_cc.plan import Role


class Slot:
    """One buffer: its owner, what its content awaits, and who still uses it."""

    def __init__(self, size: int, device: torch.device, lane: Lane) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.address = self.buffer.data_ptr()
        self.owner: object | None = None
        self.stamp: tuple[int, ...] = ()
        """The versions of what was filled in; where another is wanted, the content is stale."""
        self.fills = 0
        self.users = 0
        """Computations under way that read or write the content."""
        self.ready = lane.ticket()
        self.free: Marker | None = None

    def typed(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements of ``dtype`` from byte ``start`` on."""
        return self.buffer.narrow(0, start, numel * dtype.itemsize).view(dtype)

    def release(self, lane: Lane) -> None:
        """One user is through."""
        self.users = max(self.users - 1, 0)
        self.passed(lane)

    def passed(self, lane: Lane) -> None:
        """Leave the mark that a refill waits for: it comes after all uses so far, on whatever streams they were."""
        self.free = lane.mark(self.free)

    def reset(self) -> None:
        """Forget owner and users, as after an interrupted pass; the content is lost."""
        self.ready.abandon()
        self.owner = None
        self.users = 0


class Ring:
    """The slots of one role."""

    def __init__(self, role: Role, count: int, kept: int, size: int, device: torch.device, lane: Lane) -> None:
        self.role = role
        self.size = size
        self.slots = [Slot(size, device, lane) for _ in range(count)]
        self.kept = [Slot(size, device, lane) for _ in range(kept)]
        """Those that one unit has to itself."""

    def home(self, index: int) -> Slot:
        """The slot of the role's ``index``-th unit."""
        return self.slots[index % len(self.slots)]

    @property
    def owned_bytes(self) -> int:
        return sum(slot.buffer.numel() for slot in (*self.slots, *self.kept))
