"""`DivergenceWatch` names the rank and the parameter that differ, and nothing else."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import yafsdp_cc
from tests.ranks import on_ranks, ranks
from tests.soak import SOAK, also
from yafsdp_cc.rescue.memory import MEMORY


def replicated(way: str, replicas: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of three units on (replicas, shards) ranks, and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(3)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard"))
    if way == "fsdp2":
        for each in (*layers, model):
            fully_shard(each, mesh=mesh)
    else:
        yafsdp_cc.shard(model, mesh=mesh, units=layers)
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flip_a_bit(model: nn.Module, name: str, chance: random.Random) -> bool:
    """Flip one bit of this rank's part of a parameter, unless it has none."""
    local = dict(model.named_parameters())[name].to_local().detach().view(torch.int32)
    if local.numel():
        local.view(-1)[chance.randrange(local.numel())] ^= 1 << chance.randrange(31)
    return bool(local.numel())


@pytest.mark.parametrize("way", ["ours", also("fsdp2")])
def test_a_flipped_bit_is_named_within_one_round(way: str) -> None:
    def body() -> None:
        chance = random.Random(0)
        model, optimizer = replicated(way)
        names = [name for name, _ in model.named_parameters()]
        for _ in range(100 if SOAK else 6):
            watch = yafsdp_cc.DivergenceWatch(model, optimizer, every=1)
            step(model, optimizer)
            watch.step()
            name, guilty, where = chance.choice(names), chance.randrange(4), random.Random(chance.random())
            before = [parameter.to_local().clone() for parameter in model.parameters()]
            hits = flip_a_bit(model, name, where) if dist.get_rank() == guilty else False
            everyones: list[bool] = [False] * 4
            dist.all_gather_object(everyones, hits)
            told = ""
            try:
                for _ in range(4):  # units, and the root
                    watch.step()
            except yafsdp_cc.DivergenceError as error:
                told = str(error).partition("(compared")[0]
            assert (f"another '{name}' than" in told) == any(everyones), told
            assert (str(guilty) in told) == any(everyones), told
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.to_local().detach().copy_(value)

    on_ranks(4, body)


@ranks(3)
def test_the_rank_that_differs_from_most_is_named() -> None:
    model, optimizer = replicated("ours", replicas=3)
    watch = yafsdp_cc.DivergenceWatch(model, optimizer, every=2)
    step(model, optimizer)
    if dist.get_rank() == 2:
        flip_a_bit(model, "1.0.weight", random.Random(1))
    watch.step()

    def until_it_is_found() -> None:
        for _ in range(7):
            watch.step()

    told = r"after \d steps rank 2 had another '1.0.weight' than ranks 0, 1 \(.* in the last [2-6] steps.* by design, "
    with pytest.raises(yafsdp_cc.DivergenceError, match=told):
        until_it_is_found()


@pytest.mark.parametrize("steps", [12, also(10_000)])
def test_training_raises_no_alarm(steps: int) -> None:
    def body() -> None:
        model, optimizer = replicated("ours")
        watch = yafsdp_cc.DivergenceWatch(model, optimizer, every=1)
        torch.manual_seed(dist.get_rank())
        for _ in range(steps):
            step(model, optimizer)
            watch.step()

    on_ranks(4, body, timeout=3000)


@ranks(4)
def test_ranks_of_a_stage_are_named_by_their_numbers_in_the_world() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))["replicate", "shard"]
    model = yafsdp_cc.shard(nn.Linear(8, 8), mesh=mesh)
    watch = yafsdp_cc.DivergenceWatch(model, every=1)
    if dist.get_rank() == 3:
        flip_a_bit(model, "weight", random.Random(0))
    told = pytest.raises(yafsdp_cc.DivergenceError, match="rank 3 had another 'weight' than rank 2, and")
    with told if dist.get_rank() > 1 else nullcontext():
        watch.step()


def test_a_rescue_that_is_closed_behind_a_flip_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path / "run")
        model, optimizer = replicated("ours", replicas=2)
        watch = yafsdp_cc.DivergenceWatch(model, optimizer, every=6)
        rescue = yafsdp_cc.Rescue(model, optimizer, every=1, path=tmp_path / "last", save_every=4)
        for done in range(rescue.restore(), 6):
            step(model, optimizer)
            if done == 3:
                saved = {name: each.to_local().clone() for name, each in model.named_parameters()}
            elif dist.get_rank() == 1 and done == 4:
                flip_a_bit(model, "0.1.bias", random.Random(0))  # replicated, so in each comparison
            if done < 5:
                watch.step()
                rescue.step()
        with pytest.raises(yafsdp_cc.DivergenceError):
            watch.step()
        rescue.close()
        again = yafsdp_cc.Rescue(model, optimizer, every=1, path=tmp_path / "last", save_every=4)
        assert again.restore() == 4
        for name, each in model.named_parameters():
            assert each.to_local().equal(saved[name]), name
        again.close()

    on_ranks(2, body)


@ranks(4)
def test_watches_of_a_run_that_restarts_come_to_every_unit() -> None:
    model, _ = replicated("ours")
    if dist.get_rank() == 3:
        flip_a_bit(model, "2.0.weight", random.Random(0))

    def until_it_is_found() -> None:
        for _ in range(200):
            yafsdp_cc.DivergenceWatch(model, every=1).step()

    with pytest.raises(yafsdp_cc.DivergenceError, match=r"another '2\.0\.weight'"):
        until_it_is_found()


@pytest.mark.parametrize("flip", [1.0, 0.5, float("inf")])
@ranks(2)
def test_steps_of_an_optimizer_that_differ_are_named(flip: float) -> None:
    model, optimizer = replicated("ours", replicas=2)
    watch = yafsdp_cc.DivergenceWatch(model, optimizer, every=1)
    step(model, optimizer)
    if dist.get_rank() == 1:
        optimizer.state[next(model.parameters())]["step"] += flip
    with pytest.raises(yafsdp_cc.DivergenceError, match=r"another 'optimizer's step of 0.0.weight' than rank 0, "):
        watch.step()


@pytest.mark.parametrize("way", ["ours", "fsdp2"])
@ranks(2)
def test_what_the_engine_ignores_may_differ(way: str) -> None:
    torch.manual_seed(dist.get_rank())
    own = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), own)
    if way == "ours":
        yafsdp_cc.shard(model, ignored_params=list(own.parameters()), sync_module_states=True)
    else:
        fully_shard(model, ignored_params=set(own.parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    watch = yafsdp_cc.DivergenceWatch(model, optimizer, every=1)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state[own.weight]["step"] += dist.get_rank()
        watch.step()


@ranks(2)
def test_unsharded_weights_of_fsdp2_are_compared() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8))
    watch = yafsdp_cc.DivergenceWatch(model, every=1)
    with torch.no_grad():
        model(torch.ones(2, 8))  # and leaves the root unsharded
    watch.step()
    with torch.no_grad():
        model.bias[0] += dist.get_rank()
    with pytest.raises(yafsdp_cc.DivergenceError, match="'bias'"):
        watch.step()


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="every=0 must be a number of steps, 1 or more"):
        yafsdp_cc.DivergenceWatch(nn.Linear(1, 1), every=0)
