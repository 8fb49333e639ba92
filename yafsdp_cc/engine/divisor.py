"""The division that makes a mean of a sum over ranks."""

from __future__ import annotations

import math

import torch


class Divisor:
    """What turns a sum over ranks into the mean: gradients are divided by it once, at the end (post-divide)."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor = factor
        self.casts = device.type == "cuda"
        """Whether a division casts in its own kernel; elsewhere it would allocate."""
        of = {dtype: torch.full((1,), factor, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)}
        self.of = of | {torch.bfloat16: of[torch.float32]}
        """By the sum's dtype, [1]: a number would become a new tensor in every division, 0-d not have bf16 cast."""
        self.inverse = 1 / factor if math.frexp(factor)[0] == 0.5 else None
        """Where multiplying by it is as exact as dividing."""
