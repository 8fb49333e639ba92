"""The native kernels against the plain-torch definitions, bit for bit, at every instruction set of this machine."""

from __future__ import annotations

import os
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compression import definition
from tests.internals import simd_levels
from yafsdp_cc.compression import codecs, error_feedback  # noqa: F401 (codecs registers them)
from yafsdp_cc.compression.codec import Codec, Noise, codec_of
from yafsdp_cc.compression.error_feedback import CLASSIC, EF21, Recursion, Residual

CPU = torch.device("cpu")
CODECS = ("fp32", "bf16", "fp8", "int8", "int6", "int4", "int3", "int2", "ternary", "onebit", "topk")
RESIDUALS = (None, torch.float32, torch.bfloat16, torch.int8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

os.environ.pop("YAFSDP_CC_SIMD", None)
if error_feedback.ops_for(CPU) is None:  # without a compiler there is nothing but the definitions
    pytest.skip("the native extension is not built", allow_module_level=True)  # nothing to hold against torch


LEVELS = simd_levels()


class Case(NamedTuple):
    """What is encoded, twice in a row, and how."""

    codec: Codec
    gradients: Tensor
    residual: torch.dtype | None
    counts: Tensor | None
    recursion: Recursion
    scale: float
    noise: Noise | None


class Outcome(NamedTuple):
    messages: Tensor
    values: Tensor
    scales: Tensor


def differing(a: Tensor, b: Tensor) -> int:
    """How many numbers have other bits; a NaN is a NaN."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    other = a.contiguous().view(kinds[a.element_size()]) != b.contiguous().view(kinds[b.element_size()])
    if a.is_floating_point():
        other &= ~(a.isnan() & b.isnan())
    return int(other.sum())


def gradients_of(rows: int, n: int, block: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Blocks of every kind, in rows that are part of longer ones."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(rows, n // block, block, generator=generator)
    blocks *= 10.0 ** torch.randint(-4, 3, (rows, n // block, 1), generator=generator)
    kinds = torch.randint(0, 16, (rows, n // block), generator=generator)
    kinds.view(-1)[0] = 15  # whatever else there is, something ordinary
    blocks[kinds == 0] = 0
    blocks[kinds == 1] = -0.0
    blocks[kinds == 2] *= 1e-40
    blocks[kinds == 3] *= 1e36
    blocks[kinds == 4] = blocks[kinds == 4].sign() * 3.4e38
    blocks[kinds == 5] = (blocks[kinds == 5] * 8).round() / 2
    for kind, at, value in ((6, 3, float("nan")), (7, block - 1, float("inf")), (8, 0, -float("inf")), (9, 7, 1e4)):
        of_kind = blocks[kinds == kind]
        of_kind[:, at] = value
        blocks[kinds == kind] = of_kind
    wider = torch.full((rows, n + 192), 5.0).to(dtype)
    wider[:, 64 : 64 + n] = blocks.flatten(1).to(dtype)
    return wider[:, 64 : 64 + n]


def counts_of(gradients: Tensor, block: int) -> Tensor:
    """Some blocks with fewer elements, one with none; gradients are zero where there is no element."""
    rows, n = gradients.shape
    counts = torch.full((rows, n // block), block, dtype=torch.int32)
    counts[:, -1] = block // 3
    counts[-1, 0] = 1
    counts[0, n // block // 2] = -(n % 3)  # none
    gradients.unflatten(1, (-1, block))[torch.arange(block) >= counts.unsqueeze(-1)] = 0
    return counts


def outcome(encode: Any, accumulate: Any, case: Case) -> Outcome:
    rows, n = case.gradients.shape
    size = case.codec.message_bytes(n)
    residual = None if case.residual is None else Residual.zeros(rows, n, case.residual, case.codec.block, CPU)
    wider = torch.full((2, rows, size + 192), 0xAB, dtype=torch.uint8)
    for step in range(2):
        encode(
            case.codec,
            case.gradients,
            wider[step, :, 64 : 64 + size],
            counts=case.counts,
            residual=residual,
            recursion=case.recursion,
            scale=case.scale,
            noise=case.noise,
        )
    if residual is None:
        return Outcome(wider, torch.empty(0), torch.empty(0))
    accumulate(case.gradients, residual, scale=case.scale)
    return Outcome(wider, residual.values, residual.scales)


def check(case: Case, monkeypatch: pytest.MonkeyPatch, only: list[str] | None = None) -> None:
    truth = outcome(definition.encode, definition.accumulate, case)
    for level in only or LEVELS:
        monkeypatch.setenv("YAFSDP_CC_SIMD", level)
        found = outcome(error_feedback.encode, error_feedback.accumulate, case)
        for what, ours, theirs in zip(Outcome._fields, found, truth, strict=True):
            assert not differing(ours, theirs), (level, what, case.gradients.shape, case.gradients.dtype, *case[2:])


RECURSIONS = (CLASSIC, Recursion(0.9, 1.0), Recursion(1.0, 0.75), Recursion(0.5, 0.1), EF21)
SHAPES = ((1, 1), (2, 7), (4, 11), (3, 26))
"""Messages, and blocks of each."""


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_encoding(name: str, residual: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (dtype, block, (rows, blocks)) in enumerate(product(FLOATS, (64, 256, 1024), SHAPES)):
        gradients = gradients_of(rows, blocks * block, block, dtype, seed=number)
        counts = counts_of(gradients, block) if number % 2 else None
        recursion = RECURSIONS[number // 2 % len(RECURSIONS)]
        scale = (1.0, 1 / 1024, 0.3)[number // 3 % 3]
        case = Case(codec_of(name, block), gradients, residual, counts, recursion, scale, None)
        check(case, monkeypatch)


@pytest.mark.parametrize("name", [name for name in CODECS if codec_of(name).rounds_randomly])
def test_stochastic_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noises = (Noise(0), Noise(1, 12345), Noise(0xFFFFFFFF, 0xFFFFFF00), Noise(0x12345678, 5 << 32))
    for number, (noise, dtype, block) in enumerate(product(noises, FLOATS, (64, 256, 1024))):
        gradients = gradients_of(3, 11 * block, block, dtype, seed=number)
        counts = counts_of(gradients, block) if number % 2 else None
        check(Case(codec_of(name, block), gradients, None, counts, CLASSIC, 1.0, noise), monkeypatch)


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_several_tiles(name: str, residual: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, n = codec_of(name, 512), 2 * 65_536 + 512
    gradients = torch.randn(1, n, generator=torch.Generator().manual_seed(1))
    gradients[:, 70_000:90_000] *= 50  # the second tile is not as the first one was
    gradients[:, -100] = float("nan")
    counts = counts_of(gradients, 512)
    only = LEVELS if name == "topk" else LEVELS[-1:]
    recursion = Recursion(0.9, 0.8) if residual == torch.bfloat16 else CLASSIC
    check(Case(codec, gradients, residual, counts, recursion, 1.0, None), monkeypatch, only)


@pytest.mark.parametrize("name", CODECS)
def test_numbers_of_any_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block for each exponent, of any mantissas and signs."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(1 << 31), 1 << 31, (1, 256 * 64), generator=generator, dtype=torch.int64).to(torch.int32)
    exponents = torch.arange(256, dtype=torch.int32).repeat_interleave(64)
    largest = bits & ~(0xFF << 23) | exponents << 23
    smaller = largest - torch.randint(0, 12, bits.shape, generator=generator, dtype=torch.int32) * (1 << 23)
    values = torch.where((largest >> 23 & 0xFF) > 12, smaller, largest).view(torch.float32)
    for residual in (None, torch.float32):
        check(Case(codec_of(name, 64), values, residual, None, CLASSIC, 1.0, None), monkeypatch)


def test_all_halves_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(1, -1)
    for dtype in (torch.float16, torch.bfloat16):
        check(Case(codec_of("fp32"), halves.view(dtype), None, None, CLASSIC, 1.0, None), monkeypatch)


@pytest.mark.parametrize("name", CODECS)
def test_decoding_any_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that a message can hold, also what no encoder writes; numbers are rounded as torch rounds them."""
    for block, blocks in ((64, 1), (256, 13), (1024, 80)):
        codec, n = codec_of(name, block), block * blocks
        generator = torch.Generator().manual_seed(block)
        messages = torch.randint(0, 256, (3, codec.message_bytes(n)), generator=generator, dtype=torch.uint8)
        if name == "topk":
            codec.encode(torch.randn(3, n, generator=generator), None, messages)
        decoded = torch.empty(3, n)
        codec.decode(messages, decoded)
        for level, dtype in product(LEVELS, FLOATS):
            monkeypatch.setenv("YAFSDP_CC_SIMD", level)
            wider = torch.full((3, n + 128), 7.0, dtype=dtype)
            error_feedback.decode(codec, messages, wider[:, 64:-64])
            assert not differing(wider[:, 64:-64], decoded.to(dtype)), (level, dtype, n)
            assert bool((wider[:, :64] == 7).all())
            assert bool((wider[:, -64:] == 7).all())


@pytest.mark.parametrize("name", CODECS)
def test_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (messages, blocks) in enumerate(((1, 1), (2, 7), (3, 33), (4, 70))):
        block = (64, 256, 1024, 1024)[number]
        codec, n = codec_of(name, block), blocks * block
        encoded = torch.zeros(messages, codec.message_bytes(n), dtype=torch.uint8)
        definition.encode(codec, gradients_of(messages, n, block, torch.float32, number), encoded)
        own = gradients_of(1, n, block, torch.float32, 99)[0]
        owns = [(None, 0)] + [(own.to(FLOATS[place % 3]), place) for place in range(messages + 1)]
        for part, place in owns:
            truth, total = torch.empty(n), torch.empty(n)
            definition.decode_sum(codec, encoded, part, place, truth)
            for level in LEVELS:
                monkeypatch.setenv("YAFSDP_CC_SIMD", level)
                error_feedback.decode_sum(codec, encoded, n, part, place, total)
                assert not differing(total, truth), (level, messages, n, place)


@pytest.mark.parametrize("name", CODECS)
def test_sums_of_a_part(name: str) -> None:
    codec, n = codec_of(name), error_feedback.PART + 3 * 256
    messages = torch.zeros(2, codec.message_bytes(n), dtype=torch.uint8)
    error_feedback.encode(codec, torch.randn(2, n), messages)
    own, whole = torch.randn(n), torch.empty(n)
    definition.decode_sum(codec, messages, own, 1, whole)
    for start, end in ((0, error_feedback.PART), (error_feedback.PART, n)):
        total = torch.empty(end - start)
        error_feedback.decode_sum(codec, messages, n, own[start:end], 1, total, start)
        assert not differing(total, whole[start:end])


def test_zeros_keep_the_sign_that_sums_give_them() -> None:
    """Of a sparse message most elements are +0, and are added."""
    codec, n = codec_of("topk", 64), 128
    messages = torch.zeros(3, codec.message_bytes(n), dtype=torch.uint8)
    error_feedback.encode(codec, torch.full((3, n), -0.0), messages)
    for own, place in ((None, 0), (torch.full((n,), -0.0), 0), (torch.full((n,), -0.0), 1), (torch.zeros(n), 3)):
        total, truth = torch.empty(n), torch.empty(n)
        for count in (1, 2, 3):
            definition.decode_sum(codec, messages[:count], own, min(place, count), truth)
            error_feedback.decode_sum(codec, messages[:count], n, own, min(place, count), total)
            assert not differing(total, truth)


def test_a_damaged_position_is_not_written() -> None:
    codec, n = codec_of("topk", 64), 128
    message = torch.full((1, codec.message_bytes(n)), 0xFF, dtype=torch.uint8)
    values = torch.ones(1, n + 64)
    error_feedback.decode(codec, message, values[:, :n])
    assert bool((values[:, :n] == 0).all())
    assert bool((values[:, n:] == 1).all())


def wrong_calls() -> list[tuple[str, str, dict[str, Any]]]:
    f32, u8 = torch.zeros(2, 256), torch.zeros(2, 320, dtype=torch.uint8)
    return [
        (
            "encode",
            r"gradients has to be float32 or .*, not a tensor of float64 \[2, 256\]",
            {"gradients": f32.double()},
        ),
        ("encode", r"with strides \[1, 2\]", {"gradients": torch.zeros(256, 2).t()}),
        ("encode", r"whole blocks of 256, not 128 elements", {"gradients": f32[:, :128]}),
        ("encode", r"at least 260 bytes, not 128", {"message": u8[:, :128]}),
        (
            "encode",
            r"multiples of 4 bytes, not at .* with strides of 319",
            {"message": torch.zeros(638, dtype=torch.uint8).view(2, 319)},
        ),
        ("encode", r"2 rows of gradients and 1 messages", {"message": u8[:1]}),
        ("encode", r"message has to be uint8, .* not a tensor of int8", {"message": u8.view(torch.int8)}),
        ("encode", r"block=100", {"block": 100}),
        ("encode", r"no codec number 11", {"codec": 11}),
        ("encode", r"counts has to be \[2, 1\], not \[2, 2\]", {"counts": torch.zeros(2, 2, dtype=torch.int32)}),
        ("encode", r"counts has to be int32", {"counts": torch.zeros(2, 1, dtype=torch.int64)}),
        ("encode", r"residual has to be \[2, 256\], not \[1, 256\]", {"residual": f32[:1]}),
        ("encode", r"residual_scales has to be \[2, 1\], not", {"residual": f32.to(torch.int8)}),
        ("decode", r"2 messages and 1 rows of values", {"values": f32[:1]}),
        ("decode", r"values has to be", {"values": f32.long()}),
        ("decode_sum", r"elements 64 to 128 of 256: it has to begin at a multiple of 256", {"start": 64}),
        ("decode_sum", r"own has to be \[1, 64\], not \[1, 128\]", {"own": f32[0, :128], "block": 64}),
        ("decode_sum", r"place=3 among 2 messages", {"own": f32[0, :64], "block": 64, "place": 3}),
        ("decode_sum", r"nothing to be summed", {"messages": u8[:0], "block": 64}),
        ("accumulate", r"residual has to be \[2, 256\], not", {"residual": f32[:, :128]}),
    ]


def right_call(name: str) -> dict[str, Any]:
    f32, u8 = torch.zeros(2, 256), torch.zeros(2, 320, dtype=torch.uint8)
    return {
        "encode": {"gradients": f32, "message": u8, "codec": 3, "block": 256, "counts": None, "residual": None}
        | {
            "residual_scales": None,
            "carry": 1.0,
            "taken": 1.0,
            "added": 1.0,
            "scale": 1.0,
            "seed": -1,
            "first": 0,
            "stream": 0,
        },
        "accumulate": {"gradients": f32, "residual": f32.clone(), "residual_scales": f32[:, :0], "block": 256}
        | {"scale": 1.0, "stream": 0},
        "decode_sum": {"messages": u8, "codec": 3, "block": 256, "n": 256, "own": None, "place": 0}
        | {"total": torch.zeros(64), "start": 0, "stream": 0},
        "decode": {"messages": u8, "codec": 3, "block": 256, "values": f32, "stream": 0},
    }[name]


@pytest.mark.parametrize(("name", "error", "wrong"), wrong_calls())
def test_wrong_arguments_are_named(name: str, error: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=error):
        getattr(error_feedback.ops_for(CPU), name)(**(right_call(name) | wrong))


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YAFSDP_CC_SIMD", "mmx")
    with pytest.raises(RuntimeError, match=r"YAFSDP_CC_SIMD=mmx: this machine has .*scalar"):
        error_feedback.ops_for(CPU).decode(**right_call("decode"))


def test_tracers_see_through() -> None:
    for name in ("encode", "accumulate", "decode_sum", "decode"):
        call = right_call(name)
        with FakeTensorMode() as mode:
            fakes = {key: mode.from_tensor(x) if isinstance(x, Tensor) else x for key, x in call.items()}
            assert getattr(error_feedback.ops_for(CPU), name)(**fakes) is None
