"""One weight in several places."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import yafsdp_cc
from tests.models import CASES, WIDTH, Block, Mlp, Transformer, next_token, stack
from tests.ranks import ranks
from tests.soak import also
from tests.twins import inputs, refusal, seeded, square, trains_on, twins


@pytest.mark.parametrize("world", [2, also(4)])
@ranks("world")
def test_tied_weights(world: int) -> None:
    model, plain = twins(lambda: Transformer(tied=True))
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    case = CASES["transformer"]
    trains_on(model, plain, next_token, [case.batches(dist.get_world_size(), step) for step in range(3)])
    assert model.head.weight is model.embed.weight


@ranks(2)
def test_weights_tied_across_units() -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.blocks[2][0].weight = model.blocks[0][0].weight
        return model

    model, plain = twins(build, units=[nn.Sequential])
    assert model.blocks[2][0].weight is model.blocks[0][0].weight
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)], within=1e-6)


class Shares(nn.Module):
    """Has a layer, and a unit with weights of its own, in which the weight of that layer is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unit = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), *stack(1))
        self.unit[0].weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.unit(x))
        return out


@ranks(2)
def test_a_unit_that_is_called_by_itself_has_weights_that_are_the_root_s_too() -> None:
    model, plain = twins(Shares, units=["unit"])
    for loss in (square, lambda net, x: square(net.unit, x), square):
        trains_on(model, plain, loss, [inputs(step=step) for step in range(2)], within=1e-6)


@ranks(2)
def test_an_untied_weight_read_elsewhere_is_right_or_refused_by_name() -> None:
    tokens = [torch.arange(4) + rank for rank in range(2)]
    model, plain = twins(Elsewhere, units=[Block])
    if refused := refusal(lambda: trains_on(model, plain, square, [tokens], within=1e-6)):
        assert "embed.weight" in refused, refused
    model = seeded(Elsewhere)
    yafsdp_cc.shard(model, units=[Block, model])
    trains_on(model, plain, square, [tokens], within=1e-6)


class Elsewhere(nn.Module):
    """Reads the weight of its embedding in a place of its own, without tying it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3000, WIDTH)
        self.blocks = stack(3)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.blocks(self.embed(tokens)), self.embed.weight)
