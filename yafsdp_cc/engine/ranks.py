"""Who holds what: a mesh (shard), or (replicate, shard), torch's order for hybrid sharding.

Parameters are cut across the last dimension; along the first of two, every rank holds the same part.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that parameters are cut across."""
    group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
    return group


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that hold the same part as this one; None without replicas."""
    if mesh.ndim == 1 or mesh.size(0) == 1:
        return None
    group: dist.ProcessGroup = mesh.get_group(0)
    return group


def shard_rank(mesh: DeviceMesh) -> int:
    """This rank's place among those that parameters are cut across."""
    rank: int = mesh.get_local_rank(mesh.ndim - 1)
    return rank


def groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """A step over each of these in turn reaches every rank of the mesh."""
    replicas = replica_group(mesh)
    return [shard_group(mesh), *([] if replicas is None else [replicas])]


def on_mesh(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """``tensor`` itself, or a copy where the ranks of ``mesh`` can exchange it: what is offloaded is in host memory,
    and the mesh's process group may know GPUs alone."""
    return tensor if tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)


def reduce_over(
    groups: Iterable[dist.ProcessGroup], tensor: Tensor, op: dist.ReduceOp.RedOpType, mesh: DeviceMesh
) -> None:
    """All-reduce ``tensor`` over each of the groups in turn, in place; they are of ranks beside those of ``mesh``."""
    carried = on_mesh(tensor, mesh)
    for group in groups:
        dist.all_reduce(carried, op=op, group=group)
    if carried is not tensor:
        tensor.copy_(carried)


def send_first(groups: Iterable[dist.ProcessGroup], tensor: Tensor, mesh: DeviceMesh) -> None:
    """Overwrite ``tensor`` with that of the first rank of each of the groups in turn."""
    carried = on_mesh(tensor, mesh)
    for group in groups:
        dist.broadcast(carried, group=group, group_src=0)
    if carried is not tensor:
        tensor.copy_(carried)


def patience(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long an operation of ``group`` waits for the other ranks: what groups made of it should be told, who would
    wait for torch's default; None where the backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def of_first(tensor: Tensor, mesh: DeviceMesh, *, replicas_only: bool = False) -> None:
    """Overwrite ``tensor`` with that of the mesh's first rank, or of the first that holds the same part."""
    send_first(groups(mesh)[1 if replicas_only else 0 :], tensor, mesh)


@dataclass(frozen=True, eq=False)
class Ranks:
    """A mesh, and the device of this rank."""

    mesh: DeviceMesh
    device: torch.device

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        kind = mesh.device_type
        return cls(mesh, torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that parameters are cut across."""
        return shard_group(self.mesh)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part."""
        return replica_group(self.mesh)
