"""``fp8``: e4m3 numbers of a block-wide scale, the block's largest magnitude / 448: finer near zero than ``int8``.

scales   4 bytes for each block
payload  byte i: element i as float8_e4m3fn, rounded to nearest even
"""

from __future__ import annotations

import torch
from torch import Tensor

from yafsdp_cc.compression.codec import Noise, Scaled, largest_of, mark_nonfinite, step_of


class FP8(Scaled):
    name = "fp8"

    def payload_bytes(self, n: int) -> int:
        return n

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        scales, payload = self.parts(message, values.shape[1])
        blocks = self.blocks(values)
        scale, inverse = step_of(largest_of(blocks), 448)
        scale, steps = mark_nonfinite(scale, blocks * inverse.unsqueeze(-1))
        scales.copy_(scale)
        payload.copy_(steps.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1))

    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, payload = self.parts(message, values.shape[1])
        steps = self.blocks(payload.view(torch.float8_e4m3fn).to(torch.float32))
        self.blocks(values).copy_(steps * scales.unsqueeze(-1))
