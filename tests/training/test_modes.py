"""Training under modes of autograd, and sharding under them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests.models import Block, Mlp, stack
from tests.ranks import ranks
from tests.twins import (
    agrees,
    inputs,
    means,
    mine,
    refusal,
    same_gradients,
    seeded,
    sgd,
    square,
    step_both,
    trains_on,
    twins,
    whole,
)


@pytest.mark.parametrize("where", ["around", "recomputed"])
@ranks(2)
def test_autocast(where: str) -> None:
    model, plain = twins(Mlp if where == "around" else Recomputed)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return out.float().square().mean()

    optimizers = sgd(model, plain)
    for step in range(3):
        loss(model, mine(inputs(step=step))).backward()
        truth = means(plain, loss, inputs(step=step))
        same_gradients(model, truth, within=1e-2)
        step_both(model, plain, truth, optimizers)
        for name, parameter in model.named_parameters():
            plain.get_parameter(name).data.copy_(whole(parameter.detach()))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for step in range(2):
            agrees(model, plain, mine(inputs(step=step)))


class Recomputed(Mlp):
    """Runs one block twice within a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        def middle(x: Tensor) -> Tensor:
            for index in (0, 1, 2, 0):
                x = x + self.blocks[index](x)
            return x

        out: Tensor = self.leave(checkpoint(middle, self.enter(x), use_reentrant=False))
        return out


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("how", ["on_cpu", "as_is", "detached"])
@ranks(2)
def test_hooks_on_saved_tensors(how: str) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hooks: Any = {
            "on_cpu": torch.autograd.graph.save_on_cpu,
            "as_is": lambda: torch.autograd.graph.saved_tensors_hooks(_identity, _identity),
            "detached": lambda: torch.autograd.graph.saved_tensors_hooks(torch.detach, _identity),
        }[how]
        with hooks():
            return (model(x) + model(2 * x)).square().mean()

    model, plain = twins(lambda: nn.Sequential(*(Block(Block()) for _ in range(4))), units=[Block])
    trains_on(model, plain, loss, [inputs(step=step) for step in range(2)], within=1e-6)


@ranks(2)
def test_anomaly_mode() -> None:
    model, plain = twins(Mlp)
    with torch.autograd.set_detect_anomaly(True):
        trains_on(model, plain, square, [inputs()])


@ranks(2)
def test_shard_without_grad_mode() -> None:
    with torch.no_grad():
        model, plain = twins(Mlp)
    trains_on(model, plain, square, [inputs()])


@ranks(2)
def test_shard_in_inference_mode_trains_or_says_what_to_do() -> None:
    model, plain = seeded(Mlp), seeded(Mlp)
    with torch.inference_mode():
        refused = refusal(lambda: yafsdp_cc.shard(model))
    if refused:
        assert "inference_mode" in refused, refused
    else:
        trains_on(model, plain, square, [inputs()])


@pytest.mark.parametrize("first", [True, False])
@ranks(2)
def test_torch_func_is_refused(first: bool) -> None:
    model, plain = twins(stack, reshard_after_forward=False)
    x = mine(inputs())
    if not first:
        model(x)
    for transform in (
        lambda: torch.func.grad(lambda x: model(x).square().sum())(x),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.vmap(model)(x),
    ):
        with pytest.raises(NotImplementedError, match=r"a transform of torch\.func .* around a sharded .*Sequential"):
            transform()
    trains_on(model, plain, square, [inputs()])


@ranks(2)
def test_forward_mode_differentiation_is_right_or_refused_by_name() -> None:
    model, plain = twins(stack)
    x, direction = mine(inputs()), mine(inputs(step=1))

    def tangent(each: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            found: Tensor = forward_ad.unpack_dual(each(forward_ad.make_dual(x, direction))).tangent
            return found.clone()

    with torch.no_grad():
        torch.testing.assert_close(tangent(model), tangent(plain))
    with pytest.raises(NotImplementedError, match=r"forward-mode differentiation .* under torch\.no_grad"):
        tangent(model)
    trains_on(model, plain, square, [inputs()])


@pytest.mark.parametrize("first", [True, False])
@ranks(2)
def test_tracing_and_export_are_refused_by_name(first: bool) -> None:
    model, plain = twins(stack)
    x = mine(inputs())
    if not first:
        model(x)
    for trace in (lambda: torch.jit.trace(model, x), lambda: torch.export.export(model, (x,))):
        with pytest.raises(NotImplementedError, match=r"of a sharded .*Sequential.*unshard_model"):
            trace()
    trains_on(model, plain, square, [inputs()])
