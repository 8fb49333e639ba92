"""``compression="auto"``: the queue model against a simulator and against every choice, and the tuner on real ranks."""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.compression.ledger import Ledger, gradients, loss_of, net, set_codecs, sharded, step_of, unsent
from tests.internals import autotuner_of
from tests.internals import groups_of as param_groups_of
from tests.netlab.labs import lab_of
from tests.ranks import on_ranks
from yafsdp_cc import Compression
from yafsdp_cc.compression import autotune
from yafsdp_cc.compression.autotune import (
    BackwardTimer,
    CodecCost,
    GroupCosts,
    LinkCost,
    adjust_codecs,
    backward_seconds,
    choose_codecs,
    total_error,
)

# The queue model

KINDS = ("two buffers", "a buffer each", "mixed")


def groups_of(draws: random.Random, kind: str, most: int = 6) -> list[GroupCosts]:
    """Return the costs of a random model."""
    codecs = ((4.0, 0.0), (1.0, 4e-5), (0.5, 0.014))[: draws.choice((2, 3))]
    per_byte, encodes = draws.uniform(0.1, 1.5), draws.random() < 0.5
    groups = []
    for index in range(draws.randrange(1, most + 1)):
        size = draws.choice((1, 1, 1, 2, 5))
        costs = tuple(
            CodecCost(
                str(number),
                0.01 + per_byte * size * width,
                size * 0.02 * (1 + number) if encodes else 0.0,
                size * error,
            )
            for number, (width, error) in enumerate(codecs)
        )
        waits = {"two buffers": index - 2, "a buffer each": -1, "mixed": draws.choice((-1, index - 2, index - 3))}
        groups.append(GroupCosts(size * draws.uniform(0.5, 2), costs, max(waits[kind], -1)))
    return groups


def simulated(groups: list[GroupCosts], picks: list[int]) -> float:
    """Event by event: one thread, one link that serves in order, and reduces whose end frees a buffer."""
    costs = [group.codecs[pick] for group, pick in zip(groups, picks, strict=True)]
    finished: set[int] = set()
    waiting: list[int] = []
    events: list[tuple[float, int, str, int]] = []
    order, free, index, state, now = itertools.count(), True, 0, "idle", 0.0

    def after(duration: float, what: str, which: int) -> None:
        heapq.heappush(events, (now + duration, next(order), what, which))

    while True:
        if (
            index < len(groups)
            and state == "idle"
            and (groups[index].waits_for < 0 or groups[index].waits_for in finished)
        ):
            state = "computes"
            after(groups[index].compute, "computed", index)
        # The thread encodes, and does so when the reduce before has finished.
        if (
            index < len(groups)
            and state == "has computed"
            and (not costs[index].host or {index - 1} <= finished | {-1})
        ):
            state = "encodes"
            after(costs[index].host, "encoded", index)
        if free and waiting:
            free = False
            which = waiting.pop(0)
            after(costs[which].network, "reduced", which)
        if not events:
            return now
        now, _, what, which = heapq.heappop(events)
        if what == "computed":
            state = "has computed"
        elif what == "encoded":
            waiting.append(which)
            index, state = index + 1, "idle"
        else:
            finished.add(which)
            free = True


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_takes_as_long_as_simulated(kind):
    draws = random.Random(0)
    for _ in range(400):
        groups = groups_of(draws, kind, most=12)
        picks = [draws.randrange(len(group.codecs)) for group in groups]
        assert backward_seconds(groups, picks) == pytest.approx(simulated(groups, picks), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_is_as_good_as_any(kind):
    """Never above the tolerance, but for rare queues; the error close to the least; both within any budget."""
    draws = random.Random(2)
    found = least = 0.0
    late = 0
    for _ in range(300):
        groups, tolerance = groups_of(draws, kind), draws.choice((0.0, 0.05, 0.5))
        every = list(itertools.product(*[range(len(group.codecs)) for group in groups]))
        shortest = min(backward_seconds(groups, picks) for picks in every)
        limit = (shortest + tolerance) * (1 + 1e-6)
        picks = choose_codecs(groups, tolerance)
        late += backward_seconds(groups, picks) > limit
        assert backward_seconds(groups, picks) <= 1.05 * limit
        found += total_error(groups, picks)
        least += min(total_error(groups, each) for each in every if backward_seconds(groups, each) <= limit)
        budget = draws.uniform(0, 1.2) * sum(group.codecs[-1].error for group in groups)
        for each in (choose_codecs(groups, 0.01, budget), adjust_codecs(groups, picks, 0.01, budget)):
            assert total_error(groups, each) <= budget
    assert late <= (3 if kind == "a buffer each" else 0)
    assert found <= 1.01 * least


@pytest.mark.parametrize("ratio", [0.9, 1.5, 2.0, 4.0])
def test_equal_layers(ratio):
    """Layers compute for b seconds and reduce in p exact or q encoded.

    With a buffer each the last ones are encoded, as few as n p − k (p − q) ≤ (n − 1) b + tolerance allows. With two
    buffers nothing queues: the last one is encoded, and each of the others if it is exposed by itself.
    """
    n, b = 48, 1.0
    p, q = ratio * b, ratio * b / 4
    costs = CodecCost("fp32", p), CodecCost("int8", q, error=4e-5)
    queue = [GroupCosts(b, costs)] * n
    picks = choose_codecs(queue, b / 10)
    floor = max(q, n * q - (n - 1) * b)
    least = -(-(n * p - (n - 1) * b - floor - b / 10) // (p - q)) if p > b else 1
    assert sum(picks) <= least + 1
    assert picks == sorted(picks)
    exposed = backward_seconds(queue, picks) - sum(group.compute for group in queue)
    assert exposed <= floor + b / 10 + 1e-9
    buffers = [GroupCosts(b, costs, max(index - 2, -1)) for index in range(n)]
    assert sum(choose_codecs(buffers, b / 1000)) == (n if p > b else 1)


def test_the_end_of_the_backward_is_encoded_first():
    """The embedding, whose reduce nothing hides; then what is large beside the computation after it."""
    costs = CodecCost("fp32", 0.5), CodecCost("int8", 0.125, error=4e-5), CodecCost("int4", 0.06, error=0.014)
    groups = [GroupCosts(1.0, costs, max(index - 2, -1)) for index in range(6)]
    assert choose_codecs(groups, 0.5) == [0] * 6
    assert choose_codecs(groups, 0.07) == [0, 0, 0, 0, 0, 1]
    assert choose_codecs(groups, 0.001) == [0, 0, 0, 0, 0, 2]
    groups[3] = groups[3]._replace(codecs=tuple(cost._replace(network=3 * cost.network) for cost in costs))
    assert choose_codecs(groups, 0.07) == [0, 0, 0, 1, 0, 1]


def test_a_codec_stays_where_a_tenth_decides():
    def groups(network: float) -> list[GroupCosts]:
        costs = CodecCost("fp32", network), CodecCost("int8", network / 4, error=4e-5)
        return [GroupCosts(1.0, costs), GroupCosts(1.0, (CodecCost("", 0.1),))]

    assert choose_codecs(groups(0.95)) == [0, 0]
    assert choose_codecs(groups(1.05)) == [1, 0]
    for network in (0.95, 1.05):
        assert adjust_codecs(groups(network), [0, 0]) == [0, 0]
        assert adjust_codecs(groups(network), [1, 0]) == [1, 0]
    assert adjust_codecs(groups(1.2), [0, 0]) == [1, 0]
    assert adjust_codecs(groups(0.8), [1, 0]) == [0, 0]


# The timer


def test_waits_and_reduces_are_no_computation(monkeypatch):
    clock = itertools.accumulate(itertools.count())  # 0, 1, 3, 6, 10, 15, ...: each interval is another
    timer: Any = BackwardTimer()
    monkeypatch.setattr(timer, "_now", lambda: float(next(clock)))

    def backward(*groups: str, ends: bool = True) -> None:
        timer.before_backward()
        for group in groups:
            timer.before_wait()
            timer.after_wait()
            timer.before_reduce(group)
            timer.before_wait()  # for the reduce before
            timer.after_wait()
            timer.after_reduce(group)
        if ends:
            timer.after_backward()
        timer.before_wait()
        timer.after_wait()

    backward("a", "b")
    assert timer.medians() == []
    timer.enabled = True
    backward("a", "b")  # 0 | 1, 3 | 6, 10 reduced | 15, 21 | 28, ...
    assert timer.medians() == [("a", 1 + 3), ("b", 5 + 7)]
    backward("a", ends=False)
    assert len(timer.medians()) == 2  # an exception ended it
    backward("b", "a")
    assert [group for group, _ in timer.medians()] == ["b", "a"]
    timer.clear()
    assert timer.medians() == []


# On ranks


def skewed() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    draws = random.Random(rank)
    autotune.PERIOD = 2
    trial = autotune.measure_link

    def slow(*arguments: Any) -> LinkCost:
        """The links as each rank may have found them: from fast to hopeless."""
        trial(*arguments)
        return LinkCost(draws.random() * 1e-4, 10 ** draws.uniform(-9, -5))

    autotune.measure_link = slow
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
    autotune.PERIOD = 2
    model, exact = sharded("auto"), sharded(None)
    before = yafsdp_cc.plan_of(model)
    autotune.measure_link = lambda *_: LinkCost(1.5e-5, 1e-10)
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


def as_of_many_ranks() -> dict[str, float]:
    model = sharded("auto")
    flats = [flat for group in param_groups_of(model) for flat in group.flats]
    with mock.patch.object(autotune, "_TRIAL", 100):
        return autotuner_of(model)._measure_work(flats)


def test_with_many_ranks_codecs_are_tried_on_a_block_each():
    """A block for each rank is more than ``_TRIAL`` with 300 ranks and blocks of 4096."""
    (work, _) = on_ranks(2, as_of_many_ranks)
    assert work["int8"] > 0


def told_by_numbers() -> None:
    """Links of so many seconds a byte, and groups that compute for 10 ms each."""
    model = sharded(Compression("auto", overrides={"2.weight": "int8"}))
    tuner = autotuner_of(model)
    step_of(model, 0)
    groups = param_groups_of(model)[::-1]
    tuner.timer.medians = lambda: [(group.name, 0.01) for group in groups]
    tuner._work = dict.fromkeys(("fp32", "int8", "int4"), 0.0)
    tuner._step_seconds.extend([0.05] * 4)
    exact = groups[-1].flats[0].reduce_scatter.bytes_with("fp32")
    chosen = {}
    for share in (0.02, 0.6, 20.0):  # seconds of the first group's exact reduce, in multiples of 10 ms
        autotune.measure_link = lambda *_, share=share: LinkCost(0.0, share * 0.01 / exact)
        tuner.tune()
        assert [group.name for group in tuner.last.groups] == ["4", "2", "0"]
        assert [len(costs.codecs) for costs in tuner.last.costs] == [3, 1, 3]  # "2" has the user's codec
        assert tuner.last.step < 0.06
        chosen[share] = dict(yafsdp_cc.counters_of(model).chosen)
    assert chosen[0.02] == {"0": "fp32", "4": "fp32"}
    assert chosen[0.6] == {"0": "int4", "4": "fp32"}  # the first layer's, whose reduce nothing hides
    assert chosen[20.0] == {"0": "int4", "4": "int4"}


def test_what_is_exposed_is_encoded():
    on_ranks(2, told_by_numbers)


def within_budget() -> None:
    shares = {}
    for budget in (None, 1e-3, 1.5e-5):
        autotune.measure_link = lambda *_: LinkCost(0.0, 1.0)
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
    autotune.measure_link = lambda *_: LinkCost(0.0, 1e-3)
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
    autotune.measure_link = lambda *_: LinkCost(0.0, 10 ** (dist.get_rank() - 5.0))
    for step in range(5):
        step_of(model, step)
    ledger.before = unsent(model)
    for step in range(5):
        ledger.step(step)
    set_codecs(model, ["fp32", "int8", "fp32"])
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


def test_all_that_is_large_is_encoded_at_10_mbit():
    """A block sends exact gradients for 0.2 s: no pause of a shared machine is as long, so none hides them."""
    with lab_of(ranks=2, bandwidth="10mbit") as lab:
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
        ({"error_budget": 0.0}, "^error_budget=0.0: input should be greater than 0$"),
        ({"error_budget": 2.0}, "^error_budget=2.0: input should be less than or equal to 1$"),
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
        ValueError, match=f"{name}=.* 'auto' chooses, and gradients='int8' lets it choose nothing.* leave {name} out"
    ):
        Compression("int8", **idle)
    assert Compression("int8", overrides={"head*": "auto"}, **idle).named == {"int8", "auto"}


def refused_elsewhere() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net())
    with pytest.raises(ValueError, match="compress\\(\\) with gradients='auto': how much of a reduce is exposed"):
        yafsdp_cc.compress(model, "auto")
    with pytest.raises(ValueError, match="CompressionHookState with gradients='auto'"):
        yafsdp_cc.CompressionHookState("auto")


def test_other_engines_have_no_auto():
    on_ranks(1, refused_elsewhere)


def alone() -> None:
    model = sharded("auto")
    for step in range(5):
        step_of(model, step)
    assert yafsdp_cc.counters_of(model).chosen == {}


@pytest.mark.filterwarnings("ignore:shard")
def test_one_rank_has_nothing_to_choose():
    on_ranks(1, alone)
