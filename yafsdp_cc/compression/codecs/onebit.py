"""``onebit``: the sign, scale = the block's mean magnitude, which no other scale brings nearer in squared distance.

    scales   4 bytes for each block
    payload  bit j of byte i: sign bit of element 8i + j, 1 for negative ones and -0.0

(The minimum: ‖x − s·sgn x‖² is least at s = ‖x‖₁/n, for every x. Seide et al., "1-Bit Stochastic Gradient Descent",
2014, have two means for each column.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from yafsdp_cc.compression.codec import Noise, Scaled, block_sum, mark_nonfinite, sizes


class OneBit(Scaled):
    name = "onebit"
    needs_feedback = True

    def payload_bytes(self, n: int) -> int:
        return n // 8

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        scales, payload = self.parts(message, values.shape[1])
        blocks = self.blocks(values)
        scale, negative = mark_nonfinite(block_sum(blocks.abs()) / sizes(blocks, counts), blocks.signbit())
        scales.copy_(scale)
        bits = negative.flatten(1).unflatten(1, (-1, 8)).to(torch.uint8)
        payload.copy_((bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1))

    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, payload = self.parts(message, values.shape[1])
        bits = payload.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=payload.device) & 1
        negative = self.blocks(bits.flatten(1).bool())
        scale = scales.unsqueeze(-1)
        self.blocks(values).copy_(torch.where(negative, -scale, scale))
