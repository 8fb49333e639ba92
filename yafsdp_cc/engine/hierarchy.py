"""Communication in two levels: sums over replicas (HSDP), and weights gathered among neighbouring ranks (hpZ).

With replicas, what the ranks of a shard have summed is summed once more over those with the same shard:

    gradient buffer ── reduce-scatter over the shard ──► partial sum ── all-reduce over replicas ──► divided, ``.grad``

On CUDA the all-reduce has a stream of its own: the next reduce-scatters and all-gathers, and whoever takes the gradient
buffer next, wait for the copy to the partial sum, and not for the network between replicas.

Partial sums stay and grow until a backward that is to sum over replicas (``set_requires_all_reduce``), so that
micro-batches before it cross the slow network once.

A secondary shard of the weights lies within a few neighbouring ranks, so that later all-gathers stay among these:

    first all-gather of a step, over all ranks    | a | b | c | d |   every rank then keeps half of it:   a b | c d
    every later one, over ranks 0, 1 or 2, 3      | a   b | c   d |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.communicator import Communicator, ScratchBuffers
from yafsdp_cc.engine.protocols import AllGather, AllReduce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.communicator import CommContext, Works
    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.streams import CommStream


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


class PartialReduceOutput:
    """The partial sum of one ``FlatParam``: [chunk] fp32 or fp64."""

    def __init__(self, replicas: Replicas, flat: FlatParam, all_reduce: AllReduce) -> None:
        self.flat = flat
        self.total = torch.zeros(flat.layout.chunks[flat.rank], dtype=flat.sum_dtype, device=flat.device)
        self.handle = replicas.stream.handle()
        self.used: list[bool] | None = None
        """Which parameters this rank has written; None while the sum is empty."""
        self.all_reduce = all_reduce
        self._replicas = replicas
        # Where operations do not order themselves, several all-reduces are in flight: each needs its own scratch.
        self._scratch = None if replicas.stream.is_ordered else ScratchBuffers(flat.device)
        context = replicas.context
        all_reduce.bind(context if self._scratch is None else context._replace(scratch=self._scratch))

    @property
    def nbytes(self) -> int:
        """Bytes of the sum, and of scratch that is its own."""
        return self.total.nbytes + (0 if self._scratch is None else self._scratch.nbytes)

    def add(self, parts: Iterable[tuple[int, Tensor]], used: Sequence[bool]) -> None:
        """Take in the sum of one backward; where this backward sums over replicas, issue that."""
        self.handle.wait()
        for start, part in parts:
            target = self.total.narrow(0, start, part.numel())
            if self.used is None:
                target.copy_(part)
            else:
                target.add_(part)
        self.used = list(used) if self.used is None else [a or b for a, b in zip(self.used, used, strict=True)]
        if self._replicas.sums:
            self.issue_all_reduce()

    def issue_all_reduce(self) -> None:
        """Sum over replicas, and have the total added to ``.grad``."""
        stream = self._replicas.stream
        stream.wait_for_caller()  # which has written the sum, or has waited for the reduce stream, which has
        stream.issue(self.handle, partial(self.all_reduce.start, self.total), self._finish)
        self._replicas.count_bytes(self.all_reduce.sent_bytes)

    def _finish(self) -> None:
        self.all_reduce.finish(self.total)
        used, self.used = self.used, None
        assert used is not None
        self.flat.add_to_grad([(0, self.total)], used)


@dataclass(eq=False)
class Replicas:
    """The partial sums of a model."""

    context: CommContext
    """Of the replicas' communicator."""
    stream: CommStream
    """Of the sums over replicas alone."""
    count_bytes: Callable[[int], None]
    """Is called with the bytes that this rank sends."""
    sums: bool = True
    """Whether a backward sums over replicas, or leaves its partial sums for a later one."""
    _outputs: list[PartialReduceOutput] = field(default_factory=list)

    def bind(self, flat: FlatParam) -> None:
        """Make the partial sum of ``flat``, and have sums over its shard's ranks go there."""
        assert flat.all_reduce is not None
        output = PartialReduceOutput(self, flat, flat.all_reduce)
        self._outputs.append(output)
        flat.add_sum = output.add

    def all_reduce_kept(self) -> None:
        """Sum over replicas what earlier backwards have left of groups that this one has not reduced.

        The same on all ranks, as reduces are. None is in flight.
        """
        for output in self._outputs:
            if output.used is not None:
                output.issue_all_reduce()
        self.wait()

    def wait(self) -> None:
        """Wait for all sums over replicas that were issued."""
        for output in self._outputs:
            output.handle.wait()

    def reset(self) -> None:
        """Drop partial sums, those in flight too."""
        for output in self._outputs:
            output.handle.abandon()
            output.used = None

    @property
    def is_idle(self) -> bool:
        """Whether there is no partial sum that was not summed over replicas."""
        return all(output.used is None for output in self._outputs)

    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends to sum all partial sums once, after any warm-up."""
        return sum(output.all_reduce.planned_bytes() for output in self._outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums and their scratch."""
        return self.context.scratch.nbytes + sum(output.nbytes for output in self._outputs)


class SecondaryAllGather(AllGather):
    """An all-gather over neighbouring ranks of what another one has gathered over all ranks.

    The secondary shard holds weights in the dtype of the forward until they change (Wang et al., "ZeRO++", 2023,
    section 4.2: hierarchical partitioning).

    Args:
        inner: over all ranks.
        flat: whose weights they are.
        neighbours: this rank's group; its size divides that of all ranks.
        device: of the weights.
    """

    def __init__(self, inner: AllGather, flat: FlatParam, neighbours: dist.ProcessGroup, device: torch.device) -> None:
        self.inner = inner
        self._flat = flat
        self._comm = Communicator(neighbours, device)
        self._shard = torch.empty(flat.unsharded_numel // self._comm.world, dtype=flat.compute_dtype, device=device)
        self._version: int | None = None
        """Of the weights that the secondary shard was taken from."""
        self._starting = -1
        """Of those that the last ``start`` gathers."""
        self._from_secondary = False

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        self.inner.bind(context)

    def reset(self) -> None:
        self.inner.reset()

    def scratch_bytes(self) -> int:
        return self.inner.scratch_bytes()

    def encoding(self) -> str:
        return self.inner.encoding()

    def planned_bytes(self) -> int:
        return self.inner.planned_bytes()

    def secondary_bytes(self) -> int:
        """Return the bytes that this rank sends where the weights come from the secondary shards."""
        return self._comm.peer_bytes(self._flat.unsharded_numel * self._flat.compute_dtype.itemsize)

    def memory(self) -> Mapping[str, int]:
        return {**self.inner.memory(), "secondary shard": self._shard.nbytes}

    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        self._starting = self._flat.version
        self._from_secondary = self._version == self._starting
        if not self._from_secondary:
            works = self.inner.start(output, held, scratch, async_op)
            self.sent_bytes = self.inner.sent_bytes
            return works
        own = self._comm.own_chunk(output)
        if self._comm.is_gloo or self._comm.world == 1:
            own.copy_(self._shard)
        self.sent_bytes = self._comm.peer_bytes(output.nbytes)
        return self._comm.all_gather(output, own if self._comm.is_gloo else self._shard, async_op)

    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        if not self._from_secondary:
            self.inner.finish(output, scratch)
            self._shard.copy_(self._comm.own_chunk(output))
            self._version = self._starting

    def stepped(self, before: int, after: int) -> None:
        self.inner.stepped(before, after)

    def expire(self) -> None:
        self._version = None
