"""A model sharded and its plain twin: the same gradients and weights, bit for bit where it can be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests import reference
from tests.models import WIDTH

Loss = Callable[[nn.Module, Any], Tensor]
Means = dict[str, Tensor | None]


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def twins(build: Callable[[], nn.Module], **options: Any) -> tuple[Any, nn.Module]:
    """The same model sharded and plain."""
    return yafsdp_cc.shard(seeded(build), **options), seeded(build)


def mine(batches: list[Any]) -> Any:
    return batches[dist.get_rank()]


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor()
    return found


def means(plain: nn.Module, loss: Loss, batches: list[Any]) -> Means:
    return reference.mean_gradients(plain, loss, batches)[1]


def added(*terms: Means) -> Means:
    def add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return other if one is None else one if other is None else one + other

    return functools.reduce(lambda a, b: {name: add(a[name], b[name]) for name in a}, terms)


def same_gradients(model: nn.Module, truth: Means, within: float = 0.0) -> None:
    """Every gradient, ``within`` a norm-relative distance or bit for bit."""
    wrong = {}
    for name, parameter in model.named_parameters():
        found, expected = (None if parameter.grad is None else whole(parameter.grad)), truth[name]
        if found is None or expected is None:
            if found is not expected:
                wrong[name] = f"found {found}, not {expected}"
        elif found.dtype != expected.dtype or found.shape != expected.shape:
            wrong[name] = f"found {found.dtype} {found.shape}, not {expected.dtype} {expected.shape}"
        elif not torch.equal(found, expected) and not 0 <= reference.far_apart(found, expected) <= within:
            wrong[name] = f"off by {reference.far_apart(found, expected):.1e}"
    assert not wrong, wrong


def same_weights(model: nn.Module, plain: nn.Module, within: float = 0.0) -> Means:
    """Compare the whole weights, and return them."""
    weights: Means = {}
    for name, parameter in model.named_parameters():
        weights[name] = found = whole(parameter.detach())
        truth = plain.get_parameter(name).detach()
        if found.is_floating_point() and found.itemsize == 1:  # torch compares those bit by bit alone
            found, truth = found.float(), truth.float()
        torch.testing.assert_close(found, truth, rtol=within, atol=within, msg=name)
    return weights


def step_both(model: nn.Module, plain: nn.Module, truth: Means, optimizers: list[torch.optim.Optimizer]) -> None:
    """Step the two optimizers and empty the gradients."""
    for name, parameter in plain.named_parameters():
        parameter.grad = truth[name]
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    plain.zero_grad()


def sgd(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def numbers(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def inputs(rows: int = 3, step: int = 0) -> list[Tensor]:
    """One input per rank."""
    return [numbers(rows, WIDTH, seed=100 * step + rank) for rank in range(dist.get_world_size())]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trains_on(model: nn.Module, plain: nn.Module, loss: Loss, steps: list[list[Any]], within: float = 0.0) -> None:
    """A step of SGD per list of batches, gradients checked in each."""
    optimizers = sgd(model, plain)
    for batches in steps:
        loss(model, mine(batches)).backward()
        truth = means(plain, loss, batches)
        same_gradients(model, truth, within)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)


def reload(plain: nn.Module, model: nn.Module) -> None:
    """The sharded weights into the plain model, so that a last bit of rounding does not pile up."""
    for name, found in same_weights(model, plain, within=1e-5).items():
        plain.get_parameter(name).data.copy_(found)


def agrees(model: nn.Module, plain: nn.Module, x: Tensor, within: float = 1e-6) -> None:
    torch.testing.assert_close(model(x), plain(x), rtol=within, atol=within)


def refusal(act: Callable[[], Any]) -> str:
    """The message of what ``act`` raises, '' if nothing."""
    try:
        act()
    except Exception as error:
        return str(error)
    return ""
