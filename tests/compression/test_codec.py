"""The codecs' definitions against messages made by hand, and against NumPy in double precision."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.compression import definition
from yafsdp_cc.compression import codecs  # noqa: F401 (it registers codecs)
from yafsdp_cc.compression.codec import BLOCKS, Codec, Noise, block_sum, codec_of, hashed
from yafsdp_cc.compression.error_feedback import Recursion, Residual

CODECS = ("fp32", "bf16", "fp8", "int8", "int6", "int4", "int3", "int2", "ternary", "onebit", "topk", "topk2bit")
SCALED = ("fp8", "int8", "int6", "int4", "int3", "int2", "ternary", "onebit")
SUMMED = ("int3", "int2", "ternary", "onebit")
"""Their scales are of mean magnitudes."""
CPU = torch.device("cpu")


def encoded(codec: Codec, values: Tensor, counts: Tensor | None = None, noise: Noise | None = None) -> Tensor:
    message = torch.zeros(values.shape[0], codec.message_bytes(values.shape[1]), dtype=torch.uint8)
    codec.encode(values, counts, message, noise)
    return message


def decoded(codec: Codec, message: Tensor, n: int) -> Tensor:
    values = torch.empty(message.shape[0], n)
    codec.decode(message, values)
    return values


def round_trip(codec: Codec, values: Tensor, noise: Noise | None = None) -> Tensor:
    return decoded(codec, encoded(codec, values, noise=noise), values.shape[1])


def drawn(rows: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))


# Formats, to the byte


def message_of(codec: Codec, values: list[float]) -> bytes:
    return bytes(encoded(codec, torch.tensor([values])).numpy().tobytes())


def test_onebit_by_hand() -> None:
    values = [1.0, -3.0, -0.0, 0.0, 2.0, 2.0, 2.0, -6.0] + [2.0] * 48 + [-2.0] * 8
    scale = struct.pack("<f", (16 + 56 * 2) / 64)
    payload = bytes([0b10000110, 0, 0, 0, 0, 0, 0, 0xFF])
    assert message_of(codec_of("onebit", 64), values) == (scale + payload).ljust(64, b"\0")


def test_int8_by_hand() -> None:
    values = [127.0, -127.0, 0.5, 1.5, -2.5, 3.0] + [0.0] * 58
    payload = bytes([127, 129, 0, 2, 254, 3]) + bytes(58)
    assert message_of(codec_of("int8", 64), values) == (struct.pack("<f", 1.0) + payload).ljust(128, b"\0")


def test_int4_by_hand() -> None:
    low, high = [7.0, -7.0, 2.4, -0.5] + [0.0] * 28, [-1.0, 3.5, 0.0, -6.6] + [1.0] * 28
    payload = bytes([0xF7, 0x49, 0x02, 0x90]) + bytes([0x10] * 28)
    assert message_of(codec_of("int4", 64), low + high) == (struct.pack("<f", 1.0) + payload).ljust(64, b"\0")


def test_int6_by_hand() -> None:
    """Element 1 is -31 = 0b100001, 33 is 17 = 0b010001, 18 is -2 = 0b111110."""
    values = [0.0] * 64
    values[1], values[33], values[18] = -31.0, 17.4, -1.6
    low = [0] * 32
    low[1], low[18] = 0x11, 0x0E
    high = [0] * 16
    high[1], high[2] = 0b10 | 0b01 << 4, 0b11 << 2
    payload = bytes([*low, *high])
    assert message_of(codec_of("int6", 64), values) == (struct.pack("<f", 1.0) + payload).ljust(64, b"\0")


def test_int3_by_hand() -> None:
    """Magnitudes are 8 on average, so the levels are the odd multiples of 2.936."""
    values = [8.0, -8.0] * 32
    values[0], values[9], values[17] = 24.0, 0.0, 0.0
    scale = np.float32(8.0) * np.float32(0.367)
    codes = [5, 2] * 32  # 2.936 · 3 is next to 8, and 2.936 · -3 to -8
    codes[0], codes[9], codes[17] = 7, 4, 4
    low = [sum((codes[16 * k + j] & 3) << 2 * k for k in range(4)) for j in range(16)]
    high = [sum((codes[8 * k + j] >> 2) << k for k in range(8)) for j in range(8)]
    expected = struct.pack("<f", scale) + bytes(low + high)
    assert message_of(codec_of("int3", 64), values) == expected.ljust(64, b"\0")


def test_int2_by_hand() -> None:
    values = [1.0] * 64
    values[0], values[16], values[32], values[48] = -2.0, -0.5, 0.5, 1.0
    payload = bytes([0b10_10_01_00] + [0b10101010] * 15)
    assert message_of(codec_of("int2", 64), values) == (struct.pack("<f", 0.624) + payload).ljust(64, b"\0")


def test_fp8_by_hand() -> None:
    values = [448.0, -448.0, 1.0, 2.0**-6, 2.0**-9, 2.0**-11, 17.0, -19.0] + [0.0] * 56
    payload = bytes([0x7E, 0xFE, 0x38, 0x08, 0x01, 0x00, 0x58, 0xDA]) + bytes(56)
    assert message_of(codec_of("fp8", 64), values) == (struct.pack("<f", 1.0) + payload).ljust(128, b"\0")


def test_ternary_by_hand() -> None:
    """Seven blocks: five, two and three blocks of nothing. Of each block two elements are large enough."""
    blocks = [[8.0 * (b + 1), -8.0 * (b + 1)] + [0.25 * (b + 1)] * 62 for b in range(7)]
    scales = b"".join(struct.pack("<f", 8.0 * (b + 1)) for b in range(7))
    zeros, all_five = 1 + 3 + 9 + 27 + 81, 2 * (1 + 3 + 9 + 27 + 81)
    five = bytes([all_five, 0]) + bytes([zeros] * 62)
    two = bytes([zeros + 1 + 3, zeros - 1 - 3]) + bytes([zeros] * 62)
    assert message_of(codec_of("ternary", 64), sum(blocks, [])) == (scales + five + two).ljust(192, b"\0")  # noqa: RUF017


def test_topk_by_hand() -> None:
    values = [0.0] * 192
    values[5], values[100], values[150], values[151] = -1.0, 3.0, -3.0, 0.5
    assert message_of(codec_of("topk", 64), values) == struct.pack("<2H", 100, 150).ljust(4, b"\0") + struct.pack(
        "<2H", 0x4040, 0xC040
    ).ljust(60, b"\0")


def test_topk2bit_by_hand() -> None:
    values = [0.0] * 256
    values[5], values[100], values[150], values[151] = -1.0, 3.0, -3.0, 1.0
    codec = codec_of("topk2bit", 256)
    bits = 1 | 2 << 2 | 3 << 4  # negative; large; both; neither
    assert message_of(codec, values) == struct.pack("<f4HB", 2.0, 5, 100, 150, 151, bits).ljust(64, b"\0")
    found = round_trip(codec, torch.tensor([values]))[0]
    assert found[[5, 100, 150, 151]].tolist() == pytest.approx([-1.84, 2.6, -2.6, 1.84])
    assert found.count_nonzero() == 4


def test_floats_by_hand() -> None:
    values = [1.0, -2.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, float("nan")] + [0.0] * 59
    bf16 = struct.pack("<5H", 0x3F80, 0xC000, 0x3F80, 0x3F82, 0x7FC0)
    assert message_of(codec_of("bf16", 64), values) == bf16.ljust(128, b"\0")
    assert message_of(codec_of("fp32", 64), values) == struct.pack("<64f", *values)


def test_sizes() -> None:
    n = 1 << 20
    bits = {name: 8 * codec_of(name).message_bytes(n) / n for name in CODECS}
    expected = {
        "fp32": 32,
        "bf16": 16,
        "fp8": 8.125,
        "int8": 8.125,
        "int4": 4.125,
        "int3": 3.125,
        "ternary": 1.725,
        "onebit": 1.125,
    }
    for name, size in {**expected, "int6": 6.125, "int2": 2.125, "topk": 0.32, "topk2bit": 0.40625}.items():
        assert bits[name] == pytest.approx(size, rel=2e-3), name
    for name in CODECS:
        assert all(codec_of(name, block).message_bytes(block) % 64 == 0 for block in BLOCKS)


def test_what_there_is_not() -> None:
    with pytest.raises(ValueError, match="there is no codec 'int7', only bf16, fp32"):
        codec_of("int7")
    with pytest.raises(ValueError, match=r"'powersgd' is for gradients of a sharded model alone; .*: bf16, fp32"):
        codec_of("powersgd")
    with pytest.raises(ValueError, match="block=100"):
        codec_of("int8", 100)


# Numbers, against double precision


@pytest.mark.parametrize("name", CODECS)
def test_a_message_of_another_size_is_refused_and_random_bytes_are_numbers(name: str) -> None:
    codec = codec_of(name)
    size = codec.message_bytes(512)
    for rows, other in ((2, size + 16), (2, size - 1), (2, 0), (1, size), (3, size)):
        with pytest.raises(ValueError, match=rf"2 messages of {name} with 512 elements each are \[2, {size}\] bytes"):
            codec.decode(torch.zeros(rows, other, dtype=torch.uint8), torch.zeros(2, 512))
    generator = torch.Generator().manual_seed(0)
    for trial in range(100):
        message = torch.randint(0, 256, (2, size), dtype=torch.uint8, generator=generator)
        assert decoded(codec, message if trial else message.fill_(255), 512).shape == (2, 512)


@pytest.mark.parametrize("block", [64, 256, 4096])
def test_a_sum_has_one_order(block: int) -> None:
    magnitudes = drawn(1, block).abs() * 10.0 ** torch.randint(-6, 6, (1, block))
    lanes = np.zeros(64, dtype=np.float32)
    for row in magnitudes.numpy().reshape(-1, 64):
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    assert block_sum(magnitudes).item() == lanes[0]


def test_random_numbers_are_those_of_the_hash() -> None:
    def mixed(word: int) -> int:
        word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF
        word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
        return word ^ word >> 16

    words = [0, 1, 2, 0x80000000, 0xFFFFFFFF, 123456789]
    assert hashed(torch.tensor(words)).tolist() == [mixed(word) for word in words]
    for seed, first in ((7, 0), (0xDEADBEEF, 0xFFFFFFFE)):
        uniform = Noise(seed, first).uniform(torch.Size((2, 3)), CPU)
        expected = [(mixed((first + i & 0xFFFFFFFF) ^ seed) >> 8) / 2**24 for i in range(6)]
        assert uniform.flatten().tolist() == expected


@pytest.mark.parametrize("block", [64, 1024])
@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int6", 31), ("int4", 7)])
def test_whole_steps(name: str, levels: int, block: int) -> None:
    values = drawn(3, 8 * block) * 1e-3
    exact = values.numpy().astype(np.float64).reshape(3, 8, block)
    scale = np.abs(exact).max(-1, keepdims=True) / levels
    away = np.abs(round_trip(codec_of(name, block), values).numpy().reshape(exact.shape) - exact)
    assert (away <= scale / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize(("name", "share"), [("int3", 0.367), ("int2", 0.624)])
def test_odd_levels(name: str, share: float) -> None:
    values, codec, last = drawn(2, 1024), codec_of(name), 3 if name == "int2" else 7
    counts = torch.tensor([[256, 3, 256, 1], [256, 256, 0, 200]], dtype=torch.int32)
    values.unflatten(1, (-1, 256))[torch.arange(256) >= counts.unsqueeze(-1)] = 0
    found = decoded(codec, encoded(codec, values, counts), 1024).numpy().reshape(2, 4, 256)
    exact = values.numpy().astype(np.float64).reshape(2, 4, 256)
    scales = share * np.abs(exact).sum(-1, keepdims=True) / np.maximum(counts.numpy(), 1)[..., None]
    levels = scales[..., None] * np.arange(-last, last + 1, 2)
    nearest = np.take_along_axis(levels, np.abs(levels - exact[..., None]).argmin(-1)[..., None], -1)[..., 0]
    inside = np.arange(256) < counts.numpy()[..., None]
    np.testing.assert_allclose(found[inside], nearest[inside], rtol=1e-6)


@pytest.mark.parametrize(("name", "least"), [("int3", 0.03744), ("int2", 0.11885)])
def test_odd_levels_lose_least_of_normal_numbers(name: str, least: float) -> None:
    """Max (1960), table II: the distortion of the best evenly spaced levels."""
    values = drawn(1, 1 << 20)
    lost = (round_trip(codec_of(name, 4096), values) - values).square().mean()
    assert lost.item() == pytest.approx(least, rel=5e-3)


def test_fp8_is_finer_near_zero() -> None:
    values = drawn(2, 2048) * 10.0 ** (2 * drawn(2, 2048, 1))
    exact = values.numpy().astype(np.float64).reshape(-1, 256)
    scale = np.abs(exact).max(-1, keepdims=True) / 448
    away = np.abs(round_trip(codec_of("fp8"), values).numpy().reshape(exact.shape) - exact)
    assert (away <= np.maximum(np.abs(exact) / 16, scale * 2.0**-10) * (1 + 1e-5)).all()


def test_onebit_has_the_mean_and_the_signs() -> None:
    values, counts = drawn(2, 1024), torch.tensor([[256, 3, 256, 1], [256, 256, 0, 200]], dtype=torch.int32)
    values.unflatten(1, (-1, 256))[torch.arange(256) >= counts.unsqueeze(-1)] = 0
    codec = codec_of("onebit")
    found = decoded(codec, encoded(codec, values, counts), 1024).numpy().reshape(2, 4, 256)
    exact = values.numpy().astype(np.float64).reshape(2, 4, 256)
    for row, block in np.ndindex(2, 4):
        count = counts[row, block].item()
        mean = np.abs(exact[row, block]).sum() / max(count, 1)
        signs = np.where(exact[row, block, :count] < 0, -1, 1)
        np.testing.assert_allclose(found[row, block, :count], mean * signs, rtol=1e-6)


def test_ternary_keeps_what_is_large() -> None:
    values = drawn(2, 7 * 256)
    found = round_trip(codec_of("ternary"), values).numpy().reshape(14, 256)
    for ours, exact in zip(found, values.numpy().astype(np.float64).reshape(14, 256), strict=True):
        size = np.abs(exact)
        kept = size > 0.7 * size.mean()
        assert not (np.abs(size - 0.7 * size.mean()) < 1e-6).any()  # no element that rounding could move
        np.testing.assert_allclose(ours, np.where(kept, np.sign(exact) * size[kept].mean(), 0.0), rtol=1e-6)


@pytest.mark.parametrize("n", [64, 6_400, 65_536 + 192])
def test_topk_takes_the_largest(n: int) -> None:
    values, codec = drawn(2, n), codec_of("topk", 64)
    found = round_trip(codec, values).numpy()
    for start in range(0, n, 65_536):
        exact = values.numpy()[:, start : start + 65_536]
        kept = -(-exact.shape[1] // 100)
        for ours, truth in zip(found[:, start : start + 65_536], exact, strict=True):
            chosen = ours != 0
            assert chosen.sum() == kept
            np.testing.assert_allclose(ours[chosen], truth[chosen], rtol=2.0**-8)
            # Those left out are no larger than those taken, but for the three bits that were looked at.
            assert np.abs(truth[~chosen]).max() <= np.abs(truth[chosen]).min() * (1 + 2.0**-3)


@pytest.mark.parametrize(
    ("name", "levels"), [("int8", 127), ("int6", 31), ("int4", 7), ("int3", 3.5), ("int2", 1.5), ("ternary", 1)]
)
def test_drawn_codes_are_right_on_average(name: str, levels: float) -> None:
    values, codec, turns = drawn(1, 512), codec_of(name), 600
    total = sum(round_trip(codec, values, Noise(0x9E3779B9 * turn & 0xFFFFFFFF)).double() for turn in range(turns))
    steps = values.double().unflatten(1, (2, 256)).abs().amax(-1).div(levels).repeat_interleave(256, 1)
    above = values / steps - levels % 1  # the odd multiples of half a step lie half a step from zero
    up = above - above.floor()  # how often the next step is to be taken
    away = total / turns - values
    assert bool((away.abs() <= 5 * steps * (up * (1 - up) / turns).sqrt() + 4 * steps / turns).all())
    assert away.sum().abs() <= 4 * (steps**2 * up * (1 - up) / turns).sum().sqrt()


def test_draws_do_not_depend_on_the_cut() -> None:
    for name in ("int8", "int4"):
        values, codec = drawn(1, 1024), codec_of(name)
        whole = round_trip(codec, values, Noise(5, 1000))
        parts = [round_trip(codec, values[:, at : at + 256], Noise(5, 1000 + at)) for at in range(0, 1024, 256)]
        assert torch.equal(whole, torch.cat(parts, 1))


# What is not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", CODECS)
def test_a_block_that_is_not_finite(name: str, bad: float) -> None:
    values, codec = drawn(2, 1024), codec_of(name)
    values[1, 300] = bad
    message = encoded(codec, values)
    spoken = codec.is_finite(message, 1024)
    found = decoded(codec, message, 1024)
    if name == "topk":  # the tile cannot
        assert spoken.tolist() == [[True] * 4, [False] * 4]
        assert bool(found[1, :11].isnan().all())
    else:
        assert spoken.tolist() == [[True] * 4, [True, False, True, True]]
        where = found[1, 256:512].isnan() if name in SCALED else ~found[1, 300:301].isfinite()
        assert bool(where.all())
    assert bool(found[0].isfinite().all())


@pytest.mark.parametrize("name", CODECS)
def test_extremes_stay_finite(name: str) -> None:
    codec = codec_of(name, 64)
    for value in (0.0, 1e-45, 1e-38, 1e-30, 3e38):  # what topk refuses begins at 3.19e38
        values = torch.full((1, 256), value)
        values[:, ::2] *= -1
        found = round_trip(codec, values)
        if name not in SUMMED or value < 1e38:  # a sum of magnitudes may overflow: then it is NaN
            assert bool(found.isfinite().all()), value
            assert bool((found.abs() <= value * 1.11).all()), value


# Error feedback


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", CODECS)
def test_nothing_is_lost(name: str, dtype: torch.dtype) -> None:
    """a·ΣD(m) = Σg - E, as nearly as the residual is stored."""
    for recursion in (Recursion(), Recursion(0.9, 0.5)):
        codec, residual = codec_of(name), Residual.zeros(2, 1024, dtype, 256, CPU)
        sent, due = np.zeros((2, 1024)), np.zeros((2, 1024))
        message = torch.zeros(2, codec.message_bytes(1024), dtype=torch.uint8)
        slack = 0.0
        for step in range(12):
            gradients = drawn(2, 1024, step)
            definition.encode(codec, gradients * 8, message, residual=residual, recursion=recursion, scale=1 / 8)
            sent += recursion.taken * decoded(codec, message, 1024).numpy().astype(np.float64)
            due += gradients.numpy().astype(np.float64)
            largest = float(residual.load().abs().max())
            slack += largest * {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.int8: 1 / 200}[dtype] + 1e-6
        np.testing.assert_allclose(sent + residual.load().numpy(), due, atol=slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", CODECS)
def test_a_residual_survives_what_is_not_finite(name: str, dtype: torch.dtype) -> None:
    codec, residual = codec_of(name), Residual.zeros(1, 1024, dtype, 256, CPU)
    message = torch.zeros(1, codec.message_bytes(1024), dtype=torch.uint8)
    definition.encode(codec, drawn(1, 1024), message, residual=residual)
    before = residual.load()
    bad = drawn(1, 1024, 1)
    bad[0, 600] = float("inf")
    definition.encode(codec, bad, message, residual=residual)
    after = residual.load()
    assert torch.equal(after[:, 512:768], before[:, 512:768])
    assert bool(after.isfinite().all())
    if name not in ("topk", "fp32"):
        assert not torch.equal(after[:, :512], before[:, :512])
    definition.accumulate(bad, residual)
    assert torch.equal(residual.load()[:, 512:768], after[:, 512:768])
    assert torch.allclose(residual.load()[:, :256], (after + bad)[:, :256], atol=0.05)


@pytest.mark.parametrize("name", CODECS)
def test_padding_leaves_nothing(name: str) -> None:
    codec, residual = codec_of(name), Residual.zeros(1, 512, torch.float32, 256, CPU)
    counts, gradients = torch.tensor([[256, 100]], dtype=torch.int32), drawn(1, 512)
    gradients[:, 356:] = 0
    message = torch.zeros(1, codec.message_bytes(512), dtype=torch.uint8)
    for _ in range(3):
        definition.encode(codec, gradients, message, counts=counts, residual=residual)
        assert not residual.values[:, 356:].view(torch.int32).any()


def test_sums_are_in_the_order_of_ranks() -> None:
    codec = codec_of("fp32", 64)
    parts = drawn(4, 64) * torch.tensor([[1e8], [1.0], [1e-8], [-1e8]])
    messages = encoded(codec, parts[[0, 1, 3]])
    total = torch.empty(64)
    definition.decode_sum(codec, messages, parts[2].to(torch.bfloat16), 2, total)
    expected = parts[0].numpy()
    for part in (parts[1], parts[2].to(torch.bfloat16).float(), parts[3]):
        expected = expected + part.numpy()
    assert np.array_equal(total.numpy(), expected)


def test_residuals_have_three_dtypes() -> None:
    sizes = [Residual.zeros(2, 1024, dtype, 256, CPU).nbytes for dtype in (torch.float32, torch.bfloat16, torch.int8)]
    assert sizes == [8192, 4096, 2048 + 2 * 4 * 4]
