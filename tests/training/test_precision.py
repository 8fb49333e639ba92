"""Weights of every dtype, computed and summed in others."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from tests import reference
from tests.models import CASES, WIDTH, Mlp, Tiny, Transformer, next_token
from tests.ranks import on_ranks, ranks
from tests.soak import also
from tests.twins import (
    Means,
    inputs,
    mine,
    reload,
    same_gradients,
    seeded,
    sgd,
    square,
    step_both,
    trains_on,
    twins,
    whole,
)


@pytest.mark.parametrize("reduce", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [2, also(4)])
@ranks("world")
def test_bf16_compute_sums_in_fp32_on_the_owner(world: int, reduce: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce, output_dtype=torch.float32)
    model, plain = twins(Transformer, mp_policy=policy)
    optimizers = sgd(model, plain)
    case = CASES["transformer"]
    for step in range(3):
        batches = case.batches(dist.get_world_size(), step)
        low = copy.deepcopy(plain).bfloat16()
        loss = next_token(model, mine(batches))
        value, by_rank = zip(*(_low_gradients(low, batch) for batch in batches), strict=True)
        assert loss.dtype == torch.float32
        assert loss.item() == mine(list(value))
        loss.backward()
        truth = {
            name: reference.mean_in_rank_order([None if g[name] is None else g[name].float() for g in by_rank])
            for name in by_rank[0]
        }
        same_gradients(model, truth)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)


def _low_gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, Means]:
    return reference.gradients(model, lambda: _fp32_loss(model, batch))


def _fp32_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).float().flatten(0, 1), batch["next"].flatten())


class Dtypes(nn.Module):
    """fp32, bf16 and fp64 weights side by side, and a table of integers that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.table = nn.Parameter(torch.arange(WIDTH) % 5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.high(x)) + self.low(x.bfloat16()) * self.scale
        return y[:, self.table] + y


@ranks(2)
def test_several_dtypes_in_one_model() -> None:
    model, plain = twins(lambda: nn.Sequential(Dtypes(), Dtypes(), nn.Linear(WIDTH, 3)), units=[Dtypes])
    for name, parameter in model.named_parameters():
        assert parameter.dtype == plain.get_parameter(name).dtype, name
    assert torch.equal(whole(model[0].table), plain[0].table)
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)])


@ranks(2)
def test_double_precision_is_not_lost_on_the_way() -> None:
    model, plain = twins(lambda: Mlp().double(), units=[nn.Sequential])
    batches = [x.double() for x in inputs()]
    square(model, mine(batches)).backward()
    by_rank = [reference.gradients(plain, lambda x=x: square(plain, x))[1] for x in batches]
    same_gradients(model, {name: (by_rank[0][name] + by_rank[1][name]) / 2 for name in by_rank[0]}, within=1e-14)


@pytest.mark.parametrize("world", [also(2), 4])
@ranks("world")
def test_scalars_empty_shards_and_parameters_of_no_elements(world: int) -> None:
    model, plain = twins(lambda: nn.Sequential(Tiny(), Tiny(), nn.Linear(WIDTH, 1)), units=[Tiny])
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        square(model, mine(inputs(step=step))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
@ranks(2)
def test_frozen_parameters_of_any_dtype(dtype: torch.dtype) -> None:
    for sync in (False, True):
        model, plain = twins(lambda: nn.Sequential(*(Odd(dtype) for _ in range(3))), sync_module_states=sync)
        trains_on(model, plain, square, [inputs()], within=1e-6)


class Odd(nn.Module):
    """Reads a frozen matrix and a frozen vector of an unusual dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        values = torch.arange(WIDTH * WIDTH).remainder(7).view(WIDTH, WIDTH)
        self.matrix = nn.Parameter(values.to(dtype, copy=True), requires_grad=False)
        self.vector = nn.Parameter(values[0].to(dtype, copy=True), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.complex64 if self.matrix.is_complex() else torch.float32
        scale = torch.view_as_real((self.matrix.to(wide) + self.vector.to(wide)).to(torch.complex64)).sum() / 1e4
        return x + torch.tanh(self.inner(x)) * scale


def test_overflow_in_half_precision_skips_the_step_everywhere() -> None:
    skipped = on_ranks(2, _overflow)
    assert skipped[0] == skipped[1]
    assert skipped[0][0] is True
    assert skipped[0][-1] is False


def _overflow() -> list[bool]:
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model, _ = twins(Mlp, mp_policy=half)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = sgd(model)[0]
    skipped = []
    for step in range(6):
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        x = mine(inputs(step=step)) * (1e3 if step < 2 and dist.get_rank() == 1 else 1.0)
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters(), strict=True)]
        skipped.append(all(same))
        assert all(whole(parameter.detach()).isfinite().all() for parameter in model.parameters())
    return skipped


@ranks(2)
def test_adam_on_parameters_of_half_precision_is_warned_of() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("yafsdp_cc").addHandler(handler)
    for dtype, kind, warns in (
        (torch.bfloat16, torch.optim.AdamW, True),
        (torch.bfloat16, torch.optim.SGD, False),
        (torch.float32, torch.optim.AdamW, False),
    ):
        messages.clear()
        model = yafsdp_cc.shard(seeded(Mlp).to(dtype))
        optimizer = kind(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(mine(inputs()).to(dtype)).square().sum().backward()
            optimizer.step()
        assert len(messages) == (warns and dist.get_rank() == 0), messages
        assert not messages or re.search("AdamW updates .*, which is torch.bfloat16: .* 1/256 .*fp32", messages[0])
