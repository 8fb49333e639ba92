"""Compression in a checkpoint: residuals and kept weights, for any number of ranks, and unchanged for the same ranks.

Kept weights are the gathered weights that deltas build on (``compression.all_gather``).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from yafsdp_cc.checkpoint.state import paths_in
from yafsdp_cc.compression.fallback import CodecFallback
from yafsdp_cc.compression.schedule import CompressionSchedule
from yafsdp_cc.compression.state import (
    carry_over_residuals,
    compressed_sums,
    empty_kept_weights,
    empty_residuals,
    kept_weights,
    load_estimates,
    load_kept_weights,
    load_local_residuals,
    local_residuals,
    mean_estimates,
    mean_residuals,
)
from yafsdp_cc.fsdp2.module import ShardedModule, require_state
from yafsdp_cc.ranks.checks import all_gather_objects, refused_together

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from yafsdp_cc.checkpoint.ranks import Group
    from yafsdp_cc.engine.state import FSDPState

# these names are in checkpoints of earlier versions: keep them
RESIDUALS, ESTIMATES, KEPT = "residuals", "estimates", "kept_weights"
LOCAL, STEPS, BEHIND = "_wire_residuals", "_wire_steps", "_wire_behind"
FALLBACK, CLIP, DECAY, ROUNDED = "_wire_guard", "_wire_clip", "_wire_decay", "_wire_rounded"
"""Keys in each rank's extra file; the values of all but ``LOCAL`` and ``CLIP`` are equal on all ranks."""


def check_names(extra: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if the user's ``extra`` has one of compression's own keys."""
    if taken := [name for name in (LOCAL, STEPS, BEHIND, FALLBACK, CLIP, DECAY, ROUNDED) if name in extra]:
        raise ValueError(f"save() keeps something of its own as {taken[0]!r}: choose another name")


def local_state(model: nn.Module) -> dict[str, Any]:
    """Return compression's entries of this rank's extra file; none for a model without compression."""
    if (found := _compressed(model)) is None:
        return {}
    state, schedule = found
    _, behind = kept_weights(state)
    saved = {LOCAL: local_residuals(state), STEPS: schedule.steps, **({BEHIND: behind} if behind else {})}
    # save the decay that residuals have: a scheduler may have changed the optimizer's since the last forward
    saved[DECAY] = schedule.beta, schedule.share
    saved[ROUNDED] = {flat.name: compressed.rounded for flat, compressed in compressed_sums(state)}
    if (fallback := CodecFallback.of(state)) is not None:
        saved[FALLBACK] = fallback.state_dict()
    if schedule.clip is not None:
        saved[CLIP] = schedule.clip.state()
    return saved


def sharded_state(model: nn.Module, *, means: bool = True) -> dict[str, Any]:
    """Return compression's entries of the checkpoint's sharded state. A collective; call it before ``local_state``.

    With ``means``, the entries include the residuals' means over the ranks, which only a load by another number of
    ranks needs, and which cost as many bytes to send as exact gradients.
    """
    if (found := _compressed(model)) is None:
        return {}
    state, schedule = found
    if (fallback := CodecFallback.of(state)) is not None:
        fallback.judge()  # judge the measurement of errors under way, which a checkpoint does not hold
    schedule.count_step()  # the last optimizer step, which no forward has followed, may have ended the warm-up
    saved = {KEPT: kept_weights(state)[0]}
    if means:
        saved |= {RESIDUALS: mean_residuals(state), ESTIMATES: mean_estimates(state)}
    return {part: tensors for part, tensors in saved.items() if tensors}


def empty_state(model: nn.Module, contents: Metadata, trains: bool) -> dict[str, Any]:
    """Return tensors that torch loads the checkpoint's ``sharded_state`` into, as far as the model has a use for it.

    With ``trains``, a warning names parameters whose residuals are left out, as the model does not encode their sums.
    """
    found = _compressed(model)
    saved, told, kept = (
        {name for name, *_ in paths_in(contents, part).values()} for part in (RESIDUALS, ESTIMATES, KEPT)
    )
    gradients, weights = ({}, {}) if found is None else (empty_residuals(found[0]), empty_kept_weights(found[0]))
    residuals = {name: each for name, each in gradients.items() if name in saved}
    differs = found is not None and found[1].config.sends_differences
    estimates = {name: torch.zeros_like(each) for name, each in gradients.items() if differs and name in told}
    weights = {name: each for name, each in weights.items() if name in kept}
    if trains and (lost := sorted(saved - residuals.keys())):
        warnings.warn(
            f"the checkpoint has residuals, gradients that were still to be sent, of {', '.join(lost[:3])}"
            f"{', ...' if len(lost) > 3 else ''}, which this model does not encode: they are left out",
            stacklevel=3,
        )
    parts = {RESIDUALS: residuals, ESTIMATES: estimates, KEPT: weights}
    return {part: empty for part, empty in parts.items() if empty}


def load_state(model: nn.Module, loaded: dict[str, Any], extra: dict[str, Any], group: Group) -> None:
    """Load the checkpoint's state of compression, and remove its entries from ``extra``. A collective.

    Args:
        model: its shards have their weights already.
        loaded: the tensors of ``empty_state``, filled from the checkpoint.
        extra: the content of this rank's extra file.
    """
    local, steps, behind, fallen, clip = (extra.pop(name, None) for name in (LOCAL, STEPS, BEHIND, FALLBACK, CLIP))
    decay, rounded = extra.pop(DECAY, None), extra.pop(ROUNDED, {})
    if (found := _compressed(model)) is None:
        return
    state, schedule = found
    with refused_together(*group):
        if steps is not None:
            schedule.resume(steps)
            state.outdated |= not schedule.phase.encodes  # assemble anew: exact sums need scratch buffers
        for flat, compressed in compressed_sums(state):  # go on with the saved counters of random numbers
            compressed.rounded = rounded.get(flat.name, compressed.rounded)
        schedule.resume_decay(decay)
        if fallen is not None and (fallback := CodecFallback.of(state)) is not None:
            fallback.load_state_dict(fallen)
        # an exact step, in which clipping limits are measured, needs the whole first moment: none of it may be in
        # residuals
        ready = clip is not None or schedule.clip is None
        fits = ready and local is not None and load_local_residuals(state, local)
        schedule.resume_clip(clip if fits else None, state.context.device)
    # unless all ranks' residuals fit, start with empty ones, and add the mean of the saved ones to the next sums
    if not all(all_gather_objects(fits, group)):
        carry_over_residuals(state, {**empty_residuals(state), **loaded.get(RESIDUALS, {})})
        load_estimates(state, loaded.get(ESTIMATES, {}))
    if KEPT in loaded:
        load_kept_weights(state, loaded[KEPT], behind or [])
    require_state(model)  # makes the loaded phase's buffers now: ``plan_of`` lists them before a forward


def _compressed(model: nn.Module) -> tuple[FSDPState, CompressionSchedule] | None:
    """Return the engine and the schedule of a model that is sharded with a compression."""
    if not isinstance(model, ShardedModule):
        return None
    state = require_state(model)
    schedule = CompressionSchedule.of(state)
    return None if schedule is None else (state, schedule)
