"""Communication streams and handles of CUDA: side streams and events (``streams`` has those of a CPU)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from yafsdp_cc.engine.streams import CommHandle, CommStream, Finish, Start


class CudaCommHandle(CommHandle):
    """A handle whose event comes behind the completion callback or, once there is a next operation, right before that.

    [Note: collectives first] A kernel of a collective that becomes ready together with a matrix product loses: the
    product takes all multiprocessors, and the network stands still until it is over, 0.7 ms on an H200. So whoever
    waits for an operation also waits until the next one of the stream is free to begin; what the next one waits for
    is older than the caller's next work. The event comes by way of a third stream, the relay, some two
    microseconds later than the collective: recorded on the side stream, it let the product begin first all the same.
    """

    __slots__ = ("device_index", "event")

    def __init__(self, device_index: int) -> None:
        super().__init__()
        self.device_index = device_index
        self.event = torch.Event("cuda", enable_timing=False)

    def wait(self, stream: torch.Stream | None = None) -> None:
        if self.pending:  # ``pending`` is never cleared: every stream that uses the collective's result must wait
            self.event.wait(stream or torch.accelerator.current_stream(self.device_index))

    def is_running(self) -> bool:
        return self.pending and not self.event.query()

    abandon = wait


class CudaCommStream(CommStream):
    """A side stream of high priority, so that its small kernels are not queued behind large matrix products.

    The caller's stream is the current stream of ``device``, whatever device is current. Callers are the user's thread
    and autograd's, which runs a node on the stream of its forward. Current streams come from ``torch.accelerator`` by
    the device's index: ``torch.cuda.current_stream`` makes a Python object in each of some 15 calls per group.
    """

    is_ordered = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.side = torch.cuda.Stream(device, priority=-1)
        self.device_index: int = self.side.device_index  # the current device's index where ``device`` has none
        self._caller_point, self._begins = (torch.Event("cuda", enable_timing=False) for _ in range(2))
        self._relay = torch.cuda.Stream(device, priority=-1)

    def handle(self) -> CudaCommHandle:
        return CudaCommHandle(self.device_index)

    def issue(
        self, handle: CommHandle, start: Start, finish: Finish | None = None, after: torch.Event | None = None
    ) -> None:
        assert isinstance(handle, CudaCommHandle)
        if after is not None:
            after.wait(self.side)
        if isinstance(self.last, CudaCommHandle):  # see [Note: collectives first]
            self._begins.record(self.side)
            self._begins.wait(self._relay)
            self.last.event.record(self._relay)
        with on_stream(self.side):
            # NCCL runs synchronous collectives on the current stream and returns no work, or one whose wait is an
            # event. gloo copies to the host and back on streams of its own: its wait blocks the caller until the
            # exchange is over, and this stream until the copy back is.
            for work in start(False):
                work.wait()
            if finish is not None:
                finish()
            handle.event.record(self.side)
        handle.pending = True
        self.last = handle

    def join(self, event: torch.Event | None) -> None:
        if event is not None:
            event.wait(self.caller())

    def record(self, event: torch.Event | None = None) -> torch.Event:
        caller = self.caller()
        if event is not None:
            event.wait(caller)  # the new event must also come behind ``event``, recorded on another stream perhaps
        event = event or torch.Event("cuda", enable_timing=False)
        event.record(caller)
        return event

    def wait_for_caller(self) -> None:
        self._caller_point.record(self.caller())
        self._caller_point.wait(self.side)

    def wait_event(self, event: torch.Event) -> None:
        self.side.wait_event(event)
        torch.cuda.current_stream(self.device_index).wait_event(event)  # the user may pass a ``torch.cuda.Event``

    def caller(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device_index)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make ``stream`` current on its device within the block, with less host work than ``torch.cuda.stream``."""
    device_index: int = stream.device_index
    before, current_device = torch.accelerator.current_stream(device_index), torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        if current_device != device_index:  # ``set_stream`` has also changed the current device
            torch.accelerator.set_device_index(current_device)


def comm_stream(device: torch.device) -> CommStream:
    """Return a new communication stream of ``device``."""
    return CudaCommStream(device) if device.type == "cuda" else CommStream()
