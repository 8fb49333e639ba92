"""What one replica's own steps make of a parameter, and the same of what all replicas have made of it.

With the weights x₀ of the last meeting, the first moment m, the rate γ (over Adam's correction of m) and the decay λ,

    u ← (1 − γλ)·u + γ·m,    Σ ← (1 − γλ)·Σ + γ          in each step
    x = x₀·∏(1 − γλ) − u / (√v + ε)                       as v rests, these are the steps, one after the other

so that at a meeting the mean of u makes the weights of all by the same formula, and is, over Σ, their first moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Drift:
    """The steps of one parameter since replicas met.

    Args:
        anchor: its elements then, which change from here on.
        width: what is computed in.
    """

    def __init__(self, anchor: Tensor, width: torch.dtype) -> None:
        self._anchor = anchor.clone()
        self._update = torch.zeros_like(anchor, dtype=width)
        self._rate = self._reach = 0.0
        self._kept = 1.0
        self._steps = 0

    def step(self, moment: Tensor, lr: float, decay: float, correction: float, furthest: float) -> None:
        """Add a step by ``moment``, which is yet to be divided by ``correction``.

        No element is to move further than ``furthest`` times the sum of the rates.
        """
        rest, rate = 1 - lr * decay, lr / correction
        self._update.mul_(rest).add_(moment, alpha=rate)
        self._rate = rest * self._rate + rate
        self._reach = rest * self._reach + lr * furthest
        self._kept *= rest
        self._steps += 1

    def said(self, moment: Tensor) -> Tensor:
        """The mean of the first moments that the steps were made by, times their number; of the last one, if at a rate
        of 0.

        So what messages leave unsaid counts as much after many steps as after few.
        """
        return moment * self._steps if self._rate == 0 else self._update * (self._steps / self._rate)

    def agree(self, mean: Tensor) -> Tensor:
        """Take the ``mean`` of what all have said for one's own; the first moment that it makes."""
        self._update = mean * (self._rate / self._steps)
        return mean / self._steps

    def place(self, root: Tensor) -> Tensor:
        """The weights, where ``root`` is √v + ε."""
        moved = (self._update / root).clamp_(-self._reach, self._reach)
        return self._anchor.to(root.dtype).mul(self._kept).sub_(moved)
