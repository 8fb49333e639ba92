"""How fast the links between ranks are, and what is said over the store while it is unknown whether they work.

Over slow links a communicator sends point-to-point messages (``communicator``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from yafsdp_cc.engine.agreement import wait_for_key
from yafsdp_cc.ranks.groups import slow_links

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PROBE_BYTES = 1 << 20
"""Bytes that each rank sends to the next one to measure a link."""
SLOW_LINK = 2e9
"""Bits per second of payload in each direction below which a link is slow."""
PROBE_ROUNDS = 3
"""Number of probes of a link, of which the fastest counts: other load of the machine must not make it look slow."""
_PROBE_TAG = 3
_TIMEOUT = 5.0
"""Seconds that a failing rank waits for the others to read its error in the store, which its process may hold."""


def probe_links(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Measure the links of a gloo group once, for another group of the same ranks as well. A collective.

    gloo's all-to-all between two ranks sends one way and then the other, and its broadcasts follow one another: half of
    what a network carries, or less. Point-to-point messages use both directions at once but cost processor time that a
    fast network would not give back. The probe takes 1 ms on a fast link and 0.25 s at 100 Mbit/s.
    """
    if group not in slow_links:
        slow_links[group] = group.size() > 1 and not _is_fast(group)
    slow_links[other] = slow_links[group]


def _is_fast(group: dist.ProcessGroup) -> bool:
    rank, world = group.rank(), group.size()
    sent = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device="cpu")
    received, seconds = torch.empty_like(sent), torch.zeros(1, dtype=torch.float32, device="cpu")
    group.allreduce([seconds]).wait()  # a barrier: all ranks begin together
    for _ in range(PROBE_ROUNDS):
        start = time.perf_counter()
        works = [
            group.recv([received], (rank - 1) % world, _PROBE_TAG),
            group.send([sent], (rank + 1) % world, _PROBE_TAG),
        ]
        for work in works:
            work.wait()
        seconds.fill_(time.perf_counter() - start)
        group.allreduce([seconds], dist.ReduceOp.MAX).wait()
        if 8 * PROBE_BYTES / seconds.item() >= SLOW_LINK:
            return True
    return False


@contextmanager
def refused_over_store(store: Store, key: str, rank: int, world: int) -> Iterator[None]:
    """Raise on every rank what one rank raises within the block, like ``refused_together``, but without collectives.

    Args:
        key: name of what is done within, the same on the ``world`` ranks that take part and used by no others.
        rank: this rank's number among those that use the store.
        world: how many ranks take part.

    Raises:
        ValueError: on the other ranks, with the message of a rank that raises.
        RuntimeError: a rank neither raises nor leaves the block before the store's timeout.
    """
    key = f"{key}/{store.add(f'{key}/times of {rank}', 1)}"  # all ranks count alike: each use has a key of its own
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:
        refusal = error
        store.set(key, f"rank {rank}: {error}")
    else:
        if store.add(f"{key}/passed", 1) == world:
            store.set(key, "")
        if text := wait_for_key(store, key, world):
            refusal = ValueError(text)
    if refusal is not None:
        if store.add(f"{key}/read", 1) == world:
            store.set(f"{key}/over", "")
        with suppress(RuntimeError):  # the store may be gone with the process that raised first
            store.wait([f"{key}/over"], timedelta(seconds=_TIMEOUT))
        raise refusal
