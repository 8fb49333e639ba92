"""What a choice of codecs has to know: how fast links and codecs are, and what codecs leave out. All by trial."""

from __future__ import annotations

import time
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.feedback import Residual

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yafsdp_cc.wire.codec import Codec
    from yafsdp_cc.wire.pairs import Pair
    from yafsdp_cc.wire.post import Post

TRIAL = 1 << 20
"""Bytes that a rank sends in a trial, at most: a tenth of a second at 100 Mbit/s."""
_SMALL = 64
_MOST = 8
"""Messages one after the other, where they are small: what a switch lets through at once shall not make a link fast."""
_ROUNDS, _SLOW_ROUNDS, _QUICK = 4, 2, 0.02
"""Of which the best counts: what else a machine does at that moment shall not make a link slow. Fewer where one takes
more than so many seconds."""
_PAIR = 1 << 17
"""Bytes that two ranks give each other in a trial, at least: less would not fill a link."""
PAIRED = range(3, 17)
"""Numbers of ranks of which each pair is tried out: of two there is one, and of many there are too many."""


class Pace(NamedTuple):
    """Of the links between ranks."""

    delay: float
    """Seconds that an exchange takes however little it says."""
    per_byte: float
    """More seconds for each byte that a rank sends."""

    def seconds(self, sent: int) -> float:
        return self.delay + self.per_byte * sent


def pace_of(post: Post, room: int) -> Pace:
    """Try the links out by messages of up to ``room`` bytes, the way that those of a backward go. A collective.

    Nothing else may be under way. Ranks that begin at different times would see each other's delay in the place of the
    link's, so all begin together; and all go by the slowest.
    """
    peers = post.world - 1
    size = max(min(room, TRIAL // peers) // _SMALL * _SMALL, _SMALL)
    times = min(max(TRIAL // (peers * size), 1), _MOST)
    _exchanged(post, _SMALL, 1)
    small, large = _best(post, _SMALL, 1), _best(post, size, times)
    return Pace(small, max(large / times - small, 0.0) / (peers * size))


def paces_between(post: Post, room: int) -> dict[Pair, float]:
    """Seconds for each byte that two ranks give each other while all others are silent, of every two. A collective.

    One pair after the other: where two share a link, as those between the same two machines do, a trial of both at once
    would make them slower than pairs whose turn comes alone. As in ``pace_of``, both ends go by the slower one.

    Args:
        post: whose buffers hold messages of ``room`` bytes.
        room: the same on all ranks.
    """
    pairs = list(combinations(range(post.world), 2))
    size = min((post.world - 1) * room, max(TRIAL // len(pairs), _PAIR)) // _SMALL * _SMALL
    found = {}
    for pair in pairs:
        sizes = [size if {post.rank, peer} == {*pair} else 0 for peer in range(post.world) if peer != post.rank]
        found[pair] = _best(post, size, 1, sizes) / size
    return found


def _best(post: Post, message_bytes: int, times: int, sizes: Sequence[int] | None = None) -> float:
    first = _exchanged(post, message_bytes, times, sizes)
    more = (_ROUNDS if first < _QUICK else _SLOW_ROUNDS) - 1
    return min([first, *(_exchanged(post, message_bytes, times, sizes) for _ in range(more))])


def _exchanged(post: Post, message_bytes: int, times: int, sizes: Sequence[int] | None = None) -> float:
    """Seconds of so many exchanges on the slowest rank, after which all are where they are."""

    def exchange(times: int, sizes: Sequence[int] | None) -> None:
        for _ in range(times):
            for work in post.exchange(message_bytes, asynchronous=True, sizes=sizes):
                work.wait()

    if sizes is not None:  # two begin together, however far apart the slowest links of all have left them
        exchange(1, [min(each, _SMALL) for each in sizes])
    taken = timed(lambda: exchange(times, sizes), post.device)
    slowest = torch.tensor([taken], dtype=torch.float64, device=post.device)
    post.group.allreduce([slowest], dist.ReduceOp.MAX).wait()
    return float(slowest.item())


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that it takes, the device's part too."""
    _settle(device)
    start = time.perf_counter()
    run()
    _settle(device)
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def work_of(
    codec: Codec | None, world: int, chunk: int, wire: torch.dtype, kept: torch.dtype | None, device: torch.device
) -> float:
    """Seconds of one rank's own work for each element that it reduces: to encode, decode and sum; None: to sum alone.

    Args:
        codec: of the messages.
        world: ranks.
        chunk: elements of a message.
        wire: the dtype of gradients.
        kept: the dtype of the residual, if there is one.
        device: where that is done.
    """
    peers = world - 1
    whole = torch.zeros(peers, chunk, dtype=wire, device=device)
    total = torch.zeros(chunk, device=device)
    if codec is None:
        rounded = torch.zeros_like(total)

        def run() -> None:
            total.copy_(whole[0])
            for each in whole:
                total.add_(each if wire == torch.float32 else rounded.copy_(each))
    else:
        messages = torch.zeros(peers, codec.message_bytes(chunk), dtype=torch.uint8, device=device)
        residual = None if kept is None else Residual(peers, chunk, kept, codec.block, device)

        def run() -> None:
            kernels.encode(codec, whole, messages, residual=residual)
            kernels.decode_sum(codec, messages, chunk, whole[0], 0, total)

    return min(timed(run, device) for _ in range(3)) / (world * chunk)


@torch.no_grad()
def left_out(codec: Codec) -> float:
    """The share of the squares of normal numbers that a message leaves out: 0.00005 by int8, 0.016 by int4."""
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(1, 64 * codec.block, generator=draws)
    message = torch.zeros(1, codec.message_bytes(values.shape[1]), dtype=torch.uint8)
    codec.encode(values, None, message)
    said = torch.empty_like(values)
    codec.decode(message, said)
    return ((values - said).square().sum() / values.square().sum()).item()
