"""How a unit's bytes cross ranks, exactly.

Weights are gathered from every rank's shard. Gradients are summed by the owner of each chunk, in rank order and in
fp32 (fp64 for fp64), and nobody divides on the way. The sum is an all-to-all of chunks followed by a local sum,
because gloo's own reduce-scatter is a clone, an all-reduce and a copy; over NCCL it is NCCL's reduce-scatter, in place
and in the dtype on the wire. gloo takes CUDA tensors too, by way of the host: slow, and for tests.

Over gloo a gather is a broadcast of every rank's chunk, from buffer to buffer: gloo's all-gather receives into a buffer
made for the occasion and copies, at up to twice the processor time. Two ranks swap chunks, which is one operation where
broadcasts are two. Gathers and sums should not share a group then: an operation of one rank that has lost step would
meet one of another size, and gloo ends the process where it does. What is encoded goes from rank to rank, each chunk a
message of its own, both ways at once; over slow links (``wire.link``) so does the rest.

Both call the process group itself: the checks in ``torch.distributed``'s functions cost more than a small collective,
and every buffer here is checked once, when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions, ReduceScatterOptions

from yafsdp_cc.wire.link import is_slow

Works: TypeAlias = "list[dist.Work]"
"""What is to be waited for."""

_SUMMED = (torch.float32, torch.float64)
"""Dtypes that are summed as they are; others are cast to fp32."""
_CARRIED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that every backend gathers."""

GATHER_TAG, MESSAGE_TAG = 1, 2
"""What messages between two ranks belong to."""

_PART = 1 << 19
"""Elements summed at once on a CPU: 2 MiB of fp32."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of what carries tensors of ``device`` in this group.

    Raises:
        ValueError: nothing does.
    """
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError as error:
        raise ValueError(
            f"the mesh is of {device.type} devices, but its process group has no backend for them: start it with "
            f'init_process_group("cpu:gloo,cuda:nccl"), or shard before any mesh is made ({error})'
        ) from error


@torch.no_grad()
def rehearse(gather: Gather, reduce: Reduce, device: torch.device) -> None:
    """Send a few numbers the way that weights and gradients will go, where the backend is not sure to carry them.

    It also makes NCCL's communicators, on every rank in the same order and while nothing else is under way.

    Raises:
        ValueError: it fails, or a wrong sum comes back.
    """
    if device.type != "cuda" or gather.world == 1:
        return
    world, n = gather.world, 32
    for dtype in (torch.float32, torch.bfloat16):
        mine = torch.full((n,), float(gather.rank + 1), dtype=dtype, device=device)
        whole = torch.zeros(world * n, dtype=dtype, device=device)
        reduce.reserve(world * n, dtype)
        try:
            # As on a lane: issued for the current stream, and waited for where there is something to wait for.
            for work in (*gather.send(whole, mine, asynchronous=False), *reduce.send(whole, asynchronous=False)):
                work.wait()
            found = reduce.total(whole).tolist()
        except RuntimeError as error:
            raise ValueError(
                f"backend '{backend_of(gather.group, device)}' cannot carry {dtype} tensors of {device}: pass a mesh "
                f"whose process group has NCCL for CUDA, one GPU per rank ({error})"
            ) from error
        # Gathered: 1 … world, n of each; every rank sends the same, so a chunk's sum is world times its rank + 1.
        if found != [float(world * (reduce.rank + 1))] * n:
            raise ValueError(f"a trial exchange of {dtype} over {world} ranks gave {found[:4]}…: a broken backend?")


class Gather:
    """Every rank's shard into one buffer."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.world: int = group.size()
        self.rank: int = group.rank()
        self._is_gloo = backend_of(group, device) == "gloo"
        self._is_slow = is_slow(group)
        self._options = AllgatherOptions()
        self._swap = AllToAllOptions()
        self._broadcasts = tuple(BroadcastOptions() for _ in range(self.world))
        for root, options in enumerate(self._broadcasts):
            options.rootRank = root

    def send(self, whole: Tensor, shard: Tensor, asynchronous: bool) -> Works:
        """Fill ``whole`` (world × n) with every rank's ``shard`` (n), cast to the dtype of ``whole``.

        A cast goes through this rank's own range of ``whole``, so that it needs no buffer of its own.
        """
        if shard.dtype != whole.dtype or self.world == 1 or self._is_gloo:
            own = self.own(whole)
            own.copy_(shard)
            shard = own
        return self.exchange(whole, shard, asynchronous)

    def brought(self, whole: Tensor, shard: Tensor) -> Tensor:
        """The ``shard`` where the device can read it; ``whole`` has room for it."""
        return shard

    def bring(self, target: Tensor, shard: Tensor) -> None:
        """Copy a part of the shard to ``target``, on the device, cast to its dtype."""
        target.copy_(shard)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's range of ``whole``."""
        numel = whole.numel() // self.world
        return whole.narrow(0, self.rank * numel, numel)

    def exchange(self, whole: Tensor, shard: Tensor, asynchronous: bool) -> Works:
        """Fill ``whole`` with every rank's ``shard``, of its dtype; over gloo, that lies in its place already."""
        if self.world == 1:
            return []
        if whole.dtype not in _CARRIED:  # as bytes
            whole, shard = whole.view(torch.uint8), shard.view(torch.uint8)
        apart = self._is_slow or whole.dtype == torch.uint8
        if self._is_gloo and apart and is_duplex(whole.nbytes, self.world, whole.device):
            chunks = whole.chunk(self.world)
            return duplex(self.group, chunks, [chunks[self.rank]] * self.world, GATHER_TAG)
        if self._is_gloo and self.world == 2:
            self._swap.asyncOp = asynchronous
            return works_of(_swap(self.group, whole, self._swap))
        if self._is_gloo:
            return self._send_each(whole, asynchronous)
        self._options.asyncOp = asynchronous
        return works_of(self.group._allgather_base(whole, shard, self._options))

    def _send_each(self, whole: Tensor, asynchronous: bool) -> Works:
        works = []
        for chunk, options in zip(whole.chunk(self.world), self._broadcasts, strict=True):
            options.asyncOp = asynchronous
            works.append(self.group.broadcast([chunk], options))
        return works

    def sent_bytes(self, whole: Tensor) -> int:
        """Bytes that this rank sends, one copy of its shard for each other rank."""
        return whole.nbytes // self.world * (self.world - 1)


class Reduce:
    """Sums flat buffers of ``world`` chunks, each at the owner of the chunk.

    ``send`` starts the exchange of a buffer, ``total`` ends it. Both use one receive buffer and one fp32 scratch, made
    by ``reserve``.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.world: int = group.size()
        self.rank: int = group.rank()
        self._streams = device.type == "cuda"
        self._is_slow = is_slow(group)
        self._in_place = self.world == 1 or (self._streams and backend_of(group, device) == "nccl")
        self._received = torch.empty(0, dtype=torch.uint8, device=device)
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)
        self._scatter = ReduceScatterOptions()
        self._exchange = AllToAllOptions()

    def reserve(self, numel: int, dtype: torch.dtype) -> None:
        """Make room for buffers of ``numel`` elements. Grows, never shrinks; allocates only before the first use."""
        received, scratch = self.needs(numel, dtype)
        if received > self._received.numel():
            self._received = self._received.new_empty(received)
        if scratch > self._scratch.numel():
            self._scratch = self._scratch.new_empty(scratch)

    def needs(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of receive buffer and fp32 elements of scratch that a buffer of ``numel`` elements takes."""
        chunk = numel // self.world
        peers = 1 if self.world == 2 else self.world
        received = 0 if self._in_place else peers * chunk * dtype.itemsize
        if dtype in _SUMMED:
            return received, 0
        return received, chunk if self._in_place else 2 * min(chunk, _PART)

    @property
    def one_at_a_time(self) -> bool:
        """Whether the ``total`` of a buffer must run before the next ``send``; a stream keeps that order itself."""
        return not self._streams

    @property
    def owned_bytes(self) -> int:
        return self._received.nbytes + self._scratch.nbytes

    def sent_bytes(self, whole: Tensor) -> int:
        """Bytes that this rank sends: every chunk but its own."""
        return whole.nbytes // self.world * (self.world - 1)

    def send(self, whole: Tensor, asynchronous: bool) -> Works:
        """Start the sum of ``whole`` (world × n); it must stay as it is until ``total`` has run."""
        if self.world == 1:
            return []
        chunk = whole.numel() // self.world
        if self._in_place:
            self._scatter.asyncOp = asynchronous
            own = whole.narrow(0, self.rank * chunk, chunk)
            return works_of(self.group._reduce_scatter_base(own, whole, self._scatter))
        self._exchange.asyncOp = asynchronous
        received = self._chunks(whole)
        if self._is_slow and is_duplex(whole.nbytes, self.world, whole.device):
            room = [received] * 2 if self.world == 2 else received.chunk(self.world)
            return duplex(self.group, room, whole.chunk(self.world), MESSAGE_TAG)
        if self.world > 2:
            return works_of(self.group.alltoall_base(received, whole, [], [], self._exchange))
        peer = 1 - self.rank
        parts = [chunk, 0] if peer == 0 else [0, chunk]
        sent = whole.narrow(0, peer * chunk, chunk)
        return works_of(self.group.alltoall_base(received, sent, parts, parts, self._exchange))

    def total(self, whole: Tensor) -> Tensor:
        """The sum over ranks of this rank's chunk of fp32 or fp64 (n), in one piece."""
        return self._sum(self._summands(whole))

    def totals(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The sum over ranks of this rank's chunk, fp32 or fp64, in parts: where each begins, and the part.

        A part is small enough to be still in the processor's cache for whatever is done to it next, and is overwritten
        by the next one.
        """
        summands = self._summands(whole)
        chunk = summands[0].numel()
        step = chunk if self._in_place else _PART
        for start in range(0, chunk, step):
            part = min(step, chunk - start)
            yield start, self._sum([summand.narrow(0, start, part) for summand in summands])

    def _summands(self, whole: Tensor) -> Sequence[Tensor]:
        chunk = whole.numel() // self.world
        own = whole.narrow(0, self.rank * chunk, chunk)
        if self._in_place:
            return (own,)
        received = self._chunks(whole)
        if self.world == 2:
            return (received, own) if self.rank == 1 else (own, received)
        parts = received.chunk(self.world)
        return (*parts[: self.rank], own, *parts[self.rank + 1 :])

    def _sum(self, summands: Sequence[Tensor]) -> Tensor:
        total, count = summands[0], summands[0].numel()
        if total.dtype in _SUMMED:
            for other in summands[1:]:
                total.add_(other)
            return total
        total = self._scratch.narrow(0, 0, count).copy_(total)
        for other in summands[1:]:  # cast by hand: a mixed add would allocate
            total.add_(self._scratch.narrow(0, count, count).copy_(other))
        return total

    def _chunks(self, whole: Tensor) -> Tensor:
        received, _ = self.needs(whole.numel(), whole.dtype)
        return self._received.narrow(0, 0, received).view(whole.dtype)


def works_of(work: dist.Work | None) -> Works:
    """What is to be waited for, of what a process group has returned."""
    return [] if work is None else [work]


def is_duplex(size: int, world: int, device: torch.device) -> bool:
    """Whether ``world`` chunks of so many bytes in all are large enough to be sent and received one by one.

    Each message by itself costs processor time: that is worth it over a slow network (see ``wire.link``), for which
    alone something is encoded. (gloo sends no CUDA tensors so.)
    """
    return device.type == "cpu" and size // world >= (_PAIR if world == 2 else _SEVERAL)


_PAIR, _SEVERAL = 1 << 14, 1 << 17
"""Bytes of a message from which that is quicker, between two ranks and among several."""


def duplex(group: dist.ProcessGroup, received: Sequence[Tensor], sent: Sequence[Tensor], tag: int) -> Works:
    """Send each rank its part of ``sent`` and fill ``received``, part by part, all at once; nothing to oneself.

    Between two ranks that have nothing for each other, nothing crosses.
    """
    world, rank = group.size(), group.rank()
    peers = [peer for step in range(1, world) if sent[peer := (rank + step) % world].numel()]
    works = [group.recv([received[peer]], peer, tag) for peer in reversed(peers)]
    return works + [group.send([sent[peer]], peer, tag) for peer in peers]


def _swap(group: dist.ProcessGroup, whole: Tensor, options: AllToAllOptions) -> dist.Work | None:
    """Of ``whole``, both ranks' chunks to both, by an all-to-all in which nobody sends anything to itself."""
    chunk, rank = whole.numel() // 2, group.rank()
    received, sent = whole.narrow(0, (1 - rank) * chunk, chunk), whole.narrow(0, rank * chunk, chunk)
    parts = [chunk, 0] if rank == 1 else [0, chunk]
    return group.alltoall_base(received, sent, parts, parts, options)
