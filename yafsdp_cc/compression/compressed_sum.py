"""What a compressed reduce-scatter and a compressed all-reduce share: error feedback, phases, momentum, exact means.

A ``CompressedSum`` belongs to one flat buffer. Its ``Encoder`` makes messages of gradients, exchanges them and decodes
their sum: one for codecs and one for low rank, each of a reduce-scatter (``reduce_scatter``, ``powersgd``) and of an
all-reduce (``all_reduce``, ``powersgd``). What outlives a codec is kept here: the residual, what is carried over to the
next sum, the optimizer's momentum, and the counter of random numbers. Each ``start`` goes by the phase of the
``CompressionSchedule``:

    phase      what is sent                 sum              exact_mean
    EXACT      gradients                    exact            -
    KEPT       gradients                    exact            its mean
    ENCODED    messages                     decoded          -
    BOTH       messages, and gradients      decoded          mean of the exact sum

**Momentum form.** With M of every rank w the recursion of ``error_feedback`` for a = 1 − β,

    h = M + g_w;   m = C(h);   M ← h − (1 − β)·D(m);   the owner's update: (1 − β)/N · Σ D(m)

M becomes β(M + g_w) and the update (1 − β)/N · Σ(M + g_w) where C is exact: residual and Adam's first moment are one
buffer (Ahn et al., "Dion", 2025, algorithm 1, whose C is of low rank; Karimireddy et al., 2019, for the feedback). The
owner's own part crosses no network and so is exact. It lies where the optimizer keeps its first moment,
e ← β·e + (1 − β)/N · g, and is a part of the update as β·e: a first moment that was learned before from exact sums
goes on from there, and fades. SGD's momentum is a sum where Adam's is an average: e ← β·e + 1/N · g, with a ``share``
of 1 in place of 1 − β. Messages and residuals are the same; the update is multiplied by ``share``.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from yafsdp_cc.compression import kernels
from yafsdp_cc.compression.codec import Noise
from yafsdp_cc.compression.config import AUTO, EXACT
from yafsdp_cc.compression.encoder import CompressionError, Encoder, Feedback
from yafsdp_cc.compression.error_feedback import Residual
from yafsdp_cc.engine.protocols import Collective

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yafsdp_cc.compression.encoder import SharedFactors
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.communicator import CommContext
    from yafsdp_cc.engine.layout import Layout
    from yafsdp_cc.engine.param import Divisor, FSDPParam


class SummedBuffer(Protocol):
    """What a ``CompressedSum`` needs to know of its buffer; a ``FlatParam`` is one."""

    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def reduce_dtype(self) -> torch.dtype: ...
    @property
    def sum_dtype(self) -> torch.dtype: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def has_grad(self) -> bool: ...
    @property
    def divisor(self) -> Divisor: ...
    @property
    def params(self) -> Sequence[FSDPParam]: ...


@dataclass(frozen=True)
class PlainBuffer:
    """A buffer that belongs to no ``FlatParam``, such as one of FSDP2 or DDP."""

    name: str
    layout: Layout
    rank: int
    device: torch.device
    divisor: Divisor
    reduce_dtype: torch.dtype = torch.float32
    sum_dtype: torch.dtype = torch.float32
    trainable: bool = True
    has_grad: bool = False
    params: Sequence[FSDPParam] = ()


class CompressedSum(Collective):
    """A sum over ranks of one buffer: exact, or by encoded messages, as the schedule has it.

    Args:
        flat: the buffer.
        schedule: the model's; one for all its sums.
        codec: the name of a codec or ``powersgd``; ``fp32`` for exact sums. ``auto``: exact until ``set_codec``, with
            scratch buffers that all candidates of the configuration fit in.
    """

    feeds_back = True

    def __init__(self, flat: SummedBuffer, schedule: CompressionSchedule, codec: str) -> None:
        self.flat = flat
        self.schedule = schedule
        self.is_tuned = codec == AUTO
        """Whether the codec is chosen as training goes."""
        self.codec_name = EXACT if self.is_tuned else codec
        self.residual: Residual | None = None
        """Made when it is bound for training; None while sums are exact, or without error feedback."""
        self.carried_over: Tensor | None = None
        """[chunk] fp32, added to the next encoded sum (the next of all, once a tuned sum is exact): what residuals held
        before the codec, or the number of ranks, was another one."""
        self.momentum: Tensor | None = None
        """[chunk] fp32, the optimizer's first moment: a mean over ranks, without a loss scale. Used in the momentum
        form, where the schedule has a ``beta``."""
        self.exact_mean: Tensor | None = None
        """[chunk] fp32, the mean gradient of exact sums in phases KEPT and BOTH, until the optimizer sets it None."""
        self.compression_error: CompressionError | None = None
        """Observes messages while it is there."""
        self._encoder = None if self.codec_name == EXACT else self._make_encoder(codec)
        self._encodes = self._keeps_exact = self._adds_exact = self._adds_carried = self._is_momentum = False
        self._messages = 0
        """Sums so far whose messages were rounded at random."""

    # What differs between reduce-scatter and all-reduce ------------------------------------------------------------

    @abstractmethod
    def _make_encoder(self, codec: str) -> Encoder:
        """Return what encodes by this codec."""

    @property
    @abstractmethod
    def _rows(self) -> int:
        """Messages that have a residual each."""

    @property
    @abstractmethod
    def _exact(self) -> Collective:
        """The exact sum of the same buffer."""

    @property
    def _noise_name(self) -> str:
        return f"{self.flat.name}/{self.context.comm.rank}"

    @abstractmethod
    def unsent(self) -> Tensor:
        """Return, in fp32, what this rank has not sent yet: residuals, and what is added to the next sum."""

    @abstractmethod
    def _hand_over(self, residual: Residual) -> Tensor:
        """Return the sum over ranks [chunk] of what their residuals hold for this rank. A collective."""

    # What both do --------------------------------------------------------------------------------------------------

    @property
    def chunk(self) -> int:
        return self.flat.layout.chunk

    @torch.inference_mode(False)  # backwards write to what is made here
    def bind(self, context: CommContext) -> None:
        super().bind(context)
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
        if self.residual is None and config.residual_dtype is not None:
            self.residual = Residual(self._rows, self.chunk, config.residual_dtype, config.block, self.flat.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def set_codec(self, codec: str) -> None:
        """Encode by another codec from the next ``start`` on; ``fp32``: sum exactly. Nothing is in flight.

        From one codec to another the residual stays. On the way to exact sums, which is a collective, it is sent to the
        owners of the chunks at once, who add it to the next sum: nothing is lost.
        """
        if codec == self.codec_name:
            return
        self.codec_name = codec
        if codec == EXACT:
            self._exact.bind(self.context)
            if self.residual is not None and self._rows:
                received = self._hand_over(self.residual)
                self.carried_over = received if self.carried_over is None else self.carried_over.add_(received)
            self._encoder = self.residual = None
        else:
            self._encoder = self._make_encoder(codec)
            self._encoder.bind(self.context)
            self._make_residual()

    def reserve_exact_mean(self) -> None:
        """Make ``exact_mean`` unless it is there; the schedule does before a reduce is issued.

        On CUDA its memory is to be that of the caller's stream: the optimizer frees it there.
        """
        if self.exact_mean is None:
            self.exact_mean = torch.zeros(self.chunk, dtype=torch.float32, device=self.flat.device)

    def watch(self) -> CompressionError:
        """Observe messages from the next one on, until ``compression_error`` is None again."""
        assert self._encoder is not None
        self.compression_error = CompressionError(self.flat.device, self._encoder.kept, self.schedule.recursion)
        return self.compression_error

    @property
    def factors(self) -> SharedFactors | None:
        """The factors of ``powersgd``, which all ranks hold alike; None with a codec."""
        return None if self._encoder is None else self._encoder.factors

    @property
    def not_in_residual(self) -> Tensor | None:
        """[chunk], what is added to the next sum and is in no residual; None: nothing."""
        return self.carried_over

    def discard_deferred(self) -> None:
        """Drop deferred gradients that are in no residual."""
        if self._encoder is not None:
            self._encoder.restart()

    def reset(self) -> None:
        self.discard_deferred()

    def clear(self) -> None:
        """Drop all that is still to be sent."""
        self.discard_deferred()
        self.carried_over = None
        if self.residual is not None:
            self.residual.clear()

    def rescale(self, factor: float) -> None:
        """Multiply all that is still to be sent: losses are scaled by ``factor`` times as much as before."""
        if self.residual is not None:
            self.residual.multiply(factor)
        if self.carried_over is not None:
            self.carried_over.mul_(factor)

    def memory(self) -> Mapping[str, int]:
        kept = 0 if self.carried_over is None else self.carried_over.nbytes
        encoder = 0 if self._encoder is None else self._encoder.nbytes
        return {"residual": kept + encoder + (0 if self.residual is None else self.residual.nbytes)}

    def planned_bytes(self) -> int:
        return self._exact.planned_bytes() if self._encoder is None else self._encoder.planned_bytes()

    # Within one sum ------------------------------------------------------------------------------------------------

    def _latch(self, grads: Tensor) -> None:
        """Choose what this sum is, and clip gradients that no loop can clip any more."""
        schedule, phase = self.schedule, self.schedule.phase
        encodes = phase.encodes and self._encoder is not None
        uses_momentum = encodes and self.momentum is not None and schedule.beta > 0
        if uses_momentum and self.flat.has_grad:
            self._refuse_second_sum()
        self._encodes, self._is_momentum = encodes, uses_momentum
        self._adds_carried = phase.encodes and self.carried_over is not None
        self._keeps_exact = phase.keeps_exact
        self._adds_exact = self.exact_mean is not None and self.flat.has_grad
        if phase.encodes or phase.keeps_exact:
            schedule.clip_gradients(self.flat.name, grads)
        if phase.keeps_exact:
            self.reserve_exact_mean()

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
        if self.residual is None:
            self._messages += 1
            name = zlib.crc32(self._noise_name.encode())
            noise = Noise(zlib.crc32(self._messages.to_bytes(8, "little"), name))
        return Feedback(self.residual, self.schedule.recursion, noise, self.compression_error)

    def _complete(self, total: Tensor, start: int) -> None:
        """Add to elements from ``start`` on of the sum what came in no message."""
        if self._adds_carried and self.carried_over is not None:
            total.add_(self.carried_over.narrow(0, start, total.numel()))
        if self._is_momentum and self.momentum is not None:
            beta, share = self.schedule.beta, self.schedule.share
            mine = self.momentum.narrow(0, start, total.numel())
            total.add_(mine, alpha=beta / share * self._units).mul_(share)

    def _end(self, own: Tensor | None) -> None:
        """Finish a sum; ``own`` [chunk] is this rank's own gradient where no message held it."""
        if self._adds_carried:
            self.carried_over = None
        if self._is_momentum and self.momentum is not None:
            self.momentum.mul_(self.schedule.beta)
            if own is not None:
                self._add_to_momentum(own, self.schedule.share)

    def _add_to_momentum(self, own: Tensor, share: float) -> None:
        """Add gradients [chunk] of this rank to the first moment, but for blocks that are not finite."""
        assert self.momentum is not None
        stored = Residual.around(self.momentum.unsqueeze(0), self.schedule.config.block)
        kernels.accumulate(own.unsqueeze(0), stored, scale=share / self._units)

    @property
    def _units(self) -> float:
        """What sums are divided by for a mean of unscaled losses: the number of ranks, times the loss scale."""
        return self.schedule.units(self.flat.divisor.factor)

    def _keep_exact(self, total: Tensor, start: int) -> None:
        """Keep the mean of elements from ``start`` on of an exact sum."""
        assert self.exact_mean is not None
        kept = self.exact_mean.narrow(0, start, total.numel())
        if self._adds_exact:
            kept.add_(total / self.flat.divisor.tensor)
        else:
            torch.div(total, self.flat.divisor.tensor, out=kept)
