"""Measures the data-parallel sum of a stage's gradients, exact and encoded, for ``stages_to_compress``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from yafsdp_cc.compression.autotune import measure_link, seconds_per_element
from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.layout import align

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_TRIAL = 1 << 20
"""Number of elements that the measurement encodes, at most."""


class ReduceSeconds(NamedTuple):
    """How long a reduce-scatter of a stage's gradients takes, in seconds."""

    exact: float
    encoded: float


@torch.no_grad()
def measure_reduces(
    mesh: DeviceMesh, numel: int, codec: str = "int8", dtype: torch.dtype = torch.float32
) -> ReduceSeconds:
    """Measure the link between data-parallel ranks and the codec; return how long a reduce takes.

    A collective of the ranks of ``mesh``, all of which get the times of the slowest rank. It sends about a megabyte.

        reduce = measure_reduces(mesh["data"], sum(p.numel() for p in part.parameters()))
        chosen = stages_to_compress(order, per_micro_batch, *reduce)

    Args:
        mesh: one-dimensional mesh of the ranks that share the stage.
        numel: number of elements of the stage's gradients.
        codec: codec of the messages, with error feedback and a residual in bf16.
        dtype: dtype of gradients that are sent exactly.

    Raises:
        ValueError: there is no such codec.
    """
    made, group = codec_of(codec), mesh.get_group()
    device = torch.zeros(0, device=mesh.device_type).device
    comm = Communicator(group, device)
    if comm.world == 1:
        return ReduceSeconds(0.0, 0.0)
    peers, chunk = comm.world - 1, align(-(-numel // comm.world), BLOCK)
    link = measure_link(CommContext(comm, ScratchBuffers(device), lambda kind, name: None), chunk * dtype.itemsize)
    part = min(chunk, max(_TRIAL // peers // BLOCK, 1) * BLOCK)
    trial = torch.zeros(peers, part, dtype=dtype, device=device)
    work = torch.tensor(seconds_per_element(made, trial, torch.bfloat16), dtype=torch.float64, device=device)
    dist.all_reduce(work, dist.ReduceOp.MAX, group=group)
    encoded = link.latency + link.per_byte * peers * made.message_bytes(chunk) + float(work) * comm.world * chunk
    return ReduceSeconds(link.latency + link.per_byte * peers * chunk * dtype.itemsize, encoded)
