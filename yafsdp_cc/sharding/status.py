"""Texts that say what an engine is doing: ``print(state)``, and the message of a collective that fails.

    in a backward, waiting for the operation of blocks.1 on block weight buffer 1
      blocks.2: weights in use (block weight buffer 0), gradients being written (block gradient buffer 0)
      blocks.1: weights being gathered (block weight buffer 1)
      and 2 more at rest

Phases of groups are found from buffers and handles when somebody asks; they are stored nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from yafsdp_cc.engine.buffers import Buffer
    from yafsdp_cc.engine.param_group import GroupContext, ParamGroup
    from yafsdp_cc.engine.streams import CommHandle


def _is_under_way(context: GroupContext, handle: CommHandle) -> bool:
    """Return whether an operation, or its callback, is under way; ``pending`` is never reset on a GPU."""
    return handle.is_running() if context.gather_stream.is_ordered else handle.pending


def _weights(group: ParamGroup) -> str:
    """Return the phase of the group's weights: "" if sharded, "unsharded" if gathered and used by nobody."""
    if group.held is not None:
        return "held by unshard()"
    buffer = group.unsharded.buffer
    if not group.flats or not group.is_in(buffer):
        return ""
    if _is_under_way(group.context, buffer.handle):
        return "being gathered"
    return "in use" if buffer.users else "unsharded"


def _grads(group: ParamGroup, waited: CommHandle | None) -> str:
    """Return the phase of the group's gradients that are not in ``.grad`` yet; "" if there are none."""
    if group.grads is not None:
        return "being written" if group.accepts_in is not None else "kept for a later reduce"
    if group.deferred:
        return "taken in by the next reduce"
    sent = (buffer.handle for buffer in group.context.in_flight if buffer.used_for == group.name)
    if any(handle is waited or _is_under_way(group.context, handle) for handle in sent):
        return "being reduced"
    replicas = group.context.replicas
    outputs = () if replicas is None else replicas.outputs
    is_partial = any(each.used is not None and each.flat in group.flats for each in outputs)
    return "summed over the shard, kept for a sum over replicas" if is_partial else ""


def describe(context: GroupContext, waited: CommHandle | None = None) -> str:
    """Return what a rank is doing, and the phases of the groups that are not at rest, as lines.

    Args:
        context: context of the groups.
        waited: handle of the operation that the rank waits for; None if it waits for none.
    """
    doing = "in a forward" if context.in_forward else "between forwards and backwards"
    doing = "in a backward" if torch._C._current_graph_task_id() != -1 else doing
    places = _places(context)
    if waited is not None:
        found = (f"of {each.used_for} on {place}" for each, place in places.items() if each.handle is waited)
        doing += f", waiting for the operation {next(found, 'on an overflow buffer')}"
    lines = []
    for group in context.groups:
        weights, grads = _weights(group), _grads(group, waited)
        parts = []
        if weights:
            buffer = (group.held or group.unsharded).buffer
            parts.append(f"weights {weights} ({places.get(buffer, 'an overflow buffer')})")
        if grads:
            where = "" if group.grads is None else f" ({places.get(group.grads.buffer, 'an overflow buffer')})"
            parts.append(f"gradients {grads}{where}")
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
