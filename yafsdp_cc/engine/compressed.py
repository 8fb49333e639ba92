"""What of a model crosses ranks encoded, while it is trained: who encodes what, and since when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yafsdp_cc.compression import EXACT, LOW_RANK
from yafsdp_cc.wire.encoded import EncodedReduce, EncodedSum, counts_of
from yafsdp_cc.wire.factored import FactoredReduce, FactoredSum
from yafsdp_cc.wire.feedback import Recursion, Residual
from yafsdp_cc.wire.lowrank import LowRank, matrices_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.compression import Compression
    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.ranks import Ranks
    from yafsdp_cc.engine.unit import Unit
    from yafsdp_cc.wire.chunks import ChunkSum
    from yafsdp_cc.wire.codec import Codec
    from yafsdp_cc.wire.post import Post
    from yafsdp_cc.wire.shared import SharedSum


class Compressed:
    """One model's compression; it outlives the exchanges of an assembly.

    Raises:
        ValueError: the scope is replicas, and there are none.
    """

    def __init__(self, config: Compression, ranks: Ranks) -> None:
        self.config = config
        self.steps = 0
        """Optimizer steps since compression was asked for."""
        self._seen: tuple[tuple[int, ...], ...] = ()
        self.loss_scale = 1.0
        """What losses are multiplied by, and so gradients and residuals."""
        if config.scope == "replicate" and ranks.replicas is None:
            raise ValueError(
                "compression has scope='replicate', and the mesh has no replicas: pass a mesh (replicate, shard), or "
                "scope='auto'"
            )
        self.over_replicas = ranks.replicas is not None and config.scope != "shard"
        """Whether sums over replicas are encoded, and those over the ranks of a shard exact."""

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over."""
        return self.steps >= self.config.warmup_steps

    def look(self, units: Iterable[Unit]) -> None:
        """Count a step of the warm-up where the weights have changed since this was asked last."""
        if self.is_warm:
            return
        stamps = tuple(unit.stamp() for unit in units)
        if self._seen and stamps != self._seen:
            self.steps += 1
        self._seen = stamps

    def resume(self, steps: int) -> None:
        """Go on after so many steps, with weights that were loaded and so are no step's."""
        self.steps, self._seen = steps, ()

    @property
    def weights(self) -> Codec | None:
        """The codec of gathered weights."""
        name = self.config.weights
        return None if name is None else self.config.make(name)

    def encodes(self, flat: Flat) -> bool:
        """Whether the gradients of ``flat`` are ever encoded."""
        return flat.codec != EXACT

    def reduce_for(self, flat: Flat, post: Post, name: str) -> ChunkSum:
        """The exchange of a flat's gradients among the ranks of a shard."""
        numel = flat.layout.numel
        residual = self._residual(flat, post.world - 1, post.device)
        if flat.codec == LOW_RANK:
            assert residual is not None
            lowrank = self._low_rank(flat, 0, numel, name, post.device)
            return FactoredReduce(post, lowrank, numel, residual, self._recursion)
        counts = self._counts(flat, post.device)
        counts = None if counts is None else counts.view(post.world, -1)
        codec = self.config.make(flat.codec)
        return EncodedReduce(post, codec, numel, counts, residual, name, self._recursion)

    def sum_for(self, flat: Flat, group: dist.ProcessGroup, rank: int, device: torch.device, name: str) -> SharedSum:
        """The sum of a flat's partial sums over replicas, where this is ``rank`` of the shard."""
        chunk = flat.layout.chunk
        residual = self._residual(flat, 1, device)
        if flat.codec == LOW_RANK:
            assert residual is not None
            lowrank = self._low_rank(flat, rank * chunk, (rank + 1) * chunk, f"{name}/{rank}", device)
            return FactoredSum(group, device, lowrank, chunk, residual, self._recursion)
        counts = self._counts(flat, device)
        counts = None if counts is None else counts.view(flat.layout.world, -1)[rank : rank + 1]
        codec = self.config.make(flat.codec)
        return EncodedSum(group, device, codec, chunk, counts, residual, name, self._recursion)

    @property
    def _recursion(self) -> Recursion:
        return Recursion(carry=self.config.carry)

    def _residual(self, flat: Flat, messages: int, device: torch.device) -> Residual | None:
        """That of the flat, made now if there is none yet."""
        dtype = self.config.residual_dtype
        if flat.residual is None and dtype is not None:
            flat.residual = Residual(messages, flat.layout.chunk, dtype, self.config.block, device)
        return flat.residual

    def _low_rank(self, flat: Flat, first: int, last: int, name: str, device: torch.device) -> LowRank:
        """The factors of a range of the flat, made now if there are none yet."""
        if flat.lowrank is None:
            rank = self.config.matrix_rank
            flat.lowrank = LowRank(*matrices_of(flat.layout.places, rank, first, last), rank, name, device)
        return flat.lowrank

    def _counts(self, flat: Flat, device: torch.device) -> Tensor | None:
        extents = [(extent.offset, extent.end) for extent in flat.layout.extents]
        return counts_of(extents, flat.layout.numel, self.config.block, device)
