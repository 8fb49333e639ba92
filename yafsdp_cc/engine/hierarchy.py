"""Communication in two levels: sums over replicas (HSDP), and weights gathered among neighbouring ranks (hpZ).

With replicas, the sum over a shard's ranks is summed once more over the ranks that have the same shard:

    gradient buffer ── reduce-scatter over the shard ──► partial sum ── all-reduce over replicas ──► divided, ``.grad``

On CUDA the all-reduce has a stream of its own: later reduce-scatters, all-gathers and users of the gradient buffer wait
for the copy to the partial sum, but not for the network between replicas.

Partial sums accumulate until a backward that sums over replicas (``set_requires_all_reduce``), so that several
micro-batches cross the slow network once.

A secondary shard of the weights lies within a few neighbouring ranks, so that later all-gathers involve only these:

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
from yafsdp_cc.engine.step_state import StepState, history, unreduced

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
        nbytes: bytes of the tensor that is summed.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def planned_bytes(self) -> int:
        return self.context.comm.all_reduce_bytes(self._nbytes)

    def start(self, total: Tensor, async_op: bool) -> Works:
        self.sent_bytes = self.context.comm.all_reduce_bytes(total.nbytes)
        return self.context.comm.all_reduce(total, async_op)


class PartialReduceOutput(StepState):
    """The partial sum of one ``FlatParam``: [chunk] fp32 or fp64."""

    used: list[bool] | None = unreduced(None)
    """For each parameter, whether this rank has written a gradient; None while the sum is empty."""

    def __init__(self, replicas: Replicas, flat: FlatParam, all_reduce: AllReduce) -> None:
        self.flat = flat
        self.total = torch.zeros(flat.layout.chunks[flat.rank], dtype=flat.sum_dtype, device=flat.device)
        self.handle = replicas.stream.handle()
        self.all_reduce = all_reduce
        self._replicas = replicas
        # On a CPU several all-reduces are in flight at once: each needs its own scratch.
        self._scratch = None if replicas.stream.is_ordered else ScratchBuffers(flat.device)
        context = replicas.context
        all_reduce.bind(context if self._scratch is None else context._replace(scratch=self._scratch))

    @property
    def nbytes(self) -> int:
        """Bytes of the sum and of its own scratch."""
        return self.total.nbytes + (0 if self._scratch is None else self._scratch.nbytes)

    def add(self, parts: Iterable[tuple[int, Tensor]], used: Sequence[bool]) -> None:
        """Add the sum of one backward to the partial sum; if this backward sums over replicas, issue the all-reduce."""
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
        """Issue the all-reduce over replicas, whose result is added to ``.grad``."""
        stream = self._replicas.stream
        # in a reduce's ``finish`` the current stream is that of reduces, which has written the sum; others have waited
        stream.wait_for_caller()
        stream.issue(self.handle, partial(self.all_reduce.start, self.total), self._finish)
        self._replicas.count_bytes(self.all_reduce.sent_bytes)

    def _finish(self) -> None:
        self.all_reduce.finish(self.total)
        used, self.used = self.used, None
        assert used is not None
        self.flat.add_to_grad([(0, self.total)], used)


class _ReplicasStep(StepState):
    """Member of ``Replicas`` that differs from step to step."""

    sums: bool = history(True)
    """Whether a backward sums over replicas; else its partial sums wait for a later backward."""


@dataclass(eq=False)
class Replicas(_ReplicasStep):
    """The partial sums of a model."""

    context: CommContext
    """Communicator and scratch buffers of the replicas."""
    stream: CommStream
    """Stream that runs nothing but sums over replicas."""
    count_bytes: Callable[[int], None]
    """Function called with the bytes that this rank sends."""
    outputs: list[PartialReduceOutput] = field(default_factory=list)

    def bind(self, flat: FlatParam) -> None:
        """Make the partial sum of ``flat``, and direct sums over its shard's ranks to it."""
        assert flat.all_reduce is not None
        output = PartialReduceOutput(self, flat, flat.all_reduce)
        self.outputs.append(output)
        flat.add_sum = output.add

    def all_reduce_kept(self) -> None:
        """Sum over replicas the partial sums that earlier backwards left and this backward did not reduce.

        Issued in the same order on all ranks, with no other all-reduce in flight.
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
        """Bytes of the partial sums and their scratch."""
        return self.context.scratch.nbytes + sum(output.nbytes for output in self.outputs)


class SecondaryAllGather(AllGather):
    """An all-gather over neighbouring ranks of weights that ``inner`` has gathered over all ranks.

    The secondary shard holds weights in the dtype of the forward until they change (Wang et al., "ZeRO++", 2023,
    section 4.2: hierarchical partitioning).

    Args:
        inner: the all-gather over all ranks.
        flat: the weights.
        neighbours: this rank's group; its size divides the number of all ranks.
        device: device of the weights.
    """

    def __init__(self, inner: AllGather, flat: FlatParam, neighbours: dist.ProcessGroup, device: torch.device) -> None:
        self.inner = inner
        self._flat = flat
        self._comm = Communicator(neighbours, device)
        self._shard = torch.empty(flat.unsharded_numel // self._comm.world, dtype=flat.compute_dtype, device=device)
        self._version: int | None = None
        """Version of the weights in the secondary shard; None if it is empty."""
        self._starting = -1
        """Version of the weights that the last ``start`` gathers."""
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
        """Return the bytes that this rank sends to gather from secondary shards."""
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
