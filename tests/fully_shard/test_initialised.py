"""Sharded models that are built on the meta device, and initialised afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.models import Transformer
from tests.ranks import ranks
from tests.twins import whole


@pytest.mark.parametrize("replicas", [1, 2])
@ranks(4)
def test_sharded_parameters_are_initialised_as_plain_ones(replicas: int) -> None:
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model: Any = Transformer()
    for block in model.blocks:
        yafsdp_cc.fully_shard(block, mesh=mesh)
    ignored = model.norm.weight
    yafsdp_cc.fully_shard(model, mesh=mesh, ignored_params={ignored})
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(RuntimeError, match=r"'blocks.0.qkv.weight' is still on the meta device: call model.to_empty"):
        model(torch.zeros(1, 2, dtype=torch.long))
    qkv = model.blocks[0].qkv
    sharded, qkv.weight = qkv.weight, nn.Parameter(torch.zeros(qkv.weight.shape))
    with pytest.raises(RuntimeError, match=r"'blocks.0.qkv.weight' was replaced"):
        model(torch.zeros(1, 2, dtype=torch.long))
    qkv.weight = sharded
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = Transformer()
    model.to_empty(device="cpu")
    for one in (model, plain):
        torch.manual_seed(3)
        for module in one.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for name, parameter in model.named_parameters():
        value = parameter if parameter is ignored else whole(parameter.detach())
        assert torch.equal(value, plain.get_parameter(name)), name
    assert model.norm.weight is ignored
    tokens = torch.arange(12).view(2, 6)
    assert torch.allclose(model(tokens), plain(tokens), atol=1e-5)
    model(tokens).square().mean().backward()
    optimizer.step()
