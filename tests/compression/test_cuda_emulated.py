"""The CUDA kernels' own source, run by an emulator (``simt``), against the plain-torch definitions, to the bit.

Neither speed nor what a real GPU does with memory is seen here; every index, shuffle, barrier and rounding is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compression import definition, simt
from tests.compression.kernel_checks import (
    AT_RANDOM,
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
from tests.soak import LONG, SOAK, also
from yafsdp_cc.compression.codec import Noise, codec_of
from yafsdp_cc.compression.error_feedback import EF21, Recursion, Residual

pytestmark = [
    pytest.mark.skipif(simt.compiler() is None, reason="no g++"),
    pytest.mark.timeout(900),  # it compiles
]

PART = 327_680


@pytest.fixture(scope="module")
def built() -> simt.Emulated:
    return simt.emulated_ops(Path(os.environ.get("YAFSDP_SIMT_KERNELS", simt.KERNELS)))


@pytest.fixture(params=[1, also(2), also(3)])
def ops(built: simt.Emulated, request: pytest.FixtureRequest) -> simt.Emulated:
    built.seed(request.param)
    return built


@pytest.fixture
def checks(ops: simt.Emulated) -> KernelChecks:
    return KernelChecks(ops, "cpu")


def elements(name: str, block: int) -> int:
    """Not a whole number of fives of blocks, of warps or of tiles."""
    return (65_536 + 5_000) // block * block + block if name == "topk" else 7 * block


def some(name: str, values: Sequence[Any], turn: int) -> list[tuple[int, Any]]:
    """Number ``values``, and return all of them; outside of ``make soak`` each second from ``turn`` on, or each third
    for topk, whose least tile is large."""
    every, apart = list(enumerate(values)), 3 if name == "topk" else 2
    return every if SOAK else every[turn % apart :: apart]


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_encode_every_block(checks: KernelChecks, name: str, residual: torch.dtype | None) -> None:
    for seed, block in some(name, BLOCKS, RESIDUALS.index(residual)):
        n, messages = elements(name, block), 1 if name == "topk" else 3
        checks.encode(name, block, Case(numbers("usual", messages, n, torch.float32, seed), residual=residual))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_encode_what_is_awkward(checks: KernelChecks, name: str, kind: str) -> None:
    for seed, dtype in enumerate(GRADIENTS):
        for at, residual in enumerate(RESIDUALS):
            if name == "topk":
                blocks = [256] if at == seed else []
            else:  # each with each residual, of one of the dtypes
                blocks = [64, 256, 512] if SOAK else [(64, 256, 512)[(seed + at) % 3]]
            for block in blocks:
                gradients = numbers(kind, 1, elements(name, block), dtype, seed)
                checks.encode(name, block, Case(gradients, residual=residual, scale=0.37))


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_encode_with_tails(checks: KernelChecks, name: str, residual: torch.dtype | None) -> None:
    kinds = [(256, Recursion(0.9, 0.95)), (128, Recursion(1.0, 0.5)), (1024, EF21)]
    for seed, (block, recursion) in some(name, kinds, RESIDUALS.index(residual)):
        n = elements(name, block)
        counts = some_counts(2, n // block, block, seed)
        gradients = numbers("ragged", 2, n, GRADIENTS[seed], seed)
        padding = torch.arange(block) >= counts.unsqueeze(-1)
        gradients.masked_fill_(padding.flatten(1), 0.0)
        checks.encode(name, block, Case(gradients, counts, residual, recursion, scale=2.0**-11))
        # Padding that is not zero, which only a mistake makes, is not remembered either.
        gradients = numbers("usual", 2, n, torch.float32, seed)
        checks.encode(name, block, Case(gradients, counts, residual, recursion), steps=1)


@pytest.mark.parametrize("name", AT_RANDOM)
def test_encode_at_random(checks: KernelChecks, name: str) -> None:
    noises = (Noise(0), Noise(0xDEADBEEF, 2**32 - 700), Noise(12345, 5 * 2**33 + 77))
    for seed, block in enumerate(BLOCKS):
        for at, kind in enumerate(("usual", "ragged", "bad", "tiny")):
            gradients = numbers(kind, 3, elements(name, block), GRADIENTS[seed % 3], seed)
            for noise in noises if SOAK else noises[(seed + at) % 3 :: 3]:
                checks.encode(name, block, Case(gradients, noise=noise), steps=1)


@pytest.mark.parametrize("name", AT_RANDOM)
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
    n = 3 * 65_536 if SOAK else 65_536 + 4096
    alike = torch.randint(-2, 3, (2, n), generator=draw).float()
    few = torch.where(torch.rand(2, n, generator=draw) < 0.001, alike, -0.0)
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


@pytest.mark.parametrize(("turn", "kind"), list(enumerate(["usual", "ragged", "zeros", "bad"])))
@pytest.mark.parametrize("name", NAMES)
def test_decode(checks: KernelChecks, name: str, kind: str, turn: int) -> None:
    for block in BLOCKS if name != "topk" else (128,):
        n = elements(name, block)
        message = messages_of(name, block, kind, 3, n)
        for _, dtype in some(name, GRADIENTS, turn):
            checks.decode(name, block, message, n, dtype, odd=block == 128)
        mine = numbers("zeros", 1, n, torch.bfloat16, 6)[0]
        for _, (own, place) in some(name, ((None, 0), (mine, 0), (mine.float(), 1), (mine.half(), 3)), turn):
            checks.decode_sum(name, block, message, n, own, place, PART, odd=block == 128)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "topk"])
def test_a_sum_of_many_messages(checks: KernelChecks, name: str) -> None:
    """Several messages are on their way at once, and are added in their order nevertheless."""
    at_once = set()
    for turn, messages in enumerate((15, 16, 17, 40)):
        # A sum of random numbers ("usual") has other last bits where messages are added in another order.
        sums = [(None, 0), (torch.float32, 0), (torch.bfloat16, messages // 2), (torch.float16, messages)]
        for other, (dtype, place) in enumerate(sums):
            for block in BLOCKS[:4] if SOAK else [BLOCKS[(turn + other) % 4]]:
                n = elements(name, block)
                message = messages_of(name, block, "bad" if turn == other == 2 else "usual", messages, n)
                own = None if dtype is None else numbers("usual", 1, n, dtype, 6)[0]
                checks.decode_sum(name, block, message, n, own, place, PART, odd=other % 2 == 1)
                kernel = checks.ops.launched()[0]
                at_once.add((messages >= 16, kernel.removesuffix(">").rpartition(" ")[2]))
    few, many = sorted(at_once)
    assert few == (False, "1")
    assert many[0]
    assert int(many[1]) > 1


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
    # A whole tile, whose positions are all in range. Of the other, position 65,535 is not.
    message[:, : 2 * 656].view(torch.int16)[:] = torch.arange(656, dtype=torch.int16)
    values = torch.empty(2, n)
    checks.ops.decode(message, NAMES.index("topk"), 256, values, 0)
    assert values.isnan().sum(1).tolist() == [656, 656]
    assert values[:, 656:].eq(0).all()


def test_a_tile_beyond_32_bits_is_found(built: simt.Emulated) -> None:
    """The number of its first element is more than an ``unsigned`` holds, and its length follows from that number. What
    is before it in the message is memory that is never touched."""
    codec, rest, start = codec_of("topk", 256), 4096, (2**32 // PART + 1) * PART
    message = torch.zeros(1, codec.message_bytes(start + rest), dtype=torch.uint8)
    end = messages_of("topk", 256, "usual", 1, rest)
    message[:, codec.body_bytes(start) : codec.body_bytes(start) + end.shape[1]] = end
    found, expected = torch.full((rest,), torch.nan), torch.zeros(1, rest)
    codec.decode(end, expected)
    built.decode_sum(message, NAMES.index("topk"), 256, start + rest, None, 0, found, start, 0)
    assert found.equal(expected[0])


@pytest.mark.parametrize(("turn", "name"), list(enumerate(NAMES)))
def test_decode_in_parts(checks: KernelChecks, turn: int, name: str) -> None:
    blocks = (64, 256, 4096)
    for block in blocks if SOAK else blocks[turn % 3 :: 3]:
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
            "added": 1.0,
            "scale": 1.0,
            "seed": -1,
            "first": 0,
            "stream": 0,
        }
        checks.ops.encode(*(given | other).values())

    call()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("no codec", {"codec": 11}),
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


@pytest.mark.parametrize(
    ("number", "finding"),
    [
        (1, "an access at an odd address"),
        (2, "shared memory that thread .* too, without a barrier between|shared memory that nobody has written"),
        (3, "changes shared memory that nobody has written"),
        (4, "global memory that thread .* too, without a barrier between"),
        (5, "reads 4 bytes that are not in a tensor"),
        (6, "writes what is only to be read"),
        (8, "threads wait for others that never come"),
        (9, "shared memory that thread .* too, without a barrier between"),
    ],
)
def test_the_emulator_finds_defects(ops: simt.Emulated, number: int, finding: str) -> None:
    numbers, out = torch.randn(256), torch.zeros(256)
    assert ops.defect(0, numbers, out) is None
    assert out.equal(numbers.view(-1, 32).flip(1).flatten())
    # Several times: now and then there is but one thread block.
    assert any(re.search(finding, ops.defect(number, numbers, out) or "nothing") for _ in range(8))


def test_the_emulator_fills_local_variables(ops: simt.Emulated) -> None:
    out = torch.zeros(256)
    assert ops.defect(7, torch.zeros(256), out) is None
    assert out.all()


CHANGES = {
    "rows.wide = aligned(rows.data, rows.stride * size, 4 * size)": ("ops.cpp", "rows.wide = true", "odd address"),
    "at.bound = at.found = 0;": ("codecs/topk.cuh", "at.bound = 0;", "nobody has written"),
    "__syncthreads(); // before the residual that": (
        "codecs/topk.cuh",
        "// before the residual that",
        "without a barrier",
    ),
    "__syncthreads(); // before the next tile takes the workspace": ("codecs/topk.cuh", "", "without a barrier"),
    "__syncwarp(); // every thread has read": ("block.cuh", "// every thread has read", "without a barrier"),
    "static_cast<long long>(tile) * TILE)": ("codecs/tile.cuh", "tile * TILE)", "test_a_tile_beyond_32_bits_is_found"),
    "max(team_count(count), 1u)": ("codecs/ternary.cuh", "max(count, 1u)", "AssertionError"),
    "block < blocks), codec)": ("encode.cuh", "true), codec)", "not in a tensor"),
    '"--fmad=false", ': ("nvrtc.cpp", "", "option --fmad=false is missing"),
    "{ CHECK(cuCtxPushCurrent_v2, context); }": ("nvrtc.cpp", "{ (void)context; }", "cuModuleLoadData: no context"),
    "const bool wide = job.gradients.wide": ("launch.cpp", "const bool wide = true", "known, but untrue: .*wide"),
    '{"FP8", "FP8",': ("launch.cpp", '{"FP8", "FP4",', "AssertionError|no instance of encode_kernel<FP4"),
}
"""Defects put into the kernels: what is replaced, where, by what, and what is reported then."""


@LONG
@pytest.mark.parametrize("text", CHANGES)
def test_the_emulator_finds_defects_in_the_kernels(text: str, tmp_path: Path) -> None:
    name, changed, finding = CHANGES[text]
    kernels = tmp_path / "cuda"
    shutil.copytree(simt.KERNELS, kernels)
    source = kernels / name
    assert source.read_text().count(text) == 1
    source.write_text(source.read_text().replace(text, changed))
    # Operators are registered once for each process.
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"YAFSDP_SOAK": "", "YAFSDP_SIMT_KERNELS": str(kernels)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 1, told.stdout
    assert re.search(finding, told.stdout), told.stdout


def encode(ops: simt.Emulated, name: str, block: int, n: int, seed: int = -1, stream: int = 0) -> torch.Tensor:
    message = torch.zeros(1, codec_of(name, block).message_bytes(n), dtype=torch.uint8)
    number = NAMES.index(name)
    ops.encode(torch.ones(1, n), message, number, block, None, None, None, 1.0, 1.0, 1.0, 1.0, seed, 0, stream)
    return message


def test_every_kernel_is_launched(ops: simt.Emulated) -> None:
    """All that ``test_nvrtc.py`` compiles, and no other."""
    names = set()

    def call(operator: str, *arguments: Any) -> None:
        getattr(ops, operator)(*arguments, 0)
        names.add(ops.launched()[0])

    for block in (64, 128, 256, 512):
        for name in NAMES:
            for seed in (-1, 1):
                message = encode(ops, name, block, block, seed)
                names.add(ops.launched()[0])
            call("decode", message, NAMES.index(name), block, torch.empty(1, block))
            many = message.repeat(16, 1)
            call("decode_sum", many, NAMES.index(name), block, block, None, 0, torch.empty(block), 0)
        call("accumulate", torch.ones(1, block), torch.ones(1, block), torch.ones(1, 0), block, 1.0)
    weights, gradients, momenta = ([torch.ones(8)] for _ in range(3))
    call("update", 0, weights, gradients, momenta, [], torch.ones(1, 3))
    call("update_lamb", 0, weights, gradients, momenta, [torch.ones(8)], [], torch.ones(1, 13), torch.ones(3, 1, 1))
    assert names == set(ops.kernels())


@pytest.mark.parametrize(
    ("asked", "blocks", "thread_blocks"),
    [
        # Two thread blocks fit on each of 132 multiprocessors, of which 99 are taken.
        ("", 8 * 300, 2 * 99),
        ("1", 8 * 300, 2),
        ("66", 8 * 300, 2 * 66),
        ("132", 8 * 300, 2 * 132),
        ("200", 8 * 300, 2 * 132),
        # A thread block has 8 teams of 16 threads.
        ("", 8, 1),
        ("", 9, 2),
    ],
)
def test_the_grid_is_what_fits(
    built: simt.Emulated, monkeypatch: pytest.MonkeyPatch, asked: str, blocks: int, thread_blocks: int
) -> None:
    monkeypatch.setenv("YAFSDP_CC_CUDA_SMS", asked)
    encode(built, "int8", 64, 64 * blocks, stream=5)
    kernel, grid, threads, stream, contexts, option = built.launched()
    assert kernel == "encode_kernel<Whole<8, false>, 1, false>"
    assert (int(grid), threads, stream) == (thread_blocks, "128", "5")
    assert contexts == "0"  # the caller's context is as it was
    assert option == "-arch=sm_90"


def test_nothing_to_do(checks: KernelChecks) -> None:
    checks.encode("int8", 256, Case(torch.zeros(0, 512)))
    residual = Residual.zeros(0, 256, torch.int8, 256, torch.device("cpu"))
    checks.ops.accumulate(torch.zeros(0, 256), residual.values, residual.scales, 256, 1.0, 0)
