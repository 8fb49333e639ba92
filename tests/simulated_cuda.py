"""A CUDA device that is simulated on the CPU, so that code for GPUs runs where there is none.

``install()`` replaces, for good and in this process, what reaches a device: factories and ``to`` with a ``device``,
``Tensor.device``, and the functions of ``torch.cuda``. Tensors lie in memory of the CPU; each storage is noted as the
device's or the host's, and ``Tensor.device`` answers accordingly, so that Python takes its branches for CUDA. An
operation on both raises, as on a GPU. So does one that would stop the host, where ``set_sync_debug_mode`` asks for it.

The question is whether tests and benchmarks written for a GPU run on one at all, as they are and in whole processes.
``tests/streams.py`` finds missing waits, which cannot be missed here, where work is over when it is enqueued; but there
only the package is told of a device, so that scripts which move a model to "cuda" fail. ``bench/launches.py`` counts
operations on tensors without values, which nothing can be compared with. None of them shows NCCL, kernels or times. A
graph replays the operations of its capture. One rank over NCCL is a modelled world of one; more ranks use gloo.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import TensorBase
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_CROSSING = ("aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::set_", "c10d::")
_CROSSING += ("yafsdp_cc::update",)
"""Operations that take memory of both; those of optimizers take settings of the host."""
_STOPPING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
"""Operations whose result the host waits for."""


class Device(TorchDispatchMode):
    """Which storages are the device's: that of a result is, if an operand's is."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.allocated = self.pinned = 0
        self.makes = False
        """Whether what an operation makes of no tensor is the device's, too."""
        self.random = torch.zeros(16, dtype=torch.uint8)
        """The generator's seed and offset, as CUDA has them; numbers are the CPU's."""
        self.may_stop = True
        self.recorded: list[Callable[[], Any]] | None = None

    def has(self, tensor: Tensor) -> bool:
        key = _storage(tensor)._cdata
        return key in self._storages and not self._storages[key].expired()

    def is_pinned(self, tensor: Tensor) -> bool:
        key = _storage(tensor)._cdata
        return key in self._pinned and not self._pinned[key].expired()

    def take(self, tensor: Tensor) -> Any:
        """Note that a tensor is the device's."""
        if not _is_meta(tensor) and not self.has(tensor):
            storage = _storage(tensor)
            self._storages[storage._cdata], self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.allocated += 1
        return tensor

    def give(self, tensor: Tensor) -> Any:
        """Note that a tensor is the host's."""
        self._storages.pop(_storage(tensor)._cdata, None)
        return tensor

    def pin(self, tensor: Tensor) -> Any:
        storage = _storage(tensor)
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        self.pinned += 1
        return tensor

    def held_bytes(self) -> int:
        for places in (self._storages, self._pinned):
            for key in [key for key, reference in places.items() if reference.expired()]:
                del places[key]
        return sum(self._sizes[key] for key in self._storages)

    def stop(self, what: str) -> None:
        """The host waits for the device."""
        if not self.may_stop or self.recorded is not None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):  # of DTensor: an offset into random numbers, another, an operation
            with self:
                return args[2](*args[3:], **(kwargs or {}))
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # its own operations come here in turn
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and not _is_meta(each)]
        on_device = [self.has(each) for each in tensors]
        if any(on_device) and not name.startswith(_CROSSING):
            if name in _STOPPING:
                self.stop(name)
            if any(not placed and each.dim() for each, placed in zip(tensors, on_device, strict=True)):
                where = [
                    (tuple(each.shape), "device" if placed else "host")
                    for each, placed in zip(tensors, on_device, strict=True)
                ]
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, not {where}")
        if name == "aten::copy_" and on_device[:2] in ([True, False], [False, True]):
            host = tensors[on_device.index(False)]
            non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if not non_blocking or not self.is_pinned(host):
                self.stop("a copy that blocks")
        if self.recorded is not None:
            self.recorded.append(functools.partial(func, *args, **kwargs))
        result = func(*args, **kwargs)
        if (any(on_device) or (self.makes and not tensors)) and name != "aten::copy_":
            known = {_storage(each)._cdata for each in tensors}
            for each in tree_leaves(result):
                if isinstance(each, Tensor) and not _is_meta(each) and _storage(each)._cdata not in known:
                    self.take(each)
        return result


DEVICE = Device()


def _local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _storage(tensor: Tensor) -> Any:
    return TensorBase.untyped_storage(_local(tensor))


def _is_meta(tensor: Tensor) -> bool:
    return TensorBase.device.__get__(_local(tensor)).type == "meta"  # type: ignore[attr-defined]


def _placed(device: Any) -> tuple[bool | None, Any]:
    """Whether this device is the simulated one, None if it is none, and what stands for it."""
    if isinstance(device, int) and not isinstance(device, bool):
        device = torch.device("cuda", device)
    if isinstance(device, (str, torch.device)):
        kind = torch.device(device).type
        return kind == "cuda", CPU if kind == "cuda" else device
    return None, device


_OF_VALUES = ("tensor", "as_tensor", "asarray", "new_tensor")
"""Factories that are given values of the host."""


def _factory(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the argument ``device``."""

    @functools.wraps(make)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        likes = args and isinstance(args[0], Tensor) and make.__name__ not in _OF_VALUES[:3]
        if device is None and not likes:
            modes = _get_current_function_mode_stack()
            device = next((mode.device for mode in modes if isinstance(mode, _device.DeviceContext)), None)
        is_cuda, device = _placed(device)
        if likes and device is None:
            is_cuda = DEVICE.has(args[0])
        result = make(*args, **kwargs) if device is None else make(*args, device=device, **kwargs)
        if is_cuda:
            if pin_memory:
                raise RuntimeError("Only dense CPU tensors can be pinned")
            if make.__name__ in _OF_VALUES and not (isinstance(args[-1], Tensor) and DEVICE.has(args[-1])):
                DEVICE.stop("a copy of values that blocks")
            return DEVICE.take(result)
        if is_cuda is False and DEVICE.has(result):
            DEVICE.give(result)
        return DEVICE.pin(result) if pin_memory else result

    return made


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    is_cuda, given = None, []
    for each in args:
        placed, each = _placed(each)
        is_cuda = placed if placed is not None else DEVICE.has(each) if isinstance(each, Tensor) else is_cuda
        given.append(each)
    if "device" in kwargs:
        is_cuda, kwargs["device"] = _placed(kwargs["device"])
    with torch._C.DisableTorchFunction():  # a mode, as of torch.device("cuda"), would call this function again
        result = TensorBase.to(self, *given, **kwargs)
    if is_cuda is None or _is_meta(result) or is_cuda == DEVICE.has(self):
        return result
    if not kwargs.get("non_blocking"):
        DEVICE.stop("a copy that blocks")
    if _storage(result)._cdata == _storage(self)._cdata:
        result = result.clone()
    return DEVICE.take(result) if is_cuda else DEVICE.give(result)


def _device_of(self: Tensor) -> torch.device:
    device = TensorBase.device.__get__(self)  # type: ignore[attr-defined]
    return CUDA if device.type == "cpu" and DEVICE.has(self) else device


def _tolist(self: Tensor) -> Any:
    if DEVICE.has(self):
        DEVICE.stop("tolist")
    return TensorBase.tolist(self)


def _reduce_ex(self: Tensor, protocol: int) -> Any:
    """What the device holds is unpickled to it."""
    if type(self) is not Tensor or not DEVICE.has(self):
        return _REDUCE(self, protocol)
    return _unpickled, (DEVICE.give(self.detach().clone()), self.requires_grad)


_REDUCE = Tensor.__reduce_ex__


def _attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As torch's, whose definition makes a mask by itself."""
    DEVICE.makes = DEVICE.has(query)
    try:
        return _ATTENTION(query, *args, **kwargs)
    finally:
        DEVICE.makes = False


_ATTENTION = torch.nn.functional.scaled_dot_product_attention


def _unpickled(tensor: Tensor, requires_grad: bool) -> Tensor:
    taken: Tensor = DEVICE.take(tensor)
    return taken.requires_grad_(requires_grad)


def _grouped(*args: Any) -> dict[Any, Any]:
    """What optimizers and clipping group tensors by."""
    return {
        (CUDA if lists[0] and DEVICE.has(lists[0][0]) else device, dtype): (lists, indices)
        for (device, dtype), (lists, indices) in _GROUP(*args).items()
    }


_GROUP = torch._C._group_tensors_by_device_and_dtype


class Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls, device=_placed(device)[1] or CPU)


class Stream:
    """Its work is over when it is enqueued, but for naps, which last until somebody waits."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority, self.naps = CUDA, priority, False
        self.cuda_stream = self.device_index = 0

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return not self.naps

    def is_capturing(self) -> bool:
        return DEVICE.recorded is not None

    def synchronize(self) -> None:
        self.naps = False

    def __enter__(self) -> None:
        pass


class Event:
    def __init__(self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._time - self._time)


class Graph:
    def replay(self) -> None:
        for operation in self.operations:
            operation()

    operations: list[Callable[[], Any]]


class _Current:
    stream = Stream()


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before, _Current.stream = _Current.stream, stream or _Current.stream
    try:
        yield
    finally:
        _Current.stream = before


@contextmanager
def _graph(graph: Graph, **_: Any) -> Iterator[None]:
    DEVICE.recorded = graph.operations = []
    try:
        yield
    finally:
        DEVICE.recorded = None


def _sleep(cycles: int) -> None:
    _Current.stream.naps = True


def _compile_kernel(source: str, name: str) -> Callable[..., None]:
    """What ``bench.paced`` has compiled, in plain torch."""
    from bench.paced import _SUM

    def run(*, args: list[Any], **_: Any) -> None:
        output, source_, free, count, period, part, terms, which, scale, delay, each = args
        assert DEVICE.has(output)
        assert DEVICE.has(source_)
        assert DEVICE.has(free)
        assert all(isinstance(number, float) for number in (count, period, part, terms, which, scale, delay, each))
        with torch.profiler.record_function(name):
            if _SUM in source:
                values = source_.reshape(int(terms), -1)[int(which)] * scale
            else:
                output, values = output.view(-1).view(torch.uint8), source_.reshape(-1).view(torch.uint8)
            output.view(-1, values.numel()).copy_(values.clone())

    return run


def _init_process_group(backend: str = "nccl", *args: Any, **kwargs: Any) -> None:
    from bench.modelled import Fabric, LinkCost, begin

    if "nccl" in backend and kwargs.get("world_size") == 1:
        begin(0, 1, Fabric(LinkCost(0.0, 0.0), LinkCost(0.0, 0.0)), "cuda")
        dist.get_backend_config = lambda group=None: backend
    else:
        dist.get_backend_config = _CONFIG
        kwargs.pop("device_id", None)
        _INIT(backend.replace("nccl", "gloo"), *args, **kwargs)


_INIT, _CONFIG = dist.init_process_group, dist.get_backend_config


def _stats() -> dict[str, int]:
    return {"allocation.all.allocated": DEVICE.allocated, "segment.all.allocated": 0, "num_alloc_retries": 0}


def _free_bytes() -> int:
    """The host's free memory: tensors of the device lie there."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Properties:
    name, total_memory, multi_processor_count, major, minor = "simulated", 139 << 30, 132, 9, 0
    L2_cache_size = 1 << 20


class Profile(torch.profiler.profile):
    """One that shows operations of the host as kernels, and modelled transfers as what they are on a GPU."""

    def __init__(self, *, activities: Any = None, **options: Any) -> None:
        # Asked for CUDA's, it would print the stack of every operation.
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **options)
        self._is_asked = torch.profiler.ProfilerActivity.CUDA in (activities or ())

    def events(self) -> Any:
        found = list(super().events())
        return found + [each for event in found for each in _on_device(event) if self._is_asked]


def _on_device(event: Any) -> Iterator[SimpleNamespace]:
    """Yield what Kineto would show on the GPU: the innermost operations, transfers, and ranges of record_function."""
    parents, parent = set(), event.cpu_parent
    while parent is not None:
        parents.add(parent.name)
        parent = parent.cpu_parent
    is_kernel = event.name.startswith("aten::") and not event.cpu_children and _TRANSFER not in parents
    if is_kernel or event.name == _TRANSFER or event.is_user_annotation:
        is_range = event.is_user_annotation and event.name != _TRANSFER
        where = {"device_type": torch.autograd.DeviceType.CUDA, "time_range": event.time_range}
        yield SimpleNamespace(name=event.name, is_user_annotation=is_range, **where)


_TRANSFER = "modelled_transfer"


def install() -> None:
    """Simulate a device in this process, and in those that it forks."""
    import torch._dynamo  # which looks at what is replaced here

    if DEVICE in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        return
    factories = {each.__name__ for each in _device._device_constructors()} | {
        f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    }
    for name in factories:
        if hasattr(torch, name):
            setattr(torch, name, _factory(getattr(torch, name)))
    methods: dict[str, Any] = {
        f"new_{kind}": _factory(getattr(TensorBase, f"new_{kind}"))
        for kind in ("empty", "zeros", "ones", "full", "tensor", "empty_strided")
    } | {
        "device": property(_device_of),
        "is_cuda": property(lambda self: DEVICE.has(self)),
        "is_cpu": property(lambda self: _device_of(self).type == "cpu"),
        "to": _to,
        "cuda": lambda self, device=None, non_blocking=False: _to(self, "cuda", non_blocking=non_blocking),
        "cpu": lambda self: _to(self, "cpu"),
        "tolist": _tolist,
        "__reduce_ex__": _reduce_ex,
        "pin_memory": lambda self: DEVICE.pin(self.clone()),
        "is_pinned": lambda self: DEVICE.is_pinned(self),
        "record_stream": lambda self, stream: None,
    }
    for name, method in methods.items():
        setattr(Tensor, name, method)
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: DEVICE.recorded is not None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: Properties.name,
        "get_device_properties": lambda device=None: Properties,
        "mem_get_info": lambda device=None: (_free_bytes(), Properties.total_memory),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: _Current.stream,
        "stream": _stream,
        "synchronize": lambda device=None: DEVICE.stop("synchronize") if DEVICE.recorded is not None else None,
        "_sleep": _sleep,
        "CUDAGraph": Graph,
        "graph": _graph,
        "memory_stats": lambda device=None: _stats(),
        "host_memory_stats": lambda: {"num_host_alloc": DEVICE.pinned},
        "memory_allocated": lambda device=None: DEVICE.held_bytes(),
        "max_memory_allocated": lambda device=None: DEVICE.held_bytes(),
        "max_memory_reserved": lambda device=None: DEVICE.held_bytes(),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: setattr(DEVICE, "may_stop", mode != "error"),
        "get_rng_state": lambda device=None: DEVICE.random.clone(),
        "set_rng_state": lambda state, device=None: setattr(DEVICE, "random", state.clone()),
        "_compile_kernel": _compile_kernel,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.nn.functional.scaled_dot_product_attention = _attention
    torch.profiler.profile = Profile  # type: ignore[misc]
    # By optimizers, of a torch that is built for CUDA and asks its driver, which is not there.
    torch.accelerator.current_stream = functions["current_stream"]
    torch.accelerator.set_stream = lambda stream: setattr(_Current, "stream", stream)
    torch.accelerator.current_device_index = lambda: 0
    for owner, name, stand_in in ((torch, "Event", Event), (torch, "Generator", Generator)):
        setattr(owner, name, stand_in)
    from yafsdp_cc.compression import error_feedback

    error_feedback._lacks = lambda device: ""  # the kernels of the CPU serve it
    torch._C._group_tensors_by_device_and_dtype = _grouped
    dist.init_process_group = _init_process_group
    DEVICE.__enter__()


def pytest_configure() -> None:
    """As a plugin, ``-p tests.simulated_cuda``: all tests find the device, also on spawned ranks, which are forked."""
    from tests import ranks

    install()
    ranks.SPAWN = "fork"
