"""What of a model crosses ranks encoded, while it is trained: who encodes what, and since when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yafsdp_cc.compression import EXACT
from yafsdp_cc.wire.encoded import EncodedReduce, EncodedSum, Post, counts_of
from yafsdp_cc.wire.feedback import Recursion, Residual

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.compression import Compression
    from yafsdp_cc.engine.flat import Flat
    from yafsdp_cc.engine.ranks import Ranks
    from yafsdp_cc.wire.codec import Codec


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

    def look(self, stamps: tuple[tuple[int, ...], ...]) -> None:
        """Count a step where the versions of all weights have changed since the last pass."""
        if self._seen and stamps != self._seen:
            self.steps += 1
        self._seen = stamps

    @property
    def weights(self) -> Codec | None:
        """The codec of gathered weights."""
        name = self.config.weights
        return None if name is None else self.config.make(name)

    def encodes(self, flat: Flat) -> bool:
        """Whether the gradients of ``flat`` are ever encoded."""
        return flat.codec != EXACT

    def reduce_for(self, flat: Flat, post: Post, name: str) -> EncodedReduce:
        """The exchange of a flat's gradients among the ranks of a shard."""
        codec, chunk = self.config.make(flat.codec), flat.layout.chunk
        if flat.residual is None:
            flat.residual = self._residual(post.world - 1, chunk, codec, post.device)
        counts = self._counts(flat, post.device)
        counts = None if counts is None else counts.view(post.world, -1)
        return EncodedReduce(post, codec, flat.layout.numel, counts, flat.residual, name, self._recursion)

    def sum_for(self, flat: Flat, group: dist.ProcessGroup, rank: int, device: torch.device, name: str) -> EncodedSum:
        """The sum of a flat's partial sums over replicas, where this is ``rank`` of the shard."""
        codec, chunk = self.config.make(flat.codec), flat.layout.chunk
        if flat.residual is None:
            flat.residual = self._residual(1, chunk, codec, device)
        counts = self._counts(flat, device)
        counts = None if counts is None else counts.view(flat.layout.world, -1)[rank : rank + 1]
        return EncodedSum(group, device, codec, chunk, counts, flat.residual, name, self._recursion)

    @property
    def _recursion(self) -> Recursion:
        return Recursion(carry=self.config.carry)

    def _residual(self, messages: int, chunk: int, codec: Codec, device: torch.device) -> Residual | None:
        dtype = self.config.residual_dtype
        return None if dtype is None else Residual(messages, chunk, dtype, codec.block, device)

    def _counts(self, flat: Flat, device: torch.device) -> Tensor | None:
        extents = [(extent.offset, extent.end) for extent in flat.layout.extents]
        return counts_of(extents, flat.layout.numel, self.config.block, device)
