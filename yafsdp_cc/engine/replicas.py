"""Sums over replicas (HSDP): what the ranks of a shard have summed, summed once more over those with the same shard.

    gradient buffer ── reduce-scatter over the shard ──► partial sum ── all-reduce over replicas ──► divided, ``.grad``

Partial sums stay and grow until a backward that is to sum over replicas (``set_requires_all_reduce``), so that
micro-batches before it cross the slow network once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.communicator import ScratchBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from yafsdp_cc.engine.communicator import CommContext
    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.protocols import AllReduce
    from yafsdp_cc.engine.streams import CommStream


class PartialReduceOutput:
    """The partial sum of one ``FlatParam``: [chunk] fp32 or fp64."""

    def __init__(self, replicas: Replicas, flat: FlatParam, all_reduce: AllReduce) -> None:
        self.flat = flat
        self.total = torch.zeros(flat.layout.chunk, dtype=flat.sum_dtype, device=flat.device)
        self.handle = replicas.stream.handle()
        self.used: list[bool] | None = None
        """Which parameters this rank has written; None while the sum is empty."""
        self._replicas = replicas
        self._all_reduce = all_reduce
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
            self._replicas.stream.issue(self.handle, partial(self._all_reduce.start, self.total), self._finish)
            self._replicas.count_bytes(self._all_reduce.sent_bytes)

    def _finish(self) -> None:
        self._all_reduce.finish(self.total)
        used, self.used = self.used, None
        assert used is not None
        self.flat.add_to_grad([(0, self.total)], used)


class Replicas:
    """The partial sums of a model.

    Args:
        context: of the replicas' communicator.
        stream: of the reduces.
        count_bytes: is told the bytes that this rank sends.
    """

    def __init__(self, context: CommContext, stream: CommStream, count_bytes: Callable[[int], None]) -> None:
        self.context = context
        self.stream = stream
        self.count_bytes = count_bytes
        self.sums = True
        """Whether a backward sums over replicas, or leaves its partial sums for a later one."""
        self._outputs: dict[FlatParam, PartialReduceOutput] = {}

    def bind(self, flat: FlatParam) -> None:
        """Make the partial sum of ``flat``, and have sums over its shard's ranks go there."""
        all_reduce = flat.all_reduce
        assert all_reduce is not None
        self._outputs[flat] = output = PartialReduceOutput(self, flat, all_reduce)
        flat.add_sum = output.add

    def wait(self) -> None:
        """Wait for all sums over replicas that were issued."""
        for output in self._outputs.values():
            output.handle.wait()

    def reset(self) -> None:
        """Drop partial sums, those in flight too."""
        for output in self._outputs.values():
            output.handle.abandon()
            output.used = None

    @property
    def is_idle(self) -> bool:
        """Whether there is no partial sum that was not summed over replicas."""
        return all(output.used is None for output in self._outputs.values())

    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends to sum all partial sums once, after any warm-up."""
        return sum(flat.all_reduce.planned_bytes() for flat in self._outputs if flat.all_reduce is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums and their scratch."""
        return sum(output.nbytes for output in self._outputs.values())
