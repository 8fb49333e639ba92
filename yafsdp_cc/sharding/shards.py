"""From a plain module to a sharded one: its parameters are checked on all ranks and become shards.

``shard_parameters`` replaces parameters by shards in flat buffers. What was sharded together is a ``ParamGroupSpec``,
from which ``assembly`` makes groups and an engine, anew whenever a setting changes that takes other buffers.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from yafsdp_cc.engine.collectives import ExactAllGather, ExactReduceScatter
from yafsdp_cc.engine.divisor import Divisor
from yafsdp_cc.engine.hierarchy import ExactAllReduce
from yafsdp_cc.engine.layout import ALIGNMENT, VECTOR, Layout, RowShardSpec, ShardSpec, TensorParallel, local_tensor
from yafsdp_cc.engine.mesh import all_gather_objects, checksum, shard_mesh, table_of_ranks
from yafsdp_cc.engine.param import FlatParam, FSDPParam
from yafsdp_cc.engine.replicated import ReplicatedFlatParam
from yafsdp_cc.engine.streams import CommStream, comm_stream
from yafsdp_cc.forms.class_shards import ClassFlatParam, ClassParam
from yafsdp_cc.forms.extensions import (
    Extension,
    ExtensionAllGather,
    ExtensionFlatParam,
    ExtensionParam,
    SubclassParam,
    holds_bytes,
    row_layout,
)
from yafsdp_cc.forms.offload import HostFlatParam, HostReplicatedFlatParam
from yafsdp_cc.forms.subclasses import subclass_of, tensors_of
from yafsdp_cc.tensor.dtensor import (
    FlatDTensor,
    flat_dtensor,
    follow_optimizers,
    mark_replaced,
    take_grads_of_autograd,
)
from yafsdp_cc.tensor.module_parameters import named_sharded_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard import _fsdp_api as fsdp2

    from yafsdp_cc.engine.layout import Extent
    from yafsdp_cc.engine.mesh import MeshInfo
    from yafsdp_cc.engine.protocols import AllGather, AllReduce, Observer, ReduceScatter
    from yafsdp_cc.forms.offload import HostMemory
    from yafsdp_cc.plan import MatrixOwners, OwnedParameter, Role
    from yafsdp_cc.plan.report import PlannedChoice

Part = TypeVar("Part", bound=FlatParam)

SPEC = "_yafsdp_cc_spec"
"""Attribute of sharded modules: the ``ParamGroupSpec`` that they belong to."""


# What outlives an assembly of the engine ---------------------------------------------------------------------------


class Collectives:
    """Makes the collectives of a model: exact ones, unless a subclass makes others."""

    alignment = ALIGNMENT
    """Elements: parameters and chunks begin at multiples of it."""

    def flat_key(self, name: str) -> Hashable:
        """Return a key for the parameter of this full name: those of equal keys may share a ``FlatParam``."""
        return None

    def check_group(self, name: str, keeps_unsharded: bool) -> None:
        """Raise a ``ValueError`` where the collectives of the group ``name`` cannot work.

        ``keeps_unsharded`` tells whether its unsharded weights stay in a buffer of their own.
        """

    def join(self, other: Collectives) -> None:
        """Serve the groups of ``other``, of the same model, as well; raise a ``ValueError`` where that cannot be."""

    def all_gather(self, flat: FlatParam, keeps_unsharded: bool) -> AllGather:
        """Make the all-gather of ``flat``; ``keeps_unsharded`` as of ``check_group``."""
        return ExtensionAllGather(flat) if isinstance(flat, ExtensionFlatParam) else ExactAllGather(flat)

    def reduce_scatter(self, flat: FlatParam, has_replicas: bool) -> ReduceScatter:
        """Make the reduce-scatter of ``flat``; ``has_replicas`` if its sums are then summed over replicas."""
        layout, casts = flat.layout, flat.device.type != "cuda"
        return ExactReduceScatter(layout.numel, flat.reduce_dtype, casts=casts, chunks=layout.uneven_chunks)

    def all_reduce(self, flat: FlatParam) -> AllReduce:
        """Make the all-reduce of the partial sums of ``flat`` over replicas."""
        return ExactAllReduce(flat.layout.chunks[flat.rank] * flat.sum_dtype.itemsize)

    def observers(self) -> Sequence[Observer]:
        """Return what is to be called as training goes."""
        return ()

    def planned_choices(self, flats: Sequence[FlatParam]) -> Sequence[PlannedChoice]:
        """Return what other codecs would cost for the gradients of ``flats``."""
        return ()

    def describe_choice(self) -> str:
        """Return what was chosen for gradients while training, in words; empty where nothing is chosen."""
        return ""


EXACT = Collectives()
"""Of models without compression."""


class CommStreams:
    """The streams of all-gathers, of reduces and of sums over replicas, each made when it is first asked for.

    Roots may share them.
    """

    def __init__(self) -> None:
        self._streams: dict[str, CommStream] = {}

    def of(self, kind: Literal["all-gather", "reduce", "all-reduce"], device: torch.device) -> CommStream:
        if kind not in self._streams:
            self._streams[kind] = comm_stream(device)
        return self._streams[kind]


@dataclass
class GroupSettings:
    """What users may change about a group at any time; what changes the number of buffers takes another assembly."""

    keeps_after_forward: bool = False
    """Whether unsharded weights stay after the forward, in a buffer of their own (``reshard_after_forward=False``)."""
    keeps_after_backward: bool = False
    stays_unsharded: bool | None = False
    """Whether modules see unsharded weights from a forward to its backward, as FSDP2's; None: those of a root."""
    secondary_ranks: int = 0
    """How many neighbouring ranks hold a secondary shard of the unsharded weights (hpZ); 0 for none."""
    unshards_in_backward: bool = True
    """Whether the backward reads the weights."""
    forward_prefetch: Sequence[ParamGroupSpec] = ()
    """Gathered when this group is about to run, instead of what ran next the last time."""
    backward_prefetch: Sequence[ParamGroupSpec] = ()
    reduces: bool = True
    """Whether a backward reduces the gradients (``set_requires_gradient_sync``)."""
    grad_buffers: int = 2
    """How many gradient buffers groups of this role take in turn."""
    separate_reduce_group: bool = False
    allocates_from_group: bool = False
    """Whether buffers are memory of the process group that sends from them, registered with NCCL."""
    streams: CommStreams = field(default_factory=CommStreams)
    custom_all_gather: fsdp2.AllGather | None = None
    """What users have set to be called instead, as ``custom_reduce_scatter``."""
    custom_reduce_scatter: fsdp2.ReduceScatter | None = None

    @property
    def keeps_unsharded(self) -> bool:
        """Whether the group has a weight buffer to itself."""
        return self.keeps_after_forward or self.keeps_after_backward


@dataclass(eq=False)
class ParamGroupSpec:
    """Modules that were sharded together, their shards and settings: what outlives an assembly of the engine."""

    name: str
    modules: tuple[nn.Module, ...]
    info: MeshInfo
    policy: MixedPrecisionPolicy
    flats: tuple[FlatParam, ...]
    replicated: tuple[ReplicatedFlatParam, ...]
    collectives: Collectives
    role: Role | None = None
    """None where only the whole model tells it."""
    outer: ParamGroupSpec | None = None
    """The next one around it."""
    ignored: frozenset[nn.Parameter] = frozenset()
    """Parameters that were left as they are."""
    settings: GroupSettings = field(default_factory=GroupSettings)

    @property
    def parts(self) -> tuple[FlatParam, ...]:
        """All flat buffers of parameters."""
        return (*self.flats, *self.replicated)

    @property
    def params(self) -> Iterator[FSDPParam]:
        return (param for part in self.parts for param in part.params)

    @property
    def outermost(self) -> ParamGroupSpec:
        """The root, as far as is known by now."""
        return self if self.outer is None else self.outer.outermost


@dataclass
class Counters:
    """What the engine has done since ``shard``, on this rank. For users to read: nothing here steers the engine."""

    gathered_bytes: int = 0
    """Bytes that this rank has sent for weights."""
    reduced_bytes: int = 0
    """Bytes that this rank has sent for gradients, those of replicated parameters among them."""
    overflow_buffers: int = 0
    """How often a group needed an overflow buffer because its assigned one was in use."""
    owned_bytes: int = 0
    """Bytes of all buffers that the engine owned on its device when ``counters_of`` was last called."""
    host_bytes: int = 0
    """The same of those that were offloaded to host memory."""
    skipped_batches: int = 0
    """Batches that all ranks have skipped together because one of them failed (``skip_together``)."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Codecs of groups' gradients that were chosen while training; ``"fp32"`` is exact."""
    why: str = ""
    """What was measured when that was chosen last, in a line."""

    def count_reduced(self, nbytes: int) -> None:
        """Add to the bytes that this rank has sent for gradients."""
        self.reduced_bytes += nbytes


def spec_of(module: nn.Module) -> ParamGroupSpec | None:
    """Return the spec of the group that ``module`` was sharded as, or None."""
    spec: ParamGroupSpec | None = module.__dict__.get(SPEC)
    return spec


def specs_below(module: nn.Module) -> list[ParamGroupSpec]:
    """Return the specs of ``module`` and what is in it, in module order but its own last."""
    found = dict.fromkeys(spec for inner in module.modules() if (spec := spec_of(inner)) is not None)
    own = spec_of(module)
    return sorted(found, key=lambda spec: spec is own)


# What is checked before ----------------------------------------------------------------------------------------------


TRAINED_IN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes that weights may be computed in, and gradients summed in."""


def check_types(
    *, ignored_params: Collection[nn.Parameter] | None = None, **arguments: tuple[object, Any, str]
) -> None:
    """Raise a ``TypeError`` that names the first of ``arguments`` (value, types, what it takes) of a wrong type."""
    ignored = {
        f"ignored_params[{index}]": (each, nn.Parameter, "parameters themselves, not their names")
        for index, each in enumerate(ignored_params or ())
    }
    for name, (value, kinds, wanted) in (arguments | ignored).items():
        if not isinstance(value, kinds):
            raise TypeError(f"{name} takes {wanted}; got {value!r}")


def check_policy(policy: MixedPrecisionPolicy) -> None:
    """Raise for a dtype of ``policy`` that cannot be trained in.

    Integers have no gradients; float8 would need scales, and few kernels and backends know it. A module's output is
    only cast, so it may have any dtype that gradients have.
    """
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is None or dtype in TRAINED_IN:
            continue
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"mp_policy.{name} takes a torch.dtype, such as torch.bfloat16; got {dtype!r}")
        if name != "output_dtype" or not (dtype.is_floating_point or dtype.is_complex):
            allowed = ", ".join(map(str, TRAINED_IN))
            raise ValueError(f"mp_policy.{name}={dtype} cannot be trained in: pass one of {allowed}, or leave it out")


def check_no_hooks(owned: Sequence[OwnedParameter]) -> None:
    """Raise a ``ValueError`` that names the first parameter with hooks, which would be lost."""
    for each in owned:
        if each.parameter._backward_hooks or each.parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"'{each.name}' has hooks, which would be lost with the whole parameter: after sharding, call "
                "register_post_accumulate_grad_hook on the sharded one"
            )


def check_modules(model: nn.Module, call: str) -> None:
    """Raise a ``ValueError`` where ``call`` would make something of ``model`` that cannot be trained."""
    if torch.is_inference_mode_enabled():
        raise ValueError(f"{call} under torch.inference_mode() would make weights that cannot be trained")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"'{name}' has max_norm={module.max_norm}: its forward writes to its weight, which would be lost with "
                "the gathered copy. Renormalise under yafsdp_cc.whole_parameters(model, write=True) instead"
            )


def added_parameters(model: nn.Module, ignored: Collection[nn.Parameter]) -> list[nn.Parameter]:
    """Return parameters that were added to a sharded ``model``: not sharded, and not ``ignored`` then.

    Every rank would train values of its own for one that is trained; as long as it is frozen it may stay.

    Raises:
        ValueError: one of them is to be trained.
    """
    added = {
        name: parameter
        for name, parameter in named_sharded_parameters(model)
        if not isinstance(parameter, FlatDTensor) and parameter not in ignored
    }
    if trained := [name for name, parameter in added.items() if parameter.requires_grad]:
        others = f" (and {len(trained) - 1} more)" if len(trained) > 1 else ""
        raise ValueError(
            f"'{trained[0]}'{others} was added after sharding, so every rank would train values of its own: add "
            "adapters and layers first, then call shard() or fully_shard()"
        )
    return list(added.values())


class _Line(NamedTuple):
    """What must be equal of one parameter."""

    name: str
    description: str
    checksum: int

    def __str__(self) -> str:
        return f"{self.description}, checksum {self.checksum & 0xFFFFFFFF:08x}"


def _checksum(parameter: nn.Parameter) -> int:
    return sum(checksum(tensor) * (1 + 2 * place) for place, tensor in enumerate(values_of(parameter))) & (2**64 - 1)


def values_of(parameter: nn.Parameter) -> list[Tensor]:
    """Return all tensors that ranks must have alike: what this rank holds, and the metadata of a tensor subclass."""
    subclass = subclass_of(parameter)
    return [*tensors_of(local_tensor(parameter)), *(() if subclass is None else subclass.metadata())]


@torch.no_grad()
def check_equal(owned: Sequence[OwnedParameter], across: Sequence[dist.ProcessGroup], *, values: bool) -> None:
    """Compare names, shapes, dtypes and ``requires_grad`` across ranks, and with ``values`` the elements too.

    Raises:
        ValueError: on every rank, naming the first parameter that differs.
    """
    lines = []
    for each in owned:
        parameter, kind = each.parameter, "trainable" if each.parameter.requires_grad else "frozen"
        text = f"'{each.name}' {list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}, {kind}"
        if (subclass := subclass_of(parameter)) is not None:
            text += f", a {subclass.name}"
        elements = _checksum(parameter) if values and not parameter.is_meta else 0
        lines.append(_Line(each.name, text, elements))
    digest = hashlib.sha256("\n".join(map(repr, lines)).encode()).digest()
    if len(set(all_gather_objects(digest, across))) == 1:
        return
    everybody = all_gather_objects(lines, across)
    found = next(found for found in zip_longest(*everybody) if len(set(found)) > 1)
    name = next(line for line in found if line).name
    table = table_of_ranks(line or "has no more parameters" for line in found)
    if len({tuple(line.description for line in theirs) for theirs in everybody}) == 1:
        remedy = (
            "Build the model from the same seed on every rank, or pass sync_module_states=True to shard() to take "
            "rank 0's weights"
        )
    else:
        remedy = "Build the same model on every rank: names, shapes, dtypes and requires_grad have to agree"
    counts = [len(theirs) for theirs in everybody]
    first = f"first in parameter '{name}':\n{table}\n{remedy}"
    if other := next((rank for rank, count in enumerate(counts) if count != counts[0]), None):
        first = f"rank 0 has {counts[0]} parameters, rank {other} has {counts[other]}; {first}"
    raise ValueError(f"the ranks' models differ, {first}")


# Parameters become shards --------------------------------------------------------------------------------------------


class ShardingPlan(NamedTuple):
    """How the parameters of one group are sharded."""

    info: MeshInfo
    policy: MixedPrecisionPolicy
    collectives: Collectives
    host: HostMemory | None
    """Where shards are in host memory; None: they are on the device."""
    prepare: Callable[[Sequence[OwnedParameter]], None]
    """Gives parameters their values, the same on every rank, just before they are sharded."""
    owners: Mapping[OwnedParameter, MatrixOwners]
    """Of parameters whose matrices are updated as a whole."""

    def parts_of(self, owned: OwnedParameter) -> tuple[int, ...]:
        """Return the ranks that the parts of a parameter are to lie on; empty where it is sharded evenly."""
        owners = self.owners.get(owned)
        return () if owners is None or owners.is_assembled else owners.ranks


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
    host = plan.host
    make_sharded = FlatParam if host is None else partial(HostFlatParam, host)
    make_replicated = ReplicatedFlatParam if host is None else partial(HostReplicatedFlatParam, host)
    flats = _flat_params(sharded, plan, make_sharded, replicates=False)
    whole = _flat_params(replicated, plan, make_replicated, replicates=True)
    spec = ParamGroupSpec(name, modules, plan.info, plan.policy, flats, whole, plan.collectives, role)
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
    """Put ``owned`` into flat buffers, one per dtype; where sharded, of what is trained, owned and encoded alike."""
    plan.prepare(owned)
    alike: dict[Hashable, list[OwnedParameter]] = defaultdict(list)
    for each in owned if replicates else sorted(owned, key=plan.parts_of):
        parameter, is_whole = each.parameter, bool(plan.parts_of(each))
        reduced = None if replicates else (parameter.requires_grad, is_whole, plan.collectives.flat_key(each.name))
        subclass = subclass_of(parameter)
        alone = subclass if subclass is not None and subclass.extends_all_gather else None
        alike[parameter.dtype, parameter.grad_dtype, parameter.is_meta, reduced, subclass is None, alone].append(each)
    return tuple(_flat_param(members, plan, make, replicates) for members in alike.values())


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
    dtype, is_meta = owned[0].parameter.dtype, owned[0].parameter.is_meta
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
        mark_replaced(held, spec)  # the optimizer that was made from it is refused
        params.append(param)
    is_cast = dtype.is_floating_point and not holds_bytes(params[0])
    compute = policy.param_dtype or dtype if is_cast else dtype
    summed = owned[0].parameter.grad_dtype
    reduce = policy.reduce_dtype or (compute if summed in (None, dtype) else summed)
    divisor = Divisor(info.mesh.size(), info.device)
    if extension is not None:
        extended = ClassFlatParam if keeps_class else ExtensionFlatParam
        make, compute = cast("Callable[..., Part]", partial(extended, extension)), torch.uint8
    return make(params, layout, rank, chunk, compute, reduce, divisor, info.device)


def _extension_of(owned: OwnedParameter, plan: ShardingPlan) -> Extension | None:
    """Return what the all-gather extension of a parameter is called with; None where it has none."""
    subclass, parameter = subclass_of(owned.parameter), owned.parameter
    if subclass is None or not subclass.extends_all_gather:
        return None
    return Extension(
        subclass, shard_mesh(plan.info.mesh), owned.sites[0][0], plan.policy, plan.policy.param_dtype or parameter.dtype
    )


def _fsdp_param(spec: ShardSpec, owned: OwnedParameter, extent: Extent) -> FSDPParam:
    subclass = subclass_of(owned.parameter)
    if subclass is None:
        return FSDPParam(spec, owned.sites, extent)
    kind = ExtensionParam if subclass.extends_all_gather else SubclassParam
    kind = ClassParam if subclass.keeps_class else kind
    return kind(subclass, spec, owned.sites, extent)


@torch.no_grad()
def _replace(param: FSDPParam, buffer: Tensor, whole: nn.Parameter) -> None:
    """Put the sharded parameter where the whole one was, and free that."""
    local = param.local_range(buffer)
    local.copy_(param.spec.local_of(local_tensor(whole)))
    parameter = nn.Parameter(flat_dtensor(local, param.spec), requires_grad=whole.requires_grad)
    if whole.grad_dtype != whole.dtype:
        parameter.grad_dtype = whole.grad_dtype
    wraps = tensors_of(whole) if isinstance(param, ClassParam) else ()
    notes = {name: note for name, note in vars(whole).items() if all(note is not each for each in wraps)}
    parameter.__dict__.update(notes)  # what users and frameworks have noted on it
    take_grads_of_autograd(parameter)
    param.parameter, param.local = parameter, local
    param.set_parameter(parameter)
    if isinstance(whole, DTensor):
        whole._local_tensor = whole._local_tensor.new_empty(0)
    elif not isinstance(param, ClassParam):  # there, its tensors go with the last reference to it
        whole.data = whole.new_empty(0)
