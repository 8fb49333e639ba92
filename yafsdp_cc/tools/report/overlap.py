"""The part of a step's communication that computation hides, and how much it slows the computation beside it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import NamedTuple, TypeAlias

from yafsdp_cc.tools.report.trace import COMMUNICATION, Activity, Trace

NOT_COMPUTED = (*COMMUNICATION, "copy")
"""Kinds of work that do not hide communication, such as a copy of the next batch."""
Span: TypeAlias = "tuple[float, float]"
"""A stretch of time (begin, end)."""


def joined(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Return ``spans`` joined to as few as possible, in order; spans at most ``gap`` apart become one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def without(spans: Iterable[Span], covers: Sequence[Span]) -> list[Span]:
    """Return the parts of ``spans`` that lie in none of ``covers``, a result of ``joined``."""
    found = []
    for begin, end in spans:
        place = max(0, bisect_right(covers, (begin, float("inf"))) - 1)
        while place < len(covers) and covers[place][0] < end:
            found.append((begin, covers[place][0]))
            begin = max(begin, covers[place][1])
            place += 1
        found.append((begin, end))
    return [(begin, end) for begin, end in found if begin < end]


def length(spans: Iterable[Span]) -> float:
    """Return the sum of the lengths of ``spans``, which must not overlap."""
    return sum(end - begin for begin, end in spans)


class Shared(NamedTuple):
    """Time of a kind of work or of a unit's communication, in microseconds of all steps."""

    total: float
    exposed: float
    """Microseconds in which nothing of another kind ran; for communication, in which nothing was computed."""


class Slowed(NamedTuple):
    """A kernel of which some runs were beside communication and some were not."""

    name: str
    beside: int
    """Number of the kernel's runs that overlapped with communication for at least nine tenths of their time. A run
    that overlapped for a smaller part counts neither here nor for ``alone_us``."""
    alone_us: float
    beside_us: float
    """Mean microseconds of the kernel's runs beside communication."""

    @property
    def lost_us(self) -> float:
        """Microseconds by which all runs beside communication together took longer than as many alone."""
        return self.beside * (self.beside_us - self.alone_us)


class Overlap(NamedTuple):
    """Result of ``measure`` for one trace; times are microseconds of all steps together."""

    trace: Trace
    kinds: dict[str, Shared]
    communication: Shared
    parts: dict[str, float]
    """Time of the steps by part, each moment counted once: compute, optimizer, codec, exposed communication, copy,
    idle."""
    groups: dict[str, dict[str, Shared]]
    """Times of communication by unit, and by its kind."""
    slowed: list[Slowed]
    """Kernels that ran both beside communication and alone; those that lost the most time come first."""
    slowdown: float | None
    """Slowdown of kernels that overlap communication: their time divided by that of the same kernels alone."""
    on_communication_lanes: dict[str, float]
    """Microseconds of other work on streams that communicate, by its name: such work delays the next communication."""


def measure(trace: Trace) -> Overlap:
    """Return exposed communication by kind and by unit, and the slowdown of kernels beside communication."""
    by_kind: dict[str, list[Span]] = defaultdict(list)
    by_group: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for each in trace.activities:
        span = max(each.start, trace.start), each.end
        by_kind[each.kind].append(span)
        if each.kind in COMMUNICATION:
            by_group[each.group][each.kind].append(span)
    work = {kind: joined(spans) for kind, spans in by_kind.items()}
    computed = joined(span for kind, spans in work.items() if kind not in NOT_COMPUTED for span in spans)
    sent = joined(span for kind, spans in work.items() if kind in COMMUNICATION for span in spans)

    def beside(kind: str) -> list[Span]:
        if kind in COMMUNICATION:
            return computed
        return joined(span for other, spans in work.items() if other != kind for span in spans)

    def shared(spans: list[Span], others: list[Span]) -> Shared:
        return Shared(length(spans), length(without(spans, others)))

    groups: dict[str, dict[str, Shared]] = {}
    for group, kinds in by_group.items():
        groups[group] = {kind: shared(joined(spans), computed) for kind, spans in kinds.items()}
    parts, seen = {}, list[Span]()
    codec = joined([*work.get("encode", []), *work.get("decode", [])])
    ordered = (("compute", work.get("compute", [])), ("optimizer", work.get("optimizer", [])), ("codec", codec))
    for part, spans in (*ordered, ("exposed communication", sent), ("copy", work.get("copy", []))):
        parts[part] = length(without(spans, seen))
        seen = joined([*seen, *spans])
    parts["idle"] = trace.end - trace.start - length(seen)
    slowed = _slowed(trace.activities, sent)
    alone = sum(each.beside * each.alone_us for each in slowed)
    return Overlap(
        trace,
        {kind: shared(spans, beside(kind)) for kind, spans in work.items()},
        shared(sent, computed),
        parts,
        groups,
        slowed,
        sum(each.beside * each.beside_us for each in slowed) / alone if alone else None,
        _among_communication(trace.activities),
    )


def _slowed(activities: Iterable[Activity], sent: list[Span]) -> list[Slowed]:
    """Compare runs of kernels of equal name and shape beside communication with runs away from it."""
    times: dict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for each in activities:
        took = each.end - each.start
        if each.kind in NOT_COMPUTED or took <= 0:
            continue
        hidden = 1 - length(without([each[:2]], sent)) / took
        if hidden == 0 or hidden >= 0.9:
            times[each.name, each.shape][hidden > 0].append(took)
    found = [
        Slowed(name, len(beside), mean(alone), mean(beside))
        for (name, _), (alone, beside) in times.items()
        if alone and beside
    ]
    return sorted(found, key=lambda each: -each.lost_us)


def _among_communication(activities: Iterable[Activity]) -> dict[str, float]:
    communicating = {each.lane for each in activities if each.kind in COMMUNICATION}
    found: dict[str, float] = defaultdict(float)
    for each in activities:
        if each.lane in communicating and each.kind not in COMMUNICATION:
            found[each.name] += each.end - each.start
    return dict(sorted(found.items(), key=lambda item: -item[1]))
