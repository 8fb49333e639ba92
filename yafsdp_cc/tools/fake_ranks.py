"""Simulated ranks and devices, on which programs are only planned, or their operations counted.

``fake_ranks`` makes this process one rank of any number. Tensors have shapes and no memory: they are fake
(``FakeTensorMode``), or meta tensors (``MetaDevice``). On a mesh of CUDA devices, code that asks for the kind of device
takes CUDA's branches, while factories make CPU tensors: torch without CUDA cannot run autograd on others. Streams and
events do nothing, the host reads zeros, and collectives send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from yafsdp_cc import api
from yafsdp_cc.compression import error_feedback
from yafsdp_cc.engine import communicator
from yafsdp_cc.ranks import checks
from yafsdp_cc.sharding import assembly

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Backend that simulated ranks are assumed to have, by the kind of their devices."""


class Event:
    """Stands for an event, and for a stream of CUDA that is only waited for, on simulated devices."""

    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self) -> Event:
        event = type(self)()
        event.record()
        return event


_READS: Mapping[str, Callable[[Tensor], Any]] = {
    "item": lambda tensor: 0.0 if tensor.is_floating_point() else 0,
    "tolist": lambda tensor: [0.0] * tensor.numel(),
    "cpu": lambda tensor: tensor,
    "__bool__": lambda tensor: False,
    "__float__": lambda tensor: 0.0,
    "__int__": lambda tensor: 0,
}
"""Results of the methods by which a host reads a tensor, by name, for a tensor without memory; numbers are 0."""


class FakeDevice(TorchFunctionMode):
    """Makes CPU tensors where code asks for CUDA ones, and lets the host read zeros from tensors without memory."""

    def read(self, method: str, tensor: Tensor) -> Any:
        """Return the result of ``method``, such as "item", on ``tensor``, which has no memory: numbers are 0."""
        return _READS[method](tensor)

    def place(self, device: Any) -> Any:
        """Return the device for a tensor that code asks for on ``device``; return other values as they are."""
        return torch.device("cpu") if _kind(device) == "cuda" else device

    def memory(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are made without memory."""
        return FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _READS:
            return self.read(func.__name__, args[0])
        if func is Tensor.to:
            args = tuple(map(self.place, args))
        if not kwargs:
            return func(*args)
        was_pinned = kwargs.pop("pin_memory", False)
        if "device" in kwargs:
            kwargs["device"] = self.place(kwargs["device"])
        made = func(*args, **kwargs)
        if was_pinned:
            made.was_pinned = True
        return made


class MetaDevice(FakeDevice):
    """Lets meta tensors pass for CPU tensors, which is faster than fake tensors, as torch handles these in Python."""

    def memory(self) -> AbstractContextManager[Any]:
        return torch.device("meta")

    def place(self, device: Any) -> Any:
        return torch.device("meta") if _kind(device) in BACKENDS else device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__" and func.__self__ in _OF_CPU:
            return _OF_CPU[func.__self__]
        return super().__torch_function__(func, types, args, kwargs)


_OF_CPU = {Tensor.device: torch.device("cpu"), Tensor.is_cpu: True, Tensor.is_meta: False}
"""Attributes of meta tensors and the values that a CPU tensor has."""


def _kind(device: Any) -> str:
    return device.type if isinstance(device, torch.device) else device if isinstance(device, str) else ""


def _native_operators(device: torch.device, codec: Any = None) -> Any:
    """Return the package's native operators as if they were built for CUDA."""
    error_feedback._load()
    return torch.ops.yafsdp_cc if codec is None or codec.name in error_feedback._NUMBERS else None


@contextmanager
def fake_ranks(
    shape: tuple[int, ...],
    kind: str,
    device: FakeDevice,
    event: type[Event] = Event,
    modes: tuple[Any, ...] = (),
) -> Iterator[DeviceMesh]:
    """Make this process rank 1 (or 0 of a single one) of a mesh of devices; in the block, tensors have no memory.

    Args:
        shape: shape of the mesh: (ranks of a shard), or (replicas, ranks of a shard).
        kind: kind of devices, "cpu" or "cuda"; ``BACKENDS`` gives the backend.
    """
    for codec in error_feedback._NUMBERS:
        error_feedback.lost_share(codec, 256)  # cache the codec's loss, which cannot be measured on fake tensors
    current = event()
    cuda = {"current_stream": lambda *_: current, "stream": lambda _: ExitStack(), "current_device": lambda: 0}
    backend = {"backend_of": lambda *_: BACKENDS[kind]}
    replaced: dict[Any, dict[str, Any]] = {
        FakeTensor: {"tolist": lambda tensor: device.read("tolist", tensor)},
        checks: {"_all_gather_bytes": lambda content, group: [content] * group.size()},
        api: {"check_equal": lambda *_, **__: None},
        communicator: backend,
        assembly: {**backend, "check_trial_exchange": lambda *_: None, "probe_links": lambda *_: None},
    }
    if kind == "cuda":
        replaced[torch.cuda] = {"Stream": event, "Event": event, **cuda}
        replaced[torch] = {"Event": event}
        replaced[torch.accelerator] = {
            "current_stream": lambda *_: current,
            "set_stream": lambda _: None,
            "current_device_index": lambda: 0,
        }
        replaced[error_feedback] = {"ops_for": _native_operators}
    world = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=min(1, world - 1), world_size=world)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for owner, values in replaced.items():
            stack.enter_context(mock.patch.multiple(owner, **values))
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        for mode in (device.memory(), *modes, device):
            stack.enter_context(mode)
        yield mesh
