"""Checks of the links between ranks: whether they carry what the engine sends, and how fast. Until that is known, ranks
report errors over the store.

Over slow links a communicator sends point-to-point messages (``communicator``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from yafsdp_cc.engine.agreement import wait_for_key
from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.communicator import CommContext, ScratchBuffers
from yafsdp_cc.ranks.groups import backend_of, slow_links

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from yafsdp_cc.engine.communicator import Communicator

PROBE_BYTES = 1 << 20
"""Number of bytes that each rank sends to the next rank to measure a link."""
SLOW_LINK = 2e9
"""Bits per second of payload in each direction below which a link is slow."""
PROBE_ROUNDS = 3
"""Number of probes of a link, of which the fastest counts: other load must not make the link look slow."""
_PROBE_TAG = 3
_TIMEOUT = 5.0
"""Seconds that a failing rank waits for others to read its error in the store, which may end with its process."""


def probe_links(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Measure the links of the gloo group ``group`` once, also for ``other``, of the same ranks. A collective.

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
    group.allreduce([seconds]).wait()  # a barrier, so that all ranks begin to probe together
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


def check_trial_exchange(
    comms: Sequence[tuple[Communicator, Communicator]],
    replicas: Communicator | None,
    verdict: AbstractContextManager[None],
) -> None:
    """Send a few numbers the way that weights and gradients will go, on backends that may not support it.

    The exchange also makes NCCL's communicators, on every rank in the same order and while nothing else is in flight.

    Args:
        comms: communicators of all-gathers and of reduces, for each mesh.
        replicas: communicator of sums over replicas; None without replicas.
        verdict: context that raises one rank's error on all ranks; not entered if nothing is sent.

    Raises:
        ValueError: the exchange fails, or wrong numbers arrive, on any rank.
    """
    tried = [(gather, reduce) for gather, reduce in comms if gather.world > 1 or replicas is not None]
    if all(gather.is_gloo and gather.device.type == "cpu" for gather, _ in tried):
        return
    with verdict:
        # try all communicators before a rank raises, or other ranks would wait for it in the next trial
        dtypes = (torch.float32, torch.bfloat16)
        errors = [_try_exchange(gather, reduce, dtype) for gather, reduce in tried for dtype in dtypes]
        if replicas is not None:
            errors.append(_try_all_reduce(replicas))
        if any(errors):
            raise ValueError("; ".join(filter(None, errors)) + ": a broken backend?")


def _trial_numbers(comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return this rank's summands of a trial sum, and the right sum: [world, n] in fp32, a row for each chunk.

    NCCL adds in the dtype that is sent, and bf16 has no odd numbers above 256, so that sums of ones over more ranks
    round or stop growing. In this sum each element counts at most 256 ranks. Two more elements are the index of the
    chunk in base 128, each from one rank: the one that receives the chunk, and the next one.
    """
    world, rank = comm.world, comm.rank
    counters = 30 + world // 256
    ranks = torch.arange(world, device="cpu")
    totals = torch.zeros(world, counters + 2, dtype=torch.float32, device="cpu")
    totals[:, :counters] = torch.bincount(ranks % counters, minlength=counters)
    totals[:, -2:] = torch.stack([ranks % 128 + 1, ranks // 128 + 1], dim=1)
    before = (rank - 1) % world
    mine = torch.zeros_like(totals)
    mine[:, rank % counters].fill_(1)
    mine[rank, -2], mine[before, -1] = totals[rank, -2], totals[before, -1]
    return mine, totals


@torch.no_grad()
def _try_exchange(gather: Communicator, reduce: Communicator, dtype: torch.dtype) -> str:
    """Try an all-gather and a sum on numbers that add exactly in any order and dtype; return what went wrong, or ""."""
    device, (mine, totals) = gather.device, _trial_numbers(gather)
    grads = mine.to(device, dtype).view(-1)
    gathered = torch.zeros_like(grads)
    own = gather.own_chunk(gathered).copy_(totals[gather.rank])
    trial = ExactReduceScatter(grads.numel(), dtype)
    trial.bind(CommContext(reduce, ScratchBuffers(device), lambda kind, name: None))
    try:
        # With ``async_op=False`` the current stream runs both, and some backends still return works to wait for.
        for work in (*gather.all_gather(gathered, own, async_op=False), *trial.start(grads, async_op=False)):
            work.wait()
        total, gathered = torch.cat([part.to("cpu", copy=True) for _, part in trial.finish(grads)]), gathered.cpu()
    except RuntimeError as error:
        raise _cannot_carry(gather, dtype, error) from error
    wrong = _difference(gather, "sum", dtype, total, totals[gather.rank])
    return wrong or _difference(gather, "all-gather", dtype, gathered, totals.view(-1))


@torch.no_grad()
def _try_all_reduce(replicas: Communicator) -> str:
    """Try the sum over replicas on trial numbers; return how the result is wrong, as a text, or ""."""
    mine, totals = _trial_numbers(replicas)
    total = mine.to(replicas.device)
    try:
        for work in replicas.all_reduce(total, async_op=False):
            work.wait()
        total = total.cpu()
    except RuntimeError as error:
        raise _cannot_carry(replicas, total.dtype, error) from error
    return _difference(replicas, "sum over replicas", total.dtype, total.view(-1), totals.view(-1))


def _cannot_carry(comm: Communicator, dtype: torch.dtype, error: RuntimeError) -> ValueError:
    return ValueError(
        f"backend '{backend_of(comm.group, comm.device)}' cannot carry {dtype} tensors of {comm.device}: pass a mesh "
        f"whose process group has NCCL for CUDA, one GPU per rank ({error})"
    )


def _difference(comm: Communicator, name: str, dtype: torch.dtype, found: Tensor, truth: Tensor) -> str:
    wrong = (found != truth).nonzero().view(-1).tolist()
    if not wrong:
        return ""
    return (
        f"a trial {name} of {dtype} over {comm.world} ranks gave {found[wrong[0]].item()} rather than "
        f"{truth[wrong[0]].item()} in element {wrong[0]}, and {len(wrong)} of {len(truth)} are wrong"
    )


@contextmanager
def refused_over_store(store: Store, key: str, rank: int, world: int) -> Iterator[None]:
    """Raise on every rank what one rank raises within the block, like ``refused_together``, but without collectives.

    Args:
        key: name of what the block does, the same on the ``world`` ranks that take part and used by no others.
        rank: global number of this rank, which the message for the other ranks names.
        world: number of ranks that take part.

    Raises:
        ValueError: on the other ranks, with the message of a rank that raises.
        RuntimeError: a rank neither raises nor leaves the block before the store's timeout.
    """
    key = f"{key}/{store.add(f'{key}/times of {rank}', 1)}"  # each use of ``key`` has a number, the same on all ranks
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
