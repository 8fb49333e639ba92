"""Calls of collectives on each backend, and the scratch buffers that collectives share.

Over gloo a sum is an all-to-all of chunks and a local sum: gloo's own reduce-scatter is a clone, an all-reduce and a
copy. Over NCCL it is NCCL's reduce-scatter, in place and in the dtype that is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from yafsdp_cc.ranks.groups import PythonGroup, allocate, backend_of, is_python_group, slow_links

Works: TypeAlias = "Sequence[dist.Work]"
"""Asynchronous operations to wait for; () where the current stream orders them."""

_GATHERED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that every backend gathers; tensors of other dtypes are gathered as bytes."""
_TWO_RANK_MESSAGE, _MANY_RANK_MESSAGE = 1 << 14, 1 << 17
"""Chunk sizes in bytes from which messages beat gloo's collectives on slow links: for two ranks, and for more."""
_MOST_BROADCASTS = 16
"""Most ranks of a gloo group for which broadcasts take less processor time than gloo's all-gather."""
_GATHER_TAG, _MESSAGE_TAG = 1, 2


class Communicator:
    """Collectives of one process group on one device, each in the fastest way of its backend.

    All methods call the process group directly: the checks in ``torch.distributed``'s functions cost more than a small
    collective, and every buffer of the engine is checked once, when it is made.

    Over gloo an all-gather broadcasts every rank's chunk into its place: gloo's own all-gather receives into a
    temporary buffer and copies, which is cheaper only than very many broadcasts. Two ranks swap chunks in one
    all-to-all, where broadcasts would be two operations. So gathers and sums of two ranks must not share a gloo group:
    a rank out of step would meet an operation of another size, at which gloo ends the process. Over slow links
    (``groups.slow_links``) chunks are point-to-point messages.

    Chunks are equal unless ``chunks`` has the number of elements of each rank's chunk, perhaps 0: then an all-gather is
    broadcasts on every backend, and an NCCL reduce-scatter is a reduce to each rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group: Any = PythonGroup(group) if is_python_group(group) else group
        self.device = device
        self.world: int = group.size()
        self.rank: int = group.rank()
        backend = backend_of(group, device)
        self.is_gloo = backend == "gloo"
        self.reduces_in_place = self.world == 1 or backend == "nccl"
        """Whether ``reduce_scatter`` works on this backend; else a sum is an ``all_to_all`` and a local sum."""
        self._is_slow = slow_links.get(group, False)
        self._gather_options = AllgatherOptions()
        self._exchange_options = AllToAllOptions()
        self._scatter_options = ReduceScatterOptions()
        self._reduce_options = AllreduceOptions()
        self._broadcast_options = BroadcastOptions()
        self._to_one_options = ReduceOptions()

    def split(self, buffer: Tensor, chunks: Sequence[int] = ()) -> Sequence[Tensor]:
        """Return views of the chunks in ``buffer``, one for each rank."""
        return buffer.split(chunks) if chunks else buffer.chunk(self.world)

    def own_chunk(self, buffer: Tensor, chunks: Sequence[int] = ()) -> Tensor:
        """Return this rank's chunk of ``buffer``, without the views of all chunks that ``split`` makes."""
        numel = chunks[self.rank] if chunks else buffer.numel() // self.world
        return buffer.narrow(0, sum(chunks[: self.rank]) if chunks else self.rank * numel, numel)

    def all_gather(self, output: Tensor, source: Tensor, async_op: bool, chunks: Sequence[int] = ()) -> Works:
        """All-gather every rank's ``source`` into ``output``, which has the same dtype.

        Over gloo, and with ``chunks``, ``source`` must be this rank's own chunk of ``output``.
        """
        if self.world == 1:
            return ()
        if output.dtype not in _GATHERED_DTYPES:
            chunks = [output.itemsize * chunk for chunk in chunks]
            output, source = output.view(torch.uint8), source.view(torch.uint8)
        if not chunks and (not self.is_gloo or self.world > _MOST_BROADCASTS):
            self._gather_options.asyncOp = async_op
            return _works(self.group._allgather_base(output, source, self._gather_options))
        if (self._is_slow or output.dtype == torch.uint8) and self._prefers_messages(output.nbytes):
            return self._send_messages(self.split(output, chunks), [source] * self.world, _GATHER_TAG)
        if self.world == 2:
            return self._swap(self.split(output, chunks)[1 - self.rank], source, async_op)
        works: list[dist.Work] = []
        self._broadcast_options.asyncOp = async_op
        for root, chunk in enumerate(self.split(output, chunks)):
            self._broadcast_options.rootRank = root
            works += _works(self.group.broadcast([chunk], self._broadcast_options)) if chunk.numel() else ()
        return works

    def reduce_scatter(self, buffer: Tensor, async_op: bool, chunks: Sequence[int] = ()) -> Works:
        """Reduce-scatter ``buffer`` in its dtype: this rank's own chunk becomes the sum over ranks. NCCL alone."""
        if not chunks:
            self._scatter_options.asyncOp = async_op
            return _works(self.group._reduce_scatter_base(self.own_chunk(buffer), buffer, self._scatter_options))
        works: list[dist.Work] = []
        self._to_one_options.asyncOp = async_op
        for root, chunk in enumerate(self.split(buffer, chunks)):
            self._to_one_options.rootRank = root
            works += _works(self.group.reduce([chunk], self._to_one_options)) if chunk.numel() else ()
        return works

    def all_to_all(self, received: Tensor, sent: Tensor, async_op: bool, chunks: Sequence[int] = ()) -> Works:
        """Send every rank its chunk of ``sent``.

        ``received`` is [world * n] in rank order, where this rank's chunk has n elements; between two ranks it is
        [n], the other rank's part alone.
        """
        if self._is_slow and self._prefers_messages(sent.nbytes):
            parts = [received] * 2 if self.world == 2 else list(received.view(self.world, -1))
            if self.world > 2:
                parts[self.rank].copy_(self.own_chunk(sent, chunks))
            return self._send_messages(parts, self.split(sent, chunks), _MESSAGE_TAG)
        if self.world == 2:
            return self._swap(received, self.split(sent, chunks)[1 - self.rank], async_op)
        self._exchange_options.asyncOp = async_op
        own = [received.numel() // self.world] * self.world if chunks else []
        return _works(self.group.alltoall_base(received, sent, own, list(chunks), self._exchange_options))

    def exchange(self, received: Tensor, sent: Tensor, async_op: bool, sizes: Sequence[int] = ()) -> Works:
        """Send each other rank its message: ``sent`` and ``received`` are [world - 1, bytes] uint8, in rank order.

        With ``sizes``, the bytes of the message to each rank, ``sent`` is [bytes], one message after the other.
        """
        sizes = sizes or [sent.shape[1]] * self.world
        ours, theirs = list(sizes), [sizes[self.rank]] * self.world
        ours[self.rank] = theirs[self.rank] = 0
        received, sent = received.view(-1), sent.view(-1)
        if self.is_gloo and self._prefers_messages(sum(sizes)):
            return self._send_messages(received.split(theirs), sent.split(ours), _MESSAGE_TAG)
        self._exchange_options.asyncOp = async_op
        return _works(self.group.alltoall_base(received, sent, theirs, ours, self._exchange_options))

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Works:
        """Sum ``tensor`` over ranks, in place."""
        if self.world == 1:
            return ()
        self._reduce_options.asyncOp = async_op
        return _works(self.group.allreduce([tensor], self._reduce_options))

    def peer_bytes(self, nbytes: int) -> int:
        """Return the bytes that this rank sends to all-gather, or reduce-scatter, ``nbytes`` of equal chunks."""
        return nbytes // self.world * (self.world - 1)

    def all_reduce_bytes(self, nbytes: int) -> int:
        """Return the bytes that this rank sends to all-reduce ``nbytes``: a reduce-scatter and an all-gather."""
        return 2 * nbytes // self.world * (self.world - 1)

    def _prefers_messages(self, nbytes: int) -> bool:
        limit = _TWO_RANK_MESSAGE if self.world == 2 else _MANY_RANK_MESSAGE
        # gloo cannot send CUDA tensors point to point
        return self.device.type == "cpu" and nbytes // self.world >= limit

    def _send_messages(self, received: Sequence[Tensor], sent: Sequence[Tensor], tag: int) -> Works:
        """Exchange the parts of ``sent`` and ``received`` with all other ranks at once; skip empty parts."""
        peers = [(self.rank + step) % self.world for step in range(1, self.world)]
        works = [self.group.recv([received[peer]], peer, tag) for peer in reversed(peers) if received[peer].numel()]
        return works + [self.group.send([sent[peer]], peer, tag) for peer in peers if sent[peer].numel()]

    def _swap(self, received: Tensor, sent: Tensor, async_op: bool) -> Works:
        """Send ``sent`` to the other of two ranks, and receive ``received`` from it."""
        theirs, ours = ([0, each.numel()] if self.rank == 0 else [each.numel(), 0] for each in (received, sent))
        self._exchange_options.asyncOp = async_op
        return _works(self.group.alltoall_base(received, sent, theirs, ours, self._exchange_options))


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


class ScratchBuffers:
    """Named scratch buffers that the operations of one stream use in turn. The buffers grow and never shrink."""

    def __init__(self, device: torch.device, allocator: dist.ProcessGroup | None = None) -> None:
        self._place = device, allocator
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, name: str, nbytes: int) -> None:
        """Make the buffer ``name`` at least ``nbytes`` long. No operation that uses the buffer may be in flight."""
        known = self._buffers.get(name)
        if known is None or known.numel() < nbytes:
            self._buffers[name] = allocate(nbytes, *self._place)

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` elements of ``dtype`` from the start of the buffer ``name``; their values are undefined."""
        return self._buffers[name].narrow(0, 0, numel * dtype.itemsize).view(dtype)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class CommContext(NamedTuple):
    """Communicator, scratch buffers and fingerprint that the engine gives to the collectives of one stream."""

    comm: Communicator
    scratch: ScratchBuffers
    record: Callable[[str, str], None]
    """Function that adds an operation (kind, name of its group) to the fingerprint that ranks compare."""
