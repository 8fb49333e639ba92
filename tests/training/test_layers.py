"""Modules of torch that do more than hold parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from tests.models import WIDTH, Block
from tests.ranks import ranks
from tests.twins import agrees, inputs, mine, numbers, square, trains_on, twins

NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": weight_norm,
    "weight_norm, parametrized": parametrizations.weight_norm,
    "spectral_norm": spectral_norm,
    "spectral_norm, parametrized": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("name", NORMS)
@ranks(2)
def test_reparametrized_weights(name: str) -> None:
    model, plain = twins(lambda: nn.Sequential(*(Block(NORMS[name](nn.Linear(WIDTH, WIDTH))) for _ in range(3))))
    for each in (model, plain):
        each.eval()  # spectral norms advance their buffers while training, and the truth runs more forwards
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-5)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.cells(x)[0]
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@ranks(2)
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    options = {"bidirectional": True, "proj_size": WIDTH // 2, "num_layers": 2} if kind is nn.LSTM else {}
    model, plain = twins(lambda: nn.Sequential(*(Recurrent(kind, **options) for _ in range(3))))
    steps = [[numbers(2, 5, WIDTH, seed=10 * step + rank) for rank in range(2)] for step in range(2)]
    trains_on(model, plain, square, steps, within=1e-5)
    with torch.no_grad():
        agrees(model, plain, steps[0][0])


@pytest.mark.parametrize("norm", [weight_norm, parametrizations.weight_norm])
@ranks(2)
def test_recurrent_layers_with_weights_of_their_own_making(norm: Callable[..., nn.Module]) -> None:
    def build() -> nn.Module:
        layers = [Recurrent(nn.LSTM) for _ in range(3)]
        for layer in layers:
            norm(layer.cells, "weight_hh_l0")
        return nn.Sequential(*layers)

    model, plain = twins(build)
    steps = [[numbers(2, 5, WIDTH, seed=10 * step + rank) for rank in range(2)] for step in range(2)]
    trains_on(model, plain, square, steps, within=1e-5)


class Scaled(nn.Module):
    """Layer that reads numbers noted on its parameters, a large and a small one, as muP's shapes are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.gain, self.inner.bias.gain = 0.5, 0.25

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.inner(x)) * self.inner.weight.gain + self.inner.bias.gain
        return out


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16)])
@ranks(2)
def test_attributes_of_parameters_are_there_in_forwards(policy: MixedPrecisionPolicy) -> None:
    model, plain = twins(lambda: nn.Sequential(*(Scaled() for _ in range(3))), mp_policy=policy)
    steps = [inputs(step=step) for step in range(2)]
    if policy.param_dtype is None:
        trains_on(model, plain, square, steps, within=1e-6)
    else:
        square(model, mine(steps[0])).backward()
    with torch.no_grad():
        model(mine(steps[0]))


@ranks(2)
def test_the_fast_path_of_torch_s_transformer() -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    model, plain = twins(build)
    steps = [[numbers(2, 5, WIDTH, seed=10 * step + rank) for rank in range(2)] for step in range(3)]
    for _ in range(2):
        model.train(), plain.train()
        trains_on(model, plain, square, steps[:2], within=1e-5)
        model.eval(), plain.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                agrees(model, plain, mine(steps[2]), within=1e-5)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 6 for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH) / 6, "b": torch.ones(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.items:
            x = torch.tanh(x @ weight)
        return x @ self.named["a"] * self.named["b"] + x @ self.items[-1]


@ranks(2)
def test_lists_and_dicts_of_parameters() -> None:
    model, plain = twins(lambda: nn.Sequential(*(Lists() for _ in range(3))), units=[Lists])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)
