"""Sharded stages of a pipeline: the numbers of one process, and one reduce in a step of several micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B

import yafsdp_cc
from tests import reference
from tests.integrations.examples import on_example, same, whole
from tests.optim.lossless import Lossless
from tests.ranks import ranks
from yafsdp_cc import Compression
from yafsdp_cc.integrations.pipelining import ShardedStage
from yafsdp_cc.optim import OneBitAdam


def _loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), inputs.flip(-1))


def test_the_example_equals_one_process() -> None:
    on_example("pipeline", _check, world=4)


def _check(ran: dict[str, Any]) -> None:
    plain, inputs, module = nn.Sequential(*ran["make_stages"]()), ran["inputs"], ran["module"]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    losses = reference.train(
        plain, optimizer, lambda step: reference.mean_gradients(plain, _loss, list(inputs[step])), 3, clip=float("inf")
    )
    same(whole(module), plain[ran["place"]])
    found = torch.tensor(ran["losses"] or [0.0] * 3)
    torch.distributed.all_reduce(found)
    torch.testing.assert_close(found / 2, torch.tensor(losses))
    planned = yafsdp_cc.plan_of(module).communication
    assert ran["reduced"] == [step * (planned.reduce + planned.replicated) for step in (1, 2, 3)]
    # Until an optimizer has stepped, weights may be written by hand between any two forwards: the first step gathers
    # them for the forward that tells the stage shapes and for each of four micro-batches.
    assert ran["gathered"] == [(4 + step) * planned.gather_forward for step in (1, 2, 3)]
    assert yafsdp_cc.counters_of(module).overflow_buffers == 0


@ranks(4)
def test_gradients_of_a_schedule_that_keeps_all_micro_batches() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    place, rank = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))) for _ in range(2)))
    torch.manual_seed(0)
    halves = nn.Sequential(*(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))) for _ in range(2)))
    module = yafsdp_cc.shard(halves[place], units=[nn.Linear], mesh=mesh["data"])
    stage = ShardedStage(module, place, 2, torch.device("cpu"), group=mesh["pipeline"].get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)
    inputs = torch.randn(2, 8, 32)
    if place == 0:
        schedule.step(inputs[rank])
    else:
        schedule.step(target=inputs[rank].flip(-1))
    truth = reference.mean_gradients(plain, _loss, list(inputs))[1]
    found = {f"{place}.{name}": parameter.grad.full_tensor() for name, parameter in module.named_parameters()}
    same(found, {name: gradient for name, gradient in truth.items() if name in found})


@pytest.mark.parametrize("form", ["momentum", "gradient"])
@pytest.mark.parametrize("kind", [ScheduleGPipe, ScheduleInterleaved1F1B])
@ranks(4)
def test_what_is_encoded_is_the_mean_over_micro_batches(kind: Any, form: Any) -> None:
    """With a codec that loses nothing, 1-bit Adam is AdamW in one process, whether the schedule or the loss divides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    place, rank = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    mine = (place,) if kind is ScheduleGPipe else (place, place + 2)
    inputs = torch.randn(6, 2, 8, 32, generator=torch.Generator().manual_seed(1))
    for scales in (True, False):
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2 * len(mine))))
        parts, compression = copy.deepcopy(plain), Compression(Lossless.name, residual="fp32")
        modules = [yafsdp_cc.shard(parts[index], mesh=mesh["data"], compression=compression) for index in mine]
        group = mesh["pipeline"].get_group()
        stages: Any = [
            ShardedStage(module, index, len(plain), torch.device("cpu"), group=group)
            for index, module in zip(mine, modules, strict=True)
        ]
        schedule = kind(
            stages if len(mine) > 1 else stages[0],
            n_microbatches=4,
            loss_fn=lambda output, target, by=1 if scales else 4: F.mse_loss(output, target) / by,
            scale_grads=scales,
        )
        settings: Any = {"lr": 1e-2, "warmup_steps": 2, "refreshes": 1000, "form": form}
        optimizers = [OneBitAdam(module.parameters(), **settings) for module in modules]
        adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in inputs:
            if place == 0:
                schedule.step(step[rank])
            else:
                schedule.step(target=step[rank].flip(-1))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            F.mse_loss(plain(step.flatten(0, 1)), step.flatten(0, 1).flip(-1)).backward()
            adamw.step()
            adamw.zero_grad()
        for index, module in zip(mine, modules, strict=True):
            same(whole(module), plain[index])
