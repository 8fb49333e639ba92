"""The plan of an engine as built: every figure read off its layouts, buffers and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yafsdp_cc.engine.offload import HostFlatParam, HostReplicatedFlatParam
from yafsdp_cc.engine.secondary import SecondaryAllGather
from yafsdp_cc.plan.report import Plan, PlannedHost, PlannedRing, PlannedSmall, PlannedUnit, PlannedWire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.state import FSDPState
    from yafsdp_cc.plan.units import Role


def plan_for(state: FSDPState) -> Plan:
    """Return what the engine of a model holds now, and what a training step sends once warm-up is over."""
    context, replicas = state.context, state.context.replicas
    groups = [group for group in state.groups if group.flats]
    flats = list(state.flats)
    trainable = [flat for flat in flats if flat.trainable]
    on_device = [flat for flat in flats if not isinstance(flat, HostFlatParam)]
    return Plan(
        world=state.world,
        replicas=1 if replicas is None else replicas.context.comm.world,
        units=tuple(_unit(state, group) for group in groups),
        rings=tuple(_buffers(state, role) for role in context.weight_pools),
        small=PlannedSmall(
            parameters=len(state.replicated.params),
            elements=sum(param.extent.numel for param in state.replicated.params),
            bytes=state.replicated.device_bytes,
        ),
        wire=PlannedWire(
            gather_forward=sum(flat.all_gather.planned_bytes() for flat in _gathered(state, groups)),
            gather_backward=sum(_gathered_again(flat) for group in _regathered(state) for flat in group.flats),
            reduce=sum(flat.reduce_scatter.planned_bytes() for flat in trainable),
            small=state.replicated.sent_bytes(),
            replicas=0 if replicas is None else replicas.planned_bytes(),
            second=sum(_from_secondary(flat) for group in _regathered(state) for flat in group.flats),
        ),
        parameter_shard_bytes=sum(flat.sharded.nbytes for flat in on_device),
        gradient_shard_bytes=sum(flat.sharded_grad.buffer.nbytes for flat in on_device if flat.sharded_grad),
        replica_bytes=0 if replicas is None else replicas.nbytes,
        second_shard_bytes=_memory(flats, "secondary shard"),
        receive_bytes=context.reduce.scratch.nbytes,
        residual_bytes=_memory(flats, "residual"),
        choices=tuple(state.collectives.planned_choices(trainable)),
        adamw_bytes=2 * sum(param.local.nbytes for param in state.params if param.parameter.requires_grad),
        change_bytes=context.gather.scratch.nbytes,
        crossing_bytes=0 if state.transfers is None else state.transfers.nbytes,
        host=_host(state, flats),
        chosen=state.collectives.describe_choice(),
    )


def _memory(flats: Sequence[FlatParam], label: str) -> int:
    """Return the bytes that collectives hold under ``label``."""
    found = 0
    for flat in flats:
        for collective in (flat.all_gather, flat.reduce_scatter, flat.all_reduce):
            found += 0 if collective is None else collective.memory().get(label, 0)
    return found


def _host(state: FSDPState, flats: Sequence[FlatParam]) -> PlannedHost | None:
    """Return what was offloaded, if something was."""
    if state.transfers is None:
        return None
    offloaded = [flat for flat in flats if isinstance(flat, HostFlatParam)]
    replicated = [flat for flat in state.replicated.flats if isinstance(flat, HostReplicatedFlatParam)]
    params = [param for flat in offloaded for param in flat.params]
    params += [param for flat in replicated for param in flat.params]
    return PlannedHost(
        parameters=sum(flat.sharded.nbytes for flat in offloaded),
        gradients=sum(flat.sharded_grad.buffer.nbytes for flat in offloaded if flat.sharded_grad is not None),
        small=state.replicated.host_bytes,
        adamw=2 * sum(param.local.nbytes for param in params if param.parameter.requires_grad),
    )


def _gathered(state: FSDPState, groups: Sequence[ParamGroup]) -> list[FlatParam]:
    """Return what a forward gathers: not frozen weights that stay where the first step has gathered them."""
    found: list[FlatParam] = []
    for group in groups:
        buffer = group.unsharded.buffer
        is_shared = any(other.unsharded.buffer is buffer for other in state.groups if other is not group)
        found += [flat for flat in group.flats if is_shared or flat.trainable]
    return found


def _regathered(state: FSDPState) -> list[ParamGroup]:
    """Return groups whose buffer holds another one when the backward comes to them, run in module order."""
    last = {id(group.unsharded.buffer): group for group in state.groups}
    return [
        group
        for group in state.groups
        if group.flats and group.unshards_in_backward and last[id(group.unsharded.buffer)] is not group
    ]


def _gathered_again(flat: FlatParam) -> int:
    return _from_secondary(flat) or flat.all_gather.planned_bytes()


def _from_secondary(flat: FlatParam) -> int:
    """Return the bytes to gather ``flat`` from secondary shards; 0 where there are none."""
    return flat.all_gather.secondary_bytes() if isinstance(flat.all_gather, SecondaryAllGather) else 0


def _unit(state: FSDPState, group: ParamGroup) -> PlannedUnit:
    pool = state.context.weight_pools[group.role]
    return PlannedUnit(
        name=group.name,
        role=group.role,
        parameters=len(group.params),
        trainable=sum(param.parameter.requires_grad for param in group.params),
        elements=sum(param.extent.numel for param in group.params),
        padded=sum(flat.layout.numel for flat in group.flats),
        dtypes=tuple(dict.fromkeys(str(flat.compute_dtype).removeprefix("torch.") for flat in group.flats)),
        slot=pool.buffers.index(group.unsharded.buffer),
    )


def _buffers(state: FSDPState, role: Role) -> PlannedRing:
    weights, grads = state.context.weight_pools[role], state.context.grad_pools.get(role)
    kept = [
        group
        for group in state.groups
        if group.role == role and any(flat.all_gather.builds_on_held for flat in group.flats)
    ]
    return PlannedRing(
        role=role,
        weight_slots=len(weights.buffers),
        following=len({id(group.unsharded.buffer) for group in kept}),
        weight_slot_bytes=weights.buffer_bytes,
        gradient_slots=0 if grads is None else len(grads.buffers),
        gradient_slot_bytes=0 if grads is None else grads.buffer_bytes,
    )
