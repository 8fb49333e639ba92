"""A sum of chunks that is exact, or encoded by one of several codecs, as is chosen between steps.

Messages to ranks that are near may have codecs of their own. Both ends of a pair choose the same, so that each knows
what it is sent.

Residuals know of no codec, so from one to another there is nothing to do. Where sums are to be exact again, what is
still to be said goes to the owners at once, who add it to the next sum: Σ said = Σ gradients holds then and there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.batch import batches_of
from yafsdp_cc.wire.encoded import Dice, EncodedReduce

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from yafsdp_cc.wire.codec import Codec
    from yafsdp_cc.wire.exchange import Reduce, Works
    from yafsdp_cc.wire.feedback import Recursion, Residual
    from yafsdp_cc.wire.post import Post


class ChosenReduce(EncodedReduce):
    """At first exact.

    Args:
        post, numel, counts, name, recursion: as of ``EncodedReduce``.
        exact: has room for buffers of ``numel``.
        codecs: those that may be chosen; there is room for the messages of each from the start.
        wire: the dtype of what is summed exactly.
    """

    def __init__(
        self,
        post: Post,
        exact: Reduce,
        codecs: Sequence[Codec],
        numel: int,
        wire: torch.dtype,
        counts: Tensor | None,
        name: str,
        recursion: Recursion,
    ) -> None:
        super().__init__(post, codecs[0], numel, counts, None, name, recursion)
        self.is_exact = True
        self._exact = exact
        self._exact_bytes = numel * wire.itemsize
        self._dice = Dice(f"{name}/{post.rank}")
        self._block = codecs[0].block
        self.room = max(4 * self._block, *(codec.message_bytes(self.chunk) for codec in codecs))
        """Bytes that a message may have."""
        for codec in codecs:
            self._use(codec, {})
            post.reserve(self.room, self._step)

    def encode_by(self, codec: Codec, residual: Residual | None, near: Mapping[int, Codec]) -> None:
        """Encode from now on, and keep what is not said in ``residual``; None: it is lost.

        Messages to the ranks of ``near`` have those codecs, and there is room for them afterwards.
        """
        self._use(codec, near)
        self.residual, self.is_exact = residual, False
        self._noise = self._dice if residual is None else None
        if near:
            self._post.reserve(-(-sum(self._sizes) // len(self._peers)), self._step)

    def be_exact(self) -> None:
        """Sum exactly from now on, and let the residual go. A collective."""
        if not self.is_exact and self.residual is not None and self._peers:
            self._hand_over(self.residual)
        self.residual, self.is_exact = None, True

    def _use(self, codec: Codec, near: Mapping[int, Codec]) -> None:
        self.codec = codec
        self._message_bytes = codec.message_bytes(self.chunk)
        codecs = [near.get(rank, codec) for rank in self._peers]
        self._sizes = [each.message_bytes(self.chunk) for each in codecs]
        self._batches = batches_of(codecs, self._post.rank, self.chunk) if near else []
        is_native = all(kernels.is_native(each, self._post.device) for each in (codec, *near.values()))
        self._step = min(kernels.PART, self.chunk) if is_native else self.chunk

    @torch.no_grad()
    def _hand_over(self, residual: Residual) -> None:
        """Have the owners add what the residual holds to the next sum, through messages of the usual size."""
        if self.owed is None:
            self.owed = torch.zeros(self.chunk, dtype=torch.float32, device=self._post.device)
        room = self.room // 4 // self._block * self._block
        for start in range(0, self.chunk, room):
            end = min(start + room, self.chunk)
            size = 4 * (end - start)
            self._post.sent(size).view(torch.float32).copy_(residual.columns(start, end).load())
            for work in self._post.exchange(size, asynchronous=False):
                work.wait()
            for each in self._post.received(size).view(torch.float32):
                self.owed[start:end].add_(each)

    @property
    def device(self) -> torch.device:
        return self._post.device

    @property
    def peers(self) -> int:
        """Messages of each sum."""
        return len(self._peers)

    @property
    def payload(self) -> int:
        return self._exact_bytes if self.is_exact else sum(self._sizes) + self._message_bytes

    def sent_bytes(self, whole: Tensor | None = None) -> int:
        if self.is_exact:
            return self._exact_bytes // self._post.world * (self._post.world - 1)
        return sum(self._sizes)

    def said_by(self, codec: Codec | None) -> int:
        """Bytes that this rank would send if it were this codec to all, or exact."""
        peers = len(self._peers)
        return (
            self._exact_bytes // self._post.world * peers if codec is None else codec.message_bytes(self.chunk) * peers
        )

    @property
    def accumulates(self) -> bool:
        return not self.is_exact and super().accumulates

    def send(self, whole: Tensor, asynchronous: bool) -> Works:
        return self._exact.send(whole, asynchronous) if self.is_exact else super().send(whole, asynchronous)

    def _send(self, whole: Tensor, asynchronous: bool) -> Works:
        if not self._batches:
            return super()._send(whole, asynchronous)
        noise = None if self._noise is None else self._noise.throw()
        chunks = whole.view(self._post.world, -1)
        for batch in self._batches:
            messages = self._post.sent(batch.size, batch.start, batch.rows)
            self._encode(batch.codec, chunks[batch.rank : batch.rank + batch.rows], batch.row, messages, noise)
        return self._post.exchange(self._message_bytes, asynchronous, self._sizes)

    def _sum(self, mine: Tensor, start: int, total: Tensor) -> None:
        if not self._batches:
            super()._sum(mine, start, total)
        for batch in self._batches:  # its own first: each adds to what those before have made
            received = self._post.received(batch.size, batch.start, batch.rows)
            kernels.decode_sum(batch.codec, received, self.chunk, mine, 0, total, start)
            mine = total

    def totals(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        if not self.is_exact:
            yield from super().totals(whole)
            return
        for start, total in self._exact.totals(whole):
            if self.owed is not None:
                total.add_(self.owed.narrow(0, start, total.numel()))
            yield start, total
        self.owed = None
