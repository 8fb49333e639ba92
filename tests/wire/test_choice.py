"""Which units are encoded, held against a simulator that knows no formula, and against every choice there is."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from yafsdp_cc.wire.choice import Leg, Option, choose, endless, error, exposed, picked, seconds, steady

KINDS = ("slots", "queue", "mixed")


def made(draws: random.Random, kind: str, most: int = 6, alike: bool = False) -> list[Leg]:
    """Legs of a random model: of two slots, of a slot for each, or of some."""
    codecs = ((4.0, 0.0), (1.0, 4e-5), (0.5, 0.014))[: draws.choice((2, 3))]
    per_byte, works = draws.uniform(0.1, 1.5), draws.random() < 0.5
    legs = []
    for place in range(draws.randrange(1, most + 1)):
        size = 1 if alike else draws.choice((1, 1, 1, 2, 5))
        options = tuple(
            Option(
                str(number),
                0.01 + per_byte * size * width,
                size * 0.02 * (1 + number) if works else 0.0,
                size * missed,
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
            after(legs[place].compute, "computed", place)
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
        by_itself = sum(each.host + max(each.link, hidden) for each, hidden in zip(options, computes[1:], strict=True))
        assert seconds(legs, picks) == pytest.approx(computes[0] + by_itself)
        queue = [
            leg._replace(options=tuple(option._replace(host=0.0) for option in leg.options), awaits=-1) for leg in legs
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
