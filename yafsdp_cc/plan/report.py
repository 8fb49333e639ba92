"""The plan of a sharded model, per rank, as numbers and as a table: its units, buffers, communication and memory.

Every figure is an integer that the engine knows before the first step; ``owned_bytes`` is what it allocates, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from yafsdp_cc.table import table

if TYPE_CHECKING:
    from yafsdp_cc.engine.spec import PlannedChoice, Role

WIDTH = 100
"""Largest width of the printed plan, in characters."""


@dataclass(frozen=True)
class PlannedUnit:
    """One unit of a plan. ``parameters`` and ``trainable`` count tensors; ``padded`` counts elements with padding."""

    name: str
    role: Role
    parameters: int
    trainable: int
    elements: int
    padded: int
    dtypes: tuple[str, ...]
    buffer: int
    """Index of the unit's weight buffer among the weight buffers of its role."""


@dataclass(frozen=True)
class PlannedBuffers:
    """The preallocated buffers that units of one role take turns in: how many, and the bytes of each."""

    role: Role
    weight_buffers: int
    weight_buffer_bytes: int
    gradient_buffers: int
    gradient_buffer_bytes: int
    kept_buffers: int = 0
    """Number of those weight buffers in which unsharded weights remain, for delta all-gathers."""


@dataclass(frozen=True)
class PlannedReplicated:
    """Numbers of replicated parameters and of their elements, and all bytes on the device for them."""

    parameters: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class PlannedDtypes:
    """Dtypes that ``tensors`` parameters share: the optimizer updates them in dtype ``parameters``, the forward
    computes in ``forward``, gathers send ``gathered`` and reduces ``reduced`` (dtypes, names of codecs, or "none")."""

    tensors: int
    parameters: str
    forward: str
    gathered: str
    reduced: str


@dataclass(frozen=True)
class PlannedTraffic:
    """Bytes that one rank sends in one step for one unit, by collective."""

    gather_forward: int
    gather_backward: int
    reduce: int
    replicas: int = 0


@dataclass(frozen=True)
class PlannedCommunication:
    """Bytes that one rank sends in one step (it receives as many). The first step also gathers frozen weights, which
    are then kept, and gathers exactly the weights that later steps gather as deltas."""

    gather_forward: int
    gather_backward: int
    reduce: int
    replicated: int
    replicas: int = 0
    """Bytes that one rank sends to sum the gradients of its shard over the replicas of the model."""
    secondary: int = 0
    """Bytes of ``gather_backward`` sent from secondary shards, among the neighbouring ranks that share one."""

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that one rank sends in one step, by name of the collective."""
        return {name.replace("_", ", "): size for name, size in asdict(self).items() if name != "secondary"}

    @property
    def total(self) -> int:
        return sum(self.sent.values())


@dataclass(frozen=True)
class PlannedHost:
    """Bytes in host memory of offloaded shards: of units, and of replicated parameters with their gradients. ``adamw``
    is the state that AdamW would add, and part of the plan's ``adamw_bytes``."""

    parameters: int
    gradients: int
    replicated: int
    adamw: int

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of host memory by what they hold, such as "gradient shards", without the optimizer's state."""
        return {
            "parameter shards": self.parameters,
            "gradient shards": self.gradients,
            "replicated parameters": self.replicated,
        }


@dataclass(frozen=True)
class PlannedOwner:
    """The matrices that one rank of a shard owns; a parameter that is a stack of matrices is named once."""

    rank: int
    matrices: tuple[str, ...]
    elements: int
    newton_schulz_flops: int
    """Floating-point operations of one Newton-Schulz iteration on the trained matrices."""


@dataclass(frozen=True)
class PlannedArgument:
    """An argument that the script, a run file, the environment or the command line gave, and which of them did."""

    name: str
    value: str
    source: str

    def __str__(self) -> str:
        value = self.value if len(self.value) <= 60 else f"{self.value[:58]}.."
        return f"  {self.name} = {value}  ({self.source})"


@dataclass(frozen=True)
class Plan:
    """The bytes that one rank holds and sends. ``adamw_bytes`` is an estimate of what AdamW would add."""

    world: int
    units: tuple[PlannedUnit, ...]
    buffers: tuple[PlannedBuffers, ...]
    replicated: PlannedReplicated
    communication: PlannedCommunication
    parameter_shard_bytes: int
    gradient_shard_bytes: int
    receive_bytes: int
    adamw_bytes: int
    traffic: tuple[PlannedTraffic, ...] = ()
    """Bytes that one rank sends in one step for each unit; ``communication`` has the sums over units."""
    replicas: int = 1
    """Number of replicas of the model, each sharded across ``world`` ranks."""
    replica_bytes: int = 0
    sync_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the buffers that a ``ReplicaSync`` has for this rank's shard, by name."""
    secondary_shard_bytes: int = 0
    secondary_ranks: int = 0
    """Number of neighbouring ranks that share a secondary shard; 0 for none."""
    residual_bytes: int = 0
    owners: tuple[PlannedOwner, ...] = ()
    """Matrices that each rank owns whole; empty with ``ownership="flat"``."""
    choices: tuple[PlannedChoice, ...] = ()
    """Bytes that encoding gradients with each codec would send and hold as residuals; empty unless they are encoded."""
    delta_bytes: int = 0
    """Bytes of scratch for encoded weights and deltas of weights."""
    transfer_bytes: int = 0
    """Bytes on the device of buffers for copies of offloaded shards and gradients from and to host memory."""
    host: PlannedHost | None = None
    """Bytes of offloaded shards and gradients in host memory; None if nothing is offloaded."""
    chosen: str = ""
    """Codecs that ``compression="auto"`` has chosen so far, in words; the plan's bytes and residuals are theirs."""
    arguments: tuple[PlannedArgument, ...] = ()
    """Arguments that a run file, the environment or the command line gave, each with its source."""
    dtypes: tuple[PlannedDtypes, ...] = ()
    """Dtypes in which parameters are updated, computed with, gathered and reduced."""
    snapshot_bytes: int = 0
    """Bytes of this rank's part of a snapshot by ``Rescue``, with AdamW's state. Host memory holds one copy, and the
    node's /dev/shm up to four: two of this rank's part and two of that of the rank whose buddy this rank is."""
    whole_elements: int = 0
    """Number of elements of the whole model, with parts that tensor or expert parallelism puts on other ranks."""

    @property
    def parameters(self) -> int:
        """Number of parameter tensors: those of all units, and replicated ones."""
        return sum(unit.parameters for unit in self.units) + self.replicated.parameters

    @property
    def elements(self) -> int:
        """Number of parameter elements that the ranks of this shard hold together, without padding."""
        return sum(unit.elements for unit in self.units) + self.replicated.elements

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that the engine holds on this rank's device, by what they hold, such as "weight buffers"."""
        always = {
            "parameter shards": self.parameter_shard_bytes,
            "gradient shards": self.gradient_shard_bytes,
            "weight buffers": sum(b.weight_buffer_bytes * (b.weight_buffers - b.kept_buffers) for b in self.buffers),
            "gradient buffers": sum(b.gradient_buffer_bytes * b.gradient_buffers for b in self.buffers),
            "receive buffer": self.receive_bytes,
            "replicated parameters": self.replicated.bytes,
        }
        sometimes = {
            "weights kept whole": sum(b.weight_buffer_bytes * b.kept_buffers for b in self.buffers),
            "residuals": self.residual_bytes,
            "secondary shards": self.secondary_shard_bytes,
            "sums over replicas": self.replica_bytes,
            "encoded weights": self.delta_bytes,
            "host transfers": self.transfer_bytes,
            **self.sync_bytes,
        }
        return always | {name: size for name, size in sometimes.items() if size}

    @property
    def owned_bytes(self) -> int:
        """Bytes the engine allocates on this rank's device: the sum of ``memory``, without the optimizer's state."""
        return sum(self.memory.values())

    @property
    def host_bytes(self) -> int:
        """Bytes the engine allocates in host memory for offloaded shards."""
        return 0 if self.host is None else sum(self.host.memory.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the plan and its totals as a dict of plain types, for JSON."""
        counts = {"parameters": self.parameters, "elements": self.elements}
        totals = {"owned_bytes": self.owned_bytes, "host_bytes": self.host_bytes, "memory": self.memory}
        return {**asdict(self), **counts, **totals, "communication_bytes": self.communication.total}

    def __str__(self) -> str:
        ranks = f"{self.world} rank" + "s" * (self.world != 1) + f", {self.replicas} times" * (self.replicas > 1)
        sent, secondary = self.communication.sent, self.communication.secondary
        if self.replicas == 1:
            del sent["replicas"]
        optimizer = f"An AdamW optimizer would add {human(self.adamw_bytes)} ({self.adamw_bytes:,} bytes)"
        snapshot = f"A snapshot of Rescue takes {human(self.snapshot_bytes)}, up to four times, in /dev/shm"
        whole = max(self.whole_elements, self.elements)
        held = "" if whole == self.elements else f", of which these ranks hold {self.elements:,}"

        def columns(rows: Iterable[Row], left: int = 1) -> str:
            return table(*rows, left=left, width=WIDTH)

        sends = columns(_byte_rows("sent per rank and step", sent))
        if secondary:
            sends += f"\nOf this, {human(secondary)} ({secondary:,} bytes) is gathered from secondary shards."
        parts = [
            f"{len(self.units)} units on {ranks}, {whole:,} parameters in {self.parameters:,} tensors{held}",
            columns(_unit_rows(self.units, self.replicated), left=2),
            columns(_dtype_rows(self.dtypes)) if self.dtypes else "",
            columns(_buffer_rows(self.buffers)),
            sends,
            columns(_byte_rows("held per rank", self.memory)),
            columns(_owner_rows(self.owners)) if self.owners else "",
            columns(_choice_rows(self.choices)) if self.choices else "",
        ]
        if self.host is not None:
            parts.append(columns(_byte_rows("offloaded to host memory", self.host.memory)))
            optimizer += f", {human(self.host.adamw)} of it in host memory"
        if self.arguments:
            parts.append("\n".join(["arguments that are no defaults", *map(str, self.arguments)]))
        parts.append(f"{optimizer}.\n{snapshot}." + (f"\nChosen now: {self.chosen}." if self.chosen else ""))
        return "\n\n".join(filter(None, parts))


def human(size: int) -> str:
    """Return a number of bytes in words: ``12.6 MiB``."""
    value = float(size)
    for prefix in ("", "Ki", "Mi", "Gi"):
        if value < 1023.95:
            return f"{value:.1f} {prefix}B" if prefix else f"{size} B"
        value /= 1024
    return f"{value:.1f} TiB"


Row = Sequence[str]


def _unit_rows(units: Sequence[PlannedUnit], replicated: PlannedReplicated) -> Iterator[Row]:
    """Yield a table row for each run of adjacent units that differ only in name and buffer."""
    yield "unit", "role", "tensors", "trainable", "elements", "padded", "dtype", "buffer"
    for like, run in groupby(units, key=lambda unit: replace(unit, name="", buffer=0)):
        same = list(run)
        counts = (like.parameters, like.trainable, like.elements, like.padded)
        dtype = _short("+".join(like.dtypes))
        buffers = "/".join(map(str, sorted({unit.buffer for unit in same})))
        name = _run_name([unit.name for unit in same])
        yield name, like.role, *(f"{count:,}" for count in counts), dtype, buffers
    yield "(replicated)", "", f"{replicated.parameters:,}", "", f"{replicated.elements:,}", "", "", ""


def _run_name(names: Sequence[str]) -> str:
    """Return one name for adjacent units, ``model.layers.0 ... 23 x24``, with what differs in the last unit's name."""
    if len(names) == 1:
        return names[0]
    first, last = names[0].split("."), names[-1].split(".")
    differ = (index for index, parts in enumerate(zip(first, last, strict=False)) if parts[0] != parts[1])
    shared = next(differ, len(first))  # the last unit may be a part of the first
    return f"{names[0]} ... {'.'.join(last[shared:])}  x{len(names)}"


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def _dtype_rows(dtypes: Sequence[PlannedDtypes]) -> Iterator[Row]:
    yield "dtypes", "parameters", "forward", "gathered", "reduced"
    for each in dtypes:
        row = (each.parameters, each.forward, each.gathered, each.reduced)
        yield f"  of {each.tensors:,} tensors", *map(_short, row)


def _buffer_rows(buffers: Sequence[PlannedBuffers]) -> Iterator[Row]:
    yield "buffers", "weights", "gradients", "bytes"
    for each in buffers:
        sizes = [(each.weight_buffers, each.weight_buffer_bytes), (each.gradient_buffers, each.gradient_buffer_bytes)]
        cells = (f"{count} x {human(size)}" if count else "none" for count, size in sizes)
        yield each.role, *cells, f"{sum(count * size for count, size in sizes):,}"


def _byte_rows(title: str, sizes: Mapping[str, int]) -> Iterator[Row]:
    yield title, "", "bytes"
    for name, size in {**sizes, "total": sum(sizes.values())}.items():
        yield f"  {name}", human(size), f"{size:,}"


def _choice_rows(choices: Sequence[PlannedChoice]) -> Iterator[Row]:
    yield "if all gradients were", "sent", *(f"residual {kind}" for kind in choices[0].residual)
    for choice in choices:
        yield f"  {choice.codec}", human(choice.reduce), *map(human, choice.residual.values())


def _owner_rows(owners: Sequence[PlannedOwner]) -> Iterator[Row]:
    yield "owner of whole matrices", "matrices", "elements", "of the mean", "Newton-Schulz FLOPs", "of the mean"
    mean_elements = sum(owner.elements for owner in owners) / len(owners) or 1
    mean_flops = sum(owner.newton_schulz_flops for owner in owners) / len(owners) or 1
    for owner in owners:
        size = f"{owner.elements:,}", f"{owner.elements / mean_elements:.0%}"
        work = f"{owner.newton_schulz_flops:,}", f"{owner.newton_schulz_flops / mean_flops:.0%}"
        yield f"  rank {owner.rank}", f"{len(owner.matrices):,}", *size, *work
