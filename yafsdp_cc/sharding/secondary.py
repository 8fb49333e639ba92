"""A secondary shard of the weights (hpZ): all-gathers among neighbouring ranks.

first all-gather of a step, over all ranks    | a | b | c | d |   every rank then keeps half of it:   a b | c d
every later one, over ranks 0, 1 or 2, 3      | a   b | c   d |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.communicator import Communicator
from yafsdp_cc.engine.protocols import AllGather

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.communicator import CommContext, Works
    from yafsdp_cc.engine.param import FlatParam


class SecondaryAllGather(AllGather):
    """An all-gather over neighbouring ranks of weights that ``inner`` has gathered over all ranks.

    The secondary shard holds weights in the dtype of the forward until they change (Wang et al., "ZeRO++", 2023,
    section 4.2: hierarchical partitioning).

    Args:
        inner: the all-gather over all ranks.
        neighbours: process group of this rank and its neighbours; its size divides the number of all ranks.
    """

    def __init__(self, inner: AllGather, flat: FlatParam, neighbours: dist.ProcessGroup, device: torch.device) -> None:
        self.inner = inner
        self._flat = flat
        self._comm = Communicator(neighbours, device)
        self._shard = torch.empty(flat.unsharded_numel // self._comm.world, dtype=flat.compute_dtype, device=device)
        self._version: int | None = None
        """Version of the weights in the secondary shard; None if it is empty."""
        self._starting = -1
        """Version of the weights that the last ``start`` gathers."""
        self._from_secondary = False

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        self.inner.bind(context)

    def reset(self) -> None:
        self.inner.reset()

    def scratch_bytes(self) -> int:
        return self.inner.scratch_bytes()

    def encoding(self) -> str:
        return self.inner.encoding()

    def planned_bytes(self) -> int:
        return self.inner.planned_bytes()

    def secondary_bytes(self) -> int:
        """Return the bytes that this rank sends to gather from secondary shards."""
        return self._comm.peer_bytes(self._flat.unsharded_numel * self._flat.compute_dtype.itemsize)

    def memory(self) -> Mapping[str, int]:
        return {**self.inner.memory(), "secondary shard": self._shard.nbytes}

    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        self._starting = self._flat.version
        self._from_secondary = self._version == self._starting
        if not self._from_secondary:
            works = self.inner.start(output, held, scratch, async_op)
            self.sent_bytes = self.inner.sent_bytes
            return works
        own = self._comm.own_chunk(output)
        if self._comm.is_gloo or self._comm.world == 1:
            own.copy_(self._shard)
        self.sent_bytes = self._comm.peer_bytes(output.nbytes)
        return self._comm.all_gather(output, own if self._comm.is_gloo else self._shard, async_op)

    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        if not self._from_secondary:
            self.inner.finish(output, scratch)
            self._shard.copy_(self._comm.own_chunk(output))
            self._version = self._starting

    def stepped(self, before: int, after: int) -> None:
        self.inner.stepped(before, after)

    def expire(self) -> None:
        self._version = None
