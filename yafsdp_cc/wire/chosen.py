"""A sum of chunks that is exact, or encoded by one of several codecs, as is chosen between steps.

Residuals know of no codec, so from one to another there is nothing to do. Where sums are to be exact again, what is
still to be said goes to the owners at once, who add it to the next sum: Σ said = Σ gradients holds then and there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.encoded import Dice, EncodedReduce

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
            self._use(codec)
            post.reserve(self.room, self._step)

    def encode_by(self, codec: Codec, residual: Residual | None) -> None:
        """Encode from now on, and keep what is not said in ``residual``; None: it is lost."""
        self._use(codec)
        self.residual, self.is_exact = residual, False
        self._noise = self._dice if residual is None and codec.rounds_randomly else None

    def be_exact(self) -> None:
        """Sum exactly from now on, and let the residual go. A collective."""
        if not self.is_exact and self.residual is not None and self._peers:
            self._hand_over(self.residual)
        self.residual, self.is_exact = None, True

    def _use(self, codec: Codec) -> None:
        self.codec = codec
        self._message_bytes = codec.message_bytes(self.chunk)
        self._step = min(kernels.PART, self.chunk) if kernels.is_native(codec, self._post.device) else self.chunk

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
        return self._exact_bytes if self.is_exact else super().payload

    def sent_bytes(self, whole: Tensor | None = None) -> int:
        if self.is_exact:
            return self._exact_bytes // self._post.world * (self._post.world - 1)
        return super().sent_bytes(whole)

    def said_by(self, codec: Codec | None) -> int:
        """Bytes that this rank would send if it were this codec, or exact."""
        peers = len(self._peers)
        return (
            self._exact_bytes // self._post.world * peers if codec is None else codec.message_bytes(self.chunk) * peers
        )

    @property
    def accumulates(self) -> bool:
        return not self.is_exact and super().accumulates

    def send(self, whole: Tensor, asynchronous: bool) -> Works:
        return self._exact.send(whole, asynchronous) if self.is_exact else super().send(whole, asynchronous)

    def totals(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        if not self.is_exact:
            yield from super().totals(whole)
            return
        for start, total in self._exact.totals(whole):
            if self.owed is not None:
                total.add_(self.owed.narrow(0, start, total.numel()))
            yield start, total
        self.owed = None
