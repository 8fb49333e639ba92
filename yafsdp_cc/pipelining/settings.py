"""The user's settings of the compression between pipeline stages, and the bytes that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from yafsdp_cc.compression.codec import BLOCK, LOW_RANK, Scaled, codec_of
from yafsdp_cc.engine.layout import align
from yafsdp_cc.pipelining.messages import Encoded, Encoding, Exact, LowRank, Rounding, relative_error

LARGEST_ERROR = 0.5**0.5
"""Bound on c in E‖x − Q(x)‖ ≤ c‖x‖: AQ-SGD needs a codec of less (Wang et al., "Fine-tuning Language Models over Slow
Networks using Activation Quantization with Guarantees", 2022)."""
DIGEST = 8
"""Bytes at the end of a message of changes that identify its sample ids and the number of the step."""
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class StageCompression:
    """Settings of the compression between stages: the same on every stage, which ``prepare_schedule`` checks.

    Args:
        forward: name of the codec of activations, such as "int4"; None: they are sent exactly.
        backward: name of the codec of their gradients, or "powersgd"; None: they are sent exactly.
        forward_delta: encode the change of each sample's activation since it was sent last, rather than the activation
            (AQ-SGD). ``schedule.step`` then takes ``sample_ids``.
        cache_samples: number of samples whose activation both sides of a boundary cache: as many as the data set has.
            For a further sample, the one used longest ago is dropped, and sent exactly when it comes again.
        cache_dtype: dtype of cached activations, and of those sent for new samples: bfloat16, float16 or float32.
        cache_folder: an existing folder for mapped files, one per rank, boundary side and tensor; None: host memory.
        error_feedback: add what a gradient's message loses to the message of the next micro-batch (lazy error
            propagation of Optimus-CC).
        epilogue_only: encode only gradients whose transfer no computation hides (``schedule.hidden_gradients``), and
            send the others exactly.
        matrix_rank: columns of the factors that "powersgd" sends.
        hadamard: rotate each block before it is quantised and back afterwards, and round to nearest; without error
            feedback, scales keep the decoded block's component along the original. For codecs with a scale per block.
        block: elements that share a scale.
    """

    forward: str | None = None
    backward: str | None = None
    forward_delta: bool = False
    cache_samples: int | None = None
    cache_dtype: torch.dtype = torch.bfloat16
    cache_folder: str | Path | None = None
    error_feedback: bool = False
    epilogue_only: bool = False
    matrix_rank: int = 16
    hadamard: bool = False
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.forward == LOW_RANK:
            raise ValueError(
                "forward='powersgd': activations of different samples share no factors, and what a message loses of "
                "them cannot be sent later. Name a codec, such as 'int8'; 'powersgd' is for backward"
            )
        codecs = []
        for direction in ("forward", "backward"):
            name = getattr(self, direction)
            if name is not None and name != LOW_RANK:
                try:
                    codecs.append(codec_of(name, self.block))
                except ValueError as error:
                    raise ValueError(f"{direction}={name!r}: {error}") from None
        if self.forward_delta:
            self._check_cache()
        elif self.cache_samples is not None or self.cache_folder is not None:
            raise ValueError("cache_samples and cache_folder are for forward_delta=True")
        if self.hadamard and not any(isinstance(codec, Scaled) for codec in codecs):
            raise ValueError(
                f"hadamard=True: forward={self.forward!r} and backward={self.backward!r} have no blocks that share a "
                "scale; it is for codecs such as 'int8', 'int4' and 'ternary'"
            )
        if self.matrix_rank < 1:
            raise ValueError(f"matrix_rank={self.matrix_rank}: factors have 1 column or more")
        for option in ("error_feedback", "epilogue_only"):
            if getattr(self, option) and self.backward is None:
                raise ValueError(f"{option}=True: backward=None sends gradients exactly; name a codec for them")

    def _check_cache(self) -> None:
        if self.forward is None:
            raise ValueError("forward_delta=True: name the codec of changes, such as forward='int4'")
        if self.cache_samples is None or self.cache_samples < 1:
            raise ValueError(
                f"cache_samples={self.cache_samples}: forward_delta=True keeps the activations of so many samples on "
                "both sides of a boundary; give as many as the data set has"
            )
        error = relative_error(self.forward, self.block, "nearest")
        if error >= LARGEST_ERROR:
            raise ValueError(
                f"forward_delta=True: a message of {self.forward!r} loses {error:.2f} of the norm of a change, so that "
                f"what both sides keep would not come nearer to the activation; less than {LARGEST_ERROR:.2f} is "
                "needed. Use 'int8', 'int4' or 'ternary'"
            )
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype={self.cache_dtype}: takes {', '.join(map(str, CACHE_DTYPES))}")
        if self.cache_folder is not None and not Path(self.cache_folder).is_dir():
            raise ValueError(f"cache_folder={str(self.cache_folder)!r}: there is no such folder; make it first")

    def of_changes(self) -> Encoding:
        """Return the encoding of changes of samples' activations.

        The encoding rounds without bias, as AQ-SGD's analysis requires (with ``hadamard``, without bias along the
        change). A codec that would lose too much in this way rounds to nearest; the next change has what it loses.
        """
        rounding = self._rounding
        if self.forward is not None and relative_error(self.forward, self.block, rounding) >= LARGEST_ERROR:
            rounding = "nearest"
        return self._encoding(self.forward, rounding, by_sample=True)

    def of_activations(self) -> Encoding:
        """Return the encoding of activations."""
        return self._encoding(self.forward, self._rounding)

    def of_gradients(self) -> Encoding:
        """Return the encoding of gradients of activations."""
        if self.backward == LOW_RANK:
            return LowRank(self.matrix_rank)
        return self._encoding(self.backward, self._rounding, by_sample=self.error_feedback)

    @property
    def _rounding(self) -> Rounding:
        return "scaled" if self.hadamard else "stochastic"

    def _encoding(self, name: str | None, rounding: Rounding, *, by_sample: bool = False) -> Encoding:
        if name is None:
            return Exact()
        codec = codec_of(name, self.block)
        return Encoded(codec, hadamard=self.hadamard, rounding=rounding, by_sample=by_sample)


class BoundaryPlan(NamedTuple):
    """Bytes that cross one boundary between two stages in a training step, and bytes that its two sides hold."""

    first_forward: int
    """Bytes of activations in a training step whose samples are all new: more than ``forward`` with
    ``forward_delta``."""
    forward: int
    """Bytes of activations in a training step."""
    backward: int
    """Bytes of gradients in a training step."""
    exact: int
    """Bytes of activations and gradients in a training step without compression."""
    cache: int
    """Bytes of host memory or files for the sample cache, on each side of the boundary."""
    residual: int
    """Bytes of error feedback's fp32 residuals, on the device of the later stage."""

    def __str__(self) -> str:
        rows = zip(
            ("forward, new samples", "forward", "backward", "exact, both ways", "cache, each side", "residual"),
            self,
            strict=True,
        )
        return "\n".join(f"{name:<21} {number:>16,} bytes" for name, number in rows)


def plan_boundary(
    compression: StageCompression,
    shape: Sequence[int],
    dtype: torch.dtype,
    micro_batches: int,
    exact_gradients: int = 0,
) -> BoundaryPlan:
    """Return the bytes of a boundary between two stages that one tensor crosses.

    Args:
        shape: shape of the activation of a micro-batch, samples first.
        micro_batches: number of micro-batches of a step.
        exact_gradients: number of micro-batches whose gradients are sent exactly, with ``epilogue_only``.
    """
    gradient = compression.of_gradients().message_bytes(shape, dtype)
    exact = math.prod(shape) * dtype.itemsize
    first = forward = compression.of_activations().message_bytes(shape, dtype)
    cache = residual = 0
    if compression.forward_delta:
        first = math.prod(shape) * compression.cache_dtype.itemsize + DIGEST
        forward = compression.of_changes().message_bytes(shape, torch.float32) + DIGEST
        cache = (compression.cache_samples or 0) * math.prod(shape[1:]) * compression.cache_dtype.itemsize
    if compression.error_feedback:
        block = 1 if compression.backward == LOW_RANK else compression.block
        residual = shape[0] * align(math.prod(shape[1:]), block) * torch.float32.itemsize
    backward = gradient * (micro_batches - exact_gradients) + exact * exact_gradients
    return BoundaryPlan(
        first * micro_batches, forward * micro_batches, backward, 2 * exact * micro_batches, cache, residual
    )
