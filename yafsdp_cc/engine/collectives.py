"""The exact collectives of a parameter group (see ``protocols``), and hashes of the collectives that a rank issues.

Gradients are summed over ranks; each rank divides the sum of its shard once, at the end (``param.ShardedGrad``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yafsdp_cc.engine.agreement import Agreement, Describe, Operation
from yafsdp_cc.engine.protocols import AllGather, ReduceScatter

if TYPE_CHECKING:
    from yafsdp_cc.engine.communicator import CommContext, Works
    from yafsdp_cc.engine.param import FlatParam

_SUMMED_DTYPES = (torch.float32, torch.float64)
"""Dtypes that sums of gradients keep; gradients of other dtypes, or NCCL's sums of them, are cast to fp32."""
_SUM_PART = 1 << 19
"""Number of elements that a CPU sums at a time: 2 MiB of fp32, which fit in the processor's cache."""
_PREPARED = 1 << 23
"""Largest number of elements of a shard that is cast on the caller's stream before its all-gather: 16 µs on an H100."""
_CAST_PART = 1 << 20
"""Number of elements, of all ranks' chunks together, that a sum casts to fp32 at a time."""


def sum_scale(dtype: torch.dtype, world: int) -> int:
    """Return a power of two by which gradients are divided before the sum over ranks: about √world in fp16, in which
    undivided sums overflow and gradients divided by ``world`` underflow; else 1."""
    return 1 << ((world - 1).bit_length() + 1) // 2 if dtype == torch.float16 else 1


class ExactAllGather(AllGather):
    """An all-gather of the shards in the dtype of the forward.

    [Note: casts between collectives] A kernel that casts a small shard takes microseconds, but on a busy GPU it waits
    for a free multiprocessor, as the collective behind it does once more. On the communication stream the network
    would stand still all the while. So small shards are cast on the stream of the computation that used the buffer, as
    soon as that computation has ended.
    """

    has_finish = False
    _is_prepared = False

    def __init__(self, flat: FlatParam) -> None:
        self.flat = flat

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        flat = self.flat
        is_cast = flat.sharded.is_cuda and flat.sharded.dtype != flat.compute_dtype
        return is_cast and flat.sharded.numel() <= _PREPARED and self.context.comm.world > 1

    def prepare(self, output: Tensor) -> None:
        own = self.context.comm.own_chunk(output, self.flat.layout.uneven_chunks)
        self.flat.send_buffer(own, in_place=True)
        self._is_prepared = True

    def planned_bytes(self) -> int:
        layout, dtype = self.flat.layout, self.flat.compute_dtype
        return (layout.world - 1) * layout.chunks[self.flat.rank] * dtype.itemsize

    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        comm, chunks = self.context.comm, self.flat.layout.uneven_chunks
        source = own = comm.own_chunk(output, chunks)
        is_prepared, self._is_prepared = self._is_prepared, False
        if not is_prepared:
            source = self.flat.send_buffer(own, in_place=comm.is_gloo or comm.world == 1 or bool(chunks))
        self.sent_bytes = (comm.world - 1) * own.nbytes  # ``planned_bytes`` of subclasses counts encoded weights
        return comm.all_gather(output, source, async_op, chunks)


class ExactReduceScatter(ReduceScatter):
    """A reduce-scatter that adds in rank order, in fp32 or fp64; over NCCL, in NCCL's order and in the dtype sent.

    Args:
        numel: elements of the unsharded gradients, world * chunk.
        dtype: dtype of the unsharded gradients.
        casts: whether ``finish`` casts NCCL's bf16 sums to fp32; CUDA can divide them in fp32 without a cast.
        chunks: number of elements of each rank's chunk; empty if all are equal.
    """

    defers = False

    def __init__(self, numel: int, dtype: torch.dtype, *, casts: bool = True, chunks: Sequence[int] = ()) -> None:
        self._numel, self._dtype, self._casts, self._chunks = numel, dtype, casts, chunks

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        comm = context.comm
        chunk = self._chunks[comm.rank] if self._chunks else self._numel // comm.world
        # no scale for local sums: they are in fp32, which does not overflow
        self._scale = sum_scale(self._dtype, comm.world) if comm.reduces_in_place else 1
        self._received_numel = chunk if comm.world == 2 else chunk * comm.world
        self._planned_bytes = (self._numel - chunk) * self._dtype.itemsize
        if not comm.reduces_in_place:
            context.scratch.reserve("received chunks", self._received_numel * self._dtype.itemsize)
        is_left = comm.reduces_in_place and self._dtype == torch.bfloat16 and not self._casts
        self._sums_as_sent = is_left or self._dtype in _SUMMED_DTYPES
        self._part = chunk if comm.reduces_in_place else _SUM_PART
        if not self._sums_as_sent:
            ranks = 1 if comm.reduces_in_place else comm.world
            self._part = min(chunk, self._part if ranks == 1 else max(_CAST_PART // ranks, 1))
            context.scratch.reserve("fp32 sum", 4 * ranks * self._part)
        self._place = torch.zeros(comm.world - 1, dtype=torch.int64, device=comm.device)

    def planned_bytes(self) -> int:
        return self._planned_bytes

    def start(self, grads: Tensor, async_op: bool) -> Works:
        comm = self.context.comm
        self.sent_bytes = self._planned_bytes
        if comm.world == 1:
            return ()
        if comm.reduces_in_place:
            scaled = grads if self._scale == 1 else grads.mul_(1 / self._scale)
            return comm.reduce_scatter(scaled, async_op, self._chunks)
        received = self.context.scratch.take("received chunks", self._received_numel, self._dtype)
        return comm.all_to_all(received, grads, async_op, self._chunks)

    def finish(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        comm, own = self.context.comm, self.context.comm.own_chunk(grads, self._chunks)
        chunk = own.numel()
        first, others = own, own.view(1, -1).narrow(0, 0, 0)
        if chunk and not comm.reduces_in_place:
            received = self.context.scratch.take("received chunks", self._received_numel, self._dtype).view(-1, chunk)
            # the order of two summands makes no difference
            first, others = (own, received) if comm.world == 2 else (received[0], received[1:])
        for start in range(0, chunk, self._part or 1):  # ``range`` refuses a step of 0, on a rank without elements
            numel = min(self._part, chunk - start)
            total, rest = first.narrow(0, start, numel), others.narrow(1, start, numel)
            if not self._sums_as_sent:  # cast into scratch memory, as adding two dtypes would allocate
                ranks = 1 + rest.shape[0]
                scratch = self.context.scratch.take("fp32 sum", ranks * numel, torch.float32).view(ranks, numel)
                scratch[0].copy_(total)
                total, rest = scratch[0], scratch[1:].copy_(rest)
            if rest.shape[0] and total.is_cpu:  # ``index_add_`` adds row by row; ``torch.sum`` has its own order
                total.view(1, -1).index_add_(0, self._place, rest)
            else:  # on CUDA ``index_add_`` would add in any order
                for other in rest:
                    total.add_(other)
            yield start, total if self._scale == 1 else total.mul_(self._scale)


_MASK = (1 << 64) - 1
_LONG, _SHORT = 1_000_003, 256 * 1_000_003
"""Factors of running 64-bit hashes: eight multiplications by ``_SHORT`` shift out all bits of an old value."""
FINAL_REDUCE = "final reduce"
"""Kind of the operation after which gradients are final; a backward that keeps them for a later one has none."""


class CollectiveFingerprint(Agreement):
    """Hashes of the collectives that this rank has issued, which say whether all ranks expect the next one."""

    def record(self, kind: str, name: str) -> None:
        """Add a decision about the group ``name``, which all ranks have made alike, to the hashes of operations."""
        operation = (kind, name, (), ())
        self._add(operation, self.hash(operation))

    def agree(
        self, kind: str, name: str, flats: Sequence[FlatParam] = (), describe: Describe = lambda waited: ""
    ) -> None:
        """Wait until all ranks are known to issue the same operation next.

        Args:
            kind: what the operation does.
            name: name of the group that the operation is issued for.
            flats: flat parameters whose gradients the operation sums.
            describe: function that returns what this rank is doing, for the error.

        Raises:
            RuntimeError: ranks issue different operations, or a rank issues none within the time-out.
        """
        wanted = tuple([param.parameter.requires_grad for flat in flats for param in flat.params])
        operation = (kind, name, wanted, tuple([flat.divisor.factor for flat in flats]))
        known = self.hashes.get(operation) or self.hash(operation)
        if self.has_peers and self.followers.get(self.path) != known:
            self.follow(operation, flats, describe)
        self._add(operation, known)

    def _add(self, operation: Operation, known: int) -> None:
        self.path = 0 if operation[0] == FINAL_REDUCE else (self.path * _LONG + known + 1) & _MASK
        self.context = (self.context * _SHORT + known + 1) & _MASK
        self.count += 1
        self.last.append(operation)
