"""What one gather is made of: a collective or two for each flat, issued as one operation of a lane."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.lanes import Marker, Start, Tail, Ticket
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.profiling.spans import Span
    from yafsdp_cc.wire.exchange import Gather


class Send(NamedTuple):
    """One flat's part of it."""

    start: Start
    payload: int
    """Bytes of all ranks' parts."""
    sent_bytes: int
    """Bytes that this rank sends."""
    tail: Tail | None = None
    """What is to be done with what has come."""


def exact(gather: Gather, whole: Tensor, shard: Tensor) -> Send:
    """Gather ``whole`` in its own dtype."""
    return Send(partial(gather.send, whole, shard), whole.nbytes, gather.sent_bytes(whole))


def issue(
    root: Root,
    span: Span,
    ticket: Ticket,
    sends: Sequence[Send],
    *,
    last: Tail | None = None,
    after: Marker | None = None,
) -> None:
    """Start ``sends`` on the lane of gathers once ``after`` is reached; then come their tails, and the ``last``."""
    tails = [send.tail for send in sends if send.tail is not None]
    if last is not None:
        tails.append(last)

    def start(asynchronous: bool) -> list[dist.Work]:
        return [work for send in sends for work in send.start(asynchronous)]

    def tail() -> None:
        for each in tails:
            each()

    with span.of(sum(send.payload for send in sends)):
        root.gather_lane.issue(ticket, start, tail if tails else None, after=after)
    root.counters.gathered_bytes += sum(send.sent_bytes for send in sends)
