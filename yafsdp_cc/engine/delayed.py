"""Sums over ranks that land one backward late, so that nobody waits for them at the end of the one that sends them.

    caller     ─ backward t ─┬──────────────────────────┬─ step ─ forward t+1 ─ backward t+1 ─┬─────────────────────────
    reduces                  └ land t−1 ─ encode t ─┐                                         └ land t ─ encode t+1 ─┐
    apart                                           └─ exchange t ────────────────────────────▲                      └─

Their messages have buffers, a communicator and a lane of their own: behind them, what the end of a backward waits for
would wait too. All the rest is done on the lane of reduces, as it is for sums that are not late.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from yafsdp_cc.wire.post import Post

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.journal import Journal
    from yafsdp_cc.engine.lanes import Lane, Start
    from yafsdp_cc.wire.exchange import Works


class Apart(NamedTuple):
    """Where exchanges that nobody waits for are issued."""

    group: dist.ProcessGroup
    """A communicator that nothing else uses."""
    lane: Lane


class OwnPost(Post):
    """The messages of one flat, which may be under way while those of others are; sums are made where ``shared`` has
    room for them."""

    def __init__(self, apart: Apart, shared: Post, journal: Journal) -> None:
        super().__init__(apart.group, shared.device)
        self._shared = shared
        self._lane = apart.lane
        self._ticket = apart.lane.ticket()
        self._journal = journal

    def reserve(self, message_bytes: int, part: int) -> None:
        super().reserve(message_bytes, 0)
        self._shared.reserve(0, part)

    def reserve_whole(self, numel: int, message: int) -> None:
        super().reserve_whole(0, message)
        self._shared.reserve_whole(numel, 0)

    def due(self, numel: int) -> Tensor:
        return self._shared.due(numel)

    def total(self, numel: int) -> Tensor:
        return self._shared.total(numel)

    def exchange(self, message_bytes: int, asynchronous: bool) -> Works:
        return self._issue(partial(super().exchange, message_bytes))

    def sum(self, numel: int, asynchronous: bool) -> Works:
        return self._issue(partial(super().sum, numel))

    def _issue(self, start: Start) -> Works:
        """Start it behind what the lane of reduces, whose stream this is called on, has come to."""
        self._lane.issue(self._ticket, start, after=self._lane.reached())
        return []

    def wait(self) -> None:
        self._journal.wait(self._ticket)
