"""The device mesh of a sharded model, its groups, and sums and broadcasts over them.

A mesh is ``(shard,)`` or, with replicas, ``(replicate, shard)``, torch's order for hybrid sharding (HSDP). Parameters
are sharded across the last dimension; ranks along the first one hold the same shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch import Tensor

# These two functions of torch have the first name since torch 2.13, and had the second name before.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group that parameters are sharded across."""
    group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
    return group


def replicate_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that hold the same shard as this one; None without replicas."""
    if mesh.ndim == 1 or mesh.size(0) == 1:
        return None
    group: dist.ProcessGroup = mesh.get_group(0)
    return group


def shard_rank(mesh: DeviceMesh) -> int:
    """Return the index of this rank among the ranks that parameters are sharded across."""
    rank: int = mesh.get_local_rank(mesh.ndim - 1)
    return rank


def all_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the shard group, then the replicate group if any: a collective over each in turn reaches all ranks."""
    replicas = replicate_group(mesh)
    return [shard_group(mesh), *([] if replicas is None else [replicas])]


@dataclass(frozen=True, eq=False)
class MeshInfo:
    """A device mesh, and this rank's device on that mesh."""

    mesh: DeviceMesh
    device: torch.device

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshInfo:
        kind = mesh.device_type
        return cls(mesh, torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return shard_group(self.mesh)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        return replicate_group(self.mesh)

    @property
    def first_rank(self) -> int:
        """The lowest global rank of the mesh."""
        return int(self.mesh.mesh.min())


def to_mesh_device(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``tensor``, copied if needed to the kind of device that the mesh's collectives take.

    Offloaded tensors are in host memory, and the mesh's process group may have a backend for GPUs alone.
    """
    return tensor if tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)


def all_reduce_over(
    groups: Iterable[dist.ProcessGroup], tensor: Tensor, op: dist.ReduceOp.RedOpType, mesh: DeviceMesh
) -> None:
    """All-reduce ``tensor`` in place over each of ``groups`` in turn."""
    carried = to_mesh_device(tensor, mesh)
    for group in groups:
        dist.all_reduce(carried, op=op, group=group)
    if carried is not tensor:
        tensor.copy_(carried)


def broadcast_over(groups: Iterable[dist.ProcessGroup], tensor: Tensor, mesh: DeviceMesh) -> None:
    """Broadcast ``tensor`` from the first rank of each of ``groups``, one group after the other."""
    carried = to_mesh_device(tensor, mesh)
    for group in groups:
        dist.broadcast(carried, group=group, group_src=0)
    if carried is not tensor:
        tensor.copy_(carried)


def writable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, detached. A tensor that cannot be written to, an expanded view or one made in inference mode,
    first gets memory of its own."""
    if type(tensor) is torch.Tensor and tensor.is_inference():
        torch.utils.swap_tensors(tensor, tensor.clone())
    elif tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) == 1:
        tensor.data = tensor.detach().clone()
    return tensor.detach()


def broadcast_values(tensors: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Overwrite ``tensors``, of any dtype, with those of the mesh's first rank."""
    for tensor in tensors:
        whole = tensor.resolve_conj().resolve_neg().contiguous()
        data = whole.view(-1).view(torch.uint8)  # as bytes: gloo does not carry every dtype
        broadcast_over(all_groups(mesh), data, mesh)
        if whole is not tensor:
            writable(tensor).copy_(whole)
