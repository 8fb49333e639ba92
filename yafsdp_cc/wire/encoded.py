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
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.chunks import ChunkSum
from yafsdp_cc.wire.codec import Noise
from yafsdp_cc.wire.exchange import Gather
from yafsdp_cc.wire.feedback import CLASSIC, Recursion, Residual
from yafsdp_cc.wire.shared import SharedSum
from yafsdp_cc.wire.shortfall import Shortfall, said_of_noise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yafsdp_cc.wire.codec import Codec
    from yafsdp_cc.wire.exchange import Works
    from yafsdp_cc.wire.post import Post


class EncodedReduce(ChunkSum):
    """A sum of chunks from messages of ``codec``.

    Args:
        post, numel, residual, recursion: as of ``ChunkSum``. Without a residual, rounding is random where the codec can
            do that.
        codec: of the messages.
        counts: [world, blocks] int32, how many elements each block has; None: all.
        name: of the unit, for its random numbers.
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
        chunk = numel // post.world
        step = min(kernels.PART, chunk) if kernels.is_native(codec, post.device) else chunk
        super().__init__(post, numel, residual, recursion, step)
        self.codec = codec
        self._message_bytes = codec.message_bytes(chunk)
        self._counts = counts
        self._noise = Dice(f"{name}/{post.rank}") if residual is None and codec.rounds_randomly else None
        post.reserve(self._message_bytes, step)

    @property
    def payload(self) -> int:
        return self._message_bytes * self._post.world

    def sent_bytes(self, whole: Tensor | None = None) -> int:
        return self._message_bytes * len(self._peers)

    def watch(self) -> Shortfall:
        self.shortfall = Shortfall(self._post.device, said_of_noise(self.codec.name, self.codec.block), self._recursion)
        return self.shortfall

    def _send(self, whole: Tensor, asynchronous: bool) -> Works:
        messages = self._post.sent(self._message_bytes)
        noise = None if self._noise is None or not self.codec.rounds_randomly else self._noise.throw()
        for first, chunks in self._stretches(whole):
            last, rank = first + chunks.shape[0], self._peers[first]
            kernels.encode(
                self.codec,
                chunks,
                messages[first:last],
                counts=None if self._counts is None else self._counts[rank : rank + len(chunks)],
                residual=None if self.residual is None else self.residual.rows(first, last),
                recursion=self._recursion,
                noise=None if noise is None else noise._replace(first=rank * self.chunk),
            )
        if self.shortfall is not None and self.residual is not None:
            self.shortfall.look(self.codec, messages, self.residual)
        return self._post.exchange(self._message_bytes, asynchronous)

    def _sum(self, mine: Tensor, start: int, total: Tensor) -> None:
        received = self._post.received(self._message_bytes)
        kernels.decode_sum(self.codec, received, self.chunk, mine, self._post.rank, total, start)


class EncodedSum(SharedSum):
    """A sum over ranks of which all get all: each says its own to all others, and all decode the same messages.

    Args:
        group, device, numel, residual, recursion: as of ``SharedSum``.
        codec, counts, name: as of ``EncodedReduce``.
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
        super().__init__(group, device, numel, residual, recursion)
        self.codec = codec
        self._gather = Gather(group, device)
        self._counts = counts
        self._noise = Dice(f"{name}/{group.rank()}") if residual is None and codec.rounds_randomly else None
        self._messages = torch.zeros(self.world, codec.message_bytes(numel), dtype=torch.uint8, device=device)

    @property
    def owned_bytes(self) -> int:
        return super().owned_bytes + self._messages.nbytes

    def sent_bytes(self) -> int:
        """Bytes that this rank sends: its message, to every other."""
        return self._messages[0].nbytes * (self.world - 1)

    def watch(self) -> Shortfall:
        self.shortfall = Shortfall(self._device, said_of_noise(self.codec.name, self.codec.block), self._recursion)
        return self.shortfall

    def send(self, total: Tensor, asynchronous: bool) -> Works:
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
        if self.shortfall is not None and self.residual is not None:
            self.shortfall.look(self.codec, own.unsqueeze(0), self.residual)
        return self._gather.send(self._messages.view(-1), own, asynchronous)

    def forget(self) -> None:
        """Nothing: every message is by itself."""

    def _sum(self, total: Tensor) -> None:
        summed = total if total.dtype == torch.float32 else torch.empty_like(total, dtype=torch.float32)
        kernels.decode_sum(self.codec, self._messages, total.numel(), None, 0, summed)
        if summed is not total:
            total.copy_(summed)


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
