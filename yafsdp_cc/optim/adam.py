"""1-bit Adam for sharded models."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adamw import adamw

from yafsdp_cc.compression.schedule import Phase
from yafsdp_cc.engine.dtensor import increment_version
from yafsdp_cc.optim.one_bit import Form, OneBitOptimizer, check_settings, local_of, width_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class OneBitAdam(OneBitOptimizer):
    """AdamW whose gradients are encoded for the network, by the codec that ``Compression(gradients=...)`` names.

    Tang et al., "1-bit Adam", 2021: exact Adam first, then a second moment that changes rarely and a first one that is
    encoded with error feedback. Where the paper encodes a momentum that every rank holds whole, this encodes

    - ``form="momentum"``: each rank's own momentum, which is its residual at the same time. ``.grad`` is then the first
      moment itself, so that clipping it limits the update. Memory beyond AdamW's: the residuals, 1 byte for each
      element and rank with ``Compression(residual="int8")``, 2 with bf16; divided by the ranks of a shard where only
      sums over replicas are encoded.
    - ``form="gradient"``: each rank's gradient, with its residual; the owner of a chunk makes the first moment from
      what it decodes. As much memory. Works for several backwards per step without ``no_sync``, and learns less well
      from a single bit.

    Parameters that are never encoded (replicated ones, ``overrides`` with "fp32") go through exact AdamW throughout,
    and so does everything until ``warmup_steps`` are over. Afterwards no element moves further in a step than exact
    Adam's can (Kingma & Ba, "Adam", 2015, section 2.1), however small its second moment was when it was last seen.

    A state dict is that of ``torch.optim.AdamW``: either can load the other's, at any number of ranks. Residuals are
    saved beside it by ``yafsdp_cc.save``.

    Args:
        params: of a model that was sharded with a compression, or groups of them: all that are trained.
        lr: the learning rate; the loop or a scheduler changes it in the groups.
        betas: decay of the moments, the same in all groups.
        eps: added to the root of the second moment.
        weight_decay: decoupled (Loshchilov & Hutter, 2019).
        warmup_steps: with exact sums: about a twentieth of all.
        form: what is encoded, see above.
        refreshes: after the warm-up the second moment still learns from exact sums, in so many steps one after the
            other, in as many every second step, every fourth, and so on (Lu et al., "0/1 Adam", 2022); 0: never.
        max_grad_norm: what the training loop clips gradients to, so that those exact ones are clipped too.

    Raises:
        ValueError: the model is not sharded with a compression, or something of that does not fit; the message says
            what to change.
    """

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
        check_settings(lr, betas, eps, weight_decay)
        super().__init__(
            params,
            {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay},
            beta=betas[0],
            share=1 - betas[0],
            warmup_steps=warmup_steps,
            form=form,
            refreshes=refreshes,
            max_grad_norm=max_grad_norm,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with settings of their own but for the betas."""
        super().add_param_group(param_group)
        if any(tuple(group["betas"]) != tuple(self.param_groups[0]["betas"]) for group in self.param_groups):
            self.param_groups.pop()
            raise ValueError("OneBitAdam takes the same betas in all groups: residuals are one momentum")

    def _init_state(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        state.setdefault("step", torch.tensor(0.0))
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=width_of(parameter), requires_grad=False)
        if self._is_encoded(parameter):  # AdamW's own has seen as many gradients as steps
            state.setdefault("variance_step", state["step"].detach().clone())
        elif (seen := float(state.pop("variance_step", 0))) > 0:  # of a checkpoint where it was encoded
            beta2 = self.param_groups[0]["betas"][1]
            state["exp_avg_sq"].mul_((1 - beta2 ** float(state["step"])) / (1 - beta2**seen))
        self._share_moment(parameter, "exp_avg")

    @property
    def phase(self) -> Phase:
        """How the gradients of the next step are summed: exactly besides, where a second moment has seen none."""
        phase = super().phase
        new = phase is Phase.ENCODED and any(
            state.get("variance_step") == 0 and (state["step"] > 0 or parameter.grad is not None)
            for parameter, state in self.state.items()
        )
        return Phase.BOTH if new else phase

    def _update_variance(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        beta2 = self.param_groups[0]["betas"][1]
        for parameter, gradient in gradients:
            self._local(parameter, "exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            self.state[parameter]["variance_step"] += 1

    def _update_exactly(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        owned = []
        for parameter in parameters:
            if self._is_encoded(parameter):
                state = self.state[parameter]
                if state["variance_step"] != state["step"]:  # once more, long after the warm-up
                    gradient = local_of(parameter.grad).to(width_of(parameter))
                    self._update_variance([(parameter, gradient)])
                    self._move(group, parameter, self._local(parameter, "exp_avg").lerp_(gradient, 1 - beta1))
                    continue
                state["variance_step"] += 1
            if local_of(parameter).numel():
                owned.append(parameter)
            else:
                self.state[parameter]["step"] += 1
        # The fused kernel does not count what it changes. What a rank has nothing of has changed, too: all ranks are to
        # all-gather it anew.
        increment_version([local_of(parameter) for parameter in parameters])
        if not owned:
            return
        kept = [
            [local_of(each) for each in owned],
            [self._local(each, "exp_avg") for each in owned],
            [self._local(each, "exp_avg_sq") for each in owned],
        ]
        widths = [width_of(each) for each in owned]
        wide = [[each.to(width) for each, width in zip(one, widths, strict=True)] for one in kept]
        adamw(
            wide[0],
            [local_of(each.grad).to(width) for each, width in zip(owned, widths, strict=True)],
            wide[1],
            wide[2],
            [],
            [self.state[each]["step"] for each in owned],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for before, after in zip(chain(*kept), chain(*wide), strict=True):
            if before is not after:
                before.copy_(after)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            moment = local_of(parameter.grad).to(width_of(parameter))
            if self.form == "gradient":
                moment = self._local(parameter, "exp_avg").lerp_(moment, 1 - group["betas"][0])
            self._move(group, parameter, moment)

    def _move(self, group: dict[str, Any], parameter: Tensor, moment: Tensor) -> None:
        """Adam's step by a first moment, and a second one that has seen as many gradients as it has."""
        beta1, beta2 = group["betas"]
        furthest = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
        state = self.state[parameter]
        state["step"] += 1
        if not state["variance_step"]:
            return  # trained for the first time: the next step brings an exact gradient
        corrections = 1 - beta1 ** float(state["step"]), 1 - beta2 ** float(state["variance_step"])
        root = (self._local(parameter, "exp_avg_sq") / corrections[1]).sqrt_().add_(group["eps"])
        update = (moment / root.mul_(corrections[0])).clamp_(-furthest, furthest)
        local = local_of(parameter)
        local.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.mul_(group["lr"]))
