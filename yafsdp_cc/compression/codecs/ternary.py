"""``ternary``: -scale, 0 or scale.

To nearest: what is larger than 0.7 of the block's mean magnitude is kept, and the scale is the mean of what is kept (Li
et al., "Ternary Weight Networks", 2016, section 2.2). With noise: the scale is the largest magnitude, and an element is
kept as often as it is near it (Wen et al., "TernGrad", 2017, section 3.1).

    scales   4 bytes for each block
    payload  block bytes for each five blocks (the last five filled up with blocks of zeros): byte j is
             d0 + 3·d1 + 9·d2 + 27·d3 + 81·d4, where dk is element j of the k-th of the five, 0 for -scale, 1 for 0, 2
             for scale
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from yafsdp_cc.compression.codec import Noise, Scaled, block_sum, largest_of, mark_nonfinite, sizes

_FIVE = 5
_THRESHOLD = 0.7


class Ternary(Scaled):
    name = "ternary"
    rounds_randomly = True

    def payload_bytes(self, n: int) -> int:
        return -(-n // (_FIVE * self.block)) * self.block

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        scales, payload = self.parts(message, values.shape[1])
        blocks = self.blocks(values)
        scale, kept = self._kept(blocks, counts) if noise is None else self._drawn(blocks, noise)
        scale, digits = mark_nonfinite(scale, torch.where(blocks.signbit(), -1, 1).mul_(kept))
        scales.copy_(scale)
        spare = -digits.shape[1] % _FIVE
        fives = functional.pad(digits + 1, (0, 0, 0, spare), value=1).unflatten(1, (-1, _FIVE))
        weights = torch.tensor([1, 3, 9, 27, 81], device=fives.device).unsqueeze(-1)
        payload.copy_((fives * weights).sum(2).flatten(1))

    @staticmethod
    def _kept(blocks: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        magnitudes = blocks.abs()
        threshold = block_sum(magnitudes) / sizes(blocks, counts) * torch.tensor(_THRESHOLD, dtype=torch.float32)
        kept = magnitudes > threshold.unsqueeze(-1)
        total, count = block_sum(magnitudes * kept), kept.sum(-1).clamp(min=1).to(torch.float32)
        return torch.where(threshold.isfinite(), total / count, threshold), kept

    @staticmethod
    def _drawn(blocks: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        largest = largest_of(blocks)
        chance = blocks.abs() / largest.unsqueeze(-1)
        return largest, noise.uniform(blocks.shape, blocks.device) < chance

    def decode(self, message: Tensor, values: Tensor) -> None:
        n = values.shape[1]
        scales, payload = self.parts(message, n)
        digits = []
        rest = payload.unflatten(1, (-1, self.block)).to(torch.int32)
        for _ in range(_FIVE):
            digits.append(rest % 3 - 1)
            rest = rest // 3
        codes = torch.stack(digits, 2).flatten(1, 2)[:, : n // self.block]
        self.blocks(values).copy_(codes.to(torch.float32) * scales.unsqueeze(-1))
