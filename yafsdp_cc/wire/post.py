"""The buffers that a model's compressed exchanges share, one exchange at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions

from yafsdp_cc.wire.exchange import MESSAGE_TAG, Works, backend_of, duplex, is_duplex, works_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


class Post:
    """Buffers that messages are written to and received in, one exchange at a time, for all units of a model."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.world: int = group.size()
        self.rank: int = group.rank()
        self._sent = torch.empty(0, dtype=torch.uint8, device=device)
        self._received = torch.empty(0, dtype=torch.uint8, device=device)
        self._total = torch.empty(0, dtype=torch.float32, device=device)
        self._due = torch.empty(0, dtype=torch.float32, device=device)
        self._options = AllToAllOptions()
        self._sums = AllreduceOptions()
        self._is_gloo = backend_of(group, device) == "gloo"

    def reserve(self, message_bytes: int, part: int) -> None:
        """Make room for messages of so many bytes, and sums of so many elements."""
        self._reserve((self.world - 1) * message_bytes)
        if part > self._total.numel():
            self._total = self._total.new_empty(part)

    def reserve_whole(self, numel: int, message: int) -> None:
        """Make room for messages of ``message`` fp32 elements to all alike, made of a buffer of ``numel``."""
        self._reserve(4 * message)
        if numel > self._due.numel():
            self._due = self._due.new_empty(numel)

    def _reserve(self, size: int) -> None:
        if size > self._sent.numel():
            self._sent = self._sent.new_empty(size)
            self._received = self._received.new_empty(size)

    def sent(self, message_bytes: int) -> Tensor:
        """Messages on their way, [peers, bytes]: those of lower ranks first, none to oneself."""
        peers = self.world - 1
        return self._sent.narrow(0, 0, peers * message_bytes).view(peers, message_bytes)

    def received(self, message_bytes: int) -> Tensor:
        """Messages of the others, in rank order, [peers, bytes]."""
        peers = self.world - 1
        return self._received.narrow(0, 0, peers * message_bytes).view(peers, message_bytes)

    def said(self, numel: int) -> Tensor:
        """The message to all alike, fp32."""
        return self._sent[: 4 * numel].view(torch.float32)

    def summed(self, numel: int) -> Tensor:
        """The sum of all ranks' messages to all alike, fp32."""
        return self._received[: 4 * numel].view(torch.float32)

    def due(self, numel: int) -> Tensor:
        """Where a whole buffer is put together in fp32, before it is said."""
        return self._due.narrow(0, 0, numel)

    def total(self, numel: int) -> Tensor:
        """Where a sum is made, overwritten by the next."""
        return self._total.narrow(0, 0, numel)

    def exchange(self, message_bytes: int, asynchronous: bool) -> Works:
        """Give every rank its message, of the same size on all ranks."""
        parts = [message_bytes] * self.world
        parts[self.rank] = 0
        received, sent = (each.narrow(0, 0, sum(parts)) for each in (self._received, self._sent))
        if self._is_gloo and is_duplex(self.world * message_bytes, self.world, self.device):
            return duplex(self.group, received.split(parts), sent.split(parts), MESSAGE_TAG)
        self._options.asyncOp = asynchronous
        return works_of(self.group.alltoall_base(received, sent, parts, parts, self._options))

    def wait(self) -> None:
        """Wait for messages that others do not wait for; there are none, where buffers are shared."""

    def sum(self, numel: int, asynchronous: bool) -> Works:
        """Sum the messages to all alike over ranks; what was said stays as it is."""
        summed = self.summed(numel).copy_(self.said(numel))
        self._sums.asyncOp = asynchronous
        return works_of(self.group.allreduce([summed], self._sums))

    @property
    def owned_bytes(self) -> int:
        return self._sent.nbytes + self._received.nbytes + self._total.nbytes + self._due.nbytes
