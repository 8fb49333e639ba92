"""The few units whose sums show are encoded, over a real network, and the step is as fast as with all of them encoded.

Units compute as long as they are told to, asleep, so that a busy machine does not change who should be chosen.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.netlab.labs import lab_of
from yafsdp_cc.engine.module import root_of

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
    seconds: dict[str, float]
    """Of a backward of each."""
    encoded: set[int]
    computes: list[float]
    """As they were measured, in module order."""
    why: str


def raced(computes: tuple[float, ...]) -> Found:
    models: dict[str, Any] = {
        str(each): yafsdp_cc.shard(net(computes), units=[Layer], zero_stage=2, compression=each)
        for each in (None, "int4", "auto")
    }
    took: dict[str, list[float]] = {name: [] for name in models}
    for name, model in models.items():  # one after the other, so that a step is what each of them takes by itself
        for _ in range(12):
            loss = model(torch.randn(4, 512)).square().mean()
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            took[name].append(time.perf_counter() - start)
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            model.zero_grad()
    counters, chooser = yafsdp_cc.counters_of(models["auto"]), root_of(models["auto"]).chooser
    assert chooser is not None
    assert chooser.problem is not None
    return Found(
        {name: median(each[5:]) for name, each in took.items()},
        {int(name) for name, codec in counters.chosen.items() if codec != "fp32"},
        [leg.compute for leg in chooser.problem.legs[::-1]],
        counters.why,
    )


@pytest.mark.parametrize(("computes", "shows"), [(SOME, SHOW), ((0.005,) * 8, set(range(8)))])
def test_what_shows_is_encoded_and_the_rest_is_not(computes, shows):
    with lab_of(ranks=2, bandwidth="100mbit") as lab:
        for found in lab.run(raced, computes):
            assert found.encoded == shows, found.why
            assert found.seconds["auto"] < found.seconds["int4"] + 0.05, found.why  # of a step of half a second
            assert found.seconds["auto"] < 0.9 * found.seconds["None"], found.why
            for asleep, measured in zip(computes, found.computes, strict=True):
                assert asleep <= measured < asleep + 0.5 * SUM  # no wait for the network is in it
