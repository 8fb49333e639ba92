"""When each stage of a pipeline is done, how long the sum of its gradients takes, and which sums are worth encoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import _ComputationType

from yafsdp_cc.compression.autotune import measure_link, seconds_per_element
from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.layout import align

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BACKWARDS = (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT)
HIDES = (_ComputationType.FORWARD, _ComputationType.BACKWARD_WEIGHT)
_COMPUTES = (*BACKWARDS, *HIDES)


class StageSeconds(NamedTuple):
    """Seconds that one stage takes for one micro-batch."""

    forward: float
    backward: float
    """Seconds for gradients of inputs and of weights. Schedules that split a backward take half of it for each."""
    send: float = 0.0
    """Seconds from the end of a computation until a neighbour has its result."""


def computed(actions: Iterable[Any]) -> Iterator[Any]:
    """Yield the computations among a rank's pipeline actions in order, each part of a combined action by itself."""
    for action in actions:
        if action is not None:
            yield from (each for each in action.sub_actions or (action,) if each.computation_type in _COMPUTES)


def compute_ends(pipeline_order: Mapping[int, Sequence[Any]], seconds: StageSeconds) -> dict[int, float]:
    """Return when each stage has finished its last backward, in seconds from the start of a step.

    Every rank computes its actions in order, each as soon as its inputs have arrived.
    """
    waiting = {rank: list(computed(actions)) for rank, actions in pipeline_order.items()}
    rank_of = {action.stage_index: rank for rank, actions in waiting.items() for action in actions}
    last, half = max(rank_of), seconds.backward / 2
    lasts = dict(zip(_COMPUTES, (seconds.backward, half, seconds.forward, half), strict=True))
    clock = dict.fromkeys(waiting, 0.0)
    ends: dict[tuple[str, int, int], float] = {}
    finished = dict.fromkeys(rank_of, 0.0)
    forwards = dict.fromkeys(rank_of, 0)
    while any(waiting.values()):
        before = len(ends)
        for rank, actions in waiting.items():
            while actions:
                stage, kind, micro_batch, _ = actions[0]
                if kind is _ComputationType.FORWARD:
                    # count forwards: torch 2.13 numbers the micro-batches of the last stage in 1F1B from 1
                    micro_batch = forwards[stage]
                forward, backward = ("forward", stage, micro_batch), ("backward", stage, micro_batch)
                if kind is _ComputationType.FORWARD:
                    own, source = forward, ("forward", stage - 1, micro_batch) if stage else None
                elif kind is _ComputationType.BACKWARD_WEIGHT:
                    own, source = ("weight", stage, micro_batch), backward
                else:
                    own, source = backward, ("backward", stage + 1, micro_batch) if stage < last else forward
                if source is not None and source not in ends:
                    break
                crosses = source is not None and rank_of[source[1]] != rank
                ready = 0.0 if source is None else ends[source] + (seconds.send if crosses else 0.0)
                clock[rank] = ends[own] = max(clock[rank], ready) + lasts[kind]
                finished[stage] = max(finished[stage], clock[rank])
                forwards[stage] += kind is _ComputationType.FORWARD
                actions.pop(0)
        if len(ends) == before:
            raise ValueError(f"actions wait for each other: {[actions[0] for actions in waiting.values() if actions]}")
    return finished


def stages_to_compress(
    pipeline_order: Mapping[int, Sequence[Any]], seconds: StageSeconds, exact_reduce: float, encoded_reduce: float
) -> frozenset[int]:
    """Return the stages whose data-parallel gradients are worth encoding: those that finish last (selective stages).

    No step is shorter than the last backward and an encoded reduce after it. A stage whose exact reduce is over by then
    need not be encoded, and all others are: in 1F1B the first stages, which finish their backward last.

        chosen = stages_to_compress(schedule.pipeline_order, StageSeconds(0.1, 0.2), exact_reduce=1.0, ...)
        yafsdp_cc.shard(part, compression="int8" if place in chosen else None)

    Args:
        exact_reduce: seconds of any stage's exact reduce over its data-parallel ranks, calculated or measured.
        encoded_reduce: seconds of any stage's encoded reduce.

    Source: Song et al., "Optimus-CC", 2023 (selective stage compression), who choose a share of the stages by hand.
    """
    ends = compute_ends(pipeline_order, seconds)
    shortest = max(ends.values()) + encoded_reduce
    return frozenset(stage for stage, end in ends.items() if end + exact_reduce > shortest * (1 + 1e-9))


_TRIAL = 1 << 20
"""Largest number of elements that ``measure_reduces`` encodes to time a codec."""


class ReduceSeconds(NamedTuple):
    """Seconds that a reduce-scatter of a stage's gradients takes."""

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
    """
    made, group = codec_of(codec), mesh.get_group()
    device = torch.zeros(0, dtype=torch.float32, device=mesh.device_type).device
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
