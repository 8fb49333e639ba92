"""A model whose gradients are what it is given, and 1-bit Adam on it in float64, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.internals import extents_of, flat_param, shard_numel
from yafsdp_cc import Compression

SHAPES = [(60, 40), (37, 70), (64, 64)]
BLOCK = 64
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
FORMS = pytest.mark.parametrize("form", ["momentum", "gradient"])


class Slope(nn.Module):
    """Its output's gradient by its weight is its input."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) / 10)
        self.bias = nn.Parameter(torch.randn(shape[0]) / 10)

    def forward(self, slope: Tensor) -> Tensor:
        total: Tensor = (self.weight * slope).sum() + (self.bias * slope.sum(1)).sum()
        return total


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Slope(shape) for shape in SHAPES)

    def forward(self, slopes: list[Tensor]) -> Tensor:
        total: Tensor = sum(part(slope) for part, slope in zip(self.parts, slopes, strict=True))
        return total


def sharded(gradients: str = "onebit", **more: Any) -> Any:
    compression = {"residual": "fp32", "block": BLOCK} | more.pop("compression", {})
    return yafsdp_cc.shard(Slopes(), units=[Slope], compression=Compression(gradients, **compression), **more)


def drawn(step: int, rank: int) -> list[Tensor]:
    """What one rank's gradients are in a step: some that stays, and noise."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    always = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=always) / 5 + torch.randn(shape, generator=draws) for shape in SHAPES]


def trained(model: Any, optimizer: Any, steps: range, scaler: Any = None) -> None:
    for step in steps:
        loss = model(drawn(step, dist.get_rank()))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def weights(model: Any) -> list[Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


class Reference:
    """One weight of ``Slopes`` trained by 1-bit Adam in float64: ``ranks`` of them, cut as the engine cuts it.

    ``form`` is "momentum" or "gradient"; every rank's own chunk is exact.
    """

    def __init__(self, model: Any, index: int, ranks: int, form: str, **settings: Any) -> None:
        flat = flat_param(model, index)
        self.chunk, self.numel = shard_numel(flat), SHAPES[index][0] * SHAPES[index][1]
        assert extents_of(flat) == [(0, self.numel)]
        self.index, self.ranks, self.form = index, ranks, form
        self.beta1, self.beta2 = settings["betas"]
        self.lr, self.decay, self.eps = settings["lr"], settings["weight_decay"], 1e-8
        self.warmup, self.refreshes = settings["warmup_steps"], settings["refresh_at"]
        size = ranks * self.chunk
        self.x = self._padded(Slopes().parts[index].weight.detach())
        self.m, self.v = torch.zeros(2, size, dtype=torch.float64)
        self.unsaid = torch.zeros(ranks, size, dtype=torch.float64)
        self.filled = torch.arange(size) < self.numel
        self.variances = 0

    def _padded(self, value: Tensor) -> Tensor:
        whole = torch.zeros(self.ranks * self.chunk, dtype=torch.float64)
        whole[: self.numel] = value.double().flatten()
        return whole

    def _said(self, due: Tensor) -> Tensor:
        """What one bit says of it: the sign, times the block's mean magnitude."""
        blocks, filled = due.view(-1, BLOCK), self.filled.view(-1, BLOCK)
        scales = (blocks.abs() * filled).sum(1) / filled.sum(1).clamp(min=1)
        return (torch.where(blocks.signbit(), -1.0, 1.0) * scales.unsqueeze(1) * filled).flatten()

    def step(self, step: int) -> None:
        """``step`` from 1 on; gradients are those drawn for the step before."""
        gradients = [self._padded(drawn(step - 1, rank)[self.index]) for rank in range(self.ranks)]
        mean = torch.stack(gradients).mean(0)
        after = step - self.warmup
        if after <= 0 or after in self.refreshes:
            self.v = self.beta2 * self.v + (1 - self.beta2) * mean**2
            self.variances += 1
        if after <= 0:
            self.m = self.beta1 * self.m + (1 - self.beta1) * mean
            update = self.m
        else:
            update = self._encoded_step(gradients)
        root = (self.v / (1 - self.beta2**self.variances)).sqrt() + self.eps
        moved = update / (1 - self.beta1**step) / root
        if after > 0:
            furthest = max(1.0, (1 - self.beta1) / (1 - self.beta2) ** 0.5)
            moved = moved.clamp(-furthest, furthest)
        self.x = torch.where(self.filled, self.x * (1 - self.lr * self.decay) - self.lr * moved, 0.0)

    def _encoded_step(self, gradients: list[Tensor]) -> Tensor:
        share = 1 - self.beta1 if self.form == "momentum" else 1.0
        received = torch.zeros_like(self.x)
        own = torch.zeros_like(self.x)
        for rank, gradient in enumerate(gradients):
            due = self.unsaid[rank] + gradient
            said = self._said(due)
            mine = slice(rank * self.chunk, (rank + 1) * self.chunk)
            self.unsaid[rank] = torch.where(self.filled, due - share * said, 0.0)
            said[mine] = own[mine] = gradient[mine]
            self.unsaid[rank, mine] = 0
            received += said / self.ranks
        if self.form == "gradient":
            self.m = self.beta1 * self.m + (1 - self.beta1) * received
            return self.m
        update = self.beta1 * self.m + (1 - self.beta1) * received
        self.m = self.beta1 * self.m + (1 - self.beta1) * own / self.ranks
        return update

    @property
    def weight(self) -> Tensor:
        return self.x[: self.numel].view(SHAPES[self.index])
