"""Specs of parameter groups, their settings, and the factory of their collectives: what is kept when the engine of a
model is made anew.

``sharding.shards`` makes a ``ParamGroupSpec`` for modules that are sharded together; ``sharding.assembly`` makes groups
and an engine from the specs, anew whenever a setting changes that needs other buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import nn

from yafsdp_cc.engine.collectives import ExactAllGather, ExactReduceScatter
from yafsdp_cc.engine.hsdp import ExactAllReduce
from yafsdp_cc.engine.layout import ALIGNMENT

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard import _fsdp_api as fsdp2

    from yafsdp_cc.engine.param import FlatParam, FSDPParam
    from yafsdp_cc.engine.protocols import AllGather, AllReduce, Observer, ReduceScatter
    from yafsdp_cc.engine.replicated import ReplicatedFlatParam
    from yafsdp_cc.engine.streams import CommStream
    from yafsdp_cc.ranks.mesh import MeshInfo


Role = Literal["block", "nested", "edge", "root"]
"""Role of a parameter group, which decides the buffers that it takes. "nested": modules without submodules within
another unit, such as a block's experts, which have buffers of their own."""


SPEC = "_yafsdp_cc_spec"
"""Name of the attribute of a sharded module that holds its ``ParamGroupSpec``."""


@dataclass(frozen=True)
class PlannedChoice:
    """The cost of encoding all gradients with one codec: bytes sent per step, and bytes of residuals by dtype."""

    codec: str
    reduce: int
    residual: dict[str, int]


class Collectives:
    """Factory of a model's collectives: exact ones, unless a subclass makes others."""

    alignment = ALIGNMENT
    """Number of elements at multiples of which parameters and chunks begin in a flat buffer."""

    def flat_key(self, name: str, is_divided: bool) -> Hashable:
        """Return a key for the parameter of this full name: only parameters of equal keys share a ``FlatParam``.

        ``is_divided`` tells whether tensor parallelism gives its ranks different parts of the parameter.
        """
        return None

    def check_group(self, name: str, keeps_unsharded: bool) -> None:
        """Raise a ``ValueError`` if the group ``name`` needs a weight buffer of its own and does not have one."""

    def check_overrides(self, names: Collection[str]) -> None:
        """Raise a ``ValueError`` if a setting for named parameters fits none of these full ``names``."""

    def join(self, other: Collectives) -> None:
        """Take over the groups of ``other``, of the same model; raise a ``ValueError`` if their settings differ."""

    def all_gather(self, flat: FlatParam, keeps_unsharded: bool) -> AllGather:
        """Make the all-gather of ``flat``; ``keeps_unsharded`` if its weights stay in a buffer of their own."""
        return flat.extension_all_gather() or ExactAllGather(flat)

    def reduce_scatter(self, flat: FlatParam, has_replicas: bool) -> ReduceScatter:
        """Make the reduce-scatter of ``flat``; ``has_replicas`` if its sums are then summed over replicas."""
        layout, casts = flat.layout, flat.device.type != "cuda"
        return ExactReduceScatter(layout.numel, flat.reduce_dtype, casts=casts, chunks=layout.uneven_chunks)

    def all_reduce(self, flat: FlatParam) -> AllReduce:
        """Make the all-reduce of the partial sums of ``flat`` over replicas."""
        return ExactAllReduce(flat.layout.chunks[flat.rank] * flat.sum_dtype.itemsize)

    def observers(self) -> Sequence[Observer]:
        """Return the observers that the engine calls during training."""
        return ()

    def planned_choices(self, flats: Sequence[FlatParam]) -> Sequence[PlannedChoice]:
        """Return the cost of other codecs for the gradients of ``flats``."""
        return ()

    def describe_choice(self) -> str:
        """Return a text about the codecs chosen during training; empty if none are chosen."""
        return ""


EXACT = Collectives()
"""Collectives of models without compression."""


@dataclass
class GroupSettings:
    """A parameter group's settings, which users may change at any time; some changes make the engine anew."""

    keeps_after_forward: bool = False
    """Whether unsharded weights remain in a buffer of their own after the forward (``reshard_after_forward=False``)."""
    keeps_after_backward: bool = False
    stays_unsharded: bool | None = False
    """Whether modules show unsharded weights from a forward to its backward, as in FSDP2; None: only the root does."""
    secondary_ranks: int = 0
    """Number of neighbouring ranks that share a secondary shard of the unsharded weights (hpZ); 0 for none."""
    unshards_in_backward: bool = True
    """Whether the backward reads the weights, which are gathered for it then."""
    forward_prefetch: Sequence[ParamGroupSpec] = ()
    """Groups gathered when this group is about to run, in place of those that followed it the last time."""
    backward_prefetch: Sequence[ParamGroupSpec] = ()
    requires_gradient_sync: bool = True
    """Whether a backward reduces the gradients."""
    grad_buffers: int = 2
    """Number of gradient buffers that groups of this role take in turn."""
    separate_reduce_group: bool = False
    """Whether reduces have a communicator and a stream of their own; operations of one NCCL communicator take turns."""
    allocates_from_group: bool = False
    """Whether buffers are memory of the process group that sends from them, registered with NCCL."""
    streams: dict[str, CommStream] = field(default_factory=dict)
    """Streams for "all-gather", "reduce" and "all-reduce", each made at first use; several roots may share them."""
    custom_all_gather: fsdp2.AllGather | None = None
    """The user's own all-gather of weights; ``custom_reduce_scatter`` is the user's own sum of gradients."""
    custom_reduce_scatter: fsdp2.ReduceScatter | None = None

    @property
    def keeps_unsharded(self) -> bool:
        """Whether the group has a weight buffer to itself."""
        return self.keeps_after_forward or self.keeps_after_backward


@dataclass(eq=False)
class ParamGroupSpec:
    """Modules that were sharded together, their shards and settings; kept when the engine is made anew."""

    name: str
    modules: tuple[nn.Module, ...]
    info: MeshInfo
    policy: MixedPrecisionPolicy
    flats: tuple[FlatParam, ...]
    replicated: tuple[ReplicatedFlatParam, ...]
    collectives: Collectives
    role: Role | None = None
    """Role of the group; None (after ``fully_shard``): decided once the whole model is known."""
    outer: ParamGroupSpec | None = None
    """Spec of the innermost group around this one."""
    ignored: frozenset[nn.Parameter] = frozenset()
    """Parameters that the caller has left unsharded (``ignored_params``)."""
    settings: GroupSettings = field(default_factory=GroupSettings)

    @property
    def parts(self) -> tuple[FlatParam, ...]:
        """All flat parameters of the group, sharded and replicated."""
        return (*self.flats, *self.replicated)

    @property
    def params(self) -> Iterator[FSDPParam]:
        return (param for part in self.parts for param in part.params)

    @property
    def outermost(self) -> ParamGroupSpec:
        """Spec of the outermost sharded module around this group, as far as it is known yet."""
        return self if self.outer is None else self.outer.outermost


@dataclass
class Counters:
    """Counts of the engine's work on this rank since ``shard``, for users; the engine never reads them."""

    gathered_bytes: int = 0
    """Number of bytes that this rank has sent for weights."""
    reduced_bytes: int = 0
    """Number of bytes that this rank has sent for gradients, those of replicated parameters included."""
    overflow_buffers: int = 0
    """Number of times that a group needed an overflow buffer because its assigned one was in use."""
    owned_bytes: int = 0
    """Bytes of all buffers that the engine owned on its device when ``counters_of`` was last called."""
    host_bytes: int = 0
    """Bytes of all buffers that were offloaded to host memory when ``counters_of`` was last called."""
    skipped_batches: int = 0
    """Number of batches that all ranks have skipped together because one of them failed (``skip_together``)."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Codec chosen during training for each group's gradients; ``"fp32"`` is exact."""
    why: str = ""
    """One line about the measurements behind the last choice of codecs."""


def spec_of(module: nn.Module) -> ParamGroupSpec | None:
    """Return the spec of the group that ``module`` was sharded as, or None."""
    spec: ParamGroupSpec | None = module.__dict__.get(SPEC)
    return spec


def specs_below(module: nn.Module) -> list[ParamGroupSpec]:
    """Return the specs of ``module`` and the modules in it, in module order, but that of ``module`` itself last."""
    found = dict.fromkeys(spec for inner in module.modules() if (spec := spec_of(inner)) is not None)
    own = spec_of(module)
    return sorted(found, key=lambda spec: spec is own)
