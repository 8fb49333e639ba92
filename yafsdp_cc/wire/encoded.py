"""How a unit's bytes cross ranks encoded: one message to each other rank, decoded and summed by the owner of the chunk.

    gradients   | chunk 0 | chunk 1 | chunk 2 |        of rank 1, whose own chunk stays as it is
                     │                   │
                encode, with the residual of the rank that it goes to
                     ▼                   ▼
                 message 0           message 2         one all-to-all of bytes
                     ▼                   ▼
    rank 0: message of 1, of 2, and its own chunk, decoded and added in fp32 in rank order

Sums come out as those of the exact exchange do, and nobody divides on the way.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.codec import Noise
from yafsdp_cc.wire.exchange import MESSAGE_TAG, Gather, Works, backend_of, duplex, is_duplex, works_of
from yafsdp_cc.wire.feedback import CLASSIC, Recursion, Residual

if TYPE_CHECKING:
    from yafsdp_cc.wire.codec import Codec


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
        self._options = AllToAllOptions()
        self._is_gloo = backend_of(group, device) == "gloo"

    def reserve(self, message_bytes: int, part: int) -> None:
        """Make room for messages of so many bytes, and sums of so many elements."""
        size = (self.world - 1) * message_bytes
        if size > self._sent.numel():
            self._sent = self._sent.new_empty(size)
            self._received = self._received.new_empty(size)
        if part > self._total.numel():
            self._total = self._total.new_empty(part)

    def sent(self, message_bytes: int) -> Tensor:
        """Messages on their way, [peers, bytes]: those of lower ranks first, none to oneself."""
        return self._sent.narrow(0, 0, (self.world - 1) * message_bytes).view(self.world - 1, message_bytes)

    def received(self, message_bytes: int) -> Tensor:
        """Messages of the others, in rank order, [peers, bytes]."""
        return self._received.narrow(0, 0, (self.world - 1) * message_bytes).view(self.world - 1, message_bytes)

    def total(self, numel: int) -> Tensor:
        """Where a sum is made, overwritten by the next."""
        return self._total.narrow(0, 0, numel)

    def exchange(self, message_bytes: int, asynchronous: bool) -> Works:
        """Give every rank its message."""
        received, sent = self.received(message_bytes), self.sent(message_bytes)
        if self._is_gloo and is_duplex(self.world * message_bytes, self.world, self.device):
            room, said = ([*each[: self.rank], each[:0], *each[self.rank :]] for each in (received, sent))
            return duplex(self.group, room, said, MESSAGE_TAG)
        self._options.asyncOp = asynchronous
        parts = [message_bytes] * self.world
        parts[self.rank] = 0
        return works_of(self.group.alltoall_base(received.view(-1), sent.view(-1), parts, parts, self._options))

    @property
    def owned_bytes(self) -> int:
        return self._sent.nbytes + self._received.nbytes + self._total.nbytes


class EncodedReduce:
    """Sums one flat buffer of ``world`` chunks, each at the owner of the chunk, from messages of ``codec``.

    ``send`` starts the exchange and ``totals`` ends it, as those of ``exchange.Reduce`` do.

    Args:
        post: shared by all that is exchanged one at a time.
        codec: of the messages.
        numel: elements of the buffer.
        counts: [world, blocks] int32, how many elements each block has; None: all.
        residual: [peers, chunk], where what was not said is kept; None: it is lost, and rounding is random where the
            codec can do that.
        name: of the unit, for its random numbers.
        recursion: how the residual is carried.
    """

    def __init__(
        self,
        post: Post,
        codec: Codec,
        numel: int,
        counts: Tensor | None,
        residual: Residual | None,
        name: str,
        recursion: Recursion = CLASSIC,
    ) -> None:
        self.codec = codec
        self.chunk = numel // post.world
        self.residual = residual
        self._post = post
        self._message_bytes = codec.message_bytes(self.chunk)
        self._recursion = recursion
        self._counts = counts
        self._peers = [rank for rank in range(post.world) if rank != post.rank]
        self._noise = Dice(f"{name}/{post.rank}") if residual is None and codec.rounds_randomly else None
        self._step = kernels.PART if kernels.is_native(codec, post.device) else self.chunk
        self._pending: Tensor | None = None
        """Of the own chunk, which has no residual: gradients that no sum has taken in yet."""
        self.owed: Tensor | None = None
        """[chunk], what is added to the next sum: what other ranks' residuals held in an earlier run."""
        self.kept: list[bool] | None = None
        """Of which parameters there are gradients that wait for the next ``send``; None: of none."""
        post.reserve(self._message_bytes, min(self._step, self.chunk))

    @property
    def one_at_a_time(self) -> bool:
        """Whether ``totals`` of a buffer must run before the next ``send``; a stream keeps that order itself."""
        return self._post.device.type != "cuda"

    @property
    def owned_bytes(self) -> int:
        """Bytes of its own, the residual's among them; the messages' are the post's."""
        pending = sum(each.nbytes for each in (self._pending, self.owed) if each is not None)
        return pending + (0 if self.residual is None else self.residual.nbytes)

    @property
    def payload(self) -> int:
        """Bytes that would say the buffer to all ranks."""
        return self._message_bytes * self._post.world

    def sent_bytes(self, whole: Tensor | None = None) -> int:
        """Bytes that this rank sends: a message to every other, whatever it says."""
        return self._message_bytes * len(self._peers)

    def send(self, whole: Tensor, asynchronous: bool) -> Works:
        """Start the sum of ``whole`` (world × chunk); its own chunk must stay as it is until ``totals`` has run."""
        if not self._peers:
            return []
        messages = self._post.sent(self._message_bytes)
        noise = None if self._noise is None else self._noise.throw()
        for first, chunks in self._stretches(whole):
            last = first + chunks.shape[0]
            kernels.encode(
                self.codec,
                chunks,
                messages[first:last],
                counts=None if self._counts is None else self._counts[self._peers[first] : self._peers[last - 1] + 1],
                residual=None if self.residual is None else self.residual.rows(first, last),
                recursion=self._recursion,
                noise=None if noise is None else noise._replace(first=self._peers[first] * self.chunk),
            )
        return self._post.exchange(self._message_bytes, asynchronous)

    @property
    def accumulates(self) -> bool:
        """Whether the residual can take gradients in, for one message later."""
        return self.residual is not None and self._recursion == CLASSIC

    def accumulate(self, whole: Tensor, used: list[bool]) -> None:
        """Take gradients of the parameters that are ``used`` in, to be summed with those of the next ``send``."""
        assert self.residual is not None
        for first, chunks in self._stretches(whole):
            kernels.accumulate(chunks, self.residual.rows(first, first + chunks.shape[0]))
        if self._pending is None:
            self._pending = torch.zeros(self.chunk, dtype=torch.float32, device=whole.device)
        own = self._own(whole)
        if self.kept is None:
            self._pending.copy_(own)
            self.kept = used
        else:
            self._pending.add_(own)
            self.kept = [now or before for now, before in zip(used, self.kept, strict=True)]

    def unsaid(self) -> Tensor:
        """[world, chunk] fp32: what this rank has still to say to each, and of its own chunk to sum."""
        whole = torch.zeros(self._post.world, self.chunk, dtype=torch.float32, device=self._post.device)
        if self.residual is not None:
            whole[self._peers] = self.residual.load()
        for own in (self._pending if self.kept is not None else None, self.owed):
            if own is not None:
                whole[self._post.rank] += own
        return whole

    def forget(self) -> None:
        """Drop gradients that were taken in and are still to be summed; those in the residual stay."""
        self.kept = None

    def _own(self, whole: Tensor) -> Tensor:
        return whole.view(self._post.world, self.chunk)[self._post.rank]

    def _stretches(self, whole: Tensor) -> list[tuple[int, Tensor]]:
        """Chunks of other ranks [chunks, n], where their messages begin: those below, and those above."""
        rank, chunks = self._post.rank, whole.view(self._post.world, self.chunk)
        return [(first, part) for first, part in ((0, chunks[:rank]), (rank, chunks[rank + 1 :])) if part.shape[0]]

    def totals(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The sum over ranks of this rank's chunk, fp32, in parts: where each begins, and the part.

        A part is overwritten by the next one.
        """
        post, own = self._post, self._own(whole)
        received = post.received(self._message_bytes)
        for start in range(0, self.chunk, self._step):
            total = post.total(min(self._step, self.chunk - start))
            mine = own.narrow(0, start, total.numel())
            if self._peers:
                kernels.decode_sum(self.codec, received, self.chunk, mine, post.rank, total, start)
            else:
                total.copy_(mine)
            if self.kept is not None and self._pending is not None:
                total.add_(self._pending.narrow(0, start, total.numel()))
            if self.owed is not None:
                total.add_(self.owed.narrow(0, start, total.numel()))
            yield start, total
        self.kept = self.owed = None


class EncodedSum:
    """Sums one buffer over replicas: each says its own to all others, and all decode the same messages.

    Args:
        group: the replicas.
        device: of the buffer.
        codec: of the messages.
        numel: elements of the buffer.
        counts, residual, name, recursion: as of ``EncodedReduce``; the residual is [1, numel].
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        codec: Codec,
        numel: int,
        counts: Tensor | None,
        residual: Residual | None,
        name: str,
        recursion: Recursion = CLASSIC,
    ) -> None:
        self.codec = codec
        self.residual = residual
        self.owed: Tensor | None = None
        """[numel], what is added to the next sum: what residuals held in an earlier run."""
        self._gather = Gather(group, device)
        self._counts = counts
        self._recursion = recursion
        self._noise = Dice(f"{name}/{group.rank()}") if residual is None and codec.rounds_randomly else None
        self._numel = numel
        shape = self._gather.world, codec.message_bytes(numel)
        self._messages = torch.zeros(shape, dtype=torch.uint8, device=device)

    @property
    def owned_bytes(self) -> int:
        return self._messages.nbytes + (0 if self.residual is None else self.residual.nbytes)

    def unsaid(self) -> Tensor:
        """[numel] fp32: what this replica has still to say, and its part of what is owed."""
        total = torch.zeros(self._numel, dtype=torch.float32, device=self._messages.device)
        if self.residual is not None:
            total += self.residual.load()[0]
        return total if self.owed is None else total.add_(self.owed, alpha=1 / self._gather.world)

    def sent_bytes(self) -> int:
        """Bytes that this rank sends: its message, to every other replica."""
        return self._messages[0].nbytes * (self._gather.world - 1)

    def send(self, total: Tensor, asynchronous: bool) -> Works:
        """Start the sum of ``total`` (numel)."""
        own = self._messages[self._gather.rank]
        kernels.encode(
            self.codec,
            total.unsqueeze(0),
            own.unsqueeze(0),
            counts=self._counts,
            residual=self.residual,
            recursion=self._recursion,
            noise=None if self._noise is None else self._noise.throw(),
        )
        return self._gather.send(self._messages.view(-1), own, asynchronous)

    def finish(self, total: Tensor) -> None:
        """Overwrite ``total`` with the sum, the same bits on every replica."""
        kernels.decode_sum(self.codec, self._messages, total.numel(), None, 0, total)
        if self.owed is not None:
            total.add_(self.owed)
            self.owed = None


class Dice:
    """Seeds of random numbers, another one for each message: by what it is and how many there were before."""

    def __init__(self, name: str) -> None:
        self._name = zlib.crc32(name.encode())
        self._thrown = 0

    def throw(self) -> Noise:
        """The next ones."""
        self._thrown += 1
        return Noise(zlib.crc32(self._thrown.to_bytes(8, "little"), self._name))


class EncodedGather:
    """Every rank's shard into one buffer, in blocks that all ranks decode alike, the shard's owner too."""

    def __init__(self, gather: Gather, codec: Codec) -> None:
        self.codec = codec
        self._gather = gather

    def message_bytes(self, numel: int) -> int:
        """Bytes of all messages by which a buffer of ``numel`` elements is gathered."""
        return self._gather.world * self.codec.message_bytes(numel // self._gather.world)

    def sent_bytes(self, messages: Tensor) -> int:
        """Bytes that this rank sends, one copy of its message for each other rank."""
        return self._gather.sent_bytes(messages)

    def send(self, messages: Tensor, shard: Tensor, asynchronous: bool) -> Works:
        """Fill ``messages`` with every rank's ``shard`` (n), encoded."""
        own = messages.view(self._gather.world, -1)[self._gather.rank]
        kernels.encode(self.codec, shard.unsqueeze(0), own.unsqueeze(0))
        return self._gather.send(messages, own, asynchronous)

    def finish(self, messages: Tensor, whole: Tensor) -> None:
        """Fill ``whole`` (world × n), of any floating-point dtype, with what ``messages`` say."""
        world = self._gather.world
        kernels.decode(self.codec, messages.view(world, -1), whole.view(world, -1))


def counts_of(starts: Sequence[tuple[int, int]], numel: int, block: int, device: torch.device) -> Tensor | None:
    """How many elements of the ranges ``starts`` (start, end) each block has, [blocks] int32; None: each is full.

    Every range begins at a block of its own.
    """
    blocks = torch.arange(0, numel, block)
    counts = torch.zeros_like(blocks)
    for start, end in starts:
        inside = (blocks >= start) & (blocks < end)
        counts += inside * (end - blocks).clamp(max=block)
    return None if bool((counts == block).all()) else counts.to(torch.int32).to(device)
