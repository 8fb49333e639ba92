"""A small model whose gradients are encoded, and an account of what was sent and what is left in residuals."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.internals import mean_residuals_of, set_tuned_codecs


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 30))


def sharded(compression: Any, **more: Any) -> Any:
    return yafsdp_cc.shard(net(), units=[nn.Linear], compression=compression, **more)


def loss_of(model: nn.Module, step: int) -> Tensor:
    draws = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(4, 40, generator=draws)
    loss: Tensor = model(x).square().mean() * (1 + step % 5)
    return loss


def step_of(model: Any, step: int) -> None:
    """Run forward, backward and an optimizer step, after which the next forward counts one more."""
    loss_of(model, step).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    model.zero_grad()


def set_codecs(model: nn.Module, codecs: list[str]) -> None:
    """Have the gradients of each unit of a model with ``compression="auto"`` encoded so from now on."""
    set_tuned_codecs(model, codecs)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.full_tensor().double() for name, parameter in model.named_parameters()}


def unsent(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.double() for name, each in mean_residuals_of(model).items()}


class Ledger:
    """Gradients as they were summed and as they should have been, summed over steps."""

    def __init__(self, model: Any, exact: Any) -> None:
        self.models = model, exact
        self.sums: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self.before = unsent(model)

    def step(self, step: int, micro: int = 1) -> None:
        for model, total in zip(self.models, self.sums, strict=True):
            for number in range(micro):
                model.set_requires_gradient_sync(number == micro - 1)
                loss_of(model, 10 * step + number).backward()
            for name, gradient in gradients(model).items():
                total[name] = total.get(name, 0.0) + gradient
            model.zero_grad()

    def check(self) -> None:
        """Σ decoded = Σ gradients + E₀ − E_T."""
        decoded, due = self.sums
        after = unsent(self.models[0])  # of what is encoded; the rest is exact
        for name, gradient in due.items():
            off = decoded[name] - (gradient + self.before.get(name, 0.0) - after.get(name, 0.0))
            assert off.norm() <= 3e-6 * gradient.norm(), name
