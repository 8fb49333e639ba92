"""How gradients of low rank cross ranks: one all-reduce of the factors of all matrices of a buffer (``wire.lowrank``).

    gradients + residual ──► P (or Q) of each matrix, and the rest ── all-reduce ──► sum
                                                                                     │
    rank 0: own chunk, exact, and what the sum less its own message says of that chunk

Over replicas, whose sums have to be alike, nothing stays exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import AllreduceOptions

from yafsdp_cc.wire.chunks import ChunkSum
from yafsdp_cc.wire.exchange import works_of
from yafsdp_cc.wire.feedback import CLASSIC, Recursion, Residual
from yafsdp_cc.wire.shared import SharedSum
from yafsdp_cc.wire.shortfall import Shortfall

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.wire.exchange import Works
    from yafsdp_cc.wire.lowrank import LowRank
    from yafsdp_cc.wire.post import Post


def sent_bytes(numel: int, world: int) -> int:
    """Bytes that a rank sends to sum so many numbers: they are cut among the ranks, summed and put together again."""
    return 8 * numel * (world - 1) // world


class FactoredReduce(ChunkSum):
    """A sum of chunks from factors that all ranks sum together.

    Args:
        post, numel, residual, recursion: as of ``ChunkSum``.
        lowrank: of the whole buffer.
    """

    def __init__(
        self, post: Post, lowrank: LowRank, numel: int, residual: Residual, recursion: Recursion = CLASSIC
    ) -> None:
        super().__init__(post, numel, residual, recursion, numel // post.world)
        self.lowrank = lowrank
        self._kept = residual
        self._numel = numel
        self._is_said = torch.empty(post.world, self.chunk // residual.block, dtype=torch.bool, device=post.device)
        post.reserve(0, self.chunk)
        post.reserve_whole(numel, max(lowrank.numel(False), lowrank.numel(True)))

    @property
    def owned_bytes(self) -> int:
        return super().owned_bytes + self.lowrank.factors.nbytes + self._is_said.nbytes

    @property
    def payload(self) -> int:
        return 4 * self.lowrank.numel(self.lowrank.sends_right)

    def sent_bytes(self, whole: Tensor | None = None) -> int:
        return sent_bytes(self.lowrank.numel(self.lowrank.sends_right), self._post.world)

    def planned_bytes(self) -> int:
        return sum(sent_bytes(self.lowrank.numel(is_right), self._post.world) for is_right in (False, True)) // 2

    def watch(self) -> Shortfall:
        self.shortfall = Shortfall(
            self._post.device, self.lowrank.numel(self.lowrank.sends_right) / self._numel, self._recursion
        )
        return self.shortfall

    def _send(self, whole: Tensor, asynchronous: bool) -> Works:
        message = self._post.said(self.payload // 4)
        due = self._post.due(self._numel).copy_(whole)
        stretches = self._stretches(due)
        for first, chunks in stretches:
            chunks.add_(self._kept.rows(first, first + len(chunks)).load(), alpha=self._recursion.carry)
        self.lowrank.say(due, message)
        if self._recursion.carry != 1:
            for first, chunks in stretches:
                chunks.add_(self._kept.rows(first, first + len(chunks)).load(), alpha=1 - self._recursion.carry)
        said, before = self._is_said, None if self.shortfall is None else due.clone()
        self.lowrank.relieve(due, message, self._recursion.taken, said.view(-1), self._kept.block)
        for (first, chunks), (_, those) in zip(stretches, self._stretches(said.view(-1)), strict=True):
            self._kept.rows(first, first + len(chunks)).store(chunks, those)
        if self.shortfall is not None and before is not None:
            for (_, left), (_, was) in zip(stretches, self._stretches(before), strict=True):
                self.shortfall.add(*_shares(left, was, self._recursion))
        return self._post.sum(len(message), asynchronous)

    def forget(self) -> None:
        super().forget()
        self.lowrank.restart()  # some ranks may have made the next factors already

    def _sum(self, mine: Tensor, start: int, total: Tensor) -> None:
        size = self.payload // 4
        others = self._post.said(size).neg_().add_(self._post.summed(size))
        total.copy_(mine)
        self.lowrank.add(others, total, self._post.rank * self.chunk + start)
        self.lowrank.turn(self._post.summed(size))


class FactoredSum(SharedSum):
    """A sum over ranks of which all get all, from factors that they sum together.

    Args:
        group, device, numel, residual, recursion: as of ``SharedSum``.
        lowrank: of the buffer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        lowrank: LowRank,
        numel: int,
        residual: Residual,
        recursion: Recursion = CLASSIC,
    ) -> None:
        super().__init__(group, device, numel, residual, recursion)
        self.lowrank = lowrank
        self._kept = residual
        self._is_said = torch.empty(1, numel // residual.block, dtype=torch.bool, device=device)
        self._message = torch.empty(max(lowrank.numel(False), lowrank.numel(True)), device=device)
        self._options = AllreduceOptions()

    @property
    def owned_bytes(self) -> int:
        return super().owned_bytes + self._message.nbytes + self.lowrank.factors.nbytes + self._is_said.nbytes

    def sent_bytes(self) -> int:
        return sent_bytes(self.lowrank.numel(self.lowrank.sends_right), self.world)

    def planned_bytes(self) -> int:
        return sum(sent_bytes(self.lowrank.numel(is_right), self.world) for is_right in (False, True)) // 2

    def watch(self) -> Shortfall:
        self.shortfall = Shortfall(
            self._device, self.lowrank.numel(self.lowrank.sends_right) / self._numel, self._recursion
        )
        return self.shortfall

    def send(self, total: Tensor, asynchronous: bool) -> Works:
        message = self._said()
        due = total.to(torch.float32).unsqueeze(0)  # fp32, as it nearly always is, is used up in place
        due.add_(self._kept.load(), alpha=self._recursion.carry)
        self.lowrank.say(due[0], message)
        if self._recursion.carry != 1:
            due.add_(self._kept.load(), alpha=1 - self._recursion.carry)
        before = None if self.shortfall is None else due.clone()
        self.lowrank.relieve(due[0], message, self._recursion.taken, self._is_said[0], self._kept.block)
        self._kept.store(due, self._is_said)
        if self.shortfall is not None and before is not None:
            self.shortfall.add(*_shares(due[0], before[0], self._recursion))
        self._options.asyncOp = asynchronous
        return works_of(self.group.allreduce([message], self._options))

    def forget(self) -> None:
        self.lowrank.restart()

    def _sum(self, total: Tensor) -> None:
        summed = total.to(torch.float32).zero_()
        self.lowrank.add(self._said(), summed, 0)
        total.copy_(summed)
        self.lowrank.turn(self._said())

    def _said(self) -> Tensor:
        return self._message[: self.lowrank.numel(self.lowrank.sends_right)]


def _shares(left: Tensor, due: Tensor, recursion: Recursion) -> tuple[Tensor, Tensor, Tensor]:
    """h − D(m), h and D(m), where E = h − a·D(m) is ``left`` of what was ``due``."""
    said = (due - left) / recursion.taken
    return due - said, due, said
