"""From one codec to another between steps, and back to exact sums: nothing is lost on the way."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import yafsdp_cc
from tests.compression.ledger import Ledger, gradients, loss_of, net, set_codecs, sharded, step_of, unsent
from tests.internals import flat_params, groups_of, stop_autotuner
from tests.ranks import on_ranks, ranks
from tests.soak import also
from yafsdp_cc import Compression

EVERY = ("fp32", "int8", "int4", "onebit", "bf16")
AUTO = Compression("auto", residual="fp32", candidates=EVERY[1:])


def untuned(compression: Any) -> Any:
    """A sharded model whose codecs change only by ``set_codecs``."""
    model = sharded(compression)
    stop_autotuner(model)
    return model


def switched() -> None:
    draws = random.Random(0)
    for told in ({}, {"carry": 0.5}, {"block": 64}):
        config = Compression("auto", residual="fp32", candidates=EVERY[1:], **told)
        model = untuned(config)
        ledger = Ledger(model, sharded(None))
        steps = 12 if told else 24
        for step in range(steps):
            codecs = [draws.choice(EVERY) for _ in groups_of(model)]
            set_codecs(model, codecs)
            assert list(yafsdp_cc.counters_of(model).chosen.values()) == codecs
            sent = yafsdp_cc.counters_of(model).reduced_bytes
            ledger.step(step, micro=3 if step % 4 == 1 and not told else 1)
            plan, counters = yafsdp_cc.plan_of(model), yafsdp_cc.counters_of(model)
            if step % 4 != 1:
                assert counters.reduced_bytes - sent == plan.communication.reduce + plan.communication.replicated
        set_codecs(model, ["fp32"] * 3)
        ledger.step(steps)
        ledger.check()
        assert not any(each.any() for each in unsent(model).values())  # all has been said


@pytest.mark.parametrize("world", [also(2), 4])
def test_nothing_is_lost_from_one_codec_to_another(world):
    on_ranks(world, switched)


def handed_over() -> None:
    for residual in ("fp32", "bf16", "int8"):
        model, exact = sharded(Compression("auto", residual=residual)), sharded(None)
        before = yafsdp_cc.plan_of(model)
        set_codecs(model, ["int4"] * 3)
        for step in range(3):
            loss_of(model, step).backward()
        model.zero_grad()
        due, held = unsent(model), yafsdp_cc.plan_of(model)
        assert any(each.any() for each in due.values())
        assert held.residual_bytes > 0 == before.residual_bytes
        set_codecs(model, ["fp32"] * 3)
        assert all(torch.allclose(each, due[name], rtol=1e-6, atol=1e-12) for name, each in unsent(model).items())
        for each in (model, exact):
            loss_of(each, 3).backward()
        for name, gradient in gradients(exact).items():
            late = due.get(name, torch.zeros(()))
            assert torch.allclose(gradients(model)[name], gradient + late, rtol=1e-5, atol=1e-8), name
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        loss_of(model, 4)
        plan = yafsdp_cc.plan_of(model)  # as it is again, the residuals gone
        assert plan.memory == before.memory
        assert plan.communication == before.communication
        assert yafsdp_cc.counters_of(model).owned_bytes == plan.owned_bytes


@pytest.mark.parametrize("residual", ["fp32", "int8"])
@ranks(2)
def test_what_waits_for_a_frozen_parameter_is_in_the_first_exact_sum_behind_it(residual: str) -> None:
    compression = Compression("auto", residual=residual, candidates=EVERY[1:])
    model: Any = yafsdp_cc.shard(net(), units=[nn.Sequential], compression=compression)
    stop_autotuner(model)
    set_codecs(model, ["int4"])
    for step in range(3):
        loss_of(model, step).backward()
        model.zero_grad()
    due, exact = unsent(model), sharded(None)
    model[2].weight.requires_grad_(False)
    set_codecs(model, ["fp32"])
    loss_of(model, 3).backward()
    model.zero_grad()
    waits = unsent(model)
    assert waits["2.weight"].equal(due["2.weight"])
    assert not any(waits[name].any() for name in ("0.weight", "4.weight"))
    model[2].weight.requires_grad_(True)
    for each in (model, exact):
        loss_of(each, 4).backward()
    late = gradients(model)["2.weight"] - gradients(exact)["2.weight"]
    assert torch.allclose(late, due["2.weight"], rtol=1e-5, atol=1e-8)
    assert not any(each.any() for each in unsent(model).values())


def test_what_was_still_to_be_said_is_in_the_next_exact_sum():
    on_ranks(2, handed_over)
    on_ranks(3, handed_over)


def assembled_anew() -> None:
    model = sharded(AUTO)
    ledger = Ledger(model, sharded(None))
    set_codecs(model, ["onebit", "fp32", "int4"])
    ledger.step(0)
    set_codecs(model, ["fp32", "onebit", "int4"])
    model.set_reshard_after_forward(False)  # another assembly goes on with the choice, and owes what this one does
    ledger.step(1)
    assert [flat.reduce_scatter.codec_name for flat in flat_params(model)] == ["fp32", "onebit", "int4"]
    ledger.step(2)
    ledger.check()
    set_codecs(model, ["onebit", "fp32", "int4"])  # the second one owes what it had to say
    due = unsent(model)
    for each in ledger.models:
        each.requires_grad_(False)
        each.set_reshard_after_forward(True)
        each[4].requires_grad_(True)
        loss_of(each, 3).backward()  # by an assembly that trains none but the last
        each.zero_grad()
        each.requires_grad_(True)
    now = unsent(model)
    assert all(now[name].equal(due[name]) for name in ("0.weight", "2.weight"))
    ledger.sums[0]["4.weight"] += due.get("4.weight", 0.0) - now["4.weight"]  # of the step that was not counted
    ledger.step(4)
    ledger.check()


def test_a_choice_outlives_an_assembly():
    on_ranks(2, assembled_anew)


def saved(folder: Any) -> None:
    model = untuned(AUTO)
    set_codecs(model, ["onebit", "fp32", "int4"])
    for step in range(4):
        step_of(model, step)
    set_codecs(model, ["fp32", "fp32", "int4"])  # the first one's is owed, the last one's in its residual
    residuals = unsent(model)
    assert {name for name, each in residuals.items() if each.any()} == {"0.weight", "4.weight"}
    yafsdp_cc.save(folder / "step", model)
    if dist.get_rank() == 0:
        torch.save(residuals, folder / "truth.pt")


def resumed(folder: Any, compression: Any, codecs: list[str] | None) -> None:
    truth = torch.load(folder / "truth.pt")
    model = sharded(compression)
    if codecs is not None:
        set_codecs(model, codecs)
        loss_of(model, 100).backward()  # residuals of its own, that are forgotten
        model.zero_grad()
    yafsdp_cc.load(folder / "step", model)
    now = unsent(model)
    for name, each in truth.items():
        assert torch.allclose(now[name], each, rtol=1e-5, atol=1e-9), name
    exact = sharded(None)
    yafsdp_cc.load(folder / "step", exact)
    ledger = Ledger(model, exact)
    for step in range(4):
        ledger.step(step)
    ledger.check()


@pytest.mark.filterwarnings("ignore:the checkpoint has residuals")
@pytest.mark.parametrize("readers", [also(2), 4])
@pytest.mark.parametrize("codecs", [None, ["fp32"] * 3, ["int4", "int4", "onebit"]])
def test_a_run_is_resumed_with_any_choice(readers, codecs, tmp_path):
    on_ranks(2, saved, tmp_path)
    on_ranks(readers, resumed, tmp_path, AUTO, codecs)
    if codecs is None:
        on_ranks(readers, resumed, tmp_path, Compression("int8", residual="fp32"), codecs)


class Skipping(nn.Module):
    """Of which not all is always used: one unit, or two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        seen: torch.Tensor = self.first(x) if skips else self.second(self.first(x))
        return seen


def unused() -> None:
    model: Any = yafsdp_cc.shard(Skipping(), units=[Skipping], compression=AUTO)
    set_codecs(model, ["onebit"])
    model(torch.randn(2, 64), False).square().mean().backward()
    model.zero_grad()
    set_codecs(model, ["fp32"])
    due = unsent(model)["second.weight"]
    model(torch.ones(2, 64), True).sum().backward()
    assert torch.allclose(model.second.weight.grad.full_tensor().double(), due, rtol=1e-5, atol=1e-9)
    model.zero_grad()
    model(torch.ones(2, 64), True).sum().backward()
    assert model.second.weight.grad is None


def owing() -> None:
    model: Any = yafsdp_cc.shard(Skipping(), units=[nn.Linear], compression=AUTO)
    set_codecs(model, ["onebit", "onebit"])
    for number, skips in enumerate((False, True, True, False, False)):
        model(torch.randn(2, 64), skips).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.zero_grad()
        if number == 0:
            set_codecs(model, ["fp32", "fp32"])
        model(torch.randn(2, 64), False)
        assert yafsdp_cc.plan_of(model).owned_bytes == yafsdp_cc.counters_of(model).owned_bytes, number


def test_what_a_unit_owes_that_is_not_used_is_planned_until_it_is_said():
    on_ranks(2, owing)


def test_what_is_owed_to_a_parameter_that_nobody_uses_is_said():
    on_ranks(2, unused)
