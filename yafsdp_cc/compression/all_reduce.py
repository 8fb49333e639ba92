"""The compressed all-reduce over replicas, and the compressed mean of whole buffers. All ranks get the same bits.

``CompressedAllReduce``: every rank sends its message to all others, and all decode the same messages in rank order.
``CompressedMean`` (for ``ReplicatedOneBitAdam``) encodes twice:

    worker w    m_w + e_w   | 0 | 1 | 2 |     one message for each owner of a chunk, its own too; e_w: what is lost
                              ▼   ▼   ▼
    owner of 1         mean of messages + e_s    one message for all; e_s: what is lost
                              ▼   ▼   ▼
    every rank  mean        | 0 | 1 | 2 |     decoded from the same bytes

Both errors are those of Tang et al., "1-bit Adam", 2021, algorithm 1. Summed over calls, the means fall short of exact
ones by the mean over workers of e_w, and e_s: less than a call's worth, whatever the codec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import LOW_RANK, counts_of
from yafsdp_cc.compression.error_feedback import RECEIVED, Encoder, Feedback, Residual
from yafsdp_cc.compression.powersgd import SharedFactors
from yafsdp_cc.compression.reduce_scatter import CodecEncoder, CompressedSum
from yafsdp_cc.engine.communicator import Communicator
from yafsdp_cc.engine.hierarchy import ExactAllReduce
from yafsdp_cc.engine.protocols import AllReduce

if TYPE_CHECKING:
    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.compression.error_feedback import SummedBuffer
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.communicator import CommContext, Works
    from yafsdp_cc.engine.layout import Layout


class CompressedAllReduce(CompressedSum, AllReduce):
    """Sums partial sums [chunk] over replicas by encoded messages, with error feedback on every rank."""

    _exact: ExactAllReduce

    def __init__(self, flat: SummedBuffer, schedule: CompressionSchedule, codec: str) -> None:
        self._residual_shape = (1, flat.layout.chunks[flat.rank])
        self._exact = ExactAllReduce(flat.layout.chunks[flat.rank] * flat.sum_dtype.itemsize)
        self._exact_total: Tensor | None = None
        """Partial sum [chunk] fp32 that is summed exactly besides, in ``Phase.BOTH``; else None."""
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
        if self.estimate is None:
            self._add_residual(total)
        return total if self.carried_over is None else total.add_(self.carried_over, alpha=1 / self.context.comm.world)

    def _add_residual(self, values: Tensor) -> None:
        if self.residual is not None:
            values.add_(self.residual.load()[0])


class SharedMessages(CodecEncoder):
    """Encodes a rank's partial sum; every rank gets every message."""

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        context.scratch.reserve(RECEIVED, context.comm.world * self._size)

    def sent_bytes(self) -> int:
        return self._size * (self.context.comm.world - 1)

    def start(self, values: Tensor, feedback: Feedback, async_op: bool) -> Works:
        if not self.chunk:  # this rank's chunk is empty in every replica
            return ()
        messages = self._received()
        own = messages.narrow(0, self.context.comm.rank, 1)
        self._encode(values.unsqueeze(0), own, range(self._rank, self._rank + 1), feedback)
        return self.context.comm.all_gather(messages.view(-1), own.view(-1), async_op)

    def decode(self, own: Tensor | None, start: int, total: Tensor) -> None:
        if self.chunk:
            error_feedback.decode_sum(self.codec, self._received(), self.chunk, None, 0, total, start)

    def _received(self) -> Tensor:
        world = self.context.comm.world
        return self.context.scratch.take(RECEIVED, world * self._size, torch.uint8).view(world, -1)


class CompressedMean:
    """Averages whole buffers of one size over ranks, encoded in both directions.

    Args:
        layout: layout of a buffer, one chunk for each rank; padding is zero.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, codec: Codec, layout: Layout) -> None:
        self.world: int = group.size()
        self.rank: int = group.rank()
        self.chunk = layout.chunks[0]
        self.worker = Residual.zeros(self.world, self.chunk, torch.float32, codec.block, device)
        """Residual [world, chunk]: what this rank's messages to the owner of each chunk have lost."""
        self.server = Residual.zeros(1, self.chunk, torch.float32, codec.block, device)
        """Residual [1, chunk]: what this rank's messages of the mean of its own chunk have lost."""
        self._group = group
        self._comm = Communicator(group, device)
        self._codec = codec
        self._counts = counts_of(layout, codec.block, device)
        self._gaps = layout.gaps
        size = codec.message_bytes(self.chunk)
        self._sent = torch.zeros(self.world, size, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to others in one ``average``."""
        return 2 * (self.world - 1) * self._sent[0].nbytes

    @torch.no_grad()
    def average(self, buffer: Tensor) -> None:
        """Overwrite ``buffer`` [numel] fp32 with the compressed mean. A collective."""
        chunks, codec, counts = buffer.view(self.world, -1), self._codec, self._counts
        error_feedback.encode(codec, chunks, self._sent, counts=counts, residual=self.worker)
        dist.all_to_all_single(self._received.view(-1), self._sent.view(-1), group=self._group)
        # One call for all elements: only native kernels can decode in parts.
        error_feedback.decode_sum(codec, self._received, self.chunk, None, 0, chunks[self.rank])
        chunks[self.rank].div_(self.world)
        self._zero_padding(buffer)
        mine = slice(self.rank, self.rank + 1)
        own_counts = None if counts is None else counts[mine]
        error_feedback.encode(codec, chunks[mine], self._sent[mine], counts=own_counts, residual=self.server)
        for work in self._comm.all_gather(self._sent.view(-1), self._sent[self.rank], async_op=False):
            work.wait()
        error_feedback.decode(codec, self._sent, chunks)
        self._zero_padding(buffer)

    def _zero_padding(self, buffer: Tensor) -> None:
        for start, end in self._gaps:  # a codec need not decode padding to zero
            buffer[start:end].zero_()

    @torch.no_grad()
    def unsent(self) -> Tensor:
        """Return the exact means minus the compressed ones, summed over calls, [numel] fp32. A collective."""
        left = self.worker.load()
        left[self.rank].add_(self.server.load()[0], alpha=self.world)
        dist.all_reduce(left, group=self._group)
        return left.view(-1).div_(self.world)

    def carry_over(self, unsent: Tensor) -> None:
        """Replace all residuals by ``unsent`` [numel], the same on all ranks."""
        self.server.clear()
        self.worker.store(unsent.view(self.world, -1))
