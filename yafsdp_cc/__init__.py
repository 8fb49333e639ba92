"""A sharded data-parallel engine for PyTorch that compresses what it sends."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yafsdp_cc import profiling
    from yafsdp_cc.api import (
        UnshardHandle,
        counters_of,
        fully_shard,
        plan_of,
        register_fsdp_forward_method,
        shard,
        share_comm_ctx,
        watch_loss,
    )
    from yafsdp_cc.checkpoint.full import full_state_dict
    from yafsdp_cc.checkpoint.load import load
    from yafsdp_cc.checkpoint.safetensors import load_safetensors, save_safetensors
    from yafsdp_cc.checkpoint.save import save
    from yafsdp_cc.compression import Compression
    from yafsdp_cc.compression.ddp import GradientWire, encoded_mean
    from yafsdp_cc.compression.fsdp2 import compress
    from yafsdp_cc.compression.schedule import follow_scaler
    from yafsdp_cc.engine.dtensor import patch_torch
    from yafsdp_cc.engine.full_params import unshard_model, whole_parameters
    from yafsdp_cc.engine.module import register_forward_method

__all__ = [
    "Compression",
    "GradientWire",
    "UnshardHandle",
    "compress",
    "counters_of",
    "encoded_mean",
    "follow_scaler",
    "full_state_dict",
    "fully_shard",
    "load",
    "load_safetensors",
    "patch_torch",
    "plan_of",
    "profiling",
    "register_forward_method",
    "register_fsdp_forward_method",
    "save",
    "save_safetensors",
    "shard",
    "share_comm_ctx",
    "unshard_model",
    "watch_loss",
    "whole_parameters",
]

# Looked up at first use: torch takes seconds to import, and the command line passes through here before its help.
_MODULE_OF = {
    "Compression": "yafsdp_cc.compression",
    "UnshardHandle": "yafsdp_cc.api",
    "GradientWire": "yafsdp_cc.compression.ddp",
    "compress": "yafsdp_cc.compression.fsdp2",
    "counters_of": "yafsdp_cc.api",
    "encoded_mean": "yafsdp_cc.compression.ddp",
    "follow_scaler": "yafsdp_cc.compression.schedule",
    "full_state_dict": "yafsdp_cc.checkpoint.full",
    "fully_shard": "yafsdp_cc.api",
    "load": "yafsdp_cc.checkpoint.load",
    "load_safetensors": "yafsdp_cc.checkpoint.safetensors",
    "patch_torch": "yafsdp_cc.engine.dtensor",
    "plan_of": "yafsdp_cc.api",
    "register_forward_method": "yafsdp_cc.engine.module",
    "register_fsdp_forward_method": "yafsdp_cc.api",
    "save": "yafsdp_cc.checkpoint.save",
    "save_safetensors": "yafsdp_cc.checkpoint.safetensors",
    "shard": "yafsdp_cc.api",
    "share_comm_ctx": "yafsdp_cc.api",
    "unshard_model": "yafsdp_cc.engine.full_params",
    "watch_loss": "yafsdp_cc.api",
    "whole_parameters": "yafsdp_cc.engine.full_params",
}


def __getattr__(name: str) -> Any:
    if name == "profiling":
        return importlib.import_module("yafsdp_cc.profiling")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'yafsdp_cc' has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_MODULE_OF[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
