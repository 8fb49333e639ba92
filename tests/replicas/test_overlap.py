"""Sums over replicas hidden behind the next step, against the same steps in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import ranks
from tests.twins import numbers, seeded, square, whole

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
STEPS = 6


def sharded(replicas: int, shards: int, sync: Any, build: Any = Mlp) -> Any:
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    return yafsdp_cc.shard(seeded(build), mesh=mesh, sync=sync)


def batch(step: int, rank: int) -> Tensor:
    return numbers(4, WIDTH, seed=100 * step + rank)


def replica_gradient(model: nn.Module, step: int, members: Sequence[int]) -> list[Tensor]:
    model.zero_grad()
    for rank in members:
        (square(model, batch(step, rank)) / len(members)).backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def in_one_process(replicas: int, shards: int, steps: int) -> nn.Module:
    """Local prediction as its definition has it; returns the weights once the last gradient is committed."""
    committed = seeded(Mlp)
    optimizer = torch.optim.AdamW(committed.parameters(), **ADAMW)
    predicted: list[nn.Module] = [copy.deepcopy(committed) for _ in range(replicas)]
    for step in range(steps):
        found = [
            replica_gradient(predicted[each], step, range(shards * each, shards * (each + 1)))
            for each in range(replicas)
        ]
        if step > 0:
            optimizer.step()
        predicted = [stepped(committed, optimizer, each) for each in found]
        for parameter, *grads in zip(committed.parameters(), *found, strict=True):
            parameter.grad = torch.stack(grads).sum(0) / replicas
    optimizer.step()
    return committed


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, grads: Sequence[Tensor]) -> nn.Module:
    twin = copy.deepcopy(model)
    its = torch.optim.AdamW(twin.parameters(), **ADAMW)
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, grad in zip(twin.parameters(), grads, strict=True):
        parameter.grad = grad
    its.step()
    return twin


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        square(model, batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (2, 1), (2, 2)])
def test_is_local_prediction(replicas: int, shards: int) -> None:
    _check_prediction(world=replicas * shards, replicas=replicas, shards=shards)


@ranks("world")
def _check_prediction(world: int, replicas: int, shards: int) -> None:
    model = sharded(replicas, shards, "overlap")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, range(STEPS))
    yafsdp_cc.synchronize_replicas(model)
    expected = dict(in_one_process(replicas, shards, STEPS).named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), expected[name], rtol=1e-5, atol=1e-6, msg=name)


@ranks(4)
def test_the_plan_has_its_buffers_and_bytes() -> None:
    model = sharded(2, 2, "overlap")
    plan = yafsdp_cc.plan_of(model)
    elements = sum(local.numel() for local in local_shards(model))
    assert plan.replicas == 2
    assert plan.sync_bytes["own gradients"] == plan.sync_bytes["committed weights"] == 4 * elements
    assert plan.communication.replicas == 4 * (elements + 2 + len(list(model.parameters())))
    assert plan.owned_bytes == sum(plan.memory.values())
    assert "own gradients" in str(plan)


def local_shards(model: Any) -> list[Tensor]:
    return [parameter.to_local() for parameter in model.parameters()]


@ranks(2)
def test_what_cannot_be_synchronized_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(TypeError, match=r"sync takes 'overlap', or an object .*got 'gossip'"):
        yafsdp_cc.shard(Mlp(), mesh=mesh, sync="gossip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pass init_device_mesh\(..., \(replicas, ranks of each\)"):
        yafsdp_cc.shard(Mlp(), mesh=init_device_mesh("cpu", (2,)), sync="overlap")
    with pytest.raises(ValueError, match="sync differs between ranks"):
        yafsdp_cc.shard(Mlp(), mesh=mesh, sync=None if dist.get_rank() else "overlap")
    model = sharded(2, 1, "overlap")
    square(model, batch(0, 0)).backward()
    with pytest.raises(ValueError, match=r"treats each element by itself .*; LBFGS does not"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, range(1))
    for call in (yafsdp_cc.uneven, yafsdp_cc.skip_together):
        with pytest.raises(ValueError, match=f"{call.__name__} settles .* and Overlap needs"), call(model):
            pass
    with torch.no_grad():
        model.get_parameter("leave.weight").zero_()
    with pytest.raises(RuntimeError, match=r"'enter.bias', or .* changed between two steps .*synchronize_replicas"):
        train(model, optimizer, range(1, 2))


@ranks(2)
def test_weights_may_be_changed_once_replicas_are_synchronized() -> None:
    model = sharded(2, 1, "overlap")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    train(model, optimizer, range(2))
    yafsdp_cc.synchronize_replicas(model)
    with torch.no_grad():
        model.get_parameter("leave.weight").fill_(3.0)
    train(model, optimizer, range(2, 4))
    assert bool((whole(model.get_parameter("leave.weight").detach()) == 3).all())
