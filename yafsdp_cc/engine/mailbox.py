"""A few numbers between host and device, without either waiting for the other.

On CUDA a copy from or to ordinary host memory stops the host until the stream has run dry. These go through pinned
memory, and an event says when that may be touched again. Elsewhere both are plain copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Mailbox:
    """``count`` numbers, going one way."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count = count
        self._device = device
        self._streams = device.type == "cuda"
        self._pinned = torch.zeros(count if self._streams else 0, dtype=dtype, pin_memory=self._streams)
        self._passed = torch.cuda.Event() if self._streams else None
        self._holds = False

    def send(self, numbers: Tensor, target: Tensor) -> None:
        """Copy ``numbers`` of the host to the device; they may change as soon as this returns."""
        if self._passed is None:
            target.copy_(numbers)
            return
        self._passed.synchronize()  # the copy before has left; one backward ago, so there is hardly ever a wait
        self._pinned.copy_(numbers)
        target.copy_(self._pinned, non_blocking=True)
        self._passed.record(torch.cuda.current_stream(self._device))

    def receive(self, source: Tensor) -> list[float] | None:
        """The numbers in ``source``. On CUDA those of the call before, so as not to wait for these; None at first."""
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
