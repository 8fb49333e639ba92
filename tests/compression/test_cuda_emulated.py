"""The CUDA kernels' own source, run by an emulator (``simt``), against the plain-torch definitions, to the bit.

Neither speed nor what a real GPU does with memory is seen here; every index, shuffle, barrier and rounding is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compression import definition, simt
from tests.compression.kernel_checks import (
    BLOCKS,
    GRADIENTS,
    KINDS,
    NAMES,
    RESIDUALS,
    Case,
    KernelChecks,
    numbers,
    some_counts,
)
from yafsdp_cc.compression.codec import Noise, codec_of
from yafsdp_cc.compression.error_feedback import Recursion, Residual

pytestmark = [
    pytest.mark.skipif(simt.compiler() is None, reason="no g++"),
    pytest.mark.timeout(900),  # it compiles
]

PART = 327_680


@pytest.fixture(scope="module")
def ops() -> Any:
    return simt.emulated_ops()


@pytest.fixture
def checks(ops: Any) -> KernelChecks:
    return KernelChecks(ops, "cpu")


def elements(name: str, block: int) -> int:
    """Not a whole number of fives of blocks, of warps or of tiles."""
    return (65_536 + 5_000) // block * block + block if name == "topk" else 7 * block


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_encode_every_block(checks: KernelChecks, name: str, residual: torch.dtype | None) -> None:
    for seed, block in enumerate(BLOCKS):
        n, messages = elements(name, block), 1 if name == "topk" else 3
        checks.encode(name, block, Case(numbers("usual", messages, n, torch.float32, seed), residual=residual))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_encode_what_is_awkward(checks: KernelChecks, name: str, kind: str) -> None:
    for seed, dtype in enumerate(GRADIENTS):
        for at, residual in enumerate(RESIDUALS):
            for block in (64, 256, 512) if name != "topk" else (256,) if at == seed else ():
                gradients = numbers(kind, 1, elements(name, block), dtype, seed)
                checks.encode(name, block, Case(gradients, residual=residual, scale=0.37))


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_encode_with_tails(checks: KernelChecks, name: str, residual: torch.dtype | None) -> None:
    for seed, (block, recursion) in enumerate(
        [(256, Recursion(0.9, 0.95)), (128, Recursion(1.0, 0.5)), (1024, Recursion(0.1, 1.0))]
    ):
        n = elements(name, block)
        counts = some_counts(2, n // block, block, seed)
        gradients = numbers("ragged", 2, n, GRADIENTS[seed], seed)
        padding = torch.arange(block) >= counts.unsqueeze(-1)
        gradients.masked_fill_(padding.flatten(1), 0.0)
        checks.encode(name, block, Case(gradients, counts, residual, recursion, scale=2.0**-11))
        # Padding that is not zero, which only a mistake makes, is not remembered either.
        gradients = numbers("usual", 2, n, torch.float32, seed)
        checks.encode(name, block, Case(gradients, counts, residual, recursion), steps=1)


@pytest.mark.parametrize("name", ["int8", "int4", "ternary"])
def test_encode_at_random(checks: KernelChecks, name: str) -> None:
    for seed, block in enumerate(BLOCKS):
        for kind in ("usual", "ragged", "bad", "tiny"):
            gradients = numbers(kind, 3, elements(name, block), GRADIENTS[seed % 3], seed)
            for noise in (Noise(0), Noise(0xDEADBEEF, 2**32 - 700), Noise(12345, 5 * 2**33 + 77)):
                checks.encode(name, block, Case(gradients, noise=noise), steps=1)


@pytest.mark.parametrize("name", ["int8", "int4", "ternary"])
def test_a_residual_makes_rounding_nearest(checks: KernelChecks, name: str) -> None:
    gradients = numbers("usual", 2, elements(name, 256), torch.float32, 0)
    checks.encode(name, 256, Case(gradients, residual=torch.float32, noise=Noise(1)))


@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_encode_at_odd_addresses(checks: KernelChecks, name: str, dtype: torch.dtype) -> None:
    for residual in RESIDUALS if name != "topk" else (torch.bfloat16,):
        for block in (64, 256) if name != "topk" else (256,):
            gradients = numbers("usual", 2, elements(name, block), dtype, 1)
            checks.encode(name, block, Case(gradients, residual=residual), odd=True)


def test_a_tile_of_few_buckets(checks: KernelChecks) -> None:
    """More elements at the threshold than there is room for, all over the tile; and fewer than are kept that are not
    zero."""
    draw = torch.Generator().manual_seed(0)
    alike = torch.randint(-2, 3, (2, 3 * 65_536), generator=draw).float()
    few = torch.where(torch.rand(2, 3 * 65_536, generator=draw) < 0.001, alike, -0.0)
    for gradients in (alike, few, torch.zeros(1, 64), torch.ones(1, 128)):
        for residual in (None, torch.float32):
            checks.encode("topk", 64, Case(gradients, residual=residual), steps=1)


@pytest.mark.parametrize("dtype", RESIDUALS[1:], ids=str)
def test_accumulate(checks: KernelChecks, dtype: torch.dtype) -> None:
    for seed, block in enumerate(BLOCKS):
        for gradient in GRADIENTS:
            for odd, kind in enumerate(("ragged", "bad", "tiny") if block <= 512 else ("bad",)):
                gradients = numbers(kind, 2, 5 * block, gradient, seed)
                checks.accumulate(gradients, dtype, block, 0.37, odd=odd == 1)


def messages_of(name: str, block: int, kind: str, messages: int, n: int) -> torch.Tensor:
    codec = codec_of(name, block)
    message = torch.zeros(messages, codec.message_bytes(n), dtype=torch.uint8)
    definition.encode(codec, numbers(kind, messages, n, torch.float32, 5), message)
    return message


@pytest.mark.parametrize("kind", ["usual", "ragged", "zeros", "bad"])
@pytest.mark.parametrize("name", NAMES)
def test_decode(checks: KernelChecks, name: str, kind: str) -> None:
    for block in BLOCKS if name != "topk" else (128,):
        n = elements(name, block)
        message = messages_of(name, block, kind, 3, n)
        for dtype in GRADIENTS:
            checks.decode(name, block, message, n, dtype, odd=block == 128)
        mine = numbers("zeros", 1, n, torch.bfloat16, 6)[0]
        for own, place in ((None, 0), (mine, 0), (mine.float(), 1), (mine.half(), 3)):
            checks.decode_sum(name, block, message, n, own, place, PART, odd=block == 128)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "topk"])
def test_decode_anything(checks: KernelChecks, name: str) -> None:
    """Codes that no encoder writes mean what the definition makes of them, too."""
    for block in BLOCKS:
        n = 11 * block
        draw = torch.Generator().manual_seed(block)
        message = torch.randint(0, 256, (2, codec_of(name, block).message_bytes(n)), generator=draw, dtype=torch.uint8)
        checks.decode(name, block, message, n, torch.float32)


def test_positions_out_of_range_touch_nothing(checks: KernelChecks) -> None:
    n = 65_536 + 256
    message = torch.full((2, codec_of("topk", 256).message_bytes(n)), 0xFF, dtype=torch.uint8)
    values = torch.empty(2, n)
    checks.ops.decode(message, NAMES.index("topk"), 256, values, 0)
    assert int((values != 0).sum()) == 2  # position 65,535 of the whole tiles


@pytest.mark.parametrize("name", NAMES)
def test_decode_in_parts(checks: KernelChecks, name: str) -> None:
    for block in (64, 256, 4096):
        n = PART + 3 * 4096
        message = messages_of(name, block, "zeros", 2, n)
        checks.decode_sum(name, block, message, n, numbers("usual", 1, n, torch.bfloat16, 3)[0], 1, PART)


def test_what_is_not_right_is_an_error(checks: KernelChecks) -> None:
    def call(**other: Any) -> None:
        given: dict[str, Any] = {
            "gradients": torch.zeros(2, 512),
            "message": torch.zeros(2, 576, dtype=torch.uint8),
            "codec": NAMES.index("int8"),
            "block": 256,
            "counts": None,
            "residual": None,
            "residual_scales": None,
            "carry": 1.0,
            "taken": 1.0,
            "scale": 1.0,
            "seed": -1,
            "first": 0,
            "stream": 0,
        }
        checks.ops.encode(*(given | other).values())

    call()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("no codec", {"codec": 8}),
        ("no blocks of", {"block": 96}),
        ("not a multiple", {"gradients": torch.zeros(2, 500)}),
        ("too short", {"message": torch.zeros(2, 512, dtype=torch.uint8)}),
        ("not contiguous", {"gradients": torch.zeros(512, 2).t()}),
        ("not as many", {"message": torch.zeros(1, 576, dtype=torch.uint8)}),
        ("not floating", {"gradients": torch.zeros(2, 512, dtype=torch.int8)}),
        ("no kernel takes", {"gradients": torch.zeros(2, 512, dtype=torch.float64)}),
        ("counts are not", {"counts": torch.zeros(2, 2, dtype=torch.int64)}),
        ("should be", {"residual": torch.zeros(2, 256)}),
        ("has fp32 scales", {"residual": torch.zeros(2, 512, dtype=torch.int8)}),
        ("not stored as fp16", {"residual": torch.zeros(2, 512, dtype=torch.float16)}),
    ]
    for text, other in wrong:
        with pytest.raises(RuntimeError, match=text):
            call(**other)


def test_nothing_to_do(checks: KernelChecks) -> None:
    checks.encode("int8", 256, Case(torch.zeros(0, 512)))
    residual = Residual.zeros(0, 256, torch.int8, 256, torch.device("cpu"))
    checks.ops.accumulate(torch.zeros(0, 256), residual.values, residual.scales, 256, 1.0, 0)
