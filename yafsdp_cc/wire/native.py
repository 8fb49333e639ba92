"""The native extension: found, loaded once, or done without, which is said once."""

from __future__ import annotations

from typing import Any

import torch


def ops_for(device: torch.device) -> Any:
    """The native operators that take tensors of ``device``, or None."""
    return None
