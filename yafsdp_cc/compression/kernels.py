"""Encode and decode in one pass by native kernels where there are any, else by the plain-torch definitions.

Both give the same bits. The native extension is ``_native.so`` beside this file, built from ``csrc`` by ``setup.py``;
it registers operators as ``torch.ops.yafsdp_cc``, for CPU and, where it was built with it, for CUDA.
``YAFSDP_CC_NATIVE=0`` chooses plain torch; ``1`` raises where the extension is not built; ``auto``, the default, logs a
warning there, once.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.error_feedback import CLASSIC, Recursion, Residual

if TYPE_CHECKING:
    from yafsdp_cc.compression.codec import Codec, Noise

PART = 327_680
"""Elements that ``decode_sum`` may start at multiples of: whole tiles, and whole fives of blocks, of every codec."""

_NUMBERS = {"fp32": 0, "bf16": 1, "fp8": 2, "int8": 3, "int4": 4, "ternary": 5, "onebit": 6, "topk": 7}
"""The codecs that native kernels know, by number."""


def is_native(codec: Codec, device: torch.device) -> bool:
    """Return whether there are native kernels for this codec and this device."""
    return codec.name in _NUMBERS and ops_for(device) is not None


def part_of(codec: Codec, n: int, device: torch.device) -> int:
    """Return how many of ``n`` elements ``decode_sum`` should do at once: on a CPU what stays in its cache."""
    return min(PART, n) if device.type == "cpu" and is_native(codec, device) else n


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
    """Encode gradients; arguments as of ``error_feedback.encode``."""
    ops = ops_for(message.device) if codec.name in _NUMBERS else None
    if ops is None:
        error_feedback.encode(
            codec, gradients, message, counts=counts, residual=residual, recursion=recursion, scale=scale, noise=noise
        )
        return
    ops.encode(
        _readable(gradients),
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
    """Add gradients to a residual; arguments as of ``error_feedback.accumulate``."""
    ops = ops_for(gradients.device)
    if ops is None:
        error_feedback.accumulate(gradients, residual, scale=scale)
        return
    ops.accumulate(_readable(gradients), residual.values, residual.scales, residual.block, scale, _stream(gradients))


def decode_sum(
    codec: Codec, messages: Tensor, n: int, own: Tensor | None, place: int, total: Tensor, start: int = 0
) -> None:
    """Sum elements ``start`` to ``start + len(total)`` of the ``n`` of each message, as ``error_feedback.decode_sum``.

    ``start`` is a multiple of ``PART``; without a native kernel it has to be 0, and ``total`` as long as a message.
    ``own`` is as long as ``total``, and may be ``total`` where ``place`` is 0.
    """
    ops = ops_for(messages.device) if codec.name in _NUMBERS else None
    if ops is None:
        error_feedback.decode_sum(codec, messages, own, place, total)
        return
    own = None if own is None else _readable(own)
    ops.decode_sum(messages, _NUMBERS[codec.name], codec.block, n, own, place, total, start, _stream(messages))


def decode(codec: Codec, messages: Tensor, values: Tensor) -> None:
    """Decode ``messages`` [messages, bytes] into ``values`` [messages, n] of any floating-point dtype."""
    ops = ops_for(messages.device) if codec.name in _NUMBERS else None
    if ops is not None and values.dtype != torch.float64:
        ops.decode(messages, _NUMBERS[codec.name], codec.block, values, _stream(messages))
    elif values.dtype == torch.float32:
        codec.decode(messages, values)
    else:
        decode(codec, messages, decoded := torch.empty_like(values, dtype=torch.float32))
        values.copy_(decoded)


def _readable(values: Tensor) -> Tensor:
    """Return ``values`` in a dtype that native kernels read."""
    return values.to(torch.float32) if values.dtype == torch.float64 else values


def _stream(tensor: Tensor) -> int:
    """Return the current stream of the tensor's device, as the number that CUDA knows it by; 0 on a CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


# The native extension ----------------------------------------------------------------------------------------------

LIBRARY = Path(__file__).with_name("_native.so")
MODES = ("0", "1", "auto")
OPERATORS = ("encode", "accumulate", "decode_sum", "decode")

_BUILD = "YAFSDP_CC_NATIVE=1 pip install --no-build-isolation --force-reinstall --no-deps yafsdp_cc, or --editable ."
_SLOWER = {"cpu": "10 to 90 times "}
"""How much longer encoding takes in plain torch, by codec, as measured by ``bench/kernels.py``."""

_logger = logging.getLogger("yafsdp_cc")


def ops_for(device: torch.device) -> Any:
    """Return the native operators that take tensors of ``device``, or None.

    Raises:
        RuntimeError: there are none, and ``YAFSDP_CC_NATIVE=1`` demands them.
        ValueError: ``YAFSDP_CC_NATIVE`` is something else than 0, 1 or auto.
    """
    return _ops_for(device.type, os.environ.get("YAFSDP_CC_NATIVE", "auto"))


@cache
def _ops_for(device_type: str, mode: str) -> Any:
    if mode not in MODES:
        raise ValueError(f"YAFSDP_CC_NATIVE={mode}: {', '.join(MODES)} are known")
    if mode == "0":
        return None
    missing = _load() or _lacks(device_type)
    if not missing:
        return torch.ops.yafsdp_cc
    if mode == "1":
        raise RuntimeError(f"YAFSDP_CC_NATIVE=1, but {missing}; to build: {_BUILD}")
    factor = _SLOWER.get(device_type, "")
    _logger.warning("gradients are encoded by plain torch, %sslower: %s; to build: %s", factor, missing, _BUILD)
    return None


@cache
def _load() -> str:
    """Load the library; return why not, or nothing."""
    if not LIBRARY.exists():
        return "the native extension is not built"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the native extension cannot be loaded ({error})"
    for name in OPERATORS:
        torch.library.register_fake(f"yafsdp_cc::{name}", _fake)
    return ""


def _lacks(device_type: str) -> str:
    """Return why the loaded library does not serve a device, or nothing."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    if key is not None and torch._C._dispatch_has_kernel_for_dispatch_key("yafsdp_cc::encode", key):
        return ""
    return f"the native extension was built without kernels for {device_type}"


def _fake(*arguments: Any) -> None:
    """Stand for an operator while something is traced: all of them return nothing."""
