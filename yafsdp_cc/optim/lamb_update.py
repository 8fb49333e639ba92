"""LAMB's updates of lists of parameters at once, with the sums and maxima that its trust ratios need.

``update_lamb`` calls one native operator for all parameters of a list. ``_update_plainly`` defines the same bits in
plain torch on every device, as the one of ``update`` does. The order of its sums is defined, too: blocks of 512
elements are summed in the order of codecs (``block_sum``), stretches of 16 blocks likewise, all in the dtype of the
update; stretches are then added in double precision.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from yafsdp_cc.compression.codec import block_sum
from yafsdp_cc.compression.error_feedback import ops_for, stream_of
from yafsdp_cc.optim.update import adam_settings, is_native, root_of
from yafsdp_cc.tensor.dtensor import increment_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_BLOCK, _STRETCH = 512, 8192


class LambRule(IntEnum):
    """Moments that an update changes, numbered as in ``csrc``."""

    EXACT = 0
    """m = β₁·m + (1 − β₁)·g; v = β₂·v + (1 − β₂)·g². Weights are not changed: their step waits for the norms."""
    GRADIENT = 1
    """m as in EXACT; w = β₂·w + (1 − β₂)·g²; and then x = (1 − γλ)·x − γ·clamp(m̂ / (√v̂ + ε)), γ with the trust
    ratio."""
    MOMENTUM = 2
    """With a decoded momentum m: g = (m − β₁·m₋₁) / (1 − β₁), then w and x as in GRADIENT, and m₋₁ = m."""


class LambRow(NamedTuple):
    """Tensors of one parameter, this rank's elements (possibly none), all of one shape and device."""

    weights: Tensor
    """x, floating-point. Computed in fp32 at least, and rounded once."""
    gradient: Tensor
    """The gradient, or the decoded momentum; floating-point."""
    moment: Tensor
    """m, or m₋₁ with ``MOMENTUM``, in ``width_of`` the weights; updated in place."""
    square: Tensor
    """v, in ``width_of`` the weights; updated in place with ``EXACT``."""
    fresh: Tensor | None
    """w, in ``width_of`` the weights; updated in place. None with ``EXACT``."""
    settings: tuple[float, ...]


def lamb_settings(group: dict[str, Any], trust: float, steps: float, seen: float) -> tuple[float, ...]:
    """Return the numbers that update a row.

    Args:
        steps: number of steps in the first moment and the fresh second one, this step counted.
        seen: number of gradients in the second moment. 0: the weights are not changed.
    """
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    stays = (beta1, 1 - beta1, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0)  # the second moment is 1: nothing is divided by 0
    adam = adam_settings(group, steps, seen, trust) if seen else stays
    return *adam, decay, beta2, 1 - beta2, 1 / (1 - beta2**steps), 1 / (1 - beta1)


def update_lamb(rule: LambRule, rows: Sequence[LambRow]) -> Tensor:
    """Update parameters of one device by ``rule``, in place; versions of weights grow if they change.

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
    """Define the result of ``update_lamb``; return the sums of stretches, [3, stretches]."""
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
