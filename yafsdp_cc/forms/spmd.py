"""Parameters that are DTensors on one mesh of all ranks, some of whose dimensions are data-parallel (``dp_mesh_dims``).

given      DTensor on (dp, tp), placed as (Replicate, Shard(0))
sharded    its local tensor across dp, like any parameter that tensor parallelism has divided
forward    DTensor on (dp, tp), placed as (Replicate, Shard(0)); its gradient as (Partial, Shard(0))
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from yafsdp_cc.engine.layout import DIVIDED_AS, TensorParallel, joint_mesh
from yafsdp_cc.forms.subclasses import with_grad_dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class SpmdParallel(TensorParallel):
    """Division by tensor parallelism of a parameter that is a DTensor on a mesh with data-parallel dimensions, too.

    Forwards see a DTensor on ``spmd_mesh``. Autograd does not sum its gradients over the data-parallel ranks, as the
    engine reduces them.

    Args:
        spmd_mesh: mesh of all ranks.
        spmd_placements: placements of the weights, ``Replicate()`` on the data-parallel dimensions.
        grad_placements: placements of gradients, ``Partial()`` on the data-parallel dimensions.
    """

    spmd_mesh: DeviceMesh
    spmd_placements: tuple[Placement, ...]
    grad_placements: tuple[Placement, ...]

    @torch.enable_grad()
    def wrap_unsharded(self, view: Tensor) -> DTensor:
        return DTensor.from_local(  # type: ignore[call-arg,unused-ignore]  # torch 2.11 has no grad_placements
            view,
            self.spmd_mesh,
            self.spmd_placements,
            run_check=False,
            shape=self.shape,
            stride=self._strides,
            grad_placements=self.grad_placements,
        )


def data_parallel_mesh(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """Return the mesh (shard), or (replicate, shard), made of the dimensions of ``mesh`` that ``dims`` names.

    A collective: several dimensions are flattened to one, which makes a process group.

    Raises:
        TypeError: ``dims`` is no ``DataParallelMeshDims``.
        ValueError: ``mesh`` lacks a dimension that ``dims`` names, or ``dims`` names none to shard across.
    """
    if not hasattr(dims, "shard_names"):
        takes = "torch.distributed.fsdp.DataParallelMeshDims(shard='dp'), of torch 2.13"
        raise TypeError(f"dp_mesh_dims takes {takes}; got {dims!r}")
    names, shard, replicate = mesh.mesh_dim_names or (), dims.shard_names, dims.replicate_names
    if missing := [name for name in (*shard, *replicate) if name not in names]:
        raise ValueError(
            f"dp_mesh_dims names '{missing[0]}', and the dimensions of the mesh are {list(names) or 'unnamed'}"
        )
    if not shard:
        raise ValueError("dp_mesh_dims without shard shards nothing: name the dimension to shard across")
    parts = [
        mesh[each[0]] if len(each) == 1 else mesh[tuple(each)]._flatten("_".join(each))
        for each in (replicate, shard)
        if each
    ]
    return parts[0] if len(parts) == 1 else joint_mesh(*parts)


def without_data_parallel(tensor: Tensor, name: str, mesh: DeviceMesh, dims: Collection[str]) -> nn.Parameter:
    """Return a parameter that is placed on all dimensions of ``mesh`` as a DTensor on those that are not data-parallel.

    Args:
        name: name of the parameter, for errors.
        mesh: mesh of all ranks.
        dims: names of the data-parallel dimensions.

    Raises:
        ValueError: ``tensor`` is no DTensor on ``mesh``, or not ``Replicate()`` on the data-parallel dimensions.
    """
    if not isinstance(tensor, DTensor) or tensor.device_mesh != mesh:
        found = f"a DTensor on {tensor.device_mesh}" if isinstance(tensor, DTensor) else "a plain tensor"
        raise ValueError(
            f"'{name}' is {found}, and with dp_mesh_dims every parameter is a DTensor on the mesh that is passed, "
            f"{mesh}: distribute it there, or leave dp_mesh_dims out and pass the data-parallel mesh"
        )
    placed = dict(zip(mesh.mesh_dim_names or (), tensor.placements, strict=True))
    for dim in dims:
        if type(placed[dim]) is not Replicate:
            raise ValueError(
                f"'{name}' is placed as {placed[dim]} on the data-parallel dimension '{dim}', and has to be "
                "Replicate() there: fully_shard shards it"
            )
    others = [dim for dim in placed if dim not in dims]
    if not others:
        raise ValueError(
            f"the mesh has no dimensions beside {sorted(dims)}: leave dp_mesh_dims out, and pass plain parameters"
        )
    kept, placements = mesh[tuple(others)], tuple(placed[dim] for dim in others)
    part = DTensor.from_local(
        tensor._local_tensor.detach(), kept, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    parameter = with_grad_dtype(nn.Parameter(part, tensor.requires_grad), tensor)
    grads = tuple(Partial() if dim in dims else placement for dim, placement in placed.items())
    parameter.__dict__.update(vars(tensor))  # keep attributes that users and frameworks have set
    shown = SpmdParallel(kept, placements, tensor.shape, mesh, tuple(tensor.placements), grads)
    parameter.__dict__[DIVIDED_AS] = shown
    return parameter
