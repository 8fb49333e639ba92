"""When each stage of a pipeline has computed, and which stages' gradients are worth compressing: pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.pipelining.schedules import _ComputationType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    """Return the computations of a rank in order, each part of a combined action by itself."""
    for action in actions:
        if action is not None:
            yield from (each for each in action.sub_actions or (action,) if each.computation_type in _COMPUTES)


def compute_ends(pipeline_order: Mapping[int, Sequence[Any]], seconds: StageSeconds) -> dict[int, float]:
    """Return when each stage has finished its last backward, in seconds from the start of a step.

    Every rank computes its actions in order, each as soon as its inputs have arrived.

    Raises:
        ValueError: the actions wait for each other.
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
                    # torch 2.13 numbers the micro-batches of the last stage in 1F1B from 1
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
    pipeline_order: Mapping[int, Sequence[Any]],
    seconds: StageSeconds,
    exact_reduce: float | Sequence[float],
    encoded_reduce: float | Sequence[float],
) -> frozenset[int]:
    """Return the stages whose data-parallel gradients are worth encoding: those that finish last (selective stages).

    No step is shorter than the latest stage with its reduce encoded. A stage whose exact reduce is over by then need
    not be encoded, and the others are. In 1F1B those are the first stages, which finish their backward last.

        chosen = stages_to_compress(schedule.pipeline_order, StageSeconds(0.1, 0.2), exact_reduce=1.0, ...)
        yafsdp_cc.shard(part, compression="int8" if place in chosen else None)

    Args:
        pipeline_order: the actions of each rank of a schedule in their order.
        seconds: times of every stage and micro-batch.
        exact_reduce: seconds of a stage's exact reduce over its data-parallel ranks, one number for all stages or one
            for each, calculated or measured.
        encoded_reduce: the same of an encoded reduce.

    Source: Song et al., "Optimus-CC", 2023 (selective stage compression), who choose a share of the stages by hand.
    """
    ends = compute_ends(pipeline_order, seconds)

    def of(reduce: float | Sequence[float], stage: int) -> float:
        return float(reduce) if isinstance(reduce, (int, float)) else reduce[stage]

    shortest = max(end + of(encoded_reduce, stage) for stage, end in ends.items())
    late = (stage for stage, end in ends.items() if end + of(exact_reduce, stage) > shortest * (1 + 1e-9))
    return frozenset(stage for stage in late if of(encoded_reduce, stage) < of(exact_reduce, stage))
