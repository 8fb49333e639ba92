"""What outlives an assembly of the engine: the specs of groups, their settings, and the factory of their collectives.

``sharding`` makes a ``ParamGroupSpec`` of what is sharded together; ``assembly`` makes groups and an engine from the
specs, anew whenever a setting changes that takes other buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from yafsdp_cc.engine.collectives import ExactAllGather, ExactReduceScatter
from yafsdp_cc.engine.hierarchy import ExactAllReduce
from yafsdp_cc.engine.layout import ALIGNMENT
from yafsdp_cc.engine.streams import CommStream, comm_stream

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard import _fsdp_api as fsdp2

    from yafsdp_cc.engine.mesh import MeshInfo
    from yafsdp_cc.engine.param import FlatParam, FSDPParam
    from yafsdp_cc.engine.protocols import AllGather, AllReduce, Observer, ReduceScatter
    from yafsdp_cc.engine.replicated import ReplicatedFlatParam


Role = Literal["block", "nested", "edge", "root"]
"""Nested are modules without parts within another unit, such as a block's experts: they have buffers of their own."""


SPEC = "_yafsdp_cc_spec"
"""Attribute of sharded modules: the ``ParamGroupSpec`` that they belong to."""


@dataclass(frozen=True)
class PlannedChoice:
    """A codec for all gradients that are encoded: bytes sent per step, and residual bytes, by what keeps them."""

    codec: str
    reduce: int
    residual: dict[str, int]


class Collectives:
    """Makes the collectives of a model: exact ones, unless a subclass makes others."""

    alignment = ALIGNMENT
    """Elements: parameters and chunks begin at multiples of it."""

    def flat_key(self, name: str) -> Hashable:
        """Return a key for the parameter of this full name: those of equal keys may share a ``FlatParam``."""
        return None

    def check_group(self, name: str, keeps_unsharded: bool) -> None:
        """Raise a ``ValueError`` where the collectives of the group ``name`` cannot work.

        ``keeps_unsharded`` tells whether its unsharded weights stay in a buffer of their own.
        """

    def join(self, other: Collectives) -> None:
        """Serve the groups of ``other``, of the same model, as well; raise a ``ValueError`` where that cannot be."""

    def all_gather(self, flat: FlatParam, keeps_unsharded: bool) -> AllGather:
        """Make the all-gather of ``flat``; ``keeps_unsharded`` as of ``check_group``."""
        return flat.extension_all_gather() or ExactAllGather(flat)

    def reduce_scatter(self, flat: FlatParam, has_replicas: bool) -> ReduceScatter:
        """Make the reduce-scatter of ``flat``; ``has_replicas`` if its sums are then summed over replicas."""
        layout, casts = flat.layout, flat.device.type != "cuda"
        return ExactReduceScatter(layout.numel, flat.reduce_dtype, casts=casts, chunks=layout.uneven_chunks)

    def all_reduce(self, flat: FlatParam) -> AllReduce:
        """Make the all-reduce of the partial sums of ``flat`` over replicas."""
        return ExactAllReduce(flat.layout.chunks[flat.rank] * flat.sum_dtype.itemsize)

    def observers(self) -> Sequence[Observer]:
        """Return what is to be called as training goes."""
        return ()

    def planned_choices(self, flats: Sequence[FlatParam]) -> Sequence[PlannedChoice]:
        """Return what other codecs would cost for the gradients of ``flats``."""
        return ()

    def describe_choice(self) -> str:
        """Return what was chosen for gradients while training, in words; empty where nothing is chosen."""
        return ""


EXACT = Collectives()
"""Of models without compression."""


class CommStreams:
    """The streams of all-gathers, of reduces and of sums over replicas, each made when it is first asked for.

    Roots may share them.
    """

    def __init__(self) -> None:
        self._streams: dict[str, CommStream] = {}

    def of(self, kind: Literal["all-gather", "reduce", "all-reduce"], device: torch.device) -> CommStream:
        if kind not in self._streams:
            self._streams[kind] = comm_stream(device)
        return self._streams[kind]


@dataclass
class GroupSettings:
    """What users may change about a group at any time; what changes the number of buffers takes another assembly."""

    keeps_after_forward: bool = False
    """Whether unsharded weights stay after the forward, in a buffer of their own (``reshard_after_forward=False``)."""
    keeps_after_backward: bool = False
    stays_unsharded: bool | None = False
    """Whether modules see unsharded weights from a forward to its backward, as FSDP2's; None: those of a root."""
    secondary_ranks: int = 0
    """How many neighbouring ranks hold a secondary shard of the unsharded weights (hpZ); 0 for none."""
    unshards_in_backward: bool = True
    """Whether the backward reads the weights."""
    forward_prefetch: Sequence[ParamGroupSpec] = ()
    """Gathered when this group is about to run, instead of what ran next the last time."""
    backward_prefetch: Sequence[ParamGroupSpec] = ()
    reduces: bool = True
    """Whether a backward reduces the gradients (``set_requires_gradient_sync``)."""
    grad_buffers: int = 2
    """How many gradient buffers groups of this role take in turn."""
    separate_reduce_group: bool = False
    allocates_from_group: bool = False
    """Whether buffers are memory of the process group that sends from them, registered with NCCL."""
    streams: CommStreams = field(default_factory=CommStreams)
    custom_all_gather: fsdp2.AllGather | None = None
    """What users have set to be called instead, as ``custom_reduce_scatter``."""
    custom_reduce_scatter: fsdp2.ReduceScatter | None = None

    @property
    def keeps_unsharded(self) -> bool:
        """Whether the group has a weight buffer to itself."""
        return self.keeps_after_forward or self.keeps_after_backward


@dataclass(eq=False)
class ParamGroupSpec:
    """Modules that were sharded together, their shards and settings: what outlives an assembly of the engine."""

    name: str
    modules: tuple[nn.Module, ...]
    info: MeshInfo
    policy: MixedPrecisionPolicy
    flats: tuple[FlatParam, ...]
    replicated: tuple[ReplicatedFlatParam, ...]
    collectives: Collectives
    role: Role | None = None
    """None where only the whole model tells it."""
    outer: ParamGroupSpec | None = None
    """The next one around it."""
    ignored: frozenset[nn.Parameter] = frozenset()
    """Parameters that were left as they are."""
    settings: GroupSettings = field(default_factory=GroupSettings)

    @property
    def parts(self) -> tuple[FlatParam, ...]:
        """All flat buffers of parameters."""
        return (*self.flats, *self.replicated)

    @property
    def params(self) -> Iterator[FSDPParam]:
        return (param for part in self.parts for param in part.params)

    @property
    def outermost(self) -> ParamGroupSpec:
        """The root, as far as is known by now."""
        return self if self.outer is None else self.outer.outermost


@dataclass
class Counters:
    """What the engine has done since ``shard``, on this rank. For users to read: nothing here steers the engine."""

    gathered_bytes: int = 0
    """Bytes that this rank has sent for weights."""
    reduced_bytes: int = 0
    """Bytes that this rank has sent for gradients, those of replicated parameters among them."""
    overflow_buffers: int = 0
    """How often a group needed an overflow buffer because its assigned one was in use."""
    owned_bytes: int = 0
    """Bytes of all buffers that the engine owned on its device when ``counters_of`` was last called."""
    host_bytes: int = 0
    """The same of those that were offloaded to host memory."""
    skipped_batches: int = 0
    """Batches that all ranks have skipped together because one of them failed (``skip_together``)."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Codecs of groups' gradients that were chosen while training; ``"fp32"`` is exact."""
    why: str = ""
    """What was measured when that was chosen last, in a line."""

    def count_reduced(self, nbytes: int) -> None:
        """Add to the bytes that this rank has sent for gradients."""
        self.reduced_bytes += nbytes


def spec_of(module: nn.Module) -> ParamGroupSpec | None:
    """Return the spec of the group that ``module`` was sharded as, or None."""
    spec: ParamGroupSpec | None = module.__dict__.get(SPEC)
    return spec


def specs_below(module: nn.Module) -> list[ParamGroupSpec]:
    """Return the specs of ``module`` and what is in it, in module order but its own last."""
    found = dict.fromkeys(spec for inner in module.modules() if (spec := spec_of(inner)) is not None)
    own = spec_of(module)
    return sorted(found, key=lambda spec: spec is own)
