"""Momentum error feedback: what a message left unsaid and the momentum, in one buffer.

With M of every rank w the recursion of ``feedback`` with a = 1 − β,

    h = M + g_w;   m = C(h);   M ← h − (1 − β)·D(m);   the owner's update: (1 − β)/N · Σ D(m)

says M = β(M + g_w) and an update of (1 − β)/N · Σ(M + g_w) where C is exact: Adam's first moment (Ahn et al., "Dion",
2025, algorithm 1, whose C is of low rank; Karimireddy et al., 2019, for the feedback). The owner's own part crosses no
network and so is exact. It lies where the optimizer keeps its first moment, e ← β·e + (1 − β)/N · g, and is a part of
the update as β·e: a first moment that was gathered before with exact sums goes on from there, and fades.

SGD's momentum is a sum where Adam's is an average: e ← β·e + 1/N · g, with a ``share`` of 1 in place of 1 − β. What
messages say and what they leave is the same; the update is multiplied by ``share``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.feedback import Residual

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Momentum:
    """The first moment of one chunk, as far as its owner knows it by itself.

    Args:
        values: [chunk] fp32, what an optimizer calls ``exp_avg``: a mean over ranks, without a loss scale.
        beta: its decay per step.
        share: of a gradient that it takes in: 1 − beta where it is an average, 1 where it is a sum.
        block: elements of which none is taken in where one is not finite.
        units: what sums are to be divided by at present: the number of ranks, times the loss scale.
    """

    def __init__(self, values: Tensor, beta: float, share: float, block: int, units: Callable[[], float]) -> None:
        self.beta = beta
        self.share = share
        self._units = units
        self._stored = Residual.around(values.unsqueeze(0), block)

    @property
    def values(self) -> Tensor:
        return self._stored.values[0]

    def add_to(self, total: Tensor, start: int) -> None:
        """Add its part of the update to elements from ``start`` of the sum, which will be multiplied by ``share``."""
        total.add_(self.values.narrow(0, start, total.numel()), alpha=self.beta / self.share * self._units())

    def decay(self, own: Tensor | None = None) -> None:
        """Go on by a step, with this rank's ``own`` gradients [chunk] if it sums them itself."""
        self._stored.multiply(self.beta)
        if own is not None:
            kernels.accumulate(own.unsqueeze(0), self._stored, scale=self.share / self._units())

    def take(self, own: Tensor) -> None:
        """Take in ``own`` gradients [chunk] of a micro-batch that are sent later: those of the step's last decay it."""
        kernels.accumulate(own.unsqueeze(0), self._stored, scale=self.share / self.beta / self._units())
