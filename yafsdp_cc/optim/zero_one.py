"""0/1 Adam for sharded models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from yafsdp_cc.compression.schedule import Phase
from yafsdp_cc.optim.adam import OneBitAdam
from yafsdp_cc.optim.one_bit import grad_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class ZeroOneAdam(OneBitAdam):
    """AdamW with exact sums at growing distances, from the first step on, and encoded sums in between.

    Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", 2022, algorithm 1. By its
    policy for the second moment (𝒯ᵥ) v takes gradients in at steps k₁, k₂, ... whose distance doubles after every
    ``refreshes`` of them,

        k₁ = 1,   kⱼ₊₁ − kⱼ = 2^⌊j / refreshes⌋        refreshes = 4:  1 2 3 4 6 8 10 12 16 20 ...

    so that v changes less and less, and no warm-up need be chosen. In steps kⱼ all sums are exact, the first moment's
    too, and residuals are unchanged. In all others each rank's gradient is encoded with its residual, the owner of a
    chunk makes the first moment from the decoded sum, and v is unchanged.

    Its other policy (𝒯ᵤ), steps that each rank makes by itself between rounds of communication, is not this
    optimizer's: the ranks of a shard have no whole weights to make them with. Between replicas, with AdamW, it is
    ``replicas.Outer(every=4, lr=1, momentum=0, codec="onebit", decay=1)``.

    Other than in the paper, both moments are corrected for their start at zero: v by the number of gradients that it
    has seen. After the first distances no element moves further in a step than exact Adam's can. Parameters that are
    never encoded go through exact AdamW throughout, and so do all for the first ``refreshes`` steps.

    The state dict, what is saved beside it and memory are those of ``OneBitAdam``. When a state of AdamW is loaded, v
    counts as having seen the gradients of the exact steps so far.

    Arguments that are not listed are those of ``OneBitAdam``.

    Args:
        refreshes: κ, exact sums before the distance between them doubles; 1 or more. Of T steps, fewer than
            κ·(1 + log₂(T / κ + 1)) are exact.

    Raises:
        ValueError: as ``OneBitAdam``.
    """

    shortest_warmup: ClassVar[int] = 0

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        refreshes: int = 16,
    ) -> None:
        if refreshes < 1:
            raise ValueError(f"refreshes={refreshes}: at least 1: the second moment is learned from exact sums")
        super().__init__(params, lr, betas, eps, weight_decay, warmup_steps=0, form="gradient", refreshes=refreshes)

    def _phase_of(self, step: int) -> Phase:
        return Phase.EXACT if step in self._refresh_steps(step) else Phase.ENCODED

    def _update_group(self, group: dict[str, Any], exact: list[Tensor], encoded: list[Tensor]) -> None:
        # all steps so far were exact, so this one is Adam's own
        if self.steps == sum(step <= self.steps for step in self._refresh_steps(self.steps)):
            super()._update_group(group, exact, encoded)
            return
        seen = [each for each in exact if self._is_encoded(each)]
        self._update_variance([(each, grad_of(each)) for each in seen])
        self._update_exactly(group, [each for each in exact if not self._is_encoded(each)])
        self._update(group, [*seen, *encoded])
