"""Collectives that users bring as FSDP2's ``AllGather`` and ``ReduceScatter`` objects, behind the engine's protocols.

FSDP2's objects have two methods: ``allocate``, which makes the memory that is communicated, and ``__call__``, which
communicates. They are called as by FSDP2: each operation gets new memory from ``allocate``, and this rank's part of an
all-gather lies within the output. Weights and gradients are then copied to and from the engine's buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from yafsdp_cc.engine.collectives import sum_scale
from yafsdp_cc.engine.protocols import AllGather, ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed.fsdp._fully_shard import _fsdp_api as fsdp2

    from yafsdp_cc.engine.communicator import Works
    from yafsdp_cc.engine.param import FlatParam


class CustomAllGather(AllGather):
    """An all-gather by ``comm``, the user's object. On a CPU the host waits at once."""

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
    """A sum by ``comm``, the user's object, in the dtype of the gradients; divided afterwards, in fp32."""

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
