"""Sums over replicas, and messages between two, that run in the background while a training step goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import BLOCK, codec_of
from yafsdp_cc.compression.error_feedback import Residual
from yafsdp_cc.engine.streams import comm_stream
from yafsdp_cc.ranks.groups import timeout_of
from yafsdp_cc.replicas.sync import LocalBuffer, sum_over

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.engine.communicator import Communicator, Works

_HEADER_TAG, _DATA_TAG, _RECEIPT_TAG = 3, 4, 5
_NOT_THERE = math.nan
"""Value in a header until the message arrives."""
_END = -1.0
"""Value in place of a message's number: no more messages for now."""


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


class PeerMailbox:
    """Sends buffers to one replica and receives others from another, each at its own pace: no step waits.

    At most one message each way is in flight. The receiver owns an arrived message until it calls ``release``, which
    sends a receipt; until the receipt arrives the sender's buffer is in use. A header that follows the data shows in
    memory that the data has arrived: gloo tells that an operation is over only to a thread that waits, and such a
    thread would keep the process from ending. Messages go over gloo, those of a GPU through host memory.

    Args:
        group: a gloo group.
        sent, received: contiguous buffers, equally long.
    """

    def __init__(self, group: dist.ProcessGroup, to: int, source: int, sent: Tensor, received: Tensor) -> None:
        self.sent, self.received = sent, received
        self._group, self._to, self._source = group, to, source
        timeout = timeout_of(group)
        self._patience = math.inf if timeout is None else timeout.total_seconds()
        self._host_sent, self._host_received = (_in_host_memory(each).view(-1) for each in (sent, received))
        numbers = torch.full((5, 2), _NOT_THERE, dtype=torch.float32, device="cpu").unbind()
        self._sent_header, self._sent_end, self._received_header, self._sent_receipt, self._received_receipt = numbers
        self._sends: list[dist.Work] = []
        """Sends of the message whose receipt has not arrived."""
        self._receipt: dist.Work | None = None
        self._sent_count = self._received_count = 0
        self._looked = self._silence = 0.0
        """Time when this rank last looked for a message, and the seconds that it has looked in vain."""
        self._is_ended = False
        self._receives = [group.recv([self._host_received], source, _DATA_TAG), self._receive_header()]

    def can_send(self) -> bool:
        """Return whether the buffer ``sent`` may be overwritten: the peer has taken the last message."""
        return not self._sends or not self._received_receipt[0].isnan()

    def send(self, weight: float) -> None:
        """Send the buffer ``sent`` to the peer, with ``weight`` in the header; only while ``can_send`` is true."""
        self._wait_sent()
        if not self.sent.is_cpu:
            self._host_sent.copy_(self.sent.view(-1))
        self._received_receipt.fill_(_NOT_THERE)
        receipt = self._group.recv([self._received_receipt], self._to, _RECEIPT_TAG)
        self._sent_header[0], self._sent_header[1] = self._sent_count, weight
        data = self._group.send([self._host_sent], self._to, _DATA_TAG)
        self._sends = [data, self._group.send([self._sent_header], self._to, _HEADER_TAG), receipt]
        self._sent_count += 1

    def has_come(self) -> bool:
        """Return whether there is a message to ``receive``.

        Raises:
            RuntimeError: the source has sent nothing for as long as the group waits.
        """
        if self._is_ended:
            return False
        if not self._received_header[0].isnan():
            return True
        now = time.monotonic()
        # cap each interval, so that a pause of all ranks (a suspended job) does not count as silence
        self._silence += min(now - self._looked, self._patience / 10)
        self._looked = now
        if self._silence > self._patience:
            raise RuntimeError(f"{self._name(self._source)} has ended or hangs: no message for {self._patience:g} s")
        return False

    def receive(self) -> float | None:
        """Wait for a message in ``received``, and return the ``weight`` that was sent with it; None for the end.

        Raises:
            RuntimeError: the source has ended, or has sent nothing for as long as the group waits.
        """
        if self._is_ended:
            return None
        header, data = self._receives[1], self._receives[0]
        self._wait(header, self._source)
        number, weight = self._received_header.tolist()
        self._silence = 0.0
        if number == _END:  # an end has no data: the receive that is posted takes those of the next message
            self._is_ended = True
            self._receives[1] = self._receive_header()
            return None
        if number != self._received_count:
            raise RuntimeError(
                f"{self._name(self._source)} has sent message {number:.0f}, and {self._received_count} was due"
            )
        self._wait(data, self._source)
        if not self.received.is_cpu:
            self.received.view(-1).copy_(self._host_received)
        return float(weight)

    def release(self) -> None:
        """Allow the next message to overwrite ``received``, after one was received."""
        self._received_count += 1
        self._receives = [self._group.recv([self._host_received], self._source, _DATA_TAG), self._receive_header()]
        if self._receipt is not None:
            self._wait(self._receipt, self._source)
        self._sent_receipt.fill_(0.0)
        self._receipt = self._group.send([self._sent_receipt], self._source, _RECEIPT_TAG)

    def send_end(self) -> None:
        """Send the end, behind all messages in flight: no more messages before ``reopen``."""
        self._sent_end.fill_(_END)
        self._end = self._group.send([self._sent_end], self._to, _HEADER_TAG)

    def reopen(self) -> None:
        """Wait until all messages, ``send_end`` included, have been received, and start anew, as the source must,
        too."""
        self._wait(self._end, self._to)
        self._wait_sent()
        self._sent_count = self._received_count = 0
        self._silence, self._is_ended = 0.0, False

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends per message, with a receipt for one that it receives."""
        return self.sent.nbytes + self._sent_header.nbytes + self._sent_receipt.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers ``sent`` and ``received``, without copies in host memory of those on a GPU."""
        return self.sent.nbytes + self.received.nbytes

    def _receive_header(self) -> dist.Work:
        self._received_header.fill_(_NOT_THERE)
        return self._group.recv([self._received_header], self._source, _HEADER_TAG)

    def _wait_sent(self) -> None:
        for work in self._sends:
            self._wait(work, self._to)
        self._sends = []

    def _wait(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self._name(peer)} has ended or hangs: {error}") from error

    def _name(self, peer: int) -> str:
        return f"replica {peer} (rank {dist.get_global_rank(self._group, peer)})"


def _in_host_memory(buffer: Tensor) -> Tensor:
    return buffer if buffer.is_cpu else torch.empty_like(buffer, device="cpu", pin_memory=True)


def agreed(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return which flags are set on all ranks of ``group``, a gloo group; None: this rank is alone."""
    if group is None:
        return list(flags)
    everywhere = torch.tensor(flags, dtype=torch.int32, device="cpu")
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group)
    return [bool(each) for each in everywhere.tolist()]
