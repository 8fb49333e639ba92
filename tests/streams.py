"""CUDA's streams as a model on the CPU: who may run before whom, and which two of them touch the same bytes.

Every operation runs at once, so numbers are right whatever happens; what is checked is that nothing but streams and
events had to put it in order. Each stream has a vector clock, which events carry to other streams. Two accesses to the
same bytes, one of them a write, must be ordered; memory given back is taken to be free for the stream that allocated
it, as torch's caching allocator has it. One stream of the user's only: on CPUs autograd knows no streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from yafsdp_cc.engine import lanes
from yafsdp_cc.engine.norms import LazyNorm
from yafsdp_cc.engine.tensor import FlatDTensor

Clock = dict["Stream", int]


class Race(AssertionError):
    """Two accesses that nothing has put in order."""


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, name: str = "lane") -> None:
        self.name = name
        self.clock: Clock = {self: 0}

    def wait_event(self, event: Event) -> None:
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)


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
        self.memories: dict[int, _Memory] = {}
        self.accesses = 0

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
        clock = self.current.clock
        clock[self.current] += 1
        known = set()
        for name, value in given.items():
            for tensor in _tensors(value):
                known.add(tensor.untyped_storage()._cdata)
                self._touch(tensor, name in written, schema.name)
        for tensor in () if distributed else _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                self._touch(tensor, True, schema.name)
        return result

    def _touch(self, tensor: Tensor, write: bool, what: str) -> None:
        if not tensor.numel() or tensor.is_meta:
            return
        self.accesses += 1
        memory = self._memory(tensor)
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.storage_offset() * tensor.itemsize
        end = start + reach * tensor.itemsize
        now = Access(start, end, self.current, self.current.clock[self.current], write, what)
        kept = []
        for other in memory.accesses:
            apart = other.end <= start or end <= other.start
            if not apart and (write or other.write) and not other.precedes(self.current):
                kinds = ["write" if each.write else "read" for each in (other, now)]
                raise Race(
                    f"{kinds[0]} by {other.what} on {other.stream.name} and {kinds[1]} by {what} on "
                    f"{self.current.name} of bytes {max(start, other.start)}:{min(end, other.end)} are not in order"
                )
            # Whoever comes after this access comes after those that it covers.
            covered = start <= other.start and other.end <= end and (write or not other.write)
            if not (covered and other.precedes(self.current)):
                kept.append(other)
        memory.accesses = [*kept, now]

    def _memory(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self.memories.get(storage._cdata)
        if memory is None:
            memory = self.memories[storage._cdata] = _Memory(StorageWeakRef(storage), self.current)
        return memory

    def _free(self) -> None:
        for key in [key for key, memory in self.memories.items() if memory.reference.expired()]:
            memory = self.memories.pop(key)
            for access in memory.accesses:
                if not access.precedes(memory.home):
                    raise Race(f"memory of {memory.home.name} freed before {access.what} on {access.stream.name} ends")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, FlatDTensor):
        yield value._local_tensor
    elif type(value) in (Tensor, torch.nn.Parameter) and not isinstance(value, LazyNorm):
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

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "current_stream", lambda device=None: model.current),
        (torch.cuda, "stream", on),
        (lanes, "lane_for", lanes.CudaLane),
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
