"""From a module to a sharded one: its parameters become shards, and groups become an engine.

``shard_parameters`` replaces parameters by shards in flat buffers and makes a ``ParamGroupSpec``. ``assemble`` makes
the engine (``FSDPState``: groups, buffers, streams) of all specs below a root module. ``shard`` assembles at once;
after ``fully_shard``, which goes bottom-up, the first forward tells which module is the root. A setting that takes
other buffers takes effect when the engine is assembled again, before the next forward.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from yafsdp_cc.engine.buffers import Buffer, BufferPool
from yafsdp_cc.engine.checks import check_trial_exchange
from yafsdp_cc.engine.collectives import EXACT
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.dtensor import ShardSpec, flat_dtensor, mark_replaced, refuse_stale_optimizers, sharded_as
from yafsdp_cc.engine.layout import VECTOR, Layout
from yafsdp_cc.engine.mesh import backend_of, neighbour_group, probe_links, reduce_group
from yafsdp_cc.engine.offload import HostFlatParam, HostMemory, HostReplicatedFlatParam, make_transfers
from yafsdp_cc.engine.param import (
    Divisor,
    FlatParam,
    FSDPParam,
    UnshardedParams,
    unsharded_bytes,
    unsharded_grad_bytes,
)
from yafsdp_cc.engine.param_group import GroupContext, ParamGroup
from yafsdp_cc.engine.replicas import Replicas
from yafsdp_cc.engine.replicated import CollectiveFingerprint, ReplicatedFlatParam, ReplicatedParams
from yafsdp_cc.engine.secondary import SecondaryAllGather
from yafsdp_cc.engine.spec import Counters, ParamGroupSpec
from yafsdp_cc.engine.state import GROUP, STATE, FSDPState
from yafsdp_cc.engine.tensor_parallel import TensorParallel, local_tensor
from yafsdp_cc.plan.units import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.engine.mesh import MeshInfo
    from yafsdp_cc.engine.protocols import Collectives
    from yafsdp_cc.plan import OwnedParameter, Role

SPEC = "_yafsdp_cc_spec"
"""Attribute of sharded modules: the ``ParamGroupSpec`` that they belong to."""


# Parameters become shards ------------------------------------------------------------------------------------------


class ShardingPlan(NamedTuple):
    """How the parameters of one group are sharded.

    Args:
        info: mesh and device.
        policy: dtypes.
        collectives: of the group.
        host: where shards are in host memory; None: on the device.
        prepare: gives parameters their values, the same on every rank, just before they are sharded.
    """

    info: MeshInfo
    policy: MixedPrecisionPolicy
    collectives: Collectives
    host: HostMemory | None
    prepare: Callable[[Sequence[OwnedParameter]], None]


class _Kind(NamedTuple):
    """What parameters that share a flat buffer have in common."""

    dtype: torch.dtype
    trainable: bool
    is_meta: bool
    key: Hashable = None
    """Of ``Collectives.flat_key``."""


def shard_parameters(
    modules: tuple[nn.Module, ...],
    name: str,
    sharded: Sequence[OwnedParameter],
    replicated: Sequence[OwnedParameter],
    plan: ShardingPlan,
    role: Role | None = None,
) -> ParamGroupSpec:
    """Replace the parameters of ``modules`` by shards and replicated ones; return the spec of their group.

    Args:
        modules: whose forwards use the parameters.
        name: of the first module.
        sharded: what each rank keeps a part of.
        replicated: what each rank keeps whole.
        plan: how.
        role: None where only the whole model tells it.
    """
    flats = _flat_params(sharded, plan)
    whole = _replicated_params(replicated, plan)
    spec = ParamGroupSpec(name, modules, plan.info, plan.policy, flats, whole, plan.collectives, role, plan.host)
    for module in modules:
        for inner in specs_below(module):
            if inner.outer is None and inner is not spec:
                inner.outer = spec
        module.__dict__[SPEC] = spec
    refuse_stale_optimizers()
    return spec


def _flat_params(owned: Sequence[OwnedParameter], plan: ShardingPlan) -> tuple[FlatParam, ...]:
    plan.prepare(owned)
    kinds: dict[_Kind, list[OwnedParameter]] = defaultdict(list)
    for each in owned:
        parameter, key = each.parameter, plan.collectives.flat_key(each.name)
        kinds[_Kind(parameter.dtype, parameter.requires_grad, parameter.is_meta, key)].append(each)
    return tuple(_flat_param(kind, members, plan) for kind, members in kinds.items())


def _replicated_params(owned: Sequence[OwnedParameter], plan: ShardingPlan) -> tuple[ReplicatedFlatParam, ...]:
    plan.prepare(owned)
    kinds: dict[_Kind, list[OwnedParameter]] = defaultdict(list)
    for each in owned:
        kinds[_Kind(each.parameter.dtype, True, each.parameter.is_meta)].append(each)
    return tuple(_replicated_param(kind, members, plan) for kind, members in kinds.items())


def _flat_param(kind: _Kind, owned: Sequence[OwnedParameter], plan: ShardingPlan) -> FlatParam:
    info, host = plan.info, plan.host
    world, rank = info.shard_group.size(), info.shard_group.rank()
    shapes = [local_tensor(each.parameter).shape for each in owned]
    layout = Layout.of(shapes, world, plan.collectives.alignment)
    shard = _new_buffer(layout.chunk, kind, plan)
    params = []
    for each, extent in zip(owned, layout.extents, strict=True):
        param = FSDPParam(_shard_spec(each, info, layout.bounds(extent)), each.sites, extent)
        param.span = layout.owned(extent, rank)
        _replace(param, shard, each.parameter)
        params.append(param)
    compute = _compute_dtype(kind.dtype, plan.policy)
    reduce = plan.policy.reduce_dtype or compute
    rest = (params, layout, rank, shard, compute, reduce, Divisor(info.mesh.size(), info.device), info.device)
    return FlatParam(*rest) if host is None else HostFlatParam(host, *rest)


def _replicated_param(kind: _Kind, owned: Sequence[OwnedParameter], plan: ShardingPlan) -> ReplicatedFlatParam:
    info, host = plan.info, plan.host
    layout = Layout.of([local_tensor(each.parameter).shape for each in owned], 1, VECTOR)
    values = _new_buffer(layout.numel, kind, plan)
    params = []
    for each, extent in zip(owned, layout.extents, strict=True):
        param = FSDPParam(_shard_spec(each, info, None), each.sites, extent)
        param.span = (extent.offset, extent.end)
        _replace(param, values, each.parameter)
        params.append(param)
    rest = (params, values, _compute_dtype(kind.dtype, plan.policy), Divisor(info.mesh.size(), info.device))
    return ReplicatedFlatParam(*rest) if host is None else HostReplicatedFlatParam(host, info.device, *rest)


def _shard_spec(owned: OwnedParameter, info: MeshInfo, bounds: tuple[int, ...] | None) -> ShardSpec:
    parameter = owned.parameter
    parallel = TensorParallel.of(owned.name, parameter, info.mesh) if isinstance(parameter, DTensor) else None
    return ShardSpec(owned.name, local_tensor(parameter).shape, info.mesh, bounds, parallel)


def _new_buffer(numel: int, kind: _Kind, plan: ShardingPlan) -> Tensor:
    if plan.host is not None and not kind.is_meta:
        return plan.host.zeros(numel, kind.dtype)
    return torch.zeros(numel, dtype=kind.dtype, device="meta" if kind.is_meta else plan.info.device)


def _compute_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    return policy.param_dtype or dtype if dtype.is_floating_point else dtype


@torch.no_grad()
def _replace(param: FSDPParam, buffer: Tensor, whole: nn.Parameter) -> None:
    """Put the sharded parameter where the whole one was, and free that."""
    local = param.local_range(buffer)
    local.copy_(param.spec.local_of(local_tensor(whole)))
    parameter = nn.Parameter(flat_dtensor(local, param.spec), requires_grad=whole.requires_grad)
    parameter.__dict__.update(whole.__dict__)  # what users and frameworks have noted on it
    param.parameter, param.local = parameter, local
    param.set_parameter(parameter)
    if isinstance(whole, DTensor):
        whole._local_tensor = whole._local_tensor.new_empty(0)
    else:
        whole.data = whole.new_empty(0)
    mark_replaced(whole, param.spec)


@torch.no_grad()
def materialize_shards(spec: ParamGroupSpec, fn: Callable[[Tensor], Tensor]) -> None:
    """Give shards on the meta device the memory that ``fn`` (``torch.empty_like`` on a device) makes.

    Raises:
        RuntimeError: that is another device's, and the group's shards are to be in host memory.
    """
    for part in spec.parts:
        if not part.sharded.is_meta:
            continue
        shard = fn(part.sharded)
        if spec.host is not None:
            if not shard.is_cpu:
                raise RuntimeError(
                    f"'{part.params[0].spec.name}' was sharded with CPUOffloadPolicy and so belongs to host memory, "
                    f'not to {shard.device}: call model.to_empty(device="cpu"), and move the buffers where they are '
                    "used"
                )
            shard = spec.host.zeros(shard.numel(), shard.dtype)  # pinned, if it has to be
        part.use_sharded(shard)
        for param in part.params:
            param.local = param.local_range(shard)
            fresh = nn.Parameter(flat_dtensor(param.local, param.spec), param.parameter.requires_grad)
            attributes = vars(param.parameter) | {"_local_tensor": param.local, "shard_spec": param.spec}
            fresh.__dict__.update(attributes)
            torch.utils.swap_tensors(param.parameter, fresh)  # remains the object that everybody knows


def spec_of(module: nn.Module) -> ParamGroupSpec | None:
    """Return the spec of the group that ``module`` was sharded as, or None."""
    spec: ParamGroupSpec | None = module.__dict__.get(SPEC)
    return spec


def specs_below(module: nn.Module) -> list[ParamGroupSpec]:
    """Return the specs of ``module`` and what is in it, in module order but its own last."""
    found = [spec for inner in module.modules() if (spec := spec_of(inner)) is not None]
    own = spec_of(module)
    return [*(spec for spec in dict.fromkeys(found) if spec is not own), *([own] if own is not None else [])]


# Groups become an engine -------------------------------------------------------------------------------------------


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the engine that ``module`` is a part of, as it is."""
    state: FSDPState | None = module.__dict__.get(STATE)
    return state


def current_state(module: nn.Module) -> FSDPState:
    """Return the engine that ``module`` is a part of: made now if there is none, made anew if it is outdated.

    A module without one becomes the root, unless it was sharded as a part of another.
    """
    state = state_of(module)
    if state is not None and not (state.outdated and state.may_retire):
        return state
    spec = spec_of(module if state is None else state.model)
    return assemble(module if spec is None else spec.outermost.modules[0])


def group_of(module: nn.Module) -> ParamGroup | None:
    """Return the group that ``module`` was sharded as; None where all it has is in others, or replicated."""
    state = current_state(module)
    if module is state.model:
        return state.root_group
    group: ParamGroup | None = module.__dict__.get(GROUP)
    return group


@torch.inference_mode(False)  # buffers made inside of it could not be trained with
def assemble(model: nn.Module) -> FSDPState:
    """Make the engine of everything that is sharded in ``model``, which becomes the root. A collective.

    Raises:
        ValueError: parts of it are sharded across different meshes, or their collectives do not go together.
        RuntimeError: parameters are still on the meta device.
    """
    specs = specs_below(model)
    _name(model, specs)
    _check(model, specs)
    factories = _join_collectives(specs)
    retired = _retire(specs)
    context, transfers, leaf = _make_context(model, specs, retired)
    groups, root_group = _make_groups(context, model, specs)
    for group in groups:
        _make_collectives(context, group)
    _make_weight_buffers(context, groups)
    _make_grad_buffers(context, groups)
    replicated = _make_replicated(context, groups, specs)
    collectives = factories[0] if factories else EXACT
    state = FSDPState(model, specs, groups, root_group, replicated, collectives, context, leaf, transfers)
    _connect(state)
    for group in groups:
        for flat in group.flats:
            if flat.trainable or flat.sharded_grad is not None:  # frozen by now, it may have a residual yet
                context.bind_reduce(flat)
    for old in retired:
        state.is_last_backward = old.is_last_backward
        context.has_warned |= old.context.has_warned
        if context.replicas is not None and old.context.replicas is not None:
            context.replicas.sums = old.context.replicas.sums
    context.observers = tuple(observer for factory in factories for observer in factory.observers())
    for observer in context.observers:
        observer.assembled(state)
    return state


def _name(model: nn.Module, specs: Sequence[ParamGroupSpec]) -> None:
    """Give groups and parameters the names that ``model`` has for them."""
    names = {module: name for name, module in model.named_modules()}
    for spec in specs:
        spec.name = next(names[module] for module in spec.modules if module in names) or ROOT
        for param in spec.params:
            site = next((site for site in param.sites if site[0] in names), None)
            if site is not None:  # a module that was taken out of the model since keeps its name
                module, attribute = site
                param.spec.rename(f"{names[module]}.{attribute}" if names[module] else attribute)


def _check(model: nn.Module, specs: Sequence[ParamGroupSpec]) -> None:
    for name, parameter in model.named_parameters():
        if (known := sharded_as(parameter)) is not None:
            raise ValueError(
                f"'{name}' was tied to '{known.name}', which was sharded without it: gather both together, "
                "fully_shard([one, other])"
            )
    first = specs[0]
    for spec in specs:
        spec.check_collectives()
        if spec.info.mesh != first.info.mesh:
            raise ValueError(
                f"'{spec.name}' is sharded across {spec.info.mesh}, '{first.name}' across {first.info.mesh}: what "
                "is called in one forward takes one mesh"
            )
        for part in spec.parts:
            if part.sharded.is_meta:
                raise RuntimeError(
                    f"'{part.params[0].spec.name}' is still on the meta device: call model.to_empty(device=...) and "
                    "initialise the weights, or load them, before the first forward"
                )


def _join_collectives(specs: Sequence[ParamGroupSpec]) -> list[Collectives]:
    """Have one factory serve all groups that are not exact; return the factories."""
    first: Collectives | None = None
    for spec in specs:
        if spec.collectives is EXACT:
            continue
        if first is None:
            first = spec.collectives
        elif spec.collectives is not first:
            first.join(spec.collectives)
            spec.collectives = first
    return [] if first is None else [first]


def _retire(specs: Sequence[ParamGroupSpec]) -> list[FSDPState]:
    """Retire the engines that groups belong to so far."""
    states = {id(old): old for spec in specs for module in spec.modules if (old := state_of(module))}
    for old in states.values():
        old.retire()
    return list(states.values())


def _make_context(
    model: nn.Module, specs: Sequence[ParamGroupSpec], retired: Sequence[FSDPState]
) -> tuple[GroupContext, Any, Tensor]:
    info, settings = specs[-1].info, specs[-1].settings
    device, group = info.device, info.shard_group
    # Over gloo a second communicator costs next to nothing, and two ranks need it (see communicator.Communicator).
    is_gloo = backend_of(group, device) == "gloo"
    separate = (is_gloo and group.size() == 2) or any(spec.settings.separate_reduce_group for spec in specs)
    reduce = reduce_group(info) if separate else group
    if is_gloo and device.type == "cpu":
        probe_links(group, reduce)
    gather_comm = Communicator(group, device)
    reduce_comm = Communicator(reduce, device) if separate else gather_comm
    check_trial_exchange(gather_comm, reduce_comm)
    gather_stream = settings.streams.all_gather(device)
    reduce_stream = settings.streams.reduce(device) if separate else gather_stream
    replicas = info.replicate_group
    replica, count = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
    world, rank = gather_comm.world * count, gather_comm.rank + gather_comm.world * replica
    fingerprint = CollectiveFingerprint(rank, world, _get_default_store(), info.first_rank)
    scratch = ScratchBuffers(device)
    # A leaf below the root gates: a backward reaches it if and only if it wants the parameters' gradients.
    with torch.enable_grad():
        leaf = torch.empty(0, device=device, requires_grad=True)
        leaf_node: Any = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    context = GroupContext(
        info,
        CommContext(gather_comm, ScratchBuffers(device), fingerprint.record),
        CommContext(reduce_comm, scratch, fingerprint.record),
        gather_stream,
        reduce_stream,
        fingerprint,
        next((old.counters for old in retired if old.model is model), Counters()),
        leaf_node,
    )
    if replicas is not None:
        replica_context = CommContext(Communicator(replicas, device), scratch, fingerprint.record)
        context.replicas = Replicas(replica_context, reduce_stream, context.count_reduced)
    hosts = dict.fromkeys(spec.host for spec in specs if spec.host is not None)
    parts = [part for spec in specs for part in spec.parts]
    return context, make_transfers(hosts, parts, device, gather_stream, reduce_stream), leaf


def _make_groups(
    context: GroupContext, model: nn.Module, specs: Sequence[ParamGroupSpec]
) -> tuple[list[ParamGroup], ParamGroup | None]:
    own = specs[-1] if specs[-1].modules == (model,) else None
    groups = {
        spec: ParamGroup(context, spec, _role(spec, specs, own))
        for spec in specs
        if spec.flats or (spec is not own and spec.replicated)
    }
    for role in dict.fromkeys(group.role for group in groups.values()):
        for index, group in enumerate(group for group in groups.values() if group.role == role):
            group.index = index
    for spec, group in groups.items():
        group.forward_prefetch = tuple(groups[each] for each in spec.settings.forward_prefetch)
        group.backward_prefetch = tuple(groups[each] for each in spec.settings.backward_prefetch)
    context.groups = tuple(groups.values())
    return list(groups.values()), None if own is None else groups.get(own)


def _role(spec: ParamGroupSpec, specs: Sequence[ParamGroupSpec], own: ParamGroupSpec | None) -> Role:
    """Return the spec's role; what is made of other modules is a block, so that no embedding sets buffers' sizes."""
    if spec is own:
        return "root"
    if spec.role is not None:
        return spec.role
    nested = [any(module._modules for module in each.modules) for each in specs if each is not own]
    return "edge" if any(nested) and not any(module._modules for module in spec.modules) else "block"


def _make_collectives(context: GroupContext, group: ParamGroup) -> None:
    """Make the collectives of a group, those of reduces once: they keep residuals. Bind all-gathers to the context."""
    factory, settings, info = group.spec.collectives, group.spec.settings, context.info
    keeps = settings.keeps_unsharded or group.role == "root"
    secondary = 0 if group.role == "root" else settings.secondary_ranks
    for flat in group.flats:
        flat.all_gather = factory.all_gather(flat, keeps and not secondary)
        if secondary:
            neighbours = neighbour_group(info, secondary)
            flat.all_gather = SecondaryAllGather(flat.all_gather, flat, neighbours, info.device)
        flat.all_gather.bind(context.gather)
        if not hasattr(flat, "reduce_scatter"):
            flat.reduce_scatter = factory.reduce_scatter(flat, context.replicas is not None)
            flat.all_reduce = None if context.replicas is None else factory.all_reduce(flat)
        flat.add_sum = flat.add_to_grad


def _make_weight_buffers(context: GroupContext, groups: Sequence[ParamGroup]) -> None:
    device, stream = context.device, context.gather_stream
    for role in dict.fromkeys(group.role for group in groups):
        members = [group for group in groups if group.role == role]
        sharing = [group for group in members if group.flats and not group.spec.settings.keeps_unsharded]
        keeping = [group for group in members if group.flats and group.spec.settings.keeps_unsharded]
        nbytes = max(unsharded_bytes(group.flats) for group in members)
        depth = max((len(group.forward_prefetch) for group in sharing), default=0)
        count = min(max(2, 1 + depth) if role == "block" else 1, len(sharing))
        pool = BufferPool(count, len(keeping), nbytes, device, stream)
        if sharing or keeping:
            context.weight_pools[role] = pool
        for index, group in enumerate(sharing):
            group.unsharded = UnshardedParams(pool.assigned(index), group.flats)
        for buffer, group in zip(pool.dedicated, keeping, strict=True):
            group.unsharded = UnshardedParams(buffer, group.flats)
        for group in members:
            if not group.flats:  # all its parameters are replicated
                group.unsharded = UnshardedParams(Buffer(0, device, stream), ())


def _make_grad_buffers(context: GroupContext, groups: Sequence[ParamGroup]) -> None:
    for role in dict.fromkeys(group.role for group in groups):
        members = [group for group in groups if group.role == role]
        nbytes = max(unsharded_grad_bytes([flat for flat in group.flats if flat.trainable]) for group in members)
        if not nbytes:
            continue
        most = max(group.spec.settings.grad_buffers for group in members)
        count = min(most if role == "block" else 1, len(members))
        context.grad_pools[role] = BufferPool(count, 0, nbytes, context.device, context.reduce_stream)
        for group in members:
            group.has_own_grad_buffer = count == len(members)


def _make_replicated(
    context: GroupContext, groups: Sequence[ParamGroup], specs: Sequence[ParamGroupSpec]
) -> ReplicatedParams:
    flats = [flat for spec in specs for flat in spec.replicated]
    count = sum(len(group.params) for group in groups) + sum(len(flat.params) for flat in flats)
    replicas = None if context.replicas is None else context.replicas.context.comm
    # Its collectives are on the stream of the reduces, and so in their communicator throughout.
    flags = count + CollectiveFingerprint.WIDTH
    replicated = ReplicatedParams(flats, flags, context.reduce, context.reduce_stream, replicas)
    for flat in flats:
        if any(param.parameter.requires_grad for param in flat.params):
            flat.make_sharded_grad()
    return replicated


def _connect(state: FSDPState) -> None:
    """Let modules know their engine and group, and groups which parameters of others their modules use."""
    root_group = state.root_group
    tied = set() if root_group is None else {module for param in root_group.params for module, _ in param.sites}
    for group in state.groups:
        inside = {inner for module in group.spec.modules for inner in module.modules()}
        used = (p for p in state.replicated.params if any(module in inside for module, _ in p.sites))
        group.replicated = tuple(used)
        for flat in group.flats:
            flat.group = group
        group.uses_root_params = group is not root_group and not tied.isdisjoint(inside)
    for param in state.params:
        param.set_state(state)
    by_spec = {group.spec: group for group in state.groups}
    for spec in state.specs:
        for module in spec.modules:
            module.__dict__[STATE] = state
            module.__dict__[GROUP] = None if module is state.model else by_spec.get(spec)
    state.model.__dict__[STATE] = state
