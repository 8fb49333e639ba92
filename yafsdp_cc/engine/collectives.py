"""Collectives of a parameter group: the protocols that the engine calls, and the exact implementations.

Every ``FlatParam`` has an ``AllGather`` and a ``ReduceScatter``, and with replicas an ``AllReduce``. They are made by
a ``Collectives`` factory at the first assembly and live as long as the ``FlatParam``; each assembly ``bind``s them to
its communicators and scratch buffers. The engine knows nothing beyond these protocols: compression is another
factory, whose objects keep their own state (residuals, phase, momentum).

Rules for implementations:

1. ``start`` latches whatever mode it runs in, and ``finish`` goes by that.
2. Modes, codecs and scales change in ``Observer.before_forward`` or in the optimizer, never between ``start`` and
   ``finish``. All ranks change alike.
3. ``start`` raises only what all ranks raise, before it issues anything or changes a residual.
4. ``finish`` issues no collective.
5. Steady state allocates nothing.
6. A non-finite block keeps its residual and arrives as non-finite: it reaches every rank as ``found_inf``.

On CUDA ``start`` and ``finish`` are enqueued on the communication stream one behind the other. On CPU ``start`` runs
in the issuing thread and ``finish`` in the thread that waits, never two at once.

Gradients are summed on the network and divided once, at the end, over the shard (``param.ShardedGrad``). Over gloo a
sum is an all-to-all of chunks and a local sum in rank order, in fp32 (fp64 for fp64): gloo's own reduce-scatter is a
clone, an all-reduce and a copy. Over NCCL it is NCCL's reduce-scatter, in place and in the dtype that is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from yafsdp_cc.engine.layout import ALIGNMENT
from yafsdp_cc.engine.mesh import backend_of, has_slow_link

if TYPE_CHECKING:
    from yafsdp_cc.engine.layout import Layout
    from yafsdp_cc.plan.report import PlannedChoice

Works: TypeAlias = "Sequence[dist.Work]"
"""Asynchronous operations to wait for; none where the current stream orders them."""

_GATHERED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that every backend gathers; others travel as bytes."""
_SUMMED_DTYPES = (torch.float32, torch.float64)
"""Dtypes that are summed as they are; others are cast to fp32."""
_SUM_PART = 1 << 19
"""Elements summed at once on a CPU: 2 MiB of fp32, which stays in the processor's cache."""
_TWO_RANK_MESSAGE, _MANY_RANK_MESSAGE = 1 << 14, 1 << 17
"""Bytes from which point-to-point messages are quicker over slow links than gloo's collectives, by number of ranks."""
_GATHER_TAG, _MESSAGE_TAG = 1, 2


class Communicator:
    """Collectives of one process group on one device, each by the way that is fastest on its backend.

    They call the process group itself: the checks in ``torch.distributed``'s functions cost more than a small
    collective, and every buffer here is checked once, when it is made.

    Over gloo an all-gather is a broadcast of every rank's chunk into its place: gloo's own receives into a buffer made
    for the occasion and copies. Two ranks swap chunks, which is one operation where broadcasts are two. Gathers and
    sums must not share a gloo group then: an operation of a rank that has lost step would meet one of another size, and
    gloo ends the process where it does. Over slow links (``mesh.probe_links``) chunks are point-to-point messages.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.world: int = group.size()
        self.rank: int = group.rank()
        backend = backend_of(group, device)
        self.is_gloo = backend == "gloo"
        self.reduces_in_place = self.world == 1 or (device.type == "cuda" and backend == "nccl")
        """Whether ``reduce_scatter`` is to be had; elsewhere a sum is an ``all_to_all`` and a local sum."""
        self._is_slow = has_slow_link(group)
        self._gather_options = AllgatherOptions()
        self._exchange_options = AllToAllOptions()
        self._scatter_options = ReduceScatterOptions()
        self._reduce_options = AllreduceOptions()
        self._broadcast_options = tuple(BroadcastOptions() for _ in range(self.world))
        for root, options in enumerate(self._broadcast_options):
            options.rootRank = root

    def own_chunk(self, buffer: Tensor) -> Tensor:
        """Return this rank's chunk [n] of ``buffer`` [world * n]."""
        chunk = buffer.numel() // self.world
        return buffer.narrow(0, self.rank * chunk, chunk)

    def all_gather(self, output: Tensor, source: Tensor, async_op: bool) -> Works:
        """Fill ``output`` [world * n] with every rank's ``source`` [n] of the same dtype.

        Over gloo ``source`` must be this rank's own chunk of ``output``.
        """
        if self.world == 1:
            return ()
        if output.dtype not in _GATHERED_DTYPES:
            output, source = output.view(torch.uint8), source.view(torch.uint8)
        if not self.is_gloo:
            self._gather_options.asyncOp = async_op
            return _works(self.group._allgather_base(output, source, self._gather_options))
        if (self._is_slow or output.dtype == torch.uint8) and self._prefers_messages(output.nbytes):
            chunks = output.chunk(self.world)
            return self._send_messages(chunks, [source] * self.world, _GATHER_TAG)
        if self.world == 2:
            return self._swap(output.narrow(0, (1 - self.rank) * source.numel(), source.numel()), source, async_op)
        works: list[dist.Work] = []
        for chunk, options in zip(output.chunk(self.world), self._broadcast_options, strict=True):
            options.asyncOp = async_op
            works += _works(self.group.broadcast([chunk], options))
        return works

    def reduce_scatter(self, buffer: Tensor, async_op: bool) -> Works:
        """Sum ``buffer`` [world * n] over ranks into this rank's own chunk of it, in its dtype (NCCL alone)."""
        self._scatter_options.asyncOp = async_op
        return _works(self.group._reduce_scatter_base(self.own_chunk(buffer), buffer, self._scatter_options))

    def all_to_all(self, received: Tensor, sent: Tensor, async_op: bool) -> Works:
        """Give every rank its chunk of ``sent`` [world * n].

        ``received`` is [world * n] in rank order; for two ranks [n], what the other one has sent.
        """
        if self._is_slow and self._prefers_messages(sent.nbytes):
            chunks = [received] * 2 if self.world == 2 else received.chunk(self.world)
            return self._send_messages(chunks, sent.chunk(self.world), _MESSAGE_TAG)
        if self.world == 2:
            return self._swap(received, sent.narrow(0, (1 - self.rank) * received.numel(), received.numel()), async_op)
        self._exchange_options.asyncOp = async_op
        return _works(self.group.alltoall_base(received, sent, [], [], self._exchange_options))

    def exchange(self, received: Tensor, sent: Tensor, async_op: bool) -> Works:
        """Send each other rank its message: ``sent`` and ``received`` are [world - 1, bytes] uint8, in rank order."""
        size = sent.shape[1]
        parts = [size] * (self.world - 1)
        parts.insert(self.rank, 0)
        received, sent = received.view(-1), sent.view(-1)
        if self.is_gloo and self._prefers_messages(self.world * size):
            return self._send_messages(received.split(parts), sent.split(parts), _MESSAGE_TAG)
        self._exchange_options.asyncOp = async_op
        return _works(self.group.alltoall_base(received, sent, parts, parts, self._exchange_options))

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Works:
        """Sum ``tensor`` over ranks, in place."""
        self._reduce_options.asyncOp = async_op
        return _works(self.group.allreduce([tensor], self._reduce_options))

    def peer_bytes(self, nbytes: int) -> int:
        """Return the bytes that this rank sends where a buffer of ``nbytes`` is gathered, or summed by its chunks."""
        return nbytes // self.world * (self.world - 1)

    def all_reduce_bytes(self, nbytes: int) -> int:
        """Return the bytes that this rank sends to all-reduce ``nbytes``: a reduce-scatter and an all-gather."""
        return 2 * nbytes // self.world * (self.world - 1)

    def _prefers_messages(self, nbytes: int) -> bool:
        limit = _TWO_RANK_MESSAGE if self.world == 2 else _MANY_RANK_MESSAGE
        return self.device.type == "cpu" and nbytes // self.world >= limit  # gloo sends no CUDA tensors so

    def _send_messages(self, received: Sequence[Tensor], sent: Sequence[Tensor], tag: int) -> Works:
        """Send each other rank its part of ``sent``, all at once; nothing where there is nothing for a rank."""
        peers = [peer for step in range(1, self.world) if sent[peer := (self.rank + step) % self.world].numel()]
        works = [self.group.recv([received[peer]], peer, tag) for peer in reversed(peers)]
        return works + [self.group.send([sent[peer]], peer, tag) for peer in peers]

    def _swap(self, received: Tensor, sent: Tensor, async_op: bool) -> Works:
        """Exchange ``sent`` for ``received`` with the other one of two ranks."""
        parts = [0, sent.numel()] if self.rank == 0 else [sent.numel(), 0]
        self._exchange_options.asyncOp = async_op
        return _works(self.group.alltoall_base(received, sent, parts, parts, self._exchange_options))


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


class ScratchBuffers:
    """Buffers that the collectives of one stream share, one operation at a time. They grow and never shrink."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, name: str, nbytes: int) -> None:
        """Make the buffer ``name`` at least ``nbytes`` long. Nothing that uses it may be in flight."""
        known = self._buffers.get(name)
        if known is None or known.numel() < nbytes:
            self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` elements of ``dtype`` from the start of the buffer ``name``; their values are undefined."""
        return self._buffers[name].narrow(0, 0, numel * dtype.itemsize).view(dtype)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class CommContext(NamedTuple):
    """What an assembly gives the collectives of one stream."""

    comm: Communicator
    scratch: ScratchBuffers
    record: Callable[[str, str], None]
    """Adds an operation (kind, name of its group) to the fingerprint that ranks compare."""


# The protocols -----------------------------------------------------------------------------------------------------


class FlatShard(Protocol):
    """What collectives know of the ``FlatParam`` that they serve."""

    layout: Layout
    compute_dtype: torch.dtype
    """Of the unsharded weights."""
    reduce_dtype: torch.dtype
    """Of the unsharded gradients."""

    @property
    def name(self) -> str:
        """Full name of its first parameter."""

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of summed gradients: fp64 for fp64, else fp32."""

    @property
    def version(self) -> int:
        """Changes whenever the shard does."""

    def send_buffer(self, own: Tensor, *, in_place: bool) -> Tensor:
        """Return this rank's shard [chunk] on the device in the dtype of ``own``.

        That is the shard itself where it can be sent as it is, unless ``in_place`` asks for ``own``, filled with it.
        """

    def read(self, target: Tensor, start: int = 0) -> None:
        """Copy the elements of the shard from ``start`` on to ``target``, on the device, cast to its dtype."""


class Collective(ABC):
    """What all collectives of a ``FlatParam`` have."""

    context: CommContext
    sent_bytes = 0
    """Bytes that this rank has sent by the last ``start``."""
    feeds_back = False
    """Of sums: whether one may bring gradients of a parameter that no rank has used, by error feedback."""

    def bind(self, context: CommContext) -> None:
        """Use this communicator and these scratch buffers from now on. Nothing is in flight."""
        self.context = context

    def reset(self) -> None:
        """Drop what was started or deferred, after a forward or backward that raised. Nothing is in flight."""

    @abstractmethod
    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends per operation once warm-up is over, on average."""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of persistent buffers by label ("residual", "kept weights"), for the memory plan."""
        return {}


class AllGather(Collective):
    """Fills the unsharded weights of one ``FlatParam``."""

    builds_on_held = False
    """Whether ``start`` uses what ``output`` still holds: the weight buffer is a part of its state."""

    def scratch_bytes(self) -> int:
        """Return the bytes that it needs beside the weights in each weight buffer."""
        return 0

    @abstractmethod
    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        """Issue the collectives that fill ``output``.

        Args:
            output: [world * chunk], the dtype of the forward.
            held: version of the shard whose weights ``output`` still contains; None: anything.
            scratch: [scratch_bytes()] uint8 beside ``output``; None where there is none.
            async_op: whether to return works rather than order the current stream.
        """

    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        """Complete ``output`` once the collectives are over."""


class ReduceScatter(Collective):
    """Sums the unsharded gradients of one ``FlatParam``, each chunk at the rank that owns it."""

    defers = False
    """Whether ``defer`` can take gradients in now."""

    @abstractmethod
    def start(self, grads: Tensor, async_op: bool) -> Works:
        """Issue the collectives that sum ``grads`` [world * chunk], which stays as it is until ``finish`` is through.

        Only ``start`` itself may change it (NCCL sums in place; compression may clip).
        """

    @abstractmethod
    def finish(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the sum over ranks [chunk] in parts: the offset of each, and the part, fp32 or fp64, not divided.

        A part may be changed by whoever gets it, and is valid until the next one.
        """

    def defer(self, grads: Tensor) -> None:
        """Take ``grads`` in, to be summed with those of the next ``start``; only where ``defers``."""
        raise NotImplementedError


class AllReduce(Collective):
    """Sums the partial reduce output of one ``FlatParam`` over replicas, in place: the same bits on all of them."""

    @abstractmethod
    def start(self, total: Tensor, async_op: bool) -> Works:
        """Issue the collectives that sum ``total`` [chunk], fp32 or fp64."""

    def finish(self, total: Tensor) -> None:
        """Complete ``total`` once the collectives are over."""


class Observer:
    """Is called in the host thread of a forward or backward, in the same order on all ranks."""

    def assembled(self, state: object) -> None:
        """The engine was assembled, for the first time or anew; ``state`` is its ``FSDPState``. Nothing is in flight."""

    def before_forward(self) -> None:
        """A forward of the root begins; collectives may be issued, each ``record``ed."""

    def before_backward(self) -> None:
        """The backward has reached the first output."""

    def before_reduce(self, group: str) -> None:
        """The reduce of the parameter group of this name is about to be issued."""

    def after_reduce(self, group: str) -> None:
        """It was issued."""

    def before_wait(self) -> None:
        """The host is about to wait for a collective."""

    def after_wait(self) -> None:
        """It has waited."""

    def after_backward(self) -> None:
        """All reduces of a backward were issued; their results are waited for next."""


class Collectives:
    """Makes the collectives of a model. This one makes exact ones."""

    alignment = ALIGNMENT
    """Elements: parameters and chunks begin at multiples of it."""

    def flat_key(self, name: str) -> Hashable:
        """Return a key for the parameter of this full name: those of equal keys may share a ``FlatParam``."""
        return None

    def check_group(self, name: str, keeps_unsharded: bool) -> None:
        """Raise a ``ValueError`` where the collectives of the group ``name`` cannot work.

        ``keeps_unsharded`` tells whether its unsharded weights stay in a buffer of their own.
        """

    def join(self, other: Collectives) -> None:
        """Serve the groups of ``other``, of the same model, as well; raise a ``ValueError`` where that cannot be."""

    def all_gather(self, flat: FlatShard, keeps_unsharded: bool) -> AllGather:
        """Make the all-gather of ``flat``; ``keeps_unsharded`` as of ``check_group``."""
        return ExactAllGather(flat)

    def reduce_scatter(self, flat: FlatShard, has_replicas: bool) -> ReduceScatter:
        """Make the reduce-scatter of ``flat``; ``has_replicas`` if its sums are then summed over replicas."""
        return ExactReduceScatter(flat.layout.numel, flat.reduce_dtype)

    def all_reduce(self, flat: FlatShard) -> AllReduce:
        """Make the all-reduce of the partial sums of ``flat`` over replicas."""
        return ExactAllReduce(flat.layout.chunk * flat.sum_dtype.itemsize)

    def observers(self) -> Sequence[Observer]:
        """Return what is to be called as training goes."""
        return ()

    def planned_choices(self, flats: Sequence[FlatShard]) -> Sequence[PlannedChoice]:
        """Return what other codecs would cost for the gradients of ``flats``."""
        return ()

    def describe_choice(self) -> str:
        """Return what was chosen for gradients while training, in words; empty where nothing is chosen."""
        return ""


EXACT = Collectives()
"""The factory of models without compression."""


# The exact implementations -----------------------------------------------------------------------------------------


class ExactAllGather(AllGather):
    """An all-gather of the shards in the dtype of the forward."""

    def __init__(self, flat: FlatShard) -> None:
        self.flat = flat

    def planned_bytes(self) -> int:
        return self.context.comm.peer_bytes(self.flat.layout.numel * self.flat.compute_dtype.itemsize)

    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        comm = self.context.comm
        source = self.flat.send_buffer(comm.own_chunk(output), in_place=comm.is_gloo or comm.world == 1)
        self.sent_bytes = comm.peer_bytes(output.nbytes)
        return comm.all_gather(output, source, async_op)


class ExactReduceScatter(ReduceScatter):
    """A sum in rank order in fp32 (fp64 for fp64); over NCCL, in NCCL's order and in the dtype that is sent.

    Args:
        numel: elements of the unsharded gradients, world * chunk.
        dtype: of the unsharded gradients.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._numel = numel
        self._dtype = dtype

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        comm, chunk = context.comm, self._numel // context.comm.world
        if not comm.reduces_in_place:
            peers = 1 if comm.world == 2 else comm.world
            context.scratch.reserve("received chunks", peers * chunk * self._dtype.itemsize)
        if self._dtype not in _SUMMED_DTYPES:
            count = chunk if comm.reduces_in_place else 2 * min(chunk, _SUM_PART)
            context.scratch.reserve("fp32 sum", 4 * count)

    def planned_bytes(self) -> int:
        return self.context.comm.peer_bytes(self._numel * self._dtype.itemsize)

    def start(self, grads: Tensor, async_op: bool) -> Works:
        comm = self.context.comm
        self.sent_bytes = comm.peer_bytes(grads.nbytes)
        if comm.world == 1:
            return ()
        if comm.reduces_in_place:
            return comm.reduce_scatter(grads, async_op)
        return comm.all_to_all(self._received(), grads, async_op)

    def finish(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        summands = self._summands(grads)
        chunk = summands[0].numel()
        step = chunk if self.context.comm.reduces_in_place else _SUM_PART
        for start in range(0, chunk, step):
            yield start, self._sum([each.narrow(0, start, min(step, chunk - start)) for each in summands])

    def finish_whole(self, grads: Tensor) -> Tensor:
        """Return the sum [chunk] in one part; of fp32 and fp64 alone."""
        return self._sum(self._summands(grads))

    def _received(self) -> Tensor:
        world = self.context.comm.world
        numel = self._numel // 2 if world == 2 else self._numel
        return self.context.scratch.take("received chunks", numel, self._dtype)

    def _summands(self, grads: Tensor) -> Sequence[Tensor]:
        """Return the chunks to sum, in rank order."""
        comm = self.context.comm
        own = comm.own_chunk(grads)
        if comm.reduces_in_place:
            return (own,)
        received = self._received()
        if comm.world == 2:
            return (own, received) if comm.rank == 0 else (received, own)
        chunks = received.chunk(comm.world)
        return (*chunks[: comm.rank], own, *chunks[comm.rank + 1 :])

    def _sum(self, summands: Sequence[Tensor]) -> Tensor:
        total, count = summands[0], summands[0].numel()
        if total.dtype in _SUMMED_DTYPES:
            for other in summands[1:]:
                total.add_(other)
            return total
        scratch = self.context.scratch.take("fp32 sum", count if len(summands) == 1 else 2 * count, torch.float32)
        total = scratch.narrow(0, 0, count).copy_(total)
        for other in summands[1:]:  # cast by hand: a mixed add would allocate
            total.add_(scratch.narrow(0, count, count).copy_(other))
        return total


class ExactAllReduce(AllReduce):
    """The backend's all-reduce.

    Args:
        nbytes: of what is summed.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def planned_bytes(self) -> int:
        return self.context.comm.all_reduce_bytes(self._nbytes)

    def start(self, total: Tensor, async_op: bool) -> Works:
        self.sent_bytes = self.context.comm.all_reduce_bytes(total.nbytes)
        return self.context.comm.all_reduce(total, async_op)
