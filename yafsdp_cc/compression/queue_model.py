"""How long a backward takes with given codecs of its gradients, and which codecs hide its reduces: pure functions.

A backward computes the gradients of one parameter group after another, and issues the reduce-scatter of each:

    compute   | group 0 | group 1 | group 2 |   |
    network             | reduce 0  | reduce 1  | reduce 2 |
                                    ^ if group 2 is to write into the gradient buffer of group 0, it starts here

A reduce is exposed where it lasts longer than what is computed meanwhile; the last one always is.

Source: that only exposed communication is worth compressing is from Song et al., "Optimus-CC" (2023), who select
pipeline stages by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SLACK = 0.1
"""A codec is kept if it is also right for a network that is faster or slower by this share."""
_ROUNDING = 1e-9
"""Relative difference below which two times count as equal."""


class CodecCost(NamedTuple):
    """Seconds and error of reducing the gradients of one group with one codec."""

    codec: str
    network: float
    """Seconds on the network, all-gathers of weights between this reduce and the next included."""
    host: float = 0.0
    """Seconds in which the computing thread encodes, decodes and sums. On CUDA they are part of ``network``."""
    error: float = 0.0
    """Relative squared error of a message, times the group's share of all elements."""


class GroupCosts(NamedTuple):
    """Costs of one parameter group, in the order in which a backward issues the reduces."""

    compute: float
    """Seconds of computation between the group before issuing its reduce and this group issuing its own."""
    codecs: tuple[CodecCost, ...]
    """Costs of each codec: the first is exact, each later one has a larger error and takes less of the network."""
    waits_for: int = -1
    """Index of the group whose reduce must have finished before this computation starts; -1: none."""


def backward_seconds(groups: Sequence[GroupCosts], picks: Sequence[int]) -> float:
    """Return how long a backward takes, the end of its last reduce included.

    The network carries one reduce at a time. A thread that encodes (``host``) first waits for the reduce before.

    Args:
        picks: for each group, the index of its codec in ``codecs``.
    """
    return _simulate(groups, picks).seconds


def exposed_seconds(groups: Sequence[GroupCosts], picks: Sequence[int]) -> float:
    """Return how much longer a backward takes than its computation. Args as of ``backward_seconds``."""
    return backward_seconds(groups, picks) - sum(group.compute for group in groups)


def total_error(groups: Sequence[GroupCosts], picks: Sequence[int]) -> float:
    """Return the relative squared error on average over elements. Args as of ``backward_seconds``."""
    return sum(group.codecs[pick].error for group, pick in zip(groups, picks, strict=True))


def choose_codecs(
    groups: Sequence[GroupCosts], tolerance: float = 0.0, error_budget: float = float("inf")
) -> list[int]:
    """Return the picks of least error with which a backward is at most ``tolerance`` seconds above the shortest.

    Greedy. While the backward is longer, one of the reduces on its critical path takes the codec that adds the least
    error per second saved; among equals the last one in the backward, which delays no other reduce. Afterwards groups
    return to codecs of less error where that keeps the backward within the limit, the largest error first.
    """
    tried = list(_tightened(groups, error_budget))
    limit = (min(seconds for seconds, _ in tried) + tolerance) * (1 + _ROUNDING)
    picks = next(picks for seconds, picks in tried if seconds <= limit)
    returns = sorted(
        (_rounded(cost.error - group.codecs[pick].error), index, number)
        for index, (group, pick) in enumerate(zip(groups, picks, strict=True))
        for number, cost in enumerate(group.codecs[:pick])
    )
    for _, index, number in returns:
        changed = [*picks[:index], number, *picks[index + 1 :]]
        if number < picks[index] and backward_seconds(groups, changed) <= limit:
            picks = changed
    return picks


def adjust_codecs(
    groups: Sequence[GroupCosts], current: Sequence[int], tolerance: float = 0.0, error_budget: float = float("inf")
) -> list[int]:
    """Return picks as ``choose_codecs``, but keep those of ``current`` that suit a network off by ``SLACK``."""
    fast, slow = (choose_codecs(_scaled(groups, 1 + sign * SLACK), tolerance, error_budget) for sign in (-1, 1))
    kept = [min(max(pick, min(ends)), max(ends)) for pick, *ends in zip(current, fast, slow, strict=True)]
    return kept if total_error(groups, kept) <= error_budget else choose_codecs(groups, tolerance, error_budget)


class _Moment(NamedTuple):
    """A time in a simulated backward."""

    seconds: float
    path: tuple[int, ...] = ()
    """Indices of the reduces on the critical path to this time."""

    def plus(self, seconds: float) -> _Moment:
        return _Moment(self.seconds + seconds, self.path)


def _simulate(groups: Sequence[GroupCosts], picks: Sequence[int]) -> _Moment:
    """Return the time at which a backward ends."""
    computed = reduced = _Moment(0.0)
    ends: list[_Moment] = []
    for index, (group, pick) in enumerate(zip(groups, picks, strict=True)):
        cost = group.codecs[pick]
        started = _later(ends[group.waits_for], computed) if group.waits_for >= 0 else computed
        computed = started.plus(group.compute)
        issued = _later(reduced, computed)
        if cost.host:
            computed = issued = issued.plus(cost.host)
        reduced = _Moment(issued.seconds + cost.network, (*issued.path, index))
        ends.append(reduced)
    return _later(reduced, computed)


def _later(reduced: _Moment, computed: _Moment) -> _Moment:
    return reduced if reduced.seconds >= computed.seconds else computed


def _tightened(groups: Sequence[GroupCosts], error_budget: float) -> Iterator[tuple[float, list[int]]]:
    """Yield seconds and picks, from all exact on, one group changed at a time, while that may shorten the backward."""
    picks, error = [0] * len(groups), 0.0
    while True:
        end = _simulate(groups, picks)
        yield end.seconds, picks
        moves = [
            (_rounded((cost.error - now.error) / (now.network - cost.network)), -index, number)
            for index in end.path
            for now in (groups[index].codecs[picks[index]],)
            for number, cost in enumerate(groups[index].codecs)
            if cost.network < now.network and error - now.error + cost.error <= error_budget
        ]
        if not moves:
            return
        _, negative, number = min(moves)
        picks = [*picks[:-negative], number, *picks[1 - negative :]]
        error = total_error(groups, picks)


def _scaled(groups: Sequence[GroupCosts], factor: float) -> list[GroupCosts]:
    """Return the groups' costs on a network that is slower by ``factor``."""
    return [
        group._replace(codecs=tuple(cost._replace(network=factor * cost.network) for cost in group.codecs))
        for group in groups
    ]


def _rounded(value: float) -> float:
    """Round to 9 digits: the same sum differs in later ones when its terms are added in another order."""
    return float(f"{value:.9g}")
