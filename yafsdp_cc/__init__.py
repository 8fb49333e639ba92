"""A sharded data-parallel engine for PyTorch that compresses what it sends."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yafsdp_cc import profiling
    from yafsdp_cc.api import counters_of, plan_of, shard, watch_loss
    from yafsdp_cc.checkpoint.full import full_state_dict
    from yafsdp_cc.checkpoint.load import load
    from yafsdp_cc.checkpoint.safetensors import load_safetensors, save_safetensors
    from yafsdp_cc.checkpoint.save import save
    from yafsdp_cc.compression import Compression
    from yafsdp_cc.engine.dtensor import patch_torch
    from yafsdp_cc.engine.module import register_forward_method
    from yafsdp_cc.engine.scaler import follow_scaler
    from yafsdp_cc.engine.unshard import unshard_model
    from yafsdp_cc.engine.whole import whole_parameters
    from yafsdp_cc.fsdp2 import UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx
    from yafsdp_cc.integrations.ddp_wire import GradientWire, encoded_mean
    from yafsdp_cc.integrations.fsdp2_wire import compress

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
_HOME = {
    "Compression": "yafsdp_cc.compression",
    "UnshardHandle": "yafsdp_cc.fsdp2",
    "GradientWire": "yafsdp_cc.integrations.ddp_wire",
    "compress": "yafsdp_cc.integrations.fsdp2_wire",
    "counters_of": "yafsdp_cc.api",
    "encoded_mean": "yafsdp_cc.integrations.ddp_wire",
    "follow_scaler": "yafsdp_cc.engine.scaler",
    "full_state_dict": "yafsdp_cc.checkpoint.full",
    "fully_shard": "yafsdp_cc.fsdp2",
    "load": "yafsdp_cc.checkpoint.load",
    "load_safetensors": "yafsdp_cc.checkpoint.safetensors",
    "patch_torch": "yafsdp_cc.engine.dtensor",
    "plan_of": "yafsdp_cc.api",
    "register_forward_method": "yafsdp_cc.engine.module",
    "register_fsdp_forward_method": "yafsdp_cc.fsdp2",
    "save": "yafsdp_cc.checkpoint.save",
    "save_safetensors": "yafsdp_cc.checkpoint.safetensors",
    "shard": "yafsdp_cc.api",
    "share_comm_ctx": "yafsdp_cc.fsdp2",
    "unshard_model": "yafsdp_cc.engine.unshard",
    "watch_loss": "yafsdp_cc.api",
    "whole_parameters": "yafsdp_cc.engine.whole",
}


def __getattr__(name: str) -> Any:
    if name == "profiling":
        return importlib.import_module("yafsdp_cc.profiling")
    if name not in _HOME:
        raise AttributeError(f"module 'yafsdp_cc' has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_HOME[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
