"""A sharded model next to others, in part of a model, on part of the ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.models import Block, Mlp, Recursive, stack
from tests.ranks import ranks
from tests.twins import (
    added,
    agrees,
    inputs,
    means,
    mine,
    refusal,
    same_gradients,
    same_weights,
    seeded,
    square,
    trains_on,
    twins,
    whole,
)


@ranks(2)
def test_two_sharded_models_in_one_graph() -> None:
    one, plain_one = twins(lambda: nn.Sequential(*(Recursive() for _ in range(3))), units=[Recursive])
    two, plain_two = twins(Mlp, units=[nn.Sequential])
    plain = nn.Sequential(plain_one, plain_two)
    for step in range(3):
        batches = inputs(step=step)
        two(one(mine(batches))).square().mean().backward()
        truth = means(plain, square, batches)
        for index, model in enumerate((one, two)):
            prefix = f"{index}."
            of = {name.removeprefix(prefix): g for name, g in truth.items() if name.startswith(prefix)}
            same_gradients(model, of, within=1e-6)
            model.zero_grad()


@ranks(2)
def test_a_generator_and_its_critic() -> None:
    maker, plain_maker = twins(stack)
    critic, plain_critic = twins(Mlp)
    sharded, plain = nn.ModuleList([maker, critic]), nn.ModuleList([plain_maker, plain_critic])

    def judge(both: Any, x: Tensor) -> Tensor:
        return (both[1](both[0](x).detach()) - 1).square().mean() + both[1](x).square().mean()

    def fool(both: Any, x: Tensor) -> Tensor:
        return both[1](both[0](x)).square().mean()

    for step in range(2):
        for loss, trainable in ((judge, True), (fool, False)):
            for each in (critic, plain_critic):
                each.requires_grad_(trainable)
            loss(sharded, mine(inputs(step=step))).backward()
            same_gradients(sharded, means(plain, loss, inputs(step=step)), within=1e-6)
            sharded.zero_grad()


@ranks(2)
def test_a_sharded_model_between_plain_layers() -> None:
    middle, plain_middle = twins(stack)
    model, plain = (nn.Sequential(seeded(Block), each, seeded(Block)) for each in (middle, plain_middle))
    square(model, mine(inputs())).backward()
    truth = means(plain, square, inputs())
    same_gradients(middle, {name: truth[f"1.{name}"] for name, _ in middle.named_parameters()}, within=1e-6)
    square(plain, mine(inputs())).backward()
    torch.testing.assert_close(model[0].inner.weight.grad, plain[0].inner.weight.grad)
    assert "0.inner" in refusal(lambda: model.bfloat16())
    assert "copy the model before" in refusal(lambda: copy.deepcopy(model))


@pytest.mark.parametrize("separate", [False, True])
@ranks(4)
def test_two_groups_of_ranks_each_shard_a_model(separate: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = twins(stack, mesh=mesh["shard"], separate_reduce_group=separate)
    square(model, mine(inputs())).backward()
    first = dist.get_rank() // 2 * 2
    same_gradients(model, means(plain, square, inputs()[first : first + 2]))


@pytest.mark.parametrize("world", [1, 3])
@ranks("world")
def test_worlds_of_one_and_of_three_with_a_second_communicator(world: int) -> None:
    model, plain = twins(Mlp, separate_reduce_group=True)
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)], within=1e-6)


@ranks(2)
def test_ignored_parameters_are_left_alone() -> None:
    model, plain = seeded(stack), seeded(stack)
    yafsdp_cc.shard(model, ignored_params=[model[0].inner.weight])
    square(model, mine(inputs())).backward()
    truth = means(plain, square, inputs())
    square(plain, mine(inputs())).backward()
    for name, parameter in model.named_parameters():
        if name == "0.inner.weight":
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        else:
            torch.testing.assert_close(whole(parameter.grad), truth[name])


@pytest.mark.parametrize("options", [{"units": ["blocks.*"]}, {"units": ["blocks.*"], "ownership": "matrix"}, {}])
@ranks(2)
def test_a_model_follows_another_that_is_sharded_otherwise(options: dict[str, Any]) -> None:
    """A reference of a policy, a teacher of a student: ranks have other elements of the same parameter."""

    def build() -> nn.Module:
        model = Mlp()
        model.enter.requires_grad_(False)
        model.blocks[0][0].weight.requires_grad_(False)
        return model

    model, plain = twins(build, units=["blocks.*"])
    reference = yafsdp_cc.shard(seeded(Mlp, 1).requires_grad_(False), **options)
    truth = seeded(Mlp, 1).requires_grad_(False)
    pairs = [
        list(zip(*(each.parameters() for each in both), strict=True)) for both in ((reference, model), (truth, plain))
    ]
    assert any(ours.shard_spec.bounds != theirs.shard_spec.bounds for ours, theirs in pairs[0])
    with torch.no_grad():
        for pair in pairs:
            for one, other in pair:
                one.mul_(0.9).add_(other, alpha=0.1)
    same_weights(reference, truth)
    agrees(reference, truth, mine(inputs()))
    near = sum((one.detach() - other).square().sum() for one, other in pairs[0])
    (square(model, mine(inputs())) + near).backward()
    penalty = sum((one - other).square().sum() for one, other in pairs[1])
    penalty.backward()
    of_penalty = {name: parameter.grad for name, parameter in plain.named_parameters()}
    plain.zero_grad()
    same_gradients(model, added(means(plain, square, inputs()), of_penalty), within=1e-5)
    reference.load_state_dict(model.state_dict())
    same_weights(reference, plain)
    agrees(reference, plain, mine(inputs()))
