"""Sums of gradients over the replicas of a sharded model (HSDP).

The sum over a shard's ranks is summed once more over the ranks that have the same shard:

    gradient buffer ── reduce-scatter over the shard ──► partial sum ── all-reduce over replicas ──► divided, ``.grad``

On CUDA the all-reduce has a stream of its own: later reduce-scatters, all-gathers and users of the gradient buffer wait
for the copy to the partial sum, but not for the network between replicas.

Partial sums accumulate until a backward that sums over replicas (``set_requires_all_reduce``), so that several
micro-batches cross the slow network once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.communicator import CommContext, ScratchBuffers, Works
from yafsdp_cc.engine.protocols import AllReduce
from yafsdp_cc.engine.step_state import StepState, history, unreduced

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.streams import CommStream


class ExactAllReduce(AllReduce):
    """The backend's all-reduce of a tensor of ``nbytes``."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def planned_bytes(self) -> int:
        return self.context.comm.all_reduce_bytes(self._nbytes)

    def start(self, total: Tensor, async_op: bool) -> Works:
        self.sent_bytes = self.context.comm.all_reduce_bytes(total.nbytes)
        return self.context.comm.all_reduce(total, async_op)


class PartialReduceOutput(StepState):
    """Gradients of one ``FlatParam``, summed over a shard and not yet over replicas: [chunk] fp32 or fp64."""

    used: list[bool] | None = unreduced(None)
    """For each parameter, whether this rank's gradient is in the partial sum; None while the sum is empty."""

    def __init__(self, replicas: ReplicaSums, flat: FlatParam, all_reduce: AllReduce) -> None:
        self.flat = flat
        self.total = torch.zeros(flat.layout.chunks[flat.rank], dtype=flat.sum_dtype, device=flat.device)
        self.handle = replicas.stream.handle()
        self.all_reduce = all_reduce
        self._replicas = replicas
        # On a CPU several all-reduces are in flight at once: each needs its own scratch buffers.
        self._scratch = None if replicas.stream.is_ordered else ScratchBuffers(flat.device)
        context = replicas.context
        all_reduce.bind(context if self._scratch is None else context._replace(scratch=self._scratch))

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sum and of its scratch buffers."""
        return self.total.nbytes + (0 if self._scratch is None else self._scratch.nbytes)

    def add(self, parts: Iterable[tuple[int, Tensor]], used: Sequence[bool]) -> None:
        """Add a backward's sum over the shard to the partial sum; issue the all-reduce if it sums over replicas."""
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
        """Issue the all-reduce of the partial sum over replicas, whose result is added to ``.grad``."""
        stream = self._replicas.stream
        # the current stream has written the partial sum (in a reduce's ``finish``), or has waited for the reduces
        stream.wait_for_caller()
        stream.issue(self.handle, partial(self.all_reduce.start, self.total), self._finish)
        self._replicas.count_bytes(self.all_reduce.sent_bytes)

    def _finish(self) -> None:
        self.all_reduce.finish(self.total)
        used, self.used = self.used, None
        assert used is not None
        self.flat.add_to_grad([(0, self.total)], used)


class ReplicaSums(StepState):
    """The partial sums of a model's gradients, which are summed over replicas.

    Args:
        context: communicator and scratch buffers of the replicas.
        stream: stream that runs nothing but sums over replicas.
        count_bytes: function that gets the number of bytes that this rank sends in an all-reduce.
    """

    sums: bool = history(True)
    """Whether a backward sums over replicas; else its partial sums wait for a later backward."""

    def __init__(self, context: CommContext, stream: CommStream, count_bytes: Callable[[int], None]) -> None:
        self.context, self.stream, self.count_bytes = context, stream, count_bytes
        self.outputs: list[PartialReduceOutput] = []

    def bind(self, flat: FlatParam) -> None:
        """Make the partial sum of ``flat``, and let the reduce-scatter of ``flat`` add to it."""
        assert flat.all_reduce is not None
        output = PartialReduceOutput(self, flat, flat.all_reduce)
        self.outputs.append(output)
        flat.add_sum = output.add

    def all_reduce_kept(self) -> None:
        """All-reduce the partial sums that earlier backwards have left and this backward has not all-reduced.

        The all-reduces are issued in the same order on all ranks, with no other all-reduce in flight.
        """
        for output in self.outputs:
            if output.used is not None:
                output.issue_all_reduce()
        self.wait()

    def wait(self) -> None:
        """Wait for all issued sums over replicas."""
        for output in self.outputs:
            output.handle.wait()

    def abandon(self) -> None:
        """Drop the sums over replicas that are in flight."""
        for output in self.outputs:
            output.handle.abandon()

    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends to sum all partial sums once, after any warm-up."""
        return sum(output.all_reduce.planned_bytes() for output in self.outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of all partial sums and of the scratch buffers of their all-reduces."""
        return self.context.scratch.nbytes + sum(output.nbytes for output in self.outputs)
