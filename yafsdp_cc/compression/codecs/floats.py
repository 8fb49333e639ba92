"""``fp32`` and ``bf16``: the numbers themselves, or rounded to nearest even.

byte 4i ... 4i + 3 (fp32), or 2i and 2i + 1 (bf16): element i; of all NaN the positive quiet one without a payload
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from yafsdp_cc.compression.codec import Codec, Noise


class _Float(Codec):
    dtype: ClassVar[torch.dtype]

    def body_bytes(self, n: int) -> int:
        return n * self.dtype.itemsize

    def _numbers(self, message: Tensor, n: int) -> Tensor:
        return message[:, : self.body_bytes(n)].view(self.dtype)

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        # Conversions disagree on what a NaN becomes, within one tensor too.
        self._numbers(message, values.shape[1]).copy_(values).masked_fill_(values.isnan(), float("nan"))

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(self._numbers(message, values.shape[1]))

    def is_finite(self, message: Tensor, n: int) -> Tensor:
        finite: Tensor = self._numbers(message, n).isfinite().unflatten(1, (-1, self.block)).all(-1)
        return finite


class FP32(_Float):
    name = "fp32"
    dtype = torch.float32


class BF16(_Float):
    name = "bf16"
    dtype = torch.bfloat16
