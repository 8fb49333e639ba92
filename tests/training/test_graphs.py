"""Graphs other than one forward and its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from tests import internals
from tests.models import CASES, LENGTH, WIDTH, Mlp, Recursive, Transformer
from tests.ranks import ranks
from tests.twins import (
    added,
    agrees,
    inputs,
    means,
    mine,
    numbers,
    reload,
    same_gradients,
    sgd,
    square,
    step_both,
    trains_on,
    twins,
)


@pytest.mark.parametrize("reshard", [None, True, False])
@ranks(2)
def test_two_forwards_before_one_backward(reshard: bool | None) -> None:
    model, plain = twins(Mlp, reshard_after_forward=reshard)

    def both(each: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (each(x) for x in batch)
        return (one * other).mean()

    steps = [list(zip(inputs(step=step), inputs(step=step + 50), strict=True)) for step in range(3)]
    trains_on(model, plain, both, steps, within=1e-6)


@pytest.mark.parametrize("change", ["unshard", "setting"])
@ranks(2)
def test_a_rank_may_keep_the_graph_of_a_forward_without_a_backward(change: str) -> None:
    """Others have dropped it, and ranks gather the same in the same order nevertheless."""
    model, plain = twins(Mlp)
    optimizers = sgd(model, plain)
    kept = [model(mine(inputs()))]
    if dist.get_rank() == 0:
        kept.clear()
    for step in range(3):
        if change == "unshard":
            model.blocks[0][0].unshard()
            model.blocks[1][0].unshard(async_op=True)
        elif change == "setting":
            model.set_reshard_after_forward(bool(step))
        square(model, mine(inputs(step=step))).backward()
        truth = means(plain, square, inputs(step=step))
        same_gradients(model, truth)
        if step:  # the first time weights stay as they were in the forward that is kept
            step_both(model, plain, truth, optimizers)
            reload(plain, model)
        model.zero_grad()


@ranks(2)
def test_settings_wait_for_awaited_backwards() -> None:
    """Not for those of forwards whose graphs nobody has any more."""
    model, plain = twins(Mlp)
    model(mine(inputs()))
    before = internals.state_of(model)
    model.set_reshard_after_forward(False)
    loss = square(model, mine(inputs()))
    state = internals.state_of(model)
    assert state is not before
    model.set_reshard_after_forward(True)
    square(model, mine(inputs(step=1))).backward()
    assert internals.state_of(model) is state
    loss.backward()
    same_gradients(model, added(*(means(plain, square, inputs(step=step)) for step in (1, 0))))
    assert internals.state_of(model) is not state


@ranks(2)
def test_settings_of_a_frozen_model_whose_inputs_require_gradients_on_one_rank() -> None:
    model, plain = twins(lambda: Mlp().requires_grad_(False))
    before = internals.state_of(model)
    kept = model(mine(inputs()).requires_grad_(dist.get_rank() == 0))
    model.set_reshard_after_forward(False)
    agrees(model, plain, mine(inputs()))
    assert internals.state_of(model) is before  # whose backward may come on that rank
    del kept
    agrees(model, plain, mine(inputs()))
    assert internals.state_of(model) is not before


@ranks(2)
def test_settings_wait_for_gradients_of_small_parameters_that_are_kept() -> None:
    model, plain = twins(Mlp)
    for each in (model, plain):
        each.requires_grad_(False)
        each.leave.bias.requires_grad_()
    for step, is_last in enumerate((False, True)):
        model.set_requires_gradient_sync(is_last)
        square(model, mine(inputs(step=step))).backward()
        model.set_reshard_after_forward(is_last)
    same_gradients(model, added(*(means(plain, square, inputs(step=step)) for step in (0, 1))), within=1e-6)


@ranks(2)
def test_no_backward_is_awaited_behind_an_optimizer_step() -> None:
    """Also where nothing that is sharded is trained."""
    model, _ = twins(Mlp)
    model.requires_grad_(False)
    model.leave.bias.requires_grad_()
    assert "replicated" in repr(model.leave.bias)
    (optimizer,) = sgd(model)
    state = internals.state_of(model)
    model(mine(inputs()))
    square(model, mine(inputs())).backward()
    assert state.awaits_backward
    optimizer.step()
    assert not state.awaits_backward
    x = mine(inputs())
    model.requires_grad_(False)
    model(x)
    assert not state.awaits_backward
    loss = square(model, x.requires_grad_())
    assert state.awaits_backward
    loss.backward(retain_graph=True)
    assert state.awaits_backward
    loss.backward()
    assert not state.awaits_backward


@ranks(2)
def test_retain_graph_adds_the_gradient_again() -> None:
    model, plain = twins(Mlp)
    for step in range(2):
        batches = inputs(step=step)
        loss = square(model, mine(batches))
        loss.backward(retain_graph=True)
        truth = means(plain, square, batches)
        same_gradients(model, truth)
        with torch.no_grad():
            model(mine(batches))  # the slots are refilled in between
        loss.backward()
        same_gradients(model, added(truth, truth))
        model.zero_grad()


@ranks(2)
def test_two_losses_of_one_forward() -> None:
    model, plain = twins(Mlp)
    batches = inputs()
    out = model(mine(batches))
    out.sum().backward(retain_graph=True)
    out.square().mean().backward()
    one, other = means(plain, lambda m, x: m(x).sum(), batches), means(plain, square, batches)
    same_gradients(model, added(one, other))


@ranks(2)
def test_gradients_of_inputs_alone_leave_parameters_untouched() -> None:
    model, plain = twins(Mlp)
    x = mine(inputs()).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    expected = torch.autograd.grad(square(plain, twin), twin)[0]
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(square(model, x), x)[0], expected)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = square(model, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    truth = means(plain, square, inputs())
    same_gradients(model, truth)
    torch.autograd.grad(square(model, x), x)
    same_gradients(model, truth)


@ranks(2)
def test_gradients_of_inputs_leave_no_trace_while_gradients_are_held() -> None:
    model, plain = twins(Mlp)
    first, second, third = (inputs(step=step) for step in range(3))
    model.set_requires_gradient_sync(False)
    square(model, mine(first)).backward()
    x = mine(third).requires_grad_()
    torch.autograd.grad(square(model, x), x)
    model.set_requires_gradient_sync(True)
    torch.autograd.grad(square(model, x), x)
    square(model, mine(second)).backward()
    same_gradients(model, added(means(plain, square, first), means(plain, square, second)), within=1e-6)


@pytest.mark.parametrize("name", ["leave.weight", "leave.bias"])
@ranks(2)
def test_gradients_of_parameters_alone_are_refused_by_name(name: str) -> None:
    """A graph that leads to the gathered weights has no gradient for sharded parameters, whatever else it adds up."""
    model, plain = twins(Mlp)
    parameter, batches = model.get_parameter(name), inputs()
    penalised = square(model, mine(batches)) + parameter.square().sum()
    for loss in (square(model, mine(batches)), penalised):
        with pytest.raises(RuntimeError, match=rf"gradient of '{name}'.* and read \.grad"):
            torch.autograd.grad(loss, [parameter], allow_unused=True)
        for output in (loss, get_gradient_edge(loss)):
            with pytest.raises(RuntimeError, match=rf"gradient of '{name}'"):
                torch.autograd.backward(output, inputs=[parameter])
    (found,) = torch.autograd.grad(parameter.square().sum(), parameter)
    assert torch.equal(found.full_tensor(), 2 * plain.get_parameter(name).detach())
    assert all(parameter.grad is None for parameter in model.parameters())
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@ranks(2)
def test_a_weight_that_a_forward_keeps_has_the_gradient_of_this_rank() -> None:
    model, plain = twins(Mlp)
    kept = []
    model.leave.register_forward_hook(lambda module, _, __: kept.append(module.weight))
    loss = square(model, mine(inputs()))
    (found,) = torch.autograd.grad(loss, kept, retain_graph=True)
    (truth,) = torch.autograd.grad(square(plain, mine(inputs())), plain.leave.weight)
    torch.testing.assert_close(found, truth)
    loss.backward()
    same_gradients(model, means(plain, square, inputs()))


@ranks(2)
def test_parameters_are_parameters_whatever_has_run() -> None:
    model, _ = twins(Transformer)
    table, tokens = numbers(1, LENGTH, WIDTH, grad=True), mine(CASES["transformer"].batches(2))["tokens"]
    before = dict(model.named_parameters())

    def unchanged(after: str) -> None:
        for name, parameter in before.items():
            assert model.get_parameter(name) is parameter, (after, name)

    with torch.no_grad():
        model(tokens)
    unchanged("evaluation")
    square(model, tokens).backward()
    unchanged("a backward")
    square(model, tokens)
    unchanged("a forward alone")
    torch.autograd.grad(square(model.blocks[0], table), table)
    unchanged("a unit by itself")
    model.embed.register_forward_hook(lambda _, __, out: out + table)
    torch.autograd.grad(square(model, tokens), table)
    unchanged("gradients of an input")


@ranks(2)
def test_create_graph_is_refused_by_name() -> None:
    model, plain = twins(Mlp)
    with pytest.raises(RuntimeError, match="create_graph"):
        square(model, mine(inputs())).backward(create_graph=True)
    model.zero_grad()
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@ranks(2)
def test_a_gradient_penalty_is_refused_by_name() -> None:
    model, _ = twins(Mlp)
    x = mine(inputs()).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(square(model, x), x, create_graph=True)[0].square().sum().backward()


@ranks(2)
def test_a_unit_called_by_itself_trains_or_is_refused_by_name() -> None:
    model, plain = twins(Mlp, units=[nn.Sequential])
    batches = inputs()

    def alone(each: Any, x: Tensor) -> Tensor:
        return each.blocks[1](x).square().mean()

    try:
        loss = alone(model, mine(batches))
    except RuntimeError as refusal:
        said = str(refusal)
    else:
        said = ""
        loss.backward()
        same_gradients(model, means(plain, alone, batches))
    assert not said or "blocks.1" in said


@ranks(2)
def test_a_unit_that_calls_itself() -> None:
    model, plain = twins(lambda: nn.Sequential(Recursive(), Recursive()), units=[Recursive])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.leave = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, states: Any = None) -> tuple[Tensor, Any]:
        y, states = self.cells(x, states)
        return self.leave(y), states


@ranks(2)
def test_states_are_detached_in_place_between_two_parts_of_a_sequence() -> None:
    model, plain = twins(Recurrent, units=[nn.LSTM])

    def both(each: nn.Module, x: Tensor) -> Tensor:
        y, states = each(x)
        for state in states:
            state.detach_()
        z, _ = each(-x, states)
        return (y * z).square().mean()

    trains_on(model, plain, both, [[numbers(step, 3, WIDTH) for step in range(2)]], within=1e-6)
