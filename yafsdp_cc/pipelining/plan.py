"""The bytes that cross a boundary between two stages in a step, and the bytes of its caches, before anything runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yafsdp_cc.pipelining.settings import StageCompression

DIGEST = 8
"""Bytes at the end of a message of changes that identify its sample ids and the number of the step."""


class BoundaryPlan(NamedTuple):
    """Bytes of one boundary between two stages."""

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
    """Bytes of host memory or files for the sample cache, on each of the two sides."""
    residual: int
    """Bytes of fp32 residuals on the device of the later stage."""

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
    """Return the bytes of a boundary that one tensor crosses.

    Args:
        compression: settings of its stages.
        shape: shape of the activation of a micro-batch, samples first.
        dtype: dtype of the activation and of its gradient.
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
        residual = compression.residual_numel(shape) * torch.float32.itemsize
    backward = gradient * (micro_batches - exact_gradients) + exact * exact_gradients
    return BoundaryPlan(
        first * micro_batches, forward * micro_batches, backward, 2 * exact * micro_batches, cache, residual
    )
