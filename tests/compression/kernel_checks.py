"""Holds native operators, whichever they are, against the plain-torch definitions, to the bit.

The operators come as ``Any`` with the four of them as attributes, and a device: the CUDA kernels on a GPU, or emulated.
What is compared are bits, except of NaNs, which are alike. Nothing beyond a tensor's own range may change.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.compression import definition
from yafsdp_cc.compression import codecs
from yafsdp_cc.compression.codec import Codec, Noise, codec_of, kind_of
from yafsdp_cc.compression.error_feedback import CLASSIC, Recursion, Residual

NAMES = ("fp32", "bf16", "fp8", "int8", "int4", "ternary", "onebit", "topk", "int6", "int3", "int2")
AT_RANDOM = tuple(name for name in NAMES if kind_of(name).rounds_randomly)
BLOCKS = (64, 128, 256, 512, 1024, 4096)
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
RESIDUALS = (None, torch.float32, torch.bfloat16, torch.int8)
KINDS = ("usual", "ragged", "zeros", "tiny", "huge", "bad")
assert codecs  # which register themselves

_GUARD = 0xA5


class Case(NamedTuple):
    """What is encoded, and how."""

    gradients: Tensor
    counts: Tensor | None = None
    residual: torch.dtype | None = None
    recursion: Recursion = CLASSIC
    scale: float = 1.0
    noise: Noise | None = None


def numbers(kind: str, messages: int, n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[messages, n] of a kind that codecs have trouble with."""
    draw = torch.Generator().manual_seed(seed)
    usual = torch.randn(messages, n, generator=draw)
    if kind == "ragged":  # every size of a float, zeros of both signs, and ties
        usual = usual * torch.exp2(torch.randint(-40, 30, (messages, n), generator=draw).float())
        usual[:, ::7] = 0.0
        usual[:, ::11] = -0.0
        usual[:, 3::5] = torch.randint(-3, 4, usual[:, 3::5].shape, generator=draw).float()
    elif kind == "zeros":
        usual = torch.where(usual > 2, usual, torch.where(usual > 0, 0.0, -0.0))
        usual[:, : n // 2] = 0.0
    elif kind == "tiny":
        usual = usual * (2.0**-24 if dtype == torch.float16 else 2.0**-128)
    elif kind == "huge":
        usual = usual.clamp(-1, 1) * (torch.finfo(dtype).max / 2)
    elif kind == "bad":
        for bad in (math.nan, math.inf, -math.inf):
            usual.view(-1)[torch.randint(0, messages * n, (2,), generator=draw)] = bad
    return usual.to(dtype)


def some_counts(messages: int, blocks: int, block: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, block + 1, (messages, blocks), generator=draw, dtype=torch.int32)
    full = torch.rand(messages, blocks, generator=draw) < 0.3
    return counts.masked_fill_(full, block)


def guarded(rows: int, columns: int, dtype: torch.dtype, device: torch.device, odd: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix within bytes that must not change; and those bytes. With ``odd``, rows are aligned to that alone."""
    row = columns * dtype.itemsize
    around = torch.full((rows + 2, row + 64 + odd), _GUARD, dtype=torch.uint8, device=device)
    return around[1:-1, :row].view(dtype), around


def is_whole(around: Tensor, matrix: Tensor) -> bool:
    """Whether what is around a matrix is as it was."""
    outside = around.clone()
    outside[1:-1, : matrix.shape[1] * matrix.dtype.itemsize] = _GUARD
    return bool((outside == _GUARD).all())


def same(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.cpu(), expected.cpu()
    if found.is_floating_point():
        nan = expected.isnan()
        if not found.isnan().equal(nan):
            return False
        found, expected = found.masked_fill(nan, 0.0), expected.masked_fill(nan, 0.0)
    return found.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


def same_message(codec: Codec, found: Tensor, expected: Tensor, n: int) -> bool:
    if codec.name in ("fp32", "bf16"):
        dtype = torch.float32 if codec.name == "fp32" else torch.bfloat16
        size = n * dtype.itemsize
        return same(found[:, :size].contiguous().view(dtype), expected[:, :size].contiguous().view(dtype))
    return same(found[:, : codec.body_bytes(n)], expected[:, : codec.body_bytes(n)])


class KernelChecks:
    """Operators on a device, and their definitions on another one, or the same.

    ``odd`` rows are aligned to an element (messages to four bytes) and to nothing more.
    """

    def __init__(self, ops: Any, device: str, reference: str = "cpu") -> None:
        self.ops = ops
        self.device = torch.device(device)
        self.reference = torch.device(reference)

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0

    def encode(self, name: str, block: int, case: Case, steps: int = 2, odd: bool = False) -> None:
        """Some steps, so that a residual that one kernel stored is loaded by the next."""
        codec, (messages, n) = codec_of(name, block), case.gradients.shape
        theirs = None if case.residual is None else Residual.zeros(messages, n, case.residual, block, self.reference)
        ours = around = None
        if case.residual is not None:
            ours, around = guarded(messages, n, case.residual, self.device, odd * case.residual.itemsize)
            ours.zero_()
        scales = torch.zeros(messages, n // block, device=self.device)
        gradients, _ = guarded(messages, n, case.gradients.dtype, self.device, odd * case.gradients.dtype.itemsize)
        for step in range(steps):
            values = case.gradients.roll(step * 37, 1)
            gradients.copy_(values)
            expected = torch.zeros(messages, codec.message_bytes(n), dtype=torch.uint8, device=self.reference)
            message, edge = guarded(messages, codec.message_bytes(n), torch.uint8, self.device, 4 * odd)
            definition.encode(
                codec,
                values.to(self.reference),
                expected,
                counts=None if case.counts is None else case.counts.to(self.reference),
                residual=theirs,
                recursion=case.recursion,
                scale=case.scale,
                noise=case.noise,
            )
            self.ops.encode(
                gradients,
                message,
                NAMES.index(name),
                block,
                None if case.counts is None else case.counts.to(self.device),
                ours,
                None if ours is None else scales,
                *case.recursion,
                case.scale,
                -1 if case.noise is None else case.noise.seed,
                0 if case.noise is None else case.noise.first,
                self.stream,
            )
            where = f"{name}, block {block}, {case.gradients.dtype}, step {step}"
            assert same_message(codec, message, expected, n), f"{where}: the message"
            assert is_whole(edge, message), f"{where}: written beyond the message"
            if theirs is not None and ours is not None and around is not None:
                assert same(ours, theirs.values), f"{where}: the residual"
                assert is_whole(around, ours), f"{where}: written beyond the residual"
                assert case.residual != torch.int8 or same(scales, theirs.scales), f"{where}: the residual's scales"

    def accumulate(self, gradients: Tensor, dtype: torch.dtype, block: int, scale: float, odd: bool = False) -> None:
        messages, n = gradients.shape
        theirs = Residual.zeros(messages, n, dtype, block, self.reference)
        ours, around = guarded(messages, n, dtype, self.device, odd * dtype.itemsize)
        ours.zero_()
        scales = torch.zeros(theirs.scales.shape, device=self.device)
        for step in range(3):
            values = gradients.roll(step * 37, 1)
            definition.accumulate(values.to(self.reference), theirs, scale=scale)
            self.ops.accumulate(values.to(self.device), ours, scales, block, scale, self.stream)
            assert same(ours, theirs.values), f"{dtype}, block {block}, step {step}"
            assert same(scales, theirs.scales), f"{dtype}, block {block}, step {step}: scales"
            assert is_whole(around, ours)

    def decode(self, name: str, block: int, message: Tensor, n: int, dtype: torch.dtype, odd: bool = False) -> None:
        codec, messages = codec_of(name, block), message.shape[0]
        expected = torch.empty(messages, n, device=self.reference)
        codec.decode(message.to(self.reference), expected)
        given, _ = guarded(messages, message.shape[1], torch.uint8, self.device, 4 * odd)
        given.copy_(message)
        values, around = guarded(messages, n, dtype, self.device, odd * dtype.itemsize)
        self.ops.decode(given, NAMES.index(name), block, values, self.stream)
        assert same(values, expected.to(dtype)), f"{name}, block {block}, {dtype}"
        assert is_whole(around, values)

    def decode_sum(
        self,
        name: str,
        block: int,
        message: Tensor,
        n: int,
        own: Tensor | None,
        place: int,
        part: int,
        odd: bool = False,
    ) -> None:
        """In parts of ``part`` elements, a multiple of what parts may begin at; at place 0 the total is ``own``."""
        codec, messages = codec_of(name, block), message.shape[0]
        expected = torch.empty(n, device=self.reference)
        theirs = None if own is None else own.to(self.reference)
        definition.decode_sum(codec, message.to(self.reference), theirs, place, expected)
        given, _ = guarded(messages, message.shape[1], torch.uint8, self.device, 4 * odd)
        given.copy_(message)
        mine = None if own is None else own.to(self.device)
        for start in range(0, n, part):
            count = min(part, n - start)
            total, around = guarded(1, count, torch.float32, self.device, odd * torch.float32.itemsize)
            ours = None if mine is None else mine[start : start + count]
            ours = total[0].copy_(ours) if ours is not None and place == 0 else ours
            self.ops.decode_sum(given, NAMES.index(name), block, n, ours, place, total[0], start, self.stream)
            assert same(total[0], expected[start : start + count]), f"{name}, block {block}, place {place}, at {start}"
            assert is_whole(around, total)
