"""Updates by decoded gradients or momenta, of lists of parameters at once: fused where there are native kernels.

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

from yafsdp_cc.compression.error_feedback import ops_for
from yafsdp_cc.tensor.dtensor import increment_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_READ = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights and gradients that native kernels take."""


class Rule(IntEnum):
    """What an update does, as numbered in ``csrc``. Whether a momentum or a gradient was decoded, by ``form``."""

    SGD_GRADIENT = 0
    """g += λ·w; m = β·m + g; w -= γ·m"""
    SGD_MOMENTUM = 1
    """m += λ·w; w -= γ·(g + λ·w). m is the owner's part of the momentum, which the compressed sum carries on."""
    ADAM_GRADIENT = 2
    """m = β₁·m + (1 − β₁)·g; and then as below, by m in place of g."""
    ADAM_MOMENTUM = 3
    """w = (1 − γλ)·w − γ·clamp(ĝ / (√v̂ + ε))"""

    @property
    def is_adam(self) -> bool:
        return self in (Rule.ADAM_GRADIENT, Rule.ADAM_MOMENTUM)


class Row(NamedTuple):
    """One parameter, this rank's elements of it, possibly none; all tensors of one shape and device."""

    weights: Tensor
    """Floating-point, updated in place. Computed with in fp32 at least, and rounded once."""
    gradient: Tensor
    """Floating-point: what was decoded."""
    moment: Tensor | None
    """Of ``width_of`` the weights, updated in place. None with ``ADAM_MOMENTUM``."""
    square: Tensor | None
    """Of ``width_of`` the weights: the second moment, of Adam."""
    settings: tuple[float, ...]
    """``sgd_settings`` or ``adam_settings``."""


def sgd_settings(group: dict[str, Any]) -> tuple[float, ...]:
    """Return what a row of SGD is updated with."""
    return group["momentum"], group["weight_decay"], float(group["lr"])


def adam_settings(group: dict[str, Any], steps: float, seen: float, trust: float = 1.0) -> tuple[float, ...]:
    """Return what a row of Adam is updated with.

    Args:
        group: the settings of its parameter group.
        steps: that the first moment is made of, this one counted.
        seen: gradients that the second moment is made of.
        trust: what the learning rate is multiplied by.
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
    """Update parameters by ``rule``, in place; their versions grow, also where this rank has no elements."""
    if not rows:
        return
    # Native kernels do not count what they change. What a rank has nothing of has changed, too: all are to gather it.
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
    """Return whether native kernels take a row: weights, gradient, other tensors or None, and settings."""
    readable = row[0].dtype in _READ and row[1].dtype in _READ
    return readable and all(each is None or each.is_contiguous() for each in row[:-1])


def stream_of(device: torch.device) -> int:
    """Return the handle of the stream that native kernels are launched on; 0 without one."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _update_plainly(rule: Rule, rows: Sequence[Row]) -> None:
    """Define what ``update`` does."""
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
    """Return what to subtract from the weights, times the learning rate."""
    # Where there is no decay nothing is added, not even 0: 0·inf is not a number.
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
    """Return what to subtract from the weights, times the learning rate."""
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
    """Return square roots to the nearest."""
    # By double precision: on a CPU torch's square root of fp32 is a vector library's, and not always the nearest.
    return squares.to(torch.float64).sqrt().to(squares.dtype)
