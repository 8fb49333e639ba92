"""Parameters that a forward leaves out, on some ranks or on all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models import WIDTH
from tests.ranks import ranks
from tests.soak import also
from tests.twins import added, inputs, means, mine, same_gradients, trains_on, twins


class Optional(nn.Module):
    """Uses one of its two matrices, or both, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: str) -> Tensor:
        y = self.always(x)
        if "1" in use:
            y = y + self.one(x)
        if "2" in use:
            y = y + self.other(x)
        return torch.tanh(y)


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Optional() for _ in range(3))

    def forward(self, x: Tensor, uses: list[str]) -> Tensor:
        for block, use in zip(self.blocks, uses, strict=True):
            x = block(x, use)
        return x


def used(model: nn.Module, batch: tuple[Tensor, list[str]]) -> Tensor:
    return model(*batch).square().mean()


@pytest.mark.parametrize("world", [also(2), 4])
@ranks("world")
def test_parameters_unused_on_all_or_some_ranks(world: int) -> None:
    model, plain = twins(Options, units=[Optional])
    everywhere = [["12", "12", "12"]] * world
    nowhere = [["", "1", "2"]] * world
    first_only = [["1", "2", "12"]] + [["2", "", ""]] * (world - 1)
    last_only = [["", "", ""]] * (world - 1) + [["12", "1", "2"]]
    steps = [everywhere, nowhere, first_only, last_only, nowhere, everywhere]
    trains_on(model, plain, used, [list(zip(inputs(step=s), uses, strict=True)) for s, uses in enumerate(steps)])


class Choice(nn.Module):
    """All that is trained may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.extra = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, use: str) -> Tensor:
        y = self.base(x)
        return torch.tanh(y + self.extra(x) if use else y)


class Choices(nn.Module):
    """An entry that is frozen, units of choice, and an end that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Choice() for _ in range(3))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, uses: list[str]) -> Tensor:
        x = self.enter(x)
        for block, use in zip(self.blocks, uses, strict=True):
            x = block(x, use)
        out: Tensor = self.leave(x)
        return out


@pytest.mark.parametrize("first", [["", "x", "x"], ["", "", "x"], ["x", "", ""], ["", "x", ""], ["", "", ""]])
@ranks(2, timeout=30)
def test_ranks_that_use_nothing_of_a_unit_that_others_train(first: list[str]) -> None:
    """No gradient reaches a unit on the first rank, and so none of its gates runs there."""
    model, plain = twins(Choices, units=[Choice])
    uses = [first, ["x", "x", "x"]]
    trains_on(model, plain, used, [list(zip(inputs(step=step), uses, strict=True)) for step in range(2)])


@ranks(2)
def test_an_unused_parameter_keeps_an_accumulated_gradient() -> None:
    model, plain = twins(Options, units=[Optional])
    steps = [[["1", "12", ""]] * 2, [["2", "", ""], ["", "", "1"]]]
    batches = [list(zip(inputs(step=s), uses, strict=True)) for s, uses in enumerate(steps)]
    for batch in batches:
        used(model, mine(batch)).backward()
    same_gradients(model, added(*(means(plain, used, batch) for batch in batches)))


@ranks(2)
def test_a_parameter_that_one_rank_uses_in_one_of_several_reduced_micro_batches() -> None:
    model, plain = twins(Options, units=[Optional])
    first = [["12", "1", "12"], ["2", "1", ""]]
    second = [["", "1", "2"], ["1", "1", "2"]]
    for step in range(2):
        batches = [
            list(zip(inputs(step=2 * step + part), uses, strict=True)) for part, uses in enumerate((first, second))
        ]
        for part, batch in enumerate(batches):
            model.set_is_last_backward(part == 1)
            used(model, mine(batch)).backward()
            if step == 1 and part == 0:
                model.zero_grad()  # also of what this rank has not used
        same_gradients(model, added(*(means(plain, used, batch) for batch in batches[step:])), 1e-6)
        model.zero_grad()


class Prompted(nn.Module):
    """A small trained vector before frozen units, which only some forwards add."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.blocks[:3].requires_grad_(False)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = x + self.prompt if uses else x
        for block in self.blocks:
            x = block(x)
        return x


@ranks(2, timeout=30)
def test_a_small_parameter_before_frozen_units_that_one_rank_uses() -> None:
    model, plain = twins(Prompted)
    steps = [
        list(zip(inputs(step=step), uses, strict=True)) for step, uses in enumerate([[True, False], [False, True]])
    ]
    trains_on(model, plain, lambda m, batch: m(*batch).square().mean(), steps, within=1e-6)
