"""What near ranks say more by: the rule against every choice that there is, and the layout of what is sent."""

from __future__ import annotations

import itertools
import random

import pytest

from yafsdp_cc.wire.batch import batches_of
from yafsdp_cc.wire.codec import codec_of
from yafsdp_cc.wire.pairs import Pair, classed, richer

BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.125, "int4": 4.125, "onebit": 1.125}


def made(draws: random.Random) -> tuple[dict[Pair, float], dict[Pair, int]]:
    """Paces of all pairs of some ranks, and of which class each is: links of one class differ by a fifth."""
    world, classes = draws.randrange(2, 5), draws.randrange(1, 4)
    speeds = sorted(10 ** draws.uniform(0.6 * number, 0.6 * number + 0.3) for number in range(classes))
    pairs = list(itertools.combinations(range(world), 2))
    of = {pair: draws.randrange(classes) for pair in pairs}
    return {pair: 1 / (speeds[of[pair]] * draws.uniform(1, 1.2)) for pair in pairs}, of


def allowed(paces: dict[Pair, float], of: dict[Pair, int], codec: str, each: dict[Pair, str]) -> bool:
    """Whether links that are alike say the same, and all is over when the slowest pair's ``codec`` is."""
    slowest = min(of.values())
    crowds = [sum(of[pair] > slowest for pair in paces if rank in pair) for rank in range(5)]
    for pair, name in each.items():
        alike = [other for other in paces if of[other] == of[pair]]
        if any(each[other] != name for other in alike) or BITS[name] < BITS[codec]:
            return False
        takes = max(crowds) * max(paces[other] for other in alike) * BITS[name]
        if name != codec and (of[pair] == slowest or takes > max(paces.values()) * BITS[codec]):
            return False
    return True


def test_as_little_is_left_out_as_every_choice_allows() -> None:
    draws = random.Random(0)
    place, richest = {name: number for number, name in enumerate(BITS)}, set()
    for _ in range(40):
        paces, of = made(draws)
        codec = draws.choice(("bf16", "int8", "int4"))
        found = dict.fromkeys(paces, codec) | richer(paces, codec, BITS)
        every = (dict(zip(paces, names, strict=True)) for names in itertools.product([*BITS][:4], repeat=len(paces)))
        fits = [each for each in every if allowed(paces, of, codec, each)]
        best = min(fits, key=lambda each: sum(place[name] for name in each.values()))
        assert found == best
        richest |= set(richer(paces, codec, BITS).values())
    assert richest >= {"fp32", "bf16", "int8"}


def test_a_rank_says_all_to_near_ones_in_the_time_of_one_slow_message() -> None:
    draws = random.Random(1)
    for _ in range(300):
        world = draws.randrange(3, 9)
        paces = {pair: 10 ** -draws.uniform(6, 9) for pair in itertools.combinations(range(world), 2)}
        codec = draws.choice(list(BITS))
        found = richer(paces, codec, BITS)
        assert all(BITS[name] > BITS[codec] for name in found.values())
        for rank in range(world):
            takes = sum(paces[pair] * BITS[name] for pair, name in found.items() if rank in pair)
            assert takes <= max(paces.values()) * BITS[codec]


def test_links_that_differ_by_less_than_a_trial_can_tell_are_alike() -> None:
    pairs = list(itertools.combinations(range(3), 2))
    assert richer(dict(zip(pairs, (1.0, 1.4, 1.1), strict=True)), "onebit", BITS) == {}
    assert richer(dict(zip(pairs, (1.0, 1.0, 1.0), strict=True)), "onebit", BITS) == {}
    assert classed({(0, 1): 9.0, (0, 2): 8.0, (1, 2): 5.9}) == {(0, 1): 9.0, (0, 2): 9.0, (1, 2): 5.9}
    assert classed({(0, 1): 9.0, (0, 2): 6.1, (1, 2): 4.0}) == {(0, 1): 9.0, (0, 2): 9.0, (1, 2): 4.0}


@pytest.mark.parametrize(("times", "better"), [(1.9, None), (2.1, "int8"), (8.0, "fp32")])
def test_two_machines(times: float, better: str | None) -> None:
    paces = {pair: 1.0 / times if pair in ((0, 1), (2, 3)) else 1.0 for pair in itertools.combinations(range(4), 2)}
    assert richer(paces, "int4", BITS) == ({} if better is None else {(0, 1): better, (2, 3): better})


def test_a_crowd_of_near_ranks_gets_less() -> None:
    """Seven of eight on one machine: six messages of each may be there one after another."""
    paces = {pair: 1.0 if 7 in pair else 1 / 20 for pair in itertools.combinations(range(8), 2)}
    assert set(richer(paces, "int4", BITS).values()) == {"int8"}
    alone = {pair: 1 / 20 if pair == (0, 1) else 1.0 for pair in paces}
    assert richer(alone, "int4", BITS) == {(0, 1): "fp32"}


def test_messages_lie_in_rank_order_and_none_crosses_the_own_place() -> None:
    draws = random.Random(2)
    kinds = [codec_of(name) for name in ("fp32", "int8", "int4")]
    for _ in range(100):
        world = draws.randrange(2, 8)
        rank, codecs = draws.randrange(world), [draws.choice(kinds) for _ in range(world - 1)]
        batches = batches_of(codecs, rank, 1024)
        peers = [peer for peer in range(world) if peer != rank]
        rows = [(batch, number) for batch in batches for number in range(batch.rows)]
        assert [batch.rank + number for batch, number in rows] == peers
        assert [batch.row + number for batch, number in rows] == list(range(world - 1))
        assert [batch.codec for batch, _ in rows] == codecs
        sizes = [codec.message_bytes(1024) for codec in codecs]
        starts = [batch.start + number * batch.size for batch, number in rows]
        assert starts == [sum(sizes[:number]) for number in range(world - 1)]
        for one, other in itertools.pairwise(batches):
            assert one.codec is not other.codec or one.rank < rank < other.rank
