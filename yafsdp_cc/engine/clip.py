"""Gradients that are clipped before they are sent, each rank's by itself.

Where what is sent is momentum, no loop can clip gradients any more: what it sees is the momentum of all. So every rank
clips its own, flat by flat, to its usual share of the limit,

    κ = E ‖gᵂ‖ / ‖g‖             of a rank's gradient of one flat, by the norm of the whole model's mean gradient
    gᵂ ← gᵂ · min(1, c·κ / ‖gᵂ‖)

A step whose gradients are k times the limit everywhere is divided by k, as clipping the mean by its norm would; one
that is far off in a single flat or rank is clipped there alone. κ is learned in steps that sum exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_NEWS = 0.3
"""How much of κ is what was seen last."""


class Clip:
    """The limit of one model's gradients, and what of it is each flat's on this rank.

    Args:
        limit: c, of the norm of the mean gradient of an unscaled loss.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._norms: dict[str, Tensor] = {}
        """Of what this rank has sent since it learned last, by flat; 0: nothing. A lane writes to them: they stay."""
        self._shares: dict[str, Tensor] = {}
        """κ of each flat."""
        self.is_blind = True
        """Whether no share is known, and nothing is clipped; the same on all ranks."""

    @torch.no_grad()
    def clip(self, name: str, gradients: Tensor, loss_scale: float) -> None:
        """Clip, in place, what this rank is to say of the gradients of the flat of this name."""
        wide = torch.promote_types(gradients.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradients, dtype=wide).to(torch.float32)
        if (share := self._shares.get(name)) is not None:
            factor = (self._limit * loss_scale * share / norm).clamp_(max=1.0)
            factor.masked_fill_(~norm.isfinite(), 1.0)  # what is not finite is dealt with block by block
            if gradients.device.type != "cpu" or float(factor) < 1:  # on a GPU nobody is to wait for the number
                gradients.mul_(factor)
                norm *= factor
        norm = norm / loss_scale
        if (kept := self._norms.get(name)) is None:
            self._norms[name] = norm
        else:
            kept.copy_(norm)

    def learn(self, total: float) -> None:
        """Learn from the step before, of which ``total`` was the norm of the mean gradient."""
        if not 0 < total < torch.inf:
            return
        self.is_blind = False
        for name, norm in self._norms.items():
            share, known = norm / total, self._shares.get(name)
            fits = norm.isfinite() & (norm > 0)  # what was not used tells nothing
            if known is not None:
                self._shares[name] = torch.where(fits, known.lerp(share, _NEWS), known)
            elif fits:
                self._shares[name] = share
            norm.zero_()

    def state(self) -> dict[str, float] | None:
        """κ of each flat, for a checkpoint of this rank; None while nothing is known."""
        return None if self.is_blind else {name: float(share) for name, share in self._shares.items()}

    def resume(self, state: Mapping[str, float] | None, device: torch.device) -> None:
        """Go on from what ``state`` once returned."""
        self.is_blind = state is None
        self._shares = {name: torch.tensor(share, device=device) for name, share in (state or {}).items()}
        for norm in self._norms.values():
            norm.zero_()
