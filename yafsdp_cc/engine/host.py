"""Shards in host memory, and how they cross to the device and back.

    host, pinned    | weights | ─┐                            ┌─ | gradient so far |  ◄─┐
    device                       └► room, cast ► slot, own chunk └► room, add the sum ──┘

Copies are enqueued like everything else on a stream: weights on the lane of the gathers, gradients on that of the
reduces, behind the sum. The host runs ahead of all of them, so it waits before it gives the memory back to whoever may
read or write it there: at the end of each forward for the weights that were read, of each backward for the gradients.
The other way round there is nothing to wait for: what the host has written, it has written before it enqueues a copy.

Casts and additions are the device's. fp32 crosses while the device computes and costs the host nothing. A cast on the
host would halve these bytes, but is 6 bytes of memory traffic for each element in the thread that launches kernels,
and a third buffer. A sum on the host would wait for its copy in mid-backward, or keep all of a micro-batch's gradients
beside those before until the end; on the device it is one more copy, and that in the direction that is idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from yafsdp_cc.engine.lanes import Lane, Marker

ROOM = 16 << 20
"""Bytes that cross at once, at most: enough for a copy to take longer than its launch."""


class Crossing:
    """Copies that one stream makes, one after the other, and the room on the device that they pass through."""

    def __init__(self, lane: Lane, device: torch.device, size: int) -> None:
        """``size`` is that of the largest buffer that takes the room, in bytes."""
        self._lane = lane
        self._room = torch.empty(min(size, ROOM), dtype=torch.uint8, device=device)
        self._passed: Marker | None = None

    def bring(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source``, on the host, to ``target``, on the device, cast there to its dtype."""
        if source.dtype == target.dtype:
            target.copy_(source, non_blocking=True)
        else:
            for part, room, cast in self.parts(source, target):
                room.copy_(part, non_blocking=True)
                cast.copy_(room)
        self.mark()

    def parts(self, held: Tensor, beside: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """``held``, on the host, part by part: each, room for it on the device, and the same part of ``beside``."""
        step = self._room.numel() // held.itemsize
        for start in range(0, held.numel(), step):
            count = min(step, held.numel() - start)
            room = self._room.narrow(0, 0, count * held.itemsize).view(held.dtype)
            yield held.narrow(0, start, count), room, beside.narrow(0, start, count)

    def mark(self) -> None:
        """Whoever waits, waits for what the current stream has been given until now."""
        self._passed = self._lane.mark(self._passed)

    def wait(self) -> None:
        """Hold the host until all copies are over."""
        if self._passed is not None:
            self._lane.hold_host(self._passed)

    @property
    def owned_bytes(self) -> int:
        return self._room.nbytes


class Crossings:
    """All copies between host memory and the device of one engine."""

    def __init__(self, weights: Crossing, gradients: Crossing, small: Crossing) -> None:
        self.weights = weights
        self.gradients = gradients
        self.small = small
        """Weights of the small group, on the caller's stream."""

    def wait(self) -> None:
        """Let the host read and write what is its own."""
        self.weights.wait()
        self.gradients.wait()
        self.small.wait()

    @property
    def owned_bytes(self) -> int:
        """Bytes of the rooms, on the device."""
        return self.weights.owned_bytes + self.gradients.owned_bytes + self.small.owned_bytes


class Host:
    """Host memory for the shards of a unit."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.crossings: Crossings
        """Those of the engine as it is assembled."""

    @classmethod
    def of(cls, policy: OffloadPolicy | None, device: torch.device) -> Host | None:
        """What ``policy`` asks for, None if nothing. Beside a ``device`` that is a CPU itself nothing is pinned.

        Raises:
            TypeError: it is no policy.
        """
        if policy is not None and not isinstance(policy, OffloadPolicy):
            raise TypeError(f"offload_policy takes OffloadPolicy() or CPUOffloadPolicy(); got {policy!r}")
        if not isinstance(policy, CPUOffloadPolicy):
            return None
        return cls(policy.pin_memory and device.type != "cpu")

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new buffer."""
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self._pinned)
