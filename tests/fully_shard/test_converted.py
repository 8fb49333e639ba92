"""``.to(dtype)`` of a model after ``fully_shard``: what was converted before is the truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import yafsdp_cc
from tests.models import Transformer
from tests.ranks import ranks
from tests.subclasses import Float8Weight
from tests.twins import seeded, whole

CASES: dict[str, dict[str, Any]] = {
    "on cpu": {},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "one dtype left open": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    "none left open": {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float32)},
}


def sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        yafsdp_cc.fully_shard(block, **options)
    return yafsdp_cc.fully_shard(model, **options)


def trained(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Train two steps; return outputs, gradients and weights."""
    figures = []
    for start in range(2):
        output = model((torch.arange(12).view(2, 6) + start) % 16)
        output.float().square().mean().backward()
        figures += [output, *(whole(parameter.grad) for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*figures, *(whole(parameter.detach()) for parameter in model.parameters())]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


@ranks(2)
def test_is_trained_as_if_converted_before() -> None:
    for case, options in CASES.items():
        model: Any = sharded(seeded(Transformer).to(torch.bfloat16), **options)
        truth = trained(model, adam(model))
        model = sharded(seeded(Transformer), **options)
        optimizer = adam(model)  # knows the same parameters afterwards
        found = trained(model.to(torch.bfloat16), optimizer)
        for one, other in zip(truth, found, strict=True):
            assert one.dtype == other.dtype, case
            assert torch.equal(one, other), case


@ranks(2)
def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = sharded(Transformer())
    model.to(torch.bfloat16)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    plain = seeded(Transformer).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    one, other = trained(sharded_twin := sharded(plain), adam(sharded_twin)), trained(model, adam(model))
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(one, other, strict=True))


@ranks(2)
def test_refused_where_something_would_be_lost() -> None:
    model = sharded(seeded(Transformer))
    with pytest.raises(RuntimeError, match="cannot be converted or moved"):
        model.to(torch.float8_e4m3fn)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match=r"parameters without gradients"):
        model.to(torch.bfloat16)
    model.zero_grad()
    model(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(RuntimeError, match=r"before the first forward"):
        model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    extended: Any = nn.Linear(32, 32)
    extended.weight = nn.Parameter(Float8Weight(extended.weight.detach()))
    with pytest.raises(RuntimeError, match=r"'weight' is sharded on cpu as torch.float32"):
        yafsdp_cc.fully_shard(extended).to(torch.bfloat16)


@ranks(2)
def test_gradients_of_ignored_parameters_are_converted_with_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    yafsdp_cc.fully_shard(model, ignored_params=set(model[1].parameters()))
    model[1](torch.ones(1, 8)).sum().backward()
    before = model[1].weight.grad.clone()
    model.double()
    assert model[1].weight.grad.equal(before.double())
    model[1].weight.square().sum().backward()
    assert model[1].weight.grad.equal(before.double() + 2 * model[1].weight)
