"""The ranks of a sharded model: its device mesh, its groups, and tensors over them.

A mesh is ``(shard,)`` or, with replicas, ``(replicate, shard)``, torch's order for hybrid sharding (HSDP). Parameters
are sharded across the last dimension; ranks along the first one hold the same shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# torch's names since 2.13, and the names before.
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
    """Return this rank's number among those that parameters are sharded across."""
    rank: int = mesh.get_local_rank(mesh.ndim - 1)
    return rank


def all_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the shard group, then the replicate group if there is one: a collective over each reaches all ranks."""
    replicas = replicate_group(mesh)
    return [shard_group(mesh), *([] if replicas is None else [replicas])]


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long a group waits for its ranks; None where its backends do not tell."""
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


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


def broadcast_values(tensors: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Give every rank the elements of the first rank's tensors, of any dtype."""
    for tensor in tensors:
        whole = tensor.contiguous()
        broadcast_from_first(whole.view(-1).view(torch.uint8), mesh)  # as bytes: gloo does not carry every dtype
        if whole is not tensor:
            tensor.copy_(whole)


_GroupsByKey: TypeAlias = "weakref.WeakValueDictionary[Hashable, dist.ProcessGroup]"

_groups_of: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupsByKey] = weakref.WeakKeyDictionary()
"""Groups of ``group_once``, by parent group and key. Values are weak: after ``destroy_process_group()`` no cache may
hold groups, as a thread of gloo that is at work when the interpreter ends aborts the process. (Parents may live on:
``torch.distributed.nn`` holds the group of all ranks.)"""


def group_once(parent: dist.ProcessGroup, key: Hashable, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group that ``make`` has made of ranks of ``parent`` for this key, once: a new one costs memory and a
    collective."""
    known = _groups_of.setdefault(parent, weakref.WeakValueDictionary())
    group = known.get(key)
    if group is None:
        group = known[key] = make()
    return group


def new_group(members: Sequence[int], timeout: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of these global ranks, this one among them. A collective of its members alone.

    Where ``init_process_group`` was given a ``device_id``, torch splits NCCL's communicators of new groups off that of
    all ranks, and ``ncclCommSplit`` waits for every one of these. So that binding is hidden while a group of some ranks
    is made: it gets a communicator of its own, at its first collective.
    """
    everybody = dist.distributed_c10d._get_default_group()
    is_part = len(members) < everybody.size()
    bound = everybody.bound_device_id
    if is_part:
        everybody.bound_device_id = None
    try:
        group: dist.ProcessGroup = dist.new_group(
            list(members), backend=backend, timeout=timeout, use_local_synchronization=is_part
        )
    finally:
        everybody.bound_device_id = bound
    return group


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


def allocate(nbytes: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return uninitialised memory; with a ``group``, from the allocator of its backend where that has one.

    NCCL's allocator registers it with the communicator: zero-copy transfers over NVLink and InfiniBand's SHARP.
    """
    if group is not None and nbytes and (backend := group._get_backend(device)).supports_tensor_alloc(device):
        memory: Tensor = backend.allocate_tensor(nbytes, dtype=torch.uint8, device=device)
        return memory
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


slow_links: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()
"""Whether the links of a gloo group are slow; groups that ``sharding.links`` has not probed count as fast."""
