"""Shards a plain module: ``shard_parameters`` replaces its parameters by shards in flat buffers.

It returns a ``ParamGroupSpec`` of modules that are sharded together, from which ``assembly`` makes a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from yafsdp_cc.engine.layout import VECTOR, Layout, ShardSpec, TensorParallel, local_tensor
from yafsdp_cc.engine.param import Divisor, FlatParam, FSDPParam
from yafsdp_cc.engine.replicated import ReplicatedFlatParam
from yafsdp_cc.engine.spec import SPEC, ParamGroupSpec, specs_below
from yafsdp_cc.forms.extensions import (
    ClassFlatParam,
    ClassParam,
    Extension,
    ExtensionFlatParam,
    ExtensionParam,
    SubclassParam,
    holds_bytes,
    row_layout,
)
from yafsdp_cc.forms.offload import HostFlatParam, HostReplicatedFlatParam
from yafsdp_cc.forms.subclasses import subclass_of, tensors_of, with_grad_dtype
from yafsdp_cc.tensor.dtensor import flat_dtensor, follow_optimizers, take_grads_of_autograd
from yafsdp_cc.tensor.rows import RowShardSpec
from yafsdp_cc.tensor.shown import mark_replaced

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.engine.layout import Extent
    from yafsdp_cc.engine.spec import Collectives, Role
    from yafsdp_cc.forms.offload import HostMemory
    from yafsdp_cc.ranks.mesh import MeshInfo
    from yafsdp_cc.sharding.ownership import MatrixOwners
    from yafsdp_cc.sharding.units import OwnedParameter

Part = TypeVar("Part", bound=FlatParam)


# Parameters become shards --------------------------------------------------------------------------------------------


class ShardingPlan(NamedTuple):
    """Sharding of the parameters of one group."""

    info: MeshInfo
    policy: MixedPrecisionPolicy
    collectives: Collectives
    host: HostMemory | None
    """Host memory for offloaded shards; None: shards are on the device."""
    prepare: Callable[[Sequence[OwnedParameter]], None]
    """Function that gives parameters their values, the same on every rank, just before they are sharded."""
    owners: Mapping[OwnedParameter, MatrixOwners]
    """Ranks that own the matrices of parameters whose matrices are updated as a whole."""

    def parts_of(self, owned: OwnedParameter) -> tuple[int, ...]:
        """Return the ranks that must hold the parts of a parameter; empty if the parameter is sharded evenly."""
        owners = self.owners.get(owned)
        return () if owners is None or owners.is_assembled else owners.ranks


def shard_parameters(
    modules: tuple[nn.Module, ...],
    sharded: Sequence[OwnedParameter],
    replicated: Sequence[OwnedParameter],
    plan: ShardingPlan,
    role: Role | None = None,
) -> ParamGroupSpec:
    """Replace the parameters of ``modules`` by shards and replicated ones; return the spec of their group.

    Args:
        modules: modules whose forwards use the parameters.
        sharded: parameters to shard.
        replicated: parameters that each rank holds whole.
        role: role of the group; None if the role is decided only when the whole model is known.
    """
    host = plan.host
    make_sharded = FlatParam if host is None else partial(HostFlatParam, host)
    make_replicated = ReplicatedFlatParam if host is None else partial(HostReplicatedFlatParam, host)
    flats = _flat_params(sharded, plan, make_sharded, replicates=False)
    whole = _flat_params(replicated, plan, make_replicated, replicates=True)
    spec = ParamGroupSpec("", modules, plan.info, plan.policy, flats, whole, plan.collectives, role)
    for param in spec.params:
        param.unit = modules[0]
    for module in modules:
        for inner in specs_below(module):
            if inner.outer is None and inner is not spec:
                inner.outer = spec
        module.__dict__[SPEC] = spec
    follow_optimizers()
    return spec


def _flat_params(
    owned: Sequence[OwnedParameter], plan: ShardingPlan, make: Callable[..., Part], *, replicates: bool
) -> tuple[Part, ...]:
    """Put ``owned`` into flat buffers, one per dtype. Sharded parameters of one buffer are also alike in whether they
    are trained, in ownership and codec, in how tensor parallelism divides them unevenly and, with a codec, in whether
    it divides them."""
    plan.prepare(owned)
    alike: dict[Hashable, list[OwnedParameter]] = defaultdict(list)
    for each in owned if replicates else sorted(owned, key=plan.parts_of):
        parameter, is_whole = each.parameter, bool(plan.parts_of(each))
        is_divided = isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)
        key = plan.collectives.flat_key(each.name, is_divided)
        reduced = None if replicates else (parameter.requires_grad, is_whole, key, _uneven_division(parameter))
        subclass = subclass_of(parameter)
        alone = subclass if subclass is not None and subclass.extends_all_gather else None
        alike[parameter.dtype, parameter.grad_dtype, parameter.is_meta, reduced, subclass is None, alone].append(each)
    return tuple(_flat_param(members, plan, make, replicates) for members in alike.values())


def _uneven_division(parameter: Tensor) -> Hashable:
    """Return how tensor parallelism divides a parameter if its ranks get parts of different sizes, else None.

    Such parts in a flat buffer give its chunks different bounds on those ranks. Other parameters in the buffer, whole
    on each of the ranks, would be cut into chunks that overlap and are not equal, which a checkpoint cannot hold.
    """
    if not isinstance(parameter, DTensor):
        return None
    ways = [1] * parameter.ndim
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            ways[placement.dim] *= size
    is_even = all(size % parts == 0 for size, parts in zip(parameter.shape, ways, strict=True))
    return None if is_even else (parameter.device_mesh, tuple(parameter.placements))


def _flat_param(
    owned: Sequence[OwnedParameter], plan: ShardingPlan, make: Callable[..., Part], replicates: bool
) -> Part:
    info, group, policy = plan.info, plan.info.shard_group, plan.policy
    world, rank, alignment = group.size(), group.rank(), plan.collectives.alignment
    if replicates:
        world, rank, alignment = 1, 0, VECTOR
    owners = [] if replicates else [parts for each in owned if (parts := plan.parts_of(each))]
    extension = _extension_of(owned[0], plan)
    if extension is None:
        layout = Layout.of([local_tensor(each.parameter).shape for each in owned], world, alignment, owners)
    else:
        layout = row_layout(owned[0].parameter.shape, world)
    keeps_class = extension is not None and extension.subclass.keeps_class
    dtype, summed, is_meta = owned[0].parameter.dtype, owned[0].parameter.grad_dtype, owned[0].parameter.is_meta
    if keeps_class:
        rows = -(-owned[0].parameter.shape[0] // world)
        chunk = owned[0].parameter.detach().new_zeros((rows, *owned[0].parameter.shape[1:]))
    elif plan.host is not None and not is_meta:
        chunk = plan.host.zeros(layout.chunks[rank], dtype)
    else:
        chunk = torch.zeros(layout.chunks[rank], dtype=dtype, device="meta" if is_meta else info.device)
    params = []
    for each, extent in zip(owned, layout.extents, strict=True):
        whole, bounds = each.parameter, None if replicates else layout.bounds(extent)
        parallel = TensorParallel.of(whole) if isinstance(whole, DTensor) else None
        updated_by = plan.owners[each].ranks if each in plan.owners else ()
        kind = RowShardSpec if keeps_class else ShardSpec
        spec = kind(each.name, torch.Size(extent.shape), info.mesh, bounds, parallel, owners=updated_by)
        param = _fsdp_param(spec, each, extent)
        param.span = layout.owned(extent, rank)
        held = each.held
        _replace(param, chunk, whole)
        mark_replaced(held, spec)  # hooks on optimizers refuse to step the replaced parameter
        params.append(param)
    is_cast = dtype.is_floating_point and not holds_bytes(params[0])
    compute = policy.param_dtype or dtype if is_cast else dtype
    reduce = policy.reduce_dtype or (compute if summed in (None, dtype) else summed)
    divisor = Divisor(info.mesh.size(), info.device)
    if extension is not None:
        extended = ClassFlatParam if keeps_class else ExtensionFlatParam
        make, compute = cast("Callable[..., Part]", partial(extended, extension)), torch.uint8
    return make(params, layout, rank, chunk, compute, reduce, divisor, info.device)


def _extension_of(owned: OwnedParameter, plan: ShardingPlan) -> Extension | None:
    """Return the arguments for the all-gather extension of a parameter; None if it has no extension."""
    subclass, parameter = subclass_of(owned.parameter), owned.parameter
    if subclass is None or not subclass.extends_all_gather:
        return None
    mesh = plan.info.mesh
    if mesh.ndim > 1:  # ``check_subclasses`` has refused a mesh without names of dimensions
        mesh = mesh[cast("tuple[str, ...]", mesh.mesh_dim_names)[-1]]
    dtype = plan.policy.param_dtype or parameter.dtype
    return Extension(subclass, mesh, owned.sites[0][0], plan.policy, dtype)


def _fsdp_param(spec: ShardSpec, owned: OwnedParameter, extent: Extent) -> FSDPParam:
    subclass = subclass_of(owned.parameter)
    if subclass is None:
        return FSDPParam(spec, owned.sites, extent, flat_dtensor)
    kind = ExtensionParam if subclass.extends_all_gather else SubclassParam
    kind = ClassParam if subclass.keeps_class else kind
    return kind(subclass, spec, owned.sites, extent, flat_dtensor)


@torch.no_grad()
def _replace(param: FSDPParam, buffer: Tensor, whole: nn.Parameter) -> None:
    """Replace the whole parameter by the sharded one, and free its memory."""
    local = param.local_range(buffer)
    local.copy_(param.spec.local_of(local_tensor(whole)))
    parameter = with_grad_dtype(nn.Parameter(flat_dtensor(local, param.spec), whole.requires_grad), whole)
    wraps = tensors_of(whole) if isinstance(param, ClassParam) else ()
    notes = {name: note for name, note in vars(whole).items() if all(note is not each for each in wraps)}
    parameter.__dict__.update(notes)  # attributes that users and frameworks have set on the whole parameter
    if type(param) is FSDPParam:  # views of tensor subclasses have attributes of their own
        param.notes = notes
    take_grads_of_autograd(parameter)
    param.parameter, param.local = parameter, local
    param.set_parameter(parameter)
    if isinstance(whole, DTensor):
        whole._local_tensor = whole._local_tensor.new_empty(0)
    # inner tensors of a ``ClassParam`` are freed with their wrapper, whose ``.data`` cannot be emptied
    elif not isinstance(param, ClassParam):
        whole.data = whole.new_empty(0)
