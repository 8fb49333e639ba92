"""Compiled forwards, and compiled steps of optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import yafsdp_cc
from tests.models import CASES, Attention, Transformer, next_token, stack
from tests.ranks import ranks
from tests.soak import also
from tests.twins import (
    agrees,
    inputs,
    means,
    mine,
    reload,
    same_gradients,
    seeded,
    sgd,
    square,
    step_both,
    trains_on,
    twins,
)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backend", [also("eager"), "aot_eager"])
@ranks(2)
def test_a_compiled_forward_has_no_graph_break(backend: str, when: str) -> None:
    def compiled(model: Any) -> nn.Module:
        first, *others = model.blocks
        first.forward = torch.compile(first.forward, backend=backend, fullgraph=True)
        for block in others:
            block.compile(backend=backend, fullgraph=True)  # with its hooks
        return model

    model, plain = seeded(Transformer), seeded(Transformer)
    if when == "before":
        model = yafsdp_cc.shard(compiled(model), units=[Attention])
    else:
        model = compiled(yafsdp_cc.shard(model, units=[Attention]))
    trains_on(model, plain, next_token, [CASES["transformer"].batches(2, step) for step in range(3)], within=1e-6)


@ranks(2)
def test_a_model_compiled_as_a_whole() -> None:
    model, plain = twins(stack)
    compiled: Any = torch.compile(model, backend="eager")
    for step in range(2):
        square(compiled, mine(inputs(step=step))).backward()
        truth = means(plain, square, inputs(step=step))
        same_gradients(model, truth, within=1e-5)
        step_both(model, plain, truth, sgd(model, plain))
        reload(plain, model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            agrees(compiled, plain, mine(inputs()))


@ranks(2)
def test_a_compiled_step_is_that_of_plain_parameters_or_refused_by_name() -> None:
    """Hooks on steps are on those of every optimizer of the process."""
    model, plain = twins(stack)
    optimizer, other = sgd(model, plain)
    for each in (model, plain):
        square(each, mine(inputs())).backward()
    weight: Any = next(plain.parameters())
    expected = weight.detach() - 0.1 * weight.grad
    torch.compile(other.step, backend="eager")()
    torch.testing.assert_close(weight.detach(), expected)
    for step in (optimizer.step, lambda: optimizer.step()):
        with pytest.raises(NotImplementedError, match=r"the steps of this SGD, over '0\..*uncompiled"):
            torch.compile(step, backend="eager")()
    optimizer.step()
