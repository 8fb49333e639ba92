"""Sums over replicas, and messages between two, that run in the background while a training step goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import AllToAllOptions

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.compression.error_feedback import Residual
from yafsdp_cc.engine.streams import comm_stream
from yafsdp_cc.replicas.sync import LocalBuffer, sum_over

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.engine.communicator import Communicator, Works

_HEADER_TAG, _DATA_TAG = 3, 4


class BackgroundSum:
    """Sums a buffer over replicas, one sum at a time, exactly or by messages of a codec with error feedback.

    Encoded, every rank sends its message to all others, and all decode the same messages in rank order: they hold the
    same bits. What a message loses is added to the next one (Seide et al., 2014; Karimireddy et al., 2019).

    Args:
        comm: the ranks, one in each replica.
        flags: [n] fp32, small numbers that are summed exactly beside the buffer, in place.
    """

    def __init__(self, comm: Communicator, like: Sequence[Tensor], flags: Tensor, codec: str | None) -> None:
        self.total = LocalBuffer(like, 1 if codec is None else BLOCK)
        total = self.total.data
        self._comm, self._flags = comm, flags
        self._stream = comm_stream(total.device)
        self._handle, self._flags_handle = self._stream.handle(), self._stream.handle()
        self._codec: Codec | None = None
        if codec is not None:
            self._codec = codec_of(codec, BLOCK)
            size = self._codec.message_bytes(total.numel())
            self._messages = torch.zeros(comm.world, size, dtype=torch.uint8, device=total.device)
            self._counts = self.total.counts()
            self.residual = Residual.zeros(1, total.numel(), torch.float32, BLOCK, total.device)

    def start(self) -> None:
        """Start the sum of buffer and flags; nobody may touch them before ``wait``."""
        self.start_flags()
        self._stream.issue(self._handle, self._issue, None if self._codec is None else self._decode)

    def start_flags(self) -> None:
        """Start the sum of ``flags`` alone, without the sum of the buffer."""
        self._stream.wait_for_caller()
        self._stream.issue(self._flags_handle, lambda async_op: self._comm.all_reduce(self._flags, async_op))

    def wait_flags(self) -> None:
        """Complete the sum of ``flags``."""
        self._flags_handle.wait()

    def wait(self) -> None:
        """Complete the sums of buffer and flags."""
        self._flags_handle.wait()
        self._handle.wait()

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends per sum."""
        flags = self._comm.all_reduce_bytes(self._flags.nbytes)
        if self._codec is None:
            return flags + self._comm.all_reduce_bytes(self.total.nbytes)
        return flags + (self._comm.world - 1) * self._messages[0].nbytes

    def mean_residual(self) -> list[Tensor]:
        """Replace each rank's residual by the mean over ranks, and return that mean for each tensor. A collective.

        Empty without a codec. No sum may be under way.
        """
        if self._codec is None:
            return []
        values = self.residual.values
        sum_over(self._comm, values)
        values.div_(self._comm.world)
        return self.total.split(values[0])

    def load_residual(self, residual: Sequence[Tensor]) -> None:
        """Load what ``mean_residual`` returned, if it is not empty."""
        if self._codec is not None:
            self.residual.clear()
            for view, values in zip(self.total.split(self.residual.values[0]), residual, strict=False):
                view.copy_(values)

    @property
    def nbytes(self) -> int:
        """Bytes of the sum's buffer, residual and messages."""
        encoded = 0 if self._codec is None else self._messages.nbytes + self.residual.nbytes + self._counts.nbytes
        return self.total.nbytes + encoded

    def _issue(self, async_op: bool) -> Works:
        if self._codec is None:
            return self._comm.all_reduce(self.total.data, async_op)
        own = self._messages.narrow(0, self._comm.rank, 1)
        values = self.total.data.unsqueeze(0)
        error_feedback.encode(self._codec, values, own, counts=self._counts, residual=self.residual)
        return self._comm.all_gather(self._messages.view(-1), own.view(-1), async_op)

    def _decode(self) -> None:
        assert self._codec is not None
        total = self.total.data
        error_feedback.decode_sum(self._codec, self._messages, total.numel(), None, 0, total)
        self.total.zero_padding()


class PeerMessage:
    """Sends a buffer to one replica and receives one from another, in the background; one at a time.

    A header of two numbers precedes each message. Over NCCL both are one grouped exchange, in which no other replica
    takes part; over gloo they are point-to-point messages, so that a replica waits for its sender alone.

    Args:
        sent, received: contiguous buffers, equally long.
    """

    def __init__(self, comm: Communicator, sent: Tensor, received: Tensor) -> None:
        self.sent, self.received = sent, received
        self._comm, self._sent, self._received = comm, sent.view(-1), received.view(-1)
        self.sent_header = torch.zeros(2, dtype=torch.float32, device=sent.device)
        self.received_header = torch.zeros_like(self.sent_header)
        self._stream = comm_stream(sent.device)
        self._header_handle, self._handle = self._stream.handle(), self._stream.handle()

    def start(self, to: int, source: int) -> None:
        """Send the header and the buffer to the rank ``to``, and receive those of the rank ``source``."""
        self.start_header(to, source)
        buffers = self._sent, self._received
        self._stream.issue(self._handle, lambda async_op: self._exchange(*buffers, to, source, _DATA_TAG, async_op))

    def start_header(self, to: int, source: int) -> None:
        """Send and receive only a header."""
        headers = self.sent_header, self.received_header
        self._stream.wait_for_caller()
        self._stream.issue(
            self._header_handle, lambda async_op: self._exchange(*headers, to, source, _HEADER_TAG, async_op)
        )

    def wait_header(self) -> None:
        """Complete the exchange of headers."""
        self._header_handle.wait()

    def wait(self) -> None:
        """Complete the exchange of headers and buffers."""
        self._header_handle.wait()
        self._handle.wait()

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends per message."""
        return self._sent.nbytes + self.sent_header.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers and headers of both directions."""
        return self._sent.nbytes + self._received.nbytes + 2 * self.sent_header.nbytes

    def _exchange(self, sent: Tensor, received: Tensor, to: int, source: int, tag: int, async_op: bool) -> Works:
        group, world = self._comm.group, self._comm.world
        if sent.is_cpu:
            return [group.recv([received], source, tag), group.send([sent], to, tag)]
        theirs, ours = [0] * world, [0] * world
        theirs[source], ours[to] = received.numel(), sent.numel()
        options = AllToAllOptions()
        options.asyncOp = async_op
        work = group.alltoall_base(received, sent, theirs, ours, options)
        return [] if work is None else [work]
