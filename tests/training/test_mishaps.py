"""Exceptions and interrupts, after which training goes on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import yafsdp_cc
from tests.models import WIDTH, Block
from tests.ranks import ranks
from tests.twins import inputs, mine, square, trains_on, twins


class Fuse(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.blows = inner, ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.blows == "forward":
            raise ArithmeticError
        if self.blows == "backward":
            x.register_hook(_blow)
        return torch.tanh(x)


def _blow(gradient: Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("units", ["inside", "outside"])
@ranks(2)
def test_training_goes_on_after_an_exception(where: str, units: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Fuse(nn.Linear(WIDTH, WIDTH)) for _ in range(5)))

    model, plain = twins(build, units=[Fuse if units == "outside" else nn.Linear])
    trains_on(model, plain, square, [inputs()])
    for fuse in (2, 0, 4):
        model[fuse].blows = where
        with pytest.raises(ArithmeticError):
            square(model, mine(inputs(step=9))).backward()
        model[fuse].blows = ""
        model.zero_grad()
        trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


class Interrupted(Block):
    """As when Ctrl-C arrives."""

    arrives = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.arrives:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("grad", [True, False])
@ranks(2)
def test_an_interrupt_in_a_forward_leaves_nothing_behind(grad: bool) -> None:
    model, plain = twins(lambda: nn.Sequential(*(Interrupted() for _ in range(4))))
    Interrupted.arrives = False
    for step in range(3):
        trains_on(model, plain, square, [inputs(step=step)], within=1e-6)
        model[step].arrives = True
        with torch.set_grad_enabled(grad), pytest.raises(KeyboardInterrupt):
            model(mine(inputs(step=step)))
        model[step].arrives = False
    trains_on(model, plain, square, [inputs()], within=1e-6)
    counted = yafsdp_cc.counters_of(model)
    assert counted.spills == 0
    assert counted.owned_bytes == yafsdp_cc.plan_of(model).owned_bytes
