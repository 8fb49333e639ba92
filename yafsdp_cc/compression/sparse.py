"""A codec that keeps a few large elements in two bits each, for replicas that exchange rarely (``replicas.outer``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from yafsdp_cc.compression.codec import Codec, mark_nonfinite, split_bits, step_of

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.compression.codec import Noise

_SHARE = 64
"""Elements of a block for each element that is kept."""
_LEVELS = (0.92, 1.3)
"""Magnitudes of the two levels, divided by the mean magnitude of the kept elements."""


class TopK2Bit(Codec):
    """The largest 64th of each block, as its sign and one of two magnitudes; the rest is zero.

    A block of 4,096 takes 148 bytes, 0.036 for each element. The magnitudes are 0.92 and 1.3 times the mean magnitude m
    of the kept elements, which loses least of Laplacian numbers (1.2 % of their squares).

    For all blocks one after another, k = block / 64:

        4 bytes for each block:   m, fp32; NaN where something in the block is not finite
        2k bytes for each block:  positions within the block, ascending, unsigned; one repeated where others are zero
        k/4 bytes, at least 1:    two bits for each, as ``split_bits`` has them: 1 if negative, 2 if above 1.11 m

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025), section 3: top-k of blocks
    of 4,096, and 2 bits. The quantizer of the paper is another.
    """

    name = "topk2bit"
    needs_feedback = True

    def body_bytes(self, n: int) -> int:
        return n // self.block * sum(self._sizes())

    def _sizes(self) -> tuple[int, int, int]:
        kept = self.block // _SHARE
        return 4, 2 * kept, -(-kept // 4)

    def _parts(self, message: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return means [messages, blocks], positions [messages, blocks, k] and bits [messages, blocks, bytes]."""
        blocks = n // self.block
        sizes = [blocks * size for size in self._sizes()]
        means, places, bits = message[:, : sum(sizes)].split(sizes, 1)
        return (
            means.view(torch.float32),
            places.view(torch.uint16).unflatten(1, (blocks, -1)),
            bits.unflatten(1, (blocks, -1)),
        )

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        means, places, bits = self._parts(message, values.shape[1])
        blocks = self.blocks(values)
        kept = self.block // _SHARE
        chosen = blocks.abs().nan_to_num_(torch.inf, torch.inf).topk(kept, sorted=False).indices
        magnitudes = blocks.gather(-1, chosen).abs()
        is_zero = magnitudes == 0  # no level stands for zero: a zero's place repeats the largest element's position
        count = (kept - is_zero.sum(-1)).clamp_(min=1)
        mean, inverse = step_of(magnitudes.sum(-1) / count, 1.0)
        largest = chosen.gather(-1, magnitudes.argmax(-1, keepdim=True))
        chosen = torch.where(is_zero, largest, chosen).sort(-1).values
        found = blocks.gather(-1, chosen)
        magnitudes = found.abs()
        codes = found.signbit().to(torch.uint8) | (magnitudes * inverse.unsqueeze(-1) > sum(_LEVELS) / 2) << 1
        mean, codes = mark_nonfinite(mean, codes)
        means.copy_(mean)
        places.copy_(chosen.to(torch.int32).to(torch.uint16))
        room = functional.pad(codes, (0, -kept % 4))
        bits.copy_(split_bits(room, 2))

    def decode(self, message: Tensor, values: Tensor) -> None:
        means, places, bits = self._parts(message, values.shape[1])
        kept = self.block // _SHARE
        codes = torch.cat([bits >> 2 * k & 3 for k in range(4)], -1)[..., :kept]
        low, high = _LEVELS
        levels = torch.tensor([low, -low, high, -high], dtype=torch.float32, device=codes.device)
        blocks = self.blocks(values)
        found = values.new_zeros(*blocks.shape[:-1], self.block + 1)
        # positions beyond the block, in a damaged message, are dropped
        places = places.to(torch.int64).clamp_(max=self.block)
        blocks.copy_(found.scatter_(-1, places, levels[codes.to(torch.int64)] * means.unsqueeze(-1))[..., :-1])

    def is_finite(self, message: Tensor, n: int) -> Tensor:
        return self._parts(message, n)[0].isnan().logical_not_()
