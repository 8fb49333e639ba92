"""A sharded data-parallel engine for PyTorch that compresses what it sends."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yafsdp_cc import profiling
    from yafsdp_cc.api import counters_of, plan_of, shard
    from yafsdp_cc.engine.module import register_forward_method
    from yafsdp_cc.engine.whole import whole_parameters

__all__ = ["counters_of", "plan_of", "profiling", "register_forward_method", "shard", "whole_parameters"]

# Looked up at first use: torch takes seconds to import, and the command line passes through here before its help.
_HOME = {
    "counters_of": "yafsdp_cc.api",
    "plan_of": "yafsdp_cc.api",
    "register_forward_method": "yafsdp_cc.engine.module",
    "shard": "yafsdp_cc.api",
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
