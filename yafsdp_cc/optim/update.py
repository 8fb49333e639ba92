"""Updates lists of parameters at once by decoded gradients or momenta, fused where there are native kernels.

``update`` calls one native operator for all parameters of a device. ``_update_plainly`` is the definition in plain
torch, of the same bits on every device: fp32, one rounding for each operation. Hence no ``lerp``, ``addcmul`` or
``alpha=``, which are fused multiply-adds on some processors and not on others, and no division by a number, which torch
replaces by a multiplication on a GPU.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from yafsdp_cc.compression.error_feedback import ops_for, stream_of
from yafsdp_cc.tensor.dtensor import increment_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_READ = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights and gradients that native kernels accept."""


class Rule(IntEnum):
    """The formula of an update, numbered as in ``csrc``: by a decoded gradient or momentum g; learning rate γ, weight
    decay λ."""

    SGD_GRADIENT = 0
    """SGD by a decoded gradient g: g += λ·w; m = β·m + g; w -= γ·m"""
    SGD_MOMENTUM = 1
    """SGD by a decoded momentum g: m += λ·w; w -= γ·(g + λ·w). m is this rank's part, which the next sum carries on."""
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
    """Weights, floating-point, updated in place. Computed in fp32 at least, and rounded once."""
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
    keep = 1 - lr * group["weight_decay"]
    return (
        beta1,
        1 - beta1,
        1 / (1 - beta2**seen),
        group["eps"],
        1 - beta1**steps,
        largest_update(group["betas"]),
        keep,
        lr,
    )


def largest_update(betas: tuple[float, float]) -> float:
    """Return the largest element that exact Adam's update can have (Kingma & Ba, "Adam", 2015, section 2.1)."""
    return max(1.0, (1 - betas[0]) / math.sqrt(1 - betas[1]))


def update(rule: Rule, rows: Sequence[Row]) -> None:
    """Update parameters by ``rule``, in place; their versions rise, also if this rank has no elements."""
    if not rows:
        return
    # Native kernels do not raise tensors' versions. A shard without elements on this rank counts as changed, too: all
    # ranks must gather it.
    increment_version([row.weights for row in rows])
    devices: dict[torch.device, list[Row]] = {}
    plain: list[Row] = []
    for row in rows:
        device = row.weights.device
        (devices.setdefault(device, []) if is_native(row) else plain).append(row)
    for device, some in devices.items():
        if (ops := ops_for(device)) is None:
            plain += some
            continue
        weights, gradients, moments, squares, settings = zip(*some, strict=True)
        ops.update(
            rule,
            weights,
            gradients,
            [] if rule is Rule.ADAM_MOMENTUM else moments,
            squares if rule.is_adam else [],
            torch.tensor(settings, dtype=torch.float32, device="cpu"),
            stream_of(device),
        )
    if plain:
        _update_plainly(rule, plain)


def is_native(row: tuple[Any, ...]) -> bool:
    """Return whether native kernels accept a row: weights, gradient, other tensors or None, and settings."""
    readable = row[0].dtype in _READ and row[1].dtype in _READ
    return readable and all(each is None or each.is_contiguous() for each in row[:-1])


def _update_plainly(rule: Rule, rows: Sequence[Row]) -> None:
    """Make the updates in plain torch: the definition of what ``update`` computes."""
    wide = [row.weights.to(torch.promote_types(row.weights.dtype, torch.float32)) for row in rows]
    gradients = [row.gradient.to(each.dtype) for row, each in zip(rows, wide, strict=True)]
    moments = [row.moment for row in rows if row.moment is not None]
    columns = [list(column) for column in zip(*(row.settings for row in rows), strict=True)]
    if rule.is_adam:
        squares = [row.square for row in rows if row.square is not None]
        updates = _adam(gradients, moments, squares, columns)
        torch._foreach_mul_(wide, columns[6])
        rates = columns[7]
    else:
        carry, decays, rates = columns
        updates = _sgd(rule, wide, gradients, moments, carry, decays)
    torch._foreach_sub_(wide, torch._foreach_mul(updates, rates))
    for row, updated in zip(rows, wide, strict=True):
        if updated is not row.weights:
            row.weights.copy_(updated)


def _sgd(
    rule: Rule,
    weights: list[Tensor],
    gradients: list[Tensor],
    moments: list[Tensor],
    carry: list[float],
    decays: list[float],
) -> list[Tensor]:
    """Return the update of the weights, without the learning rate."""
    # without a decay nothing is added, not even 0: 0·inf would be NaN
    decaying = [index for index, decay in enumerate(decays) if decay]
    updates = list(gradients)
    if decaying:
        decayed = torch._foreach_mul([weights[index] for index in decaying], [decays[index] for index in decaying])
        for index, each in zip(decaying, decayed, strict=True):
            updates[index] = updates[index] + each
        if rule is Rule.SGD_MOMENTUM:
            torch._foreach_add_([moments[index] for index in decaying], decayed)
    if rule is Rule.SGD_MOMENTUM:
        return updates
    torch._foreach_mul_(moments, carry)
    torch._foreach_add_(moments, updates)
    return moments


def _adam(
    gradients: list[Tensor], moments: list[Tensor], squares: list[Tensor], columns: list[list[float]]
) -> list[Tensor]:
    """Return the update of the weights, without the learning rate."""
    carry, taken, unbias, eps, shares, largest, _, _ = columns
    if moments:
        torch._foreach_mul_(moments, carry)
        torch._foreach_add_(moments, torch._foreach_mul(gradients, taken))
    roots = [root_of(each) for each in torch._foreach_mul(squares, unbias)]
    torch._foreach_add_(roots, eps)
    torch._foreach_mul_(roots, shares)
    updates = list(torch._foreach_div(moments or gradients, roots))
    torch._foreach_clamp_max_(updates, largest)
    torch._foreach_clamp_min_(updates, [-each for each in largest])
    return updates


def root_of(squares: Tensor) -> Tensor:
    """Return correctly rounded square roots."""
    # torch's fp32 square root on a CPU is not always correctly rounded: take the root in double precision
    return squares.to(torch.float64).sqrt().to(squares.dtype)
