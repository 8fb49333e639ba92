"""Makes an engine from specs: groups, buffers, streams, communicators and collectives.

``assemble`` makes the engine (``FSDPState``) of all groups below a root module. ``shard`` assembles at once; after
``fully_shard``, which goes bottom-up, the first forward shows which module is the root. A setting that needs other
buffers takes effect when the engine is assembled again, before the next forward.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.distributed_c10d import _get_default_store

from yafsdp_cc.engine.buffers import Buffer, BufferPool
from yafsdp_cc.engine.collectives import CollectiveFingerprint
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.cuda_streams import comm_stream
from yafsdp_cc.engine.hsdp import ReplicaSums
from yafsdp_cc.engine.param import UnshardedParams, unsharded_bytes, unsharded_grad_bytes
from yafsdp_cc.engine.param_group import GroupContext, ParamGroup
from yafsdp_cc.engine.replicated import ReplicatedParams
from yafsdp_cc.engine.spec import EXACT, Counters, specs_below
from yafsdp_cc.engine.state import GROUP, STATE, FSDPState
from yafsdp_cc.forms.extensions import check_local_tensors
from yafsdp_cc.forms.offload import make_transfers
from yafsdp_cc.ranks.checks import refused_together
from yafsdp_cc.ranks.groups import backend_of, group_once, new_group, timeout_of
from yafsdp_cc.ranks.mesh import all_groups
from yafsdp_cc.sharding.extra_collectives import CustomAllGather, CustomReduceScatter, SecondaryAllGather
from yafsdp_cc.sharding.links import check_trial_exchange, probe_links, refused_over_store
from yafsdp_cc.sharding.status import describe
from yafsdp_cc.sharding.units import ROOT, TAKE_TURNS
from yafsdp_cc.sharding.watch import watch
from yafsdp_cc.tensor.dtensor import engines
from yafsdp_cc.tensor.loading import take_back
from yafsdp_cc.tensor.module_parameters import ModelContents, check_unchanged
from yafsdp_cc.tensor.reductions import fingerprints
from yafsdp_cc.tensor.shown import SHARDED_AS
from yafsdp_cc.tensor.unsharded import StayUnsharded

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.engine.replicated import ReplicatedFlatParam
    from yafsdp_cc.engine.spec import Collectives, ParamGroupSpec, Role
    from yafsdp_cc.engine.streams import CommStream
    from yafsdp_cc.ranks.mesh import MeshInfo


NO_FLAGS = (0.0,)
"""Placeholder for usage flags in an all-reduce on a mesh other than the root's: one number that no rank reads."""
ContextsByMesh: TypeAlias = "dict[DeviceMesh, tuple[CommContext, CommContext]]"
"""``CommContext`` of all-gathers and ``CommContext`` of reduces for each mesh; meshes share scratch buffers."""


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the engine that ``module`` belongs to, even an outdated one; None if none was made."""
    state: FSDPState | None = module.__dict__.get(STATE)
    return state


@torch.inference_mode(False)  # training could not write buffers made in inference mode
def assemble(model: nn.Module) -> FSDPState:
    """Make the engine of everything that is sharded in ``model``, which becomes the root. A collective.

    Raises:
        ValueError: meshes or collectives of the model's parts do not go together, or a local tensor was given an
            all-gather extension.
        RuntimeError: parameters are still on the meta device.
    """
    specs = specs_below(model)
    _name(model, specs)
    take_back(specs)
    # If the model has an engine, the ranks have checked it together before: the host need not wait for them again.
    with refused_together(*(() if state_of(model) is not None else all_groups(specs[-1].info.mesh))):
        _check(model, specs)
    collectives = _join_collectives(specs)
    retired = list(dict.fromkeys(old for spec in specs for module in spec.modules if (old := state_of(module))))
    for old in retired:
        old.retire()
    context, leaf, contexts = _make_context(model, specs, retired)
    parts = (part for spec in specs for part in spec.parts)
    transfers = make_transfers(parts, context.device, context.gather_stream, context.reduce_stream)
    own = specs[-1] if specs[-1].modules == (model,) else None
    groups = _make_groups(context, specs, own)
    root_group = None if own is None else groups.get(own)
    context.groups = tuple(groups.values())
    by_role: dict[Role, list[ParamGroup]] = defaultdict(list)
    for group in context.groups:
        _make_collectives(context, group, contexts)
        group.index = len(by_role[group.role])
        by_role[group.role].append(group)
    for role, members in by_role.items():
        _make_weight_buffers(context, role, members)
        _make_grad_buffers(context, role, members)
    replicated = _make_replicated(context, specs, contexts)
    state = FSDPState(model, specs, context.groups, root_group, replicated, collectives, context, leaf, transfers)
    state.contents = ModelContents(state, any(old.model is model and old.contents.is_written for old in retired))
    engines.add(state)
    _connect(state)
    for flat in state.flats:
        if flat.trainable or flat.sharded_grad is not None:  # parameters frozen later may still have residuals
            context.bind_reduce(flat)
    for old in retired:
        context.has_warned |= old.context.has_warned
        if context.replicas is not None and old.context.replicas is not None:
            context.replicas.sums = old.context.replicas.sums
    stays = any(spec.settings.stays_unsharded is not False for spec in specs)
    context.observers = (*collectives.observers(), *((StayUnsharded(state),) if stays else ()))
    for observer in context.observers:
        observer.assembled(state)
    # Freed memory that the new buffers reuse may still be read by the caller's stream. A later forward may wait for
    # less (``set_post_optim_event``).
    context.gather_stream.wait_for_caller()
    return state


def _name(model: nn.Module, specs: Sequence[ParamGroupSpec]) -> None:
    """Give groups and parameters their full names in ``model``."""
    names = {module: name for name, module in model.named_modules()}
    for spec in specs:
        spec.name = next(names[module] for module in spec.modules if module in names) or ROOT
        for param in spec.params:
            site = next((site for site in param.sites if site[0] in names), None)
            if site is not None:  # else the module was removed from the model: keep the name
                module, attribute = site
                param.spec.name = f"{names[module]}.{attribute}" if names[module] else attribute


def _check(model: nn.Module, specs: Sequence[ParamGroupSpec]) -> None:
    for name, parameter in model.named_parameters():
        if (known := parameter.__dict__.get(SHARDED_AS)) is not None:
            raise ValueError(
                f"'{name}' was tied to '{known.name}', which was sharded without it: gather both together, "
                "fully_shard([one, other])"
            )
    if state_of(model) is None:
        compressed = next((spec.collectives for spec in specs if spec.collectives is not EXACT), EXACT)
        try:
            compressed.check_overrides([name for name, _ in model.named_parameters()])
        except ValueError as error:  # pipeline stages may share settings, each with a part of the names
            warnings.warn(str(error), stacklevel=2)
    for spec in specs:
        if spec.flats:
            spec.collectives.check_group(spec.name, spec.settings.keeps_unsharded or spec.role == "root")
        _check_mesh(spec, specs[-1])
        for part in spec.parts:
            check_local_tensors(part)
            if (waiting := next((param for param in part.params if param.local.is_meta), None)) is not None:
                check_unchanged(waiting)
                raise RuntimeError(
                    f"'{waiting.spec.name}' is still on the meta device: call model.to_empty(device=...) and "
                    "initialise the weights, or load them (load_state_dict(..., assign=True)), before the first forward"
                )


def _check_mesh(spec: ParamGroupSpec, root: ParamGroupSpec) -> None:
    """Raise a ``ValueError`` if the mesh of the unit ``spec`` does not let the unit run in forwards of ``root``."""
    mesh, outer = spec.info.mesh, root.info.mesh
    if mesh == outer:
        return
    what = ""
    if mesh.device_type != outer.device_type:
        what = "both take devices of one kind"
    elif not set(mesh.mesh.flatten().tolist()) <= set(outer.mesh.flatten().tolist()):
        what = (
            "the mesh of the root has to have all ranks of the other, for these compare at its end what they have run"
        )
    elif _replicas(spec.info) != _replicas(root.info):
        what = "both take the same replicas: meshes whose first dimension has the same ranks, or two without replicas"
    elif spec.collectives is not EXACT or root.collectives is not EXACT:
        what = "a compression takes one mesh for all: leave compression out"
    if what:
        raise ValueError(f"'{spec.name}' is sharded across {mesh}, '{root.name}' around it across {outer}: {what}")


def _replicas(info: MeshInfo) -> list[int]:
    group = info.replicate_group
    return [] if group is None else dist.get_process_group_ranks(group)


def _join_collectives(specs: Sequence[ParamGroupSpec]) -> Collectives:
    """Give all groups with compression one factory of collectives; return that, or ``EXACT`` if there are none."""
    first: Collectives = EXACT
    for spec in specs:
        if spec.collectives in (EXACT, first):
            continue
        if first is EXACT:
            first = spec.collectives
        else:
            first.join(spec.collectives)
            spec.collectives = first
    return first


def _make_context(
    model: nn.Module, specs: Sequence[ParamGroupSpec], retired: Sequence[FSDPState]
) -> tuple[GroupContext, Tensor, ContextsByMesh]:
    """Make communicators and streams; return the context that all groups share, the leaf tensor that root gates take as
    input, and the contexts of each mesh."""
    info, streams = specs[-1].info, specs[-1].settings.streams
    device, separate = info.device, any(spec.settings.separate_reduce_group for spec in specs)
    ranks = info.mesh.mesh.flatten().tolist()
    trial = f"yafsdp_cc/trial/{zlib.crc32(repr(ranks).encode())}"
    verdict = refused_over_store(_get_default_store(), trial, dist.get_rank(), len(ranks))
    replicas = info.replicate_group
    replica_comm = None if replicas is None else Communicator(replicas, device)
    infos = {spec.info.mesh: spec.info for spec in reversed(specs)}
    comms = {mesh: _communicators(each, separate=separate) for mesh, each in infos.items()}
    check_trial_exchange(list(comms.values()), replica_comm, verdict)
    gather_comm, reduce_comm = comms[info.mesh]
    gather_stream = _stream(streams, "all-gather", device)
    reduce_stream = gather_stream if reduce_comm is gather_comm else _stream(streams, "reduce", device)
    replica = 0 if replica_comm is None else replica_comm.rank
    registers = any(spec.settings.allocates_from_group for spec in specs)
    gather_scratch, reduce_scratch = (
        ScratchBuffers(device, comm.group if registers else None) for comm in (gather_comm, reduce_comm)
    )
    rank = gather_comm.rank + gather_comm.world * replica
    fingerprint = fingerprints.get(info.shard_group) if replicas is None else None
    if not isinstance(fingerprint, CollectiveFingerprint):
        fingerprint = CollectiveFingerprint(rank, ranks, info.shard_group, device)
        if replicas is None:
            fingerprints[info.shard_group] = fingerprint
    # A backward reaches this leaf, the input of the root gates, if and only if it wants the parameters' gradients.
    leaf = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
    contexts = {
        mesh: (
            CommContext(gather, gather_scratch, fingerprint.record),
            CommContext(reduce, reduce_scratch, fingerprint.record),
        )
        for mesh, (gather, reduce) in comms.items()
    }
    context = GroupContext(
        info,
        *contexts[info.mesh],
        gather_stream,
        reduce_stream,
        fingerprint,
        next((old.context.counters for old in retired if old.model is model), Counters()),
        get_gradient_edge(leaf).node,
    )
    context.describe = partial(describe, context)
    watch(context)
    if replica_comm is not None:
        replica_scratch = ScratchBuffers(device, replicas if registers else None)
        replica_context = CommContext(replica_comm, replica_scratch, fingerprint.record)
        stream = _stream(streams, "all-reduce", device)
        context.replicas = ReplicaSums(replica_context, stream, partial(_count_reduced, context.counters))
    return context, leaf, contexts


def _count_reduced(counters: Counters, nbytes: int) -> None:
    counters.reduced_bytes += nbytes


def _stream(streams: dict[str, CommStream], kind: str, device: torch.device) -> CommStream:
    """Return the communication stream ``kind`` of ``streams``, which several roots may share; make it at first use."""
    if kind not in streams:
        streams[kind] = comm_stream(device)
    return streams[kind]


def _communicators(info: MeshInfo, *, separate: bool) -> tuple[Communicator, Communicator]:
    """Return the communicators of all-gathers and of reduces on a mesh: a single one unless reduces need their own."""
    device, group = info.device, info.shard_group
    # Over gloo a second communicator costs next to nothing, and two ranks need it (see ``Communicator``).
    is_gloo = backend_of(group, device) == "gloo"
    separate = separate or (is_gloo and group.size() == 2)
    reduce = _derived_group(info, group.size()) if separate else group
    if is_gloo and device.type == "cpu":
        probe_links(group, reduce)
    gather_comm = Communicator(group, device)
    return gather_comm, Communicator(reduce, device) if separate else gather_comm


def _derived_group(info: MeshInfo, size: int) -> dist.ProcessGroup:
    """Return another group of ``size`` neighbours in the shard group, with this rank. A collective at first."""
    group = info.shard_group
    first = group.rank() // size * size
    members = dist.get_process_group_ranks(group)[first : first + size]
    timeout = timeout_of(group)  # the new group gets the shard group's time-out, not torch's default
    return group_once(group, size, lambda: new_group(members, timeout))


def _make_groups(
    context: GroupContext, specs: Sequence[ParamGroupSpec], own: ParamGroupSpec | None
) -> dict[ParamGroupSpec, ParamGroup]:
    """Make a group for each spec with sharded parameters and, but for ``own``, the root's, with replicated ones."""
    groups = {
        spec: ParamGroup(context, spec, _role(spec, specs, own))
        for spec in specs
        if spec.flats or (spec is not own and spec.replicated)
    }
    for spec, group in groups.items():  # prefetches may name specs without a group
        group.forward_prefetch = tuple(groups[each] for each in spec.settings.forward_prefetch if each in groups)
        group.backward_prefetch = tuple(groups[each] for each in spec.settings.backward_prefetch if each in groups)
    return groups


def _role(spec: ParamGroupSpec, specs: Sequence[ParamGroupSpec], own: ParamGroupSpec | None) -> Role:
    """Return the role of a group. A unit of composite modules is a block: no embedding determines buffer sizes."""
    if spec is own:
        return "root"
    if spec.role is not None:
        return spec.role
    has_parts = [any(module._modules for module in each.modules) for each in specs if each is not own]
    if not any(has_parts) or any(module._modules for module in spec.modules):
        return "block"
    return "edge" if spec.outer in (None, own) else "nested"


def _make_collectives(context: GroupContext, group: ParamGroup, contexts: ContextsByMesh) -> None:
    """Make a group's collectives and bind its all-gathers. Sums are made only once, as they have residuals."""
    factory, settings, info = group.spec.collectives, group.spec.settings, group.spec.info
    gather, reduce = contexts[info.mesh]
    keeps = settings.keeps_unsharded or group.role == "root"
    secondary = 0 if group.role == "root" else settings.secondary_ranks
    for flat in group.flats:
        flat.all_gather = factory.all_gather(flat, keeps and not secondary)
        if settings.custom_all_gather is not None:
            flat.all_gather = CustomAllGather(flat, settings.custom_all_gather, info.shard_group)
        if secondary:
            neighbours = _derived_group(info, secondary)
            flat.all_gather = SecondaryAllGather(flat.all_gather, flat, neighbours, info.device)
        flat.all_gather.bind(gather)
        flat.reduce_context = reduce
        if not hasattr(flat, "reduce_scatter"):
            flat.reduce_scatter = factory.reduce_scatter(flat, context.replicas is not None)
            flat.all_reduce = None if context.replicas is None else factory.all_reduce(flat)
        if settings.custom_reduce_scatter is not None:
            flat.reduce_scatter = CustomReduceScatter(flat, settings.custom_reduce_scatter, info.shard_group)
        flat.add_sum = flat.add_to_grad


def _make_weight_buffers(context: GroupContext, role: Role, members: Sequence[ParamGroup]) -> None:
    device, stream = context.device, context.gather_stream
    sharing = [group for group in members if group.flats and not group.spec.settings.keeps_unsharded]
    keeping = [group for group in members if group.flats and group.spec.settings.keeps_unsharded]
    nbytes = max(unsharded_bytes(group.flats) for group in members)
    depth = max((len(group.forward_prefetch) for group in sharing), default=0)
    count = min(max(2, 1 + depth) if role in TAKE_TURNS else 1, len(sharing))
    pool = BufferPool(count, len(keeping), nbytes, device, stream, _allocator(members, context.gather))
    if sharing or keeping:
        context.weight_pools[role] = pool
    for index, group in enumerate(sharing):
        group.unsharded = UnshardedParams(pool.assigned(index), group.flats)
    for buffer, group in zip(pool.dedicated, keeping, strict=True):
        group.unsharded = UnshardedParams(buffer, group.flats)
    for group in members:
        if not group.flats:  # all parameters of this group are replicated
            group.unsharded = UnshardedParams(Buffer(0, device, stream), ())


def _make_grad_buffers(context: GroupContext, role: Role, members: Sequence[ParamGroup]) -> None:
    nbytes = max(unsharded_grad_bytes([flat for flat in group.flats if flat.trainable]) for group in members)
    if not nbytes:
        return
    most = max(group.spec.settings.grad_buffers for group in members)
    count = min(most if role in TAKE_TURNS else 1, len(members))
    allocator = _allocator(members, context.reduce)
    context.grad_pools[role] = BufferPool(count, 0, nbytes, context.device, context.reduce_stream, allocator)
    for group in members:
        group.is_alone_in_grad_buffer = count == len(members)


def _allocator(members: Sequence[ParamGroup], context: CommContext) -> dist.ProcessGroup | None:
    """Return the process group that allocates the buffers of ``members``; None: ordinary memory."""
    registers = any(group.spec.settings.allocates_from_group for group in members)
    return context.comm.group if registers else None


class ReplicatedParamsOfMeshes(ReplicatedParams):
    """The replicated parameters of a root whose units have several meshes, each reduced over its own.

    Experts may be sharded across fewer ranks than the rest of a model:

        ranks          0   1   2   3
        mesh of root   a   a   a   a      all parameters but the experts' are sharded across four ranks
        experts        a   b   a   b      expert parallelism has divided these in two, each half is sharded across two

    Each mesh has communicators of its own; streams, buffers, the order of operations and the usage flags at the end
    of a backward are those of the root, whose mesh has all ranks of the others.

    Args:
        own: replicated parameters on the root's mesh, whose all-reduce also carries the usage flags of all ranks.
        others: replicated parameters on other meshes, one object for each mesh.
    """

    def __init__(self, own: ReplicatedParams, others: Sequence[ReplicatedParams]) -> None:
        self._own, self._all, self.dtype = own, (own, *others), own.dtype
        self.sent_bytes = sum(each.sent_bytes for each in self._all)
        self.flats = tuple(flat for each in self._all for flat in each.flats)
        self.params = tuple(param for each in self._all for param in each.params)
        self.leaves = tuple(leaf for each in self._all for leaf in each.leaves)
        self._gate_inputs = tuple(gate_input for each in self._all for gate_input in each._gate_inputs)

    @property
    def device_bytes(self) -> int:
        return sum(each.device_bytes for each in self._all)

    def all_reduce(self, flags: Sequence[float]) -> Tensor:
        totals = self._own.all_reduce(flags)
        for other in self._all[1:]:
            other.all_reduce(NO_FLAGS)
        return totals

    def add_to_grads(self) -> None:
        for each in self._all:
            each.add_to_grads()


def _make_replicated(
    context: GroupContext, specs: Sequence[ParamGroupSpec], contexts: ContextsByMesh
) -> ReplicatedParams:
    by_mesh: dict[DeviceMesh, list[ReplicatedFlatParam]] = {context.info.mesh: []}
    for spec in specs:
        if spec.replicated:
            by_mesh.setdefault(spec.info.mesh, []).extend(spec.replicated)
    flats = [flat for flats in by_mesh.values() for flat in flats]
    for flat in flats:
        if flat.trainable:
            flat.make_sharded_grad()
    count = sum(len(group.params) for group in context.groups) + sum(len(flat.params) for flat in flats)
    replicas = None if context.replicas is None else context.replicas.context.comm
    # Collectives of replicated parameters run on the stream and in the communicators of reduces. The collectives on
    # the root's mesh also carry the usage flags that ranks exchange.
    own, *others = (
        ReplicatedParams(
            flats,
            count if mesh is context.info.mesh else len(NO_FLAGS),
            contexts[mesh][1],
            context.reduce_stream,
            replicas,
        )
        for mesh, flats in by_mesh.items()
    )
    return ReplicatedParamsOfMeshes(own, others) if others else own


def _connect(state: FSDPState) -> None:
    """Set each module's engine and group, and for each group the parameters of other groups that its modules use."""
    root_group = state.root_group
    tied = set() if root_group is None else {module for param in root_group.params for module, _ in param.sites}
    for group in state.groups:
        inside = {inner for module in group.spec.modules for inner in module.modules()}
        used = (p for p in state.replicated.params if any(module in inside for module, _ in p.sites))
        group.replicated = tuple(used)
        for flat in group.flats:
            flat.group = group
        group.uses_root_params = group is not root_group and not tied.isdisjoint(inside)
    grouped = {param for group in state.groups for param in group.replicated}
    state.root_replicated = tuple(param for param in state.replicated.params if param not in grouped)
    for param in state.params:
        param.engine = weakref.ref(state)
    by_spec = {group.spec: group for group in state.groups}
    for spec in state.specs:
        for module in spec.modules:
            module.__dict__[STATE] = state
            module.__dict__[GROUP] = None if module is state.model else by_spec.get(spec)
