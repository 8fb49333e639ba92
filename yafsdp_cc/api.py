"""The way in: ``shard`` turns a plain module into a sharded one, in place."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from yafsdp_cc.arguments import check_hooks, check_modules, check_types, dtypes_of
from yafsdp_cc.compression import AUTO, EXACT, Compression, check_kept, check_overrides, compression_of
from yafsdp_cc.engine.agree import broadcast, check_equal, check_settings, refused_together
from yafsdp_cc.engine.assemble import assemble, second_group
from yafsdp_cc.engine.compressed import Compressed
from yafsdp_cc.engine.counters import Counters
from yafsdp_cc.engine.cutter import Cutter
from yafsdp_cc.engine.draft import Draft
from yafsdp_cc.engine.host import Host
from yafsdp_cc.engine.materialize import materialize, place_buffers
from yafsdp_cc.engine.module import ShardedModule, adopt, root_of
from yafsdp_cc.engine.ranks import Ranks, groups
from yafsdp_cc.engine.tensor_parallel import check_divided, held
from yafsdp_cc.plan import Division, OwnedParameter, Plan, Units, check_no_optimizer, find_units
from yafsdp_cc.profiling.spans import mark_optimizer_steps
from yafsdp_cc.wire.codec import FORMAT
from yafsdp_cc.wire.exchange import Gather, Reduce, rehearse

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    *,
    mesh: DeviceMesh | None = None,
    units: Units = "auto",
    reshard_after_forward: bool | int | None = None,
    zero_stage: Literal[1, 2, 3] = 3,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    sync_module_states: bool = False,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    separate_reduce_group: bool = False,
    compression: Compression | str | None = None,
) -> Model:
    """Cut ``model``'s parameters, gradients and optimizer state across the ranks of ``mesh``, in place.

    Afterwards the training loop is the one you had: make the optimizer from ``model.parameters()``, call the model,
    ``loss.backward()``, ``clip_grad_norm_``, ``step``. ``print(yafsdp_cc.plan_of(model))`` says what it will cost.

    Args:
        model: any module; on the meta device it is materialised unit by unit.
        mesh: the ranks to cut across, or (replicate, shard): cut across the second dimension, the same along the
            first, gradients summed over both. Parameters that ``parallelize_module`` has divided across another
            dimension are cut further. None: cut across all ranks; a process group is started from the launcher's
            environment (``RANK``, ``WORLD_SIZE``, ...) if there is none.
        units: what is gathered together: ``"auto"`` (the model's own plan, else its repeated blocks), class names or
            classes, patterns of module names (``"layers.*"``), modules, or a predicate (name, module).
        reshard_after_forward: False keeps whole weights until they change: a slot for each unit instead of shared ones,
            and half of the gathers. None or True drops them. A number cuts them again across so many neighbouring
            ranks (of one machine, say), and gathers them again from there until they change.
        zero_stage: what is cut (Rajbhandari et al., "ZeRO", 2020, section 5): 1, optimizer state; 2, gradients too; 3,
            parameters too. Below 3 every unit keeps its weights whole, gathered once after each optimizer step; at 1
            every unit has room for its whole gradients as well, so that ``set_requires_gradient_sync(False)``, said for
            all micro-batches but the last, costs no more.
        mp_policy: dtypes of the forward, of the gradients on the wire and of the model's output, torch's own class. The
            parameters that the optimizer sees keep their dtype. Sums are made in fp32 where the engine makes them (on
            CPU).
        offload_policy: torch's ``CPUOffloadPolicy`` keeps parameters, gradients and so the optimizer's state in host
            memory, pinned unless it says ``pin_memory=False``. The optimizer then runs on the host.
        ignored_params: parameters to leave as they are, on every rank, unsynchronised.
        sync_module_states: take rank 0's parameters and buffers; otherwise the ranks' parameters are compared.
        param_init_fn: initialises the parameters that a module on the meta device owns itself.
        separate_reduce_group: a second communicator for gradients, so that a gather and a reduce can overlap each
            other; costs the memory of a communicator.
        compression: how gradients and weights are encoded on their way: a codec of gradients by name (``"int8"``,
            ``"int4"``, ``"ternary"``, ``"onebit"``, ...), or a ``Compression``. ``"auto"``: in each unit as few bits
            lost as hide its sum under the backward, measured and chosen as training goes. None: sums are exact.

    Returns:
        The same object.

    Raises:
        ValueError: the model or an argument cannot work; the message names the parameter or module in full, what was
            seen and what to do.
        TypeError: an argument is of the wrong type.
        RuntimeError: there is neither a process group nor a launcher's environment.
    """
    check_types(
        model=(model, nn.Module, "an nn.Module"),
        reshard_after_forward=(reshard_after_forward, (int, type(None)), "True, False, None or a number of ranks"),
        mesh=(mesh, (DeviceMesh, type(None)), 'a DeviceMesh, for example init_device_mesh("cpu", (2,))'),
        mp_policy=(mp_policy, (MixedPrecisionPolicy, type(None)), "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
        **dtypes_of(mp_policy),
        offload_policy=(offload_policy, (OffloadPolicy, type(None)), "OffloadPolicy() or CPUOffloadPolicy()"),
        param_init_fn=(param_init_fn, (Callable, type(None)), "a function of a module"),
        ignored_params=ignored_params,
    )
    if zero_stage not in (1, 2, 3):
        raise ValueError(f"zero_stage takes 1, 2 or 3, got {zero_stage!r}")
    if zero_stage < 3 and reshard_after_forward not in (None, False):
        raise ValueError(
            f"zero_stage={zero_stage} keeps weights whole, reshard_after_forward={reshard_after_forward} does not: "
            "leave one of them out"
        )
    config = compression_of(compression)
    mesh = _check_mesh(mesh) if mesh is not None else all_ranks()
    ranks = Ranks.of(mesh)
    compressed = None if config is None else Compressed(config, ranks)
    group = ranks.group
    across = groups(mesh)
    with refused_together(*across):
        check_modules(model, "shard()")
        _check_not_sharded(model)
        check_no_optimizer(model, ignored_params or ())
        division = find_units(model, units, ignored_params or ())
        owned = [*(each for unit in division.units for each in unit.parameters), *division.small]
        check_divided(owned, mesh)
        check_hooks(owned)
        check_overrides(config, [name for name, _ in model.named_parameters()])
        keeps, near = after_forward(reshard_after_forward, mesh)
        for spec in division.units:
            if spec.modules != (model,) and (near or not (keeps or zero_stage < 3)):
                check_kept(config, spec.name, near)
    _warn_of_wholes(mesh, division)
    settings = {
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "reshard_after_forward": (keeps, near),
        "zero_stage": zero_stage,
        "sync_module_states": sync_module_states,
        "separate_reduce_group": separate_reduce_group,
        "compression": (config, FORMAT),
        "torch": torch.__version__,
    }
    check_settings(settings, across)
    check_equal(owned, across, values=not sync_module_states)
    check_settings({"units": [(unit.role, unit.name, len(unit.parameters)) for unit in division.units]}, across)
    reduce_group = second_group(ranks) if separate_reduce_group else group
    rehearse(Gather(group, ranks.device), Reduce(reduce_group, ranks.device), ranks.device)
    policy = mp_policy or MixedPrecisionPolicy()
    host = Host.of(offload_policy, ranks.device)
    prepare = _preparation(model, ranks, sync_module_states, param_init_fn)
    cutter = Cutter(ranks, policy, prepare, host, config)
    inner = replace(policy, output_dtype=None)  # the model's output is meant
    blocks = sum(spec.role == "block" for spec in division.units)
    drafts = [
        Draft(spec.name, spec.modules, ranks, inner, cutter.flats(spec.parameters), (), spec.role, host)
        for spec in division.units
    ]
    own = drafts.pop() if drafts and drafts[-1].modules == (model,) else None
    drafts.append(
        Draft("", (model,), ranks, policy, own.flats if own else (), cutter.small_blocks(division.small), "root", host)
    )
    drafts[-1].ignored = frozenset(ignored_params or ())
    for draft in drafts:
        draft.compressed = compressed
        draft.settings.keeps_after_forward = (keeps or zero_stage < 3) and draft.role != "root"
        if zero_stage == 1:
            draft.settings.gradient_slots = blocks
        draft.settings.near = near if draft.role != "root" else 0
        draft.settings.separate_reduce_group = separate_reduce_group
        draft.attach()
        for module in draft.modules:
            adopt(module)
    buffers = place_buffers(model, ranks.device, param_init_fn)
    if sync_module_states:
        broadcast(buffers, mesh)
    root = assemble(model)
    if config is not None:
        _warn_of_residuals(root.plan)
    mark_optimizer_steps()
    return model


def plan_of(model: nn.Module) -> Plan:
    """The plan of a sharded model: units, slots, bytes on the wire per step, memory per rank; printable.

    Raises:
        ValueError: ``model`` is not sharded.
    """
    return root_of(model).plan


def watch_loss(model: nn.Module, loss: torch.Tensor | float) -> None:
    """Let a compressed model know how its training goes: the loss of this rank's batch, once per step.

    Where losses stay a tenth above the best that there were, all its gradients go back to more bits (``Compression
    .guard``). Nothing waits for the value here.

    Args:
        model: sharded with a compression.
        loss: of any device, one element; not multiplied by a scale.

    Raises:
        ValueError: there is no compression, its guard is off, or it has nothing to watch; or there are several losses.
        TypeError: ``loss`` is no number.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch_loss takes the model first and then its loss; got {model!r} as the model")
    compressed = root_of(model).compressed
    why = ""
    if compressed is None:
        why = "without a compression"
    elif compressed.guard is None:
        why = "with Compression(guard=False)"
    elif compressed.config.named <= {AUTO, EXACT} and compressed.config.weights is None:
        why = f"with gradients={compressed.config.gradients!r}, which the guard does not watch"
    if compressed is None or compressed.guard is None or why:
        off = compressed is not None and compressed.guard is None
        other = "leave guard=False out" if off else "name a codec, as in shard(model, compression='int8')"
        raise ValueError(
            f"watch_loss: this {type(model).__name__} is sharded {why}, so nobody would do anything: leave the call "
            f"out, or {other}"
        )
    if not isinstance(loss, torch.Tensor | float | int):
        raise TypeError(f"watch_loss takes a tensor of one element, or a float; got {loss!r}")
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        raise ValueError(f"watch_loss takes one number, and this loss has shape {list(loss.shape)}: pass loss.mean()")
    compressed.guard.tell(loss)


def counters_of(model: nn.Module) -> Counters:
    """What the engine of a sharded model has done since ``shard``, and the bytes it owns now, on this rank.

    Raises:
        ValueError: ``model`` is not sharded.
    """
    root = root_of(model)
    root.counters.owned_bytes, root.counters.host_bytes = root.owned_bytes, root.host_bytes
    return root.counters


def _check_not_sharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            where = f"its module '{name}'" if name else "it"
            raise ValueError(f"shard() on a {type(model).__name__}, but {where} is sharded already")


def _warn_of_wholes(mesh: DeviceMesh, division: Division) -> None:
    """Say so where every rank is left with the whole model."""
    parallel = any(isinstance(each.parameter, DTensor) for unit in division.units for each in unit.parameters)
    if mesh.size() == 1 and not parallel:
        world = dist.get_world_size()
        what = "start more ranks (--nproc-per-node=2)"
        if world > 1:
            what = f"the {world} ranks of this run would each train a model of their own; pass a mesh of several"
        warnings.warn(f"shard() over one rank cuts nothing: {what}", stacklevel=3)
    elif not division.units:
        warnings.warn(
            "nothing is sharded: every parameter of this model is so small that all ranks keep it whole", stacklevel=3
        )


def _warn_of_residuals(plan: Plan) -> None:
    """Say so where what is kept for error feedback outweighs what sharding saves."""
    sharded = plan.parameter_shard_bytes + plan.gradient_shard_bytes + plan.adamw_bytes
    if plan.residual_bytes > sharded:
        least = plan.choices[0].residual["int8"]
        warnings.warn(
            f"residuals take {plan.residual_bytes:,} bytes per rank, more than the {sharded:,} of the shards and an "
            f"AdamW: residual='int8' takes {least:,}; a mesh (replicate, shard) divides them by the size of its second "
            "dimension; int8 and int4 with feedback=False need none",
            stacklevel=3,
        )


def all_ranks() -> DeviceMesh:
    """A mesh of every rank; starts the process group from the launcher's environment."""
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
        atexit.register(_end_process_group)  # gloo's threads abort an interpreter that ends under them
    uses_cuda = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return init_device_mesh("cuda" if uses_cuda else "cpu", (dist.get_world_size(),))


def after_forward(reshard: object, mesh: DeviceMesh) -> tuple[bool, int]:
    """What ``reshard_after_forward`` says: whether weights are kept, and how many near ranks keep a second shard.

    Raises:
        ValueError: it is neither None, a bool, nor a divisor of the number of ranks.
    """
    if reshard is None or isinstance(reshard, bool):
        return reshard is False, 0
    if not isinstance(reshard, int):
        raise ValueError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {reshard}"
        )
    size = mesh.size(mesh.ndim - 1)
    if reshard < 1 or reshard > size or size % reshard:
        raise ValueError(f"If passing reshard_after_forward as an int, it should be a factor of {size}, not {reshard}")
    return reshard == 1, 0 if reshard in (1, size) else reshard


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim > 2:
        names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions{names}: pass (shard) or (replicate, shard), for "
            'example init_device_mesh("cpu", (world_size,)), or two dimensions of yours by name, mesh["dp", "fsdp"]'
        )
    if mesh.mesh_dim_names == ("shard", "replicate"):
        raise ValueError(
            "mesh has dimensions ('shard', 'replicate'), and it is the second that parameters are cut across: pass "
            'init_device_mesh(..., (machines, ranks on each), mesh_dim_names=("replicate", "shard"))'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}: call shard() on the ranks of the mesh")
    return mesh


def _preparation(
    model: nn.Module,
    ranks: Ranks,
    sync: bool,
    initialize: Callable[[nn.Module], Any] | None,
) -> Callable[[Sequence[OwnedParameter]], None]:
    """What gives the parameters of one unit their values, the same on every rank."""

    def prepare(owned: Sequence[OwnedParameter]) -> None:
        fresh = materialize(owned, model, ranks.device, initialize)
        if sync:
            for each in owned:
                if not isinstance(each.parameter, DTensor):
                    each.parameter.data = each.parameter.data.to(ranks.device)
            broadcast([held(each.parameter) for each in owned], ranks.mesh)
        elif fresh:
            check_equal(owned, groups(ranks.mesh), values=True)

    return prepare
