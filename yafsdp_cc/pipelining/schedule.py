"""Gives compressed stages the samples of each step, and the order of their schedule's actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from yafsdp_cc.engine.spec import specs_below
from yafsdp_cc.pipelining.sharded import ShardedStage
from yafsdp_cc.pipelining.stage import CompressedStage
from yafsdp_cc.pipelining.timeline import BACKWARDS, HIDES, computed

S = TypeVar("S", PipelineScheduleSingle, PipelineScheduleMulti)


def prepare_schedule(schedule: S) -> S:
    """Let a schedule of compressed stages take ``sample_ids``, and compare the stages' settings.

    A collective of all ranks of the pipeline: call it once the schedule is built, after ``load_state_dict`` of its
    stages if there is a state to load. ``schedule.step`` then has one more argument:

        schedule.step(batch, sample_ids=ids)    # and schedule.step(sample_ids=ids) on later stages

    ids: [samples of the batch] integers on any device or a sequence, the same on all stages. With
    ``forward_delta=True`` they say whose activations a batch has. Otherwise they are needed only if batches or
    micro-batches differ in their numbers of samples, which torch's own stage cannot send.

    Args:
        schedule: a schedule of ``torch.distributed.pipelining``, with ``CompressedStage``s.

    Raises:
        TypeError: ``schedule`` is none of torch's, one of its stages is no ``CompressedStage``, or a stage's class is
            for plain modules and its module sharded, or the reverse.
        NotImplementedError: ``epilogue_only`` needs a ``pipeline_order``, and the schedule has none.
        ValueError: stages have different settings; on all ranks.
        RuntimeError: one of these was raised on another rank.
    """
    stages = _stages_of(schedule)
    _compare(stages, _unfit(schedule, stages))
    for stage in stages:
        stage.is_prepared = True
        if stage.compression.epilogue_only:
            stage.exact_gradients = hidden_gradients(schedule.pipeline_order or {})
    if "step" in vars(schedule):  # the schedule was prepared before
        return schedule
    step, count = schedule.step, schedule._n_microbatches

    def step_with_ids(*args: Any, sample_ids: Sequence[int] | Tensor | None = None, **kwargs: Any) -> Any:
        # arguments with chunk specs of their own may have samples in another dimension
        batches = (*args, kwargs.get("target")) if schedule._args_chunk_spec is None else (kwargs.get("target"),)
        micro_batches = None if sample_ids is None else _split(sample_ids, count, batches)
        for stage in stages:
            stage.begin_step(micro_batches, trains=schedule._has_backward)
        result = step(*args, **kwargs)
        for stage in stages:
            stage.end_step()
        return result

    schedule.step = step_with_ids  # type: ignore[method-assign]
    return schedule


def _stages_of(schedule: Any) -> list[Any]:
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    if isinstance(schedule, PipelineScheduleMulti):
        return list(schedule._stages)
    raise TypeError(
        f"prepare_schedule: {type(schedule).__name__} is no schedule of torch.distributed.pipelining, such as "
        "Schedule1F1B(stage, n_microbatches, loss_fn)"
    )


def hidden_gradients(pipeline_order: Mapping[int, Sequence[Any]]) -> frozenset[tuple[int, int]]:
    """Return the (sending stage, micro-batch) of all gradients whose transfer a computation may hide.

    A gradient is hidden if, right before the backward that needs it, its receiver computes a forward, or only gradients
    of weights. All other gradients belong to the epilogue: in 1F1B the last p - 1 - r that stage r of p receives; in
    GPipe all but the first, as each backward waits for the next stage.

    Source: Song et al., "Optimus-CC", 2023 (epilogue-only compression), here for any order of actions.
    """
    by_rank = [list(computed(actions)) for actions in pipeline_order.values()]
    last = max(action.stage_index for actions in by_rank for action in actions)
    return frozenset(
        (action.stage_index + 1, action.microbatch_index)
        for actions in by_rank
        for before, action in pairwise(actions)
        if action.computation_type in BACKWARDS
        and before.computation_type in HIDES
        and action.stage_index != last  # the last stage's gradient comes from the loss
    )


def _unfit(schedule: Any, stages: Sequence[Any]) -> Exception | None:
    """Return an exception that says why this rank's stages or schedule do not fit; None if they do."""
    for stage in stages:
        if not isinstance(stage, CompressedStage):
            return TypeError(
                f"prepare_schedule: stage {stage.stage_index} is a {type(stage).__name__}: build every stage of the "
                "pipeline as CompressedStage, or as CompressedShardedStage if yafsdp_cc.shard has sharded its module"
            )
        is_sharded = bool(specs_below(stage.submod))
        if is_sharded != isinstance(stage, ShardedStage):
            fit = "CompressedShardedStage" if is_sharded else "CompressedStage"
            return TypeError(
                f"stage {stage.stage_index} is a {type(stage).__name__}, and its module is "
                f"{'' if is_sharded else 'not '}sharded by yafsdp_cc: build it as {fit}"
            )
    if any(stage.compression.epilogue_only for stage in stages) and not schedule.pipeline_order:
        return NotImplementedError(
            f"epilogue_only=True: {type(schedule).__name__} has no pipeline_order, so that nobody knows what it hides. "
            "Use a schedule that has one, such as Schedule1F1B, or epilogue_only=False"
        )
    return None


def _compare(stages: Sequence[Any], problem: Exception | None) -> None:
    """Raise on all ranks of the pipeline if there is a problem on one of them, or stages have different settings."""
    fingerprints = {} if problem else {stage.stage_index: stage.fingerprint() for stage in stages}
    gathered: list[Any] = [None] * stages[0].group_size
    dist.all_gather_object(gathered, (fingerprints, str(problem or "")), group=stages[0].group)
    if problem is not None:
        raise problem
    for _, elsewhere in gathered:
        if elsewhere:
            raise RuntimeError(f"on another rank of the pipeline: {elsewhere}")
    known: dict[str, tuple[int, Any]] = {}
    for found, _ in gathered:
        for index, fingerprint in sorted(found.items()):
            for name, value in fingerprint.items():
                first, expected = known.setdefault(name, (index, value))
                if value != expected:
                    raise ValueError(
                        f"stages differ: {name} is {expected!r} on stage {first} and {value!r} on stage {index}. "
                        "Build all stages with the same settings, and load a checkpoint on all of them or on none"
                    )


def _split(sample_ids: Sequence[int] | Tensor, count: int, batches: Sequence[Any]) -> list[list[int]]:
    """Return the sample ids of each micro-batch, as torch splits the batch."""
    ids = torch.as_tensor(sample_ids, device="cpu")
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"sample_ids: takes [samples] integers, not {list(ids.shape)} of {ids.dtype}")
    for batch in batches:
        if isinstance(batch, Tensor) and batch.dim() and len(batch) != len(ids):
            raise ValueError(
                f"sample_ids: {len(ids)} ids for a batch of {len(batch)} samples: give one for each, in the order of "
                "the batch"
            )
    if len(ids) < count:
        raise ValueError(f"sample_ids: {len(ids)} samples cannot be split into {count} micro-batches")
    return [each.tolist() for each in torch.tensor_split(ids, count)]
