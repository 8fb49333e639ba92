"""Computes how long a training step takes from its plan, a compute rate and a link.

    link      gather 0 | gather 1  | gather 2  |          reduce 2 | gather 0 | reduce 1 | reduce 0 |
    compute            | forward 0 | forward 1 | forward 2 | backward 2 | backward 1 | backward 0 |

One lane computes, the other carries one collective at a time, both in the order in which the engine issues them. Groups
of a role take turns in its buffers: an all-gather waits until the previous group in the buffer has computed, and a
backward waits until the reduce that reads its gradient buffer is over. Time in which one lane waits for the other is
exposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from yafsdp_cc.plan.report import Plan

Kind: TypeAlias = Literal["forward", "backward", "all_gather", "reduce", "all_reduce"]


class Link(NamedTuple):
    """Times of a collective over all ranks of a shard."""

    per_byte: float
    """Seconds for each byte that a rank sends to other nodes."""
    latency: float = 0.0
    """Seconds of a collective of no bytes."""
    hop: float = 0.0
    """Seconds more for each further rank, as ranks of a ring pass everything on."""
    within: float = 0.0
    """Seconds for each byte that a rank sends within its node."""
    node: int = 1
    """Number of ranks of a node, neighbours in the shard dimension of the mesh."""
    direct: bool = False
    """Whether reduces go straight to the owners, as encoded ones do, and not around a ring."""

    def seconds(self, event: Event, ranks: int) -> float:
        """Return how long it takes until every rank has sent the event's bytes.

        A ring leaves a node once, and its bytes share the links of all ranks of the node. A ``direct`` reduce sends all
        bytes but those for owners in the node over the rank's own link; a sum over replicas sends all bytes over it.
        """
        crossing = 1 / self.node if ranks > self.node else 0.0
        if event.kind == "all_reduce":
            crossing = 1.0
        elif event.kind == "reduce" and self.direct:
            crossing = max(0, ranks - self.node) / max(1, ranks - 1)
        per_byte = max(self.within, self.per_byte * crossing)
        return self.latency + self.hop * (ranks - 1) + per_byte * event.amount


class Work(NamedTuple):
    """Floating-point operations of a rank for one unit in a step."""

    forward: float
    backward: float
    """Operations of the backward, recomputation included."""

    def plus(self, other: Work, times: float = 1.0) -> Work:
        return Work(self.forward + times * other.forward, self.backward + times * other.backward)


class Event(NamedTuple):
    """A computation or collective of one step."""

    kind: Kind
    unit: str
    """Name of the unit; "" outside of units."""
    amount: float
    """Floating-point operations, or bytes that a rank sends."""
    after: tuple[int, ...]
    """Indices of events that this one waits for, besides those before it in its lane."""

    @property
    def is_compute(self) -> bool:
        return self.kind in ("forward", "backward")


class StepTime(NamedTuple):
    """Seconds of a step."""

    forward: float
    backward: float
    """Seconds of the backward, recomputation included."""
    exposed_forward: float
    """Seconds of all-gathers in the forward that nothing overlaps."""
    exposed_backward: float
    """Seconds of all-gathers and reduces in the backward that nothing overlaps."""
    optimizer: float = 0.0

    @property
    def exposed(self) -> float:
        """Share of the step in which nothing but communication happens."""
        return (self.exposed_forward + self.exposed_backward) / self.total

    @property
    def total(self) -> float:
        return sum(self)


def step_time(events: Sequence[Event], ranks: int, flops_per_second: float, link: Link) -> StepTime:
    """Return how long a step takes."""
    ends: list[float] = []
    free = {True: 0.0, False: 0.0}
    computed = {"forward": 0.0, "backward": 0.0}
    forward_end = 0.0
    for event in events:
        start = max(free[event.is_compute], *(ends[index] for index in event.after), 0.0)
        if event.is_compute:
            seconds = event.amount / flops_per_second
            computed[event.kind] += seconds
        else:
            seconds = link.seconds(event, ranks)
        ends.append(start + seconds)
        free[event.is_compute] = ends[-1]
        forward_end = ends[-1] if event.kind == "forward" else forward_end
    exposed = forward_end - computed["forward"], max(ends) - forward_end - computed["backward"]
    return StepTime(computed["forward"], computed["backward"], *exposed)


def events_of(plan: Plan, work: Mapping[str, Work]) -> list[Event]:
    """Return the events of a step in the order in which the engine issues them.

    Args:
        work: operations by the name of a unit; those of other names are outside of units.

    Raises:
        ValueError: ``work`` lacks a unit.
    """
    events: list[Event] = []

    def add(kind: Kind, unit: str, amount: float, *after: int | None) -> int | None:
        if not amount:
            return None
        events.append(Event(kind, unit, amount, tuple(index for index in after if index is not None)))
        return len(events) - 1

    units, traffic = plan.units, plan.traffic
    if lacking := [unit.name for unit in units if unit.name not in work]:
        raise ValueError(f"work has no operations of unit {lacking[0]!r}: give probe the plan's units")
    operations = [work[unit.name] for unit in units]
    names = {unit.name for unit in units}
    owners: dict[object, int] = {}
    before: list[int | None] = []  # for each unit, the one that had its weight buffer before
    for index, unit in enumerate(units):
        before.append(owners.get((unit.role, unit.buffer)))
        owners[unit.role, unit.buffer] = index
    computed: dict[int | None, int | None] = {}
    gathered = [add("all_gather", units[0].name, traffic[0].gather_forward)] if units else []
    for index, unit in enumerate(units):
        if index + 1 < len(units):  # the next unit's weights are prefetched
            freed = computed.get(before[index + 1])
            gathered.append(add("all_gather", units[index + 1].name, traffic[index + 1].gather_forward, freed))
        computed[index] = add("forward", unit.name, operations[index].forward, gathered[index])
    outside = [each for name, each in work.items() if name not in names]
    add("forward", "", sum(each.forward for each in outside))
    add("backward", "", sum(each.backward for each in outside))
    counts = {each.role: max(each.gradient_buffers, 1) for each in plan.buffers}
    places = [sum(other.role == unit.role for other in units[:index]) for index, unit in enumerate(units)]
    in_reduces = sum(each.reduce for each in traffic)
    reduced: dict[object, int | None] = {}  # the last collective that reads each gradient buffer
    gathered_again: dict[int, int | None] = {}
    for index, unit in reversed(list(enumerate(units))):
        buffer = unit.role, places[index] % counts[unit.role]
        waits = gathered_again.get(index), reduced.get(buffer)
        done = add("backward", unit.name, operations[index].backward, *waits)
        reduced[buffer] = add("reduce", unit.name, traffic[index].reduce, done)
        if plan.communication.replicas and in_reduces:
            share = traffic[index].reduce / in_reduces
            reduced[buffer] = add("all_reduce", unit.name, share * plan.communication.replicas, reduced[buffer])
        again = before[index]
        if again is not None:  # the unit's weight buffer is free to gather the unit that had it before
            gathered_again[again] = add("all_gather", units[again].name, traffic[again].gather_backward, done)
    add("all_reduce", "", plan.communication.replicated, len(events) - 1)
    return events
