"""The mean over ranks of a whole buffer, the same bits on all of them, encoded on the way there and on the way back.

    worker w    m_w + e_w   | 0 | 1 | 2 |     one message for each owner of a chunk, its own too; e_w: what is left
                              ▼   ▼   ▼
    owner of 1         mean of messages + e_s    one message for all; e_s: what is left
                              ▼   ▼   ▼
    every rank  mean        | 0 | 1 | 2 |     decoded from the same bytes

Both errors are those of Tang et al., "1-bit Adam", 2021, algorithm 1. Summed over calls, the means fall short of exact
ones by the mean over workers of e_w, and e_s: less than a call's worth, whatever the codec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.encoded import counts_of
from yafsdp_cc.wire.exchange import Gather
from yafsdp_cc.wire.feedback import Residual

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from yafsdp_cc.wire.codec import Codec


class EncodedMean:
    """Means of buffers of one size.

    Args:
        group: the ranks.
        device: of the buffers.
        codec: of the messages, both ways.
        numel: elements of a buffer, a multiple of the ranks times the codec's block.
        places: ranges of it (start, end) in order, each from a block of its own on; it is zero between them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        codec: Codec,
        numel: int,
        places: Sequence[tuple[int, int]],
    ) -> None:
        self.world: int = group.size()
        self.rank: int = group.rank()
        self.chunk = numel // self.world
        self.worker = Residual(self.world, self.chunk, torch.float32, codec.block, device)
        """[world, chunk], what this rank has still to say to the owner of each chunk."""
        self.server = Residual(1, self.chunk, torch.float32, codec.block, device)
        """[1, chunk], what this rank has still to say of the mean of its own chunk."""
        self._group = group
        self._gather = Gather(group, device)
        self._codec = codec
        counts = counts_of(places, numel, codec.block, device)
        self._counts = None if counts is None else counts.view(self.world, -1)
        ends, starts = [0, *(end for _, end in places)], [*(start for start, _ in places), numel]
        self._gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        size = codec.message_bytes(self.chunk)
        self._sent = torch.zeros(self.world, size, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)
        self._total = torch.zeros(1, self.chunk, dtype=torch.float32, device=device)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to others in a call."""
        return 2 * (self.world - 1) * self._sent[0].nbytes

    @torch.no_grad()
    def average(self, whole: Tensor) -> None:
        """Overwrite ``whole`` [numel] fp32 with the mean, as far as it can be said. A collective."""
        chunks, codec, counts = whole.view(self.world, -1), self._codec, self._counts
        kernels.encode(codec, chunks, self._sent, counts=counts, residual=self.worker)
        dist.all_to_all_single(self._received.view(-1), self._sent.view(-1), group=self._group)
        # Not in parts, so that a codec without native kernels can do it too.
        kernels.decode_sum(codec, self._received, self.chunk, None, 0, self._total[0])
        self._total.div_(self.world)
        first = self.rank * self.chunk
        for start, end in self._gaps:  # decoded to what nobody has said
            if max(start, first) < min(end, first + self.chunk):
                self._total[0, max(start - first, 0) : end - first] = 0
        own = self._sent[self.rank : self.rank + 1]
        mine = None if counts is None else counts[self.rank : self.rank + 1]
        kernels.encode(codec, self._total, own, counts=mine, residual=self.server)
        for work in self._gather.send(self._sent.view(-1), own.view(-1), asynchronous=False):
            work.wait()
        kernels.decode(codec, self._sent, chunks)
        for start, end in self._gaps:
            whole[start:end].zero_()

    @torch.no_grad()
    def unsaid(self) -> Tensor:
        """[numel] fp32, by how much means have fallen short of exact ones, summed over calls. A collective."""
        left = self.worker.load()
        left[self.rank].add_(self.server.load()[0], alpha=self.world)
        dist.all_reduce(left, group=self._group)
        return left.view(-1).div_(self.world)

    def owe(self, unsaid: Tensor) -> None:
        """Have every rank say ``unsaid`` [numel], the same on all of them, and nothing else that was left before."""
        self.server.clear()
        self.worker.store(unsaid.view(self.world, -1))
