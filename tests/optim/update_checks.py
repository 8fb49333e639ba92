"""Holds native updates, whichever they are, against their definition in plain torch, to the bit.

Of NaNs only that they are is compared. Nothing beyond a tensor's own range may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from yafsdp_cc.optim.lamb import LambRow, LambRule, lamb_settings, update_lamb
from yafsdp_cc.optim.update import Row, Rule, adam_settings, sgd_settings, update

RULES = (*Rule, *LambRule)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 3, 4, 63, 64, 65, 1023, 1025, 8191, 8193, 20_001)
"""Around what vectors, converted stretches and the ranges of threads have, and none."""
_AROUND = 5.0


class Case(NamedTuple):
    rule: Rule | LambRule
    weights: torch.dtype
    gradients: torch.dtype
    sizes: Sequence[int] = SIZES
    odd: bool = False
    """Whether tensors begin at addresses that no vector does."""
    tame: bool = False
    """Whether numbers are those of a training, so that sums are, too."""


def numbers(n: int, dtype: torch.dtype, draw: torch.Generator, tame: bool) -> Tensor:
    """Of every size, zeros of both signs, and what is not finite."""
    values = torch.randn(n, generator=draw)
    if tame:
        return values.to(dtype)
    values *= torch.exp2(torch.randint(-40, 30, (n,), generator=draw).float())
    kinds = torch.randint(0, 64, (n,), generator=draw)
    for kind, value in enumerate((0.0, -0.0, float("nan"), float("inf"), -float("inf"), 3e38, 1e-42)):
        values[kinds == kind] = value
    return values.to(dtype)


def rows_of(case: Case, device: torch.device | str = "cpu") -> tuple[list[Any], list[Tensor]]:
    """Return rows of all sizes, each with settings of its own, and the longer tensors that theirs are a part of."""
    draw = torch.Generator().manual_seed(len(case.sizes) + case.rule)
    rows: list[Any] = []
    around: list[Tensor] = []

    def placed(values: Tensor) -> Tensor:
        around.append(torch.full((len(values) + 72,), _AROUND, dtype=values.dtype, device=device))
        first = 64 + case.odd
        return around[-1][first : first + len(values)].copy_(values)

    for index, n in enumerate(case.sizes):
        decay = 0.1 if index % 3 else 0.0
        group = {"lr": 0.01 * (index + 1), "weight_decay": decay, "momentum": 0.9, "betas": (0.8, 0.95), "eps": 1e-8}
        if isinstance(case.rule, LambRule):
            settings = lamb_settings(group, 1.5, index + 2, index)
            places = [
                placed(numbers(n, dtype, draw, case.tame)) for dtype in (case.weights, case.gradients, torch.float32)
            ]
            squares = [placed(numbers(n, torch.float32, draw, case.tame).abs_()) for _ in range(2)]
            fresh = None if case.rule is LambRule.EXACT else squares[1]
            rows.append(LambRow(*places, squares[0], fresh, settings))
            continue
        square = numbers(n, torch.float32, draw, case.tame).abs_() if case.rule.is_adam else None
        rows.append(
            Row(
                placed(numbers(n, case.weights, draw, case.tame)),
                placed(numbers(n, case.gradients, draw, case.tame)),
                None if case.rule is Rule.ADAM_MOMENTUM else placed(numbers(n, torch.float32, draw, case.tame)),
                None if square is None else placed(square),
                adam_settings(group, index + 2, index + 1) if case.rule.is_adam else sgd_settings(group),
            )
        )
    return rows, around


def tensors_of(rows: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for row in rows:
        yield from ((name, each) for name, each in zip(row._fields, row, strict=True) if isinstance(each, Tensor))


def differing(a: Tensor, b: Tensor) -> int:
    """How many numbers have other bits; a NaN is a NaN."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int(((a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())).sum())


def run(rule: Rule | LambRule, rows: Sequence[Any]) -> Tensor:
    """Update rows; return the sums of LAMB's updates, and nothing of others."""
    if isinstance(rule, LambRule):
        return update_lamb(rule, rows)
    update(rule, rows)
    return torch.empty(0)


def check(case: Case, device: torch.device | str = "cpu") -> None:
    """Compare what an update does with what it does without native kernels, on the CPU."""
    truth, _ = rows_of(case)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("update", "lamb"):
            patch.setattr(f"yafsdp_cc.optim.{module}.ops_for", lambda _: None)
        sums = run(case.rule, truth)
    found, around = rows_of(case, device)
    versions = [row.weights._version for row in found]
    # The last step from stretches to sums is torch's, in double precision, and of another order on another device.
    torch.testing.assert_close(
        run(case.rule, found).cpu(), sums, rtol=0 if device == "cpu" else 1e-14, atol=0, equal_nan=True
    )
    moves = case.rule is not LambRule.EXACT
    assert all((row.weights._version > before) == moves for row, before in zip(found, versions, strict=True))
    for (name, ours), (_, theirs) in zip(tensors_of(found), tensors_of(truth), strict=True):
        assert not differing(ours.cpu(), theirs), (name, len(ours), case)
    for each in around:
        first = 64 + case.odd
        assert bool((each[:first] == _AROUND).all())
        assert bool((each[len(each) - 8 + case.odd :] == _AROUND).all())
    if isinstance(case.rule, LambRule) and not case.tame:
        check(case._replace(tame=True), device)
