"""Collectives beside the exact and the compressed ones: secondary shards (hpZ), and FSDP2's objects that users bring.

A secondary shard of the weights lets ranks gather weights from their neighbours:

    first all-gather of a step, over all ranks    | a | b | c | d |   every rank then keeps half of it:   a b | c d
    every later one, over ranks 0, 1 or 2, 3      | a   b | c   d |

FSDP2's ``AllGather`` and ``ReduceScatter`` objects have two methods: ``allocate``, which makes the memory that is
communicated, and ``__call__``, which communicates. They are called as by FSDP2: each operation gets new memory from
``allocate``, and this rank's part of an all-gather lies within the output. Weights and gradients are then copied to and
from the engine's buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from yafsdp_cc.engine.collectives import sum_scale
from yafsdp_cc.engine.communicator import Communicator
from yafsdp_cc.engine.protocols import AllGather, ReduceScatter

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.fsdp._fully_shard import _fsdp_api as fsdp2

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
        """Shard version of the weights in the secondary shard; None if the secondary shard is empty."""
        self._starting = -1
        """Shard version of the weights that the last ``start`` gathers."""
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
        own = self._comm.own_chunk(output).copy_(self._shard) if self._comm.is_gloo else self._shard
        self.sent_bytes = self._comm.peer_bytes(output.nbytes)
        return self._comm.all_gather(output, own, async_op)

    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        if not self._from_secondary:
            self.inner.finish(output, scratch)
            self._shard.copy_(self._comm.own_chunk(output))
            self._version = self._starting

    def expire(self) -> None:
        self._version = None


class CustomAllGather(AllGather):
    """An all-gather by ``comm``, the user's object; on a CPU ``start`` blocks the host until the weights are there."""

    has_finish = False

    def __init__(self, flat: FlatParam, comm: fsdp2.AllGather, group: dist.ProcessGroup) -> None:
        self._flat, self._comm, self._group = flat, comm, group

    def planned_bytes(self) -> int:
        layout = self._flat.layout
        return (layout.world - 1) * layout.chunks[self._flat.rank] * self._flat.compute_dtype.itemsize

    def encoding(self) -> str:
        return type(self._comm).__name__

    @torch.no_grad()
    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        gathered = self._comm.allocate(output.shape, dtype=output.dtype, device=output.device)
        own = self.context.comm.own_chunk(gathered)
        self._flat.send_buffer(own, in_place=True)
        _wait(self._comm(output_tensor=gathered, input_tensor=own, group=self._group, async_op=False))
        output.copy_(gathered)
        self.sent_bytes = self.planned_bytes()
        return ()


class CustomReduceScatter(ReduceScatter):
    """A reduce-scatter by ``comm``, the user's object, in the gradients' dtype; the engine divides the sum in fp32."""

    defers = False

    def __init__(self, flat: FlatParam, comm: fsdp2.ReduceScatter, group: dist.ProcessGroup) -> None:
        self._flat, self._comm, self._group = flat, comm, group
        self._scale = sum_scale(flat.reduce_dtype, group.size())
        self._total: Tensor | None = None

    def planned_bytes(self) -> int:
        layout = self._flat.layout
        return (layout.world - 1) * layout.chunks[self._flat.rank] * self._flat.reduce_dtype.itemsize

    def encoding(self) -> str:
        return type(self._comm).__name__

    def reset(self) -> None:
        self._total = None

    @torch.no_grad()
    def start(self, grads: Tensor, async_op: bool) -> Works:
        chunk = grads.numel() // self._group.size()
        summands = self._comm.allocate(grads.shape, dtype=grads.dtype, device=grads.device)
        total = self._comm.allocate((chunk,), dtype=grads.dtype, device=grads.device)
        torch.div(grads, self._scale, out=summands)
        add = dist.ReduceOp.SUM
        _wait(self._comm(output_tensor=total, input_tensor=summands, group=self._group, op=add, async_op=False))
        self.sent_bytes = self.planned_bytes()
        self._total = total
        return ()

    @torch.no_grad()
    def finish(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        total, self._total = self._total, None
        assert total is not None
        yield 0, total.to(self._flat.sum_dtype).mul_(self._scale)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
