"""A unit as it was cut: its shards, and what was said about it. It outlives the slots and lanes of an assembly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from yafsdp_cc.compression import check_kept
from yafsdp_cc.engine.flat import Divisor
from yafsdp_cc.engine.lanes import Lanes
from yafsdp_cc.engine.tensor import flat_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.engine.compressed import Compressed
    from yafsdp_cc.engine.flat import Flat, Piece
    from yafsdp_cc.engine.host import Host
    from yafsdp_cc.engine.ranks import Ranks
    from yafsdp_cc.engine.small import SmallBlock
    from yafsdp_cc.plan import Role

_DRAFT = "_yafsdp_cc_draft"


@dataclass
class Settings:
    """What may be said about a unit at any time."""

    keeps_after_forward: bool = False
    keeps_after_backward: bool = False
    near: int = 0
    """How many ranks near each other keep a second shard of the weights; 0 for none."""
    read_in_backward: bool = True
    """Whether the backward needs the weights."""
    forward_prefetch: Sequence[Draft] = ()
    """Gathered when this unit is about to run, instead of what ran next the last time."""
    backward_prefetch: Sequence[Draft] = ()
    synchronises: bool = True
    """Whether a backward reduces the gradients, or keeps them whole for a later one."""
    gradient_slots: int = 2
    separate_reduce_group: bool = False
    lanes: Lanes = field(default_factory=Lanes)
    """Roots may share them."""

    @property
    def keeps(self) -> bool:
        """Whether the unit has a slot to itself, so that its weights stay whole until they change."""
        return self.keeps_after_forward or self.keeps_after_backward


@dataclass(eq=False)
class Draft:
    """Modules whose parameters are gathered together; ``role`` is None where only the whole model tells it."""

    name: str
    modules: tuple[nn.Module, ...]
    ranks: Ranks
    policy: MixedPrecisionPolicy
    flats: tuple[Flat, ...]
    blocks: tuple[SmallBlock, ...]
    role: Role | None = None
    host: Host | None = None
    """Where the shards are if not on the device."""
    compressed: Compressed | None = None
    """The whole model's, once it is known."""
    outer: Draft | None = None
    """The next one around it."""
    ignored: frozenset[nn.Parameter] = frozenset()
    """Parameters that were left as they are."""
    settings: Settings = field(default_factory=Settings)

    def check(self) -> None:
        """Raise a ``ValueError`` if what was said about the unit does not go with what was said about the model."""
        settings = self.settings
        stays_whole = settings.near == 0 and (settings.keeps or self.role == "root")
        if self.compressed is not None and self.flats and not stays_whole:
            check_kept(self.compressed.config, self.name, settings.near)

    @property
    def parts(self) -> tuple[Flat | SmallBlock, ...]:
        """All buffers of parameters."""
        return (*self.flats, *self.blocks)

    @property
    def pieces(self) -> Iterator[Piece]:
        """All parameters."""
        return (piece for part in self.parts for piece in part.pieces)

    def divide_by(self, factor: float) -> None:
        """Divide summed gradients by ``factor``."""
        divisor = Divisor(factor, self.ranks.device)
        for part in self.parts:
            part.divisor = divisor

    def attach(self) -> None:
        """Let the modules know whose they are, and the drafts within them what is around them now."""
        for module in self.modules:
            for inner in drafts_below(module):
                if inner.outer is None and inner is not self:
                    inner.outer = self
            module.__dict__[_DRAFT] = self

    @property
    def outermost(self) -> Draft:
        """The root, as far as is known by now."""
        return self if self.outer is None else self.outer.outermost


@torch.no_grad()
def materialize(draft: Draft, fn: Callable[[Tensor], Tensor]) -> None:
    """Give what is on the meta device the memory that ``fn`` (``torch.empty_like`` on a device) makes.

    Raises:
        RuntimeError: that is another device's, and the unit's shards are to be in host memory.
    """
    for part in draft.parts:
        if not part.master.is_meta:
            continue
        master = fn(part.master)
        if draft.host is not None:
            if not master.is_cpu:
                raise RuntimeError(
                    f"'{part.pieces[0].cut.name}' was sharded with CPUOffloadPolicy and so belongs to host memory, not "
                    f'to {master.device}: call model.to_empty(device="cpu"), and move the buffers where they are used'
                )
            master = draft.host.zeros(master.numel(), master.dtype)  # pinned, if it has to be
        part.use(master)
        for piece in part.pieces:
            piece.local = piece.range_of(master)
            fresh = nn.Parameter(flat_dtensor(piece.local, piece.cut), piece.parameter.requires_grad)
            fresh.__dict__.update(piece.parameter.__dict__)
            fresh._local_tensor, fresh._cut = piece.local, piece.cut  # type: ignore[attr-defined]
            torch.utils.swap_tensors(piece.parameter, fresh)  # remains the object that everybody knows


def draft_of(module: nn.Module) -> Draft | None:
    """What ``module`` was sharded as, or None."""
    draft: Draft | None = module.__dict__.get(_DRAFT)
    return draft


def drafts_below(module: nn.Module) -> list[Draft]:
    """The drafts of ``module`` and what is in it, in module order but its own last."""
    found = [draft for inner in module.modules() if (draft := draft_of(inner)) is not None]
    own = draft_of(module)
    return [*(draft for draft in dict.fromkeys(found) if draft is not own), *([own] if own is not None else [])]
