"""Saves and loads compression's residuals and kept weights; another number of ranks than saved gets converted ones.

Kept weights are the gathered weights that deltas build on (``compression.all_gather``).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from yafsdp_cc.checkpoint.state import paths_in, plain_name
from yafsdp_cc.compression.fallback import CodecFallback
from yafsdp_cc.compression.fsdp2 import drop_residuals
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
    means_of_ranks,
)
from yafsdp_cc.fsdp2.module import require_state, sharded_parts
from yafsdp_cc.ranks.checks import all_gather_objects, refused_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.checkpoint.metadata import Metadata

    from yafsdp_cc.checkpoint.ranks import Group
    from yafsdp_cc.engine.state import FSDPState
    from yafsdp_cc.tensor.dtensor import FlatDTensor

# checkpoints of earlier versions have compression's state under these names: keep them
_KINDS = RESIDUALS, ESTIMATES, KEPT = "residuals", "estimates", "kept_weights"
LOCAL, STEPS, BEHIND = "_wire_residuals", "_wire_steps", "_wire_behind"
FALLBACK, CLIP, DECAY, ROUNDED = "_wire_guard", "_wire_clip", "_wire_decay", "_wire_rounded"
_OWN = LOCAL, STEPS, BEHIND, FALLBACK, CLIP, DECAY, ROUNDED
"""Keys of compression's state in each rank's extra file, each followed by the prefix of the names in a sharded module.
The values of keys other than ``LOCAL`` and ``CLIP`` are equal on all ranks."""


def check_names(extra: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if the user's ``extra`` has one of compression's own keys."""
    if taken := [name for name in extra if name.startswith(_OWN)]:
        raise ValueError(f"save() keeps something of its own as {taken[0]!r}: choose another name")


def local_state(model: nn.Module, *, tuned: bool) -> dict[str, Any]:
    """Return the entries of compression in this rank's extra file; none for a model without compression.

    With ``tuned``, they include the residuals of gradient sums whose codecs are chosen in training.
    """
    found: dict[str, Any] = {}
    for prefix, state, schedule in _compressed(model):
        _, behind = kept_weights(state)
        residuals = local_residuals(state, tuned=tuned)
        saved = {LOCAL: residuals, STEPS: schedule.steps, **({BEHIND: behind} if behind else {})}
        # save the decay that the residuals follow: a scheduler may have changed the optimizer's since the last forward
        saved[DECAY] = schedule.beta, schedule.share
        saved[ROUNDED] = {flat.name: compressed.rounded for flat, compressed in compressed_sums(state)}
        if (fallback := CodecFallback.of(state)) is not None:
            saved[FALLBACK] = fallback.state_dict()
        if schedule.clip is not None:
            saved[CLIP] = schedule.clip.state()
        found |= {name + prefix: value for name, value in saved.items()}
    return found


def sharded_state(model: nn.Module, *, means: bool = True) -> dict[str, Any]:
    """Return the sharded tensors that a checkpoint has of compression. A collective; call it before ``local_state``.

    With ``means``, these include the residuals' means over the ranks, which cost as many bytes to send as exact
    gradients; without, a load that needs the means reads the residuals of all ranks.
    """
    found: dict[str, dict[str, FlatDTensor]] = {kind: {} for kind in _KINDS}
    for prefix, state, schedule in _compressed(model):
        if (fallback := CodecFallback.of(state)) is not None:
            fallback.judge()  # a checkpoint has no measurements of codecs' errors: judge the one under way
        schedule.count_step()  # the last optimizer step, which no forward has followed, may have ended the warm-up
        saved = {KEPT: kept_weights(state)[0]}
        if means:
            saved |= {RESIDUALS: mean_residuals(state), ESTIMATES: mean_estimates(state)}
        for kind, tensors in saved.items():
            found[kind] |= {prefix + name: each for name, each in tensors.items()}
    return {kind: tensors for kind, tensors in found.items() if tensors}


def empty_state(
    model: nn.Module,
    contents: Metadata,
    extra: dict[str, Any],
    extras: Sequence[Callable[[], dict[str, Any]]],
    trains: bool,
) -> dict[str, Any]:
    """Return tensors to load into: one for each entry of the checkpoint's ``sharded_state`` that the model uses.

    With ``trains``, a warning names parameters whose residuals are left out, as their gradients are not encoded here.
    ``extra`` and ``extras`` are as those of ``load_state``. A collective.
    """
    saved = {kind: {name for name, *_ in paths_in(contents, kind).values()} for kind in _KINDS}
    found: dict[str, dict[str, FlatDTensor]] = {kind: {} for kind in _KINDS}
    encoded = set[str]()
    for prefix, state, schedule in _compressed(model):
        wanted = {RESIDUALS: empty_residuals(state), KEPT: empty_kept_weights(state)}
        if schedule.config.sends_differences:
            wanted[ESTIMATES] = empty_residuals(state)
        encoded |= {prefix + name for name in wanted[RESIDUALS]}
        for kind, tensors in wanted.items():
            found[kind] |= {prefix + name: each for name, each in tensors.items() if prefix + name in saved[kind]}
    if trains and (lost := sorted((saved[RESIDUALS] or _names_of_residuals(extra, extras)) - encoded)):
        warnings.warn(
            f"the checkpoint has residuals, gradients that were still to be sent, of {', '.join(lost[:3])}"
            f"{', ...' if len(lost) > 3 else ''}, which this model does not encode: they are left out",
            stacklevel=3,
        )
    return {kind: empty for kind, empty in found.items() if empty}


def _names_of_residuals(extra: dict[str, Any], extras: Sequence[Callable[[], dict[str, Any]]]) -> set[str]:
    """Return the names of parameters with residuals in a snapshot of ``Rescue``, which has no means. A collective.

    If another number of ranks has saved, ``extra`` lacks residuals: the first rank's extra file is read instead.
    """
    if not any(key.startswith(LOCAL) for key in extra) and any(key.startswith(STEPS) for key in extra):
        extra = extras[0]()
    of_parts = ((key.removeprefix(LOCAL), each) for key, each in extra.items() if key.startswith(LOCAL))
    return {
        prefix + name
        for prefix, residuals in of_parts
        for each in residuals.values()
        if "estimate" not in each  # EF21 has estimates in place of unsent gradients
        for name in each.get("places", ())  # version 0.1 has saved no "places"
    }


def load_state(
    model: nn.Module,
    loaded: dict[str, Any],
    extra: dict[str, Any],
    extras: Sequence[Callable[[], dict[str, Any]]],
    group: Group,
) -> None:
    """Load compression's state from a checkpoint, and remove its entries from ``extra``. A collective.

    Args:
        model: a sharded model whose weights are loaded already.
        loaded: the tensors of ``empty_state``, filled from the checkpoint.
        extra: the content of this rank's extra file.
        extras: for each rank that saved, a function that reads its extra file.
    """
    drop_residuals(model)
    own = {name: extra.pop(name) for name in list(extra) if name.startswith(_OWN)}
    for prefix, state, schedule in _compressed(model):
        residuals, estimates, kept = (
            {name.removeprefix(prefix): each for name, each in loaded.get(kind, {}).items() if name.startswith(prefix)}
            for kind in _KINDS
        )
        steps, local, fallen, clip = (own.get(name + prefix) for name in (STEPS, LOCAL, FALLBACK, CLIP))
        with refused_together(*group):
            if steps is not None:
                schedule.resume(steps)
                state.outdated |= not schedule.phase.encodes  # exact sums need scratch buffers: assemble anew
            rounded = own.get(ROUNDED + prefix) or {}  # counts of random roundings, which seed the next ones
            for flat, compressed in compressed_sums(state):
                compressed.rounded = rounded.get(flat.name, compressed.rounded)
            schedule.resume_decay(own.get(DECAY + prefix))
            if fallen is not None and (fallback := CodecFallback.of(state)) is not None:
                fallback.load_state_dict(fallen)
            # an exact step, in which clipping limits are measured, needs the whole first moment: none of it may be in
            # residuals
            ready = clip is not None or schedule.clip is None
            fits = ready and local is not None and load_local_residuals(state, local)
            schedule.resume_clip(clip if fits else None, state.context.device)
        # unless all ranks' saved residuals fit, begin with empty ones, and add the saved ones' mean to the next sums
        if not all(all_gather_objects(fits, group)):
            if not (residuals or estimates):  # a snapshot of ``Rescue`` has no mean residuals
                with refused_together(*group):
                    residuals, estimates = means_of_ranks(state, (read().get(LOCAL + prefix, {}) for read in extras))
            carry_over_residuals(state, {**empty_residuals(state), **residuals})
            load_estimates(state, estimates)
        if kept:
            load_kept_weights(state, kept, own.get(BEHIND + prefix) or [])
        require_state(state.model)  # make buffers for the loaded state now: ``plan_of`` may list them before a forward


def _compressed(model: nn.Module) -> Iterator[tuple[str, FSDPState, CompressionSchedule]]:
    """Yield name prefix, engine and compression schedule of each sharded part of a model that has compression."""
    found: dict[FSDPState, str] = {}
    for prefix, part in sharded_parts(model):
        found.setdefault(require_state(part), plain_name(prefix))
    for state, prefix in found.items():
        if (schedule := CompressionSchedule.of(state)) is not None:
            yield prefix, state, schedule
