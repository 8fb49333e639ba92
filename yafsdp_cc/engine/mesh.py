"""The ranks of a sharded model: its device mesh, and the process groups that are derived from it.

A mesh is ``(shard,)`` or, with replicas, ``(replicate, shard)``, torch's order for hybrid sharding (HSDP). Parameters
are sharded across the last dimension; ranks along the first one hold the same shard.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


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
    """Return this rank's number among those that parameters are sharded across."""
    rank: int = mesh.get_local_rank(mesh.ndim - 1)
    return rank


def all_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the shard group, then the replicate group if there is one: a collective over each reaches all ranks."""
    replicas = replicate_group(mesh)
    return [shard_group(mesh), *([] if replicas is None else [replicas])]


@dataclass(frozen=True, eq=False)
class MeshInfo:
    """A mesh and this rank's device on it."""

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

    Offloaded tensors are in host memory, and the mesh's process group may know GPUs alone.
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
    """Overwrite ``tensor`` with that of the first rank of each of ``groups`` in turn."""
    carried = to_mesh_device(tensor, mesh)
    for group in groups:
        dist.broadcast(carried, group=group, group_src=0)
    if carried is not tensor:
        tensor.copy_(carried)


def broadcast_from_first(tensor: Tensor, mesh: DeviceMesh, *, replicas_only: bool = False) -> None:
    """Overwrite ``tensor`` with that of the mesh's first rank, or of the first rank that holds the same shard."""
    broadcast_over(all_groups(mesh)[1 if replicas_only else 0 :], tensor, mesh)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that carries tensors of ``device`` in ``group``, in lower case.

    Raises:
        ValueError: the group has no backend for that device.
    """
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError as error:
        raise ValueError(
            f"the mesh is of {device.type} devices, but its process group has no backend for them: start it with "
            f'init_process_group("cpu:gloo,cuda:nccl"), or shard before any mesh is made ({error})'
        ) from error


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return how long an operation of ``group`` waits for other ranks; None where the backend does not tell.

    Groups derived from it must be given the same: they would wait for torch's default.
    """
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


# Process groups derived from a mesh --------------------------------------------------------------------------------


@dataclass
class _Derived:
    """Groups that were made from one shard group, each made once: a new communicator costs memory and a collective."""

    reduce: dist.ProcessGroup | None = None
    subgroups: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    has_slow_link: bool | None = None


_derived: weakref.WeakKeyDictionary[dist.ProcessGroup, _Derived] = weakref.WeakKeyDictionary()


def reduce_group(info: MeshInfo) -> dist.ProcessGroup:
    """Return a second communicator of the shard group's ranks, for reduces. A collective of these ranks, once."""
    known = _derived.setdefault(info.shard_group, _Derived())
    if known.reduce is None:
        members = dist.get_process_group_ranks(info.shard_group)
        partial = len(members) < dist.get_world_size()
        timeout = timeout_of(info.shard_group, info.device)
        known.reduce = dist.new_group(members, timeout=timeout, use_local_synchronization=partial)
    return known.reduce


def neighbour_group(info: MeshInfo, size: int) -> dist.ProcessGroup:
    """Return this rank and its neighbours in the shard group, ``size`` in all. A collective of these ranks, once."""
    known = _derived.setdefault(info.shard_group, _Derived()).subgroups
    if size not in known:
        first = info.shard_group.rank() // size * size
        members = dist.get_process_group_ranks(info.shard_group)[first : first + size]
        timeout = timeout_of(info.shard_group, info.device)
        known[size] = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
    return known[size]


# How fast the links are --------------------------------------------------------------------------------------------

PROBE_BYTES = 1 << 20
"""Bytes that each rank sends to the next one."""
SLOW_LINK = 2e9
"""Bits per second of payload in each direction below which a link is slow."""
PROBE_ROUNDS = 3
"""Of which the best counts: what else the machine does must not make a link look slow."""
_PROBE_TAG = 3


def has_slow_link(group: dist.ProcessGroup) -> bool:
    """Return whether ``probe_links`` found the links of a gloo group slow; False for a group that was not probed."""
    known = _derived.get(group)
    return known is not None and bool(known.has_slow_link)


def probe_links(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Measure the links of a gloo group once, for another group of the same ranks as well. A collective.

    gloo's all-to-all between two ranks sends one way and then the other, and its broadcasts follow one another: half of
    what a network carries, or less. Point-to-point messages use both directions at once but cost processor time that a
    fast network would not give back. The probe takes 1 ms on a fast link and 0.25 s at 100 Mbit/s.
    """
    known = _derived.setdefault(group, _Derived())
    if known.has_slow_link is None:
        known.has_slow_link = group.size() > 1 and not _is_fast(group)
    _derived.setdefault(other, _Derived()).has_slow_link = known.has_slow_link


def _is_fast(group: dist.ProcessGroup) -> bool:
    rank, world = group.rank(), group.size()
    sent = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device="cpu")
    received, seconds = torch.empty_like(sent), torch.zeros(1, device="cpu")
    group.allreduce([seconds]).wait()  # all begin together
    for _ in range(PROBE_ROUNDS):
        start = time.perf_counter()
        works = [
            group.recv([received], (rank - 1) % world, _PROBE_TAG),
            group.send([sent], (rank + 1) % world, _PROBE_TAG),
        ]
        for work in works:
            work.wait()
        seconds.fill_(time.perf_counter() - start)
        group.allreduce([seconds], dist.ReduceOp.MAX).wait()
        if 8 * PROBE_BYTES / seconds.item() >= SLOW_LINK:
            return True
    return False
