"""1-bit Adam and 0/1 Adam for sharded models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.adamw import adamw

from yafsdp_cc.compression.schedule import Phase
from yafsdp_cc.optim.one_bit import Form, OneBitOptimizer, grad_of, local_of, width_of
from yafsdp_cc.optim.update import Row, Rule, adam_settings, update
from yafsdp_cc.tensor.dtensor import increment_version

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class OneBitAdam(OneBitOptimizer):
    """AdamW whose gradients are encoded for the network, by the codec that ``Compression(gradients=...)`` names.

    Tang et al., "1-bit Adam", 2021: exact Adam first, then a second moment that changes rarely and a first moment that
    is encoded with error feedback. The paper encodes a momentum that every rank holds whole; this optimizer encodes

    - ``form="momentum"``: each rank's own momentum, which also serves as its residual. ``.grad`` is then the first
      moment itself, so that clipping it limits the update. Memory beyond AdamW's: the residuals, 1 byte for each
      element and rank with ``Compression(residual="int8")``, 2 with bf16; divided by the ranks of a shard where only
      sums over replicas are encoded.
    - ``form="gradient"``: each rank's gradient, with its residual; the owner of a chunk makes the first moment from the
      decoded sum. It takes as much memory as the other form, works for several backwards per step without ``no_sync``,
      and learns less well from a single bit.

    Parameters that are never encoded (replicated ones, ``overrides`` with "fp32") go through exact AdamW throughout,
    and so does everything until ``warmup_steps`` are over. Afterwards no element moves further in a step than exact
    Adam's can (Kingma & Ba, "Adam", 2015, section 2.1), however small its second moment was when it was last updated.

    A state dict is that of ``torch.optim.AdamW``: ``yafsdp_cc.load`` gives either the other's, at any number of ranks.
    Residuals are saved beside it by ``yafsdp_cc.save``.

    Args:
        params: all trained parameters of a model that was sharded with a compression, or groups of them.
        lr: the learning rate; the loop or a scheduler changes it in the groups.
        betas: decay of the moments, the same in all groups.
        eps: added to the root of the second moment.
        weight_decay: decoupled (Loshchilov & Hutter, 2019).
        warmup_steps: number of steps with exact sums: about a twentieth of all.
        form: "momentum" or "gradient", see above.
        refreshes: after the warm-up the second moment is still updated from exact sums in this many consecutive steps,
            then in as many of every second step, of every fourth, and so on (Lu et al., "0/1 Adam", 2022); 0: never.
        max_grad_norm: the limit that the training loop clips gradients to, so that the exact gradients of refreshes are
            clipped too.

    Raises:
        ValueError: the model is not sharded with a compression, or an argument does not fit; the message says what to
            change.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int,
        form: Form = "momentum",
        refreshes: int = 4,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay},
            warmup_steps=warmup_steps,
            form=form,
            refreshes=refreshes,
            max_grad_norm=max_grad_norm,
        )

    def _init_state(self, parameter: Tensor) -> None:
        super()._init_state(parameter)
        state = self.state[parameter]
        if self._is_encoded(parameter):
            # torch's AdamW saves no ``variance_step``: there the second moment has seen the gradient of every step.
            state.setdefault("variance_step", state["step"].detach().clone())
        elif "variance_step" in state:
            self.state[parameter] = adamw_state(state, self.param_groups[0]["betas"][1])

    @property
    def phase(self) -> Phase:
        """The phase of the next step: ``BOTH`` in place of ``ENCODED`` if a second moment has seen no gradient yet."""
        phase = super().phase
        new = phase is Phase.ENCODED and any(
            each.get("variance_step") == 0 < each["step"] for each in self.state.values()
        )
        return Phase.BOTH if new else phase

    def _update_variance(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        if not gradients:
            return
        beta2 = self.param_groups[0]["betas"][1]
        squares = [self._local(parameter, "exp_avg_sq") for parameter, _ in gradients]
        exact = [gradient for _, gradient in gradients]
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, exact, exact, value=1 - beta2)
        for parameter, _ in gradients:
            self.state[parameter]["variance_step"] += 1

    def _update_exactly(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        current, late = [], []
        for parameter in parameters:
            state = self.state[parameter]
            # an exact gradient after the warm-up: the second moment has seen fewer gradients than there were steps
            if self._is_encoded(parameter) and state["variance_step"] != state["step"]:
                late.append(parameter)
                continue
            if self._is_encoded(parameter):
                state["variance_step"] += 1
            current.append(parameter)
        sharded_adamw_step(group, current, self.state)
        self._update_variance([(parameter, grad_of(parameter)) for parameter in late])
        self._move(group, late, Rule.ADAM_GRADIENT)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        self._move(group, parameters, Rule.ADAM_GRADIENT if self.form == "gradient" else Rule.ADAM_MOMENTUM)

    def _move(self, group: dict[str, Any], parameters: list[Tensor], rule: Rule) -> None:
        """Make Adam's step with the decoded sum, correcting the second moment for the gradients that it has seen."""
        rows = []
        for parameter in parameters:
            state, gradient = self.state[parameter], local_of(parameter.grad)
            state["step"] += 1
            moment = local_of(state["exp_avg"]) if rule is Rule.ADAM_GRADIENT else None
            if seen := float(state["variance_step"]):
                settings = adam_settings(group, float(state["step"]), seen)
                rows.append(Row(local_of(parameter), gradient, moment, local_of(state["exp_avg_sq"]), settings))
            # the second moment has seen no gradient: leave the weights until the next step brings an exact gradient
            elif moment is not None:
                moment.lerp_(gradient.to(moment.dtype), 1 - group["betas"][0])
        update(rule, rows)


class ZeroOneAdam(OneBitAdam):
    """AdamW with exact sums at growing distances, from the first step on, and encoded sums in between.

    Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", 2022, algorithm 1. By the
    paper's policy 𝒯ᵥ the second moment v takes gradients in at steps k₁, k₂, ... whose distance doubles after every
    ``refreshes`` of them,

        k₁ = 1,   kⱼ₊₁ − kⱼ = 2^⌊j / refreshes⌋        refreshes = 4:  1 2 3 4 6 8 10 12 16 20 ...

    so that v changes less and less, and no warm-up need be chosen. In steps kⱼ all sums are exact, the first moment's
    too, and residuals are unchanged. In all others each rank's gradient is encoded with its residual, the owner of a
    chunk makes the first moment from the decoded sum, and v is unchanged.

    The paper's other policy (𝒯ᵤ), steps that each rank makes by itself between rounds of communication, is not this
    optimizer's: the ranks of a shard have no whole weights to make them with. Between replicas, with AdamW, that policy
    is ``replicas.Outer(every=4, lr=1, momentum=0, codec="onebit", decay=1)``.

    Other than in the paper, both moments are corrected for their start at zero: v by the number of gradients that it
    has seen. Once sums are encoded, no element moves further in a step than exact Adam's can. Parameters that are
    never encoded go through exact AdamW throughout, and so do all for the first ``refreshes`` steps.

    The state dict, what is saved beside it and memory are those of ``OneBitAdam``. When a state of AdamW is loaded, v
    counts as having seen the gradients of the exact steps so far.

    Arguments that are not listed are those of ``OneBitAdam``.

    Args:
        refreshes: κ, exact sums before the distance between them doubles; 1 or more. Of T steps, fewer than
            κ·(1 + log₂(T / κ + 1)) are exact.
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
        # while all steps so far were exact, make exact Adam's step
        if self.steps == sum(step <= self.steps for step in self._refresh_steps(self.steps)):
            super()._update_group(group, exact, encoded)
            return
        seen = [each for each in exact if self._is_encoded(each)]
        self._update_variance([(each, grad_of(each)) for each in seen])
        self._update_exactly(group, [each for each in exact if not self._is_encoded(each)])
        self._update(group, [*seen, *encoded])


def adamw_state(state: Mapping[str, Any], beta2: float) -> dict[str, Any]:
    """Return a parameter's state as AdamW has it, with the second moment times a factor.

    AdamW corrects the second moment for all steps, and one saved in the encoded phase has seen fewer gradients: without
    the factor, updates would be too long.
    """
    step, seen = float(state["step"]), float(state["variance_step"])
    factor = (1 - beta2**step) / (1 - beta2**seen) if seen else 1.0
    return {"step": state["step"], "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"] * factor}


def sharded_adamw_step(group: dict[str, Any], parameters: Sequence[Tensor], states: Mapping[Tensor, Any]) -> None:
    """Make the step of ``torch.optim.AdamW`` for this rank's elements of sharded parameters, in fp32 at least, whatever
    their dtypes are.
    """
    rows = []
    for parameter in parameters:
        state = states[parameter]
        kept = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        rows.append([local_of(each) for each in kept])
    increment_version([row[0] for row in rows])
    # On a CPU take the fused kernel, for the bits of AdamW(fused=True); on a GPU it needs step counts on the GPU.
    is_fused = all(row[0].is_cpu for row in rows)
    wide = [[each.to(width_of(row[0])) for each in row] for row in rows]
    weights, grads, moments, squares = ([row[index] for row in wide] for index in range(4))
    adamw(
        weights,
        grads,
        moments,
        squares,
        [],
        [states[parameter]["step"] for parameter in parameters],
        fused=is_fused,
        foreach=not is_fused,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=float(group["lr"]),  # the foreach functions take no tensor as learning rate
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for (weight, _, moment, square), updated in zip(rows, wide, strict=True):
        for before, after in ((weight, updated[0]), (moment, updated[2]), (square, updated[3])):
            if before is not after:
                before.copy_(after)
