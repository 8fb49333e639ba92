"""The few units whose sums show are encoded, over a real network. (What that takes, ``bench/auto.py`` tells.)

Units compute as long as they are told to, asleep, so that a busy machine does not change who should be chosen.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import yafsdp_cc
from tests.internals import autotuner_of
from tests.netlab.labs import lab_of
from tests.soak import LONG

SUM = 0.042
"""Seconds that the sum of a layer's gradients takes at 100 Mbit/s: half of a megabyte to the other rank."""
SOME = (0.01, 0.06, 0.06, 0.01, 0.06, 0.06, 0.06, 0.06)
"""Seconds of each layer's backward."""
SHOW = {0, 1, 4}
"""Layers whose sum is longer than what is computed meanwhile: the layer's before, or nothing."""


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = Sleeping.apply(self.linear(x).tanh(), self.seconds)
        return seen


def net(computes: tuple[float, ...]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(seconds) for seconds in computes])


class Found(NamedTuple):
    encoded: set[int]
    computes: list[float]
    """As they were measured, in module order."""
    why: str


def chosen(computes: tuple[float, ...]) -> Found:
    model: Any = yafsdp_cc.shard(net(computes), units=[Layer], zero_stage=2, compression="auto")
    for _ in range(12):
        model(torch.randn(4, 512)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.zero_grad()
    counters, tuner = yafsdp_cc.counters_of(model), autotuner_of(model)
    return Found(
        {int(name) for name, codec in counters.chosen.items() if codec != "fp32"},
        [group.compute for group in tuner.last.costs[::-1]],
        counters.why,
    )


@LONG
@pytest.mark.parametrize(("computes", "shows"), [(SOME, SHOW), ((0.005,) * 8, set(range(8)))])
def test_what_shows_is_encoded_and_the_rest_is_not(computes, shows):
    with lab_of(ranks=2, bandwidth="100mbit") as lab:
        for found in lab.run(chosen, computes):
            assert found.encoded == shows, found.why
            assert all(asleep <= measured for asleep, measured in zip(computes, found.computes, strict=True))
            assert sum(found.computes) < sum(computes) + 0.5 * SUM * len(computes)  # no wait for the network is in it
