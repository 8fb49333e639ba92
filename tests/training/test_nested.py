"""Backwards within backwards, gradients within forwards, and what one rank alone does otherwise: right, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests.ranks import on_ranks, ranks

WIDTH = 16


class Aside(torch.autograd.Function):
    """Runs ``late`` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, late: Callable[[], None]) -> Tensor:
        ctx.late = late
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.late()
        return gradients[0], None


class Tiled(torch.autograd.Function):
    """A module on one row after another, run again and differentiated in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return torch.cat([module(tile) for tile in x.split(1)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        for tile, gradient in zip(leaf.split(1), gradients[0].split(1), strict=True):
            with torch.enable_grad():
                y = ctx.module(tile)
            torch.autograd.backward(y, gradient)
        return leaf.grad, None


class Block(nn.Module):
    """A unit that does what ``how`` says besides its layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def _inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        y = Tiled.apply(x, self._inside) if self.how == "tiled" else self._inside(x)
        if self.how in ("late", "weights"):
            loss = self.up(x.detach() if self.how == "weights" else x).square().mean()
            y = Aside.apply(y, partial(loss.backward, retain_graph=True))
        if self.how == "caught":
            loss = Aside.apply(self.up(x).square().mean(), fails)
            y = Aside.apply(y, lambda: caught(loss))
        if self.how == "inner":
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                x = x + torch.autograd.grad(self._inside(leaf).sum(), leaf)[0].detach()
        if self.how == "kept":
            self.kept = y = checkpoint(self._inside, x, use_reentrant=False)
        return x + self.down(y)


def fails() -> None:
    raise ZeroDivisionError


def caught(loss: Tensor) -> None:
    with pytest.raises(ZeroDivisionError):
        loss.backward()


class Net(nn.Module):
    """Four blocks, some of which are recomputed."""

    def __init__(self, how: str, recomputed: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(how) for _ in range(4))
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number in self.recomputed else block(x)
        return x


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, rank: int) -> None:
    for step in range(2):
        model(batch(rank, step).requires_grad_()).square().mean().backward()


def compare(model: Any, how: str) -> None:
    """Compare gradients with the mean of those of a plain model for each rank."""
    plains = [Net(how), Net(how)]
    for rank, plain in enumerate(plains):
        train(plain, rank)
    for name, parameter in model.named_parameters():
        truth = sum(plain.get_parameter(name).grad / 2 for plain in plains)
        torch.testing.assert_close(parameter.grad.full_tensor(), truth, rtol=1e-5, atol=1e-6)


STAGES: dict[str, dict[str, Any]] = {"3": {}, "not resharded": {"reshard_after_forward": False}, "1": {"zero_stage": 1}}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["late", "caught", "tiled", "inner"])
@ranks(2)
def test_gradients_are_those_of_the_plain_model(how: str, stage: str) -> None:
    model = yafsdp_cc.shard(Net(how), **STAGES[stage])
    train(model, dist.get_rank())
    compare(model, how)


@pytest.mark.parametrize("recomputed", [((), (2,)), ((1,), (3,)), ((0, 1, 2, 3), ())])
@ranks(2)
def test_blocks_with_inner_gradients_may_be_recomputed_on_one_rank(recomputed: tuple[tuple[int, ...], ...]) -> None:
    model = yafsdp_cc.shard(Net("inner", recomputed[dist.get_rank()]))
    train(model, dist.get_rank())
    compare(model, "inner")


@ranks(2)
def test_autocast_around_two_steps_takes_no_old_casts_of_recomputed_weights() -> None:
    found = []
    for recomputed in ((), (0, 1, 2, 3)):
        model: Any = yafsdp_cc.shard(Net("", recomputed))
        with torch.autocast("cpu", torch.bfloat16):
            model(batch(0)).float().square().mean().backward()
            model.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(-0.5)
            model(batch(0)).float().square().mean().backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@ranks(2)
def test_a_backward_within_a_backward_that_reaches_weights_alone_is_refused() -> None:
    model: Any = yafsdp_cc.shard(Net("weights"))
    with pytest.raises(RuntimeError, match=r"come to the weights of unit 'blocks.3', and to none of its inputs"):
        train(model, dist.get_rank())


@ranks(2)
def test_a_loss_on_an_activation_inside_of_a_checkpoint_is_refused_by_name() -> None:
    model: Any = yafsdp_cc.shard(Net("kept"))
    model(batch(0))
    with pytest.raises(NotImplementedError, match=r"blocks.0.norm.weight.*a backward runs a part of model again"):
        model.blocks[0].kept.square().mean().backward()


def freeze(name: str, model: Any) -> None:
    dict(model.named_parameters())[name].requires_grad_(False)


SKIPPED = "a backward of those between two steps is skipped"
DIFFERENCES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a replicated parameter is frozen": (
        partial(freeze, "blocks.1.norm.weight"),
        "without blocks.1.norm.weight, frozen",
    ),
    "a sharded parameter is frozen": (partial(freeze, "blocks.1.up.weight"), "without blocks.1.up.weight, frozen"),
    "no gradient is synchronized": (lambda model: model.set_requires_gradient_sync(False), "next: gather"),
    "gradients are divided": (lambda model: model.blocks[1].set_gradient_divide_factor(3.0), r"divided by \[3.0\]"),
    SKIPPED: (lambda model: None, "backwards awaited: 2"),
}


def differ(difference: str) -> str:
    """Have rank 1 do something else from the third step on; return the error that this ends in."""
    change, _ = DIFFERENCES[difference]
    model: Any = yafsdp_cc.shard(Net(""), zero_stage=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(5):
            differs = step == 2 and dist.get_rank() == 1
            if differs:
                change(model)
            loss = model(batch(dist.get_rank(), step)).square().mean()
            if not (differs and difference == SKIPPED):
                loss.backward()
            if step == 0 or difference != SKIPPED:
                optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_rank_that_differs_is_one_error_on_all(difference: str) -> None:
    for error in on_ranks(2, differ, difference, patience=5.0):
        assert re.search(f"What ranks did last:(.|\n)*{DIFFERENCES[difference][1]}", error), error
