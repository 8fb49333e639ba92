"""Preallocated buffers that parameter groups take in turn (double buffering).

Groups of one role alternate over the buffers of one pool, so that group k computes in one buffer while group k + 1 is
gathered into the other:

    buffer 0   | all-gather 0 | forward 0    | all-gather 2 | forward 2    | …
    buffer 1                  | all-gather 1 | forward 1    | all-gather 3 | …

[Note: buffer reuse] A buffer has one ``owner`` at a time, and ``versions`` says which values of the owner's shards it
holds: a group that finds itself the owner with its present versions need not gather again. ``users`` counts forwards
and backwards that read or write the content now; only a buffer without users is filled for another group. Even then a
kernel on some CUDA stream may still read it, so a refill waits for ``last_use``, and compute waits for ``handle``, the
last operation that filled the buffer or reads it. Alternation only makes this fast; the owner, checked at run time,
makes it right.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.layout import align
from yafsdp_cc.ranks.groups import allocate

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.streams import CommStream

_ALIGNMENT = 128
"""Number of bytes at multiples of which the parts of a buffer begin: flat parameters and scratch."""


class Buffer:
    """Memory for the unsharded weights or gradients of one group at a time, allocated by ``groups.allocate``.

    Only ``ParamGroup`` and ``GroupContext`` write attributes of a ``Buffer``. See [Note: buffer reuse].
    """

    def __init__(
        self, nbytes: int, device: torch.device, stream: CommStream, allocator: dist.ProcessGroup | None = None
    ) -> None:
        self.data = allocate(nbytes, device, allocator)
        self.address = self.data.data_ptr()
        self.owner: object | None = None
        """Group whose weights or gradients the buffer holds or is being filled with; None if there is none."""
        self.used_for = ""
        """Name of the last group that used the buffer, for errors: its reduce may read it when ``owner`` is None."""
        self.versions: tuple[int, ...] = ()
        """Shard versions of the owner's weights in the buffer; weights are stale once their shard has a new version."""
        self.fills = 0
        """Number of all-gathers into the buffer so far, of any group."""
        self.filled_in = 0
        """Value of ``GroupContext.passes`` (forwards and backwards so far) at the last all-gather into the buffer."""
        self.expired: Collection[object] = ()
        """Each ``FlatParam`` of the owner that must be gathered anew though its version is in ``versions``."""
        self.users = 0
        """Number of forwards and backwards under way that read or write the buffer's content."""
        self.handle = stream.handle()
        """Handle of the last operation that fills or reads the buffer."""
        self.last_use: torch.Event | None = None
        """CUDA event behind all uses of the buffer so far, on any stream; a refill waits for it. None on a CPU."""
        self._home = stream.caller()

    def __del__(self) -> None:
        # The allocator reuses this memory on the stream that allocated it. That stream must first wait for uses on
        # other streams, and for a prefetch that nobody waited for: it may still write here, and read freed shards.
        if self._home is not None and not sys.is_finalizing():
            self.handle.wait(self._home)
            if self.last_use is not None:
                self.last_use.wait(self._home)

    def view(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a view of ``numel`` elements of ``dtype`` that begins at byte ``start`` of the buffer."""
        return self.data.narrow(0, start, numel * dtype.itemsize).view(dtype)


class BufferPool:
    """Weight buffers, or gradient buffers, of the parameter groups of one role.

    Args:
        count: number of buffers that groups take in turn.
        dedicated: number of further buffers, each for one group alone.
        nbytes: bytes of each buffer.
        allocator: process group whose registered memory the buffers use; None: ordinary memory.
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
        """Return the buffer of the ``index``-th group among those that share buffers."""
        return self.shared[index % len(self.shared)]

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.shared, *self.dedicated]


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return byte offsets of parts of these ``sizes``, aligned and in sequence in a buffer, and the last one's end."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = align(end + size, _ALIGNMENT)
    return offsets, end
