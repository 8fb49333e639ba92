"""Communication streams issue collectives, and their handles are what consumers wait for.

One schedule runs on two kinds of device. On CUDA (``cuda_streams``) a ``CommStream`` is a side stream: a collective and
what completes it (decode, sum, add to the shard) are enqueued behind each other, and a ``CommHandle`` is an event. On
CPU it is gloo's own threads: a handle holds the works in flight and a completion callback, which runs in the thread
that waits; operations that share buffers are waited for by hand (``is_ordered``).

    caller    ──forward k──┬─wait(all-gather k+1)──forward k+1──
    stream    all-gather k+1┘   all-gather k+2 …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Start: TypeAlias = Callable[[bool], Sequence["dist.Work"]]
"""Function that issues collectives, asynchronously if its argument is true, and returns the works to wait for."""
Finish: TypeAlias = Callable[[], None]
"""Function that consumes the results of an operation's collectives."""


class CommHandle:
    """One operation of a ``CommStream``; a new handle is idle, and waiting for it returns at once."""

    __slots__ = ("finish", "pending", "works")

    def __init__(self) -> None:
        self.pending = False
        """Whether ``wait`` has work to do; on CUDA always true after the first operation."""
        self.works: Sequence[dist.Work] = ()
        self.finish: Finish | None = None

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make the caller's next work wait for the operation. On CPU the completion callback runs in this call.

        Args:
            stream: on CUDA, the stream that waits in place of the caller's.
        """
        try:
            for work in self.works:  # all stay in ``works`` for another wait, as an interrupt may end this one
                work.wait()
        except RuntimeError:  # the collective has failed for good
            self.pending, self.works, self.finish = False, (), None
            raise
        self.pending, self.works = False, ()
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()

    def is_running(self) -> bool:
        """Return whether the operation's collectives are under way. Any thread may ask."""
        return any(not work.is_completed() for work in self.works)

    def abandon(self) -> None:
        """Make the caller's next work wait for the collectives; on CPU, drop the completion callback."""
        self.finish = None
        self.wait()


class CommStream:
    """Stream that issues operations in the order of calls; on CPU, to gloo's threads, which do not keep the order."""

    is_ordered = False
    """Whether the device runs operations in order; else an operation first waits for those that share its buffers."""

    def __init__(self) -> None:
        self.last: CommHandle | None = None
        """Handle of the last operation that was issued."""

    def handle(self) -> CommHandle:
        """Return an idle handle of this stream, for any number of ``issue`` calls in turn."""
        return CommHandle()

    def issue(
        self, handle: CommHandle, start: Start, finish: Finish | None = None, after: torch.Event | None = None
    ) -> None:
        """Run ``start`` and then ``finish`` once ``after`` is reached; ``handle`` then stands for this operation.

        The operation that ``handle`` stood for before is over first, as both may use the same buffers: on a CPU it is
        waited for, and a CUDA stream runs both in order.
        """
        if handle.pending:
            handle.wait()
        handle.works = start(True)
        handle.finish = finish
        handle.pending = True
        self.last = handle

    def is_running(self) -> bool:
        """Return whether the last operation is under way. Any thread may ask."""
        return self.last is not None and self.last.is_running()

    def join(self, event: torch.Event | None) -> None:
        """Make the caller's later work wait for ``event``."""

    def record(self, event: torch.Event | None = None) -> torch.Event | None:
        """Return an event behind the caller's stream so far and behind ``event``, which is reused; None on a CPU."""
        return None

    def wait_for_caller(self) -> None:
        """Make later operations wait until the caller's stream has reached its present point."""

    def wait_event(self, event: torch.Event) -> None:
        """Make later operations, and the caller, wait for ``event``."""
        event.synchronize()

    def caller(self) -> torch.Stream | None:
        """Return the caller's stream; None on a CPU."""
        return None


class PinnedCopy:
    """Copies a few numbers between host and device without making either wait for the other.

    On CUDA a copy from or to ordinary host memory blocks the host until the stream has run dry. ``PinnedCopy``
    copies through pinned memory, and an event tells when that is free again. On other devices it is a plain
    copy.

    Args:
        count: how many numbers are copied at once.
        dtype: dtype of the numbers on the device.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        # Without ``device="cpu"`` a default device of "cuda" would apply, which cannot be pinned.
        self._pinned = torch.zeros(count if is_cuda else 0, dtype=dtype, device="cpu", pin_memory=is_cuda)
        self._passed = torch.cuda.Event() if is_cuda else None
        self._holds = False

    def send(self, numbers: Tensor, target: Tensor) -> None:
        """Copy ``numbers`` of the host to ``target``; the caller may change them as soon as this returns."""
        if self._passed is None:
            target.copy_(numbers)
            return
        self._passed.synchronize()  # the previous copy was one backward ago, so this hardly ever waits
        self._pinned.copy_(numbers)
        target.copy_(self._pinned, non_blocking=True)
        self._passed.record(torch.cuda.current_stream(self._device))

    def receive(self, source: Tensor) -> list[float] | None:
        """Return the numbers in ``source``. On CUDA, to avoid waiting, those of the previous call; None at first."""
        if self._passed is None:
            return list(source.tolist())
        found = None
        if self._holds:
            self._passed.synchronize()
            found = list(self._pinned.tolist())
        self._pinned.copy_(source, non_blocking=True)
        self._passed.record(torch.cuda.current_stream(self._device))
        self._holds = True
        return found
