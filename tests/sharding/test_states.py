"""Weights and buffers that differ between ranks, and those that are to be the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests import reference
from tests.models import WIDTH, stack
from tests.ranks import on_ranks, ranks
from tests.twins import (
    inputs,
    mine,
    numbers,
    reload,
    same_gradients,
    same_weights,
    seeded,
    sgd,
    square,
    step_both,
    trains_on,
    twins,
)


@ranks(4)
def test_sync_module_states_sends_the_first_rank_weights_and_buffers() -> None:
    model, plain = seeded(Normed, seed=dist.get_rank()), seeded(Normed)
    model.norm.running_mean.fill_(dist.get_rank())
    model = yafsdp_cc.shard(model, sync_module_states=True)
    same_weights(model, plain)
    assert not model.norm.running_mean.any()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = x + block(x)
        return x


@ranks(2)
def test_batch_norm_keeps_its_buffers() -> None:
    model, plain = twins(Normed, units=[nn.Sequential])
    by_rank = [seeded(Normed) for _ in range(2)]  # statistics are each rank's own
    own = mine(by_rank)
    optimizers = sgd(model, plain)
    for step in range(3):
        batches = inputs(rows=6, step=step)
        square(model, mine(batches)).backward()
        gradients = [
            reference.gradients(each, lambda e=each, x=x: square(e, x))[1]
            for each, x in zip(by_rank, batches, strict=True)
        ]
        truth = {name: reference.mean_in_rank_order([found[name] for found in gradients]) for name in gradients[0]}
        same_gradients(model, truth)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)
        for each in by_rank:
            each.load_state_dict(dict(plain.named_parameters()), strict=False)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, own.get_buffer(name)), name
    model.eval()
    own.eval()
    with torch.no_grad():
        assert torch.equal(model(mine(inputs())), own(mine(inputs())))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.complex64], ids=str)
def test_buffers_of_any_dtype_are_synchronised(dtype: torch.dtype) -> None:
    assert on_ranks(2, _odd_buffer, dtype) == [True] * 2


def _odd_buffer(dtype: torch.dtype) -> bool:
    model = stack()
    model.register_buffer("odd", torch.full((5,), dist.get_rank()).to(dtype))
    yafsdp_cc.shard(model, sync_module_states=True)
    return not bool(model.odd.any())


@ranks(2)
def test_weights_that_are_not_contiguous_are_synchronised() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))

    def build_last() -> nn.Module:
        return build().to(memory_format=torch.channels_last)

    model = yafsdp_cc.shard(seeded(build_last, seed=dist.get_rank()), sync_module_states=True)
    batches = [numbers(1, 8, 4, 4, seed=rank) for rank in range(2)]
    trains_on(model, seeded(build), square, [batches], within=1e-6)
