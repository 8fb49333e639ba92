"""FSDP2's own door: ``fully_shard``, bottom-up, with the names, defaults and meaning of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from yafsdp_cc.api import after_forward, all_ranks
from yafsdp_cc.arguments import check_hooks, check_modules, check_types, dtypes_of
from yafsdp_cc.engine.assemble import assembled
from yafsdp_cc.engine.cutter import Cutter, cut_of
from yafsdp_cc.engine.draft import Draft, draft_of, drafts_below
from yafsdp_cc.engine.dtensor import FlatDTensor
from yafsdp_cc.engine.host import Host
from yafsdp_cc.engine.methods import UnshardHandle, share_comm_ctx
from yafsdp_cc.engine.module import ShardedModule, adopt, register_forward_method
from yafsdp_cc.engine.ranks import Ranks
from yafsdp_cc.engine.tensor_parallel import check_tensor_parallel
from yafsdp_cc.plan import check_no_optimizer
from yafsdp_cc.plan.parameters import OwnedParameter, check_shardable, survey
from yafsdp_cc.plan.units import is_small
from yafsdp_cc.profiling.spans import mark_optimizer_steps

__all__ = ["UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

Placement = Callable[[nn.Parameter], Any]


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Placement | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Placement | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placement | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (torch's own default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of ``module`` that no earlier call on a part of it has sharded, in place.

    Called bottom-up, as torch's: on every block, then on the model. What the first forward is called on becomes the
    root; slots are made then. Until then, and on the meta device, parameters are sharded and hold no more than that.

    Args:
        module: a module, or a list of modules whose parameters are gathered together.
        mesh: the ranks to cut across, or (replicate, shard); None: cut across all ranks.
        reshard_after_forward: whether weights are dropped after forward and gathered again in backward. None: for all
            but the root. A number: they are cut again across so many neighbouring ranks, and gathered again from there
            until they change.
        shard_placement_fn: may return None or ``Shard(0)``. Parameters are cut into flat ranges, so that no dimension
            has to be divisible; other placements are refused.
        mp_policy: dtypes of the forward's weights and inputs, of gradients on the wire, and of this module's output.
        offload_policy: ``CPUOffloadPolicy`` keeps parameters, gradients and so the optimizer's state in host memory.
            Parameters may be anywhere before; those of the meta device go to the CPU, ``model.to_empty(device="cpu")``.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: refused; parameters that are DTensors across other ranks than those of ``mesh`` are cut further.

    Returns:
        ``module``, whose class is now a subclass of its own and of ``FSDPModule``.

    Raises:
        ValueError: the module, the mesh or an argument cannot work.
        NotImplementedError: an argument has no counterpart here; the message says why.
    """
    for each in module if isinstance(module, list) and module else [module]:
        _check_module(each)
    modules = tuple(dict.fromkeys(module)) if isinstance(module, list) else (module,)
    check_types(
        mesh=(mesh, (DeviceMesh, type(None)), 'a DeviceMesh, for example init_device_mesh("cpu", (2,))'),
        mp_policy=(mp_policy, MixedPrecisionPolicy, "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
        **dtypes_of(mp_policy),
        offload_policy=(offload_policy, (OffloadPolicy, type(None)), "OffloadPolicy() or CPUOffloadPolicy()"),
        ignored_params=ignored_params,
    )
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "dp_mesh_dims: pass the data-parallel mesh itself, mesh=mesh['dp'], and divide parameters across the other "
            "dimensions alone, parallelize_module(..., mesh['tp'])"
        )
    mesh = all_ranks() if mesh is None else mesh
    _check_mesh(mesh)
    keeps, near = after_forward(reshard_after_forward, mesh)
    ignored = ignored_params or set()
    owned = _owned(modules, ignored)
    check_shardable(owned)
    check_tensor_parallel(owned, mesh)
    if shard_placement_fn is not None:
        for one in owned:
            _check_placement(one, shard_placement_fn(one.parameter))
    for each in modules:
        check_no_optimizer(each, ignored)
    check_hooks(owned)
    ranks = Ranks.of(mesh)
    host = Host.of(offload_policy, ranks.device)

    def prepare(members: Any) -> None:
        for one in members:
            if host is None and not one.parameter.is_meta and not isinstance(one.parameter, DTensor):
                one.parameter.data = one.parameter.data.to(ranks.device)

    cutter = Cutter(ranks, mp_policy, prepare, host)
    small = [one for one in owned if is_small(one.parameter)]
    large = [one for one in owned if one not in small]
    draft = Draft("", modules, ranks, mp_policy, cutter.flats(large), cutter.small_blocks(small), host=host)
    draft.settings.keeps_after_forward, draft.settings.near = keeps, near
    draft.ignored = frozenset(ignored)
    draft.attach()
    for inner in drafts_below(modules[0]):
        if (root := assembled(inner.modules[0])) is not None:
            root.outdated = True
    for each in modules:
        for inner in each.modules():
            for key, buffer in inner._buffers.items():
                if buffer is not None and buffer.device != ranks.device and not buffer.is_meta:
                    inner._buffers[key] = buffer.to(ranks.device)
        adopt(each)
    mark_optimizer_steps()
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.<method_name>(...)`` another way into a sharded module; nothing where it is not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, ShardedModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    register_forward_method(module, method_name)


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"fully_shard takes a module or a list of modules, got {module!r}")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
    if draft_of(module) is not None:
        raise ValueError(f"fully_shard has already been applied to this {type(module).__name__}: shard it once")
    check_modules(module, "fully_shard()")


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}: call fully_shard on the ranks of the mesh")


def _check_placement(owned: OwnedParameter, placement: Any) -> None:
    if placement is not None and placement != Shard(0):
        raise NotImplementedError(
            f"shard_placement_fn returns {placement} for '{owned.name}': parameters are cut into flat ranges, which "
            "fit any number of ranks; return None"
        )


def _owned(modules: tuple[nn.Module, ...], ignored: set[nn.Parameter]) -> list[OwnedParameter]:
    """What ``modules`` hold beside modules that are sharded already, each parameter once."""
    found: dict[nn.Parameter, OwnedParameter] = {}
    for module in modules:
        for owned, paths in survey(module, ignored).items():
            if all(any(draft_of(each) is not None for each in path) for path in paths):
                continue
            if isinstance(owned.parameter, FlatDTensor):
                raise ValueError(
                    f"'{owned.name}' of this {type(module).__name__} was sharded by a call on a module around it: call "
                    "fully_shard on the inner modules first, on tied ones together, fully_shard([one, other])"
                )
            if cut_of(owned.parameter) is not None:
                raise ValueError(
                    f"'{owned.name}' is tied to a parameter of a module that was sharded before: gather both together, "
                    "fully_shard([one, other])"
                )
            known = found.get(owned.parameter)
            sites = (*known.sites, *owned.sites) if known is not None else owned.sites
            name = known.name if known is not None else owned.name
            found[owned.parameter] = OwnedParameter(name, owned.parameter, tuple(dict.fromkeys(sites)))
    return list(found.values())
