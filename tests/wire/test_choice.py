"""Which units are encoded, held against a simulator that knows no formula, and against every choice there is."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from yafsdp_cc.wire.choice import (
    Leg,
    Option,
    choose,
    contended,
    contention,
    endless,
    error,
    exposed,
    fewest,
    picked,
    seconds,
    steady,
)

KINDS = ("slots", "queue", "mixed")


def made(draws: random.Random, kind: str, most: int = 6, alike: bool = False) -> list[Leg]:
    """Legs of a random model: of two slots, of a slot for each, or of some."""
    codecs = ((4.0, 0.0), (1.0, 4e-5), (0.5, 0.014))[: draws.choice((2, 3))]
    per_byte, works = draws.uniform(0.1, 1.5), draws.random() < 0.5
    beside = draws.choice((0.0, 0.1))
    legs = []
    for place in range(draws.randrange(1, most + 1)):
        size = 1 if alike else draws.choice((1, 1, 1, 2, 5))
        options = tuple(
            Option(
                str(number),
                0.01 + per_byte * size * width,
                size * 0.02 * (1 + number) if works else 0.0,
                size * missed,
                size * width,
                beside * size * width,
            )
            for number, (width, missed) in enumerate(codecs)
        )
        awaits = {"slots": place - 2, "queue": -1, "mixed": draws.choice((-1, place - 2, place - 3))}[kind]
        legs.append(Leg(size * (1.0 if alike else draws.uniform(0.5, 2)), options, max(awaits, -1)))
    return legs


def simulated(legs: list[Leg], picks: list[int]) -> float:
    """Event by event: one thread, one link that serves in order, and reduces whose end frees a slot."""
    options, sizes = list(picked(legs, picks)), len(legs)
    over: set[int] = set()
    waiting: list[int] = []
    events: list[tuple[float, int, str, int]] = []
    order, free, place, state, now = itertools.count(), True, 0, "idle", 0.0

    def after(duration: float, what: str, which: int) -> None:
        heapq.heappush(events, (now + duration, next(order), what, which))

    while True:
        if place < sizes and state == "idle" and (legs[place].awaits < 0 or legs[place].awaits in over):
            state = "computes"
            beside = options[place - 1].beside if place else 0.0
            after(legs[place].compute + beside, "computed", place)
        # Encoding is the thread's, and it does it when the reduce before has been taken in.
        if place < sizes and state == "has computed" and (not options[place].host or place == 0 or place - 1 in over):
            state = "encodes"
            after(options[place].host, "encoded", place)
        if free and waiting:
            free = False
            which = waiting.pop(0)
            after(options[which].link, "crossed", which)
        if not events:
            return now
        now, _, what, which = heapq.heappop(events)
        if what == "computed":
            state = "has computed"
        elif what == "encoded":
            waiting.append(which)
            place, state = place + 1, "idle"
        else:
            over.add(which)
            free = True


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_takes_as_long_as_simulated(kind):
    draws = random.Random(0)
    for _ in range(400):
        legs = made(draws, kind, most=12)
        picks = [draws.randrange(len(leg.options)) for leg in legs]
        assert seconds(legs, picks) == pytest.approx(simulated(legs, picks), rel=1e-9)


def test_closed_forms():
    draws = random.Random(1)
    for _ in range(200):
        legs = made(draws, "slots", most=12)
        picks = [draws.randrange(len(leg.options)) for leg in legs]
        computes = [*(leg.compute for leg in legs), 0.0]
        options = picked(legs, picks)
        by_itself = sum(
            each.host + max(each.link, hidden + each.beside * (hidden > 0))
            for each, hidden in zip(options, computes[1:], strict=True)
        )
        assert seconds(legs, picks) == pytest.approx(computes[0] + by_itself)
        queue = [
            leg._replace(options=tuple(option._replace(host=0.0, beside=0.0) for option in leg.options), awaits=-1)
            for leg in legs
        ]
        assert endless(queue, picks) == pytest.approx(exposed(queue, picks))


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_is_as_good_as_any(kind):
    """Never longer than the tolerance above the shortest there is, but for rare queues; the error, of the least."""
    draws = random.Random(2)
    found = least = 0.0
    late = 0
    for _ in range(300):
        legs, tolerance = made(draws, kind), draws.choice((0.0, 0.05, 0.5))
        every = list(itertools.product(*[range(len(leg.options)) for leg in legs]))
        shortest = min(seconds(legs, picks) for picks in every)
        limit = (shortest + tolerance) * (1 + 1e-6)
        picks = choose(legs, tolerance)
        late += seconds(legs, picks) > limit
        assert seconds(legs, picks) <= 1.05 * limit
        found += error(legs, picks)
        least += min(error(legs, each) for each in every if seconds(legs, each) <= limit)
    assert late <= (3 if kind == "queue" else 0)
    assert found <= 1.01 * least


@pytest.mark.parametrize("ratio", [0.9, 1.5, 2.0, 4.0])
def test_layers_alike(ratio):
    """p of exact, q of int8, b of compute. Of a queue the last ones are encoded, as many as the formula says."""
    n, b = 48, 1.0
    p, q = ratio * b, ratio * b / 4

    def legs(slots: bool) -> list[Leg]:
        options = (Option("fp32", p), Option("int8", q, error=4e-5))
        return [Leg(b, options, max(place - 2, -1) if slots else -1) for place in range(n)]

    picks = choose(legs(slots=False), b / 10)
    floor = max(q, n * q - (n - 1) * b)
    theory = -(-(n * p - (n - 1) * b - floor - b / 10) // (p - q)) if p > b else 1
    assert sum(picks) <= theory + 1
    assert picks == sorted(picks)  # the end of the backward: the first layers of the model
    assert exposed(legs(slots=False), picks) <= max(floor, 0) + b / 10 + 1e-9
    # With two slots nothing queues: the last one is encoded, and each of the others if it is too long by itself.
    assert sum(choose(legs(slots=True), b / 1000)) == (n if p > b else 1)


def test_a_fast_network_is_left_alone_and_a_slow_one_gets_all():
    fast = [Leg(1.0, (Option("fp32", 0.02, 0.01), Option("int8", 0.005, 0.03, 4e-5)), place - 2) for place in range(6)]
    assert choose([leg._replace(awaits=max(leg.awaits, -1)) for leg in fast], 0.05) == [0] * 6
    slow = [leg._replace(options=tuple(o._replace(link=1000 * o.link) for o in leg.options), awaits=-1) for leg in fast]
    assert choose(slow, 0.05) == [1] * 6


def test_the_end_of_the_backward_is_encoded_first():
    """The embedding, whose reduce nothing hides; then what else is large beside what is computed behind it."""
    options = (Option("fp32", 0.5), Option("int8", 0.125, error=4e-5), Option("int4", 0.06, error=0.014))
    legs = [Leg(1.0, options, max(place - 2, -1)) for place in range(6)]
    assert choose(legs, 0.07) == [0, 0, 0, 0, 0, 1]
    assert choose(legs, 0.001) == [0, 0, 0, 0, 0, 2]
    legs[3] = legs[3]._replace(options=tuple(option._replace(link=3 * option.link) for option in options))
    assert choose(legs, 0.07) == [0, 0, 0, 1, 0, 1]


def test_no_more_is_left_out_than_the_budget_has():
    draws = random.Random(3)
    for _ in range(200):
        legs = made(draws, draws.choice(KINDS))
        most = sum(leg.options[-1].error for leg in legs)
        budget = draws.uniform(0, 1.2) * most
        for picks in (choose(legs, 0.01, budget), steady(legs, choose(legs), 0.01, budget)):
            assert error(legs, picks) <= budget


@pytest.mark.parametrize("kind", KINDS)
def test_what_bytes_take_is_found_from_two_choices(kind):
    """Legs are measured with what their bytes take in them; what is found explains how long the other choice took."""
    draws = random.Random(4)
    found = 0
    for _ in range(200):
        free, truth = made(draws, kind, most=8), draws.uniform(0.05, 0.4)
        free = [leg._replace(options=tuple(option._replace(beside=0.0) for option in leg.options)) for leg in free]
        plain, least = choose(free, 0.05), fewest(free)
        for picks, others in ((plain, least), (least, plain)):
            taken = [0.0, *(truth * option.sent for option in picked(free, picks))]
            true = contended(free, picks, truth)
            true = [leg._replace(compute=ours.compute) for leg, ours in zip(true, free, strict=True)]
            measured = [leg._replace(compute=leg.compute + more) for leg, more in zip(free, taken, strict=False)]
            longer = seconds(true, picks) - seconds(true, others)
            told = contended(measured, picks, contention(measured, picks, others, longer))
            assert seconds(told, picks) - seconds(told, others) == pytest.approx(longer, abs=1e-4)
            assert [leg.compute for leg in contended(measured, picks, truth)] == pytest.approx(
                [leg.compute for leg in free]
            )
            found += told[0].options[0].beside > 0
    assert found > 50


def test_what_the_model_explains_is_put_down_to_nothing():
    options = (Option("fp32", 2.0, sent=8.0), Option("int8", 0.5, error=4e-5, sent=2.0))
    legs = [Leg(1.0, options, max(place - 2, -1)) for place in range(4)]
    gains = seconds(legs, [0] * 4) - seconds(legs, [1] * 4)
    assert contention(legs, [0] * 4, [1] * 4, gains) == contention(legs, [0] * 4, [1] * 4, gains / 2) == 0
    assert contention(legs, [1] * 4, [0] * 4, -gains) == contention(legs, [1] * 4, [0] * 4, 0.0) == 0
    assert contention(legs, [1] * 4, [1] * 4, 1.0) == 0
    assert contention(legs[:1], [0], [1], 9.0) == 0  # nothing is computed beside it


def test_as_few_bytes_as_there_can_be():
    options = (Option("fp32", 0.1), Option("int8", 0.04, error=1.0), Option("int4", 0.02, error=3.0))
    legs = [Leg(1.0, options, -1)] * 3
    assert fewest(legs) == [2, 2, 2]
    assert fewest(legs, 5.0) == [1, 1, 2]
    assert fewest(legs, 0.5) == [0, 0, 0]


def test_a_choice_stays_where_a_tenth_decides():
    def legs(link: float) -> list[Leg]:
        return [
            Leg(1.0, (Option("fp32", link), Option("int8", link / 4, error=4e-5)), -1),
            Leg(1.0, (Option("", 0.1),)),
        ]

    assert choose(legs(0.95)) == [0, 0]
    assert choose(legs(1.05)) == [1, 0]
    for link in (0.95, 1.05):
        assert steady(legs(link), [0, 0]) == [0, 0]
        assert steady(legs(link), [1, 0]) == [1, 0]
    assert steady(legs(1.2), [0, 0]) == [1, 0]
    assert steady(legs(0.8), [1, 0]) == [0, 0]
