"""``int8``: 255 levels from -scale·127 to scale·127, scale = the block's largest magnitude / 127.

scales   4 bytes for each block
payload  byte i: element i, two's complement, -127 ... 127
"""

from __future__ import annotations

import torch
from torch import Tensor

from yafsdp_cc.compression.codec import Noise, Scaled, largest_of, mark_nonfinite, step_of


class Int8(Scaled):
    name = "int8"
    rounds_randomly = True

    def payload_bytes(self, n: int) -> int:
        return n

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        scales, payload = self.parts(message, values.shape[1])
        scale, codes = whole_steps(self.blocks(values), 127, noise)
        scales.copy_(scale)
        payload.view(torch.int8).copy_(codes.flatten(1))

    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, payload = self.parts(message, values.shape[1])
        codes = self.blocks(payload.view(torch.int8))
        self.blocks(values).copy_(codes.to(torch.float32) * scales.unsqueeze(-1))


def whole_steps(blocks: Tensor, levels: int, noise: Noise | None) -> tuple[Tensor, Tensor]:
    """Return scales, and codes from ``-levels`` to ``levels``: the nearest, or with noise the next by chance."""
    scale, inverse = step_of(largest_of(blocks), levels)
    steps = blocks * inverse.unsqueeze(-1)
    steps = steps.round() if noise is None else (steps + noise.uniform(steps.shape, steps.device)).floor()
    return mark_nonfinite(scale, steps.nan_to_num_(0.0).clamp_(-levels, levels))
