"""The entry points ``shard`` and ``fully_shard`` turn a plain module into a sharded one, in place.

``fully_shard`` has the arguments, defaults and meaning of torch's function, and is called bottom-up. ``shard`` finds
the units by itself, and shards each of them, then the model, after checks that all ranks pass or fail together.
"""

from __future__ import annotations

import atexit
import inspect
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from yafsdp_cc.compression.codec import AUTO, FORMAT, own_files
from yafsdp_cc.compression.config import EXACT as NO_CODEC
from yafsdp_cc.compression.config import Compression, compression_of, compression_of_run
from yafsdp_cc.compression.factory import CompressedCollectives
from yafsdp_cc.compression.fallback import CodecFallback
from yafsdp_cc.compression.schedule import CompressionSchedule
from yafsdp_cc.config import run_settings
from yafsdp_cc.engine.spec import EXACT, Counters, spec_of, specs_below
from yafsdp_cc.forms.offload import HostMemory
from yafsdp_cc.forms.spmd import data_parallel_mesh, without_data_parallel
from yafsdp_cc.fsdp2.module import (
    MisuseError,
    ShardedModule,
    built_state,
    class_of,
    make_sharded,
    outdate,
    register_forward_method,
)
from yafsdp_cc.plan import Plan
from yafsdp_cc.plan.memory import plan_for
from yafsdp_cc.plan.report import PlannedArgument
from yafsdp_cc.profiling import mark_optimizer_steps
from yafsdp_cc.ranks.checks import check_dense, check_settings, refused_together
from yafsdp_cc.ranks.mesh import MeshInfo, all_groups, broadcast_values
from yafsdp_cc.replicas.overlap import Overlap
from yafsdp_cc.replicas.sync import ReplicaSync, join_replicas, sync_of
from yafsdp_cc.sharding.checks import (
    check_equal,
    check_modules,
    check_no_hooks,
    check_policy,
    check_subclasses,
    check_tensor_parallel,
    check_types,
    values_of,
)
from yafsdp_cc.sharding.hooks import current_state
from yafsdp_cc.sharding.materialize import materialize, move_buffers, place_buffers
from yafsdp_cc.sharding.ownership import MatrixOwners, Ownership, assign_owners
from yafsdp_cc.sharding.shards import ShardingPlan, shard_parameters
from yafsdp_cc.sharding.units import (
    TAKE_TURNS,
    Division,
    OwnedParameter,
    Units,
    UnitSpec,
    check_shardable,
    find_parameters,
    find_units,
    is_small,
)
from yafsdp_cc.tensor.dtensor import FlatDTensor
from yafsdp_cc.tensor.loading import patch_torch
from yafsdp_cc.tensor.shown import SHARDED_AS

if TYPE_CHECKING:
    from yafsdp_cc.engine.spec import Collectives

Model = TypeVar("Model", bound=nn.Module)
Modules = TypeVar("Modules", bound=nn.Module | list[Any])
Placement = Callable[[nn.Parameter], Any]
P = ParamSpec("P")
Result = TypeVar("Result")


class _Arguments(NamedTuple):
    """Values that ``shard`` and ``fully_shard`` derive from the arguments which they share."""

    info: MeshInfo
    host: HostMemory | None
    compression: Compression | None
    collectives: Collectives
    keeps_after_forward: bool
    secondary_ranks: int
    ignored: frozenset[nn.Parameter]

    def owners(
        self, division: Division, ownership: Ownership, *, is_complete: bool, work: Counter[int] | None = None
    ) -> dict[OwnedParameter, MatrixOwners]:
        """Check that the parameters of ``division`` can be sharded; return the ranks that own its matrices."""
        owned, mesh = division.parameters, self.info.mesh
        check_tensor_parallel(owned, mesh)
        check_no_hooks(owned)
        world, alignment = self.info.shard_group.size(), self.collectives.alignment
        keeps = self.keeps_after_forward
        owners = assign_owners(division, ownership, world, alignment=alignment, keeps_unsharded=keeps, work=work)
        given = {"compresses": self.compression is not None, "offloads": self.host is not None}
        check_subclasses(owned, self.info, **given, is_complete=is_complete, whole=owners)
        return owners

    def settings(self, mp_policy: MixedPrecisionPolicy | None, ownership: Ownership) -> dict[str, Any]:
        """Return arguments of ``shard`` and ``fully_shard`` that must be equal on all ranks, by name."""
        named = ownership if isinstance(ownership, str) else tuple(ownership)
        own = {} if (given := self.compression) is None else own_files((*given.codecs, given.weights))
        return {"compression": (self.compression, FORMAT), "mp_policy": mp_policy, "ownership": named, **own}


# Arguments that a script leaves out ----------------------------------------------------------------------------------

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64, None: None}
_ARGUMENTS = {
    "shard.replicate": "mesh",
    "shard.cpu_offload": "offload_policy",
    "precision": "mp_policy",
    "compression": "compression",
}
"""Arguments of ``shard`` by those settings and sections of the run file that are named otherwise."""
_OF_MODEL = {
    "shard.ownership": "the repeated blocks: pass ownership to the calls of fully_shard on blocks",
    "precision.output": "the model from its blocks, whose outputs would be rounded too: leave it out and pass "
    "MixedPrecisionPolicy(output_dtype=...), as mp_policy, to the call of fully_shard on the model",
}
"""Settings that only ``shard`` takes: what it knows and one ``fully_shard`` call does not, and what to do instead."""

_FSDP1 = {
    "auto_wrap_policy": "units=['Block'] of shard(), or fully_shard on each block and then on the model",
    "backward_prefetch": "nothing: weights are always gathered ahead",
    "cpu_offload": "offload_policy=CPUOffloadPolicy() of torch.distributed.fsdp",
    "device_id": 'torch.cuda.set_device(local_rank), or mesh=init_device_mesh("cuda", (world_size,))',
    "device_mesh": "mesh",
    "forward_prefetch": "nothing: weights are always gathered ahead",
    "ignored_modules": "ignored_params, a set of their parameters",
    "ignored_states": "ignored_params, a set of parameters",
    "limit_all_gathers": "nothing: buffers are two",
    "mixed_precision": "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) of torch.distributed.fsdp",
    "process_group": 'mesh=DeviceMesh.from_group(group, "cuda")',
    "sharding_strategy": "reshard_after_forward=False for SHARD_GRAD_OP, a mesh (replicate, shard) for HYBRID_SHARD, "
    "nothing for FULL_SHARD",
    "use_orig_params": "nothing: it is always so",
}
"""Replacement of each argument of torch's ``FullyShardedDataParallel``, for the error that refuses the argument."""

_origins: WeakKeyDictionary[nn.Module, tuple[PlannedArgument, ...]] = WeakKeyDictionary()
_work: WeakKeyDictionary[dist.ProcessGroup, Counter[int]] = WeakKeyDictionary()
"""Newton-Schulz operations, by process group and rank, on the matrices that ``fully_shard`` has given to ranks so far.
Meshes are no keys: ranks drop a mesh at different times, so that owners would differ, but keep their process groups."""


def _completed(function: Callable[P, Result]) -> Callable[P, Result]:
    """Wrap ``function`` to take arguments that a script leaves out from the run file, environment and command line."""
    accepted = inspect.signature(function).parameters

    @wraps(function)
    def completed(*args: P.args, **given: P.kwargs) -> Result:
        if theirs := next((name for name in given if name in _FSDP1 and name not in accepted), None):
            raise TypeError(
                f"{function.__name__}() has no argument {theirs}, which is one of FullyShardedDataParallel: use "
                f"{_FSDP1[theirs]}"
            )
        settings = run_settings()
        if not settings:
            return function(*args, **given)
        rows = [PlannedArgument(name, _shown(value), "the script") for name, value in given.items()]
        left_out: dict[str, Any] = {}
        for name, one in settings.items():
            section, _, leaf = name.partition(".")
            argument = _ARGUMENTS.get(name) or _ARGUMENTS.get(section, leaf)
            is_asked = one.value is not None and argument not in given
            if is_asked and name in _OF_MODEL and function.__name__ == "fully_shard":
                raise ValueError(
                    f"{name} ({one.source}) is for shard(model), which knows {_OF_MODEL[name]}, or call "
                    "yafsdp_cc.shard(model)"
                )
            if argument not in accepted:
                raise ValueError(
                    f"{name} ({one.source}) is no argument of {function.__name__}(): leave it out, or call "
                    "yafsdp_cc.shard(model), which has it"
                )
            overruled = f", but the script passes {argument}" if argument in given else ""
            rows.append(PlannedArgument(name, str(one.value), f"{one.source}{overruled}"))
            if not overruled and argument not in left_out:
                left_out[argument] = _from_settings(argument, one.value)
        result = function(*args, **(left_out | given))
        modules: list[Any] = result if isinstance(result, list) else [result]
        _origins.update({module: tuple(rows) for module in modules})
        return result

    return completed


def _shown(value: object) -> str:
    plain = (str, int, float, type(None), MixedPrecisionPolicy, Compression, DeviceMesh)
    # the repr of a tensor would show all elements
    return repr(value) if isinstance(value, plain) else type(value).__name__


def _from_settings(argument: str, value: Any) -> Any:
    """Convert the ``value`` of a setting in the run file to a value of ``argument`` of ``shard`` or ``fully_shard``."""
    if argument == "mp_policy":
        precision = {name: one.value for name, one in run_settings().items() if name.startswith("precision.")}
        dtypes = {
            f"{name}_dtype": _DTYPES[precision.get(f"precision.{name}")] for name in ("param", "reduce", "output")
        }
        casts = precision.get("precision.cast_forward_inputs", True)
        return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=casts)
    if argument == "compression":
        return compression_of_run()
    if argument == "offload_policy":
        return CPUOffloadPolicy() if value else OffloadPolicy()
    if argument == "mesh":
        ranks = all_ranks()
        return _replicated(ranks.get_group(), value, ranks.device_type) if value > 1 else ranks
    return value


@lru_cache(maxsize=1)  # making a mesh makes process groups, and all fully_shard calls share it
def _replicated(world: dist.ProcessGroup, replicas: int, device: str) -> DeviceMesh:
    """Return the mesh (replicate, shard) of all ranks."""
    name, size = "shard.replicate", world.size()
    check_settings({name: replicas}, [world])
    if size % replicas:
        raise ValueError(
            f"{name}={replicas} ({run_settings()[name].source}) does not divide the {size} ranks of this run"
        )
    return init_device_mesh(device, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


@_completed
def shard(
    model: Model,
    *,
    mesh: DeviceMesh | None = None,
    units: Units = "auto",
    reshard_after_forward: bool | int | None = None,
    zero_stage: Literal[1, 2, 3] = 3,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    sync_module_states: bool = False,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    separate_reduce_group: bool = False,
    compression: Compression | str | None = None,
    ownership: Ownership = "flat",
    sync: ReplicaSync | Literal["overlap"] | None = None,
) -> Model:
    """Shard ``model``'s parameters, gradients and optimizer state across the ranks of ``mesh``. A collective, in place.

    Afterwards the training loop is the one you had: make the optimizer from ``model.parameters()``, call the model,
    ``loss.backward()``, ``clip_grad_norm_``, ``step``. ``print(yafsdp_cc.plan_of(model))`` shows the cost.

    Args:
        model: any module; on the meta device it is materialised unit by unit.
        mesh: the ranks to shard across; or (replicate, shard): parameters are sharded across the second dimension and
            replicated along the first, gradients are summed over both. Parameters that ``parallelize_module`` has
            divided across another dimension are sharded further. None: shard across all ranks; a process group is
            started from the launcher's environment (``RANK``, ``WORLD_SIZE``, ...) if there is none.
        units: modules that are gathered together: ``"auto"`` (the model's own plan, else its repeated blocks, else a
            model of up to 4 million parameters as a whole), class names or classes, patterns of module names
            (``"layers.*"``), modules, or a predicate (name, module).
        reshard_after_forward: False keeps unsharded weights until they change: a buffer for each unit instead of shared
            ones, and half of the all-gathers. None or True drops them. A number reshards them across so many
            neighbouring ranks (of one machine, say), and gathers them again from there until they change.
        zero_stage: what is sharded (Rajbhandari et al., "ZeRO", 2020, section 5): 1, optimizer state; 2, gradients too;
            3, parameters too. Below 3 every unit keeps its unsharded weights, gathered once after each optimizer step;
            at 1 every unit has room for its unsharded gradients as well, so that
            ``set_requires_gradient_sync(False)``, for all micro-batches but the last, costs no more.
        mp_policy: dtypes of the forward, of the gradients on the network and of the model's output, torch's own class.
            The parameters that the optimizer sees keep their dtype. Sums are made in fp32 where the engine makes them
            (on CPU).
        offload_policy: torch's ``CPUOffloadPolicy`` keeps parameters, gradients and so the optimizer's state in host
            memory, pinned unless ``pin_memory=False``. The optimizer then runs on the host.
        ignored_params: parameters to leave unsharded, on every rank, unsynchronised.
        sync_module_states: take rank 0's parameters and buffers; otherwise the ranks' parameters are compared.
        param_init_fn: initialises the parameters that a module on the meta device owns itself.
        separate_reduce_group: a second communicator for gradients, so that an all-gather and a reduce can overlap each
            other; costs the memory of a communicator.
        compression: how gradients and weights are encoded on the network: a codec of gradients by name (``"int8"``,
            ``"int4"``, ``"ternary"``, ``"onebit"``, ...), or a ``Compression``. ``"auto"``: for each unit the least
            lossy codec that hides its sum behind the backward, measured and chosen during training. None: sums are
            exact.
        ownership: how parameters are divided. ``"flat"``: each rank owns a range of the elements. ``"matrix"``: each
            matrix of the repeated blocks, and each stack of matrices, lies whole on one rank, together with its
            gradient and optimizer state, as ``yafsdp_cc.optim.Muon`` needs it; other parameters are flat. Matrices are
            assigned so that all ranks compute equally many Newton-Schulz iterations, so the chunks of a unit differ in
            length. A list of ``*`` patterns over parameter names: the parameters that lie whole.
        sync: how the replicas of a mesh (replicate, shard) are kept together, where links between them are slow.
            ``"overlap"``: by gradient sums that run during the next step; ``yafsdp_cc.replicas`` has others. None: by a
            sum over all ranks in every backward.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: the model or an argument cannot work; the message names the parameter or module in full, what was
            seen and what to do.
        TypeError: an argument is of the wrong type.
        RuntimeError: there is neither a process group nor a launcher's environment.
    """
    mesh = all_ranks() if mesh is None else mesh
    synchronizes = Overlap() if sync == "overlap" else sync
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        check_settings({"sync": None if sync is None else repr(synchronizes)}, _everybody(mesh))
    if synchronizes is not None:
        with refused_together(*_everybody(mesh)):
            across_replicas, mesh = _divided_by_replica(mesh, synchronizes)
    with refused_together(*_everybody(mesh)):
        check_types(
            model=(model, nn.Module, "an nn.Module"),
            param_init_fn=(param_init_fn, (Callable, type(None)), "a function of a module"),
            reshard_after_forward=(reshard_after_forward, (int, type(None)), "True, False, None or a number of ranks"),
        )
        policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
        reshard = False if zero_stage in (1, 2) else reshard_after_forward
        given = _check_arguments(mesh, reshard, policy, offload_policy, ignored_params, compression)
        if mesh.mesh_dim_names == ("shard", "replicate"):
            raise ValueError(
                "mesh has dimensions ('shard', 'replicate'), and it is the second that parameters are sharded across: "
                'pass init_device_mesh(..., (machines, ranks on each), mesh_dim_names=("replicate", "shard"))'
            )
        if zero_stage not in (1, 2, 3):
            raise ValueError(f"zero_stage takes 1, 2 or 3, got {zero_stage!r}")
        if zero_stage < 3 and reshard_after_forward not in (None, False):
            raise ValueError(
                f"zero_stage={zero_stage} keeps weights whole, reshard_after_forward={reshard_after_forward} does not: "
                "leave one of them out"
            )
        check_modules(model, "shard()")
        _check_not_sharded(model)
        division = find_units(model, units, given.ignored)
        owners = given.owners(division, ownership, is_complete=True)
        if given.compression is not None:
            given.compression.check_overrides([name for name, _ in model.named_parameters()])
            sends_deltas = given.compression.weights is not None and given.keeps_after_forward
            if sends_deltas and synchronizes is not None and synchronizes.writes_weights:
                raise ValueError(
                    f"weights={given.compression.weights!r} sends what optimizer steps change, and "
                    f"{type(synchronizes).__name__} writes weights beside them: every all-gather would be exact. Leave "
                    "weights out, or take sync=Outer(...)"
                )
        inner_units = [unit for unit in division.units if unit.modules != (model,)]
        for unit in inner_units:
            given.collectives.check_group(unit.name, given.keeps_after_forward)
    if synchronizes is None:
        _warn_of_whole_model(mesh, division)
        _warn_of_emulated_bf16(policy, torch.device(mesh.device_type))
    info, across = given.info, all_groups(mesh)
    settings = {
        **given.settings(mp_policy, ownership),
        "offload_policy": offload_policy,
        "zero_stage": zero_stage,
        "reshard_after_forward": (given.keeps_after_forward, given.secondary_ranks),
        "sync_module_states": sync_module_states,
        "separate_reduce_group": separate_reduce_group,
        "torch": torch.__version__,
    }
    check_settings(settings, across)
    check_equal(division.parameters, across, values=not sync_module_states)
    check_dense(model.named_buffers() if sync_module_states else (), "sync_module_states")
    check_settings({"units": [(unit.role, unit.name, len(unit.parameters)) for unit in division.units]}, across)
    place_buffers(model, info.device, param_init_fn, of_loaded=True)
    prepare = _preparation(model, info, sync_module_states, param_init_fn)
    plan = ShardingPlan(info, policy, given.collectives, given.host, prepare, owners)
    # ``output_dtype`` is for the output of the model, not for those of the units inside
    inner = plan._replace(policy=replace(policy, output_dtype=None))
    for unit in inner_units:
        spec = shard_parameters(unit.modules, unit.parameters, (), inner, unit.role)
        spec.settings.keeps_after_forward = given.keeps_after_forward
        spec.settings.secondary_ranks = given.secondary_ranks
    root_params = next((unit.parameters for unit in division.units if unit.modules == (model,)), ())
    shard_parameters((model,), root_params, division.replicated, plan, "root").ignored = given.ignored
    for spec in specs_below(model):
        spec.settings.separate_reduce_group = separate_reduce_group
        if zero_stage == 1:
            spec.settings.grad_buffers = sum(unit.role in TAKE_TURNS for unit in division.units)
        for module in spec.modules:
            make_sharded(module, spec)
    buffers = place_buffers(model, info.device, param_init_fn)
    if sync_module_states:
        broadcast_values(buffers, mesh)
    current_state(model)
    if given.compression is not None:
        _warn_of_residuals(plan_of(model), given.compression)
    mark_optimizer_steps()
    patch_torch()
    if synchronizes is not None:
        join_replicas(model, across_replicas, synchronizes)
    return model


@_completed
def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placement | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (torch's own default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    compression: Compression | str | None = None,
    ownership: Ownership = "flat",
) -> Modules:
    """Shard the parameters of ``module`` that no earlier call on a part of it has sharded. A collective, in place.

    Call ``fully_shard`` bottom-up, as torch's: on every block, then on the model. The module whose forward runs first
    becomes the root, and buffers are made then. Until then only the shards take memory, or none on the meta device.

    Args:
        module: a module, or a list of modules whose parameters are gathered together.
        mesh: the ranks to shard across, or (replicate, shard); None: shard across all ranks.
        reshard_after_forward: whether weights are dropped after forward and gathered again in backward. None: for all
            but the root. A number: they are resharded across so many neighbouring ranks, and gathered again from there
            until they change.
        shard_placement_fn: may return None or any ``Shard(dim)``, without effect: parameters are sharded into flat
            ranges, so that no dimension has to be divisible. ``p.redistribute(placements=[Shard(dim)])`` has a
            ``to_local()`` in that layout.
        mp_policy: dtypes of the forward's weights and inputs, of gradients on the network, and of this module's output.
        offload_policy: as of ``shard``. Offloaded parameters may be anywhere before; those of the meta device go to the
            CPU, ``model.to_empty(device="cpu")``.
        ignored_params: as of ``shard``.
        dp_mesh_dims: torch's ``DataParallelMeshDims``: which dimensions of ``mesh`` are data-parallel, where parameters
            are DTensors on all of its dimensions, and so are the forward's inputs. None: ``mesh`` is the data-parallel
            one. Parameters that are DTensors across other ranks are sharded further either way.
        compression: as of ``shard``: how gradients and weights of this group are encoded on the network. All groups of
            a model with a compression must have the same one. Patterns of ``overrides`` are of full names, and the
            first forward warns of one that fits none; one that divides a group has to fit names within ``module``, too.
        ownership: as of ``shard``, of the parameters of this group: ``"matrix"`` takes its matrices and stacks of
            matrices, embeddings aside, so pass it to the calls on blocks. Patterns are matched against parameter names
            within ``module``. Owners are balanced over all calls with this mesh.

    Returns:
        ``module``, whose class is now a subclass of its own and of ``FSDPModule``.

    Raises:
        ValueError: the module, the mesh or an argument cannot work.
        NotImplementedError: an argument has no counterpart here; the message tells why.
    """
    spmd_mesh = mesh = all_ranks() if mesh is None else mesh
    if dp_mesh_dims is not None:
        mesh = data_parallel_mesh(mesh, dp_mesh_dims)
    with refused_together(*_everybody(mesh)):
        for each in module if isinstance(module, list) and module else [module]:
            _check_module(each)
        modules = tuple(dict.fromkeys(module)) if isinstance(module, list) else (module,)
        given = _check_arguments(mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params, compression)
        owned = _owned_params(modules, given.ignored)
        if dp_mesh_dims is not None:
            names = (*dp_mesh_dims.shard_names, *dp_mesh_dims.replicate_names)
            owned = [
                OwnedParameter(one.name, without_data_parallel(one.parameter, one.name, spmd_mesh, names), one.sites)
                for one in owned
            ]
        check_shardable(owned)
        if shard_placement_fn is not None:
            for one in owned:
                _check_placement(one, shard_placement_fn(one.parameter))
        small = [one for one in owned if is_small(one.parameter)]
        large = [one for one in owned if one not in small]
        division = Division((UnitSpec("", modules, "block", tuple(large)),), tuple(small))
        work = Counter(_work.get(given.info.shard_group))
        owners = given.owners(division, ownership, is_complete=False, work=work)
    info = given.info
    check_equal(owned, all_groups(mesh), values=False)
    settings = given.settings(mp_policy, ownership) | {"ownership (owner of each matrix)": list(owners.values())}
    check_settings(settings, all_groups(mesh), "fully_shard()")
    _work[info.shard_group] = work

    def prepare(members: Sequence[OwnedParameter]) -> None:
        for one in members:
            if given.host is None and not one.parameter.is_meta and not isinstance(one.parameter, DTensor):
                one.parameter.data = one.parameter.data.to(info.device)

    plan = ShardingPlan(info, mp_policy, given.collectives, given.host, prepare, owners)
    spec = shard_parameters(modules, large, small, plan)
    spec.settings.keeps_after_forward = given.keeps_after_forward
    spec.settings.secondary_ranks = given.secondary_ranks
    spec.settings.stays_unsharded = None if reshard_after_forward is None else reshard_after_forward is False
    spec.ignored = given.ignored
    for inner in specs_below(modules[0]):
        outdate(inner)
    for each in modules:
        move_buffers(each, info.device)
        make_sharded(each, spec)
    mark_optimizer_steps()
    patch_torch()
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.<method_name>(...)`` another way into a sharded module; do nothing if it is not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, ShardedModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    register_forward_method(module, method_name)


def plan_of(model: nn.Module) -> Plan:
    """Return the plan of a sharded model: units, buffers, bytes sent per step, memory per rank; printable.

    Any rank may call ``plan_of`` alone. The engine's buffers are made by ``shard``, or in the first forward
    after ``fully_shard``; a setter that changes their number makes new ones in the next forward.

    Raises:
        ValueError: ``model`` is not sharded.
        RuntimeError: the engine has no buffers yet.
    """
    plan = replace(plan_for(built_state(model, "plan_of", is_current=True)), arguments=_origins.get(model, ()))
    if (sync := sync_of(model)) is not None:
        sent = replace(plan.communication, replicas=sync.planned_bytes())
        plan = replace(plan, communication=sent, replicas=sync.comm.world, sync_bytes=sync.memory())
    return plan


def counters_of(model: nn.Module) -> Counters:
    """Return what the engine of a sharded model has done since ``shard``, and the bytes it owns now, on this rank.

    Any rank may call ``counters_of`` alone, after ``shard`` or, with ``fully_shard``, after the first forward.

    Raises:
        ValueError: ``model`` is not sharded.
        RuntimeError: there was no forward after ``fully_shard`` yet.
    """
    state = built_state(model, "counters_of")
    plan = plan_for(state)
    counters = state.context.counters
    unplanned = (group.own_grad_buffer for group in state.groups)  # buffers that ``ParamGroup.grad_buffer`` made later
    counters.owned_bytes = plan.owned_bytes + sum(each.data.nbytes for each in unplanned if each is not None)
    counters.host_bytes = plan.host_bytes
    return counters


def watch_loss(model: nn.Module, loss: torch.Tensor | float) -> None:
    """Report the loss of this rank's batch to a compressed model, once per step.

    If losses stay a tenth above the best so far, all gradients are encoded in more bits (``Compression.fallback``). The
    call waits neither for the value nor for other ranks.

    Args:
        model: sharded with a compression.
        loss: a number or a tensor of one element on any device, without a loss scale.

    Raises:
        ValueError: there is no compression, its fallback is off, or it has nothing to watch; or there are several
            losses.
        TypeError: ``loss`` is no number.
        RuntimeError: there was no forward after ``fully_shard`` yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch_loss takes the model first and then its loss; got {model!r} as the model")
    state = built_state(model, "watch_loss")
    schedule, fallback = CompressionSchedule.of(state), CodecFallback.of(state)
    why, remedy = "", "name a codec, as in shard(model, compression='int8')"
    if schedule is None:
        why = "without a compression"
    elif fallback is None:
        why, remedy = "with Compression(fallback=False)", "leave fallback=False out"
    elif schedule.config.named <= {AUTO, NO_CODEC} and schedule.config.weights is None:
        why = f"with gradients={schedule.config.gradients!r}, which the fallback does not watch"
    if fallback is None or why:
        raise ValueError(
            f"watch_loss: this {type(model).__name__} is sharded {why}, so nobody would do anything: leave the call "
            f"out, or {remedy}"
        )
    if not isinstance(loss, torch.Tensor | float | int):
        raise TypeError(f"watch_loss takes a tensor of one element, or a float; got {loss!r}")
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        raise ValueError(f"watch_loss takes one number, and this loss has shape {list(loss.shape)}: pass loss.mean()")
    fallback.add_loss(loss)


# Ranks -------------------------------------------------------------------------------------------------------------


def all_ranks() -> DeviceMesh:
    """Return a mesh of every rank; start the process group from the launcher's environment if there is none."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise RuntimeError(
                "there is no process group and no launcher's environment (RANK is not set): start the script with "
                "`yafsdp-cc launch --nproc-per-node=2 script.py` (or torchrun), or call "
                "torch.distributed.init_process_group first"
            )
        if torch.cuda.is_available():
            local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if local >= count:
                raise RuntimeError(
                    f"local rank {local} has no GPU of its own, this machine shows {count}: start at most {count} "
                    'ranks here, or hide the GPUs (CUDA_VISIBLE_DEVICES="") to train on CPUs'
                )
            torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(_end_process_group)  # gloo's threads abort an interpreter that exits while they run
    uses_cuda = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return init_device_mesh("cuda" if uses_cuda else "cpu", (dist.get_world_size(),))


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _everybody(mesh: object) -> list[dist.ProcessGroup]:
    """Return the process groups that refuse arguments together: the world, if ``mesh`` has all its ranks."""
    assert dist.group.WORLD is not None
    if not isinstance(mesh, DeviceMesh) or mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]
    return [] if mesh.ndim > 2 or mesh.get_coordinate() is None else all_groups(mesh)


# Checks of arguments -----------------------------------------------------------------------------------------------


def _check_arguments(
    mesh: DeviceMesh,
    reshard_after_forward: bool | int | None,
    policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    ignored_params: Iterable[nn.Parameter] | None,
    compression: Compression | str | None,
) -> _Arguments:
    ignored = tuple(ignored_params or ())  # an iterator such as ``module.parameters()`` can be read only once
    check_types(
        mesh=(mesh, DeviceMesh, 'a DeviceMesh, for example init_device_mesh("cpu", (2,))'),
        mp_policy=(policy, MixedPrecisionPolicy, "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
        offload_policy=(offload_policy, (OffloadPolicy, type(None)), "OffloadPolicy() or CPUOffloadPolicy()"),
        ignored_params=ignored,
    )
    check_policy(policy)
    if mesh.ndim > 2:
        names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions{names}: pass (shard) or (replicate, shard), a 1D or 2D DeviceMesh, for "
            'example init_device_mesh("cpu", (world_size,)), or two dimensions of yours by name, mesh["dp", "fsdp"]'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}: make the call on the ranks of the mesh")
    if mesh.ndim == 2 and type(mesh.mesh) is torch.Tensor:  # a ``FakeTensor`` has no values
        orders = mesh.mesh.numpy().argsort(-1)  # torch's ``argsort`` has no values in a ``FakeTensorMode``
        if (orders != orders[0]).any():
            raise ValueError(
                f"mesh {mesh.mesh.tolist()} orders the ranks of its rows differently, and process groups number theirs "
                "in ascending order, so that ranks of a column would hold different shards: pass rows in ascending "
                "order"
            )
    info = MeshInfo.of(mesh)
    config = compression_of(compression)
    collectives = EXACT if config is None else CompressedCollectives(config, mesh)
    host = HostMemory.of(offload_policy, info.device)
    keeps, secondary = _after_forward(reshard_after_forward, mesh)
    return _Arguments(info, host, config, collectives, keeps, secondary, frozenset(ignored))


def _divided_by_replica(mesh: object, sync: object) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh across replicas and that of this rank's replica, given a mesh (replicate, shard)."""
    if not isinstance(sync, ReplicaSync):
        raise TypeError(f"sync takes 'overlap', or an object such as yafsdp_cc.replicas.Overlap(), got {sync!r}")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2 or not mesh.mesh_dim_names:
        raise ValueError(
            f"sync keeps replicas together, and mesh is {mesh}: pass init_device_mesh(..., (replicas, ranks of each), "
            'mesh_dim_names=("replicate", "shard")), or in a run file shard.replicate'
        )
    across, within = mesh.mesh_dim_names
    return mesh[across], mesh[within]


def _after_forward(reshard: object, mesh: DeviceMesh) -> tuple[bool, int]:
    """Return whether weights are kept after the forward, and how many ranks hold a secondary shard (0: none)."""
    if reshard is None or isinstance(reshard, bool):
        return reshard is False, 0
    if not isinstance(reshard, int):
        raise ValueError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {reshard}"
        )
    size = mesh.size(mesh.ndim - 1)
    if reshard < 1 or reshard > size or size % reshard:
        factors = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        raise ValueError(
            f"reshard_after_forward={reshard}: pass a factor of {size}, the ranks of a shard ({factors}), True to "
            "reshard across all of them, or False to keep weights unsharded"
        )
    return reshard == 1, 0 if reshard in (1, size) else reshard


def _check_not_sharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            where = f"its module '{name}'" if name else "it"
            raise ValueError(
                f"shard() on a {class_of(model).__name__}, but {where} is sharded already: call shard() once, or "
                "fully_shard on every part and then on the model. yafsdp_cc.unshard_model(model) makes it plain again"
            )


def _check_placement(one: OwnedParameter, placement: object) -> None:
    """Raise unless ``shard_placement_fn`` returns None or a valid ``Shard``, which has no effect on flat parameters."""
    if placement is None:
        return
    if type(placement) is not Shard:
        raise NotImplementedError(
            f"shard_placement_fn returns {placement} for '{one.name}': it may return None or Shard(dim). Parameters on "
            "a mesh of their own take a call of their own before: fully_shard(module, mesh=...) on what holds them"
        )
    ndim = one.parameter.ndim
    if not -ndim <= placement.dim < ndim:
        shape = list(one.parameter.shape)
        raise ValueError(
            f"shard_placement_fn returns Shard({placement.dim}) for '{one.name}' of {shape}: its dimensions are "
            f"{-ndim} to {ndim - 1}"
        )


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"fully_shard takes a module or a list of modules, got {module!r}")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in module.children()))
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: this {type(module).__name__} of "
            f"{len(module)} ({kinds}) is never called. Call fully_shard on each module in it, then on the model"
        )
    if spec_of(module) is not None:
        raise MisuseError(
            "Each distinct composable distributed API can only be applied to a module once. fully_shard has already "
            f"been applied to this {class_of(module).__name__}: call it once on each module"
        )
    check_modules(module, "fully_shard()")


def _owned_params(modules: tuple[nn.Module, ...], ignored: Collection[nn.Parameter]) -> list[OwnedParameter]:
    """Return the parameters of ``modules``, each once, without those of modules that are sharded already."""
    found: dict[nn.Parameter, OwnedParameter] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if SHARDED_AS in parameter.__dict__:
                raise ValueError(
                    f"'{name}' is tied to a parameter of a module that was sharded before: gather both together, "
                    "fully_shard([one, other])"
                )
        for owned, paths in find_parameters(module, ignored).items():
            if all(any(spec_of(each) is not None for each in path) for path in paths):
                continue
            if isinstance(owned.parameter, FlatDTensor):
                raise ValueError(
                    f"'{owned.name}' of this {type(module).__name__} was sharded by a call on a module around it: call "
                    "fully_shard on the inner modules first, on tied ones together, fully_shard([one, other])"
                )
            known = found.get(owned.held)
            sites = (*known.sites, *owned.sites) if known is not None else owned.sites
            name = known.name if known is not None else owned.name
            found[owned.held] = OwnedParameter(name, owned.parameter, tuple(dict.fromkeys(sites)))
    return list(found.values())


def _warn_of_whole_model(mesh: DeviceMesh, division: Division) -> None:
    """Warn if every rank is left with the whole model."""
    parallel = any(isinstance(each.parameter, DTensor) for unit in division.units for each in unit.parameters)
    if mesh.size() == 1 and not parallel:
        world = dist.get_world_size()
        what = "start more ranks (--nproc-per-node=2)"
        if world > 1:
            what = f"the {world} ranks of this run would each train a model of their own; pass a mesh of several"
        warnings.warn(f"shard() over one rank shards nothing: {what}", stacklevel=4)
    elif not division.units:
        warnings.warn(
            "nothing is sharded: every parameter of this model is so small that all ranks keep it whole", stacklevel=4
        )


def _warn_of_emulated_bf16(policy: MixedPrecisionPolicy, device: torch.device) -> None:
    """Warn if a forward is to compute in bf16 on a processor without instructions for it."""
    if policy.param_dtype is torch.bfloat16 and emulates_bf16(device):
        warnings.warn(
            "mp_policy.param_dtype=torch.bfloat16 on a processor that has no instructions for it (AVX-512 BF16 or "
            "AMX): matrix products take many times as long as in torch.float32, which param_dtype=None leaves them in",
            stacklevel=4,
        )


def emulates_bf16(device: torch.device) -> bool:
    """Return whether ``device`` is a processor without instructions for bf16, which makes bf16 many times as slow."""
    known = device.type != "cpu" or not torch.backends.mkldnn.is_available()
    return not known and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _warn_of_residuals(plan: Plan, compression: Compression) -> None:
    """Warn if residuals of compression take more memory than the shards and their AdamW state."""
    sharded = plan.parameter_shard_bytes + plan.gradient_shard_bytes + plan.adamw_bytes
    if plan.residual_bytes > sharded:
        shorter = f"residual='int8' takes {plan.choices[0].residual['int8']:,}; "
        warnings.warn(
            f"residuals take {plan.residual_bytes:,} bytes per rank, more than the {sharded:,} of the shards and an "
            f"AdamW: {'' if compression.sends_differences else shorter}a mesh (replicate, shard) divides them by the "
            "size of its second dimension; int8 and int4 with feedback=False need none",
            stacklevel=4,
        )


def _preparation(
    model: nn.Module, info: MeshInfo, sync: bool, initialize: Callable[[nn.Module], Any] | None
) -> Callable[[Sequence[OwnedParameter]], None]:
    """Return a function that gives one unit's parameters values, and broadcasts or compares these across ranks."""

    def prepare(owned: Sequence[OwnedParameter]) -> None:
        fresh = materialize(owned, model, info.device, initialize)
        if sync:
            for each in owned:
                if not isinstance(each.parameter, DTensor):
                    each.parameter.data = each.parameter.data.to(info.device)
            broadcast_values([tensor for each in owned for tensor in values_of(each.parameter)], info.mesh)
        elif fresh:
            check_equal(owned, all_groups(info.mesh), values=True)

    return prepare
