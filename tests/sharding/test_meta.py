"""Models built on the meta device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import yafsdp_cc
from tests.models import CASES, WIDTH, Tiny, Transformer, next_token
from tests.ranks import ranks
from tests.twins import refusal, same_weights, seeded, trains_on, whole
from yafsdp_cc.tensor.unwritten import mark_unwritten


@ranks(2)
def test_meta_device_construction() -> None:
    with torch.device("meta"):
        model = Transformer()
    model = yafsdp_cc.shard(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert 0.5 < whole(model.embed.weight).std() < 1.5  # as nn.Embedding initialises itself
    assert torch.equal(model.norm.weight.to_local(), torch.ones(WIDTH))
    plain = seeded(Transformer)
    with yafsdp_cc.whole_parameters(model, write=True), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(plain.get_parameter(name))
    same_weights(model, plain)
    trains_on(model, plain, next_token, [CASES["transformer"].batches(2, step) for step in range(2)])


@ranks(2)
def test_meta_device_construction_with_a_function() -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.25)

    with torch.device("meta"):
        model = nn.Sequential(*(Tiny() for _ in range(2)))
    with pytest.raises(
        ValueError, match=r"'0\.\w+' is on the meta device.*Tiny has no reset_parameters.*param_init_fn"
    ):
        yafsdp_cc.shard(model, units=[Tiny])
    with torch.device("meta"):
        model = nn.Sequential(*(Tiny() for _ in range(2)))
    yafsdp_cc.shard(model, units=[Tiny], param_init_fn=fill)
    assert all((whole(parameter) == 0.25).all() for parameter in model.parameters())


@ranks(2)
def test_what_was_loaded_is_not_initialised() -> None:
    def fill(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(2)

    loaded = {"0.weight": torch.full((WIDTH, WIDTH), 3.0), "1.weight": torch.full((WIDTH,), 5.0)}
    for function in (None, fill):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))
        kept = nn.Parameter(torch.full((WIDTH,), 9.0))
        model[2].bias = kept
        model.load_state_dict(loaded, strict=False, assign=True)
        model[1].register_parameter("bias", nn.Parameter(torch.ones(WIDTH)))  # so that its buffers alone are empty
        yafsdp_cc.shard(model, units=[model], ignored_params={kept}, param_init_fn=function, sync_module_states=True)
        state = yafsdp_cc.unshard_model(model).state_dict()
        held = loaded | {"1.bias": torch.ones(WIDTH), "2.bias": torch.full((WIDTH,), 9.0)}
        for name, value in held.items():  # a function may load other values itself
            assert state[name].equal(value if function is None else torch.full_like(value, 2)), name
        for name in ("1.running_var", "2.weight"):
            assert bool((state[name] == (1 if function is None else 2)).all()), name


class Masked(nn.Linear):
    """A layer whose ``reset_parameters`` writes a whole matrix, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril(), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)
        if "mask" in self._buffers:
            self.mask.copy_(torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


@ranks(2)
def test_buffers_of_what_was_loaded_are_initialised() -> None:
    plain = seeded(lambda: nn.Sequential(Masked(), Masked()))
    with torch.device("meta"):
        model = nn.Sequential(Masked(), Masked())
    model.load_state_dict(plain.state_dict(), assign=True)
    yafsdp_cc.shard(model, units=[Masked])
    assert torch.equal(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))


class SelfMade(nn.Linear):
    """A layer whose ``_init_weights``, unlike that of Hugging Face's models, is of itself alone."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.ones_(self.weight)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        self._init_weights()


@ranks(2)
def test_a_layer_that_initialises_itself_is_not_handed_to_its_own_method() -> None:
    with torch.device("meta"):
        model = nn.Sequential(SelfMade(), SelfMade())
    yafsdp_cc.shard(model, units=[SelfMade])
    assert torch.equal(model(torch.ones(2, WIDTH)), torch.full((2, WIDTH), float(WIDTH**2)))


# What nothing has written -------------------------------------------------------------------------------------------


class Rope(nn.Module):
    """Multiplies by a table that no state dict has; a module may have been told to write it again."""

    def __init__(self, rewrites: bool = False) -> None:
        super().__init__()
        self.register_buffer("freq", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.register_buffer("nothing", torch.empty(0), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool), persistent=False)
        if rewrites:
            self.reset_parameters = self.write

    def write(self) -> None:
        self.freq.copy_(torch.arange(WIDTH) / WIDTH)
        self.count.zero_()
        self.mask.fill_(True)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cos(self.freq) * self.mask


def roped(rewrites: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Rope(rewrites), nn.Linear(WIDTH, WIDTH, bias=False))


def on_meta(rewrites: bool = False) -> Any:
    with torch.device("meta"):
        return roped(rewrites)


def emptied(model: Any) -> Any:
    for each in (*model, model):
        yafsdp_cc.fully_shard(each)
    return model.to_empty(device="cpu")


def load(model: Any, leave_out: str = "-", **options: Any) -> None:
    state = {name: value for name, value in seeded(roped).state_dict().items() if leave_out not in name}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False, **options))


def by_numpy(model: Any) -> None:
    """Write memory itself, which no version counts."""
    for each in (*model.parameters(), *model.buffers()):
        local = each._local_tensor if hasattr(each, "_local_tensor") else each
        local.detach().numpy().fill(0)


def whole_state(model: Any) -> None:
    load(model)
    model[1].write()


WRITES: dict[str, Callable[[Any], object]] = {
    "state dict": whole_state,
    "init": lambda model: [nn.init.normal_(each, std=0.1) for each in model.parameters()] + [model[1].write()],
    "data": lambda model: [each.data.fill_(0.5) for each in model.parameters()] + [model[1].write()],
    "zeros": lambda model: [each.zero_() for each in (*model.parameters(), *model.buffers())],
    "numpy": by_numpy,
    "another buffer": lambda model: [load(model), model[1].write(), setattr(model[1], "freq", torch.ones(WIDTH))],
}
LEAVES: dict[str, tuple[Callable[[Any], object], str]] = {
    "nothing": (
        lambda model: None,
        r"parameter '0.weight' \(and 5 more: '2.weight', '0.bias', '1.freq', '1.count', '1.mask'\) has no values",
    ),
    "buffers that are not persistent": (load, r"buffer '1.freq' \(and 1 more: '1.mask'\) has no values"),
    "a weight": (lambda model: (load(model, "2.weight"), model[1].write()), "parameter '2.weight' has no values"),
    "a bias": (lambda model: (load(model, "0.bias"), model[1].write()), "parameter '0.bias' has no values"),
    "a number": (
        lambda model: (whole_state(model), mark_unwritten(model[1].count)),
        "buffer '1.count' has no values.*get_buffer",
    ),
    "a buffer on one rank": (
        lambda model: (load(model), dist.get_rank() == 0 or model[1].write()),
        r"buffer '1.freq' .*has no values",
    ),
}


def refused_or_run(model: Any) -> str:
    return refusal(lambda: model(torch.ones(2, WIDTH)).sum().backward())


@ranks(2, patience=60)
def test_what_has_values_is_not_refused() -> None:
    torch.manual_seed(0)
    for name, write in WRITES.items():
        model = emptied(on_meta())
        with torch.no_grad():
            write(model)
        assert refused_or_run(model) == "", name
    plain, model = seeded(roped), emptied(on_meta())
    whole_state(model)
    same_weights(model, plain)
    assert torch.equal(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))


@ranks(2, patience=60)
def test_what_nothing_has_written_is_named_on_every_rank() -> None:
    for name, (leave, told) in LEAVES.items():
        model = emptied(on_meta())
        with torch.no_grad():
            leave(model)
        found = refused_or_run(model)
        assert re.search(told, found), (name, found)
        with torch.no_grad():
            for each in (*model.parameters(), *model.buffers()):
                each.zero_()
        assert refused_or_run(model) == ""


@ranks(2, patience=60)
def test_shard_names_what_its_function_has_left_out() -> None:
    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    for sync in (False, True):
        model = yafsdp_cc.shard(on_meta(), units=["0", "2"], param_init_fn=init, sync_module_states=sync)
        assert re.search(r"buffer '1.freq' \(and 2 more: '1.count', '1.mask'\) has", refused_or_run(model))
        model[1].write()
        assert refused_or_run(model) == ""
    model = yafsdp_cc.shard(on_meta(rewrites=True), units=["0", "2"], sync_module_states=True)
    assert refused_or_run(model) == ""
