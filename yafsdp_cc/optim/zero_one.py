"""0/1 Adam for sharded models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from yafsdp_cc.engine.compressed import Phase
from yafsdp_cc.optim.adam import OneBitAdam
from yafsdp_cc.optim.drift import Drift
from yafsdp_cc.optim.local import local_of, width_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from yafsdp_cc.optim.leading import Share


class ZeroOneAdam(OneBitAdam):
    """AdamW with exact sums further and further apart, from the first step on, and encoded ones or none in between.

    Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", 2022, algorithm 1. By its
    policy for the second moment (𝒯ᵥ) v takes gradients in at steps k₁, k₂, ... whose distance doubles after every
    ``refreshes`` of them,

        k₁ = 1,   kⱼ₊₁ − kⱼ = 2^⌊j / refreshes⌋        refreshes = 4:  1 2 3 4 6 8 10 12 16 20 ...

    so that it changes by less and less, and there is no warm-up to be chosen. In these steps all sums are exact, the
    first moment's too, and what messages have left unsaid waits. In all others the gradient of each rank is encoded
    with what was left unsaid before, and the owner of a chunk makes the first moment from what it decodes; v stays.

    Its other policy (𝒯ᵤ) is ``local_steps``, over the replicas of a mesh (replicate, shard): in the other steps each
    replica then goes on by itself, by the mean gradient of its own ranks, and no byte crosses replicas. They meet
    after at most so many steps, and before each exact sum: the sum of each one's first moments, times their rates, is
    encoded with what was left unsaid before, and from the mean all make the same weights and the same first moment.
    What is never encoded goes by the same steps, and is said exactly. Until they meet, weights differ among replicas:

    - a forward, ``full_tensor()`` and the norms that clip gradients are those of the replica;
    - saving, loading and state dicts raise a ``RuntimeError``: call ``meet()`` before, on all ranks;
    - weights that something else has changed meanwhile are overwritten: change them after a ``meet()``;
    - a parameter without a gradient has one of zeros, as others may have used it; one that is trained for the first
      time waits for an exact sum, which follows when replicas have met;
    - a ``GradScaler`` that finds an infinity in one replica skips the step in all.

    Other than in the paper, both moments are corrected for their start at zero: v by the number of gradients that it
    has seen. After the first distances no element moves further in a step than exact Adam's can. Parameters that are
    never encoded go through exact AdamW throughout where there are no local steps, and so do all for the first
    ``refreshes`` steps. The distance of meetings follows that of exact sums, where the paper's follows the learning
    rate; messages are multiples of the mean first moment, the paper's of the learning rate besides, so that what they
    leave unsaid is of gradients, with and without local steps.

    The state dict and what is saved beside are those of ``OneBitAdam``, and so is memory; with local steps, 4 bytes and
    a copy of each weight more between meetings, divided by the ranks of a shard. In a state of AdamW v is believed to
    have seen the gradients that it would have seen here.

    Args:
        params, lr, betas, eps, weight_decay: as of ``OneBitAdam``.
        refreshes: κ, exact sums before the distance between them doubles; 1 or more. Of T steps, fewer than
            κ·(1 + log₂(T / κ + 1)) are exact.
        local_steps: H, the most steps that each replica makes by itself before all meet; 1 for none. The paper has 16.

    Raises:
        ValueError: as ``OneBitAdam``; or ``local_steps`` without replicas, or where what crosses them is not encoded.
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
        local_steps: int = 1,
    ) -> None:
        if refreshes < 1:
            raise ValueError(f"refreshes={refreshes}: at least 1: the second moment is learned from exact sums")
        if local_steps < 1:
            raise ValueError(f"local_steps={local_steps}: a number of steps, 1 for none by themselves")
        self.local_steps = local_steps
        self._drifts: dict[Tensor, Drift] = {}
        self._alone = 0
        """Steps since replicas met."""
        self._news = False
        """Whether a parameter that is trained for the first time waits for an exact sum."""
        super().__init__(params, lr, betas, eps, weight_decay, warmup_steps=0, form="gradient", refreshes=refreshes)

    @torch.no_grad()
    def meet(self) -> None:
        """Have replicas meet now, unless they are together: before a checkpoint or a look at weights. A collective.

        What they say of their steps is encoded, as at any other meeting.
        """
        self.lead.check()
        if self.lead.are_apart:
            self._meet()

    def state_dict(self) -> dict[str, Any]:
        """That of AdamW; a ``RuntimeError`` while replicas are apart."""
        self._check_together()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of ``OneBitAdam``; a ``RuntimeError`` while replicas are apart."""
        self._check_together()
        self._news = False
        super().load_state_dict(state_dict)

    def _check_together(self) -> None:
        if self.lead.are_apart:
            raise RuntimeError(
                "a state dict of ZeroOneAdam while replicas make steps by themselves: call its meet(), on all ranks, "
                "first"
            )

    def _phase_of(self, step: int) -> Phase:
        if step in self._refresh_steps(step):
            return Phase.EXACT
        return Phase.LOCAL if self.local_steps > 1 else Phase.ENCODED

    @property
    def phase(self) -> Phase:
        """How the gradients of the next step are summed."""
        if self.local_steps == 1:
            return super().phase
        is_awaited = self._news and not self.lead.are_apart
        return Phase.EXACT if is_awaited else self._phase_of(self.steps + 1)

    def _meets_after(self, step: int) -> bool:
        """Whether replicas meet after a step that each has made by itself."""
        last = max(each for each in self._refresh_steps(step) if each <= step)
        return (step - last) % self.local_steps == 0 or self._phase_of(step + 1) is Phase.EXACT

    def _rests(self, parameter: Tensor) -> bool:
        return self.local_steps > 1 or super()._rests(parameter)

    def _advance(self, phase: Phase) -> None:
        if phase is not Phase.LOCAL:
            if phase is Phase.EXACT and self._news:
                self._news = False
                self._announce()
            super()._advance(phase)
            return
        self.lead.part()
        self._alone += 1
        groups = self._groups()
        if self._meets_after(self.steps):
            for parameter, group in groups.items():
                self._drift(parameter, group)
            self._meet()
            return
        for members in self.lead.by_unit():
            for parameter in members:
                self._drift(parameter, groups[parameter])
                self._place(parameter, groups[parameter])

    def _drift(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Let this replica's own gradient of a parameter into its first moment and its drift."""
        if not parameter.requires_grad:
            return
        state, gradient = self.state[parameter], parameter.grad
        if not state["variance_step"]:
            self._news |= gradient is not None
            return
        drift = self._drifts.get(parameter)
        if drift is None:
            drift = self._drifts[parameter] = Drift(local_of(parameter), width_of(parameter))
        beta1, beta2 = group["betas"]
        state["step"] += 1
        moment = self._local(parameter, "exp_avg").mul_(beta1)
        if gradient is not None:
            moment.add_(local_of(gradient), alpha=1 - beta1)
        furthest = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
        drift.step(moment, group["lr"], group["weight_decay"], 1 - beta1 ** float(state["step"]), furthest)

    def _place(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Put a parameter where its drift has led."""
        if (drift := self._drifts.get(parameter)) is not None:
            correction = 1 - group["betas"][1] ** float(self.state[parameter]["variance_step"])
            root = (self._local(parameter, "exp_avg_sq") / correction).sqrt_().add_(group["eps"])
            local_of(parameter).copy_(drift.place(root))

    def _meet(self) -> None:
        drifts, moments = self._drifts, {each: self._local(each, "exp_avg") for each in self._drifts}
        means = self.lead.meet(
            {each: partial(drift.said, moments[each]) for each, drift in drifts.items()}, self._alone, self._news
        )
        self._alone, self._news = 0, means.news
        self._announce()
        groups = self._groups()
        for members in self.lead.by_unit():
            for parameter in members:
                if (drift := drifts.get(parameter)) is not None:
                    moment = moments[parameter]
                    moment.copy_(drift.agree(means.of(parameter).to(moment)))
                    self._place(parameter, groups[parameter])
        drifts.clear()

    def _groups(self) -> dict[Tensor, dict[str, Any]]:
        return {each: group for group in self.param_groups for each in group["params"]}

    @torch.no_grad()
    def _update_share(self, share: Share) -> None:
        if self.steps == sum(step <= self.steps for step in self._refresh_steps(self.steps)):  # Adam's own, so far
            super()._update_share(share)
            return
        group, exact, encoded = share
        seen = [each for each in exact if self._rests(each)]
        self._refresh([(each, local_of(each.grad).to(width_of(each))) for each in seen])
        self._update_exactly(group, [each for each in exact if not self._rests(each)])
        self._update(group, [*seen, *encoded])
