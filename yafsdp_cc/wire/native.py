"""The native extension: found, loaded once, or done without, which is said once.

It is ``_native.so`` beside this file, built from ``csrc`` by ``setup.py``. It registers the operators that
``wire.kernels`` calls as ``torch.ops.yafsdp_cc``, for a CPU and where it was built with it for CUDA.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).with_name("_native.so")
MODES = ("0", "1", "auto")
OPERATORS = ("encode", "accumulate", "decode_sum", "decode")

_BUILD = "YAFSDP_CC_NATIVE=1 pip install --no-build-isolation --force-reinstall --no-deps yafsdp_cc, or --editable ."
_SLOWER = {"cpu": "10 to 90 times "}
"""How much, by codec, encoding takes longer in plain torch, as measured by ``bench/wire.py``."""

_logger = logging.getLogger("yafsdp_cc")


def ops_for(device: torch.device) -> Any:
    """The native operators that take tensors of ``device``, or None.

    Raises:
        RuntimeError: there are none, and ``YAFSDP_CC_NATIVE=1`` wants them.
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
    """Load the library; returns why not, or nothing."""
    if not LIBRARY.exists():
        return "the native extension is not built"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the native extension cannot be loaded ({error})"
    for name in OPERATORS:
        torch.library.register_fake(f"yafsdp_cc::{name}", _writes_only)
    return ""


def _lacks(device_type: str) -> str:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    if key is not None and torch._C._dispatch_has_kernel_for_dispatch_key("yafsdp_cc::encode", key):
        return ""
    return f"the native extension was built without kernels for {device_type}"


def _writes_only(*arguments: Any) -> None:
    """All that a tracer has to know of the operators: they return nothing."""
