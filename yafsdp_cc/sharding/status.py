"""What an engine is doing, in words: ``print(state)``, and the message of a collective that fails.

    in a backward, waiting for the operation of blocks.1 on block weight buffer 1
      blocks.2: weights in use (block weight buffer 0), gradients being written (block gradient buffer 0)
      blocks.1: weights being gathered (block weight buffer 1)
      and 2 more at rest

Phases are found from buffers and handles, when somebody asks; nothing keeps them.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from yafsdp_cc.engine.buffers import Buffer
    from yafsdp_cc.engine.param_group import GroupContext, ParamGroup
    from yafsdp_cc.engine.streams import CommHandle


class Weights(Enum):
    """Where the weights of a group are."""

    SHARDED = "sharded"
    GATHERING = "being gathered"
    """The all-gather was issued, and nobody has waited for it."""
    UNSHARDED = "unsharded"
    """Gathered, and used by nobody: another group may take the buffer."""
    IN_USE = "in use"
    HELD = "held by unshard()"


class Grads(Enum):
    """Where the gradients of a group are, before they are in ``.grad``."""

    NONE = "none"
    WRITTEN = "being written"
    KEPT = "kept for a later reduce"
    DEFERRED = "taken in by the next reduce"
    REDUCING = "being reduced"
    """The reduce was issued in a backward whose last wait has not come: its sum may be in ``.grad``, or not."""
    PARTIAL = "summed over the shard, kept for a sum over replicas"


def weights_of(group: ParamGroup) -> Weights:
    """Return the phase of the group's weights."""
    if group.held is not None:
        return Weights.HELD
    buffer = group.unsharded.buffer
    if not group.flats or not group.is_in(buffer):
        return Weights.SHARDED
    if buffer.handle.pending:
        return Weights.GATHERING
    return Weights.IN_USE if buffer.users else Weights.UNSHARDED


def grads_of(group: ParamGroup) -> Grads:
    """Return the phase of the group's gradients."""
    if group.grads is not None:
        return Grads.WRITTEN if group.accepts_in is not None else Grads.KEPT
    if group.deferred:
        return Grads.DEFERRED
    reduced = {flat for flat, _ in group.context.reduced}
    is_issued = group.context.last_reduce is not None and not reduced.isdisjoint(group.flats)
    if is_issued:
        return Grads.REDUCING
    replicas = group.context.replicas
    outputs = () if replicas is None else replicas.outputs
    is_partial = any(each.used is not None and each.flat in group.flats for each in outputs)
    return Grads.PARTIAL if is_partial else Grads.NONE


def describe(context: GroupContext, waited: CommHandle | None = None) -> str:
    """Return what a rank is doing, and the phases of the groups that are not at rest, as lines.

    Args:
        context: context of the groups.
        waited: the operation that the rank was waiting for; None: it is waiting for none.
    """
    doing = "in a forward" if context.in_forward else "between forwards and backwards"
    doing = "in a backward" if torch._C._current_graph_task_id() != -1 else doing
    places = _places(context)
    if waited is not None:
        found = (f"of {each.used_for} on {place}" for each, place in places.items() if each.handle is waited)
        doing += f", waiting for the operation {next(found, 'on an overflow buffer')}"
    lines = []
    for group in context.groups:
        weights, grads = weights_of(group), grads_of(group)
        parts = []
        if weights is not Weights.SHARDED:
            buffer = (group.held or group.unsharded).buffer
            parts.append(f"weights {weights.value} ({places.get(buffer, 'an overflow buffer')})")
        if grads is not Grads.NONE:
            where = "" if group.grads is None else f" ({places.get(group.grads.buffer, 'an overflow buffer')})"
            parts.append(f"gradients {grads.value}{where}")
        if parts:
            lines.append(f"  {group.name}: {', '.join(parts)}")
    if resting := len(context.groups) - len(lines):
        lines.append(f"  {'and ' if lines else ''}{resting} {'more ' if lines else ''}at rest")
    return "\n".join([doing, *lines])


def _places(context: GroupContext) -> dict[Buffer, str]:
    """Return a name for each buffer of the pools, such as "block weight buffer 0"."""
    pools = {"weight": context.weight_pools, "gradient": context.grad_pools}
    return {
        buffer: f"{role} {kind} buffer {index}"
        for kind, by_role in pools.items()
        for role, pool in by_role.items()
        for index, buffer in enumerate(pool.buffers)
    }
