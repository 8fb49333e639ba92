"""The compressed reduce-scatter: one message to each other rank, decoded and summed by the owner of the chunk.

    gradients   | chunk 0 | chunk 1 | chunk 2 |        of rank 1, whose own chunk stays as it is
                     │                   │
                encode, with the residual of the rank that it goes to
                     ▼                   ▼
                 message 0           message 2         one all-to-all of bytes
                     ▼                   ▼
    rank 0: message of 1, of 2, and its own chunk, decoded and added in fp32 in rank order

Sums are as those of the exact reduce-scatter: fp32, and nobody divides on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yafsdp_cc.compression import kernels
from yafsdp_cc.compression.codec import counts_of
from yafsdp_cc.compression.compressed_sum import CompressedSum
from yafsdp_cc.compression.config import EXACT, LOW_RANK
from yafsdp_cc.compression.encoder import RECEIVED, SENT, Encoder, Feedback, kept_of_noise, other_chunks
from yafsdp_cc.compression.powersgd import ChunkFactors
from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.protocols import ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.compression.compressed_sum import SummedBuffer
    from yafsdp_cc.compression.error_feedback import Residual
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.communicator import CommContext, Works
    from yafsdp_cc.engine.layout import Layout

_SUM, _OWN = "decoded sum", "own chunk"


class CompressedReduceScatter(CompressedSum, ReduceScatter):
    """Sums the gradients of a buffer by encoded messages, each chunk at its owner, with error feedback.

    Each other rank's messages have a residual of [chunk]; this rank's own chunk crosses no network and is exact.
    """

    def __init__(self, flat: SummedBuffer, schedule: CompressionSchedule, codec: str) -> None:
        self._exact_reduce = ExactReduceScatter(flat.layout.numel, flat.reduce_dtype)
        self._pending: Tensor | None = None
        """[chunk] fp32, deferred gradients of the own chunk."""
        self._has_deferred = False
        self._poison: Tensor | None = None
        """0-d, NaN where deferred gradients were not finite, which no residual takes in; else zero."""
        super().__init__(flat, schedule, codec)

    @property
    def _exact(self) -> ExactReduceScatter:
        return self._exact_reduce

    @property
    def _rows(self) -> int:
        return self.flat.layout.world - 1

    def _make_encoder(self, codec: str) -> Encoder:
        config, flat = self.schedule.config, self.flat
        if codec == LOW_RANK:
            return ChunkFactors(flat.layout, flat.rank, config.matrix_rank, config.block, flat.name, flat.device)
        return ChunkMessages(config.make(codec), flat.layout, flat.rank, flat.device)

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        context.scratch.reserve(_SUM, 4 * self._largest_step)
        if self.schedule.may_be_exact and context.comm.reduces_in_place:
            context.scratch.reserve(_OWN, self.chunk * self.flat.reduce_dtype.itemsize)
        if self.is_tuned:
            context.scratch.reserve(SENT, self._rows * self.message_room)
            context.scratch.reserve(RECEIVED, self._rows * self.message_room)

    @property
    def _largest_step(self) -> int:
        if self.is_tuned:
            return max(self._make_encoder(name).step for name in self.schedule.config.candidates)
        return 0 if self._encoder is None else self._encoder.step

    @property
    def message_room(self) -> int:
        """Bytes that each message may have, where the codec is chosen as training goes."""
        config = self.schedule.config
        return max(4 * config.block, *(config.make(name).message_bytes(self.chunk) for name in config.candidates))

    def bytes_with(self, codec: str) -> int:
        """Return the bytes that this rank would send per sum with a codec; ``fp32``: with exact sums."""
        if codec == EXACT:
            return self._exact.planned_bytes()
        return self.schedule.config.make(codec).message_bytes(self.chunk) * self._rows

    def set_codec(self, codec: str) -> None:
        super().set_codec(codec)
        self.context.scratch.reserve(_SUM, 4 * self._largest_step)

    @property
    def defers(self) -> bool:
        phase = self.schedule.phase
        can = self.residual is not None and self.schedule.recursion.carry == 1
        return can and self._encoder is not None and phase.encodes and not phase.keeps_exact

    def defer(self, grads: Tensor) -> None:
        assert self.residual is not None
        self.schedule.clip_gradients(self.flat.name, grads)
        for first, chunks in other_chunks(grads, self.flat.layout.world, self.flat.rank):
            kernels.accumulate(chunks, self.residual.rows(first, first + chunks.shape[0]))
        self._defer_own(self.context.comm.own_chunk(grads))
        poison = grads.sum(dtype=torch.float32).mul_(0.0)
        self._poison = poison.add_(self._poison) if self._has_deferred and self._poison is not None else poison
        self._has_deferred = True

    def _defer_own(self, own: Tensor) -> None:
        if self.momentum is not None and self.schedule.beta > 0:
            self._add_to_momentum(own, self.schedule.share / self.schedule.beta)  # it decays with the step's last one
            return
        if self._pending is None:
            self._pending = torch.zeros(self.chunk, dtype=torch.float32, device=own.device)
        if self._has_deferred:
            self._pending.add_(own)
        else:
            self._pending.copy_(own)

    def start(self, grads: Tensor, async_op: bool) -> Works:
        self._latch(grads)
        if not self._encodes:
            works = self._exact.start(grads, async_op)
            self.sent_bytes = self._exact.sent_bytes
            return works
        assert self._encoder is not None
        world = self.context.comm.world
        self.sent_bytes, works = 0, ()
        if world > 1:
            if self._has_deferred and self._poison is not None:
                grads.view(world, -1)[:, 0].add_(self._poison)  # all ranks are to see it
            self.sent_bytes = self._encoder.sent_bytes()
            works = self._encoder.start(grads, self._feedback(), async_op)
        if not self._keeps_exact:
            return works
        if self.context.comm.reduces_in_place:  # over the own chunk, which is decoded into the other sum later
            self._own_chunk().copy_(self.context.comm.own_chunk(grads))
        works = [*works, *self._exact.start(grads, async_op)]
        self.sent_bytes += self._exact.sent_bytes
        return works

    def finish(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        if self._encodes:
            yield from self._finish_encoded(grads)
            if self._keeps_exact:
                for start, part in self._exact.finish(grads):
                    self._keep_exact(part, start)
            return
        for start, part in self._exact.finish(grads):
            if self._keeps_exact:
                self._keep_exact(part, start)
            self._complete(part, start)
            yield start, part
        self._end(None)

    def _finish_encoded(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        encoder, comm = self._encoder, self.context.comm
        assert encoder is not None
        own = self._own_chunk() if self._keeps_exact and comm.reduces_in_place else comm.own_chunk(grads)
        for start in range(0, self.chunk, encoder.step):
            total = self.context.scratch.take(_SUM, min(encoder.step, self.chunk - start), torch.float32)
            mine = own.narrow(0, start, total.numel())
            if comm.world > 1:
                encoder.decode(mine, start, total)
            else:
                total.copy_(mine)
            if self._has_deferred and self._pending is not None:
                total.add_(self._pending.narrow(0, start, total.numel()))
            self._complete(total, start)
            yield start, total
        self._end(own)
        self._has_deferred = False

    def _own_chunk(self) -> Tensor:
        return self.context.scratch.take(_OWN, self.chunk, self.flat.reduce_dtype)

    @property
    def not_in_residual(self) -> Tensor | None:
        pending = self._pending if self._has_deferred else None
        if self.carried_over is None or pending is None:
            return self.carried_over if pending is None else pending
        return pending + self.carried_over

    def discard_deferred(self) -> None:
        super().discard_deferred()
        self._has_deferred = False

    def unsent(self) -> Tensor:
        """Return what this rank has not sent yet to each rank, [world, chunk] fp32.

        In its own row: what it adds to the next sum of its own chunk.
        """
        world, rank = self.flat.layout.world, self.flat.rank
        rows = torch.zeros(world, self.chunk, dtype=torch.float32, device=self.flat.device)
        if self.residual is not None:
            rows[[peer for peer in range(world) if peer != rank]] = self.residual.load()
        if (own := self.not_in_residual) is not None:
            rows[rank] += own
        return rows

    def _hand_over(self, residual: Residual) -> Tensor:
        total = torch.zeros(self.chunk, dtype=torch.float32, device=self.flat.device)
        comm, scratch, block = self.context.comm, self.context.scratch, residual.block
        room = self.message_room // 4 // block * block
        for buffer in (SENT, RECEIVED):
            scratch.reserve(buffer, self._rows * 4 * room)
        for start in range(0, self.chunk, room):
            end = min(start + room, self.chunk)
            size = self._rows * (end - start)
            sent = scratch.take(SENT, size, torch.float32).view(self._rows, -1)
            received = scratch.take(RECEIVED, size, torch.float32).view(self._rows, -1)
            sent.copy_(residual.columns(start, end).load())
            for work in comm.exchange(received.view(torch.uint8), sent.view(torch.uint8), async_op=False):
                work.wait()
            for row in received:
                total[start:end].add_(row)
        return total

    def memory(self) -> Mapping[str, int]:
        pending = 0 if self._pending is None else self._pending.nbytes
        return {"residual": super().memory()["residual"] + pending}


class ChunkMessages(Encoder):
    """Encodes each other rank's chunk by a codec, and sums decoded messages in rank order."""

    def __init__(self, codec: Codec, layout: Layout, rank: int, device: torch.device) -> None:
        self.codec = codec
        self._rank = rank
        self._world = layout.world
        self._chunk = layout.chunk
        self._step = kernels.part_of(codec, layout.chunk, device)
        self._size = codec.message_bytes(layout.chunk)
        extents = [(extent.offset, extent.end) for extent in layout.extents]
        counts = counts_of(extents, layout.numel, codec.block, device)
        self._counts = None if counts is None else counts.view(layout.world, -1)

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        for buffer in (SENT, RECEIVED):
            context.scratch.reserve(buffer, (self._world - 1) * self._size)

    @property
    def kept(self) -> float:
        return kept_of_noise(self.codec.name, self.codec.block)

    @property
    def step(self) -> int:
        return self._step

    def sent_bytes(self) -> int:
        return self._size * (self._world - 1)

    def start(self, values: Tensor, feedback: Feedback, async_op: bool) -> Works:
        messages, residual, noise = self._messages(SENT), feedback.residual, feedback.noise
        for first, chunks in other_chunks(values, self._world, self._rank):
            last, peer = first + chunks.shape[0], first + (first >= self._rank)
            kernels.encode(
                self.codec,
                chunks,
                messages[first:last],
                counts=None if self._counts is None else self._counts[peer : peer + chunks.shape[0]],
                residual=None if residual is None else residual.rows(first, last),
                recursion=feedback.recursion,
                noise=noise._replace(first=peer * self._chunk) if noise and self.codec.rounds_randomly else None,
            )
        if feedback.error is not None and residual is not None:
            feedback.error.observe(self.codec, messages, residual)
        return self.context.comm.exchange(self._messages(RECEIVED), messages, async_op)

    def decode(self, own: Tensor | None, start: int, total: Tensor) -> None:
        kernels.decode_sum(self.codec, self._messages(RECEIVED), self._chunk, own, self._rank, total, start)

    def _messages(self, buffer: str) -> Tensor:
        peers = self._world - 1
        return self.context.scratch.take(buffer, peers * self._size, torch.uint8).view(peers, -1)
