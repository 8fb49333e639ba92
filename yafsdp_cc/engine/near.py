"""Weights that ranks near each other keep between them, and how they follow their shards: told by ranks far away.

    rank                   0    1  │  2    3  │  4    5       two ranks near each other, three times
    is the owner of        a    b  │  c    d  │  e    f
    keeps                 ace  bdf │ ace  bdf │ ace  bdf      in the dtype of the forward

    told, among 0, 2, 4    what a, c and e are, or have changed by: from each one message to each other
    gathered, by 0 and 1   ab, then cd, then ef

Every rank keeps the chunk that it owns, which the next change is counted from, and no other rank near it does. So a
message goes to one rank of each near group alone, and what is gathered before a forward, and again before a backward,
comes from near ranks. All who keep a chunk are told the same of it, so all near groups keep the same.

Wang et al. ("ZeRO++", 2023, section 4.2) gather over all ranks after each step, and keep chunks in a row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.following import Following
from yafsdp_cc.engine.second import SecondShard
from yafsdp_cc.engine.sends import Send, exact, issue
from yafsdp_cc.engine.steps import UNKNOWN
from yafsdp_cc.engine.windows import ENCODED

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.lanes import Lane, Ticket
    from yafsdp_cc.engine.supply import Supply
    from yafsdp_cc.wire.change import EncodedChange


class NearShard(SecondShard):
    """This rank's part of each of a unit's flats, and room for messages that say how it changes.

    Args:
        near: ranks near each other.
        change: among ranks that keep the same part.
        device, flats: as of ``SecondShard``.
        lane: on which they are told.
    """

    def __init__(
        self,
        near: dist.ProcessGroup,
        change: EncodedChange,
        device: torch.device,
        flats: Sequence[Flat],
        lane: Lane,
    ) -> None:
        super().__init__(near, device, flats)
        self.change = change
        self.stamp = (UNKNOWN,) * len(self.parts)
        self.messages = [
            torch.empty(change.message_bytes(part.numel()), dtype=torch.uint8, device=device)
            if part.dtype in ENCODED
            else None
            for part in self.parts
        ]
        self.ready: Ticket = lane.ticket()
        """That the parts are what ``stamp`` says."""

    def send(self, place: int, whole: Tensor) -> Send:
        """Gather the ``place``-th flat from the near ranks, each of which has one chunk in every row."""
        count = self.change.gather.world
        rows = zip(whole.view(count, -1), self.parts[place].view(count, -1), strict=True)
        starts = [partial(self.gather.send, *row) for row in rows]

        def start(asynchronous: bool) -> list[dist.Work]:
            return [work for each in starts for work in each(asynchronous)]

        return Send(start, whole.nbytes, self.gather.sent_bytes(whole))

    @property
    def owned_bytes(self) -> int:
        return super().owned_bytes + sum(message.nbytes for message in self.messages if message is not None)


class NearFollowing(Following):
    """The weights in one unit's second shard."""

    def __init__(self, supply: Supply, second: NearShard) -> None:
        self._second = second
        super().__init__(supply, second.change)

    @property
    def ready(self) -> Ticket:
        return self._second.ready

    @property
    def parts(self) -> Sequence[Tensor]:
        return self._second.parts

    @property
    def stamp(self) -> tuple[int, ...]:
        return self._second.stamp

    def tell(self) -> None:
        """Start what makes the second shard follow its shards, if something has changed them."""
        supply, second, now = self._supply, self._second, self._supply.stamp()
        stale = [place for place, version in enumerate(now) if second.stamp[place] != version]
        if not stale:
            return
        second.ready.settle()
        sends = [self._send(place, second.stamp[place]) for place in stale]
        second.stamp = (UNKNOWN,) * len(now)  # unless this goes well: what is half changed is to be told exactly
        issue(supply.root, supply.change_span, second.ready, sends)
        second.stamp = now

    def _send(self, place: int, before: int) -> Send:
        """Tell of the ``place``-th flat, of version ``before`` where it is kept."""
        supply, change = self._supply, self._change
        flat, part, message = supply.flats[place], self.parts[place], self._second.messages[place]
        start = None
        if message is not None and supply.root.is_warm:
            start = self.start(flat, before, message, part)
        if start is None or message is None:
            supply.root.journal.write(supply.gather_note)
            return exact(change.gather, part, flat.master)
        supply.root.journal.write(supply.change_note)
        return Send(start, message.nbytes, change.sent_bytes(message), partial(change.finish, message, part))

    def told_bytes(self, place: int) -> int:
        """Bytes that this rank sends after a step to tell of the ``place``-th flat."""
        flat, message = self._supply.flats[place], self._second.messages[place]
        if not flat.trainable:
            return 0
        if message is None or flat.always_exact:
            return self._change.gather.sent_bytes(self.parts[place])
        return self._change.sent_bytes(message)

    def _settle(self) -> None:
        super()._settle()
        self._supply.root.journal.wait(self.ready)

    def _resumed(self, stamp: tuple[int, ...]) -> None:
        self._second.stamp = stamp
