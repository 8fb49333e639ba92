"""A reduce-scatter that is exact, or encoded by one of several codecs; which one may change between steps.

Residuals do not depend on the codec, so they stay when one codec follows another. When sums become exact again, every
residual is sent at once to the ranks that it is for, which add it to their next sum: no gradient is lost.
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
    """A reduce-scatter whose codec can be changed; it starts exact.

    Args:
        post, numel, counts, name, recursion: as of ``EncodedReduce``.
        exact: the exact reduce-scatter, with buffers for ``numel`` elements.
        codecs: all that may be used later; buffers for the messages of each are reserved now.
        wire: dtype that exact sums are sent in.
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
        self.max_message_bytes = max(4 * self._block, *(codec.message_bytes(self.chunk) for codec in codecs))
        """Bytes that there are buffers for, for a message to each other rank."""
        for codec in codecs:
            self._use(codec)
            post.reserve(self.max_message_bytes, self._step)

    def encode_by(self, codec: Codec, residual: Residual | None) -> None:
        """Encode from now on; without a ``residual`` the error of a message is lost."""
        self._use(codec)
        self.residual, self.is_exact = residual, False
        self._noise = self._dice if residual is None else None

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
        """Add the residuals of all ranks to the next sum, by messages that fit in the buffers there are."""
        if self.owed is None:
            self.owed = torch.zeros(self.chunk, dtype=torch.float32, device=self._post.device)
        part = self.max_message_bytes // 4 // self._block * self._block
        for start in range(0, self.chunk, part):
            end = min(start + part, self.chunk)
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
        return self.bytes_with(None if self.is_exact else self.codec)

    def bytes_with(self, codec: Codec | None) -> int:
        """Bytes that this rank would send with this codec; None: exact."""
        each = self._exact_bytes // self._post.world if codec is None else codec.message_bytes(self.chunk)
        return each * self.peers

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
