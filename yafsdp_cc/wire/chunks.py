"""Sums of which every rank gets its own chunk, from messages that do not say all: what they still have to say.

gradients + residual ── message ──► other ranks        own chunk: exact, it never leaves
     │
     └──► what the message did not say, in the residual
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.wire import kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from yafsdp_cc.wire.exchange import Works
    from yafsdp_cc.wire.feedback import Recursion, Residual
    from yafsdp_cc.wire.momentum import Momentum
    from yafsdp_cc.wire.post import Post
    from yafsdp_cc.wire.shortfall import Shortfall


class ChunkSum(ABC):
    """Sums one flat buffer of ``world`` chunks, each at the owner of the chunk.

    ``send`` starts the exchange and ``totals`` ends it, as those of ``exchange.Reduce`` do.

    Args:
        post: shared by all that is exchanged one at a time.
        numel: elements of the buffer.
        residual: [peers, chunk], where what was not said is kept; None: it is lost.
        recursion: how the residual is carried.
        step: elements of the chunk that ``totals`` sums at once.
    """

    def __init__(self, post: Post, numel: int, residual: Residual | None, recursion: Recursion, step: int) -> None:
        self.chunk = numel // post.world
        self.residual = residual
        self.momentum: Momentum | None = None
        """Of the own chunk, where residuals are momentum too."""
        self.shortfall: Shortfall | None = None
        """Of messages, where somebody wants to know."""
        self._post = post
        self._recursion = recursion
        self._step = step
        self._peers = [rank for rank in range(post.world) if rank != post.rank]
        self._pending: Tensor | None = None
        """Of the own chunk, which has no residual: gradients that no sum has taken in yet."""
        self.owed: Tensor | None = None
        """[chunk], what is added to the next sum: what other ranks' residuals held in an earlier run."""
        self.kept: list[bool] | None = None
        """Of which parameters there are gradients that wait for the next ``send``; None: of none."""
        self._doubt: Tensor | None = None
        """NaN where some of these were not finite, and so are in no residual; else zero."""

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
    @abstractmethod
    def payload(self) -> int:
        """Bytes that would say the buffer to all ranks."""

    @abstractmethod
    def sent_bytes(self, whole: Tensor | None = None) -> int:
        """Bytes that this rank sends, whatever the message says."""

    @abstractmethod
    def watch(self) -> Shortfall:
        """Look at messages from the next one on, until ``shortfall`` is None again."""

    def planned_bytes(self) -> int:
        """Bytes that this rank sends in a step, on average."""
        return self.sent_bytes()

    def send(self, whole: Tensor, asynchronous: bool) -> Works:
        """Start the sum of ``whole`` (world × chunk); its own chunk must stay as it is until ``totals`` has run."""
        if not self._peers:
            return []
        if self.kept is not None and self._doubt is not None:
            whole.view(self._post.world, -1)[:, 0].add_(self._doubt)  # all ranks are to see it
        return self._send(whole, asynchronous)

    @abstractmethod
    def _send(self, whole: Tensor, asynchronous: bool) -> Works:
        """Write the messages, and start their exchange."""

    @abstractmethod
    def _sum(self, mine: Tensor, start: int, total: Tensor) -> None:
        """Fill ``total`` with the sum of ``mine``, this rank's elements from ``start`` of its chunk, and messages."""

    @property
    def accumulates(self) -> bool:
        """Whether the residual can take gradients in, for one message later."""
        return self.residual is not None and self._recursion.carry == 1

    def accumulate(self, whole: Tensor, used: list[bool]) -> None:
        """Take gradients of the parameters that are ``used`` in, to be summed with those of the next ``send``."""
        assert self.residual is not None
        for first, chunks in self._stretches(whole):
            kernels.accumulate(chunks, self.residual.rows(first, first + chunks.shape[0]))
        self._take_own(self._own(whole))
        doubt = whole.sum(dtype=torch.float32).mul_(0.0)
        if self.kept is None or self._doubt is None:
            self.kept, self._doubt = used, doubt
        else:
            self._doubt.add_(doubt)
            self.kept = [now or before for now, before in zip(used, self.kept, strict=True)]

    def _take_own(self, own: Tensor) -> None:
        if self.momentum is not None:
            self.momentum.take(own)
            return
        if self._pending is None:
            self._pending = torch.zeros(self.chunk, dtype=torch.float32, device=own.device)
        if self.kept is None:
            self._pending.copy_(own)
        else:
            self._pending.add_(own)

    @property
    def waiting(self) -> Tensor | None:
        """[chunk], what is in no residual and added to the next sum."""
        pending = None if self.kept is None else self._pending
        return self.owed if pending is None else pending if self.owed is None else pending + self.owed

    def unsaid(self) -> Tensor:
        """[world, chunk] fp32: what this rank has still to say to each, and of its own chunk to sum."""
        whole = torch.zeros(self._post.world, self.chunk, dtype=torch.float32, device=self._post.device)
        if self.residual is not None:
            whole[self._peers] = self.residual.load()
        if (own := self.waiting) is not None:
            whole[self._post.rank] += own
        return whole

    def forget(self) -> None:
        """Drop gradients that were taken in and are still to be summed; those in the residual stay."""
        self.kept = None

    def _own(self, whole: Tensor) -> Tensor:
        return whole.view(self._post.world, self.chunk)[self._post.rank]

    def _stretches(self, whole: Tensor) -> list[tuple[int, Tensor]]:
        """Chunks of other ranks [chunks, n], where their messages begin: those below, and those above."""
        rank, chunks = self._post.rank, whole.view(self._post.world, -1)
        return [(first, part) for first, part in ((0, chunks[:rank]), (rank, chunks[rank + 1 :])) if part.shape[0]]

    def totals(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The sum over ranks of this rank's chunk, fp32, in parts: where each begins, and the part.

        A part is overwritten by the next one.
        """
        own = self._own(whole)
        for start in range(0, self.chunk, self._step):
            total = self._post.total(min(self._step, self.chunk - start))
            mine = own.narrow(0, start, total.numel())
            if self._peers:
                self._sum(mine, start, total)
            else:
                total.copy_(mine)
            yield start, self._completed(start, total)
        if self.momentum is not None:
            self.momentum.decay(own)
        self.kept = self.owed = None

    def _completed(self, start: int, total: Tensor) -> Tensor:
        """With what only this rank knows of."""
        if self.kept is not None and self._pending is not None:
            total.add_(self._pending.narrow(0, start, total.numel()))
        if self.owed is not None:
            total.add_(self.owed.narrow(0, start, total.numel()))
        if self.momentum is not None:
            self.momentum.add_to(total, start)
        return total
