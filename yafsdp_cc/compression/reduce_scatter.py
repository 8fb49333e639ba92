"""The compressed reduce-scatter, and the base ``CompressedSum`` that it shares with the all-reduce (``all_reduce``).

    gradients   | chunk 0 | chunk 1 | chunk 2 |        of rank 1, whose own chunk stays as it is
                     │                   │
                encode, with the residual of the rank that it goes to
                     ▼                   ▼
                 message 0           message 2         one all-to-all of bytes
                     ▼                   ▼
    rank 0: message of 1, of 2, and its own chunk, decoded and added in fp32 in rank order

Like that of the exact reduce-scatter, the sum is in fp32, and not divided by the number of ranks.

A ``CompressedSum`` belongs to one flat buffer, and has all state that outlives a change of codec. Its ``Encoder`` makes
messages of gradients, exchanges them and decodes their sum. The ``Phase`` of the ``CompressionSchedule`` decides what
each ``start`` sends.

**Momentum form.** The residual of every rank w is its momentum M, by ``error_feedback``'s recursion for a = 1 − β,

    h = M + g_w;   m = C(h);   M ← h − (1 − β)·D(m);   the owner's update: (1 − β)/N · Σ D(m)

Where C is exact, M becomes β(M + g_w) and the update (1 − β)/N · Σ(M + g_w): residual and Adam's first moment are one
buffer (Ahn et al., "Dion", 2025, algorithm 1, whose C is of low rank; Karimireddy et al., 2019, for the feedback). The
owner's own gradient crosses no network and so is exact. It is added to the optimizer's first moment, e ← β·e + (1 −
β)/N · g, and β·e is a term of the update: a first moment learned from exact sums during the warm-up continues, and
fades. SGD's momentum is a sum where Adam's is an average: e ← β·e + 1/N · g, with a ``share`` of 1 in place of 1 − β.
Messages and residuals are the same; the update is multiplied by ``share``.

**Differences** (EF21, ``error_feedback``). A residual is minus the estimate that others have of this rank's gradients.
A chunk's owner keeps the sum of all other ranks' estimates, adds decoded messages to it, and uses it in place of their
sum; its own part is exact. Estimates are fp32: a rounding error in an estimate would stay in all later sums.
"""

from __future__ import annotations

import warnings
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import AUTO, LOW_RANK, Noise, counts_of
from yafsdp_cc.compression.config import EXACT
from yafsdp_cc.compression.error_feedback import (
    CLASSIC,
    PART,
    RECEIVED,
    SENT,
    SUM,
    CompressionError,
    Encoder,
    Feedback,
    Residual,
    lost_share,
    ops_for,
    other_chunks,
)
from yafsdp_cc.compression.powersgd import ChunkFactors, FactorEncoder
from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.layout import align
from yafsdp_cc.engine.protocols import Collective, ReduceScatter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.compression.error_feedback import SummedBuffer
    from yafsdp_cc.compression.powersgd import LowRank
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.communicator import CommContext, Works
    from yafsdp_cc.engine.param import FSDPParam

_OWN = "own chunk"


class CompressedSum(Collective):
    """A sum over ranks of one buffer, exact or by encoded messages: the phase of ``schedule`` decides.

    Args:
        codec: the name of a codec or ``powersgd``; ``fp32`` for exact sums. ``auto``: sums are exact until
            ``set_codec``, and scratch buffers have room for any of the configuration's candidates.
    """

    feeds_back = True
    _exact: Collective
    """Collective that sums the same buffer exactly, in phases that do not encode."""
    _residual_shape: tuple[int, int]
    """Shape of the residual's values: messages, and elements of each."""

    def __init__(self, flat: SummedBuffer, schedule: CompressionSchedule, codec: str) -> None:
        self.flat = flat
        self.chunk = flat.layout.chunks[flat.rank]
        self.schedule = schedule
        self.is_tuned = codec == AUTO
        """Whether ``CodecAutotuner`` chooses the codec during training."""
        self.codec_name = EXACT if self.is_tuned else codec
        self.residual: Residual | None = None
        """Residual of the messages; None without a codec, without error feedback, and until the buffer is trained."""
        self.carried_over: Tensor | None = None
        """Gradients [chunk] fp32 of a checkpoint that messages had yet to send, and that no residual here holds. They
        are added to the next encoded sum, or to the next exact one where ``CodecAutotuner`` has chosen exact sums."""
        self.momentum: Tensor | None = None
        """First moment of the optimizer, [chunk] fp32: a mean over ranks, without a loss scale. Used in the momentum
        form, where the schedule has a ``beta``."""
        self.exact_mean: Tensor | None = None
        """Mean gradient of exact sums, [chunk] fp32, if ``Phase.keeps_exact``, until the optimizer sets it None."""
        self.estimate: Tensor | None = None
        """Sum of all senders' decoded messages so far, [chunk] fp32; None unless messages hold differences (EF21)."""
        self.compression_error: CompressionError | None = None
        """Measured error of the messages since ``watch``; None while compression errors are not measured."""
        self._is_decoded = True
        """Whether the messages encoded last, if of differences (EF21), were added to ``estimate``."""
        self._encoded_in: object = None
        """``CompressionSchedule.backward`` at the last sum if it was encoded, else None."""
        self._encoder = None if self.codec_name == EXACT else self._make_encoder(codec)
        self._encodes = self._keeps_exact = self._adds_exact = False
        self._waits = False
        """Whether ``exact_mean`` holds sums of this replica that are still to be summed over replicas."""
        self._frozen: list[FSDPParam] = []
        """Frozen parameters of the buffer, of which this sum has no gradient, while other parameters are trained."""
        self._pending: Tensor | None = None
        """Deferred gradients of this rank's own chunk, [chunk] fp32; meaningless while none are deferred."""
        self._poison: Tensor | None = None
        """Scalar tensor: NaN if deferred gradients were not finite (residuals leave such blocks out), else zero. None
        while no gradients are deferred."""
        self.is_unused = False
        """Whether a sum in the momentum form was made that no step of the optimizer has used."""
        self._moment: Tensor | None = None
        """``momentum`` if the last sum begun is in the momentum form, else None."""
        self._carried: Tensor | None = None
        """``carried_over`` if the last sum begun adds it, else None; referenced as the stream may still read it."""
        self._owed: Residual | None = None
        """Residual if the last sum begun is exact and adds it, else None; referenced like ``_carried``."""
        self.rounded = 0
        """Number of sums so far whose messages were rounded at random: the counter of the random numbers."""
        schedule.adopt(self)

    def encoding(self) -> str:
        return "" if self.codec_name == EXACT else self.codec_name

    @abstractmethod
    def _make_encoder(self, codec: str) -> Encoder:
        """Build the encoder for ``codec``: messages of a codec, or factors for ``powersgd``."""

    @abstractmethod
    def unsent(self) -> Tensor:
        """Return what this rank has not sent yet, fp32: residuals, and gradients carried over to the next sum."""

    @abstractmethod
    def _add_residual(self, values: Tensor) -> None:
        """Add the residual to ``values``, laid out like the argument of ``start``; with EF21 add nothing."""

    @torch.inference_mode(False)  # buffers made here are written in backwards: they must not be inference tensors
    def bind(self, context: CommContext) -> None:
        super().bind(context)
        if self.schedule.clip is not None:
            self.schedule.clip.reserve(self.flat.name, self.flat.device)
        if self._encoder is None or self.schedule.may_be_exact:
            self._exact.bind(context)
        for name in self.schedule.config.candidates if self.is_tuned else ():
            self._make_encoder(name).bind(context)
        if self._encoder is not None:
            self._encoder.bind(context)
            if self.flat.trainable:
                self._make_residual()

    def _make_residual(self) -> None:
        config = self.schedule.config
        if self.residual is None and (dtype := config.residual_dtype) is not None:
            self.residual = Residual.zeros(*self._residual_shape, dtype, config.block, self.flat.device)
            if config.sends_differences and self.senders:
                self.estimate = torch.zeros(self.chunk, dtype=torch.float32, device=self.flat.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def set_codec(self, codec: str) -> None:
        """Encode by another codec from the next ``start`` on; ``fp32``: sum exactly. No reduce may be in flight.

        A change to another codec keeps the residual. After a change to exact sums the first sum adds the residual to
        the gradients, rounded to their dtype, so that none is lost; estimates (EF21) are dropped.
        """
        if codec == self.codec_name:
            return
        self.codec_name = codec
        if codec == EXACT:
            self._exact.bind(self.context)
            self._encoder = None
            if self.estimate is not None:
                self.residual = self.estimate = None
        else:
            self._encoder = self._make_encoder(codec)
            self._encoder.bind(self.context)
            self._make_residual()

    def before_sum(self) -> None:
        """Refuse, or warn of, a second sum in one step of the momentum form; make ``exact_mean`` before a reduce."""
        if self.schedule.phase.encodes and self.momentum is not None and self.schedule.beta > 0:
            self._refuse_second_sum()
            if self.is_unused:
                warnings.warn(
                    "no step of the 1-bit optimizer has taken the last gradients, which its momentum has: they were "
                    "cleared, or another optimizer took momenta for gradients. While another part is trained, call "
                    "requires_grad_(False) on this one; leave batches out by skip_together",
                    stacklevel=2,
                )
        if self.schedule.phase.keeps_exact:
            self.reserve_exact_mean()
            waiting = () if self.schedule.over_replicas else self.schedule.state.context.reduced
            self._waits = any(flat is self.flat for flat, _ in waiting)

    def reserve_exact_mean(self) -> None:
        """Make ``exact_mean`` unless it exists.

        On CUDA the memory of ``exact_mean`` must belong to the caller's stream, because the optimizer frees it there.
        """
        if self.exact_mean is None:
            self.exact_mean = torch.zeros(self.chunk, dtype=torch.float32, device=self.flat.device)

    def watch(self) -> CompressionError:
        """Measure what messages lose, beginning with the next message, until ``compression_error`` is None again."""
        assert self._encoder is not None
        recursion, rank = self.schedule.recursion, self.context.comm.rank
        self.compression_error = CompressionError(self.flat.device, self._encoder.kept, recursion, rank)
        return self.compression_error

    @property
    def sends_late(self) -> bool:
        """Whether the residual holds gradients that come with later messages; with EF21 it holds an estimate."""
        return self._encoder is not None and self.residual is not None and self.estimate is None and self.senders > 0

    @property
    def senders(self) -> int:
        """Number of ranks whose messages are summed."""
        return self.flat.layout.world - 1

    @property
    def factors(self) -> LowRank | None:
        """The factors of ``powersgd``, which all ranks hold alike; None with a codec."""
        return self._encoder.low_rank if isinstance(self._encoder, FactorEncoder) else None

    @property
    def not_in_residual(self) -> Tensor | None:
        """Gradients [chunk] that the next sum adds and no residual holds; None if there are none."""
        return self.carried_over

    def reset(self) -> None:
        """Drop deferred gradients that are in no residual, and the leftovers of an interrupted sum."""
        self.is_unused = False
        self._poison = None
        # Each ``record`` changes the fingerprint, and so reveals a rank that has not dropped or restarted the same.
        if self.factors is not None and self._encoded_in is self.schedule.backward:
            self.context.record("factors restarted", self.flat.name)  # some ranks' factors may be a message ahead
            self.factors.restart()
            self._encoded_in = None  # restart nothing if one rank alone resets once more
        if not self._is_decoded:
            # A sender may count a message as sent that no receiver has added to its estimate: all ranks clear both.
            self.context.record("estimates dropped", self.flat.name)
            self.clear()

    def clear(self) -> None:
        """Clear residual, deferred gradients, estimate and factors; on all ranks, with no reduce in flight."""
        self._is_decoded, self.is_unused, self._encoded_in = True, False, None
        if self.factors is not None:
            self.factors.restart()
        self._poison = None
        if self.residual is not None:
            self.residual.clear()
        if self.estimate is not None:
            self.estimate.zero_()

    def rescale(self, factor: float) -> None:
        """Multiply residual, carried-over gradients and estimate by ``factor``, the change of the loss scale."""
        if self.residual is not None:
            self.residual.multiply(factor)
        if self.carried_over is not None:
            self.carried_over.mul_(factor)
        if self.estimate is not None:
            self.estimate.mul_(factor)

    def memory(self) -> Mapping[str, int]:
        buffers = (self.residual, self.carried_over, self._pending, self.estimate, self._encoder)
        return {"residual": sum(each.nbytes for each in buffers if each is not None)}

    def planned_bytes(self) -> int:
        return (self._encoder or self._exact).planned_bytes()

    # Within one sum ------------------------------------------------------------------------------------------------

    def _latch(self, grads: Tensor) -> None:
        """Latch the phase for this sum, and clip its gradients: once encoded, no training loop can clip them."""
        schedule = self.schedule
        encodes, self._keeps_exact = schedule.phase.encodes, schedule.phase.keeps_exact
        schedule.prepare(self.flat.name, grads, clips=encodes or self._keeps_exact)
        self._encodes = encodes and self._encoder is not None
        self._encoded_in = schedule.backward if self._encodes else None
        self._moment = self.momentum if self._encodes and schedule.beta > 0 else None
        self.is_unused |= self._moment is not None
        self._is_decoded = not self._encodes or self.estimate is None
        has_grad = any(param.parameter.grad is not None for param in self.flat.params)
        self._carried = self.carried_over if encodes else None
        self._frozen = []
        for param in self.flat.params:
            is_frozen = not (param.parameter.requires_grad or param.is_owed)
            if is_frozen:
                self._frozen.append(param)
            param.is_left_out = is_frozen and (self._encodes or self._carried is not None)
        self._adds_exact = self.exact_mean is not None and (has_grad or self._waits)
        if self._adds_exact and not self._waits:
            self.drop_cleared_means()
        if self._keeps_exact:
            self.reserve_exact_mean()
        self._owed = self.residual if encodes and self._encoder is None else None  # exact sums have replaced the codec
        if self._owed is not None:
            with self._frozen_aside():
                self._add_residual(grads)
                self._owed.clear()

    def drop_cleared_means(self) -> None:
        """Zero ``exact_mean`` where ``.grad`` was cleared, to None or in place, since an earlier sum of this step."""
        if self.exact_mean is None:
            return
        for param in self.flat.params:
            part, grad = param.local_range(self.exact_mean), param.parameter.grad
            if grad is None:
                part.zero_()
            else:  # mask in place: to learn whether the gradient is zero, the host would wait for a GPU
                is_zero = cast("DTensor", grad).to_local().any().logical_not()
                part.masked_fill_(is_zero.to(part.device), 0.0)

    @contextmanager
    def _frozen_aside(self) -> Iterator[None]:
        """Take frozen parameters' gradients out of the residual during a ``with`` block: nobody uses their sums."""
        parts = [(part, part.load()) for param in self._frozen for part in self._residuals_of(param)]
        for part, _ in parts:
            part.clear()
        try:
            yield
        finally:
            for part, waiting in parts:
                part.store(part.load().add_(waiting))

    @abstractmethod
    def _residuals_of(self, param: FSDPParam) -> Iterator[Residual]:
        """Return views of the parts of the residual that belong to ``param``."""

    def _refuse_second_sum(self) -> None:
        for param in self.flat.params:
            if param.parameter.requires_grad and param.parameter.grad is not None:
                raise RuntimeError(
                    f"'{param.spec.name}' has a .grad already, and with the momentum form of a 1-bit optimizer a sum "
                    "over ranks is a step of the momentum: call optimizer.zero_grad(), which sets .grad to None, "
                    "before each step, and model.set_requires_gradient_sync(False) for all of its micro-batches but "
                    "the last"
                )

    def _feedback(self) -> Feedback:
        noise = None
        if self.compression_error is not None:
            self.compression_error.seen = True
        if self.residual is None:
            self.rounded += 1
            name = zlib.crc32(f"{self.flat.name}/{self.context.comm.rank}".encode())
            noise = Noise(zlib.crc32(self.rounded.to_bytes(8, "little"), name))
        return Feedback(self.residual, self.schedule.recursion, noise, self.compression_error)

    def _complete(self, total: Tensor, start: int) -> None:
        """Add carried-over gradients and the momentum's term to the sum's elements from ``start`` on."""
        if self._carried is not None:
            total.add_(self._carried.narrow(0, start, total.numel()))
        if self._moment is not None:
            beta, share = self.schedule.beta, self.schedule.share
            mine = self._moment.narrow(0, start, total.numel())
            # Round only here: the engine's division by the number of ranks is exact for a power of two, as most are.
            total.add_(mine, alpha=beta / share * self.units).div_(_inverse(share, total.device))

    def _end(self, own: Tensor | None) -> None:
        """Finish a sum; ``own`` [chunk] is this rank's own gradient where no message held it."""
        self._is_decoded = True
        if self._carried is not None:
            waiting = torch.zeros_like(self._carried)
            for param in self._frozen:
                param.local_range(waiting).copy_(param.local_range(self._carried))
            self.carried_over = waiting if self._frozen else None
        if self._owed is not None and not self._frozen:
            self.residual = None
        if self._moment is not None:
            frozen = [param.local_range(self._moment) for param in self._frozen]
            before = [part.clone() for part in frozen]
            self._moment.mul_(self.schedule.beta)
            for gradients in (each for each in (own, self._carried) if each is not None):
                self._add_to_momentum(self._moment, gradients, self.schedule.share)
            for part, values in zip(frozen, before, strict=True):
                part.copy_(values)

    def _add_to_momentum(self, momentum: Tensor, own: Tensor, share: float) -> None:
        """Add gradients [chunk] of this rank to the first moment, leaving out blocks that are not finite."""
        stored = Residual(momentum.unsqueeze(0), momentum.new_empty(1, 0), self.schedule.config.block)
        if own.numel():  # a rank may own none of a unit's matrices
            error_feedback.accumulate(own.unsqueeze(0), stored, scale=share / self.units)

    @property
    def units(self) -> float:
        """Divisor of sums that gives the ``.grad`` of unscaled losses: that of the engine, times the loss scale."""
        return self.flat.divisor.factor * self.schedule.loss_scale

    def _keep_exact(self, total: Tensor, start: int) -> None:
        """Store the mean of an exact sum's elements from ``start`` on in ``exact_mean``."""
        assert self.exact_mean is not None
        kept = self.exact_mean.narrow(0, start, total.numel())
        if self._adds_exact:
            kept.add_(total / self.flat.divisor.of[total.dtype])
        else:
            torch.div(total, self.flat.divisor.of[total.dtype], out=kept)


@cache
def _inverse(share: float, device: torch.device) -> Tensor:
    """Return 1 / share, 0-d on the device: a Python number would become a new tensor in every division."""
    return torch.full((), 1 / share, dtype=torch.float32, device=device)


class CompressedReduceScatter(CompressedSum, ReduceScatter):
    """Sums the gradients of a buffer by encoded messages, each chunk at its owner, with error feedback.

    The message to each other rank has a residual as long as that rank's chunk. This rank's own chunk crosses no network
    and is exact.
    """

    _exact: ExactReduceScatter

    def __init__(self, flat: SummedBuffer, schedule: CompressionSchedule, codec: str) -> None:
        layout = flat.layout
        self._exact = ExactReduceScatter(layout.numel, flat.reduce_dtype, chunks=layout.uneven_chunks)
        others = layout.numel - layout.chunks[flat.rank]
        self._residual_shape = (1, others) if layout.uneven_chunks else (layout.world - 1, layout.chunks[0])
        super().__init__(flat, schedule, codec)

    def _make_encoder(self, codec: str) -> Encoder:
        config = self.schedule.config
        return ChunkFactors(self.flat, config) if codec == LOW_RANK else ChunkMessages(self.flat, config.make(codec))

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        if self.schedule.may_be_exact and context.comm.reduces_in_place:
            context.scratch.reserve(_OWN, self.chunk * self.flat.reduce_dtype.itemsize)

    def bytes_with(self, codec: str) -> int:
        """Return the bytes that the rank with most to send would send per sum with ``codec``; "fp32": exact sums."""
        chunks = self.flat.layout.chunks
        if codec == EXACT:
            return (sum(chunks) - min(chunks)) * self.flat.reduce_dtype.itemsize
        sizes = list(map(self.schedule.config.make(codec).message_bytes, chunks))
        return sum(sizes) - min(sizes)

    @property
    def defers(self) -> bool:
        phase = self.schedule.phase
        # a residual in int8 would round summed gradients at each micro-batch, and error feedback does not see that loss
        can = self.residual is not None and self.residual.values.dtype != torch.int8
        can = can and self.schedule.recursion == CLASSIC._replace(taken=1 - self.schedule.beta)
        return can and self._encoder is not None and phase.encodes and not phase.keeps_exact

    def defer(self, grads: Tensor) -> None:
        assert self.residual is not None
        self.schedule.prepare(self.flat.name, grads)
        for chunks in other_chunks(grads, self.flat.layout, self.flat.rank):
            error_feedback.accumulate(chunks.values, self.residual.of(chunks))
        self._defer_own(self._own_chunk_of(grads))
        poison = grads.sum(dtype=torch.float32).mul_(0.0)
        self._poison = poison if self._poison is None else poison.add_(self._poison)

    def _defer_own(self, own: Tensor) -> None:
        # a deferred gradient is added before the next sum multiplies the momentum by beta, so divide by beta here
        if self.momentum is not None and self.schedule.beta > 0:
            self._add_to_momentum(self.momentum, own, self.schedule.share / self.schedule.beta)
            if self._poison is None:
                self._pending = None  # else the next sum would add leftovers of the gradient form
            return
        if self._pending is None:
            self._pending = torch.zeros(self.chunk, dtype=torch.float32, device=own.device)
        if self._poison is None:
            self._pending.copy_(own)
        else:
            self._pending.add_(own)

    def start(self, grads: Tensor, async_op: bool) -> Works:
        self._latch(grads)
        comm, encoder = self.context.comm, self._encoder
        if not self._encodes or encoder is None:
            works = self._exact.start(grads, async_op)
            self.sent_bytes = self._exact.sent_bytes
            return works
        self.sent_bytes, works = 0, ()
        if comm.world > 1:
            if self._poison is not None:
                for chunks in other_chunks(grads, self.flat.layout, -1):
                    # a NaN in every message tells every rank that deferred gradients were not finite
                    chunks.values[:, 0].add_(self._poison)
            self.sent_bytes = encoder.sent_bytes()
            with self._frozen_aside():
                works = encoder.start(grads, self._feedback(), async_op)
        if not self._keeps_exact:
            return works
        # the exact reduce-scatter overwrites this rank's own chunk, which ``_decode`` still needs: copy that chunk
        if comm.reduces_in_place:
            self._own_chunk().copy_(self._own_chunk_of(grads))
        works = [*works, *self._exact.start(grads, async_op)]
        self.sent_bytes += self._exact.sent_bytes
        return works

    def finish(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        comm, own = self.context.comm, None
        if self._encodes:
            own = self._own_chunk() if self._keeps_exact and comm.reduces_in_place else self._own_chunk_of(grads)
        for start, part in self._exact.finish(grads) if own is None else self._decode(own):
            if own is None and self._keeps_exact:
                self._keep_exact(part, start)
            self._complete(part, start)
            yield start, part
        self._end(own)
        if own is not None and self._keeps_exact:
            for start, part in self._exact.finish(grads):
                self._keep_exact(part, start)

    def _decode(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's chunk of the sum in parts: decoded messages plus its own and its deferred gradients."""
        encoder = self._encoder
        assert encoder is not None
        # A rank that owns no element decodes once, too: every rank must make the same next factors of ``powersgd``.
        for start in range(0, self.chunk or 1, encoder.step or 1):
            total = self.context.scratch.take(SUM, min(encoder.step, self.chunk - start), torch.float32)
            mine = own.narrow(0, start, total.numel())
            if self.estimate is not None:
                encoder.decode_differences(self.estimate.narrow(0, start, total.numel()), start, total)
                total.add_(mine)
            elif self.context.comm.world > 1:
                encoder.decode(mine, start, total)
            else:
                total.copy_(mine)
            if self._poison is not None and self._pending is not None:
                total.add_(self._pending.narrow(0, start, total.numel()))
            yield start, total
        self._poison = None

    def _own_chunk_of(self, grads: Tensor) -> Tensor:
        return self.context.comm.own_chunk(grads, self.flat.layout.uneven_chunks)

    def _own_chunk(self) -> Tensor:
        return self.context.scratch.take(_OWN, self.chunk, self.flat.reduce_dtype)

    @property
    def not_in_residual(self) -> Tensor | None:
        pending = self._pending
        if self._poison is None or pending is None:
            return self.carried_over
        if pending.is_cuda:  # the reduce stream, which allocated ``pending``, must not reuse its memory yet
            pending.record_stream(torch.cuda.current_stream(pending.device))
        return pending if self.carried_over is None else pending + self.carried_over

    def unsent(self) -> Tensor:
        """Return what this rank has not sent yet to each rank, laid out like the gradients, fp32.

        In the range of this rank's own chunk are the gradients that it adds itself to the next sum of that chunk.
        """
        whole = torch.zeros(self.flat.layout.numel, dtype=torch.float32, device=self.flat.device)
        self._add_residual(whole)
        if (own := self.not_in_residual) is not None:
            self._own_chunk_of(whole).add_(own)
        return whole

    def _residuals_of(self, param: FSDPParam) -> Iterator[Residual]:
        if (residual := self.residual) is None:
            return
        layout, before = self.flat.layout, 0
        for rank, chunk in enumerate(layout.chunks):
            start = layout.starts[rank]
            first, end = max(param.extent.offset, start), min(align(param.extent.end, residual.block), start + chunk)
            if rank != self.flat.rank:
                if first < end:
                    yield residual.span(before + first - start, 1, end - first)
                before += chunk

    def _add_residual(self, values: Tensor) -> None:
        if self.residual is not None and self.estimate is None:
            for chunks in other_chunks(values, self.flat.layout, self.flat.rank):
                chunks.values.add_(self.residual.of(chunks).load())


class CodecEncoder(Encoder):
    """Encodes chunks of a buffer by a codec."""

    def __init__(self, flat: SummedBuffer, codec: Codec) -> None:
        self.codec = codec
        self._layout, self._rank = flat.layout, flat.rank
        self.step = self.chunk = flat.layout.chunks[flat.rank]
        self._size = codec.message_bytes(self.chunk)
        self._counts = cache(partial(counts_of, flat.layout, codec.block, flat.device))
        """Function that returns ``counts_of`` for the chunks of a range of ranks, and remembers its results."""

    @property
    def kept(self) -> float:
        return 1 - lost_share(self.codec.name, self.codec.block)

    def decode_differences(self, estimate: Tensor, start: int, total: Tensor) -> None:
        if self.chunk:
            error_feedback.decode_differences(self.codec, self._received(), self.chunk, estimate, total, start)

    def _encode(self, values: Tensor, messages: Tensor, ranks: range, feedback: Feedback) -> None:
        """Encode ``values``, a row for the chunk of each of ``ranks``, into ``messages``."""
        error_feedback.encode(
            self.codec,
            values,
            messages,
            counts=self._counts(ranks),
            residual=feedback.residual,
            recursion=feedback.recursion,
            noise=feedback.noise if self.codec.rounds_randomly else None,
        )
        if feedback.error is not None and feedback.residual is not None:
            feedback.error.observe(self.codec, messages, feedback.residual, values)

    @abstractmethod
    def _received(self) -> Tensor:
        """Return the messages [messages, bytes] that were exchanged."""


class ChunkMessages(CodecEncoder):
    """Encodes each other rank's chunk, and sums decoded messages in rank order."""

    def __init__(self, flat: SummedBuffer, codec: Codec) -> None:
        super().__init__(flat, codec)
        self._sizes = list(map(codec.message_bytes, flat.layout.chunks))
        """Bytes of the message to each rank; this rank has an entry, too."""
        if flat.device.type == "cpu" and ops_for(flat.device, codec) is not None:
            self.step = min(PART, self.chunk)  # ``PART`` elements fit in a cache

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        context.scratch.reserve(SENT, self.sent_bytes())
        context.scratch.reserve(RECEIVED, self._size * (self._layout.world - 1))
        context.scratch.reserve(SUM, 4 * self.step)

    def sent_bytes(self) -> int:
        return sum(self._sizes) - self._size

    def start(self, values: Tensor, feedback: Feedback, async_op: bool) -> Works:
        sent = self.context.scratch.take(SENT, self.sent_bytes(), torch.uint8)
        residual, noise, offset = feedback.residual, feedback.noise, 0
        for chunks in other_chunks(values, self._layout, self._rank):
            first = chunks.ranks.start
            message = sent.narrow(0, offset, len(chunks.ranks) * self._sizes[first]).view(len(chunks.ranks), -1)
            offset += message.nbytes
            kept = None if residual is None else residual.of(chunks)
            drawn = None if noise is None else noise._replace(first=self._layout.starts[first])
            self._encode(chunks.values, message, chunks.ranks, feedback._replace(residual=kept, noise=drawn))
        return self.context.comm.exchange(self._received(), sent, async_op, self._sizes)

    def decode(self, own: Tensor | None, start: int, total: Tensor) -> None:
        error_feedback.decode_sum(self.codec, self._received(), self.chunk, own, self._rank, total, start)

    def _received(self) -> Tensor:
        others = self._layout.world - 1
        return self.context.scratch.take(RECEIVED, others * self._size, torch.uint8).view(others, self._size)
