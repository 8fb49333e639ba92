"""Messages of several codecs in one sum: between real ranks, over many steps, and in a lab of two machines."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.netlab.labs import lab_of
from tests.ranks import on_ranks
from tests.wire.choosing import EVERY, chooser_of, step_of, switch, untold
from tests.wire.ledger import Ledger, sharded
from yafsdp_cc import Compression
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.wire import feedback, kernels, pace
from yafsdp_cc.wire.chosen import ChosenReduce
from yafsdp_cc.wire.codec import Codec, codec_of
from yafsdp_cc.wire.exchange import Reduce
from yafsdp_cc.wire.feedback import CLASSIC, Residual
from yafsdp_cc.wire.pace import Pace
from yafsdp_cc.wire.pairs import Pair
from yafsdp_cc.wire.post import Post

CPU = torch.device("cpu")


def pairs_of(world: int) -> list[Pair]:
    return list(itertools.combinations(range(world), 2))


# The exchange


def summed(chunk: int, dtype: torch.dtype, steps: int) -> None:
    """Against the definitions of codecs and feedback in plain torch, of all ranks' messages to this one."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    post, exact = Post(group, CPU), Reduce(group, CPU)
    exact.reserve(world * chunk, dtype)
    kinds = {name: codec_of(name) for name in EVERY}
    chosen = ChosenReduce(post, exact, [kinds["int4"], kinds["onebit"]], world * chunk, dtype, None, "unit", CLASSIC)
    residual = Residual(world - 1, chunk, torch.float32, 256, CPU)
    due = [Residual(1, chunk, torch.float32, 256, CPU) for _ in range(world)]
    draws = random.Random(0)
    for step in range(steps):
        usual = kinds[draws.choice(("int4", "onebit"))]
        of = {pair: kinds[draws.choice(EVERY)] if draws.random() < 0.6 else usual for pair in pairs_of(world)}

        def between(one: int, other: int, of: dict[Pair, Codec] = of) -> Codec:
            return of[min(one, other), max(one, other)]

        peers = [peer for peer in range(world) if peer != rank]
        near = {peer: between(rank, peer) for peer in peers if between(rank, peer) is not usual}
        chosen.encode_by(usual, residual, near)
        wholes = [gradients_of(sender, step, world, chunk, dtype) for sender in range(world)]
        for work in chosen.send(wholes[rank], asynchronous=True):
            work.wait()
        expected = wholes[rank][rank].to(torch.float32, copy=True)
        for sender in peers:
            codec = between(sender, rank)
            message = torch.zeros(1, codec.message_bytes(chunk), dtype=torch.uint8)
            feedback.encode(codec, wholes[sender][rank : rank + 1], message, residual=due[sender])
            codec.decode(message, said := torch.empty(1, chunk))
            expected += said[0]
        total = torch.cat([part.clone() for _, part in chosen.totals(wholes[rank])])
        same = [between(rank, peer) for peer in peers]
        if len(set(same)) > 1:
            assert total.equal(expected)
        else:  # one codec for all is summed in rank order
            assert torch.allclose(total, expected, rtol=1e-5, atol=1e-5)
        assert chosen.sent_bytes() == sum(codec.message_bytes(chunk) for codec in same)
        assert post.owned_bytes >= 2 * chosen.sent_bytes()
    left: list[Any] = [None] * world  # what each sender has still to say to this rank
    dist.all_gather_object(left, residual.values)
    for sender in range(world):
        if sender != rank:
            assert left[sender][rank - (rank > sender)].equal(due[sender].values[0])


def gradients_of(rank: int, step: int, world: int, chunk: int, dtype: torch.dtype) -> Tensor:
    draws = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(world, chunk, generator=draws).to(dtype)


@pytest.mark.parametrize("world", [3, 4])
def test_each_message_says_what_its_codec_alone_would(world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        on_ranks(world, summed, 1024, dtype, 12)


def test_sums_in_parts() -> None:
    on_ranks(3, summed, kernels.PART + 1280, torch.bfloat16, 2)


def without_feedback() -> Tensor:
    """Messages that round at random are right on average, and those that say all are not touched by it."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    post, exact = Post(group, CPU), Reduce(group, CPU)
    int4, fp32 = codec_of("int4"), codec_of("fp32")
    chosen = ChosenReduce(post, exact, [int4], 3 * 1024, torch.float32, None, "unit", CLASSIC)
    chosen.encode_by(int4, None, {1 - rank: fp32} if rank < 2 else {})
    wholes = [gradients_of(other, 0, 3, 1024, torch.float32) for other in range(3)]
    mean = torch.zeros(1024)
    for _ in range(200):
        for work in chosen.send(wholes[rank], asynchronous=True):
            work.wait()
        for _, total in chosen.totals(wholes[rank]):
            mean += total / 200
    return mean - torch.stack([whole[rank] for whole in wholes]).sum(0)


def test_without_feedback_rounding_is_random_where_it_was() -> None:
    off = [(each.square().mean() ** 0.5).item() for each in on_ranks(3, without_feedback)]
    assert all(each < 0.03 for each in off)  # a step of int4 is 0.4; over 200 messages 0.4 / √12 / √200 each


# Models


def switched() -> None:
    """A random choice for each unit and for each pair, another in every step."""
    world, draws = dist.get_world_size(), random.Random(0)
    model = untold(Compression("auto", residual="fp32", candidates=EVERY[1:]))
    ledger = Ledger(model, sharded(None))
    sizes = set()
    for step in range(16):
        codecs = [draws.choice(EVERY) for _ in root_of(model).units]
        near = {
            codec: {pair: draws.choice(EVERY) for pair in pairs_of(world) if draws.random() < 0.6}
            for codec in EVERY[1:]
        }
        switch(model, codecs, near)
        sent = yafsdp_cc.counters_of(model).reduced_bytes
        ledger.step(step, micro=3 if step % 4 == 1 else 1)
        plan, counters = yafsdp_cc.plan_of(model), yafsdp_cc.counters_of(model)
        sizes.add(plan.wire.reduce)
        assert plan.wire.reduce == sum(said(model, flat, near) for unit in root_of(model).units for flat in unit.flats)
        if step % 4 != 1:
            assert counters.reduced_bytes - sent == plan.wire.reduce + plan.wire.small
        if step == 8:
            model.set_reshard_after_forward(False)  # another assembly goes on with the choice
    assert len(sizes) > 8
    switch(model, ["fp32"] * 3)
    ledger.step(16)
    ledger.check()


def said(model: nn.Module, flat: Any, near: Any) -> int:
    """Bytes that this rank sends of a flat, message by message."""
    root = root_of(model)
    assert root.compressed is not None
    codec, rank, chunk = root.compressed.chosen.get(flat, "fp32"), dist.get_rank(), flat.layout.chunk
    if codec == "fp32":
        return int((dist.get_world_size() - 1) * chunk * flat.wire.itemsize)
    names = [
        near[codec].get((min(rank, peer), max(rank, peer)), codec)
        for peer in range(dist.get_world_size())
        if peer != rank
    ]
    return sum(codec_of(name).message_bytes(chunk) for name in names)


@pytest.mark.parametrize("world", [3, 4])
def test_nothing_is_lost_where_pairs_differ(world: int) -> None:
    on_ranks(world, switched)


def chosen_apart() -> list[Any]:
    """Codecs of this rank's messages, after trials that took other times on each rank."""
    draws = random.Random(dist.get_rank())
    pace.pace_of = lambda *_: Pace(0.0, 1e-3)
    pace.timed = lambda run, device: run() or 10 ** draws.uniform(-5, -1)
    model = sharded(Compression("auto", candidates=EVERY[1:]))
    for step in range(4):
        step_of(model, step)
    root = root_of(model)
    assert root.compressed is not None
    near = [root.compressed.near[flat] for unit in root.units for flat in unit.flats]
    return [yafsdp_cc.counters_of(model).why, near]


def test_both_ends_of_a_pair_choose_alike() -> None:
    found = on_ranks(4, chosen_apart)
    assert len({why for why, _ in found}) == 1
    nears = [near for _, near in found]
    assert any(any(each) for each in nears)
    for rank, near in enumerate(nears):
        for number, each in enumerate(near):
            assert all(nears[peer][number][rank] == codec for peer, codec in each.items())


def tried_out() -> dict[Pair, float]:
    group = dist.group.WORLD
    assert group is not None
    post = Post(group, CPU)
    post.reserve(1 << 17, 1)
    return pace.paces_between(post, 1 << 17)


@pytest.mark.parametrize("world", [3, 4])
def test_all_ranks_have_the_same_table_of_all_pairs(world: int) -> None:
    first, *others = on_ranks(world, tried_out)
    assert all(other == first for other in others)
    assert list(first) == pairs_of(world)
    assert all(each > 0 for each in first.values())


def told_by_numbers() -> None:
    pace.pace_of = lambda *_: Pace(0.0, 1e-3)
    pace.paces_between = lambda *_: {pair: 1e-4 if pair == (0, 2) else 1e-3 for pair in pairs_of(3)}
    model = sharded("auto")
    for step in range(4):
        step_of(model, step)
    counters = yafsdp_cc.counters_of(model)
    assert counters.chosen == dict.fromkeys(("0", "2", "4"), "int4 (fp32 between near ranks)")
    assert "links between ranks 0-2 are 10 times as fast as the slowest" in counters.why
    assert "leaves 0.011" in counters.why  # two thirds of what int4 does
    assert "int4 (fp32 between near ranks) for 0, 2, 4" in str(yafsdp_cc.plan_of(model))
    assert counters.owned_bytes == yafsdp_cc.plan_of(model).owned_bytes
    alike = sharded("auto")
    chooser_of(alike).tries_pairs = False
    for step in range(4):
        step_of(alike, step)
    assert set(yafsdp_cc.counters_of(alike).chosen.values()) == {"int4"}
    assert "leaves 0.016" in yafsdp_cc.counters_of(alike).why


def test_what_near_ranks_get_is_told() -> None:
    on_ranks(3, told_by_numbers)


def not_tried(per_byte: float) -> set[str]:
    pace.pace_of = lambda *_: Pace(1.5e-5, per_byte)
    pace.paces_between = lambda *_: pytest.fail("pairs were tried out")
    model = sharded("auto")
    for step in range(5):
        step_of(model, step)
    return set(yafsdp_cc.counters_of(model).chosen.values())


def test_pairs_are_tried_out_only_where_that_may_help() -> None:
    assert on_ranks(3, not_tried, 1e-10) == [{"fp32"}] * 3  # nothing is encoded
    assert on_ranks(2, not_tried, 1e-3) == [{"int4"}] * 2  # there is one pair


# On a real network


def over_two_machines(tries_pairs: bool) -> tuple[str, list[float]]:
    """What is chosen for a megabyte of gradients, and the squares that messages to each rank have left."""
    model: Any = yafsdp_cc.shard(nn.Sequential(nn.Linear(512, 512)), units=[nn.Linear], compression="auto")
    chooser_of(model).tries_pairs = tries_pairs
    for _ in range(5):
        model(torch.randn(8, 512)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.zero_grad()
    (flat,) = root_of(model).units[0].flats
    assert flat.residual is not None
    return yafsdp_cc.counters_of(model).chosen["0"], flat.residual.load().square().sum(1).tolist()


def test_ranks_of_one_machine_say_more_to_each_other_in_a_lab() -> None:
    with lab_of(ranks=4, bandwidth="50mbit", near=2) as lab:
        richer, alike = (lab.run(over_two_machines, tries_pairs) for tries_pairs in (True, False))
    for rank, ((chosen, left), (usual, before)) in enumerate(zip(richer, alike, strict=True)):
        assert usual == "int4"
        assert re.fullmatch(r"int4 \(.* between near ranks\)", chosen)  # messages between machines are as they were
        near = (rank ^ 1) - (rank ^ 1 > rank)
        assert left[near] < before[near] / 10
        assert sum(left) < sum(before)
