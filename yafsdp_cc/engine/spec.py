"""Configuration of parameter groups, which outlives an assembly of the engine, and the counters that users read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from yafsdp_cc.engine.streams import CommStreams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.engine.mesh import MeshInfo
    from yafsdp_cc.engine.offload import HostMemory
    from yafsdp_cc.engine.param import FlatParam, FSDPParam
    from yafsdp_cc.engine.protocols import Collectives
    from yafsdp_cc.engine.replicated import ReplicatedFlatParam
    from yafsdp_cc.plan.units import Role


@dataclass
class GroupSettings:
    """What users may change about a group at any time; what changes the number of buffers takes another assembly."""

    keeps_after_forward: bool = False
    """Whether unsharded weights stay after the forward, in a buffer of their own (``reshard_after_forward=False``)."""
    keeps_after_backward: bool = False
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
    streams: CommStreams = field(default_factory=CommStreams)

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
    host: HostMemory | None = None
    """Where shards are in host memory."""
    outer: ParamGroupSpec | None = None
    """The next one around it."""
    ignored: frozenset[nn.Parameter] = frozenset()
    """Parameters that were left as they are."""
    settings: GroupSettings = field(default_factory=GroupSettings)

    @property
    def parts(self) -> tuple[FlatParam | ReplicatedFlatParam, ...]:
        """All flat buffers of parameters."""
        return (*self.flats, *self.replicated)

    @property
    def params(self) -> Iterator[FSDPParam]:
        return (param for part in self.parts for param in part.params)

    @property
    def outermost(self) -> ParamGroupSpec:
        """The root, as far as is known by now."""
        return self if self.outer is None else self.outer.outermost

    def check_collectives(self) -> None:
        """Raise a ``ValueError`` if its collectives cannot work with its settings."""
        keeps = self.settings.keeps_unsharded or self.role == "root"
        if self.flats:
            self.collectives.check_group(self.name, keeps)


@dataclass
class Counters:
    """What the engine has done since ``shard``, on this rank. For users to read: nothing here steers the engine."""

    gathered_bytes: int = 0
    """Bytes that this rank has sent for weights."""
    reduced_bytes: int = 0
    """Bytes that this rank has sent for gradients, those of replicated parameters among them."""
    spills: int = 0
    """How often a group needed an overflow buffer because its assigned one was in use."""
    owned_bytes: int = 0
    """Bytes of all buffers that the engine owned on its device when ``counters_of`` was last called."""
    host_bytes: int = 0
    """The same of those that were offloaded to host memory."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Codecs of groups' gradients that were chosen while training; ``"fp32"`` is exact."""
    why: str = ""
    """What was measured when that was chosen last, in a line."""
