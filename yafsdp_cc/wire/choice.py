"""Which gradients to encode, and by what: as few bits lost as hide the wire under the backward.

A backward computes leg after leg, and the reduce of each is sent when it is over:

    compute   | leg 0 | leg 1 | leg 2 |   |
    link              | reduce 0  | reduce 1 | reduce 2 |
                                  └─ its slot is needed here: leg 3 would begin

A reduce that is longer than what is computed meanwhile shows. The last one always does: nothing is computed beside it.
That only what shows is worth compressing is from Song et al., "Optimus-CC" (2023), who choose pipeline stages by hand;
here it is chosen for each unit, by what was measured.

Pure: no communication, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Option(NamedTuple):
    """One way to reduce the gradients of a unit."""

    codec: str
    link: float
    """Seconds on the link, with what else has to cross it meanwhile."""
    host: float = 0.0
    """Seconds of the thread that computes, to encode and to sum; on CUDA they are the lane's, and so the link's."""
    error: float = 0.0
    """What a message leaves out: the share of a gradient's energy, times elements."""
    sent: float = 0.0
    """Bytes of gradients that a rank sends."""
    beside: float = 0.0
    """Seconds that those bytes take from the computation beside them: what the next leg takes longer."""


Share: TypeAlias = "Callable[[Option], float]"
"""Which seconds of an option."""


class Leg(NamedTuple):
    """One unit, where the backward comes to it."""

    compute: float
    """Seconds from the reduce before to this one, without waits for the link."""
    options: tuple[Option, ...]
    """The first is exact; each later one says less in less time on the link."""
    awaits: int = -1
    """Of which leg the reduce has to be over before this one's compute begins; -1: of none."""


def seconds(legs: Sequence[Leg], picks: Sequence[int]) -> float:
    """How long a backward takes in which leg j is reduced by ``options[picks[j]]``.

    A leg is computed when the one before is, and the reduce that it awaits is over; its reduce crosses when that one
    before has. Where each leg k awaits the reduce k − 2 (two slots, or a thread that ends a reduce before it sends the
    next one), reduce j and the compute of leg j + 1 begin together, so legs are independent of each other:

        b₀ + Σ_j [host_j + max(link_j, b_{j+1})]            with b = 0 behind the last

    Where none awaits any, the link is a queue (``endless``), and what is late for one leg may hide under later ones.
    What bytes take from the computation beside them, ``beside_j``, is added to b_{j+1}.
    """
    return _ran(legs, picks)[0]


def endless(legs: Sequence[Leg], picks: Sequence[int]) -> float:
    """How long the wire of a backward shows if there were a slot for each unit, and nothing but the link took time.

    The reduces from leg k on cross one after another and no earlier than leg k is computed, so the backward ends at
    max_k (Σ_{i≤k} b_i + Σ_{j≥k} link_j); less all compute: max_k [Σ_{j≥k} link_j − Σ_{j>k} b_j]⁺.
    """
    shows = late = 0.0
    for leg, option in reversed(list(zip(legs, picked(legs, picks), strict=True))):
        late += option.link
        shows = max(shows, late)
        late -= leg.compute
    return shows


def exposed(legs: Sequence[Leg], picks: Sequence[int]) -> float:
    """Seconds by which the wire, and what encodes, make a backward longer."""
    return seconds(legs, picks) - sum(leg.compute for leg in legs)


def fewest(legs: Sequence[Leg], budget: float = float("inf")) -> list[int]:
    """As few bytes on the link as there can be within the budget, whether they show or not."""
    return _tightened([leg._replace(compute=0.0) for leg in legs], 0.0, budget)


def contended(legs: Sequence[Leg], picks: Sequence[int], per_byte: float) -> list[Leg]:
    """The same legs, where each byte on the link takes ``per_byte`` seconds from the computation beside it.

    ``legs`` were measured under ``picks``, whose bytes have taken theirs already.
    """
    taken = [0.0, *(per_byte * option.sent for option in picked(legs, picks))]
    return [
        Leg(
            max(leg.compute - less, 0.0),
            tuple(option._replace(beside=per_byte * option.sent) for option in leg.options),
            leg.awaits,
        )
        for leg, less in zip(legs, taken, strict=False)
    ]


def contention(legs: Sequence[Leg], picks: Sequence[int], others: Sequence[int], longer: float) -> float:
    """Seconds that each byte takes from the computation beside it, if a backward is ``longer`` than with ``others``.

    0, if that much is explained without.

    Args:
        legs: as they were measured under ``picks``.
        longer: seconds; negative where it was shorter.
    """
    sent, said = (sum(option.sent for option in list(picked(legs, each))[:-1]) for each in (picks, others))
    sign = 1.0 if sent > said else -1.0

    def missed(per_byte: float) -> float:
        told = contended(legs, picks, per_byte)
        return sign * (longer - seconds(told, picks) + seconds(told, others))

    if sent == said or missed(0.0) <= 0:
        return 0.0
    low, high = 0.0, _FAR * missed(0.0) / abs(sent - said)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if missed(middle) > 0 else (low, middle)
    return high


def error(legs: Sequence[Leg], picks: Sequence[int]) -> float:
    """What all messages leave out."""
    return sum(option.error for option in picked(legs, picks))


def picked(legs: Sequence[Leg], picks: Sequence[int]) -> Iterator[Option]:
    """The options of these numbers."""
    return (leg.options[pick] for leg, pick in zip(legs, picks, strict=True))


def choose(legs: Sequence[Leg], tolerance: float = 0.0, budget: float = float("inf")) -> list[int]:
    """The numbers of options with which a backward is no more than ``tolerance`` longer than it has to be.

    Greedy. While the backward is too long: of the reduces that make it so, one takes another option, that which leaves
    out least for each second. Among equals the last in the backward, which is in the way of most others. Then whatever
    says less than it has to gets more bits back, the largest error first.

    Where legs are independent that is the least error up to what fits into the tolerance. For a queue it is the
    suffix rule: constraint k, Σ_{j≥k} link_j ≤ Σ_{j>k} b_j, concerns the reduces j ≥ k alone.

    Args:
        legs: in the order of the backward.
        tolerance: seconds.
        budget: of the error, all legs together.
    """
    tight = _tightened(legs, 0.0, budget)
    shortest = min(seconds(legs, picks) for picks in (tight, *_guesses(legs, budget)))
    return _relaxed(legs, _tightened(legs, shortest + tolerance, budget), shortest + tolerance, budget)


def steady(
    legs: Sequence[Leg], now: Sequence[int], tolerance: float = 0.0, budget: float = float("inf"), slack: float = 0.1
) -> list[int]:
    """As ``choose``; but an option of ``now`` stays if it would be right for a link faster or slower by ``slack``."""
    ends = [choose(_scaled(legs, 1 + sign * slack), tolerance, budget) for sign in (-1, 1)]
    kept = [min(max(each, min(both)), max(both)) for each, *both in zip(now, *ends, strict=True)]
    return kept if error(legs, kept) <= budget else choose(legs, tolerance, budget)


def _scaled(legs: Sequence[Leg], factor: float) -> list[Leg]:
    """The same legs over a link that is slower by a ``factor``."""
    return [
        leg._replace(
            options=tuple(
                option._replace(link=factor * option.link, beside=factor * option.beside) for option in leg.options
            )
        )
        for leg in legs
    ]


def _ran(legs: Sequence[Leg], picks: Sequence[int]) -> tuple[float, list[tuple[int, Share]]]:
    """How long it takes, and which legs' bytes that is because of, latest first."""
    computed = ended = beside = 0.0
    ends: list[float] = []
    behind: list[tuple[bool, bool, bool]] = []
    for leg, option in zip(legs, picked(legs, picks), strict=True):
        free = ends[leg.awaits] if leg.awaits >= 0 else 0.0
        held = leg.awaits >= 0 and free >= computed
        computed = max(computed, free) + leg.compute + beside
        queued = bool(ends) and ended >= computed
        started = max(computed, ended)
        if option.host:
            computed = started = started + option.host
        ended = started + option.link
        beside = option.beside
        ends.append(ended)
        behind.append((held, queued, bool(option.host)))
    return max(computed, ended), _late(legs, behind, by_link=ended >= computed)


def _late(legs: Sequence[Leg], behind: Sequence[tuple[bool, bool, bool]], by_link: bool) -> list[tuple[int, Share]]:
    """Go back from the end along what each point in time waited for: legs whose bytes are on the way, and as what.

    ``behind`` says of each leg whether its compute was held by a slot, whether its reduce queued behind the one before,
    and whether the thread that computes has waited with it.
    """
    found: list[tuple[int, Share]] = []
    place, at_link = len(legs) - 1, by_link
    while place >= 0:
        held, queued, hosts = behind[place]
        if at_link:
            found.append((place, _link))
        if (at_link or hosts) and queued:
            place, at_link = place - 1, True
            continue
        if place:
            found.append((place - 1, _beside))
        place, at_link = (legs[place].awaits, True) if held else (place - 1, False)
    return found


def _tightened(legs: Sequence[Leg], limit: float, budget: float) -> list[int]:
    """From exact sums, as many steps to fewer bits as the limit takes, or as there are."""
    picks, spent = [0] * len(legs), 0.0
    while True:
        now, late = _ran(legs, picks)
        if now <= limit * (1 + _EVEN):
            return picks
        moves = [
            (_rounded((option.error - ours.error) / (share(ours) - share(option))), -place, number)
            for place, share in late
            for ours in (legs[place].options[picks[place]],)
            for number, option in enumerate(legs[place].options)
            if share(option) < share(ours) and spent - ours.error + option.error <= budget
        ]
        if not moves:
            return picks
        _, place, number = min(moves)
        spent += legs[-place].options[number].error - legs[-place].options[picks[-place]].error
        picks[-place] = number


def _relaxed(legs: Sequence[Leg], picks: list[int], limit: float, budget: float) -> list[int]:
    """Give bits back where that costs no time beyond the limit."""
    now = seconds(legs, picks)
    for _ in legs:
        gains = sorted(
            (_rounded(option.error - leg.options[pick].error), place, number)
            for place, (leg, pick) in enumerate(zip(legs, picks, strict=True))
            for number, option in enumerate(leg.options[:pick])
        )
        before = list(picks)
        for _, place, number in gains:
            if number >= picks[place]:
                continue
            tried = [*picks[:place], number, *picks[place + 1 :]]
            then = seconds(legs, tried)
            if then <= max(limit, now) * (1 + _EVEN) and error(legs, tried) <= budget:
                picks, now = tried, then
        if picks == before:
            break
    return picks


def _guesses(legs: Sequence[Leg], budget: float) -> Iterator[list[int]]:
    """Choices that may be the fastest of all: all alike, and each leg by itself."""
    nothing = [0] * len(legs)
    after = [*(leg.compute for leg in legs[1:]), 0.0]
    by_itself = [
        min(range(len(leg.options)), key=lambda pick: (_shown(leg.options[pick], hidden), pick))
        for leg, hidden in zip(legs, after, strict=True)
    ]
    most = max((len(leg.options) for leg in legs), default=1)
    alike = ([min(number, len(leg.options) - 1) for leg in legs] for number in range(1, most))
    for guess in (by_itself, *alike):
        yield guess if error(legs, guess) <= budget else nothing


def _link(option: Option) -> float:
    return option.link


def _beside(option: Option) -> float:
    return option.beside


def _shown(option: Option, hidden: float) -> float:
    return option.host + option.beside + max(0.0, option.link - hidden)


_FAR, _HALVINGS = 4, 20
"""Where contention is looked for, beside one that nothing hides, and how closely."""
_EVEN = 1e-9
"""Times that differ by less, in proportion, are the same."""


def _rounded(value: float) -> float:
    """With what different orders of the same operations make of it left out, so that equals are equal."""
    return float(f"{value:.9g}")
