"""Encoding and decoding in one pass where there is a native kernel for it, else by the plain-torch definitions.

Both give the same bits. ``YAFSDP_CC_NATIVE=0`` chooses plain torch; ``1`` raises where the extension is not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yafsdp_cc.wire import feedback
from yafsdp_cc.wire.feedback import CLASSIC, Recursion, Residual
from yafsdp_cc.wire.native import ops_for

if TYPE_CHECKING:
    from yafsdp_cc.wire.codec import Codec, Noise

_NAMES = ("fp32", "bf16", "fp8", "int8", "int4", "ternary", "onebit", "topk")
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}
"""What the native kernels call the codecs that they know."""

PART = 327_680
"""Elements that ``decode_sum`` starts at multiples of: whole tiles, and whole fives of blocks, of every codec."""


def is_native(codec: Codec, device: torch.device) -> bool:
    """Whether there are native kernels for this codec and this device."""
    return codec.name in _NUMBERS and ops_for(device) is not None


def encode(
    codec: Codec,
    gradients: Tensor,
    message: Tensor,
    *,
    counts: Tensor | None = None,
    residual: Residual | None = None,
    recursion: Recursion = CLASSIC,
    scale: float = 1.0,
    noise: Noise | None = None,
) -> None:
    """As ``feedback.encode``."""
    ops = ops_for(message.device) if codec.name in _NUMBERS else None
    if ops is None:
        feedback.encode(
            codec, gradients, message, counts=counts, residual=residual, recursion=recursion, scale=scale, noise=noise
        )
        return
    ops.encode(
        _taken(gradients),
        message,
        _NUMBERS[codec.name],
        codec.block,
        counts,
        None if residual is None else residual.values,
        None if residual is None else residual.scales,
        recursion.carry,
        recursion.taken,
        scale,
        -1 if noise is None else noise.seed,
        0 if noise is None else noise.first,
        _stream(message),
    )


def accumulate(gradients: Tensor, residual: Residual, *, scale: float = 1.0) -> None:
    """As ``feedback.accumulate``."""
    ops = ops_for(gradients.device)
    if ops is None:
        feedback.accumulate(gradients, residual, scale=scale)
        return
    ops.accumulate(_taken(gradients), residual.values, residual.scales, residual.block, scale, _stream(gradients))


def decode_sum(
    codec: Codec, messages: Tensor, n: int, own: Tensor | None, place: int, total: Tensor, start: int = 0
) -> None:
    """As ``feedback.decode_sum``, of elements ``start`` to ``start + len(total)`` of the ``n`` of each message.

    ``start`` is a multiple of ``PART``; without a native kernel it has to be 0, and ``total`` as long as a message.
    ``own`` is as long as ``total``, and may be ``total`` where ``place`` is 0.
    """
    ops = ops_for(messages.device) if codec.name in _NUMBERS else None
    if ops is None:
        feedback.decode_sum(codec, messages, own, place, total)
        return
    own = None if own is None else _taken(own)
    ops.decode_sum(messages, _NUMBERS[codec.name], codec.block, n, own, place, total, start, _stream(messages))


def decode(codec: Codec, messages: Tensor, values: Tensor) -> None:
    """What ``messages`` say, into ``values`` [messages, n] of any floating-point dtype."""
    ops = ops_for(messages.device) if codec.name in _NUMBERS else None
    if ops is not None and values.dtype != torch.float64:
        ops.decode(messages, _NUMBERS[codec.name], codec.block, values, _stream(messages))
    elif values.dtype == torch.float32:
        codec.decode(messages, values)
    else:
        decode(codec, messages, said := torch.empty_like(values, dtype=torch.float32))
        values.copy_(said)


def _taken(numbers: Tensor) -> Tensor:
    """Numbers that are encoded, in a dtype that native kernels read."""
    return numbers.to(torch.float32) if numbers.dtype == torch.float64 else numbers


def _stream(tensor: Tensor) -> int:
    """Where a kernel shall run, as the number that CUDA knows the stream by."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
