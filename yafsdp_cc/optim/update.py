"""Updates lists of parameters at once by decoded gradients or momenta, fused where there are native kernels.

``update`` calls one native operator for all parameters of a device. ``_update_plainly`` is the definition in plain
torch, of the same bits on every device: fp32, one rounding for each operation. Hence no ``lerp``, ``addcmul`` or
``alpha=``, which are fused multiply-adds on some processors and not on others, and no division by a number, which torch
replaces by a multiplication on a GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from yafsdp_cc.compression.error_feedback import ops_for, stream_of
from yafsdp_cc.tensor.dtensor import increment_version

if TYPE_CHECKING:
    from torch import Tensor

_READ = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights and gradients that native kernels accept."""


class Rule(IntEnum):
    """Formula by which a decoded gradient or momentum g updates weights w, numbered as in ``csrc``; γ is the learning
    rate and λ the weight decay."""

    SGD_GRADIENT = 0
    """SGD by a decoded gradient g: g += λ·w; m = β·m + g; w -= γ·m"""
    SGD_MOMENTUM = 1
    """SGD by a decoded momentum g: m += λ·w; w -= γ·(g + λ·w). m, this rank's part, is carried on by the next sum."""
    ADAM_GRADIENT = 2
    """Adam by a decoded gradient g: m = β₁·m + (1 − β₁)·g; then as ADAM_MOMENTUM, with m as g."""
    ADAM_MOMENTUM = 3
    """Adam by a decoded momentum g: w = (1 − γλ)·w − γ·clamp(ĝ / (√v̂ + ε))"""

    @property
    def is_adam(self) -> bool:
        return self in (Rule.ADAM_GRADIENT, Rule.ADAM_MOMENTUM)


class Row(NamedTuple):
    """Tensors of one parameter, this rank's elements (possibly none), all of one shape and device."""

    weights: Tensor
    """Weights, floating-point, updated in place: the update is computed in fp32 at least, and rounded once."""
    gradient: Tensor
    """The decoded gradient or momentum, floating-point."""
    moment: Tensor | None
    """First moment, fp32 at least (``width_of``), updated in place. None with ``ADAM_MOMENTUM``."""
    square: Tensor | None
    """Adam's second moment, fp32 at least (``width_of``)."""
    settings: tuple[float, ...]
    """Result of ``sgd_settings`` or ``adam_settings``."""


def sgd_settings(group: dict[str, Any]) -> tuple[float, ...]:
    """Return the coefficients of an SGD update, the ``settings`` of a ``Row``."""
    return group["momentum"], group["weight_decay"], float(group["lr"])


def adam_settings(group: dict[str, Any], steps: float, seen: float, trust: float = 1.0) -> tuple[float, ...]:
    """Return the coefficients of an Adam update, the ``settings`` of a ``Row``.

    Args:
        steps: number of steps in the first moment, this step counted.
        seen: number of gradients in the second moment.
        trust: factor on the learning rate.
    """
    (beta1, beta2), lr = group["betas"], trust * float(group["lr"])
    unbias, keep = 1 / (1 - beta2**seen), 1 - lr * group["weight_decay"]
    # the largest element that exact Adam's update can have (Kingma & Ba, "Adam", 2015, section 2.1)
    largest = max(1.0, (1 - beta1) / math.sqrt(1 - beta2))
    return beta1, 1 - beta1, unbias, group["eps"], 1 - beta1**steps, largest, keep, lr


def update(rule: Rule, rows: Sequence[Row]) -> None:
    """Update parameters by ``rule``, in place; their versions rise, also if this rank has no elements."""
    increment_version([row.weights for row in rows])
    native: defaultdict[torch.device, list[Row]] = defaultdict(list)
    for row in rows:
        if is_native(row) and ops_for(row.weights.device) is not None:
            native[row.weights.device].append(row)
        else:
            _update_plainly(rule, row)
    for device, some in native.items():
        weights, gradients, moments, squares, settings = zip(*some, strict=True)
        ops_for(device).update(
            rule,
            weights,
            gradients,
            [] if rule is Rule.ADAM_MOMENTUM else moments,
            squares if rule.is_adam else [],
            torch.tensor(settings, dtype=torch.float32, device="cpu"),
            stream_of(device),
        )


def is_native(row: tuple[Any, ...]) -> bool:
    """Return whether native kernels accept a row: weights, gradient, other tensors or None, and settings."""
    readable = row[0].dtype in _READ and row[1].dtype in _READ
    return readable and all(each is None or each.is_contiguous() for each in row[:-1])


def _update_plainly(rule: Rule, row: Row) -> None:
    """Make one update in plain torch: the definition of what ``update`` computes."""
    weights = row.weights.to(torch.promote_types(row.weights.dtype, torch.float32))
    step = row.gradient.to(weights.dtype)
    if rule.is_adam:
        carry, taken, unbias, eps, share, largest, keep, rate = row.settings
        assert row.square is not None
        if row.moment is not None:
            step = row.moment.mul_(carry).add_(step * taken)
        root = root_of(row.square * unbias) + eps
        step = (step / (root * share)).clamp_(-largest, largest)
        weights = weights * keep
    else:
        carry, decay, rate = row.settings
        assert row.moment is not None
        if decay:  # without a decay nothing is added, not even 0: 0·inf would be NaN
            decayed = weights * decay
            step = step + decayed
            if rule is Rule.SGD_MOMENTUM:
                row.moment.add_(decayed)
        if rule is Rule.SGD_GRADIENT:
            step = row.moment.mul_(carry).add_(step)
    row.weights.copy_(weights - step * rate)


def root_of(squares: Tensor) -> Tensor:
    """Return correctly rounded square roots."""
    # torch's fp32 square root on a CPU is not always correctly rounded: take the root in double precision
    return squares.to(torch.float64).sqrt().to(squares.dtype)
