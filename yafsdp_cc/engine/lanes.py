"""Where communication is issued, and what its consumers wait on.

One schedule runs on two lanes. On CUDA a lane is a side stream: the collective and its tail (decode, sum, add to
the shard) are enqueued behind each other, and a ticket is an event. On CPU a lane is gloo's own threads: a ticket
holds the collectives in flight and the tail, which runs in the caller when it waits. That is the only difference.

    caller    ──forward k──┬─wait(gather k+1)──forward k+1──
    lane         gather k+1┘   gather k+2 …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

Start: TypeAlias = Callable[[bool], Sequence["dist.Work"]]
"""Issues collectives; told whether to issue them asynchronously, and returns what to wait for then."""

Tail: TypeAlias = Callable[[], None]
"""Consumes what the collectives brought."""


def alone(action: Callable[[], None]) -> Start:
    """A start that issues no collective, and so is all there is of its operation."""

    def start(_: bool) -> Sequence[dist.Work]:
        action()
        return ()

    return start


class Marker(Protocol):
    """A point in the caller's stream that a lane can wait for."""


class Ticket(Protocol):
    """One operation on a lane. A new ticket is idle: waiting for it returns at once."""

    def wait(self) -> None:
        """Make the caller's next work see the result; runs the tail where the lane has not."""

    def settle(self) -> None:
        """Let the operation's buffers be refilled by the same lane."""

    def abandon(self) -> None:
        """Wait until the collectives have left their buffers, and drop the tail."""


class Lane(Protocol):
    """Issues collectives in the order of the calls."""

    def ticket(self) -> Ticket:
        """An idle ticket of this lane, to be armed again and again by ``issue``."""

    def issue(self, ticket: Ticket, start: Start, tail: Tail | None = None, after: Marker | None = None) -> None:
        """Run ``start`` and then ``tail`` once the caller's stream has reached ``after``."""

    def mark(self, before: Marker | None = None) -> Marker | None:
        """The point that the caller's stream has reached, and ``before``, which may be used up."""

    def reached(self) -> Marker | None:
        """The point that the caller's stream has reached, to be followed before the next call of this."""

    def stream(self) -> torch.cuda.Stream | None:
        """The caller's stream, where there are streams."""

    def follow(self, marker: Marker | None) -> None:
        """Hold everything issued from now on until ``marker`` is reached."""

    def after(self, event: torch.Event) -> None:
        """Hold everything issued from now on until ``event`` has come."""

    def hold_host(self, marker: Marker) -> None:
        """Hold the calling thread until ``marker`` is reached."""


class CpuTicket:
    """Works in flight on gloo's threads, and a tail for the thread that waits."""

    __slots__ = ("tail", "works")

    def __init__(self) -> None:
        self.works: Sequence[dist.Work] = ()
        self.tail: Tail | None = None

    def wait(self) -> None:
        works, self.works = self.works, ()
        for work in works:
            work.wait()
        tail, self.tail = self.tail, None
        if tail is not None:
            tail()

    settle = wait

    def abandon(self) -> None:
        self.tail = None
        self.wait()


class CpuLane:
    """gloo's threads."""

    def ticket(self) -> CpuTicket:
        return CpuTicket()

    def issue(self, ticket: Ticket, start: Start, tail: Tail | None = None, after: Marker | None = None) -> None:
        assert isinstance(ticket, CpuTicket)
        ticket.works = start(True)
        ticket.tail = tail

    def mark(self, before: Marker | None = None) -> None:
        return None

    def reached(self) -> None:
        return None

    def stream(self) -> None:
        return None

    def follow(self, marker: Marker | None) -> None:
        pass

    def after(self, event: torch.Event) -> None:
        event.synchronize()

    def hold_host(self, marker: Marker) -> None:
        pass


class CudaTicket:
    """An event that the lane records behind the tail."""

    __slots__ = ("armed", "device", "event")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.event = torch.cuda.Event()
        self.armed = False

    def wait(self) -> None:
        if self.armed:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def settle(self) -> None:
        pass  # the lane is a stream: a later refill is enqueued behind this operation

    abandon = wait


class CudaMarker:
    """A point in a stream. Recording again is safe: who waits already, waits for what was recorded then."""

    __slots__ = ("event", "stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.stream = stream


class CudaLane:
    """A side stream of high priority, so that its small kernels are not queued behind large matrix products.

    The caller's stream is always that of this device, whatever device is current: callers are the user's thread and
    autograd's, which runs a node on the stream of its forward.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device, priority=-1)
        self._reached = CudaMarker(self.side)

    def ticket(self) -> CudaTicket:
        return CudaTicket(self.device)

    def issue(self, ticket: Ticket, start: Start, tail: Tail | None = None, after: Marker | None = None) -> None:
        assert isinstance(ticket, CudaTicket)
        self.follow(after)
        with torch.cuda.stream(self.side):
            # NCCL runs what is not asynchronous on the current stream and gives nothing to wait for, or something
            # whose wait is an event. gloo has copied to the host and back on streams of its own: its wait blocks the
            # caller until the exchange is over, and this stream until the copy back is.
            for work in start(False):
                work.wait()
            if tail is not None:
                tail()
            ticket.event.record(self.side)
        ticket.armed = True

    def mark(self, before: Marker | None = None) -> CudaMarker:
        stream = torch.cuda.current_stream(self.device)
        if before is None:
            marker = CudaMarker(stream)
        else:
            assert isinstance(before, CudaMarker)
            marker = before
            if marker.stream != stream:
                stream.wait_event(marker.event)
                marker.stream = stream
        marker.event.record(stream)
        return marker

    def reached(self) -> CudaMarker:
        self._reached.event.record(torch.cuda.current_stream(self.device))
        return self._reached

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def follow(self, marker: Marker | None) -> None:
        if marker is not None:
            assert isinstance(marker, CudaMarker)
            self.side.wait_event(marker.event)

    def after(self, event: torch.Event) -> None:
        self.side.wait_event(event)

    def hold_host(self, marker: Marker) -> None:
        assert isinstance(marker, CudaMarker)
        marker.event.synchronize()


def lane_for(device: torch.device) -> Lane:
    """The lane of a device."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()


class Lanes:
    """The lanes of gathers and of reduces, each made when it is first asked for."""

    def __init__(self) -> None:
        self._gathers: Lane | None = None
        self._reduces: Lane | None = None

    def gathers(self, device: torch.device) -> Lane:
        if self._gathers is None:
            self._gathers = lane_for(device)
        return self._gathers

    def reduces(self, device: torch.device) -> Lane:
        """Another than that of gathers."""
        if self._reduces is None:
            self._reduces = lane_for(device)
        return self._reduces
