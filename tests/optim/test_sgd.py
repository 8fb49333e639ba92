"""OneBitSGD: torch's steps where nothing is lost, and nothing is lost where something is left for later."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.compression.ledger import net, unsent
from tests.optim.lossless import assert_close, backward, backward_of_all, sharded, whole
from tests.ranks import on_ranks, ranks
from tests.soak import also
from yafsdp_cc.optim import OneBitSGD

FORMS = ("momentum", "gradient")


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Weights with a decay, and biases without and with another rate."""
    split = [[], []]
    for parameter in model.parameters():
        split[parameter.ndim < 2].append(parameter)
    return [{"params": split[0], "weight_decay": 0.1}, {"params": split[1], "lr": 0.02}]


# Where nothing is lost


def the_steps_of_torch(form: str, warmup_steps: int, replicas: int) -> None:
    world = dist.get_world_size()
    mesh = {}
    if replicas > 1:
        mesh["mesh"] = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    model, twin = sharded(**mesh), net().double()
    ours = OneBitSGD(groups_of(model), lr=0.05, warmup_steps=warmup_steps, form=form)
    theirs = torch.optim.SGD(groups_of(twin), lr=0.05, momentum=0.9)
    rates = [torch.optim.lr_scheduler.ExponentialLR(each, 0.97) for each in (ours, theirs)]
    for step in range(12):
        backward(model, step)
        backward_of_all(twin, step, world)
        ours.step()
        theirs.step()
        for rate in rates:
            rate.step()
        assert_close(model, twin, 2e-6)


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), also(4, 1), (4, 2)])
def test_with_a_codec_that_loses_nothing_steps_are_those_of_torch(world, replicas):
    """Through the warm-up, out of it and without one: with weight decay, groups and a schedule."""
    for form, warmup_steps in itertools.product(FORMS, (0, 4)):
        on_ranks(world, the_steps_of_torch, form, warmup_steps, replicas)


@ranks(2)
def test_a_rank_may_own_none_of_a_unit_s_matrices() -> None:
    model, twin = sharded(zero_stage=2, ownership="matrix"), net().double()
    ours = OneBitSGD(model.parameters(), lr=0.05)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        backward(model, step)
        backward_of_all(twin, step, 2)
        ours.step()
        theirs.step()
        assert_close(model, twin, 2e-6)


@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_the_warm_up_is_that_of_torch_bit_for_bit(form: str) -> None:
    model, twin = sharded("onebit"), yafsdp_cc.shard(net(), units=[torch.nn.Linear])
    ours = OneBitSGD(groups_of(model), lr=0.05, warmup_steps=5, form=form)
    theirs = torch.optim.SGD(groups_of(twin), lr=0.05, momentum=0.9)
    for step in range(5):
        for each, optimizer in ((model, ours), (twin, theirs)):
            backward(each, step)
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.to_local().equal(other.to_local())
            assert (
                ours.state[mine]["momentum_buffer"].to_local().equal(theirs.state[other]["momentum_buffer"].to_local())
            )


@ranks(2)
def test_weights_of_16_bits_are_updated_in_fp32_and_rounded_once() -> None:
    """The truth is torch's optimizer in fp32 on the same gradients, whose weights are rounded behind each step."""
    model = yafsdp_cc.shard(net().bfloat16(), units=[torch.nn.Linear], compression="onebit")
    parameters = list(model.parameters())
    twin = [each.full_tensor().detach().float() for each in parameters]
    ours = OneBitSGD(parameters, lr=0.05, weight_decay=0.1, warmup_steps=4)
    theirs = torch.optim.SGD(twin, lr=0.05, momentum=0.9, weight_decay=0.1)
    for step in range(4):
        backward(model, step)
        for mine, other in zip(parameters, twin, strict=True):
            other.grad = mine.grad.full_tensor().float()
        ours.step()
        theirs.step()
        for mine, other in zip(parameters, twin, strict=True):
            other.copy_(other.bfloat16())
            assert mine.full_tensor().equal(other.bfloat16())


# Where something is left for later


@pytest.mark.parametrize("world", [2, also(4)])
@pytest.mark.parametrize("form", FORMS)
@ranks("world")
def test_steps_sum_up_to_exact_ones_less_what_is_still_to_come(world, form):
    """Weights are those of the exact rule, with the gradients that this run has seen, but for what is still to come.

    Momentum form: M ← M + g − (1 − β)·D of every rank, and V ← β·V + g / N of the owner, say that the sum of updates is
    short of Σ Σ βᵏ g by (mean M + β·(V − Ṽ)) / (1 − β), where Ṽ is the exact momentum. Gradient form: ḡ + ē₋₁ − ē
    instead of ḡ makes it Σ βᵏ ē (as Tang et al., "1-bit Adam", 2021, have it of Adam's).
    """
    rate, beta = 0.01, 0.9
    model = sharded("onebit")
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    twin = net()  # sees the weights of the run, so that its gradients are those that the run's ranks have
    optimizer = OneBitSGD(parameters, lr=rate, momentum=beta, warmup_steps=3, form=form)
    exact = dict(zip(names, whole(parameters), strict=True))
    momentum = {name: torch.zeros_like(each) for name, each in exact.items()}
    faded = {name: torch.zeros_like(each) for name, each in exact.items()}
    for step in range(20):
        for theirs, mine in zip(twin.parameters(), whole(parameters), strict=True):
            theirs.data.copy_(mine)
        backward_of_all(twin, step, world)
        backward(model, step)
        optimizer.step()
        for name, theirs in zip(names, twin.parameters(), strict=True):
            momentum[name].mul_(beta).add_(theirs.grad.double())
            exact[name].sub_(momentum[name], alpha=rate)
        left = unsent(model)
        for name in left:
            faded[name].mul_(beta).add_(left[name])
        for name, parameter in zip(names, parameters, strict=True):
            off = (parameter.full_tensor().double() - exact[name]) / rate
            if name not in left:
                due = torch.zeros_like(off)
            elif form == "gradient":
                due = faded[name]
            else:
                own = optimizer.state[parameter]["momentum_buffer"].full_tensor().double()
                due = (left[name] + beta * (own - momentum[name])) / (1 - beta)
            assert (off - due).norm() <= 1e-4 * max(1.0, float(off.norm())), (name, step)
            assert step < 3 or name not in left or off.norm() > 0
    assert left
