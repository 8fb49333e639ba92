"""``param.grad_dtype``: gradients of bf16 parameters that are kept, and added up, in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import ranks
from tests.subclasses import Float8Weight
from tests.twins import inputs, mine, refusal, same_gradients, seeded, square


def wide(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


@pytest.mark.parametrize("how", ["before", "after", "offloaded", "meta", "fully_shard"])
@ranks(2)
def test_gradients_are_added_up_in_their_own_dtype(how: str) -> None:
    """Also those that one backward reduces for several, with ``set_requires_gradient_sync(False)``."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    more = {"offload_policy": CPUOffloadPolicy()} if how == "offloaded" else {}
    model = seeded(Mlp).bfloat16()
    if how in ("meta", "fully_shard"):
        model = model.to("meta")
    sharding = yafsdp_cc.fully_shard if how == "fully_shard" else yafsdp_cc.shard
    model = sharding(model if how == "after" else wide(model), mp_policy=policy, **more)
    if how == "after":
        wide(model)
    elif how == "fully_shard":
        model.to_empty(device="cpu")
    model.load_state_dict(seeded(Mlp).bfloat16().state_dict())
    for syncs in (True, False):
        plain = wide(seeded(Mlp).bfloat16())
        for step in range(8):
            model.set_requires_gradient_sync(syncs or step == 7)
            square(model, mine(inputs(step=step)).bfloat16()).backward()
            for x in inputs(step=step):
                square(plain, x.bfloat16()).backward()
        truth = {name: each.grad / 2 for name, each in plain.named_parameters()}
        assert all(each.dtype == torch.float32 for each in truth.values())
        same_gradients(model, truth, within=1e-6)
        model.zero_grad()
    square(model, mine(inputs()).bfloat16()).backward()
    assert {each.grad_dtype for each in yafsdp_cc.unshard_model(model).parameters()} == {torch.float32}


@ranks(2)
def test_parameters_of_a_tensor_subclass_keep_their_grad_dtype() -> None:
    """The loss is linear: gradients do not depend on the weights, which are gathered in float8."""
    model, plain = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(2))
    model.weight = nn.Parameter(Float8Weight(model.weight.detach()))
    yafsdp_cc.fully_shard(wide(model))
    for step in range(8):
        model(mine(inputs(step=step)).bfloat16()).sum().backward()
        for x in inputs(step=step):
            wide(plain)(x.bfloat16()).sum().backward()
    assert plain.weight.grad is not None
    same_gradients(model, {"weight": plain.weight.grad / 2}, within=1e-6)


@ranks(2)
def test_parameters_of_one_buffer_that_differ_are_named() -> None:
    model = yafsdp_cc.shard(seeded(Mlp).bfloat16(), units=[nn.Sequential])
    model.blocks[0][2].weight.grad_dtype = torch.float32
    said = refusal(lambda: square(model, mine(inputs()).bfloat16()).backward())
    assert "'blocks.0.0.weight' has grad_dtype torch.bfloat16 and 'blocks.0.2.weight', sharded together with it" in said
