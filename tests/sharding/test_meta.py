"""Models built on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import yafsdp_cc
from tests.models import CASES, WIDTH, Tiny, Transformer, next_token
from tests.ranks import ranks
from tests.twins import same_weights, seeded, trains_on, whole


@ranks(2)
def test_meta_device_construction() -> None:
    with torch.device("meta"):
        model = Transformer()
    model = yafsdp_cc.shard(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert 0.5 < whole(model.embed.weight).std() < 1.5  # as nn.Embedding initialises itself
    assert torch.equal(model.norm.weight.to_local(), torch.ones(WIDTH))
    plain = seeded(Transformer)
    with yafsdp_cc.whole_parameters(model, write=True), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(plain.get_parameter(name))
    same_weights(model, plain)
    trains_on(model, plain, next_token, [CASES["transformer"].batches(2, step) for step in range(2)])


@ranks(2)
def test_meta_device_construction_with_a_function() -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.25)

    with torch.device("meta"):
        model = nn.Sequential(*(Tiny() for _ in range(2)))
    with pytest.raises(
        ValueError, match=r"'0\.\w+' is on the meta device.*Tiny has no reset_parameters.*param_init_fn"
    ):
        yafsdp_cc.shard(model, units=[Tiny])
    with torch.device("meta"):
        model = nn.Sequential(*(Tiny() for _ in range(2)))
    yafsdp_cc.shard(model, units=[Tiny], param_init_fn=fill)
    assert all((whole(parameter) == 0.25).all() for parameter in model.parameters())
