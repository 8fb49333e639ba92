"""How weights that several ranks keep follow their shards: each owner says what has changed, encoded.

    owner of a chunk    shard − its chunk of the kept weights ── encode ──► message
    who keeps it        kept weights + what the message says                (the owner, too)

What a message could not say is in the next difference: the kept weights are the memory of error feedback themselves
(Richtárik et al., "EF21", 2021, algorithm 2), rounding to their own dtype included. All add the same numbers to the
same numbers, so what they keep is equal to the bit.

A chunk is said in parts, each a message of its own, so that the room for a difference is bounded:

    message of one rank    | part 0 | part 1 | ... |        each of ``part_of`` elements, the last of what is left
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.encoded import counts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yafsdp_cc.wire.codec import Codec
    from yafsdp_cc.wire.exchange import Gather, Works
    from yafsdp_cc.wire.shortfall import Shortfall


def part_of(device: torch.device) -> int:
    """Elements of a part: what stays in a processor's cache, or is worth a kernel's launch."""
    return kernels.PART * (16 if device.type == "cuda" else 1)


class Room:
    """For one part's difference, which is made and used at once."""

    def __init__(self, device: torch.device) -> None:
        self.part = part_of(device)
        self._difference = torch.empty(0, dtype=torch.float32, device=device)
        self._cast = torch.empty(0, dtype=torch.float32, device=device)

    def reserve(self, chunk: int, dtype: torch.dtype) -> None:
        """Make room for chunks of so many elements of ``dtype``. Grows, never shrinks."""
        count = min(self.part, chunk)
        if count > self._difference.numel():
            self._difference = self._difference.new_empty(count)
        if dtype != torch.float32 and count > self._cast.numel():
            self._cast = self._cast.new_empty(count)

    def difference(self, count: int) -> Tensor:
        """``count`` elements of fp32."""
        return self._difference.narrow(0, 0, count)

    def in_fp32(self, kept: Tensor) -> Tensor:
        """``kept``, cast by hand: a mixed operation would allocate."""
        if kept.dtype == torch.float32:
            return kept
        return self._cast.narrow(0, 0, kept.numel()).copy_(kept)

    @property
    def owned_bytes(self) -> int:
        return self._difference.nbytes + self._cast.nbytes


class EncodedChange:
    """Changes of weights by messages of ``codec``, for buffers of any size, one after the other.

    Args:
        gather: among ranks that keep the same.
        codec: of messages.
        device: of the kept weights.
    """

    def __init__(self, gather: Gather, codec: Codec, device: torch.device) -> None:
        self.gather = gather
        self.codec = codec
        self.room = Room(device)

    def message_bytes(self, numel: int) -> int:
        """Bytes of all messages that say the change of a buffer of ``numel`` elements."""
        return self.gather.world * sum(size for *_, size in self._parts(numel // self.gather.world))

    def sent_bytes(self, messages: Tensor) -> int:
        """Bytes that this rank sends, one copy of its message for each other rank."""
        return self.gather.sent_bytes(messages)

    def send(
        self,
        messages: Tensor,
        whole: Tensor,
        shard: Tensor,
        padding: Padding,
        gather: Gather,
        shortfall: Shortfall | None,
        asynchronous: bool,
    ) -> Works:
        """Fill ``messages`` with what every rank's ``shard`` (n) has and ``whole`` (world × n) has not.

        Args:
            messages: of all ranks among whom this is.
            whole: the weights that they keep, alike.
            shard: floating-point, wherever ``gather`` can bring it from.
            padding: of this rank's chunk.
            gather: of the unit that the shard is of.
            shortfall: takes in what the messages leave unsaid, if somebody wants to know.
            asynchronous: as of ``Gather.exchange``.
        """
        own = messages.view(self.gather.world, -1)[self.gather.rank]
        kept = self.gather.own(whole)
        for start, count, at, size in self._parts(shard.numel()):
            difference = self.room.difference(count)
            gather.bring(difference, shard.narrow(0, start, count))
            difference.sub_(self.room.in_fp32(kept.narrow(0, start, count)))
            for first, last in padding.within(start, start + count):
                difference.narrow(0, first, last - first).zero_()
            counts = padding.counts_of(start, count, self.codec.block)
            message = own.narrow(0, at, size).unsqueeze(0)
            kernels.encode(self.codec, difference.unsqueeze(0), message, counts=counts)
            if shortfall is not None:
                kernels.decode(self.codec, message, said := torch.empty_like(difference).unsqueeze(0))
                shortfall.add(difference - said[0], difference, said[0])
        return self.gather.exchange(messages, own, asynchronous)

    def finish(self, messages: Tensor, whole: Tensor) -> None:
        """Add what ``messages`` say to the kept weights ``whole``."""
        world = self.gather.world
        for message, chunk in zip(messages.view(world, -1), whole.view(world, -1), strict=True):
            for start, count, at, size in self._parts(chunk.numel()):
                kept, said = chunk.narrow(0, start, count), message.narrow(0, at, size).unsqueeze(0)
                in_place = kept.is_cpu and kept.dtype == torch.float32
                fresh = kept if in_place else self.room.difference(count)
                kernels.decode_sum(self.codec, said, count, kept, 0, fresh)
                if not in_place:
                    kept.copy_(fresh)

    def _parts(self, chunk: int) -> Iterator[tuple[int, int, int, int]]:
        """Of a chunk: where each part begins and its elements, where its message begins and its bytes."""
        at = 0
        for start in range(0, chunk, self.room.part):
            count = min(self.room.part, chunk - start)
            size = self.codec.message_bytes(count)
            yield start, count, at, size
            at += size


class Padding:
    """Elements of one rank's chunk that belong to no parameter: nothing is said of them.

    Args:
        extents: of the parameters in the whole buffer, half-open ranges in order.
        chunk: elements of each rank's part of the buffer.
        world, rank: of this rank, among those that the buffer is cut across.
        block: of the codec.
        device: of the buffer.
    """

    def __init__(
        self, extents: Sequence[tuple[int, int]], chunk: int, world: int, rank: int, block: int, device: torch.device
    ) -> None:
        numel, origin = chunk * world, rank * chunk
        gaps = zip([0, *(end for _, end in extents)], [*(start for start, _ in extents), numel], strict=True)
        inside = ((max(first - origin, 0), min(last - origin, chunk)) for first, last in gaps)
        self._gaps = [(first, last) for first, last in inside if first < last]
        counts = counts_of(extents, numel, block, device)
        self._counts = None if counts is None else counts.view(world, -1)[rank : rank + 1]

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The gaps within elements ``start`` to ``end``, counted from there."""
        for first, last in self._gaps:
            if first < end and last > start:
                yield max(first, start) - start, min(last, end) - start

    def counts_of(self, start: int, count: int, block: int) -> Tensor | None:
        """[1, blocks] how many elements the blocks of a part have; None: each is full."""
        return None if self._counts is None else self._counts.narrow(1, start // block, count // block)
