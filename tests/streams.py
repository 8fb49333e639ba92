"""CUDA's streams as a model on the CPU: who may run before whom, and which two of them touch the same bytes.

Every operation runs at once, so numbers are right whatever happens; what is checked is that nothing but streams and
events had to put it in order. Each stream has a vector clock, which events carry to other streams. Two accesses to the
same bytes, one of them a write, must be ordered; memory given back is taken to be free for the stream that allocated
it, as torch's caching allocator has it. One stream of the user's only: on CPUs autograd knows no streams.

What is offloaded lies in memory of the host's, which is a stream of its own here: it runs before whatever it enqueues,
and after an operation only if it has waited. Copies may go between host and device; one that blocks waits. All else
touches one of the two, as it must where they are apart; collectives touch the device alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from yafsdp_cc.engine import dtensor, lanes, ranks
from yafsdp_cc.engine.dtensor import FlatDTensor
from yafsdp_cc.engine.host import Host
from yafsdp_cc.engine.norms import LazyNorm

Clock = dict["Stream", int]


class Race(AssertionError):
    """Two accesses that nothing has put in order."""


class Stray(AssertionError):
    """An operation on memory of the host's and of the device's, or a collective of the host's."""


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, name: str = "lane") -> None:
        self.name = name
        self.clock: Clock = {self: 0}

    def wait_event(self, event: Event) -> None:
        self.wait_clock(event.clock)

    def wait_clock(self, clock: Clock) -> None:
        for stream, time in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    host = Stream(name="host")

    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        self.host.wait_clock(self.clock)


class Access(NamedTuple):
    start: int
    end: int
    stream: Stream
    time: int
    write: bool
    what: str

    def precedes(self, stream: Stream) -> bool:
        return stream.clock.get(self.stream, 0) >= self.time


class _Memory:
    """One storage: who allocated it, and who has touched it."""

    def __init__(self, reference: StorageWeakRef, stream: Stream) -> None:
        self.reference = reference
        self.home = stream
        self.accesses = [Access(0, 1 << 62, stream, stream.clock[stream], True, "its allocation")]


class Streams(TorchDispatchMode):
    """Watches every operation; ``current`` is the stream it is enqueued on."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.current = Stream(name="compute")
        self.host = Event.host = Stream(name="host")
        self.memories: dict[int, _Memory] = {}
        self.accesses = self.crossings = self.blocks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._free()
        result = func(*args, **kwargs)
        schema = func._schema
        distributed = schema.name.startswith("c10d::")
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if distributed:
            written = {schema.arguments[0].name}  # of a broadcast too, as ranks other than its root see it
        elif not written and any(each.alias_info is not None for each in schema.returns):
            return result  # a view
        stream = self._stream(schema.name, given)
        stream.clock[stream] += 1
        known = set()
        for name, value in given.items():
            for tensor in _tensors(value):
                known.add(tensor.untyped_storage()._cdata)
                self._touch(tensor, name in written, schema.name, stream)
        for tensor in () if distributed else _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                self._touch(tensor, True, schema.name, stream)
        if schema.name == "aten::copy_" and not given.get("non_blocking"):
            self._block(list(given.values())[:2])
        return result

    def _block(self, tensors: list[Any]) -> None:
        if len({self._is_hosts(tensor) for value in tensors for tensor in _tensors(value)}) == 2:
            self.blocks += 1
            self.host.wait_clock(self.current.clock)

    def _stream(self, what: str, given: dict[str, Any]) -> Stream:
        """Where an operation runs: on the host if all its memory is the host's."""
        self.current.wait_clock(self.host.clock)  # enqueued only now
        tensors = [tensor for value in given.values() for tensor in _tensors(value) if tensor.numel()]
        places = {self._is_hosts(tensor) for tensor in tensors}
        if True not in places:
            return self.current
        if places == {True}:
            if what.startswith("c10d::"):
                raise Stray(f"{what} of memory of the host's")
            return self.host
        if what != "aten::copy_":
            raise Stray(f"{what} of memory of the host's and of the device's")
        self.crossings += 1
        return self.current

    def own(self, tensor: Tensor) -> Tensor:
        """The same tensor, now in memory of the host's."""
        self.memories[tensor.untyped_storage()._cdata] = _Memory(StorageWeakRef(tensor.untyped_storage()), self.host)
        return tensor

    def on_mesh(self, tensor: Tensor, _: Any) -> Tensor:
        """A copy on the device of what is in memory of the host's."""
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) if self._is_hosts(tensor) else tensor

    def _is_hosts(self, tensor: Tensor) -> bool:
        memory = self.memories.get(tensor.untyped_storage()._cdata)
        return memory is not None and memory.home is self.host

    def _touch(self, tensor: Tensor, write: bool, what: str, stream: Stream) -> None:
        if not tensor.numel() or tensor.is_meta:
            return
        self.accesses += 1
        memory = self._memory(tensor, stream)
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.storage_offset() * tensor.itemsize
        end = start + reach * tensor.itemsize
        now = Access(start, end, stream, stream.clock[stream], write, what)
        kept = []
        for other in memory.accesses:
            apart = other.end <= start or end <= other.start
            if not apart and (write or other.write) and not other.precedes(stream):
                kinds = ["write" if each.write else "read" for each in (other, now)]
                raise Race(
                    f"{kinds[0]} by {other.what} on {other.stream.name} and {kinds[1]} by {what} on "
                    f"{stream.name} of bytes {max(start, other.start)}:{min(end, other.end)} are not in order"
                )
            # Whoever comes after this access comes after those that it covers.
            covered = start <= other.start and other.end <= end and (write or not other.write)
            if not (covered and other.precedes(stream)):
                kept.append(other)
        memory.accesses = [*kept, now]

    def _memory(self, tensor: Tensor, stream: Stream) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self.memories.get(storage._cdata)
        if memory is None:
            memory = self.memories[storage._cdata] = _Memory(StorageWeakRef(storage), stream)
        return memory

    def _free(self) -> None:
        for key in [key for key, memory in self.memories.items() if memory.reference.expired()]:
            memory = self.memories.pop(key)
            if memory.home is self.host:
                continue  # torch gives pinned memory to nobody before the copies that it knows of are over
            for access in memory.accesses:
                if not access.precedes(memory.home):
                    raise Race(f"memory of {memory.home.name} freed before {access.what} on {access.stream.name} ends")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, FlatDTensor):
        yield value._local_tensor
    elif isinstance(value, LazyNorm):
        yield value._partials.local
    elif type(value) in (Tensor, torch.nn.Parameter):
        yield value


@contextmanager
def streams() -> Iterator[Streams]:
    """Everything within goes through streams; models sharded within have the lanes of CUDA."""
    model = Streams()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, model.current = model.current, stream
        try:
            yield
        finally:
            model.current = before

    zeros = Host.zeros

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "current_stream", lambda device=None: model.current),
        (torch.cuda, "stream", on),
        (lanes, "lane_for", lanes.CudaLane),
        (Host, "zeros", lambda self, numel, dtype: model.own(zeros(self, numel, dtype))),
        (ranks, "on_mesh", model.on_mesh),
        (dtensor, "on_mesh", model.on_mesh),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, new in replaced:
        setattr(owner, name, new)
    try:
        with model:
            yield model
    finally:
        for (owner, name, _), old in zip(replaced, before, strict=True):
            setattr(owner, name, old)
