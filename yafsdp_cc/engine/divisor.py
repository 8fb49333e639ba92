"""The division that makes a mean of a sum over ranks."""

from __future__ import annotations

import math

import torch


class Divisor:
    """The number that a sum over ranks is divided by, once, at the end, to give the mean (post-divide)."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor = factor
        self.casts = device.type == "cuda"
        """Whether ``div`` casts within its kernel, as on CUDA; on other devices a cast would allocate."""
        of = {dtype: torch.full((1,), factor, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)}
        self.of = of | {torch.bfloat16: of[torch.float32]}
        """[1] tensor of ``factor`` by the sum's dtype. A Python number would become a new tensor in every division, and
        a 0-d tensor would not cast bf16 sums to fp32."""
        self.inverse = 1 / factor if math.frexp(factor)[0] == 0.5 else None
        """1 / factor where multiplying by it gives the same bits as dividing (powers of two); else None."""
