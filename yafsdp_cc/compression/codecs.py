"""The built-in codecs, a class each, whose docstring gives the layout of its messages to the byte.

The codecs are plain torch, and define the bits that native kernels give. Scales precede each payload (``Scaled``).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from yafsdp_cc.compression.codec import (
    Codec,
    Noise,
    Scaled,
    block_sum,
    joined_bits,
    largest_of,
    mark_nonfinite,
    sizes,
    split_bits,
    step_of,
)


class _Whole(Scaled):
    """Each element as a whole number, -levels to levels, times the scale: the block's largest magnitude / levels.

    payload  each block's codes, two's complement, as ``split_bits`` divides them
    """

    bits: ClassVar[int]
    rounds_randomly = True

    def payload_bytes(self, n: int) -> int:
        return n * self.bits // 8

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        scales, payload = self.parts(message, values.shape[1])
        levels = 2 ** (self.bits - 1) - 1
        blocks = self.blocks(values)
        scale, inverse = step_of(largest_of(blocks), levels)
        steps = blocks * inverse.unsqueeze(-1)
        steps = steps.round() if noise is None else (steps + noise.uniform(steps.shape, steps.device)).floor()
        scale, codes = mark_nonfinite(scale, steps.nan_to_num_(0.0).clamp_(-levels, levels))
        scales.copy_(scale)
        payload.copy_(split_bits(codes.to(torch.int8).view(torch.uint8), self.bits).flatten(1))

    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, payload = self.parts(message, values.shape[1])
        codes = joined_bits(payload.unflatten(1, (scales.shape[1], -1)), self.bits).view(torch.int8)
        unused = 8 - self.bits
        codes = codes << unused >> unused  # extend the sign bit
        self.blocks(values).copy_(codes.to(torch.float32) * scales.unsqueeze(-1))


class Int8(_Whole):
    """Each element as one of 255 levels from -scale·127 to scale·127.

    payload  byte i: element i, two's complement, -127 ... 127
    """

    name = "int8"
    bits = 8


class Int6(_Whole):
    """Each element as one of 63 levels from -scale·31 to scale·31.

    payload  block · 6/8 bytes for each block: the codes' low four bits as those of ``int4``, then their high two as
             ``int2`` has them
    """

    name = "int6"
    bits = 6


class Int4(_Whole):
    """Each element as one of 15 levels from -scale·7 to scale·7.

    payload  block / 2 bytes for each block; of its byte j the low four bits are element j, the high four element
             block / 2 + j, two's complement, -7 ... 7
    """

    name = "int4"
    bits = 4


class _Odd(Scaled):
    """Each element as an odd multiple of the scale, one of 2 to the power of ``bits``, half of them below zero.

    Without noise (to nearest), the scale is the ``share`` of the block's mean magnitude that loses least of normally
    distributed numbers (Max, "Quantizing for Minimum Distortion", 1960, table II). With noise, the largest magnitude is
    the last level, and each element is rounded up or down at random, so that its mean is exact.

    payload  each block's codes as ``split_bits`` divides them, 0 for the lowest level
    """

    bits: ClassVar[int]
    share: ClassVar[float]
    """Ratio of scale to mean magnitude of a block: half of Max's step / 0.7979, the mean magnitude of normal noise."""
    rounds_randomly = True

    def payload_bytes(self, n: int) -> int:
        return n * self.bits // 8

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        scales, payload = self.parts(message, values.shape[1])
        blocks, last = self.blocks(values), 2**self.bits - 1
        if noise is None:
            scale, inverse = step_of(block_sum(blocks.abs()) / sizes(blocks, counts), 1 / self.share)
            codes = (blocks * inverse.unsqueeze(-1) * 0.5).floor() + (last + 1) // 2
        else:
            scale, inverse = step_of(largest_of(blocks), last)
            drawn = noise.uniform(blocks.shape, blocks.device)
            codes = (blocks * inverse.unsqueeze(-1) * 0.5 + last / 2 + drawn).floor()
        scale, codes = mark_nonfinite(scale, codes.nan_to_num_(0.0).clamp_(0, last))
        scales.copy_(scale)
        payload.copy_(split_bits(codes.to(torch.uint8), self.bits).flatten(1))

    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, payload = self.parts(message, values.shape[1])
        codes = joined_bits(payload.unflatten(1, (scales.shape[1], -1)), self.bits).to(torch.float32)
        self.blocks(values).copy_((codes * 2 - (2**self.bits - 1)) * scales.unsqueeze(-1))


class Int3(_Odd):
    """Each element as -7, -5, -3, -1, 1, 3, 5 or 7 times the scale.

    payload  block · 3/8 bytes for each block: the codes' low two bits as ``int2`` has them; then a byte for eight
             elements, in whose byte j bit k is the highest of element k · block / 8 + j
    """

    name = "int3"
    bits = 3
    share = 0.367


class Int2(_Odd):
    """Each element as -3, -1, 1 or 3 times the scale.

    payload  block / 4 bytes for each block; of its byte j the lowest two bits are element j, the next two element
             block / 4 + j, and so on: 0 for -3, 1 for -1, 2 for 1, 3 for 3
    """

    name = "int2"
    bits = 2
    share = 0.624


class FP8(Scaled):
    """Each element as an e4m3 number times the scale, the block's largest magnitude / 448: finer near 0 than ``int8``.

    payload  byte i: element i as float8_e4m3fn, rounded to nearest even
    """

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


class Ternary(Scaled):
    """Each element as one of the three levels -scale, 0 and scale.

    Without noise, elements above 0.7 of the block's mean magnitude are kept, and the scale is their mean magnitude (Li
    et al., "Ternary Weight Networks", 2016, section 2.2). With noise, the scale is the largest magnitude, and an
    element is kept with the probability magnitude / scale (Wen et al., "TernGrad", 2017, section 3.1).

    payload  block bytes for each five blocks (the last five filled up with blocks of zeros): byte j is
             d0 + 3·d1 + 9·d2 + 27·d3 + 81·d4, where dk is element j of the k-th of the five, 0 for -scale, 1 for 0, 2
             for scale
    """

    name = "ternary"
    rounds_randomly = True

    def payload_bytes(self, n: int) -> int:
        return -(-n // (5 * self.block)) * self.block

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        scales, payload = self.parts(message, values.shape[1])
        blocks = self.blocks(values)
        scale, kept = self._kept(blocks, counts) if noise is None else self._drawn(blocks, noise)
        scale, digits = mark_nonfinite(scale, torch.where(blocks.signbit(), -1, 1).mul_(kept))
        scales.copy_(scale)
        fives = functional.pad(digits + 1, (0, 0, 0, -digits.shape[1] % 5), value=1).unflatten(1, (-1, 5))
        weights = torch.tensor([1, 3, 9, 27, 81], device=fives.device).unsqueeze(-1)
        payload.copy_((fives * weights).sum(2).flatten(1))

    @staticmethod
    def _kept(blocks: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        magnitudes = blocks.abs()
        threshold = block_sum(magnitudes) / sizes(blocks, counts) * torch.tensor(0.7, dtype=torch.float32, device="cpu")
        kept = magnitudes > threshold.unsqueeze(-1)
        total, count = block_sum(magnitudes * kept), kept.sum(-1).clamp(min=1).to(torch.float32)
        return torch.where(threshold.isfinite(), total / count, threshold), kept

    @staticmethod
    def _drawn(blocks: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        largest = largest_of(blocks)
        chance = blocks.abs() / largest.unsqueeze(-1)
        return largest, noise.uniform(blocks.shape, blocks.device) < chance

    def decode(self, message: Tensor, values: Tensor) -> None:
        scales, payload = self.parts(message, values.shape[1])
        fives = payload.unflatten(1, (-1, 1, self.block)).to(torch.int32)
        powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32, device=fives.device).unsqueeze(-1)
        codes = (fives // powers % 3 - 1).flatten(1, 2)[:, : scales.shape[1]]
        self.blocks(values).copy_(codes.to(torch.float32) * scales.unsqueeze(-1))


class OneBit(Scaled):
    """The sign of each element; the scale is the block's mean magnitude, which minimizes the squared error.

    (‖x − s·sgn x‖² is least at s = ‖x‖₁/n, for every x. Seide et al., "1-Bit Stochastic Gradient Descent", 2014, have
    two means for each column.)

    payload  bit j of byte i: sign bit of element 8i + j, 1 for negative ones and -0.0
    """

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


class _Float(Codec):
    """The numbers unchanged (fp32) or rounded to nearest even (bf16), with one NaN: positive, quiet, without payload.

    byte 4i ... 4i + 3 (fp32), or 2i and 2i + 1 (bf16): element i
    """

    dtype: ClassVar[torch.dtype]

    def body_bytes(self, n: int) -> int:
        return n * self.dtype.itemsize

    def _numbers(self, message: Tensor, n: int) -> Tensor:
        return message[:, : self.body_bytes(n)].view(self.dtype)

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        # Write one NaN everywhere: conversions disagree on the bits of a NaN, even within one tensor.
        self._numbers(message, values.shape[1]).copy_(values).masked_fill_(values.isnan(), float("nan"))

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(self._numbers(message, values.shape[1]))

    def is_finite(self, message: Tensor, n: int) -> Tensor:
        return self.blocks(self._numbers(message, n).isfinite()).all(-1)


class FP32(_Float):
    name = "fp32"
    dtype = torch.float32


class BF16(_Float):
    name = "bf16"
    dtype = torch.bfloat16


_TILE = 65_536
_SHARE = 100
_BUCKETS, _SHIFT = 2_048, 20
_TOO_LARGE = 2_039
"""Index of the last of ``TopK``'s buckets that has finite magnitudes, which rounding to bf16 may make infinite."""


class TopK(Codec):
    """The largest hundredth of each tile of 65,536 elements, by position and value; the rest is zero.

    For each tile, k = a hundredth of its elements, rounded up:

        2k bytes: positions within the tile, ascending, unsigned
        2k bytes: values, bf16, rounded to nearest even, -0.0 as 0.0

    Magnitudes are compared by the exponent and the upper three bits of the mantissa, so that one count of 2,048 buckets
    finds the threshold; of equal ones the first in the tile are taken. A tile with an element that is not finite, or
    might not be after rounding (from 1.875 · 2¹²⁷ on: the last bucket of finite numbers), has NaN at its first k
    positions.
    """

    name = "topk"
    needs_feedback = True

    def tiles(self, n: int) -> list[tuple[int, int, int, int]]:
        """Return for each tile: its first element, its end, how many elements are kept, and its first message byte."""
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
                buckets = tile.view(torch.int32).bitwise_and(0x7FFFFFFF) >> _SHIFT
                if int(buckets.max()) < _TOO_LARGE:
                    chosen = _largest(buckets, kept)
                    positions[row].copy_(chosen.to(torch.int32).to(torch.uint16))
                    # -0.0 becomes 0.0: a sum must not depend on whether a message holds an element that is zero.
                    numbers[row].copy_(tile[chosen]).add_(0.0)
                else:
                    positions[row].copy_(torch.arange(kept, dtype=torch.int32, device=tile.device).to(torch.uint16))
                    numbers[row].fill_(float("nan"))

    def decode(self, message: Tensor, values: Tensor) -> None:
        for start, end, kept, byte in self.tiles(values.shape[1]):
            positions, numbers = self._places(message, kept, byte)
            # positions beyond the tile, in a damaged message, are dropped
            places = positions.to(torch.int64).clamp_(max=end - start)
            tile = values.new_zeros(len(values), end - start + 1).scatter_(1, places, numbers.to(torch.float32))
            values[:, start:end].copy_(tile[:, :-1])

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


def _largest(buckets: Tensor, kept: int) -> Tensor:
    """Return the positions of the ``kept`` elements in the highest buckets, ascending; in a tie the first ones."""
    of_each = torch.bincount(buckets, minlength=_BUCKETS)
    above = of_each.flip(0).cumsum(0).flip(0)  # number of elements in this bucket or in one of larger values
    threshold = int((above >= kept).nonzero()[-1])
    larger, alike = buckets > threshold, buckets == threshold
    room = kept - int(larger.sum())
    return (larger | (alike & (alike.cumsum(0) <= room))).nonzero().squeeze(1)


_KEPT_OF = 64
"""Number of a block's elements for each one that ``TopK2Bit`` keeps."""
_LEVELS = (0.92, 1.3)
"""Magnitudes of the two levels of ``TopK2Bit``, divided by the mean magnitude of the elements that it keeps."""


class TopK2Bit(Codec):
    """The largest 64th of each block, as its sign and one of two magnitudes; for replicas that exchange rarely.

    A block of 4,096 takes 148 bytes, 0.036 for each element. The magnitudes are 0.92 and 1.3 times the mean magnitude m
    of the kept elements, which loses least of Laplacian numbers (1.2 % of their squares).

    A message has three parts, each for all blocks one after another; k = block / 64:

        4 bytes for each block:   mean magnitude m, fp32; NaN where an element of the block is not finite
        2k bytes for each block:  positions within the block, ascending, unsigned; for a zero, the largest element's
        k/4 bytes, at least 1:    two bits for each kept element, by ``split_bits``: 1 if negative, 2 if above 1.11 m

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025), section 3: top-k of blocks
    of 4,096, and 2 bits. The quantizer of the paper is another.
    """

    name = "topk2bit"
    needs_feedback = True

    def body_bytes(self, n: int) -> int:
        return n // self.block * sum(self._sizes())

    def _sizes(self) -> tuple[int, int, int]:
        kept = self.block // _KEPT_OF
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
        kept = self.block // _KEPT_OF
        chosen = blocks.abs().nan_to_num_(torch.inf, torch.inf).topk(kept, sorted=False).indices
        magnitudes = blocks.gather(-1, chosen).abs()
        is_zero = magnitudes == 0  # zero has no level: the largest element's position is sent again instead
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
        codes = joined_bits(bits, 2)[..., : self.block // _KEPT_OF]
        low, high = _LEVELS
        levels = torch.tensor([low, -low, high, -high], dtype=torch.float32, device=codes.device)
        blocks = self.blocks(values)
        found = values.new_zeros(*blocks.shape[:-1], self.block + 1)
        # positions beyond the block, in a damaged message, are dropped
        places = places.to(torch.int64).clamp_(max=self.block)
        blocks.copy_(found.scatter_(-1, places, levels[codes.to(torch.int64)] * means.unsqueeze(-1))[..., :-1])

    def is_finite(self, message: Tensor, n: int) -> Tensor:
        return self._parts(message, n)[0].isnan().logical_not_()
