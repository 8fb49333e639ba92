"""CUDA's streams as a model on the CPU: what may run before what, and which two operations touch the same bytes.

Every operation runs at once, so numbers are right whatever happens; what is checked is that streams, events and waits
of the host alone had to put it in order. Each stream, and the host, has a vector clock, which events carry on. Two
accesses to the same bytes, one of them a write, must be ordered. Memory that is freed is at once free for the stream
that allocated it, as torch's caching allocator has it, unless ``record_stream`` has named another one; new memory is
NaN, whatever it was before.

The question is whether a result may depend on the order in which a GPU does things. ``tests/simulated_cuda.py``, which
scripts take for a GPU, and ``bench/launches.py``, which counts what is launched at full size, do everything in the
order of the calls: a wait that is missing changes nothing there.

**Host.** Memory made with ``device="cpu"``, pinned, or by an operation on such memory is the host's; all else is the
device's. The host runs before whatever it enqueues, and after an operation only if it has waited: for an event, in a
blocking copy, or by reading a tensor of the device (``item``, ``tolist``, ``numpy``, ``cpu``, ``bool``, ...). What it
reads and writes in its own memory are accesses too, so a copy that does not block needs an event before them.

**Package.** Its code sees a CUDA device and NCCL wherever it looks (``Device``), so it takes CUDA's branches.

**Autograd** runs a node on the stream that its forward ran on, which waits for the streams of the gradients that reach
the node; a gradient that is None brings no wait. Leaves' streams are joined with the stream around ``backward()``.

**Communicators.** At the end ranks compare what they have issued on each communicator, and over all of them: with
kernels that block one queue per device, two ranks that start the operations of two communicators in different orders
can wait for each other. A new group is split from the world's, by all of its ranks, where that is bound to a device.
"""

from __future__ import annotations

import graphlib
import itertools
import sys
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.internals import SHARDED_TENSORS, local_tensor, modelled_device
from yafsdp_cc.tensor.shown import UnshardedWeight

Clock = dict["Stream", int]

_current_node: Callable[[], Any] = torch._C._current_autograd_node
_sequence_nr: Callable[[], int] = torch.autograd._get_sequence_nr


class Race(AssertionError):
    """Two accesses that nothing has put in order."""


class Misplaced(AssertionError):
    """An operation on memory of the host's and of the device's, or a collective of the host's."""


class Mismatch(AssertionError):
    """Ranks that have issued different collectives on one communicator."""


class Deadlock(AssertionError):
    """Ranks that may wait for each other, each in another communicator."""


class Device(str):
    """A device that torch takes for a CPU, and the package for CUDA."""

    type = "cuda"
    index = 0


class HostDevice(str):
    type = "cpu"
    index = None


DEVICE, HOST = Device("cpu"), HostDevice("cpu")


class Stream:
    model: Streams
    cuda_stream = device_index = 0
    device = DEVICE

    def __init__(self, device: Any = None, priority: int = 0, name: str = "") -> None:
        self.name = name or f"side stream {next(Stream.model.numbers)}"
        self.clock: Clock = {self: 0}

    def wait_event(self, event: Event) -> None:
        self.wait_clock(event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_clock(stream.clock)

    def wait_clock(self, clock: Clock) -> None:
        own = self.clock
        for stream, time in clock.items():
            if own.get(stream, 0) < time:
                own[stream] = time

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.model.host.wait_clock(self.clock)

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or Stream.model.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.model.current).wait_event(self)

    def synchronize(self) -> None:
        Stream.model.host.wait_clock(self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Access(NamedTuple):
    start: int
    end: int
    stream: Stream
    time: int
    write: bool
    what: str

    def precedes(self, stream: Stream) -> bool:
        return stream.clock.get(self.stream, 0) >= self.time


class Collective(NamedTuple):
    """What a rank notes of a collective that it issues."""

    communicator: str
    ranks: tuple[int, ...]
    what: str
    numel: int


class _Memory:
    """One storage: who allocated it, and who has touched it."""

    def __init__(self, storage: torch.UntypedStorage, free: Callable[[Any], None], stream: Stream) -> None:
        self.reference = weakref.ref(storage, free)  # torch keeps a storage's object for as long as its memory
        self.home = stream
        self.recorded: set[Stream] = set()
        """Streams named by ``record_stream``: the allocator waits for what they had to do when it was freed."""
        self.accesses = [Access(0, 1 << 62, stream, stream.clock[stream], True, "its allocation")]


_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_OF_UNKNOWN_SIZE = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
"""The host waits for the number of elements of their results."""
_HOST_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__reduce_ex__}
"""They dispatch nothing on a CPU; ``item`` and what is made of it does."""
_PROPERTIES = {
    Tensor.device.__get__: lambda on_host: HOST if on_host else DEVICE,
    Tensor.is_cuda.__get__: lambda on_host: not on_host,
    Tensor.is_cpu.__get__: lambda on_host: on_host,
}
"""Of tensors, as the package is to see them."""


class _Functions(TorchFunctionMode):
    """What the dispatcher does not see: reads by the host, and where tensors are and are to go."""

    def __init__(self, model: Streams) -> None:
        super().__init__()
        self.model = model

    @contextmanager
    def again(self) -> Iterator[None]:
        """Watch what is called within a function of torch, too: that has ended it."""
        if self in torch.overrides._get_current_function_mode_stack():
            yield
        else:
            with self:
                yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, model = kwargs or {}, self.model
        if func in _PROPERTIES and sys._getframe(1).f_globals.get("__name__", "").startswith("yafsdp_cc."):
            return _PROPERTIES[func](any(map(model.is_hosts, _tensors(args[0]))))
        if func in (Tensor.to, Tensor.cpu) and type(args[0]) in (Tensor, torch.nn.Parameter):
            place = HOST if func is Tensor.cpu else _device_in([*args[1:], *kwargs.values()])
            if place is not None and model.is_hosts(args[0]) is (place is DEVICE):
                moved = model.moved(args[0], kwargs.get("non_blocking", False))
                return moved if func is Tensor.cpu else func(moved, *args[1:], **kwargs)
        if func in _HOST_READS:
            for tensor in _tensors(args[0]):
                model.read_on_host(tensor, f"Tensor.{func.__name__}")
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            is_number = func is torch.tensor and "device" not in kwargs and result.dim() == 0
            if is_number or _is_host(kwargs.get("device")):
                for tensor in _tensors(result):
                    model.own(tensor)
        return result


@cache
def _operation(func: Any) -> tuple[str, str, tuple[str, ...], frozenset[str], bool]:
    """Return an operation's namespace and name, its arguments, those that it writes, and whether it may make a view."""
    schema = func._schema
    space, name = schema.name.split("::")
    arguments = tuple(argument.name for argument in schema.arguments)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    if space == "c10d":
        written = set() if name == "send" else {arguments[0]}  # of a broadcast, as ranks other than its root see it
    return space, name, arguments, frozenset(written), any(each.alias_info is not None for each in schema.returns)


class Streams(TorchDispatchMode):
    """Watches every operation; ``current`` is the stream that it is enqueued on."""

    def __init__(self) -> None:
        super().__init__()
        Stream.model = self
        self.numbers = itertools.count(1)
        self.host = Stream(name="host")
        self.compute = self._current = Stream(name="compute")
        self.memories: dict[int, _Memory] = {}
        self.freed_early: Race | None = None
        self.accesses = self.crossings = self.blocks = 0
        self.launches: list[tuple[Stream, str, int]] = []
        """Each operation that is no view: its stream, its name, and the bytes of the tensors that it is given."""
        self.functions = _Functions(self)
        self.collectives: list[Collective] = []
        self.backwards: list[_Backward] = []
        """Those under way, the innermost last."""
        self.leaf_streams: dict[int, Stream] = {}
        """Of the nodes that accumulate gradients of leaves, by the ids of these."""
        self._switches: list[tuple[int, Stream]] = [(-1, self.compute)]
        """From which of autograd's sequence numbers on nodes were made on which stream."""

    @property
    def current(self) -> Stream:
        if self.backwards:
            self.backwards[-1].follow()
        return self._current

    @current.setter
    def current(self, stream: Stream) -> None:
        self._current = stream
        number = _sequence_nr()
        if self._switches[-1][0] == number:
            self._switches.pop()
        self._switches.append((number, stream))

    def stream_at(self, number: int) -> Stream:
        """Return the stream that was current when autograd gave out this sequence number."""
        return self._switches[bisect_right(self._switches, number, key=lambda each: each[0]) - 1][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does with its memory comes here again
        kwargs = dict(kwargs or {})
        self.check()
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs["pin_memory"] = False  # there is no CUDA to do it
        result = func(*args, **kwargs)
        space, name, arguments, written, may_view = _operation(func)
        is_alone = may_view and not written and type(result) is Tensor and type(args[0]) is Tensor
        if is_alone and result.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
            return result  # a view, like half of all operations
        given = dict(zip(arguments, args, strict=False)) | kwargs
        if space == "yafsdp_cc" and name in ("update", "update_lamb"):
            del given["settings"]  # read by the host, before the launch
        if space == "c10d":
            self._note(name, given)
        keys_and_tensors = [(key, tensor) for key, value in given.items() for tensor in _tensors(value)]
        tensors = [tensor for _, tensor in keys_and_tensors]
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        fresh = [each for each in _tensors(result) if each.untyped_storage()._cdata not in known]
        if not written and not fresh and may_view:
            return result  # a view, or several
        if name == "scalar_tensor":
            return result  # of a Python number, which goes along with a launch: of either place
        what = f"{space}::{name}"
        stream = self._stream(what, tensors)
        stream.clock[stream] += 1
        self.launches.append((stream, what, sum(tensor.nbytes for tensor in tensors)))
        if stream is not self.host:
            self.host.clock.setdefault(stream, 0)
        for key, tensor in keys_and_tensors:
            by_host = stream is not self.host and name != "copy_" and self.is_hosts(tensor)
            self._touch(tensor, key in written, what, self.host if by_host else stream)
        for tensor in () if space == "c10d" else fresh:
            if name in _UNINITIALISED and tensor.dtype != torch.bool:
                tensor.untyped_storage().fill_(255)  # NaN in every dtype
            self._touch(tensor, True, what, stream)
            if is_pinned:
                self.own(tensor)
        if stream is not self.host and self._blocks(name, given, tensors, result):
            self.block()
        return result

    def _blocks(self, name: str, given: dict[str, Any], tensors: Sequence[Tensor], result: Any) -> bool:
        """Whether an operation on a stream has the host wait for its end."""
        if name == "copy_":
            return not given.get("non_blocking") and len({self.is_hosts(each) for each in tensors}) == 2
        return bool(tensors) and (isinstance(result, bool | int | float) or name in _OF_UNKNOWN_SIZE)

    def block(self) -> None:
        """Have the host wait for the current stream."""
        self.blocks += 1
        self.host.wait_clock(self.current.clock)

    def synchronize(self, _: Any = None) -> None:
        """Have the host wait for all streams."""
        self.host.wait_clock({stream: 1 << 62 for stream in self.host.clock if stream is not self.host})

    def _stream(self, what: str, tensors: Sequence[Tensor]) -> Stream:
        """Where an operation runs: on the host if all its memory is the host's."""
        current = self.current
        current.wait_clock(self.host.clock)  # enqueued only now
        tensors = [tensor for tensor in tensors if tensor.numel()] or tensors
        tensors = [each for each in tensors if each.dim() or each.untyped_storage()._cdata in self.memories] or tensors
        places = {self.is_hosts(tensor) for tensor in tensors}
        if True not in places:
            return current
        if places == {True}:
            if what.startswith("c10d::"):
                raise Misplaced(f"{what} of memory of the host's")
            return self.host
        if what != "aten::copy_":
            if any(self.is_hosts(tensor) and tensor.dim() for tensor in tensors):  # numbers go along with a launch
                raise Misplaced(f"{what} of memory of the host's and of the device's")
            return current
        self.crossings += 1
        return current

    def clocks_around(self, call: Callable[[], Any]) -> tuple[Stream, Clock, Clock]:
        """Run ``call``; return the stream it was enqueued on, and what that came after before and afterwards."""
        stream, before = self.current, dict(self.current.clock)
        call()
        return stream, before, dict(stream.clock)

    def own(self, tensor: Tensor) -> Tensor:
        """The same tensor, now in memory of the host's."""
        self._add(tensor.untyped_storage(), self.host)
        return tensor

    def on_mesh(self, tensor: Tensor, _: Any) -> Tensor:
        """A copy on the device of what is in memory of the host's."""
        return self.moved(tensor) if self.is_hosts(tensor) else tensor

    def moved(self, tensor: Tensor, non_blocking: bool = False) -> Tensor:
        """A copy on the device of what is in memory of the host's, or the other way round."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        if not self.is_hosts(tensor):
            self.own(target)
        return target.copy_(tensor, non_blocking=non_blocking)

    def is_hosts(self, tensor: Tensor) -> bool:
        memory = self.memories.get(tensor.untyped_storage()._cdata)
        return memory is not None and memory.home is self.host

    def read_on_host(self, tensor: Tensor, what: str) -> None:
        """Note that the host reads a tensor, and waits for the current stream where that is the device's."""
        stream = self._stream(what, [tensor])
        stream.clock[stream] += 1
        self._touch(tensor, False, what, stream)
        if stream is not self.host:
            self.block()

    def _touch(self, tensor: Tensor, write: bool, what: str, stream: Stream) -> None:
        if not tensor.numel() or tensor.is_meta:
            return
        self.accesses += 1
        memory = self.memory(tensor, stream)
        itemsize = tensor.itemsize
        start = tensor.storage_offset() * itemsize
        reach = tensor.numel() - 1
        if not tensor.is_contiguous():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (reach + 1) * itemsize
        now = Access(start, end, stream, stream.clock[stream], write, what)
        kept = []
        for other in memory.accesses:
            is_before = other.precedes(stream)
            apart = other.end <= start or end <= other.start
            if not (is_before or apart) and (write or other.write):
                kinds = ["write" if each.write else "read" for each in (other, now)]
                raise Race(
                    f"{kinds[0]} by {other.what} on {other.stream.name} and {kinds[1]} by {what} on "
                    f"{stream.name} of bytes {max(start, other.start)}:{min(end, other.end)} are not in order"
                )
            # Whoever comes after this access comes after those that it covers.
            covered = start <= other.start and other.end <= end and (write or not other.write)
            if not (covered and is_before):
                kept.append(other)
        memory.accesses = [*kept, now]

    def memory(self, tensor: Tensor, stream: Stream | None = None) -> _Memory:
        storage = tensor.untyped_storage()
        return self.memories.get(storage._cdata) or self._add(storage, stream or self.current)

    def _add(self, storage: torch.UntypedStorage, home: Stream) -> _Memory:
        self.memories[storage._cdata] = memory = _Memory(storage, partial(self._free, storage._cdata), home)
        return memory

    def _free(self, key: int, _: Any) -> None:
        """Look whether whatever touches a storage is over, the moment that it is freed."""
        memory = self.memories.pop(key)
        if memory.home is self.host:
            return  # torch gives pinned memory to nobody before the copies that it knows of are over
        for access in memory.accesses:
            if not access.precedes(memory.home) and access.stream not in memory.recorded:
                what = f"{access.what} on {access.stream.name}"
                self.freed_early = Race(f"memory of {memory.home.name} freed before {what} ends")

    def check(self) -> None:
        """Raise where memory was freed too early: whatever frees it may be nothing that can raise."""
        if self.freed_early is not None:
            raise self.freed_early

    # Communicators ---------------------------------------------------------------------------------------------------

    def _note(self, name: str, given: dict[str, Any]) -> None:
        if name in ("send", "recv_", "recv_any_source_") or "process_group" not in given:
            return
        group = dist.ProcessGroup.unbox(given["process_group"])
        # Ranks may give each other unequal parts.
        numel = (
            0
            if name.startswith(("alltoall", "scatter", "gather"))
            else sum(tensor.numel() for tensor in _tensors(next(iter(given.values()))))
        )
        ranks = tuple(dist.get_process_group_ranks(group))
        self.collectives.append(Collective(group.group_name, ranks, name, numel))

    def new_group(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a group: of NCCL, by splitting the world's, if that is bound to a device."""
        world = distributed_c10d._get_default_group()
        if (bound := world.bound_device_id) is not None:
            ranks = tuple(range(world.size()))
            self.collectives.append(Collective(world.group_name, ranks, "ncclCommSplit", 0))
        world.bound_device_id = None  # gloo does not split
        try:
            return make(*args, **kwargs)
        finally:
            world.bound_device_id = bound

    def compare_collectives(self) -> None:
        """Compare with other ranks what was issued."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        issued: list[list[Collective]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(issued, self.collectives)
        check_collectives(issued)


def check_collectives(issued: Sequence[Sequence[Collective]]) -> None:
    """Raise where ranks have issued different collectives, or in orders that can deadlock.

    Args:
        issued: by each rank, in its order.
    """
    before: dict[tuple[Any, ...], set[tuple[Any, ...]]] = defaultdict(set)
    found: dict[tuple[Any, ...], list[tuple[int, Collective]]] = defaultdict(list)
    for rank, collectives in enumerate(issued):
        counts: dict[tuple[Any, ...], int] = defaultdict(int)
        last = None
        for each in collectives:
            communicator = (each.communicator, each.ranks)
            operation = (*communicator, counts[communicator])
            counts[communicator] += 1
            found[operation].append((rank, each))
            if last is not None:
                before[operation].add(last)
            last = operation
    for (name, ranks, number), each in found.items():
        if len({collective for _, collective in each}) > 1 or len(each) != len(ranks):
            kinds = {rank: f"{collective.what} of {collective.numel}" for rank, collective in each}
            raise Mismatch(f"operation {number} of communicator {name} of ranks {ranks} differs: {kinds}")
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        text = " before ".join(f"{found[operation][0][1].what} of {operation[0]}" for operation in error.args[1])
        raise Deadlock(f"ranks start collectives of several communicators in different orders: {text}") from None


class _Backward:
    """One call of autograd's engine, with the waits that it makes on CUDA."""

    def __init__(self, model: Streams, roots: Sequence[Any], inputs: Sequence[Any]) -> None:
        self.model = model
        self.caller = model.current
        self.arrived: dict[Any, list[Clock]] = defaultdict(list)
        """By node, when the gradients were ready that have reached it."""
        self.leaves: set[Stream] = set()
        """To be joined at the end."""
        self._streams: dict[Any, Stream] = {}
        self._node: Any = None
        self._is_between = False
        """Whether the last node is over, so that what runs is the addition of gradients."""
        self._inputs = [self._node_of(each) for each in inputs]
        starts = [self._node_of(each) for each in roots]
        self._hooks = [self._add(node) for node in self._nodes(starts)]
        for node in starts:
            self.arrived[node].append(dict(self.caller.clock))

    @staticmethod
    def _node_of(tensor: Any) -> Any:
        return get_gradient_edge(tensor).node if isinstance(tensor, Tensor) else tensor.node

    def _nodes(self, starts: Sequence[Any]) -> list[Any]:
        found, waiting = {}, list(starts)
        while waiting:
            node = waiting.pop()
            if node is not None and node not in found:
                found[node] = None
                waiting += [each for each, _ in node.next_functions]
        return sorted(found, key=lambda node: node._sequence_nr())

    def _add(self, node: Any) -> Any:
        """Note the stream of a node, earlier ones first, and have its end be noticed."""
        if not hasattr(node, "variable"):
            self._streams[node] = self.model.stream_at(node._sequence_nr())
            for leaf, _ in node.next_functions:
                if hasattr(leaf, "variable"):  # as old as its first use
                    self.model.leaf_streams.setdefault(id(leaf.variable), self._streams[node])
        else:
            self._streams[node] = self.model.leaf_streams.get(id(node.variable), self.caller)
        return node.register_hook(partial(self._end_node, node))

    def follow(self) -> None:
        """Switch to the stream of the node that runs now."""
        node = _current_node() if self is self.model.backwards[-1] else None
        if node is None or node not in self._streams or (node is self._node and not self._is_between):
            return
        if node is self._node:
            # Gradients of several nodes are added on the stream of the one that they flow to, when they are ready. (If
            # this one's flow to nodes of several streams, which of them it is remains unknown.)
            targets = [each for each, _ in node.next_functions if each in self._streams]
            streams = {self._streams[each] for each in targets}
            clocks = [clock for each in targets for clock in self.arrived[each]]
            self._switch(streams.pop() if len(streams) == 1 else self._streams[node], clocks)
            return
        self._node, self._is_between = node, False
        self._switch(self._streams[node], self.arrived.pop(node, ()))

    def _switch(self, stream: Stream, clocks: Sequence[Clock]) -> None:
        self.model.current = stream
        for clock in clocks:
            stream.wait_clock(clock)

    def _end_node(self, node: Any, grads: Sequence[Tensor | None], _: Any) -> None:
        self.follow()
        clock = dict(self._streams[node].clock)
        for (each, _), grad in zip(node.next_functions, grads, strict=False):
            if each is not None and grad is not None:
                self.arrived[each].append(clock)
                for tensor in _tensors(grad):  # the allocator is told by autograd
                    self.model.memory(tensor).recorded.add(self._streams[each])
        if not node.next_functions:
            self.leaves.add(self._streams[node])
        self._is_between = True

    def join(self) -> None:
        """Go back to the stream around ``backward()``, which waits for leaves and for gradients that were asked for."""
        for node in self._inputs:
            for clock in self.arrived.pop(node, ()):
                self.caller.wait_clock(clock)
        self._node, self._is_between = _current_node(), False
        self._switch(self.caller, [stream.clock for stream in self.leaves])

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _Engine:
    """Autograd's engine, with the streams of nodes."""

    def __init__(self, model: Streams, engine: Any) -> None:
        self._model = model
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(
        self, tensors: Any, grads: Any, keep: bool, create: bool, inputs: Any = (), *rest: Any, **options: Any
    ) -> Any:
        model = self._model
        backward = _Backward(model, tensors, inputs)
        model.backwards.append(backward)
        try:
            with model.functions.again():
                result = self._engine.run_backward(tensors, grads, keep, create, inputs, *rest, **options)
            backward.join()
        finally:
            model.backwards.pop()
            backward.end()
            model.current = backward.caller
        return result

    def queue_callback(self, callback: Callable[[], None]) -> None:
        backward = self._model.backwards[-1]

        def call() -> None:
            backward.join()
            callback()

        self._engine.queue_callback(call)


def _is_host(device: Any) -> bool:
    return device is HOST or (type(device) is str and device == "cpu")


def _device_in(values: Sequence[Any]) -> str | None:
    """Return what the arguments of ``Tensor.to`` name: ``DEVICE``, ``HOST``, or None for neither."""
    return next((HOST if _is_host(value) else DEVICE for value in values if value is DEVICE or _is_host(value)), None)


def _tensors(value: Any) -> Sequence[Tensor]:
    kind = type(value)
    if kind in (Tensor, torch.nn.Parameter, UnshardedWeight):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    local = local_tensor(value) if isinstance(value, Tensor) else None
    return () if local is None else (local,)


@contextmanager
def streams() -> Iterator[Streams]:
    """Everything within goes through streams; models that are sharded within see CUDA and NCCL. On all ranks alike."""
    model = Streams()

    @contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        before = model.current
        if stream is not None:
            model.current = stream
        try:
            yield
        finally:
            model.current = before

    def on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: model.own(make(*args, **kwargs))

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        for each in _tensors(tensor):
            model.memory(each).recorded.add(stream)

    def watched(dispatch: Any) -> Any:
        def call(cls: Any, *args: Any) -> Any:
            with model.functions.again():
                return dispatch.__func__(cls, *args)

        return classmethod(call)

    world = distributed_c10d._get_default_group() if dist.is_initialized() else None
    replaced: list[tuple[Any, str, Any]] = [
        *((torch, name, on_host(getattr(torch, name))) for name in ("frombuffer", "from_numpy")),
        (Tensor, "record_stream", record_stream),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        *((owner, "current_stream", lambda device=None: model.current) for owner in (torch.cuda, torch.accelerator)),
        (torch.accelerator, "set_stream", lambda stream: setattr(model, "current", stream)),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch, "Event", Event),
        (torch.cuda, "stream", on),
        (torch.cuda, "synchronize", model.synchronize),
        (torch.cpu, "synchronize", model.synchronize),
        (Variable, "_execution_engine", _Engine(model, Variable._execution_engine)),
        (distributed_c10d, "_get_object_coll_device", lambda group=None: DEVICE),
        *(
            (owner, "new_group", partial(model.new_group, dist.new_group))
            for owner in (dist, distributed_c10d, device_mesh)
        ),
        *((kind, "__torch_dispatch__", watched(vars(kind)["__torch_dispatch__"])) for kind in SHARDED_TENSORS),
        *modelled_device(DEVICE, model.on_mesh),
    ]
    if world is not None:
        replaced.append((world, "bound_device_id", torch.device("cpu", 0)))
    before = [vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, new in replaced:
        setattr(owner, name, new)
    try:
        with model, model.functions:
            yield model
        model.check()
    finally:
        for (owner, name, _), old in zip(replaced, before, strict=True):
            if old is None and isinstance(owner, type):
                delattr(owner, name)  # inherited
            else:
                setattr(owner, name, old)
    model.compare_collectives()
