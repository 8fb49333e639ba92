"""Adapters for other frameworks. Each module imports its framework when it is called."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yafsdp_cc.integrations import accelerate as accelerate
    from yafsdp_cc.integrations import lightning as lightning
    from yafsdp_cc.integrations import pipelining as pipelining
    from yafsdp_cc.integrations import titan as titan
    from yafsdp_cc.integrations import transformers as transformers

__all__ = ["accelerate", "lightning", "pipelining", "titan", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'yafsdp_cc.integrations' has no attribute {name!r}")
    return importlib.import_module(f"yafsdp_cc.integrations.{name}")
