"""Computes how long a training step takes from its plan, a compute rate and a link.

    link      gather 0 | gather 1  | gather 2  |          reduce 2 | gather 0 | reduce 1 | reduce 0 |
    compute            | forward 0 | forward 1 | forward 2 | backward 2 | backward 1 | backward 0 |

One lane computes, the other carries one collective at a time, both in the order in which the engine issues them. Units
of a role take turns in the role's buffers: an all-gather waits until the previous unit in its buffer has computed, and
a backward waits until the reduce that reads its gradient buffer is over. Time in which the computing lane waits for the
network is exposed. What a ``ReplicaSync`` sends may take the whole step, in a third lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from yafsdp_cc.plan.report import Plan

Kind: TypeAlias = Literal["forward", "backward", "all_gather", "reduce", "all_reduce", "sync"]


class Link(NamedTuple):
    """The network between ranks, by the times that collectives take."""

    per_byte: float
    """Seconds for each byte that a rank sends to other nodes."""
    latency: float = 0.0
    """Seconds of each collective besides those for its bytes and ranks."""
    hop: float = 0.0
    """Seconds of a collective for each rank but the first, as ranks of a ring pass everything on."""
    within: float = 0.0
    """Seconds for each byte that a rank sends within its node."""
    node: int = 1
    """Number of ranks of a node, neighbours in the shard dimension of the mesh."""
    direct: bool = False
    """Whether reduces go straight to the owners, as encoded ones do, and not around a ring."""

    def seconds(self, event: Event) -> float:
        """Return how long it takes until every rank has sent the event's bytes.

        A ring crosses to the next node once, and its bytes share the links of all its ranks in a node. In a ``direct``
        sum each rank sends all bytes but those for owners in its node over its own link.
        """
        near = max(1, self.node // event.stride)  # ranks of the collective in a node
        crossing = 1 / near if event.ranks > near else 0.0
        if self.direct and event.kind != "all_gather":
            crossing = max(0, event.ranks - near) / max(1, event.ranks - 1)
        per_byte = max(self.within, self.per_byte * crossing)
        return self.latency + self.hop * (event.ranks - 1) + per_byte * event.amount


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
    ranks: int = 1
    """Number of ranks that take part."""
    stride: int = 1
    """Distance between the numbers of neighbouring ``ranks`` in the mesh: 1 in a shard, its size over replicas."""

    @property
    def lane(self) -> str:
        return {"forward": "compute", "backward": "compute", "sync": "sync"}.get(self.kind, "network")


class StepTime(NamedTuple):
    """Seconds of the parts of a step."""

    forward: float
    backward: float
    """Seconds of the backward, recomputation included."""
    exposed_forward: float
    """Seconds of all-gathers in the forward that nothing overlaps."""
    exposed_backward: float
    """Seconds of the backward's collectives, and of a ``ReplicaSync``'s, that nothing overlaps."""
    optimizer: float = 0.0

    @property
    def exposed(self) -> float:
        """Share of the step in which nothing but communication happens."""
        return (self.exposed_forward + self.exposed_backward) / self.total if self.total else 0.0

    @property
    def total(self) -> float:
        return sum(self)


def step_time(events: Sequence[Event], flops_per_second: float, link: Link) -> StepTime:
    """Return how long a step with these events takes at a compute rate, over a link."""
    ends: list[float] = []
    free = {"compute": 0.0, "network": 0.0, "sync": 0.0}
    computed = {"forward": 0.0, "backward": 0.0}
    forward_end = 0.0
    for event in events:
        start = max(free[event.lane], *(ends[index] for index in event.after), 0.0)
        if event.lane == "compute":
            seconds = event.amount / flops_per_second
            computed[event.kind] += seconds
        else:
            seconds = link.seconds(event)
        ends.append(start + seconds)
        free[event.lane] = ends[-1]
        forward_end = ends[-1] if event.kind == "forward" else forward_end
    exposed = forward_end - computed["forward"], max(ends, default=0.0) - forward_end - computed["backward"]
    return StepTime(computed["forward"], computed["backward"], *exposed)


def events_of(plan: Plan, work: Mapping[str, Work]) -> list[Event]:
    """Return the events of a step in the order in which the engine issues them.

    Args:
        work: operations by the name of a unit; those of other names are outside of units.

    Raises:
        ValueError: ``work`` lacks a unit.
    """
    events: list[Event] = []

    def add(
        kind: Kind, unit: str, amount: float, *after: int | None, ranks: int = plan.world, stride: int = 1
    ) -> int | None:
        if not amount:
            return None
        events.append(Event(kind, unit, amount, tuple(index for index in after if index is not None), ranks, stride))
        return len(events) - 1

    units, traffic = plan.units, plan.traffic
    if lacking := [unit.name for unit in units if unit.name not in work]:
        raise ValueError(f"work has no operations of unit {lacking[0]!r}: give probe the plan's units")
    operations = [work[unit.name] for unit in units]
    names, replicas = {unit.name for unit in units}, plan.replicas
    if plan.sync_bytes:
        add("sync", "", plan.communication.replicas, ranks=replicas, stride=plan.world)
        replicas = 1
    owners: dict[object, int] = {}
    before: list[int | None] = []  # for each unit, the unit that had its weight buffer before
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
    reduced: dict[object, int | None] = {}  # the last reduce that reads each gradient buffer
    gathered_again: dict[int, int | None] = {}
    for index, unit in reversed(list(enumerate(units))):
        buffer = unit.role, places[index] % counts[unit.role]
        waits = gathered_again.get(index), reduced.get(buffer)
        done = add("backward", unit.name, operations[index].backward, *waits)
        reduced[buffer] = own = add("reduce", unit.name, traffic[index].reduce, done)
        add("all_reduce", unit.name, traffic[index].replicas, own, done, ranks=replicas, stride=plan.world)
        again = before[index]
        if again is not None:  # the weight buffer is free to gather the unit that had it before
            near, sent = plan.secondary_ranks or plan.world, traffic[again].gather_backward
            gathered_again[again] = add("all_gather", units[again].name, sent, done, ranks=near)
    add("all_reduce", "", plan.communication.replicated, *range(len(events))[-1:], ranks=plan.world * replicas)
    return events
