"""How fast the links between ranks are, by a trial: over slow ones what is exact is sent as what is encoded.

gloo's all-to-all between two ranks sends one way and then the other, and its broadcasts one after another, at half of
what a network carries or less. Messages of their own use both ways at once, and cost processor time that a fast
network would not give back.
"""

from __future__ import annotations

import time
import weakref

import torch
import torch.distributed as dist

TRIAL = 1 << 20
"""Bytes that each rank sends to the next."""
SLOW = 2e9
"""Bits per second of payload, each way, below which a link is slow."""
ROUNDS = 3
"""Of which the best counts: what else the machine does shall not make a link slow."""

_TAG = 3
_slow: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def is_slow(group: dist.ProcessGroup) -> bool:
    """Whether the links of a gloo group were found to be slow; False of one that was not tried."""
    return _slow.get(group, False)


def try_out(group: dist.ProcessGroup, *others: dist.ProcessGroup) -> None:
    """Find out about a gloo group, once, for ``others`` of the same ranks too. A collective.

    Takes a millisecond where links are fast, and a quarter of a second at 100 Mbit/s.
    """
    if group not in _slow:
        _slow[group] = group.size() > 1 and not _is_fast(group)
    for other in others:
        _slow[other] = _slow[group]


def _is_fast(group: dist.ProcessGroup) -> bool:
    rank, world = group.rank(), group.size()
    sent, received = torch.zeros(TRIAL, dtype=torch.uint8), torch.empty(TRIAL, dtype=torch.uint8)
    seconds = torch.zeros(1)
    group.allreduce([seconds]).wait()  # all begin together
    for _ in range(ROUNDS):
        start = time.perf_counter()
        works = [group.recv([received], (rank - 1) % world, _TAG), group.send([sent], (rank + 1) % world, _TAG)]
        for work in works:
            work.wait()
        seconds.fill_(time.perf_counter() - start)
        group.allreduce([seconds], dist.ReduceOp.MAX).wait()
        if 8 * TRIAL / seconds.item() >= SLOW:
            return True
    return False
