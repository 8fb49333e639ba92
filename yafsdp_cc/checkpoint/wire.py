"""What encoded gradients have still to say, in a checkpoint: for any number of ranks, and as it is for the same.

And of weights that follow their shards by encoded changes, what ranks keep: the changes that follow are of that.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from yafsdp_cc.engine.assemble import current
from yafsdp_cc.engine.following import kept_weights, names_behind, restore_kept, room_for_kept
from yafsdp_cc.engine.module import ShardedModule
from yafsdp_cc.engine.residuals import mean_residuals, owe, raw_residuals, restore_residuals, room_for_residuals

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from yafsdp_cc.engine.root import Root

RESIDUALS, KEPT = "residuals", "kept_weights"
RAW, STEPS, BEHIND = "_wire_residuals", "_wire_steps", "_wire_behind"
GUARD, CLIP = "_wire_guard", "_wire_clip"
"""Names in each rank's extra file; all but the first are alike on all ranks."""


def check_names(extra: dict[str, Any]) -> None:
    """Raise a ``ValueError`` where users' names are ours."""
    if taken := [name for name in (RAW, STEPS, BEHIND, GUARD, CLIP) if name in extra]:
        raise ValueError(f"save() keeps something of its own as {taken[0]!r}: choose another name")


def judge_wire(model: nn.Module) -> None:
    """Have the guard judge by its last look, which a checkpoint has no place for. A collective."""
    root = _compressed(model)
    if root is not None and root.compressed is not None and root.compressed.guard is not None:
        root.compressed.guard.judge(root)


def wire_of(model: nn.Module) -> dict[str, Any]:
    """What this rank's extra file holds of compression; nothing of a model without."""
    root = _compressed(model)
    if root is None or root.compressed is None:
        return {}
    root.compressed.look(root.units)  # the last step has had no pass after it
    behind = names_behind(root)
    found = {STEPS: root.compressed.steps, **({BEHIND: behind} if behind else {})}
    if root.compressed.guard is not None:
        found[GUARD] = root.compressed.guard.state()
    if root.compressed.clip is not None:
        found[CLIP] = root.compressed.clip.state()
    return {RAW: raw_residuals(root), **found}


def mean_wire_of(model: nn.Module) -> dict[str, Any]:
    """What the checkpoint's state holds of compression. A collective."""
    root = _compressed(model)
    if root is None:
        return {}
    found = {RESIDUALS: mean_residuals(root), KEPT: kept_weights(root)}
    return {name: tensors for name, tensors in found.items() if tensors}


def room_for_wire(model: nn.Module, contents: Metadata, trains: bool) -> dict[str, Any]:
    """What torch loads the checkpoint's residuals into: those that the model has, too.

    Where training is to go on, a warning names those that it has not.
    """
    root = _compressed(model)
    saved, kept = (
        {path[1] for path in (contents.planner_data or {}).values() if path[0] == part} for part in (RESIDUALS, KEPT)
    )
    room = {} if root is None else {name: each for name, each in room_for_residuals(root).items() if name in saved}
    whole = {} if root is None else {name: each for name, each in room_for_kept(root).items() if name in kept}
    if trains and (lost := sorted(saved - room.keys())):
        warnings.warn(
            f"the checkpoint has gradients that were still to be said, of {', '.join(lost[:3])}"
            f"{', ...' if len(lost) > 3 else ''}, which this model does not encode: they are left out",
            stacklevel=3,
        )
    return {**({RESIDUALS: room} if room else {}), **({KEPT: whole} if whole else {})}


def restore_wire(model: nn.Module, extra: dict[str, Any]) -> bool:
    """Take this rank's own out of ``extra``; whether it fits, so that nothing else is to be done."""
    raw, steps, guard, clip = (extra.pop(name, None) for name in (RAW, STEPS, GUARD, CLIP))
    root = _compressed(model)
    if root is None or root.compressed is None:
        return True
    if steps is not None:
        root.compressed.resume(steps)
        root.outdated |= not root.compressed.is_warm  # what sums exactly may not be there any more
    if guard is not None and root.compressed.guard is not None:
        root.compressed.guard.resume(root, guard)
    # An exact step, which tells how to clip, is one of a whole first moment: none of it may be in residuals.
    ready = clip is not None or root.compressed.clip is None
    fits = ready and raw is not None and restore_residuals(root, raw)
    root.compressed.resume_clip(clip if fits else None, root.device)
    return fits


def owe_wire(model: nn.Module, state: dict[str, Any]) -> None:
    """Start with empty residuals, and what the checkpoint's have held owed."""
    root = _compressed(model)
    if root is not None:
        owe(root, {**room_for_residuals(root), **state.get(RESIDUALS, {})})


def restore_whole(model: nn.Module, state: dict[str, Any], extra: dict[str, Any]) -> None:
    """Give ranks the whole weights that they kept, once the shards have their own. A collective."""
    behind = extra.pop(BEHIND, [])
    root = _compressed(model)
    if root is not None and KEPT in state:
        restore_kept(root, state[KEPT], behind)


def _compressed(model: nn.Module) -> Root | None:
    if not isinstance(model, ShardedModule):
        return None
    root = current(model)
    return root if root.compressed is not None else None
