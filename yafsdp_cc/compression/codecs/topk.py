"""``topk``: the largest hundredth of each tile of 65,536 elements, by position and value; the rest is zero.

    payload  for each tile k = a hundredth of its elements, rounded up:
             2k bytes: positions within the tile, ascending, unsigned
             2k bytes: values, bf16, rounded to nearest even, of zeros the positive one

Magnitudes are compared by the exponent and the upper three bits of the mantissa; of those alike in these, the first
ones in the tile are taken. So one count of 2,048 buckets finds the threshold. A tile with something in it that is not
finite, or might not be once it is rounded (from 1.875 · 2¹²⁷ on: the last bucket of finite numbers), has NaN at its
first k positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yafsdp_cc.compression.codec import Codec, Noise

_TILE = 65_536
_SHARE = 100
_BUCKETS, _SHIFT = 2_048, 20
_TOO_LARGE = 2_039
"""The last bucket of finite numbers."""


class TopK(Codec):
    name = "topk"
    needs_feedback = True

    def tiles(self, n: int) -> list[tuple[int, int, int, int]]:
        """Return for each tile: its first element, its end, how many of it are kept, and the byte where it begins."""
        found, byte = [], 0
        for start in range(0, n, _TILE):
            end = min(start + _TILE, n)
            kept = -(-(end - start) // _SHARE)
            found.append((start, end, kept, byte))
            byte += 4 * kept
        return found

    def body_bytes(self, n: int) -> int:
        return sum(4 * kept for _, _, kept, _ in self.tiles(n))

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        for start, end, kept, byte in self.tiles(values.shape[1]):
            positions, numbers = self._places(message, kept, byte)
            for row in range(values.shape[0]):
                tile = values[row, start:end]
                buckets = _buckets(tile)
                if int(buckets.max()) < _TOO_LARGE:
                    chosen = _largest(buckets, kept)
                    positions[row].copy_(chosen.to(torch.int32).to(torch.uint16))
                    # -0.0 becomes 0.0: a sum must not depend on whether a message holds an element that is zero.
                    numbers[row].copy_(tile[chosen]).add_(0.0)
                else:
                    positions[row].copy_(torch.arange(kept, dtype=torch.int32).to(torch.uint16))
                    numbers[row].fill_(float("nan"))

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.zero_()
        for start, end, kept, byte in self.tiles(values.shape[1]):
            positions, numbers = self._places(message, kept, byte)
            values[:, start:end].scatter_(1, positions.to(torch.int64), numbers.to(torch.float32))

    def is_finite(self, message: Tensor, n: int) -> Tensor:
        finite = torch.empty(message.shape[0], n // self.block, dtype=torch.bool, device=message.device)
        for start, end, kept, byte in self.tiles(n):
            _, numbers = self._places(message, kept, byte)
            finite[:, start // self.block : end // self.block] = numbers[:, :1].isnan().logical_not_()
        return finite

    @staticmethod
    def _places(message: Tensor, kept: int, byte: int) -> tuple[Tensor, Tensor]:
        middle, end = byte + 2 * kept, byte + 4 * kept
        return message[:, byte:middle].view(torch.uint16), message[:, middle:end].view(torch.bfloat16)


def _buckets(tile: Tensor) -> Tensor:
    """Return the exponent and three bits of the mantissa."""
    return tile.view(torch.int32).bitwise_and(0x7FFFFFFF) >> _SHIFT


def _largest(bucket: Tensor, kept: int) -> Tensor:
    """Return the positions of the ``kept`` largest elements, ascending."""
    of_each = torch.bincount(bucket, minlength=_BUCKETS)
    above = of_each.flip(0).cumsum(0).flip(0)  # how many are in this bucket or in a higher one
    threshold = int((above >= kept).nonzero()[-1])
    larger, alike = bucket > threshold, bucket == threshold
    room = kept - int(larger.sum())
    return (larger | (alike & (alike.cumsum(0) <= room))).nonzero().squeeze(1)
