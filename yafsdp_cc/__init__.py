"""A sharded data-parallel engine for PyTorch that compresses what it sends."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yafsdp_cc import profiling
    from yafsdp_cc.api import counters_of, plan_of, shard
    from yafsdp_cc.engine.module import register_forward_method
    from yafsdp_cc.engine.whole import whole_parameters
    from yafsdp_cc.fsdp2 import UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx

__all__ = [
    "UnshardHandle",
    "counters_of",
    "fully_shard",
    "plan_of",
    "profiling",
    "register_forward_method",
    "register_fsdp_forward_method",
    "shard",
    "share_comm_ctx",
    "whole_parameters",
]

# Looked up at first use: torch takes seconds to import, and the command line passes through here before its help.
_HOME = {
    "UnshardHandle": "yafsdp_cc.fsdp2",
    "counters_of": "yafsdp_cc.api",
    "fully_shard": "yafsdp_cc.fsdp2",
    "plan_of": "yafsdp_cc.api",
    "register_forward_method": "yafsdp_cc.engine.module",
    "register_fsdp_forward_method": "yafsdp_cc.fsdp2",
    "shard": "yafsdp_cc.api",
    "share_comm_ctx": "yafsdp_cc.fsdp2",
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
