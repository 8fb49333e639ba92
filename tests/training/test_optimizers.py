"""Torch's optimizers, clipping and gradient scaling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import CASES, WIDTH, Mlp, Transformer, next_token
from tests.ranks import on_ranks, ranks
from tests.twins import inputs, means, mine, same_gradients, same_weights, sgd, square, twins, whole

FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_optimizers_with_groups_by_name(kind: str, form: str) -> None:
    on_ranks(2, _optimizer, kind, FORMS[form])


@pytest.mark.parametrize(
    "kind", ["Adam", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"]
)
def test_pointwise_optimizers(kind: str) -> None:
    on_ranks(2, _optimizer, kind, {})


def _optimizer(kind: str, form: dict[str, Any]) -> None:
    model, plain = twins(Transformer)
    more = {"momentum": 0.9, "nesterov": True} if kind == "SGD" else {}
    optimizers = [
        getattr(torch.optim, kind)(_groups(each, decays=kind != "Rprop"), lr=1e-3, **form, **more)
        for each in (model, plain)
    ]
    for step in range(4):
        batches = CASES["transformer"].batches(2, step)
        next_token(model, mine(batches)).backward()
        truth = means(plain, next_token, batches)
        same_gradients(model, truth, within=1e-3)  # weights drift apart by rounding
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for name, parameter in plain.named_parameters():
            parameter.grad = truth[name]
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(
            whole(found) if hasattr(found, "full_tensor") else found, expected, rtol=1e-4, atol=0
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        same_weights(model, plain, within=2e-5)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("by_name", [False, True])
@ranks(2)
def test_lbfgs_decides_by_the_mean_of_the_ranks_losses(by_name: bool, search: str | None) -> None:
    model, plain = twins(lambda: Mlp().double())
    batches = [10 * (rank + 1) * each.double() for rank, each in enumerate(inputs())]
    ours, theirs = (
        torch.optim.LBFGS(each.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn=search)
        for each in (model, plain)
    )

    def our_closure() -> Tensor:
        ours.zero_grad()
        loss = square(model, mine(batches))
        loss.backward()
        return loss

    def their_closure() -> Tensor:
        theirs.zero_grad()
        loss: Tensor = sum(square(plain, x) for x in batches) / torch.tensor(2.0)
        loss.backward()
        return loss

    for _ in range(3):
        found = ours.step(closure=our_closure) if by_name else ours.step(our_closure)
        assert found.item() == pytest.approx(theirs.step(their_closure).item(), rel=1e-6)
    same_weights(model, plain, within=1e-6)


class Scaled(nn.Module):
    """Has a parameter without dimensions, as is a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale
        return out


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD"])
@ranks(2)
def test_state_of_a_plain_model_s_optimizer_is_loaded(kind: str) -> None:
    """Training goes on from the checkpoint of a single process, in the way of torch: two ``load_state_dict``."""
    model, plain = twins(Scaled, units=[nn.Linear])
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizers = [getattr(torch.optim, kind)(each.parameters(), lr=0.01, **more) for each in (model, plain)]
    for step in range(4):
        truth = means(plain, square, inputs(step=step))
        if step == 2:
            model.load_state_dict(plain.state_dict())
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        if step >= 2:
            square(model, mine(inputs(step=step))).backward()
        for name, parameter in plain.named_parameters():
            parameter.grad = truth[name]
        state = dict(optimizers[0].state[model.linear.weight])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 3:  # converted once
            assert all(value is optimizers[0].state[model.linear.weight][name] for name, value in state.items())
    same_weights(model, plain, within=1e-6)


def _groups(model: nn.Module, decays: bool) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    plain = [p for name, p in named.items() if name.endswith("bias") or "norm" in name]
    rest = [p for name, p in named.items() if not (name.endswith("bias") or "norm" in name)]
    decay = {"weight_decay": 0.1} if decays else {}
    return [{"params": rest, **decay}, {"params": plain, "lr": 3e-3}]


@ranks(2)
def test_grad_scaler_skips_the_step_on_every_rank() -> None:
    model, plain = twins(Mlp)
    optimizer = sgd(model)[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    batches = inputs()
    scaler.scale(square(model, mine(batches))).backward()
    scaler.unscale_(optimizer)
    same_gradients(model, means(plain, square, batches), within=1e-6)
    before = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2048.0
    assert not torch.equal(whole(model.leave.weight.detach()), before["leave.weight"])
    for bad in ("blocks.1.0.weight", "leave.bias", "enter.weight"):
        optimizer.zero_grad()
        before = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
        scaler.scale(square(model, mine(batches))).backward()
        local = model.get_parameter(bad).grad.to_local()
        if dist.get_rank() == 1 and local.numel():
            local.view(-1)[-1] = float("inf")  # one element, on one rank
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        scales = [0.0] * 2
        dist.all_gather_object(scales, scaler.get_scale())
        assert scales[0] == scales[1], bad
        if scales[0] < scale:
            for name, parameter in model.named_parameters():
                assert torch.equal(whole(parameter.detach()), before[name]), name
