"""Preallocated buffers that parameter groups take in turn (double buffering).

A buffer has one owner at a time. Its content is made by an operation of a stream (``handle``), and it may be filled
again once its last user has left it (``last_use``). Groups of one role alternate over the buffers of one pool, so that
group k computes in one buffer while group k + 1 is gathered into the other:

    buffer 0   | all-gather 0 | forward 0    | all-gather 2 | forward 2    | …
    buffer 1                  | all-gather 1 | forward 1    | all-gather 3 | …

Alternation makes it fast; the owner, checked at run time, makes it right. A group that finds its assigned buffer in use
gets an overflow buffer of its own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.layout import align
from yafsdp_cc.engine.mesh import allocate

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.streams import CommStream, StreamEvent

_ALIGNMENT = 128
"""Bytes: a multiple of it is where a ``FlatParam`` begins in a buffer."""


class Buffer:
    """Memory for the unsharded weights or gradients of one group at a time, as of ``mesh.allocate``.

    Only ``ParamGroup`` and ``GroupContext`` write its attributes.
    """

    def __init__(
        self, nbytes: int, device: torch.device, stream: CommStream, allocator: dist.ProcessGroup | None = None
    ) -> None:
        self.data = allocate(nbytes, device, allocator)
        self.address = self.data.data_ptr()
        self.owner: object | None = None
        """The group whose weights or gradients it holds or is about to hold; None: nobody's."""
        self.versions: tuple[int, ...] = ()
        """The owner's shard versions that were gathered; other ones make the content stale."""
        self.fills = 0
        """How often it was filled, by anybody."""
        self.filled_in = 0
        """``GroupContext.passes`` when it was filled last."""
        self.expired: Collection[object] = ()
        """``FlatParam`` of the owner that are to be gathered anew though their versions are those in ``versions``."""
        self.users = 0
        """Computations under way that read or write the content."""
        self.handle = stream.handle()
        """The last operation that fills or reads it."""
        self.last_use: StreamEvent | None = None
        """On CUDA: behind all uses so far, on whatever streams they were; a refill waits for it."""
        self._home = stream.caller()

    def __del__(self) -> None:
        # The allocator hands it out again on the stream it was allocated on. That is to come after other users, and
        # after a prefetch that nobody has waited for, which may still write here and read shards freed with the model.
        if self._home is not None and not sys.is_finalizing():
            with torch.cuda.stream(self._home):
                self.handle.wait()
            if self.last_use is not None:
                self._home.wait_event(self.last_use.event)

    def view(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` elements of ``dtype`` from byte ``start`` on."""
        return self.data.narrow(0, start, numel * dtype.itemsize).view(dtype)


class BufferPool:
    """The buffers of one role.

    Args:
        count: buffers that groups take in turn.
        dedicated: buffers that one group each has to itself.
        nbytes: of each buffer.
        allocator: the group whose memory they are; None: ordinary memory.
    """

    def __init__(
        self,
        count: int,
        dedicated: int,
        nbytes: int,
        device: torch.device,
        stream: CommStream,
        allocator: dist.ProcessGroup | None,
    ) -> None:
        self.buffer_bytes = nbytes
        self.shared = [Buffer(nbytes, device, stream, allocator) for _ in range(count)]
        self.dedicated = [Buffer(nbytes, device, stream, allocator) for _ in range(dedicated)]

    def assigned(self, index: int) -> Buffer:
        """Return the buffer of the ``index``-th group that shares."""
        return self.shared[index % len(self.shared)]

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.shared, *self.dedicated]


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where parts of so many bytes begin in a buffer, one after another, and where the last one ends."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = align(end + size, _ALIGNMENT)
    return offsets, end
