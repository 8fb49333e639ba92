"""The rounded all-gather: weights are sent in blocks of few bits, which all ranks decode alike, their owner too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yafsdp_cc.compression import kernels
from yafsdp_cc.engine.collectives import ExactAllGather

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.communicator import Works
    from yafsdp_cc.engine.param import FlatParam

ENCODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of unsharded weights that may be gathered encoded."""


class RoundedAllGather(ExactAllGather):
    """Gathers encoded weights where the schedule encodes, else exact ones.

    Args:
        flat: the weights.
        schedule: the model's.
        codec: of the messages.
    """

    has_finish = True
    flat: FlatParam

    def __init__(self, flat: FlatParam, schedule: CompressionSchedule, codec: Codec) -> None:
        super().__init__(flat)
        self.schedule = schedule
        self._codec = codec
        self._rounds = False

    def scratch_bytes(self) -> int:
        layout = self.flat.layout
        return layout.world * self._codec.message_bytes(layout.chunk)

    def planned_bytes(self) -> int:
        return self.context.comm.peer_bytes(self.scratch_bytes())

    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        self._rounds = scratch is not None and self.schedule.phase.encodes
        if scratch is None or not self._rounds:
            return super().start(output, held, scratch, async_op)
        comm, shard = self.context.comm, self.flat.sharded
        if shard.device.type != output.device.type:
            shard = self.flat.send_buffer(comm.own_chunk(output), in_place=True)
        own = comm.own_chunk(scratch)
        kernels.encode(self._codec, shard.unsqueeze(0), own.unsqueeze(0))
        self.sent_bytes = comm.peer_bytes(scratch.nbytes)
        return comm.all_gather(scratch, own, async_op)

    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        if scratch is not None and self._rounds:
            world = self.context.comm.world
            kernels.decode(self._codec, scratch.view(world, -1), output.view(world, -1))
