"""Parameters that are not trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import yafsdp_cc
from tests.models import WIDTH, Mlp, Part
from tests.ranks import ranks
from tests.twins import inputs, mine, same_gradients, square, trains_on, twins


class Lora(nn.Module):
    """A frozen matrix with a trained low-rank addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


@ranks(2)
def test_frozen_parameters_get_no_gradient_bytes() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Lora(WIDTH) for _ in range(4)))

    model, plain = twins(build, units=[Lora])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])
    reduced = _reduced_bytes(model)
    for module in model:
        module.base.requires_grad_(True)
        assert module.base.weight.grad is None
    for module in plain:
        module.base.requires_grad_(True)
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)])
    frozen_bytes = 4 * sum(layer.base.weight.numel() for layer in plain)
    trained_bytes = 4 * sum(p.numel() for p in plain.parameters()) - frozen_bytes
    assert reduced <= trained_bytes + 4 * 4 * 2 * 2 * 32 * 4  # four units, padding of two pieces on each of two ranks
    assert _reduced_bytes(model) > reduced
    assert reduced < frozen_bytes


def _reduced_bytes(model: nn.Module) -> int:
    """Of one step."""
    before = yafsdp_cc.counters_of(model).reduced_bytes
    square(model, mine(inputs())).backward()
    model.zero_grad()
    found: int = yafsdp_cc.counters_of(model).reduced_bytes - before
    return found


@pytest.mark.parametrize("reshard", [None, False])
@ranks(2)
def test_frozen_weights_in_buffers_of_their_own_are_gathered_once(reshard: bool | None) -> None:
    def build() -> nn.Module:
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)))
        for block in blocks:
            block[0].requires_grad_(False)
        return blocks

    model, plain = twins(build, units=["*"], reshard_after_forward=reshard)
    one = WIDTH * WIDTH * 4 // 2  # what a rank sends for one matrix
    counters = yafsdp_cc.counters_of(model)
    sent = []
    for step in range(3):
        before = counters.gathered_bytes
        trains_on(model, plain, square, [inputs(step=step)])
        sent.append(counters.gathered_bytes - before)
    if reshard is False:
        assert sent == [8 * one, 4 * one, 4 * one]
        assert yafsdp_cc.plan_of(model).communication.gather_forward == 4 * one
    else:  # four blocks, and two of them again; the frozen halves of those two are still there in the next step
        assert sent == [12 * one, 10 * one, 10 * one]


@ranks(2)
def test_a_frozen_model_passes_gradients_to_its_input() -> None:
    model, plain = twins(lambda: Mlp().requires_grad_(False))
    x = mine(inputs()).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    square(model, x).backward()
    square(plain, twin).backward()
    assert torch.equal(x.grad, twin.grad)
    assert all(parameter.grad is None for parameter in model.parameters())
    flags = 8 * (len(list(model.parameters())) + 16)  # who used what, and whether ranks agree, to and fro
    assert yafsdp_cc.counters_of(model).reduced_bytes <= flags


@ranks(2)
def test_training_norms_and_biases_alone() -> None:
    """Nothing reaches the first unit's gate: its matrices are frozen and its input needs no gradient."""

    def build() -> nn.Module:
        model = nn.Sequential(*(Part(False, False) for _ in range(4)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or "bias" in name)
        return model

    model, plain = twins(build, units=[Part])
    trains_on(model, plain, square, [inputs(step=step) for step in range(4)])
    assert yafsdp_cc.counters_of(model).overflow_buffers == 0


@ranks(2)
def test_freezing_and_unfreezing_between_steps() -> None:
    model, plain = twins(Mlp)
    for frozen in (
        {"blocks.0.0.weight"},
        {"blocks.0.0.weight", "leave.bias", "enter.weight"},
        set(),
        {"blocks.1.2.bias"},
    ):
        for each in (model, plain):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(name not in frozen)
        trains_on(model, plain, square, [inputs(step=step) for step in range(2)])


@ranks(2)
def test_unfreezing_again_and_again_takes_memory_once() -> None:
    block = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Tanh(), nn.Linear(64, 64))
    model = yafsdp_cc.shard(nn.Sequential(block), units=[block])
    owned = []
    for step in range(6):
        block[0].requires_grad_(step % 2 == 1)
        model(torch.ones(2, 64)).sum().backward()
        owned.append(yafsdp_cc.counters_of(model).owned_bytes)
    assert owned[0] < owned[1] == owned[-1]


@ranks(2)
def test_unfreezing_between_micro_batches_is_refused() -> None:
    """The gradients of what was frozen would have no room beside those that are kept."""
    block = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Tanh(), nn.Linear(64, 64))
    model = yafsdp_cc.shard(nn.Sequential(block), units=[block])
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 64)).sum().backward()
    block[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'0\.0\.weight' was unfrozen while gradients of micro-batches are kept"):
        model(torch.ones(2, 64)).sum().backward()


class Switching(nn.Module):
    """Model that unfreezes a parameter in the middle of its forward."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self.inner, self.late = Mlp(), late
        self.get_parameter(late).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.enter(x)
        for block in self.inner.blocks:
            x = x + block(x)
        self.get_submodule(self.late.rpartition(".")[0]).requires_grad_(True)
        out: Tensor = self.inner.leave(x)
        return out


@ranks(2)
def test_what_is_frozen_between_a_forward_and_its_backward_gets_no_gradient() -> None:
    """A plain model skips a frozen parameter; other parameters of the same buffer are trained here."""
    model, plain = twins(Mlp)
    batches = inputs()
    losses = square(model, mine(batches)), sum(square(plain, x) for x in batches) / 2
    for each, loss in zip((model, plain), losses, strict=True):
        for name in ("blocks.0.0.weight", "blocks.1.2.bias", "leave.bias"):
            each.get_parameter(name).requires_grad_(False)
        loss.backward()
    same_gradients(model, {name: parameter.grad for name, parameter in plain.named_parameters()}, within=1e-6)


@pytest.mark.parametrize("late", ["inner.leave.bias", "inner.leave.weight"])
@ranks(2)
def test_unfreezing_within_a_forward_trains_or_is_refused_by_name(late: str) -> None:
    model, plain = twins(lambda: Switching(late), units=[nn.Sequential])
    batches = inputs()
    with pytest.raises(RuntimeError, match=f"'{late}' was unfrozen within the forward of the model"):
        square(model, mine(batches)).backward()
    for each in (model, plain):
        each.requires_grad_(True)
    trains_on(model, plain, square, [batches], within=1e-6)
