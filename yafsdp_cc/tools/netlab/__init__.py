"""Slow networks on one machine: ranks in network namespaces, joined by links of a given rate, delay and loss."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yafsdp_cc.tools.netlab.lab import Lab
    from yafsdp_cc.tools.netlab.links import LabError, Links, Traffic, Unavailable

__all__ = ["Lab", "LabError", "Links", "Traffic", "Unavailable"]


def __getattr__(name: str) -> Any:
    # ``Lab`` imports torch, which starts threads, and a rank has to enter its namespace before there are any
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{'lab' if name == 'Lab' else 'links'}"), name)
