"""What Adam's kin share: this rank's part of parameters and of their state, and which settings make sense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def local_of(tensor: Any) -> Tensor:
    """This rank's elements, the very tensor that holds them."""
    local: Tensor = tensor.to_local()
    return local


def width_of(parameter: Tensor) -> torch.dtype:
    """What the state of a parameter is kept in, and its update computed: fp32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


def check_settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise a ``ValueError`` where one of Adam's settings is out of range."""
    if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
        raise ValueError(f"betas={betas}: two numbers from 0 to 1, less than 1")
    if min(lr, eps, weight_decay) < 0:
        raise ValueError(f"lr={lr}, eps={eps}, weight_decay={weight_decay}: 0 or more")
