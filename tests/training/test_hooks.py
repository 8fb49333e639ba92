"""Hooks of users, on modules and on parameters."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import yafsdp_cc
from tests.models import CASES, Mlp, Skipping, Transformer, next_token, stack
from tests.ranks import ranks
from tests.twins import inputs, means, mine, numbers, refusal, reload, seeded, square, trains_on, twins, whole


@ranks(2)
def test_hooks_that_run_when_a_gradient_is_final() -> None:
    """The optimizer step in backward, as memory-saving loops do it."""
    model, plain = twins(Transformer)
    seen: list[str] = []

    def step(name: str, parameter: Any) -> None:
        seen.append(name)
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(step, name))
    for number in range(2):
        batches = CASES["transformer"].batches(2, number)
        next_token(model, mine(batches)).backward()
        truth = means(plain, next_token, batches)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.add_(truth[name], alpha=-0.1)
        assert sorted(seen) == sorted(name for name, _ in plain.named_parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
        seen.clear()
        reload(plain, model)


@pytest.mark.parametrize("how", ["frozen", "used by no rank", "used by one rank"])
@ranks(2)
def test_hooks_run_for_what_a_rank_has_used(how: str) -> None:
    """An optimizer in a hook that keeps ``.grad``, of zeros, would move others by its momentum."""
    model, plain = twins(Skipping)
    moved: list[nn.Parameter] = []
    for each in (model, plain):
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in each.parameters()}

        def step(parameter: nn.Parameter, optimizers: dict[nn.Parameter, torch.optim.SGD] = optimizers) -> None:
            moved.append(parameter)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad(set_to_none=False)

        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    for number in range(4):
        if number == 2 and how == "frozen":
            for each in (model, plain):
                each.second.requires_grad_(False)
        moved.clear()
        batches = [numbers(3, 64, seed=10 * number + rank) for rank in range(2)]
        skips = [number > 1 and how != "frozen" and (how == "used by no rank" or rank == 1) for rank in range(2)]
        model(mine(batches), mine(skips)).square().mean().backward()
        known = ["first.weight", "first.bias", "second.weight", "second.bias"]
        known = known if number < 2 or how == "used by one rank" else known[:2]
        assert sorted(name for name, p in model.named_parameters() if any(p is each for each in moved)) == sorted(known)
        assert len(moved) == len(known)
        sum(plain(x, skip).square().mean() / 2 for x, skip in zip(batches, skips, strict=True)).backward()
        for name, parameter in plain.named_parameters():
            found = whole(dict(model.named_parameters())[name])
            assert torch.allclose(found, parameter, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("how", ["steps", "scales", "raises"])
@ranks(2)
def test_hooks_run_once_for_two_forwards_and_one_backward(how: str) -> None:
    """The loss of contrastive training is of two forwards: a hook must see the whole gradient, once."""
    model, plain = twins(Mlp)
    calls: list[nn.Parameter] = []

    def act(parameter: Any) -> None:
        calls.append(parameter)
        if how == "steps":
            parameter.add_(parameter.grad, alpha=-0.1)  # without torch.no_grad, as hooks run
            parameter.grad = None
        else:
            parameter.grad.mul_(0.5)

    for each in (model, plain):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(act)
    x = inputs()[0]  # the same on all ranks
    if how == "raises":
        behind = x.clone().requires_grad_()
        behind.register_hook(_interrupt)
        with pytest.raises(ArithmeticError):  # when the gradients of the model are final
            square(model, behind).backward()
        assert not calls
        model.zero_grad()
    for each in (model, plain):
        for step in range(2):
            calls.clear()
            (square(each, x) + square(each, 2 * x + step)).backward()
            assert sorted(map(id, calls)) == sorted(map(id, each.parameters()))
    for name, parameter in model.named_parameters():
        truth = plain.get_parameter(name)
        found = (parameter, truth) if how == "steps" else (parameter.grad, truth.grad)
        torch.testing.assert_close(whole(found[0]), found[1], rtol=1e-5, atol=1e-6)


def _interrupt(_: Any) -> None:
    raise ArithmeticError


@ranks(2)
def test_module_hooks_of_users() -> None:
    model, plain = twins(stack)
    for each in (model, plain):
        for block in each:
            block.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
            block.register_forward_hook(lambda _, args, output: output * 0.5)
            block.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 3,))
            block.register_full_backward_hook(
                lambda _, inputs, outputs: tuple(g if g is None else g * 2 for g in inputs)
            )
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
@ranks(2)
def test_a_tensor_hook_on_a_parameter_runs_or_is_refused_by_name(when: str) -> None:
    model: Any = seeded(Mlp)

    def register() -> None:
        model.leave.weight.register_hook(lambda gradient: gradient * 0)

    def run() -> None:
        if when == "before":
            register()
        yafsdp_cc.shard(model)
        if when == "after":
            register()
        square(model, mine(inputs())).backward()

    if refused := refusal(run):
        assert "leave.weight" in refused, refused
    else:
        assert whole(model.leave.weight.grad).abs().max() == 0


@ranks(2)
def test_a_post_accumulate_hook_from_before_runs_or_is_refused_by_name() -> None:
    model: Any = seeded(Mlp)
    called: list[nn.Parameter] = []
    model.leave.weight.register_post_accumulate_grad_hook(called.append)

    def run() -> None:
        yafsdp_cc.shard(model)
        square(model, mine(inputs())).backward()

    if refused := refusal(run):
        assert "leave.weight" in refused, refused
    else:
        assert len(called) == 1
