"""Weights replaced, written or handed out behind the engine's back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from tests.models import WIDTH, Block, Mlp, stack
from tests.ranks import ranks
from tests.twins import agrees, inputs, mine, refusal, seeded, sgd, square, trains_on, twins, whole


def _assign_parameter(model: Any) -> None:
    model.leave.weight = nn.Parameter(torch.zeros(5, WIDTH))


def _tie_afterwards(model: Any) -> None:
    model.blocks[0][0].weight = model.blocks[1][0].weight


def _convert_a_part(model: Any) -> None:
    model.leave.double().float()


REPLACEMENTS = [_assign_parameter, _tie_afterwards, _convert_a_part]


@pytest.mark.parametrize("replace", REPLACEMENTS)
@ranks(2)
def test_a_replaced_parameter_is_used_or_refused_by_name(replace: Callable[[Any], None]) -> None:
    model, plain = twins(Mlp)
    x = mine(inputs())

    def run() -> None:
        replace(model)
        square(model, x).backward()
        sgd(model)[0].step()
        model.zero_grad()
        model(x)

    if refused := refusal(run):
        assert "weight" in refused, refused
        assert "grad_dtype" not in refused, refused
        return
    for name, parameter in model.named_parameters():
        value = whole(parameter.detach()) if hasattr(parameter, "full_tensor") else parameter.detach()
        plain.get_parameter(name).data.copy_(value)
    agrees(model, plain, x)


@ranks(2)
def test_functional_call_uses_the_given_parameters_or_is_refused() -> None:
    model, plain = twins(Mlp)
    x = mine(inputs())
    given = {name: torch.randn_like(parameter) for name, parameter in plain.named_parameters()}
    truth = functional_call(plain, given, x)
    found: list[Tensor] = []
    refused = refusal(lambda: found.append(functional_call(model, given, x)))
    assert "weight" in refused if refused else torch.equal(found[0], truth)
    assert "weight" not in model.leave.__dict__
    trains_on(model, plain, square, [inputs()])


class Gives(nn.Module):
    """Gives its layers weights that one of them has made."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        self.pair[1].weight = self.pair[0].weight

    def forward(self, x: Tensor) -> Tensor:
        made, layer = self.makes(x).mean(0), self.pair[0]
        weight = layer.weight * made
        both = functional_call(self.pair, {"0.weight": weight}, (x,)) + self.pair(x)
        several = torch.func.vmap(lambda each: functional_call(self.norm, {"weight": each}, (x,)))(weight).sum(0)
        parameters: Any = layer._parameters
        held = parameters["weight"]
        parameters |= {"weight": weight}
        nested = functional_call(layer, {"weight": weight.cos(), "bias": made}, (x,)) + layer(x)
        with pytest.raises(RuntimeError, match="shape"):
            functional_call(layer, {"weight": weight[:, 1:]}, (x,))
        nested += layer(x)
        layer._parameters.update(weight=held)
        return self.norm(both + several + nested + layer(x))


class GivesToUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Gives() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made, first, second, third = self.makes(x).mean(0), *self.units
        x = checkpoint(second, first(x), use_reentrant=False)
        same = functional_call(third, dict(third.named_parameters()), (x,))
        out: Tensor = functional_call(third, {"norm.bias": made, "makes.weight": made.diag()}, (x,)) + third(x) + same
        return out


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_a_forward_gives_layers_and_units_other_weights(stage: int) -> None:
    model, plain = twins(GivesToUnits, units=[Gives], zero_stage=stage)
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-5)
    with torch.no_grad():
        agrees(model, plain, mine(inputs()), within=1e-5)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Parametrizes(Mlp):
    """Parametrizes frozen weights for the time of a forward, as LoRA of PEFT does for ``target_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = [block[0] for block in self.blocks]
        for layer in self.frozen:
            layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.frozen:
            register_parametrization(layer, "weight", Doubled())
        out = super().forward(x)
        for layer in self.frozen:
            remove_parametrizations(layer, "weight", leave_parametrized=False)
        return out


@ranks(2)
def test_a_forward_parametrizes_frozen_weights_that_are_whole_and_others_are_refused() -> None:
    model, plain = twins(Parametrizes, units=[Parametrizes])
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.0\.weight' was deleted .*pass it in ignored_params"):
        model(mine(inputs()))
    other: Any = seeded(Parametrizes)
    yafsdp_cc.shard(other, ignored_params=(layer.weight for layer in other.frozen))
    agrees(other, plain, mine(inputs()))


class Prompt(nn.Module):
    """Hands out a part of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, rows: int) -> Tensor:
        return self.weight[:rows]


class Prompts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList(Prompt() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [prompt(8) for prompt in self.prompts]
        return torch.stack([torch.tanh(x @ part.t()) for part in parts])


@pytest.mark.parametrize("grad", [False, True])
@ranks(2)
def test_a_unit_may_return_its_own_weight(grad: bool) -> None:
    model, plain = twins(Prompts, units=[Prompt])
    with torch.set_grad_enabled(grad):
        agrees(model, plain, mine(inputs()))
    if grad:
        trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Clamped(nn.Module):
    """Edits its weight in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.05, 0.05)
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("grad", [False, True])
@ranks(2)
def test_an_edit_of_a_weight_in_forward_is_kept_or_refused_by_name(grad: bool) -> None:
    model, _ = twins(lambda: nn.Sequential(*(Clamped() for _ in range(3))), units=[Clamped])
    with torch.set_grad_enabled(grad):
        refused = refusal(lambda: model(mine(inputs())))
    kept = all(whole(parameter.detach()).abs().max() <= 0.05 for parameter in model.parameters())
    assert kept or "weight" in refused or "unit '0'" in refused, refused


class Counting(Block):
    """Counts its calls in a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(2)
def test_an_edit_of_a_small_parameter_in_forward_is_kept_or_refused_by_name(dtype: torch.dtype) -> None:
    model, _ = twins(lambda: nn.Sequential(*(Counting() for _ in range(3))), mp_policy=MixedPrecisionPolicy(dtype))
    with torch.no_grad():
        said = refusal(lambda: model(mine(inputs())))
    if dtype == torch.bfloat16:
        assert "a forward has written in place to one of '0." in said, said
    else:
        assert not said
        assert [whole(block.calls.detach()).item() for block in model] == [1, 1, 1]
    assert "inplace" in refusal(lambda: model(mine(inputs()))) or dtype == torch.bfloat16  # autograd's own check


class CountingAtLast(nn.Sequential):
    """Counts its calls in a scalar parameter, behind all that reads weights."""

    def __init__(self) -> None:
        super().__init__(*stack(3))
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self[2](self[1](self[0](x)))
        with torch.no_grad():
            self.calls.add_(1)
        return x


@ranks(2)
def test_an_edit_at_the_end_of_a_forward_is_explained() -> None:
    model = yafsdp_cc.shard(seeded(CountingAtLast), units=[Block])
    assert "change parameters outside of the forward" in refusal(lambda: model(mine(inputs())))
    with torch.no_grad():
        assert model(mine(inputs())).isfinite().all()


@ranks(2)
def test_max_norm_of_an_embedding_is_kept_or_refused_by_name() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(100, WIDTH, max_norm=0.5), *stack(3))

    def run(model: nn.Module) -> None:
        model(torch.arange(100)).square().mean().backward()

    refused = refusal(lambda: run(yafsdp_cc.shard(seeded(build), units=[Block])))
    if refused:
        assert "max_norm" in refused or "0.weight" in refused, refused
        return
    model, plain = twins(build, units=[Block])
    run(model), run(plain)
    torch.testing.assert_close(whole(model[0].weight.detach()), plain[0].weight.detach())


@ranks(2)
def test_sparse_gradients_are_right_or_refused_by_name() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(100, WIDTH, sparse=True), *stack(3))

    def run(model: nn.Module) -> None:
        model(torch.arange(5) + dist.get_rank()).square().mean().backward()

    model: list[Any] = []
    if refused := refusal(lambda: model.append(yafsdp_cc.shard(seeded(build), units=[Block])) or run(model[0])):
        assert "sparse" in refused, refused
        assert "0.weight" in refused or "'0'" in refused, refused
        return
    plain = seeded(build)
    for rank in range(2):
        (plain(torch.arange(5) + rank).square().mean() / 2).backward()
    torch.testing.assert_close(whole(model[0][0].weight.grad), plain[0].weight.grad.to_dense())
