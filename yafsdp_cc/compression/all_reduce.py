"""The compressed all-reduce over replicas. With a codec every rank sends its message to all others, and all decode the
same messages in rank order; with ``powersgd`` all decode the same summed factors. So all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import LOW_RANK
from yafsdp_cc.compression.error_feedback import RECEIVED, Encoder, Feedback
from yafsdp_cc.compression.powersgd import SharedFactors
from yafsdp_cc.compression.reduce_scatter import CodecEncoder, CompressedSum
from yafsdp_cc.engine.hsdp import ExactAllReduce
from yafsdp_cc.engine.layout import align
from yafsdp_cc.engine.protocols import AllReduce

if TYPE_CHECKING:
    from yafsdp_cc.compression.error_feedback import Residual, SummedBuffer
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.communicator import CommContext, Works
    from yafsdp_cc.engine.param import FSDPParam


class CompressedAllReduce(CompressedSum, AllReduce):
    """Sums partial sums [chunk] over replicas by encoded messages, with error feedback on every rank."""

    _exact: ExactAllReduce

    def __init__(self, flat: SummedBuffer, schedule: CompressionSchedule, codec: str) -> None:
        self._residual_shape = (1, flat.layout.chunks[flat.rank])
        self._exact = ExactAllReduce(flat.layout.chunks[flat.rank] * flat.sum_dtype.itemsize)
        self._exact_total: Tensor | None = None
        """Copy of the partial sum [chunk] fp32, which is summed exactly, too, in ``Phase.BOTH``; else None."""
        super().__init__(flat, schedule, codec)

    @property
    def senders(self) -> int:
        return self.context.comm.world

    def _make_encoder(self, codec: str) -> Encoder:
        config = self.schedule.config
        return SharedFactors(self.flat, config) if codec == LOW_RANK else SharedMessages(self.flat, config.make(codec))

    def start(self, total: Tensor, async_op: bool) -> Works:
        self._latch(total)
        encoder = self._encoder
        self._exact_total = None
        if not self._encodes or encoder is None:
            works = self._exact.start(total, async_op)
            self.sent_bytes = self._exact.sent_bytes
            return works
        if self._keeps_exact:
            assert self.exact_mean is not None
            in_place = not self._adds_exact
            self._exact_total = self.exact_mean.copy_(total) if in_place else total.to(torch.float32, copy=True)
        with self._frozen_aside():
            works = encoder.start(total, self._feedback(), async_op)
        self.sent_bytes = encoder.sent_bytes()
        if self._exact_total is not None:
            works = [*works, *self._exact.start(self._exact_total, async_op)]
            self.sent_bytes += self._exact.sent_bytes
        return works

    def finish(self, total: Tensor) -> None:
        summed = total
        if self._encodes and self._encoder is not None:
            summed = total if total.dtype == torch.float32 else torch.empty_like(total, dtype=torch.float32)
            if self.estimate is not None:
                self._encoder.decode_differences(self.estimate, 0, summed)
            else:
                self._encoder.decode(None, 0, summed)
        elif self._keeps_exact:
            self._keep_exact(total, 0)
        self._complete(summed, 0)
        self._end(None)
        if summed is not total:
            total.copy_(summed)
        if self._exact_total is not None:
            self._keep_exact(self._exact_total, 0)
            self._exact_total = None

    def unsent(self) -> Tensor:
        """Return what this rank has not sent yet, [chunk] fp32: residual and its share of carried-over gradients."""
        total = torch.zeros(self.chunk, dtype=torch.float32, device=self.flat.device)
        self._add_residual(total)
        return total if self.carried_over is None else total.add_(self.carried_over, alpha=1 / self.context.comm.world)

    def _residuals_of(self, param: FSDPParam) -> Iterator[Residual]:
        first, end = param.span
        if self.residual is not None and first < end:
            yield self.residual.span(first, 1, align(end, self.residual.block) - first)

    def _add_residual(self, values: Tensor) -> None:
        if self.residual is not None and self.estimate is None:
            values.add_(self.residual.load()[0])


class SharedMessages(CodecEncoder):
    """Encodes a rank's partial sum by a codec, and sends the message to every rank."""

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        context.scratch.reserve(RECEIVED, context.comm.world * self._size)

    def sent_bytes(self) -> int:
        return self._size * (self.context.comm.world - 1)

    def start(self, values: Tensor, feedback: Feedback, async_op: bool) -> Works:
        if not self.chunk:  # an empty chunk is empty in every replica: there is nothing to exchange
            return ()
        messages = self._received()
        own = messages.narrow(0, self.context.comm.rank, 1)
        self._encode(values.unsqueeze(0), own, range(self._rank, self._rank + 1), feedback)
        return self.context.comm.all_gather(messages.view(-1), own.view(-1), async_op)

    def decode(self, own: Tensor | None, start: int, total: Tensor) -> None:
        error_feedback.decode_sum(self.codec, self._received(), self.chunk, None, 0, total, start)

    def _received(self) -> Tensor:
        world = self.context.comm.world
        return self.context.scratch.take(RECEIVED, world * self._size, torch.uint8).view(world, self._size)
