"""The CUDA kernels on a GPU, against the plain-torch definitions there and on the CPU, to the bit.

The same source is held to the same definitions, emulated, by ``test_cuda_emulated.py``. What is added here is what an
emulator cannot show: large grids, streams, capture.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compression import definition
from tests.compression.kernel_checks import (
    AT_RANDOM,
    GRADIENTS,
    KINDS,
    NAMES,
    RESIDUALS,
    Case,
    KernelChecks,
    numbers,
    some_counts,
)
from yafsdp_cc.compression.codec import BLOCKS, Noise, codec_of
from yafsdp_cc.compression.error_feedback import Recursion, ops_for

OPS = ops_for(torch.device("cuda")) if torch.cuda.is_available() else None
if OPS is None:
    pytest.skip("no CUDA device, or no native extension for it", allow_module_level=True)

PART = 327_680


@pytest.fixture(params=["cpu", "cuda"])
def checks(request: pytest.FixtureRequest) -> KernelChecks:
    return KernelChecks(OPS, "cuda", reference=request.param)


def elements(block: int) -> int:
    """Some tiles and many blocks, no whole number of either."""
    return (3 * 65_536 + 5_000) // block * block + block


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_encode(checks: KernelChecks, name: str, residual: torch.dtype | None) -> None:
    for seed, block in enumerate(BLOCKS):
        for kind in ("usual", KINDS[seed % len(KINDS)]):
            gradients = numbers(kind, 3, elements(block), GRADIENTS[seed % 3], seed)
            checks.encode(name, block, Case(gradients, residual=residual, scale=0.37))


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_encode_with_tails_at_odd_addresses(checks: KernelChecks, name: str, residual: torch.dtype | None) -> None:
    for seed, block in enumerate(BLOCKS):
        n = elements(block)
        counts = some_counts(2, n // block, block, seed)
        gradients = numbers("ragged", 2, n, GRADIENTS[seed % 3], seed)
        checks.encode(name, block, Case(gradients, counts, residual, Recursion(0.9, 0.95)), odd=True)


@pytest.mark.parametrize("name", AT_RANDOM)
def test_encode_at_random(checks: KernelChecks, name: str) -> None:
    for block in BLOCKS:
        gradients = numbers("ragged", 3, elements(block), torch.bfloat16, block)
        checks.encode(name, block, Case(gradients, noise=Noise(0xDEADBEEF, 2**32 - 700)))


@pytest.mark.parametrize("dtype", RESIDUALS[1:], ids=str)
def test_accumulate(checks: KernelChecks, dtype: torch.dtype) -> None:
    for seed, block in enumerate(BLOCKS):
        for kind in KINDS:
            gradients = numbers(kind, 2, elements(block), GRADIENTS[seed % 3], seed)
            checks.accumulate(gradients, dtype, block, 0.37)


def messages_of(name: str, block: int, kind: str, n: int, messages: int = 3) -> Tensor:
    codec = codec_of(name, block)
    message = torch.zeros(messages, codec.message_bytes(n), dtype=torch.uint8)
    definition.encode(codec, numbers(kind, messages, n, torch.float32, 5), message)
    return message


@pytest.mark.parametrize("name", NAMES)
def test_decode(checks: KernelChecks, name: str) -> None:
    for block in (64, 256, 1024):
        n = PART + 3 * 4096
        for kind in ("zeros", "bad"):
            message = messages_of(name, block, kind, n)
            for dtype in GRADIENTS:
                checks.decode(name, block, message, n, dtype)
            own = numbers("zeros", 1, n, torch.bfloat16, 6)[0]
            for mine, place in ((None, 0), (own, 0), (own.float(), 2), (own, 3)):
                checks.decode_sum(name, block, message, n, mine, place, PART)


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_of_many_messages(checks: KernelChecks, name: str) -> None:
    """Several messages are on their way at once, and are added in their order nevertheless."""
    n = 65_536 + 20 * 256
    own = numbers("usual", 1, n, torch.float32, 6)[0]
    for block in (128, 256):
        for messages in (16, 17, 40):
            message = messages_of(name, block, "usual", n, messages)
            for mine, place in ((None, 0), (own, 0), (own.bfloat16(), messages // 2), (own.half(), messages)):
                checks.decode_sum(name, block, message, n, mine, place, PART, odd=block == 128)


LARGE = 2**32 // PART * PART + PART
"""More elements than 32 bits can count, and a whole number of parts."""


def test_messages_beyond_32_bits() -> None:
    """Parts of a message do not depend on each other, so its end is that of its end alone."""
    # Gradients of 4 billion elements and their message in bf16 are 16 GiB, and the allocator rounds up. A GPU without
    # that memory encodes no tile beyond 2^32; test_a_tile_beyond_32_bits_is_found emulates decoding one without a GPU.
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("a message of 4 billion elements and its gradients want 24 GiB")
    end = numbers("usual", 1, 4096, torch.bfloat16, 4)
    gradients = torch.zeros(1, LARGE + 4096, dtype=torch.bfloat16, device="cuda")
    gradients[:, LARGE:] = end.cuda()
    ops: Any = OPS
    stream, total = torch.cuda.current_stream().cuda_stream, torch.empty(4096, device="cuda")
    for name in ("topk", "onebit", "int8", "bf16"):
        codec, number = codec_of(name, 256), NAMES.index(name)
        message = torch.empty(1, codec.message_bytes(LARGE + 4096), dtype=torch.uint8, device="cuda")
        ops.encode(gradients, message, number, 256, None, None, None, 1.0, 1.0, 1.0, 1.0, -1, 0, stream)
        ops.decode_sum(message, number, 256, LARGE + 4096, None, 0, total, LARGE, stream)
        alone, expected = torch.zeros(1, codec.message_bytes(4096), dtype=torch.uint8), torch.empty(4096)
        definition.encode(codec, end, alone)
        definition.decode_sum(codec, alone, None, 0, expected)
        assert total.cpu().equal(expected), name


@pytest.mark.parametrize("processors", ["1", "7", "100000"])
def test_any_grid_gives_the_same(monkeypatch: pytest.MonkeyPatch, processors: str) -> None:
    monkeypatch.setenv("YAFSDP_CC_CUDA_SMS", processors)
    for name in NAMES:
        gradients = numbers("usual", 4, 10 * 65_536, torch.bfloat16, 3)
        KernelChecks(OPS, "cuda").encode(name, 256, Case(gradients, residual=torch.bfloat16))


class Run:
    """An encode, and a sum of its messages, of one set of tensors."""

    def __init__(self, name: str) -> None:
        self.codec, n = codec_of(name), 2_048_000
        self.gradients = torch.zeros(2, n, dtype=torch.bfloat16, device="cuda")
        self.residual = torch.zeros(2, n, device="cuda")
        self.scales = torch.zeros(2, 0, device="cuda")
        self.message = torch.zeros(2, self.codec.message_bytes(n), dtype=torch.uint8, device="cuda")
        self.total = torch.zeros(n, device="cuda")
        self.fresh = numbers("usual", 2, n, torch.bfloat16, 1).cuda()

    def __call__(self) -> None:
        ops: Any = OPS
        number, block, stream = NAMES.index(self.codec.name), self.codec.block, torch.cuda.current_stream().cuda_stream
        self.gradients.copy_(self.fresh)
        ops.encode(
            self.gradients,
            self.message,
            number,
            block,
            None,
            self.residual,
            self.scales,
            1.0,
            1.0,
            1.0,
            1.0,
            -1,
            0,
            stream,
        )
        ops.decode_sum(self.message, number, block, self.total.numel(), None, 0, self.total, 0, stream)

    def expected(self) -> Tensor:
        message = torch.zeros_like(self.message, device="cpu")
        definition.encode(self.codec, self.fresh.cpu(), message)
        total = torch.zeros_like(self.total, device="cpu")
        definition.decode_sum(self.codec, message, None, 0, total)
        return total


@pytest.mark.parametrize("name", NAMES)
def test_kernels_run_on_the_stream_they_are_given(name: str) -> None:
    run, side = Run(name), torch.cuda.Stream()
    run()  # which compiles
    for each in (run.gradients, run.message, run.residual, run.total):
        each.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # what follows on any other stream would find zeros
        run()
    assert not side.query(), "the host waited"
    side.synchronize()
    assert run.total.cpu().equal(run.expected())


@pytest.mark.parametrize("name", NAMES)
def test_kernels_allocate_nothing_and_are_captured(name: str) -> None:
    """A wait would not let them be."""
    run = Run(name)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    run.residual.zero_()
    run.total.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert run.total.cpu().equal(run.expected())
