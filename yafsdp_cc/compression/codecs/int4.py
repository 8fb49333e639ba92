"""``int4``: 15 levels from -scale·7 to scale·7, scale = the block's largest magnitude / 7.

scales   4 bytes for each block
payload  block / 2 bytes for each block; of its byte j the low four bits are element j, the high four element
         block / 2 + j, two's complement, -7 ... 7
"""

from __future__ import annotations

import torch
from torch import Tensor

from yafsdp_cc.compression.codec import Noise, Scaled
from yafsdp_cc.compression.codecs.int8 import whole_steps


class Int4(Scaled):
    name = "int4"
    rounds_randomly = True

    def payload_bytes(self, n: int) -> int:
        return n // 2

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        scales, payload = self.parts(message, values.shape[1])
        scale, codes = whole_steps(self.blocks(values), 7, noise)
        scales.copy_(scale)
        low, high = codes.to(torch.int8).view(torch.uint8).chunk(2, -1)
        payload.copy_((low & 15 | high << 4).flatten(1))

    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, payload = self.parts(message, values.shape[1])
        pairs = payload.unflatten(1, (-1, self.block // 2)).view(torch.int8)
        codes = torch.cat([pairs << 4 >> 4, pairs >> 4], -1)
        self.blocks(values).copy_(codes.to(torch.float32) * scales.unsqueeze(-1))
