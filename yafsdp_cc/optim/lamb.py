"""1-bit LAMB for sharded models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from yafsdp_cc.compression.codec import block_sum
from yafsdp_cc.compression.error_feedback import ops_for, stream_of
from yafsdp_cc.optim.adam import OneBitAdam, adamw_state
from yafsdp_cc.optim.one_bit import grad_of, local_of
from yafsdp_cc.optim.update import Row, Rule, adam_settings, is_native, root_of, update
from yafsdp_cc.tensor import reductions
from yafsdp_cc.tensor.dtensor import increment_version, summand_of
from yafsdp_cc.tensor.reductions import Across, Partials, Reduction

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from yafsdp_cc.compression.schedule import Phase
    from yafsdp_cc.optim.one_bit import Form

_REMEMBERED = 0.9
"""β₃: weight of the average trust ratio so far when a warm-up step adds its own."""
_LEAST, _MOST, _CHANGE = 0.5, 4.0, 0.1
"""Bounds of the factor on the average trust ratio after the warm-up, and its largest relative change in a step."""
_LARGEST = Reduction(math.inf)


class Job(NamedTuple):
    """A parameter to be updated."""

    parameter: Any
    group: dict[str, Any]
    row: LambRow
    learns: bool
    """Whether the weights wait for the trust ratio of this step."""


Jobs: TypeAlias = "defaultdict[tuple[LambRule, Across, torch.device, bool], list[Job]]"
"""Jobs, by what one kernel updates and one all-reduce sums; a key's last entry: whether parameters are replicated."""


class OneBitLamb(OneBitAdam):
    """LAMB whose gradients are encoded for the network, by the codec that ``Compression(gradients=...)`` names.

    LAMB (You et al., "Large Batch Optimization for Deep Learning", 2020, algorithm 2) is Adam whose step of each
    parameter is multiplied by a trust ratio, ‖x‖ / ‖update‖. After the warm-up that ratio would follow the errors of
    encoded sums. In Li et al., "1-bit LAMB", 2021, algorithm 1, the trust ratio is its average over the warm-up, times
    a factor that follows the second moment of decoded gradients:

        g̃ = (m − β₁·m₋₁) / (1 − β₁)                   the gradient, from decoded momenta
        w ← β₂·w + (1 − β₂)·g̃²                        a fresh second moment, w = v at first
        factor = max over elements of √v / √w         from 0.5 to 4, and within a tenth of the one before

    This implementation differs from the paper:

    - ``OneBitLamb`` encodes what ``OneBitAdam`` encodes, with a scale per block, so momenta need not be brought to one
      scale first; with ``form="gradient"`` g̃ is the decoded gradient;
    - v is refreshed as in ``OneBitAdam``, so √v / √w uses the present v;
    - both moments are corrected for their start at zero, as LAMB's are, and the average of trust ratios starts at the
      first ratio; a parameter that is all zero has a ratio of 1, which the average leaves out;
    - a step uses the factor computed in the step before, which differs by a tenth at most: so one pass over memory
      updates w and the weights and sums up the norms for the next factor;
    - a parameter that was unfrozen late has a warm-up of its own, as many steps by exact LAMB with decoded gradients;
      where a loaded state has no trust ratio, such as AdamW's, the first step's stands for the average;
    - norms are those of whole parameters: a step makes one all-reduce of a few numbers for each parameter, and after
      the warm-up a second one for the largest ratios.

    Parameters that are never encoded go through exact LAMB throughout. The state is that of ``torch.optim.AdamW`` with
    w and m₋₁ added: 4 to 8 bytes more for each element of a rank's shard.

    Arguments that are not listed are those of ``OneBitAdam``. The weight decay is a part of the update that the trust
    ratio multiplies.

    Args:
        eps: added to the root of the second moment.
        trust: the least and the largest trust ratio.
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
        state.setdefault("trust", torch.tensor(0.0, device="cpu"))
        state.setdefault("factor", torch.tensor(1.0, device="cpu"))
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = adamw_state(state, self.param_groups[0]["betas"][1])["exp_avg_sq"]
        if self.form == "momentum":
            state.setdefault("exp_avg_before", state["exp_avg"].clone())

    def _update_all(self, phase: Phase) -> None:
        rows: dict[int, Row] | None = None
        for members in self._by_param_group():
            if rows is None:  # not before the loop: as it begins, ``_by_param_group`` reads weights' versions
                rows = self._update_moments(phase)
            update(Rule.ADAM_MOMENTUM, [rows[id(each)] for each in members if id(each) in rows])

    def _update_moments(self, phase: Phase) -> dict[int, Row]:
        """Update all that needs no norms: moments, and weights by decoded gradients where trust ratios are known.

        Return the ``Row`` of each parameter whose weights wait for a ratio, for ``update``, by the parameter's id.
        """
        jobs: Jobs = defaultdict(list)
        learned: list[Tensor] = []
        for group, exact, encoded in self._split(self._parameters, phase):
            learned += [each for each in exact if self._is_encoded(each)]
            for each in [*exact, *encoded]:
                rule = self._begin_step(each, phase.encodes)
                learns = rule is LambRule.EXACT or self._learns_trust(each)
                job = Job(each, group, self._row_of(group, each, rule, learns), learns)
                summand, spec = summand_of(job.parameter, torch.float64), job.parameter.shard_spec
                # list ``jobs`` alike on all ranks, also where a rank has no elements of a parameter, so that ranks
                # reduce sums in the same order
                jobs[rule, summand.across, summand.local.device, spec.bounds is None].append(job)
        norms = _norms_of(jobs)
        # encoding needs m₋₁ of all parameters, also of those that the last warm-up step has not used
        if self.steps == self.warmup_steps:
            learned = [each for each in self._parameters if self._is_encoded(each)]
        if self.steps >= self.warmup_steps and self.form == "momentum":
            for parameter in learned:
                self.state[parameter]["exp_avg_before"].copy_(self.state[parameter]["exp_avg"])
        if self.steps == self.warmup_steps:
            for parameter in learned:
                self.state[parameter]["exp_avg_sq_fresh"].copy_(self.state[parameter]["exp_avg_sq"])
        rows = {}
        for (rule, *_), members in jobs.items():
            for (parameter, group, row, learns), found in zip(members, norms, strict=False):
                if not learns:
                    self._adapt_factor(parameter, *found)
                    continue
                rate = self._trust_of(parameter, *found[:2]) * float(group["lr"])
                largest = math.inf if rule is LambRule.EXACT else row.settings[5]
                settings = (*row.settings[:5], largest, 1 - rate * group["weight_decay"], rate)
                rows[id(parameter)] = Row(row.weights, row.moment, None, row.square, settings)
        return rows

    def _begin_step(self, parameter: Tensor, is_decoded: bool) -> LambRule:
        """Count the step of a parameter; return the rule by which its gradient, decoded or exact, updates it."""
        state, is_encoded = self.state[parameter], self._is_encoded(parameter)
        state["step"] += 1
        if is_encoded and is_decoded:
            return LambRule.GRADIENT if self.form == "gradient" else LambRule.MOMENTUM
        if is_encoded and self.steps > self.warmup_steps:
            self._update_variance([(parameter, grad_of(parameter))])
            return LambRule.GRADIENT
        if is_encoded:
            state["variance_step"] += 1
        return LambRule.EXACT

    def _learns_trust(self, parameter: Tensor) -> bool:
        """Return whether a step by a decoded gradient measures the parameter's trust ratio, and waits for it."""
        state = self.state[parameter]
        return bool(state["variance_step"]) and (not state["trust"] or bool(state["step"] <= self.warmup_steps))

    def _row_of(self, group: dict[str, Any], parameter: Tensor, rule: LambRule, learns: bool) -> LambRow:
        """Return the row of LAMB's step (You et al., 2020), or of 1-bit LAMB's (Li et al., 2021, algorithm 1)."""
        state = self.state[parameter]
        step, fresh = float(state["step"]), None
        if rule is LambRule.EXACT:
            settings = lamb_settings(group, 1.0, step, step)
        else:
            # without a gradient in the second moment, ``lamb_settings`` leaves the weights until an exact one comes
            trust = 0.0 if learns else float(state["trust"]) * float(state["factor"])  # trust 0 leaves the weights
            settings = lamb_settings(group, trust, step, float(state["variance_step"]))
            fresh = local_of(state["exp_avg_sq_fresh"])
        moment = local_of(state["exp_avg_before" if rule is LambRule.MOMENTUM else "exp_avg"])
        square = local_of(state["exp_avg_sq"])
        return LambRow(local_of(parameter), local_of(parameter.grad), moment, square, fresh, settings)

    def _trust_of(self, parameter: Tensor, weight: float, update: float) -> float:
        """Return the trust ratio ‖x‖ / ‖update‖ from squared norms, and add it to the parameter's average, if any."""
        if not weight or not update:
            return 1.0
        ratio = min(max(math.sqrt(weight) / math.sqrt(update), self.trust[0]), self.trust[1])
        if (average := self.state[parameter].get("trust")) is not None:
            average.lerp_(torch.full_like(average, ratio), 1 - _REMEMBERED if average else 1.0)
        return ratio

    def _adapt_factor(self, parameter: Tensor, bare: float, update: float, largest: float) -> None:
        """Move the factor on the trust ratio, for the next step, towards the ratio of this step's second moments."""
        state = self.state[parameter]
        if not state["variance_step"]:
            return
        share = min(1.0, math.sqrt(bare) / math.sqrt(update)) if update else 1.0
        last, bounded = float(state["factor"]), min(max(largest * share + 1 - share, _LEAST), _MOST)
        state["factor"].fill_(min(max(bounded, last * (1 - _CHANGE)), last * (1 + _CHANGE)))


def _norms_of(jobs: Jobs) -> Iterator[list[float]]:
    """Make all updates; return an iterator over the results of ``update_lamb``, reduced to whole parameters. For a
    parameter that ``learns`` by a decoded gradient the first sum is of its weights.

    ``_norms_of`` makes one all-reduce of sums, one of maxima, and one transfer to the host.
    """
    partials: list[tuple[Partials, Partials]] = []
    for (rule, across, *_), members in jobs.items():
        found = update_lamb(rule, [each.row for each in members])
        for place, each in enumerate(members):
            if each.learns and rule is not LambRule.EXACT:  # put the weights' norm in place of the bare update's
                found[place, 0] = torch.linalg.vector_norm(each.row.weights, dtype=torch.float64).square()
        if not summand_of(members[0].parameter, found.dtype).counts:  # another rank has and adds the same elements
            found.zero_()
        sums, largest = found[:, :2], found[:, 2:]
        known = largest if rule is LambRule.EXACT else None
        partials.append((Partials(sums, reductions.SUM, across), Partials(largest, _LARGEST, across, known)))
    reductions.reduce([each for pair in partials for each in pair])
    rows = [torch.cat([cast("Tensor", each.reduced) for each in pair], 1) for pair in partials]
    return iter(torch.cat(rows).tolist() if rows else ())


# Updates of lists of parameters at once, with the sums and maxima that trust ratios need ------------------------------
#
# ``update_lamb`` calls one native operator for all parameters of a list. ``_update_plainly`` is the operator's
# definition in plain torch, of the same bits on every device, as ``optim.update`` has one for ``update``. It also
# defines the order of sums: blocks of 512 elements are summed in the order of codecs (``block_sum``), stretches of 16
# blocks likewise, all in the dtype of the update; stretches are then added in double precision.

_BLOCK, _STRETCH = 512, 8192


class LambRule(IntEnum):
    """Rule by which a gradient g changes weights x (moments m and v, fresh second moment w); as in ``csrc``."""

    EXACT = 0
    """An exact gradient g changes moments: m = β₁·m + (1 − β₁)·g; v = β₂·v + (1 − β₂)·g². Weights wait for norms."""
    GRADIENT = 1
    """A decoded gradient g changes moments and weights: m as in EXACT; w = β₂·w + (1 − β₂)·g²; then
    x = (1 − γλ)·x − γ·clamp(m̂ / (√v̂ + ε)), where the learning rate γ includes the trust ratio."""
    MOMENTUM = 2
    """A decoded momentum m gives g = (m − β₁·m₋₁) / (1 − β₁); then w and x change as in GRADIENT, and m₋₁ = m."""


class LambRow(NamedTuple):
    """Tensors of one parameter, as in a ``Row``, with a second moment of its decoded gradients."""

    weights: Tensor
    gradient: Tensor
    """The gradient, or the decoded momentum; floating-point."""
    moment: Tensor
    """First moment (that of the step before with ``MOMENTUM``), fp32 at least; updated in place."""
    square: Tensor
    """Second moment, fp32 at least; updated in place with ``EXACT``."""
    fresh: Tensor | None
    """Second moment of decoded gradients, fp32 at least; updated in place. None with ``EXACT``."""
    settings: tuple[float, ...]
    """Result of ``lamb_settings``."""


def lamb_settings(group: dict[str, Any], trust: float, steps: float, seen: float) -> tuple[float, ...]:
    """Return the coefficients of a LAMB update, the ``settings`` of a ``LambRow``.

    Args:
        steps: number of steps in the first moment and the fresh second one, this step counted.
        seen: number of gradients in the second moment. 0: the weights are not changed.
    """
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    stays = (beta1, 1 - beta1, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0)  # v̂ = 0 and ε = 1: no division by 0
    adam = adam_settings(group, steps, seen, trust) if seen else stays
    return *adam, decay, beta2, 1 - beta2, 1 / (1 - beta2**steps), 1 / (1 - beta1)


def update_lamb(rule: LambRule, rows: Sequence[LambRow]) -> Tensor:
    """Update parameters of one device by ``rule``, in place; raise versions of weights unless ``EXACT``.

    Returns:
        [rows, 3] fp64, over this rank's elements. ``EXACT``: the sums of x² and of u² = (m̂ / (√v̂ + ε) + λ·x)², and 0.
        Else the sums of (u − λ·x)² and of u², both with the bounded update and x as it was, and the largest
        (√v̂ + ε) / (√ŵ + ε), which is NaN if one is.
    """
    if rule is not LambRule.EXACT:
        increment_version([row.weights for row in rows])
    device = rows[0].weights.device
    most = max(1, *(-(-row.weights.numel() // _STRETCH) for row in rows))
    ops = ops_for(device) if all(is_native(row) for row in rows) else None
    if ops is None:
        width = torch.promote_types(rows[0].weights.dtype, torch.float32)
        sums = torch.zeros(3, len(rows), most, dtype=width, device=device)
        for index, row in enumerate(rows):
            found = _update_plainly(rule, row)
            sums[:, index, : found.shape[1]] = found
    else:
        sums = torch.zeros(3, len(rows), most, dtype=torch.float32, device=device)
        weights, gradients, moments, squares, fresh, settings = zip(*rows, strict=True)
        ops.update_lamb(
            rule,
            weights,
            gradients,
            moments,
            squares,
            [] if rule is LambRule.EXACT else fresh,
            torch.tensor(settings, dtype=torch.float32, device="cpu"),
            sums,
            stream_of(device),
        )
    return torch.stack([*sums[:2].sum(-1, dtype=torch.float64), sums[2].amax(-1).double()], -1)


def _update_plainly(rule: LambRule, row: LambRow) -> Tensor:
    """Update a row in plain torch: the definition of ``update_lamb``. Return [3, stretches]: two sums, a maximum."""
    weights, moment, square = row.weights.to(row.moment.dtype), row.moment, row.square
    gradient = row.gradient.to(moment.dtype)
    carry, taken, unbias, eps, share, largest, keep, rate, decay, carry2, taken2, unbias_fresh, gain = row.settings
    if rule is LambRule.MOMENTUM:
        gradient, mean = (gradient - moment * carry) * gain, gradient
        moment.copy_(mean)
    else:
        mean = moment.mul_(carry).add_(gradient * taken)
    second = square if row.fresh is None else row.fresh
    second.mul_(carry2).add_(gradient * gradient * taken2)
    root = root_of(square * unbias) + eps
    step = mean / (root * share)
    if row.fresh is None:
        ratio, first = torch.zeros_like(step), weights
    else:
        ratio = root / (root_of(row.fresh * unbias_fresh) + eps)
        first = step.clamp_(-largest, largest)
    update = step + weights * decay if decay else step  # without a decay nothing is added: 0·inf would be NaN
    found = [block_sum(block_sum(_by_blocks(each * each))) for each in (first, update)]
    found.append(_by_blocks(ratio).amax((1, 2)))
    if row.fresh is not None:
        row.weights.copy_(weights * keep - step * rate)
    return torch.stack(found)


def _by_blocks(values: Tensor) -> Tensor:
    """Return values, padded with zeros, as [stretches, blocks, elements]."""
    flat = values.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % _STRETCH))
    return padded.view(len(padded) // _STRETCH, _STRETCH // _BLOCK, _BLOCK)
