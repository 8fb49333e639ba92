"""``compression="auto"``: what is chosen is the same everywhere, and what the network asks for."""

from __future__ import annotations

import itertools
import logging
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.netlab.labs import lab_of
from tests.ranks import on_ranks
from tests.wire.choosing import chooser_of, step_of, switch
from tests.wire.ledger import Ledger, gradients, loss_of, net, sharded, unsaid
from yafsdp_cc import Compression
from yafsdp_cc.engine import chooser
from yafsdp_cc.engine.meter import Measured
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.wire import pace
from yafsdp_cc.wire.pace import Pace


def skewed() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    draws = random.Random(rank)
    chooser.PERIOD = chooser.SAMPLES = 2  # half of the choices are compared with others
    trial = pace.pace_of

    def slow(*arguments: Any) -> Pace:
        """The links as each rank may have found them: from fast to hopeless."""
        trial(*arguments)
        return Pace(draws.random() * 1e-4, 10 ** draws.uniform(-9, -5))

    pace.pace_of = slow
    model = sharded("auto")
    model[0].register_forward_hook(
        lambda _, __, seen: seen.register_hook(lambda _: time.sleep(0.005 * draws.random())) and None
    )
    ledger = Ledger(model, sharded(None))
    found = []
    for step in range(12):
        ledger.step(step)
        step_of(model, step)
        found.append(dict(yafsdp_cc.counters_of(model).chosen))
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, found)
    assert all(theirs == found for theirs in everybody)
    assert len({tuple(each.values()) for each in found}) > 1


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_measure_differently_choose_alike(world):
    on_ranks(world, skewed)


def on_a_fast_network() -> None:
    chooser.PERIOD = 2
    model, exact = sharded("auto"), sharded(None)
    before = yafsdp_cc.plan_of(model)
    pace.pace_of = lambda *_: Pace(1.5e-5, 1e-10)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, exact)]
    for step in range(10):
        for each in (model, exact):
            each.zero_grad()
            loss_of(each, step).backward()
        assert all(gradient.equal(gradients(exact)[name]) for name, gradient in gradients(model).items())
        for optimizer in optimizers:
            optimizer.step()
    counters = yafsdp_cc.counters_of(model)
    assert set(counters.chosen.values()) == {"fp32"}
    assert "links carry" in counters.why
    assert yafsdp_cc.plan_of(model).memory == before.memory
    assert counters.reduced_bytes == yafsdp_cc.counters_of(exact).reduced_bytes


def test_a_fast_network_is_left_alone():
    """Bit for bit the gradients of exact sums, and the bytes."""
    on_ranks(2, on_a_fast_network)
    on_ranks(4, on_a_fast_network)


def told_by_numbers() -> None:
    """Links of so many seconds a byte, and units that compute for 10 ms each."""
    model = sharded(Compression("auto", overrides={"2.weight": "int8"}))
    found = chooser_of(model)
    step_of(model, 0)
    units = root_of(model).units[::-1]
    found.meter.measured = lambda: [Measured(unit.flats[0], 0.01, 0) for unit in units]
    found._work = dict.fromkeys(("fp32", "int8", "int4"), 0.0)
    found._lasted.extend([0.05] * 4)
    exact = root_of(model).reductions.encoded_of(root_of(model).units[0].flats[0]).said_by(None)
    chosen = {}
    for share in (0.02, 0.6, 20.0):  # how long the first unit's sum is, beside 10 ms
        pace.pace_of = lambda *_, share=share: Pace(0.0, share * 0.01 / exact)
        problem = found.measure()
        assert problem is not None
        assert [unit.name for unit in problem.units] == ["4", "2", "0"]
        assert len(problem.legs[1].options) == 1  # as the user said
        assert problem.step < 0.06
        found.due = found.steps
        found.root.compressed.chosen.clear()
        found.problem = None
        found._choose()
        chosen[share] = dict(yafsdp_cc.counters_of(model).chosen)
    assert chosen[0.02] == {"0": "fp32", "4": "fp32"}
    assert chosen[0.6] == {"0": "int4", "4": "fp32"}  # the first layer's, whose sum nothing hides
    assert chosen[20.0] == {"0": "int4", "4": "int4"}


def test_the_end_of_the_backward_is_encoded_first():
    on_ranks(2, told_by_numbers)


def told_how_long_steps_take() -> None:
    """Links as fast as computation is slow, and steps that gain more than that by fewer bytes, or do not."""
    model = sharded("auto")
    found = chooser_of(model)
    step_of(model, 0)
    units = root_of(model).units[::-1]
    found.meter.measured = lambda: [Measured(unit.flats[0], 0.01, 0) for unit in units]
    found._work = dict.fromkeys(("fp32", "int8", "int4"), 0.0)
    exact = root_of(model).reductions.encoded_of(root_of(model).units[0].flats[0]).said_by(None)
    pace.pace_of = lambda *_: Pace(0.0, 0.4 * 0.01 / exact)

    def choose(took: float) -> list[str]:
        found._lasted.clear()
        found._lasted.append(took)
        found.due = found.steps
        found._choose()
        return list(yafsdp_cc.counters_of(model).chosen.values())

    last = ["int8", "fp32", "fp32"]
    assert choose(0.05) == last  # the first layer's, whose sum nothing hides
    for slower in (0.0, 0.004, -0.01):
        assert choose(0.05) == ["int4"] * 3  # to compare
        assert choose(0.05 - slower * dist.get_rank()) == last  # all go by the slowest
    assert found._contention == 0
    choose(0.05)
    more = choose(0.035)
    assert more == ["int8", "int4", "int4"]  # the last one's are beside nothing
    assert "a megabyte takes" in yafsdp_cc.counters_of(model).why
    assert choose(0.05) == ["int4"] * 3
    assert choose(0.05) == last  # that is no faster
    switch(model, ["int4"] * 3)
    assert choose(0.05) == last  # to compare with what the model asks for
    assert choose(0.065) == ["int4"] * 3
    pace.pace_of = lambda *_: Pace(0.0, 0.01 * 0.01 / exact)
    assert choose(0.05) == choose(0.02) == ["fp32"] * 3  # where nothing shows, nothing is compared


def test_what_bytes_take_from_computation_is_learned_from_steps():
    on_ranks(2, told_how_long_steps_take)


def within_budget() -> None:
    shares = {}
    for budget in (None, 1e-3, 1.5e-5):
        pace.pace_of = lambda *_: Pace(0.0, 1.0)
        model = sharded(Compression("auto", error_budget=budget))
        for step in range(5):
            step_of(model, step)
        shares[budget] = sorted(yafsdp_cc.counters_of(model).chosen.values())
    assert shares[None] == ["int4"] * 3
    assert shares[1e-3] == ["int8"] * 3
    assert 0 < shares[1.5e-5].count("int8") < 3
    assert "int4" not in shares[1.5e-5]


def test_no_more_is_left_out_than_was_allowed():
    on_ranks(2, within_budget)


def told() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("yafsdp_cc").addHandler(handler)
    logging.getLogger("yafsdp_cc").setLevel(logging.INFO)
    pace.pace_of = lambda *_: Pace(0.0, 1e-3)
    model = sharded("auto")
    for step in range(5):
        step_of(model, step)
    assert "int4 for 0, 2, 4" in str(yafsdp_cc.plan_of(model))
    counters = yafsdp_cc.counters_of(model)
    assert counters.chosen == {"0": "int4", "2": "int4", "4": "int4"}
    assert counters.owned_bytes == yafsdp_cc.plan_of(model).owned_bytes
    return records


def test_what_was_chosen_and_why_is_told_once():
    first, second = on_ranks(2, told)
    assert second == []
    assert len(first) == 1
    assert "auto' after 3 steps: links carry 0 Mbit/s each way" in first[0]
    assert first[0].endswith("int4 for 0, 2, 4")


def over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="'auto' on a mesh"):
        sharded("auto", mesh=mesh)
    model = sharded(Compression("auto", scope="shard", residual="fp32"), mesh=mesh)
    ledger = Ledger(model, sharded(None, mesh=mesh))
    pace.pace_of = lambda *_: Pace(0.0, 10 ** (dist.get_rank() - 5.0))
    for step in range(5):
        step_of(model, step)
    ledger.before = unsaid(model)
    for step in range(5):
        ledger.step(step)
    switch(model, ["fp32", "int8", "fp32"])
    ledger.step(5)
    assert yafsdp_cc.counters_of(model).chosen == {"0": "fp32", "2": "int8", "4": "fp32"}
    ledger.models[1].load_state_dict(model.state_dict())


def test_sums_within_replicas_may_be_chosen_for():
    on_ranks(4, over_replicas)


# On a real network


class Wide(nn.Module):
    """Two megabytes of blocks, of which one is small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (256, 256, 16, 256, 256)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def over_a_slow_network() -> dict[str, str]:
    model: Any = yafsdp_cc.shard(Wide(), units=[nn.Linear], compression="auto")
    for _ in range(5):
        model(torch.randn(8, 256)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.zero_grad()
    return dict(yafsdp_cc.counters_of(model).chosen)


def test_all_that_is_large_is_encoded_at_100_mbit():
    with lab_of(ranks=2, bandwidth="100mbit") as lab:
        for chosen in lab.run(over_a_slow_network):
            assert {chosen["layers.0"], chosen["layers.3"]} <= {"int8", "int4"}


# Refused


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"candidates": ()}, r"candidates=\(\): name the codecs"),
        ({"candidates": ("fp32", "int8")}, "exact sums are always among them"),
        ({"candidates": ("powersgd",)}, "'powersgd' sums factors that all ranks share"),
        ({"candidates": ("int7",)}, r"candidates=\('int7',\): there is no codec 'int7'"),
        ({"candidates": "int8"}, r"candidates='int8': write several in parentheses, and one as \('int8',\)"),
        ({"error_budget": 0.0}, "error_budget=0.0: a share of gradients' squares: more than 0, up to 1"),
        ({"error_budget": 2.0}, "error_budget=2.0: a share of gradients' squares: more than 0, up to 1"),
        ({"candidates": ("int8", "onebit"), "feedback": False}, "gradients='onebit' with feedback=False"),
        ({"weights": "auto"}, "weights='auto': codecs are chosen for gradients alone: take int8"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong, match):
    with pytest.raises(ValueError, match=match):
        Compression("auto", **wrong)


@pytest.mark.parametrize("idle", [{"error_budget": 0.01}, {"candidates": ("int8",)}])
def test_what_says_how_to_choose_is_refused_where_nothing_is_chosen(idle):
    (name,) = idle
    with pytest.raises(
        ValueError, match=f"{name}=.* 'auto' chooses, and gradients='int8' has nothing .* leave {name} out"
    ):
        Compression("int8", **idle)
    assert Compression("int8", overrides={"head*": "auto"}, **idle).named == {"int8", "auto"}


def refused_elsewhere() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net())
    with pytest.raises(ValueError, match="compress\\(\\) with gradients='auto': what shows of FSDP2's sums"):
        yafsdp_cc.compress(model, "auto")
    with pytest.raises(ValueError, match="GradientWire with gradients='auto'"):
        yafsdp_cc.GradientWire("auto")


def test_other_engines_have_no_auto():
    on_ranks(1, refused_elsewhere)


def alone() -> None:
    model = sharded("auto")
    for step in range(5):
        step_of(model, step)
    assert root_of(model).chooser is None
    assert yafsdp_cc.counters_of(model).chosen == {}


@pytest.mark.filterwarnings("ignore:shard")
def test_one_rank_has_nothing_to_choose():
    on_ranks(1, alone)
