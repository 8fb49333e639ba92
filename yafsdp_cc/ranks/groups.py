"""Process groups: how they are made, their backends and time-outs, and memory from their allocators."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from yafsdp_cc.ranks.mesh import all_gather_single

if TYPE_CHECKING:
    from torch import Tensor


@atexit.register
def _let_threads_release() -> None:
    """Wait until gloo's threads are at rest: one of them may have to release the last collective's tensors, which
    aborts any process with gloo whose interpreter is ending by then."""
    states, end = "R", time.monotonic() + 2
    while "R" in states and (states := _states_of_gloo()) and time.monotonic() < end:
        time.sleep(0.05)  # gloo's threads may take the interpreter's lock meanwhile


def _states_of_gloo() -> str:
    """Return a letter for the state of each thread in which gloo runs operations: R if it runs or is about to. The
    threads of a group that is still referred to outlive ``destroy_process_group()``."""
    states = ""
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            if (task / "comm").read_text() == "pt_gloo_runloop\n":
                states += (task / "stat").read_text().rpartition(") ")[2][:1]
    return states


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the time-out of a group's collectives; None where the group's backends do not tell."""
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


_GroupsByKey: TypeAlias = "weakref.WeakValueDictionary[Hashable, dist.ProcessGroup]"

_groups_of: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupsByKey] = weakref.WeakKeyDictionary()
"""Groups of ``group_once``, by parent group and key. Values are weak: after ``destroy_process_group()`` no cache may
hold groups, as a thread of gloo that is at work when the interpreter ends aborts the process. (Parents may live on:
``torch.distributed.nn`` holds the group of all ranks.)"""


def group_once(parent: dist.ProcessGroup, key: Hashable, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group of ranks of ``parent`` that ``make`` made for ``key``; call ``make`` once, as a new group costs
    memory and a collective."""
    known = _groups_of.setdefault(parent, weakref.WeakValueDictionary())
    group = known.get(key)
    if group is None:
        group = known[key] = make()
    return group


def new_group(members: Sequence[int], timeout: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of the global ranks ``members``, among them this one. A collective of the members alone.

    Where ``init_process_group`` was given a ``device_id``, torch splits NCCL's communicators of new groups off that of
    all ranks, and ``ncclCommSplit`` waits for all ranks. So ``new_group`` hides ``device_id`` while it makes a
    group of some ranks, which then gets a communicator of its own at its first collective.
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

    Raise a ``ValueError`` if the group has no backend for that device.
    """
    if is_python_group(group):
        return str(group.name()).lower()
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError as error:
        raise ValueError(
            f"the mesh is of {device.type} devices, but its process group has no backend for them: start it with "
            f'init_process_group("cpu:gloo,cuda:nccl"), or shard before any mesh is made ({error})'
        ) from error


def is_python_group(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` is of a Python class, as groups that play many ranks are: it has no backends."""
    kind = type(group)
    return issubclass(kind, dist.ProcessGroup) and kind is not dist.ProcessGroup and "allreduce" in vars(kind)


class PythonGroup:
    """Adapter of a process group written in Python, with the methods of C++ groups that the engine calls."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any) -> Any:
        return all_gather_single(output, source, self._group, options.asyncOp)

    def alltoall_base(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], options: Any
    ) -> Any:
        return dist.all_to_all_single(received, sent, received_sizes, sent_sizes, self._group, options.asyncOp)


def allocate(nbytes: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return uninitialised memory; with a ``group``, from the allocator of its backend where that has one.

    NCCL's allocator registers memory with the communicator: zero-copy transfers over NVLink and InfiniBand's SHARP.
    """
    if group is not None and nbytes and (backend := group._get_backend(device)).supports_tensor_alloc(device):
        memory: Tensor = backend.allocate_tensor(nbytes, dtype=torch.uint8, device=device)
        return memory
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


slow_links: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()
"""Whether the links of a gloo group are slow; groups that ``sharding.links`` has not probed count as fast."""
