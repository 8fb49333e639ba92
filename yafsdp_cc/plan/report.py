"""The plan of a sharded model, as numbers and as a table: its units, its slots, its wire and its memory, per rank.

Every figure is an integer that the engine knows before the first step; ``owned_bytes`` is what it allocates, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yafsdp_cc.plan.units import Role

WIDTH = 100
"""Columns the printed plan may use."""


@dataclass(frozen=True)
class PlannedUnit:
    """One unit. ``parameters`` and ``trainable`` count tensors; ``padded`` is its flat buffer, in elements."""

    name: str
    role: Role
    parameters: int
    trainable: int
    elements: int
    padded: int
    dtypes: tuple[str, ...]
    slot: int


@dataclass(frozen=True)
class PlannedRing:
    """The preallocated buffers that units of one role take turns in; bytes are those of each."""

    role: Role
    weight_slots: int
    weight_slot_bytes: int
    gradient_slots: int
    gradient_slot_bytes: int
    following: int = 0
    """Of the weight slots, those of weights that stay whole and follow their shards by encoded changes."""

    @property
    def weight_bytes(self) -> int:
        return self.weight_slots * self.weight_slot_bytes

    @property
    def following_bytes(self) -> int:
        return self.following * self.weight_slot_bytes

    @property
    def gradient_bytes(self) -> int:
        return self.gradient_slots * self.gradient_slot_bytes


@dataclass(frozen=True)
class PlannedSmall:
    """The small group: replicated parameters, and all bytes the engine holds for them on its device."""

    parameters: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class PlannedWire:
    """Bytes one rank sends in one step (as many arrive). The first step also gathers frozen weights that then stay, and
    gathers exactly what later follows by encoded changes."""

    gather_forward: int
    gather_backward: int
    reduce: int
    small: int
    replicas: int = 0
    """To sum over replicas what the ranks of one of them have summed."""
    second: int = 0
    """Of the gathers, what second shards give: it stays among ranks near each other."""

    @property
    def total(self) -> int:
        return self.gather_forward + self.gather_backward + self.reduce + self.small + self.replicas


@dataclass(frozen=True)
class PlannedChoice:
    """A codec for all gradients that are encoded: bytes sent per step, and residual bytes, by what keeps them."""

    codec: str
    reduce: int
    residual: dict[str, int]


@dataclass(frozen=True)
class PlannedHost:
    """Bytes in host memory, where shards are offloaded: of units, and of the small group with its gradients. ``adamw``
    is what an optimizer would add there, and part of the plan's ``adamw_bytes``."""

    parameters: int
    gradients: int
    small: int
    adamw: int

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by name, the optimizer left out."""
        return {"parameter shards": self.parameters, "gradient shards": self.gradients, "small group": self.small}


@dataclass(frozen=True)
class Plan:
    """What one rank holds and sends. ``adamw_bytes`` is an estimate of what an optimizer would add."""

    world: int
    units: tuple[PlannedUnit, ...]
    rings: tuple[PlannedRing, ...]
    small: PlannedSmall
    wire: PlannedWire
    parameter_shard_bytes: int
    gradient_shard_bytes: int
    receive_bytes: int
    adamw_bytes: int
    replicas: int = 1
    """How often the ``world`` ranks of one shard are there."""
    replica_bytes: int = 0
    second_shard_bytes: int = 0
    residual_bytes: int = 0
    """What encoded gradients have still to say."""
    choices: tuple[PlannedChoice, ...] = ()
    """Where gradients are encoded, what each codec would cost instead."""
    change_bytes: int = 0
    """Room for what encoded changes of weights say."""
    crossing_bytes: int = 0
    """Room on the device for what crosses from and to host memory."""
    host: PlannedHost | None = None
    """What is offloaded."""
    chosen: str = ""
    """What ``compression="auto"`` has chosen so far, in words; the wire and the residuals above are those of it."""

    @property
    def parameters(self) -> int:
        """Tensors in all units and the small group."""
        return sum(unit.parameters for unit in self.units) + self.small.parameters

    @property
    def elements(self) -> int:
        """Elements of the whole model, padding left out."""
        return sum(unit.elements for unit in self.units) + self.small.elements

    @property
    def memory(self) -> dict[str, int]:
        """Bytes this rank holds on its device, by name."""
        following = sum(ring.following_bytes for ring in self.rings)
        return {
            "parameter shards": self.parameter_shard_bytes,
            "gradient shards": self.gradient_shard_bytes,
            "weight slots": sum(ring.weight_bytes - ring.following_bytes for ring in self.rings),
            **({"weights kept whole": following} if following else {}),
            "gradient slots": sum(ring.gradient_bytes for ring in self.rings),
            "receive buffer": self.receive_bytes,
            **({"residuals": self.residual_bytes} if self.residual_bytes else {}),
            **({"second shards": self.second_shard_bytes} if self.second_shard_bytes else {}),
            **({"sums for replicas": self.replica_bytes} if self.replicas > 1 else {}),
            **({"room for changes": self.change_bytes} if self.change_bytes else {}),
            **({"room for crossings": self.crossing_bytes} if self.crossing_bytes else {}),
            "small group": self.small.bytes,
        }

    @property
    def owned_bytes(self) -> int:
        """Bytes the engine allocates on this rank's device: all of ``memory``, and so not the optimizer."""
        return sum(self.memory.values())

    @property
    def host_bytes(self) -> int:
        """Bytes it allocates in host memory for what is offloaded from there."""
        return 0 if self.host is None else sum(self.host.memory.values())

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain types, with the totals, for JSON."""
        counts = {"parameters": self.parameters, "elements": self.elements}
        totals = {**counts, "owned_bytes": self.owned_bytes, "host_bytes": self.host_bytes}
        return {**asdict(self), **totals, "wire_bytes": self.wire.total, "memory": self.memory}

    def __str__(self) -> str:
        ranks = f"{self.world} rank" + "s" * (self.world != 1)
        if self.replicas > 1:
            ranks += f", {self.replicas} times"
        head = f"{len(self.units)} units on {ranks}, {self.elements:,} parameters in {self.parameters:,} tensors"
        wire = asdict(self.wire)
        second = wire.pop("second")
        sent = {name.replace("_", ", "): size for name, size in wire.items() if name != "replicas" or size}
        host = self.host
        offloaded = [] if host is None else [*_byte_rows("offloaded to host memory", host.memory, self.host_bytes)]
        there = "" if host is None else f", {human(host.adamw)} of it in host memory"
        return "\n".join(
            [
                head,
                "",
                *_table(_unit_rows(self.units, self.small), left=2),
                "",
                *_table(_ring_rows(self.rings), left=1),
                "",
                *_table(_byte_rows("sent per rank and step", sent, self.wire.total), left=1),
                *(
                    [f"Of this, {human(second)} ({second:,} bytes) stays among ranks near each other."]
                    if second
                    else []
                ),
                "",
                *_table(_byte_rows("held per rank", self.memory, self.owned_bytes), left=1),
                *(["", *_table(_choice_rows(self.choices), left=1), ""] if self.choices else []),
                *(["", *_table(offloaded, left=1)] if offloaded else []),
                f"An AdamW optimizer would add {human(self.adamw_bytes)} ({self.adamw_bytes:,} bytes){there}.",
                *([f"Chosen now: {self.chosen}."] if self.chosen else []),
            ]
        )


def human(size: int) -> str:
    """``12.6 MiB``."""
    value = float(size)
    for prefix in ("", "Ki", "Mi", "Gi"):
        if value < 1023.95:
            return f"{value:.1f} {prefix}B" if prefix else f"{size} B"
        value /= 1024
    return f"{value:.1f} TiB"


Row = Sequence[str]


def _unit_rows(units: Sequence[PlannedUnit], small: PlannedSmall) -> Iterator[Row]:
    yield "unit", "role", "tensors", "trainable", "elements", "padded", "dtype", "slot"
    for unit, names, slots in _runs(units):
        counts = (unit.parameters, unit.trainable, unit.elements, unit.padded)
        yield _run_name(names), unit.role, *(f"{count:,}" for count in counts), _short(unit.dtypes), slots
    yield "(small group)", "", f"{small.parameters:,}", "", f"{small.elements:,}", "", "", ""


def _ring_rows(rings: Sequence[PlannedRing]) -> Iterator[Row]:
    yield "slots", "weights", "gradients", "bytes"
    for ring in rings:
        counts = (ring.weight_slots, ring.gradient_slots)
        sizes = (ring.weight_slot_bytes, ring.gradient_slot_bytes)
        each = (f"{count} x {human(size)}" if count else "none" for count, size in zip(counts, sizes, strict=True))
        yield ring.role, *each, f"{ring.weight_bytes + ring.gradient_bytes:,}"


def _byte_rows(title: str, sizes: dict[str, int], total: int) -> Iterator[Row]:
    yield title, "", "bytes"
    for name, size in {**sizes, "total": total}.items():
        yield f"  {name}", human(size), f"{size:,}"


def _choice_rows(choices: Sequence[PlannedChoice]) -> Iterator[Row]:
    kinds = list(choices[0].residual)
    yield "if all gradients were", "sent", *(f"residual {kind}" for kind in kinds)
    for choice in choices:
        yield f"  {choice.codec}", human(choice.reduce), *(human(choice.residual[kind]) for kind in kinds)


def _runs(units: Sequence[PlannedUnit]) -> Iterator[tuple[PlannedUnit, list[str], str]]:
    """Neighbours that differ only in name and slot: one of them, all their names, the slots they alternate in."""
    for like, run in groupby(units, key=lambda unit: replace(unit, name="", slot=0)):
        same = list(run)
        yield like, [unit.name for unit in same], "/".join(map(str, sorted({unit.slot for unit in same})))


def _short(dtypes: Sequence[str]) -> str:
    return "+".join(dtypes).replace("bfloat", "bf").replace("float", "fp")


def _run_name(names: Sequence[str]) -> str:
    """``model.layers.0 ... 23  x24``: of the last name only what differs."""
    if len(names) == 1:
        return names[0]
    first, last = names[0].split("."), names[-1].split(".")
    shared = next(index for index, parts in enumerate(zip(first, last, strict=False)) if parts[0] != parts[1])
    return f"{names[0]} ... {'.'.join(last[shared:])}  x{len(names)}"


def _table(rows: Iterable[Row], left: int) -> list[str]:
    """Columns as wide as their widest cell, the first ``left`` flush left; the first column yields to ``WIDTH``."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    lines = []
    for first, *rest in cells:
        row = [_clipped(first, widths[0]), *rest]
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _clipped(text: str, width: int) -> str:
    """The text without its middle, when it is too long: both ends of a module's name tell something."""
    if len(text) <= width:
        return text
    tail = (width - 2) * 2 // 3
    return f"{text[: width - 2 - tail]}..{text[-tail:]}"
