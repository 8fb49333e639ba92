"""Sums over replicas: what the shard's ranks have summed, summed once more across those that hold the same part.

    gradient slot ── sum over the shard's ranks ──► partial sum ── all-reduce over replicas ──► divided, into ``.grad``

Partial sums stay and grow until a backward that is to sum over replicas, so that micro-batches before it cross the
slow network once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import AllreduceOptions

from yafsdp_cc.engine.compressed import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.compressed import Compressed
    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.lanes import Lane, Ticket
    from yafsdp_cc.wire.shared import SharedSum


class Partial:
    """The partial sum of one flat (chunk elements, fp32 or fp64), and which of its parameters were used."""

    def __init__(self, flat: Flat, device: torch.device, ticket: Ticket) -> None:
        dtype = torch.float64 if flat.wire == torch.float64 else torch.float32
        self.sum = torch.zeros(flat.layout.chunk, dtype=dtype, device=device)
        self.ticket = ticket
        self.used: list[bool] | None = None
        """Of each piece, whether this rank has written a gradient; None while the sum is empty."""

    def add(self, totals: Iterable[tuple[int, Tensor]], used: list[bool]) -> None:
        """Take in the sum of one backward, in parts: where each begins, and it."""
        for start, total in totals:
            part = self.sum.narrow(0, start, total.numel())
            if self.used is None:
                part.copy_(total)
            else:
                part.add_(total)
        self.used = used if self.used is None else [a or b for a, b in zip(self.used, used, strict=True)]


class Replicas:
    """The ranks that hold the same part, and the partial sums that they have not shared yet."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, lane: Lane, compressed: Compressed | None = None
    ) -> None:
        self._compressed = compressed if compressed is not None and compressed.over_replicas else None
        self._encoded: dict[Flat, SharedSum] = {}
        self.group = group
        self.device = device
        self.world: int = group.size()
        self.sums = True
        """Whether a backward sums over replicas, or leaves its partial sums for a later one."""
        self._lane = lane
        self._options = AllreduceOptions()
        self._partials: dict[Flat, Partial] = {}

    def reserve(self, flat: Flat, rank: int) -> None:
        """Make the partial sum of ``flat``, if there is none, where this is ``rank`` of the shard."""
        if flat in self._partials:
            return
        self._partials[flat] = Partial(flat, self.device, self._lane.ticket())
        self._encode(flat, rank)

    def _encode(self, flat: Flat, rank: int) -> None:
        compressed = self._compressed
        if compressed is not None and compressed.encodes(flat):
            name, device = flat.pieces[0].cut.name, self.device
            self._encoded[flat] = compressed.sum_for(flat, self.group, rank, device, name)

    def encode_anew(self, flat: Flat, rank: int) -> None:
        """Let what is now said to be its codec encode the partial sums of ``flat``; nothing is under way."""
        if (before := self._encoded.get(flat)) is not None:
            self._encode(flat, rank)
            self._encoded[flat].owed = before.owed

    def take_over(self, other: Replicas) -> None:
        """What was said to ``other`` holds here too."""
        self.sums = other.sums
        for flat, encoded in other._encoded.items():
            if flat in self._encoded:
                self._encoded[flat].owed = encoded.owed

    def take(
        self,
        flat: Flat,
        totals: Iterable[tuple[int, Tensor]],
        used: list[bool],
        land: Callable[[Flat, Tensor, list[bool]], None],
    ) -> int:
        """Add to the partial sum, and if it is time share it; ``land`` then gets the whole sum. The bytes sent."""
        partial = self._partials[flat]
        partial.ticket.wait()
        partial.add(totals, used)
        return self._share(flat, partial, land) if self.sums else 0

    def _share(self, flat: Flat, partial: Partial, land: Callable[[Flat, Tensor, list[bool]], None]) -> int:
        """Sum over replicas, and then ``land``; the bytes sent."""
        encoded, compressed = self._encoded.get(flat), self._compressed
        if compressed is None or not compressed.is_warm:
            encoded = None
        exact = None
        if encoded is not None and compressed is not None and compressed.phase is Phase.BOTH:
            exact = flat.exact
        before = exact.clone() if exact is not None and flat.holds_exact else None  # of other sums in this step

        def start(asynchronous: bool) -> list[dist.Work]:
            if compressed is not None:
                compressed.prepare(flat, partial.sum)
            if encoded is None:
                return self.send(partial.sum, asynchronous)
            if exact is not None:
                exact.copy_(partial.sum)
            works = encoded.send(partial.sum, asynchronous)
            return works if exact is None else [*works, *self.send(exact, asynchronous)]

        def tail() -> None:
            wrote, partial.used = partial.used, None
            assert wrote is not None
            if encoded is not None:
                encoded.finish(partial.sum)
            if exact is not None:
                exact.div_(flat.divisor.tensor)
            if exact is not None and before is not None:
                exact.add_(before)
            land(flat, partial.sum, wrote)

        sent = self.sent_bytes(partial.sum) if encoded is None else encoded.sent_bytes()
        self._lane.issue(partial.ticket, start, tail)
        return sent if exact is None else sent + self.sent_bytes(exact)

    def send(self, total: Tensor, asynchronous: bool) -> list[dist.Work]:
        """Sum ``total`` over replicas, in place."""
        self._options.asyncOp = asynchronous
        work = self.group.allreduce([total], self._options)
        return [] if work is None else [work]

    def settle(self) -> None:
        """See all that was shared through."""
        for partial in self._partials.values():
            partial.ticket.wait()

    def forget(self) -> None:
        """Drop partial sums, those under way too."""
        for partial in self._partials.values():
            partial.ticket.abandon()
            partial.used = None
        for encoded in self._encoded.values():
            encoded.forget()

    def sent_bytes(self, total: Tensor) -> int:
        """Bytes that this rank sends to sum ``total``: it is cut among the replicas, summed and put together again."""
        return 2 * total.nbytes // self.world * (self.world - 1)

    @property
    def is_idle(self) -> bool:
        """Whether there is no partial sum that was not shared."""
        return all(partial.used is None for partial in self._partials.values())

    @property
    def owned_bytes(self) -> int:
        encoded = sum(each.owned_bytes for each in self._encoded.values())
        return encoded + sum(partial.sum.nbytes for partial in self._partials.values())

    def encoded_of(self, flat: Flat) -> SharedSum | None:
        """How the partial sums of ``flat`` are shared once the warm-up is over, if they are encoded then."""
        return self._encoded.get(flat)

    def wire_bytes(self) -> int:
        """Bytes that this rank sends to sum all partial sums once, when nothing is in its warm-up any more."""
        return sum(
            self._encoded[flat].planned_bytes() if flat in self._encoded else self.sent_bytes(partial.sum)
            for flat, partial in self._partials.items()
        )
