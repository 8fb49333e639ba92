"""1-bit LAMB for sharded models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from yafsdp_cc.engine.dtensor import flat_dtensor
from yafsdp_cc.optim.adam import OneBitAdam, bounded_update, root_of
from yafsdp_cc.optim.one_bit import grad_of, local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from yafsdp_cc.compression.schedule import Phase
    from yafsdp_cc.engine.dtensor import FlatDTensor
    from yafsdp_cc.optim.one_bit import Form

_REMEMBERED = 0.9
"""β₃: how much of the average trust ratio a step of the warm-up keeps."""
_LEAST, _MOST, _CHANGE = 0.5, 4.0, 0.1
"""What the average is multiplied by after the warm-up: bounds, and how far that may move in a step, relatively."""


class Ready(NamedTuple):
    """A parameter whose update waits for norms."""

    parameter: Any
    group: dict[str, Any]
    update: Tensor
    """This rank's range of m̂ / (√v̂ + ε) + λ·x."""
    largest: Any = None
    """The largest √v̂ / √v̂_fresh, still spread over ranks; None where gradients are exact."""
    bare: Any = None
    """The norm of the update without λ·x, still spread over ranks; None where there is no λ or gradients are exact."""


class OneBitLamb(OneBitAdam):
    """LAMB whose gradients are encoded for the network, by the codec that ``Compression(gradients=...)`` names.

    LAMB (You et al., "Large Batch Optimization for Deep Learning", 2020, algorithm 2) is Adam whose step of each
    parameter is multiplied by a trust ratio, ‖x‖ / ‖update‖. After the warm-up that ratio would follow the errors of
    encoded sums. In Li et al., "1-bit LAMB", 2021, algorithm 1, it is the average over the warm-up, times a factor that
    follows the second moment that decoded gradients have:

        g̃ = (m − β₁·m₋₁) / (1 − β₁)                   the gradient, from decoded momenta
        w ← β₂·w + (1 − β₂)·g̃²                        a fresh second moment, w = v at first
        factor = max over elements of √v / √w         from 0.5 to 4, and within a tenth of the one before

    Here, other than there,

    - what is encoded is what ``OneBitAdam`` encodes, with scales of blocks, so momenta need not be brought to one scale
      before; with ``form="gradient"`` g̃ is what was decoded;
    - v is refreshed as ``OneBitAdam`` does it, so √v / √w compares with what v is now;
    - both moments are corrected for their start at zero, as LAMB's are, and the average of ratios by starting at the
      first; a parameter that is all zero counts with a ratio of 1, and not in the average;
    - norms are those of whole parameters: a step makes one all-reduce of a few numbers for each parameter, and after
      the warm-up a second one for the largest ratios.

    Parameters that are never encoded go through exact LAMB throughout. A step holds the updates of all parameters at
    once, 4 bytes for each element of a rank's shard; the state is that of ``torch.optim.AdamW``, w and m₋₁, which is
    4 to 8 bytes more.

    Args:
        params, lr, betas, weight_decay, warmup_steps, form, refreshes, max_grad_norm: as of ``OneBitAdam``; the weight
            decay is a part of the update that the trust ratio multiplies.
        eps: added to the root of the second moment.
        trust: the least and the largest trust ratio.

    Raises:
        ValueError: as ``OneBitAdam``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int,
        form: Form = "momentum",
        refreshes: int = 4,
        max_grad_norm: float | None = None,
        trust: tuple[float, float] = (0.01, 10.0),
    ) -> None:
        if not 0 < trust[0] <= trust[1]:
            raise ValueError(f"trust={trust}: the least trust ratio, more than 0, and the largest")
        self.trust = trust
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            warmup_steps=warmup_steps,
            form=form,
            refreshes=refreshes,
            max_grad_norm=max_grad_norm,
        )

    def _init_state(self, parameter: Tensor) -> None:
        super()._init_state(parameter)
        state = self.state[parameter]
        if not self._is_encoded(parameter):
            return
        state.setdefault("trust", torch.tensor(0.0))
        state.setdefault("factor", torch.tensor(1.0))
        state.setdefault("exp_avg_sq_fresh", state["exp_avg_sq"].clone())
        if self.form == "momentum":
            state.setdefault("exp_avg_before", state["exp_avg"].clone())

    def _update_all(self, phase: Phase) -> None:
        ready = []
        for group, exact, encoded in self._split(self._parameters, phase):
            ready += [self._ready_exactly(group, each) for each in exact]
            ready += [self._ready(group, each) for each in encoded]
        if not ready:
            return
        weights = torch._foreach_norm([each.parameter for each in ready])
        updates = torch._foreach_norm([_like(each.parameter, each.update) for each in ready])
        bare = [each.bare for each in ready if each.bare is not None]
        norms = iter(_known([*weights, *updates, *bare]))
        largest = [each.largest for each in ready if each.largest is not None]
        ratios = iter(_known(largest))
        of_weights, of_updates = [next(norms) for _ in ready], [next(norms) for _ in ready]
        for each, weight, update in zip(ready, of_weights, of_updates, strict=True):
            if each.largest is None:
                coefficient = self._trust_of(each.parameter, weight, update)
            else:
                of_bare = update if each.bare is None else next(norms)
                share = min(1.0, of_bare / update) if update else 1.0
                coefficient = self._adapted_trust_of(each.parameter, next(ratios) * share + 1 - share)
            each.update.mul_(each.group["lr"] * coefficient)
        moves = {id(each.parameter): each.update for each in ready}
        for members in self._by_param_group():
            for parameter in members:
                if id(parameter) in moves:
                    local_of(parameter).sub_(moves[id(parameter)])

    def _ready_exactly(self, group: dict[str, Any], parameter: Tensor) -> Ready:
        """Adam's moments, and LAMB's update (You et al., 2020, algorithm 2)."""
        beta1, beta2 = group["betas"]
        state, gradient = self.state[parameter], grad_of(parameter)
        encoded = self._is_encoded(parameter)
        state["step"] += 1
        moment = self._local(parameter, "exp_avg").lerp_(gradient, 1 - beta1)
        square = self._local(parameter, "exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if encoded:
            state["variance_step"] += 1
        if encoded and self.steps >= self.warmup_steps and self.form == "momentum":
            state["exp_avg_before"].copy_(state["exp_avg"])
        if encoded and self.steps > self.warmup_steps:  # once more, long after the warm-up
            return self._ready_with(group, parameter, moment, gradient)
        if encoded and self.steps == self.warmup_steps:
            state["exp_avg_sq_fresh"].copy_(state["exp_avg_sq"])
        steps = int(state["step"])
        update = (moment / (1 - beta1**steps)).div_(root_of(square, steps, group))
        return Ready(parameter, group, update.add_(local_of(parameter), alpha=group["weight_decay"]))

    def _ready(self, group: dict[str, Any], parameter: Tensor) -> Ready:
        """The moment, and the gradient by which it has changed."""
        beta1, _ = group["betas"]
        state, decoded = self.state[parameter], grad_of(parameter)
        state["step"] += 1
        if self.form == "gradient":
            moment = self._local(parameter, "exp_avg").lerp_(decoded, 1 - beta1)
            gradient = decoded
        else:
            moment, before = decoded, self._local(parameter, "exp_avg_before")
            gradient = moment.sub(before, alpha=beta1).div_(1 - beta1)
            before.copy_(moment)
        return self._ready_with(group, parameter, moment, gradient)

    def _ready_with(self, group: dict[str, Any], parameter: Tensor, moment: Tensor, gradient: Tensor) -> Ready:
        """The update of 1-bit Adam, and what the factor is made of (Li et al., 2021, algorithm 1)."""
        beta2, state = group["betas"][1], self.state[parameter]
        fresh = self._local(parameter, "exp_avg_sq_fresh").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if not state["variance_step"]:  # trained for the first time: the next step brings an exact gradient
            return Ready(parameter, group, torch.zeros_like(moment))
        root = root_of(self._local(parameter, "exp_avg_sq"), float(state["variance_step"]), group)
        largest = torch.linalg.vector_norm(_like(parameter, root / root_of(fresh, self.steps, group)), math.inf)
        update = bounded_update(moment, root, self.steps, group)
        bare = None
        if group["weight_decay"]:
            bare = torch.linalg.vector_norm(_like(parameter, update))
            update.add_(local_of(parameter), alpha=group["weight_decay"])
        return Ready(parameter, group, update, largest, bare)

    def _trust_of(self, parameter: Tensor, weight: float, update: float) -> float:
        """‖x‖ / ‖update‖, which the average takes in where there is one."""
        if not weight or not update:
            return 1.0
        ratio = min(max(weight / update, self.trust[0]), self.trust[1])
        if (average := self.state[parameter].get("trust")) is not None:
            average.copy_(average.lerp(torch.tensor(ratio), 1 - _REMEMBERED) if average else ratio)
        return ratio

    def _adapted_trust_of(self, parameter: Tensor, factor: float) -> float:
        """The average ratio of the warm-up, times a factor that moves towards ``factor``."""
        state = self.state[parameter]
        last = float(state["factor"])
        bounded = min(max(factor, _LEAST), _MOST)
        state["factor"].fill_(min(max(bounded, last * (1 - _CHANGE)), last * (1 + _CHANGE)))
        return (float(state["trust"]) or 1.0) * float(state["factor"])


def _known(norms: Sequence[Any]) -> list[float]:
    """Return norms that are still spread over ranks, by one all-reduce."""
    if not norms:
        return []
    joined = torch.stack(list(norms))
    return list((joined.full_tensor() if isinstance(joined, DTensor) else joined).tolist())


def _like(parameter: Any, local: Tensor) -> FlatDTensor:
    return flat_dtensor(local, parameter.shard_spec)
