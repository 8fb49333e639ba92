"""Makes the ``Plan`` of an engine: every figure is read from the engine's layouts, buffers and collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from yafsdp_cc.engine.param import FlatParam, FSDPParam
from yafsdp_cc.engine.param_group import ParamGroup
from yafsdp_cc.engine.spec import Role
from yafsdp_cc.engine.state import FSDPState
from yafsdp_cc.forms.extensions import forward_dtype
from yafsdp_cc.forms.offload import HostFlatParam, HostReplicatedFlatParam
from yafsdp_cc.forms.subclasses import nbytes_of
from yafsdp_cc.plan.report import (
    Plan,
    PlannedBuffers,
    PlannedCommunication,
    PlannedDtypes,
    PlannedHost,
    PlannedOwner,
    PlannedReplicated,
    PlannedTraffic,
    PlannedUnit,
)
from yafsdp_cc.sharding.extra_collectives import SecondaryAllGather
from yafsdp_cc.sharding.ownership import newton_schulz_flops


def plan_for(state: FSDPState) -> Plan:
    """Return the bytes that the engine of a model holds now, and those that a training step sends after the warm-up."""
    context, replicated, replicas = state.context, state.replicated, state.context.replicas
    flats = list(state.flats)
    trainable = [flat for flat in flats if flat.trainable]
    on_device = [flat for flat in flats if not isinstance(flat, HostFlatParam)]
    traffic = _traffic(state)
    adamw_bytes = 2 * sum(nbytes_of(param.local) for param in state.params if param.parameter.requires_grad)
    held: Counter[str] = Counter()
    for flat in flats:
        for collective in (flat.all_gather, flat.reduce_scatter, flat.all_reduce):
            held.update({} if collective is None else collective.memory())
    return Plan(
        world=state.context.gather.comm.world,
        replicas=1 if replicas is None else replicas.context.comm.world,
        units=tuple(_unit(state, group) for group in state.groups if group.flats),
        buffers=tuple(_buffers(state, role) for role in context.weight_pools),
        replicated=PlannedReplicated(
            parameters=len(replicated.params),
            elements=sum(param.extent.numel for param in replicated.params),
            bytes=replicated.device_bytes,
        ),
        communication=_communication(state, traffic),
        dtypes=_dtypes(state),
        whole_elements=sum(math.prod(param.spec.global_shape) for param in state.params),
        traffic=traffic,
        parameter_shard_bytes=sum(nbytes_of(flat.sharded) for flat in on_device),
        gradient_shard_bytes=sum(flat.sharded_grad.buffer.nbytes for flat in on_device if flat.sharded_grad),
        replica_bytes=0 if replicas is None else replicas.nbytes,
        secondary_shard_bytes=held["secondary shard"],
        secondary_ranks=max((group.spec.settings.secondary_ranks for group in state.groups), default=0),
        receive_bytes=context.reduce.scratch.nbytes,
        residual_bytes=held["residual"],
        owners=_owners(state),
        choices=tuple(state.collectives.planned_choices(trainable)),
        adamw_bytes=adamw_bytes,
        snapshot_bytes=sum(nbytes_of(param.local) for param in state.params) + adamw_bytes + held["residual"],
        delta_bytes=context.gather.scratch.nbytes,
        transfer_bytes=0 if state.transfers is None else state.transfers.nbytes,
        host=None if state.transfers is None else _host(state),
        chosen=state.collectives.describe_choice(),
    )


def _owners(state: FSDPState) -> tuple[PlannedOwner, ...]:
    ranks = dist.get_process_group_ranks(state.context.info.shard_group)
    owned: dict[int, list[tuple[FSDPParam, float]]] = {rank: [] for rank in range(len(ranks))}
    for param in state.params:
        mesh = param.spec.mesh
        for owner, parts in Counter(() if param.spec.bounds is None else param.spec.owners).items():
            # Experts may have a mesh of their own, on which the ranks of this shard have other indices.
            alike = param.spec.global_mesh.mesh.select(mesh.ndim - 1, owner).flatten().tolist()
            for rank in (ranks.index(each) for each in alike if each in ranks):
                owned[rank].append((param, parts / len(param.spec.owners)))
    if not any(owned.values()):
        return ()
    planned = []
    for rank, params in owned.items():
        names = tuple(param.spec.name for param, _ in params)
        elements = sum(share * param.spec.numel for param, share in params)
        trained = [(param, share) for param, share in params if param.parameter.requires_grad]
        flops = sum(share * newton_schulz_flops(param.spec.updated_shape) for param, share in trained)
        planned.append(PlannedOwner(rank, names, round(elements), round(flops)))
    return tuple(planned)


def regathered(state: FSDPState) -> list[ParamGroup]:
    """Return groups whose weights the backward gathers again, as a later group of the forward takes their buffer."""
    last = {id(group.unsharded.buffer): group for group in state.groups}
    return [
        group
        for group in state.groups
        if group.flats and group.unshards_in_backward and last[id(group.unsharded.buffer)] is not group
    ]


def _traffic(state: FSDPState) -> tuple[PlannedTraffic, ...]:
    """Return the bytes that one rank sends in one step for each group, if groups run in module order."""
    users = Counter(id(group.unsharded.buffer) for group in state.groups)
    again = regathered(state)
    sums = [] if state.context.replicas is None else state.context.replicas.outputs
    over_replicas = {each.flat: each.all_reduce.planned_bytes() for each in sums}
    return tuple(
        PlannedTraffic(
            # frozen weights in a buffer of their own are gathered in the first step only
            gather_forward=sum(
                flat.all_gather.planned_bytes()
                for flat in group.flats
                if users[id(group.unsharded.buffer)] > 1 or flat.trainable
            ),
            gather_backward=sum(map(_again_bytes, group.flats)) if group in again else 0,
            reduce=sum(flat.reduce_scatter.planned_bytes() for flat in group.flats if flat.trainable),
            replicas=sum(over_replicas.get(flat, 0) for flat in group.flats),
        )
        for group in state.groups
        if group.flats
    )


def _again_bytes(flat: FlatParam) -> int:
    gather = flat.all_gather
    return gather.secondary_bytes() if isinstance(gather, SecondaryAllGather) else gather.planned_bytes()


def _communication(state: FSDPState, traffic: Sequence[PlannedTraffic]) -> PlannedCommunication:
    again = (flat for group in regathered(state) for flat in group.flats)
    replicas = state.context.replicas
    return PlannedCommunication(
        gather_forward=sum(each.gather_forward for each in traffic),
        gather_backward=sum(each.gather_backward for each in traffic),
        reduce=sum(each.reduce for each in traffic),
        replicated=state.replicated.sent_bytes,
        replicas=0 if replicas is None else replicas.planned_bytes(),
        secondary=sum(_again_bytes(flat) for flat in again if isinstance(flat.all_gather, SecondaryAllGather)),
    )


def _host(state: FSDPState) -> PlannedHost:
    flats = [flat for flat in state.flats if isinstance(flat, HostFlatParam)]
    replicated = [flat for flat in state.replicated.flats if isinstance(flat, HostReplicatedFlatParam)]
    params = [param for flat in (*flats, *replicated) for param in flat.params]
    return PlannedHost(
        parameters=sum(nbytes_of(flat.sharded) for flat in flats),
        gradients=sum(flat.sharded_grad.buffer.nbytes for flat in flats if flat.sharded_grad is not None),
        replicated=state.replicated.host_bytes,
        adamw=2 * sum(nbytes_of(param.local) for param in params if param.parameter.requires_grad),
    )


def _dtypes(state: FSDPState) -> tuple[PlannedDtypes, ...]:
    """Return rows of the dtypes that parameters share, those of sharded parameters first."""
    tensors: Counter[tuple[str, str, str, str]] = Counter()
    for flat in state.flats:
        gathered = flat.all_gather.encoding() or _name(flat.compute_dtype)
        reduced = flat.reduce_scatter.encoding() or _name(flat.reduce_dtype)
        row = (_name(flat.sharded.dtype), _name(forward_dtype(flat)), gathered, reduced if flat.trainable else "none")
        tensors[row] += len(flat.params)
    for replicated in state.replicated.flats:
        reduced = _name(state.replicated.dtype) if replicated.trainable else "none"
        row = (_name(replicated.sharded.dtype), _name(replicated.compute_dtype), "none", reduced)
        tensors[row] += len(replicated.params)
    return tuple(PlannedDtypes(count, *row) for row, count in tensors.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unit(state: FSDPState, group: ParamGroup) -> PlannedUnit:
    pool = state.context.weight_pools[group.role]
    return PlannedUnit(
        name=group.name,
        role=group.role,
        parameters=len(group.params),
        trainable=sum(param.parameter.requires_grad for param in group.params),
        elements=sum(param.extent.numel for param in group.params),
        padded=sum(flat.layout.numel for flat in group.flats),
        dtypes=tuple(dict.fromkeys(_name(forward_dtype(flat)) for flat in group.flats)),
        buffer=pool.buffers.index(group.unsharded.buffer),
    )


def _buffers(state: FSDPState, role: Role) -> PlannedBuffers:
    weights, grads = state.context.weight_pools[role], state.context.grad_pools.get(role)
    kept = {
        id(group.unsharded.buffer)
        for group in state.groups
        if group.role == role and any(flat.all_gather.builds_on_held for flat in group.flats)
    }
    return PlannedBuffers(
        role=role,
        weight_buffers=len(weights.buffers),
        weight_buffer_bytes=weights.buffer_bytes,
        gradient_buffers=0 if grads is None else len(grads.buffers),
        gradient_buffer_bytes=0 if grads is None else grads.buffer_bytes,
        kept_buffers=len(kept),
    )
