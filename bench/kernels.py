"""Native kernels beside a copy of as many bytes, and beside plain torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yafsdp_cc.compression import error_feedback, kernels
from yafsdp_cc.compression.codec import Noise, codec_of
from yafsdp_cc.compression.error_feedback import Residual
from yafsdp_cc.compression.kernels import ops_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CODECS = ("onebit", "ternary", "int4", "int8", "fp8", "topk", "bf16", "fp32")
CPU = torch.device("cpu")

WANTED = {"onebit": 0.8, "int8": 0.8, "int4": 0.6, "ternary": 0.6, "topk": 0.4}
"""How much of a copy's speed is aimed at: fp32 gradients, fp32 residual."""
FASTER = {"onebit": 20.0, "int8": 20.0, "int4": 20.0}
"""And how many times the speed of plain torch."""

_PLAIN = 16
"""Plain torch takes turns with the native kernel on a part this many times smaller."""


@dataclass
class Job:
    """One call, and what it moves."""

    codec: str
    what: str
    bytes: int
    """Read and written."""
    native: Callable[[], None]
    wanted: float | None = None


def measure(names: list[str], elements: int, rounds: int) -> dict[str, Any]:
    """Every job's times, round by round, with a copy of as many bytes just before."""
    if ops_for(CPU) is None:
        raise SystemExit("bench/wire.py measures the native kernels, and they are not built")
    source = torch.ones(elements * 8, dtype=torch.uint8)
    target = torch.zeros_like(source)
    jobs = [job for name in names for job in _jobs(name, elements)]
    for job in jobs:
        job.native()
    clocks: dict[int, list[tuple[float, float]]] = {number: [] for number in range(len(jobs))}
    for _ in range(rounds):
        for number, job in enumerate(jobs):
            half = min(job.bytes // 2, len(source))
            copied = _time(partial(target[:half].copy_, source[:half])) * job.bytes / (2 * half)
            clocks[number].append((copied, _time(job.native)))
    return {
        "elements": elements,
        "rounds": rounds,
        "jobs": [_figures(job, clocks[number], elements) for number, job in enumerate(jobs)],
        "plain": [_plain(name, max(elements // _PLAIN, 4096), min(rounds, 3)) for name in names],
    }


def _time(call: Callable[[], Any]) -> float:
    """Processor milliseconds of this thread."""
    start = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - start)


def _figures(job: Job, clocks: list[tuple[float, float]], elements: int) -> dict[str, Any]:
    ms, ratio = median(own for _, own in clocks), median(copy / own for copy, own in clocks)
    return {
        "codec": job.codec,
        "what": job.what,
        "bytes_per_element": job.bytes / elements,
        "ms": {"median": ms, "rounds": [own for _, own in clocks]},
        "copy_ms": {"median": median(copy for copy, _ in clocks), "rounds": [copy for copy, _ in clocks]},
        "gb_per_s": job.bytes / ms / 1e6,
        "of_a_copy": ratio,
        "wanted": job.wanted,
    }


_buffers: dict[tuple[int, torch.dtype], Tensor] = {}


def _gradients(n: int, dtype: torch.dtype) -> Tensor:
    """[1, n], the same for every job."""
    if (n, dtype) not in _buffers:
        drawn = torch.randn(1, n, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
        _buffers[n, dtype] = drawn.to(dtype)
    return _buffers[n, dtype]


def _jobs(name: str, n: int) -> Iterator[Job]:
    codec = codec_of(name)
    message = torch.zeros(1, codec.message_bytes(n), dtype=torch.uint8)
    kernels.encode(codec, _gradients(n, torch.float32), message)

    def encode(dtype: torch.dtype, kept: torch.dtype | None, noise: Noise | None = None) -> Job:
        gradients = _gradients(n, dtype)
        residual = None if kept is None else Residual(1, n, kept, codec.block, CPU)
        moved = gradients.nbytes + message.nbytes + (0 if residual is None else 2 * residual.nbytes)
        how = ("drawn" if noise else "none") if kept is None else _short(kept)
        return Job(
            name,
            f"encode {_short(dtype)}, {how}",
            moved,
            lambda: kernels.encode(codec, gradients, message, residual=residual, noise=noise),
            WANTED.get(name) if dtype == kept == torch.float32 else None,
        )

    yield encode(torch.float32, torch.float32)
    yield encode(torch.bfloat16, torch.float32)
    yield encode(torch.bfloat16, torch.bfloat16)
    yield encode(torch.float32, torch.int8)
    yield encode(torch.float32, None)
    if codec.rounds_randomly:
        yield encode(torch.float32, None, Noise(1))
    quarter = n // 4
    four = torch.zeros(4, codec.message_bytes(quarter), dtype=torch.uint8)
    kernels.encode(codec, _gradients(n, torch.float32).view(4, quarter), four)
    total = torch.zeros(quarter)
    yield Job(
        name,
        "sum of 4 messages",
        four.nbytes + total.nbytes,
        lambda: kernels.decode_sum(codec, four, quarter, None, 0, total),
    )
    values = torch.zeros(1, quarter, dtype=torch.bfloat16)
    yield Job(
        name,
        "decode bf16",
        four[:1].nbytes + values.nbytes,
        lambda: kernels.decode(codec, four[:1], values),
    )


def _plain(name: str, n: int, rounds: int) -> dict[str, Any]:
    """Encoding with an fp32 residual, by the definitions and natively."""
    codec, gradients = codec_of(name), _gradients(n, torch.float32)
    message = torch.zeros(1, codec.message_bytes(n), dtype=torch.uint8)
    residual = Residual(1, n, torch.float32, codec.block, CPU)
    clocks = []
    for turn in range(rounds + 1):
        native = min(
            _time(lambda: kernels.encode(codec, gradients, message, residual=residual)) for _ in range(_PLAIN // 4)
        )
        plain = _time(lambda: error_feedback.encode(codec, gradients, message, residual=residual))
        if turn:  # the first one warms up
            clocks.append((native, plain))
    return {
        "codec": name,
        "elements": n,
        "native_ms": median(native for native, _ in clocks),
        "plain_ms": median(plain for _, plain in clocks),
        "faster": median(plain / native for native, plain in clocks),
        "wanted": FASTER.get(name),
    }


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}[dtype]


def table(result: dict[str, Any]) -> str:
    """Fixed-width, at most 110 columns."""
    lines = ["", f"{result['elements'] / 2**20:.0f} Mi elements, one thread, median of {result['rounds']} rounds"]
    lines.append(
        f"{'codec':<9}{'gradients, residual':<20}{'B/elem':>8}{'ms':>8}{'GB/s':>7}{'copy ms':>9}{'of a copy':>11}"
        f"{'wanted':>8}"
    )
    for job in result["jobs"]:
        lines.append(
            f"{job['codec']:<9}{job['what']:<20}{job['bytes_per_element']:>8.2f}{job['ms']['median']:>8.1f}"
            f"{job['gb_per_s']:>7.1f}{job['copy_ms']['median']:>9.1f}{job['of_a_copy']:>11.2f}"
            + _verdict(job["wanted"], job["of_a_copy"])
        )
    lines += ["", f"encode fp32, fp32 of {result['plain'][0]['elements'] / 2**20:.1f} Mi elements"]
    lines.append(f"{'codec':<9}{'native ms':>11}{'plain torch ms':>16}{'times':>8}{'wanted':>8}")
    for one in result["plain"]:
        lines.append(
            f"{one['codec']:<9}{one['native_ms']:>11.1f}{one['plain_ms']:>16.1f}{one['faster']:>8.0f}"
            + _verdict(one["wanted"], one["faster"])
        )
    return "\n".join(lines)


def _verdict(wanted: float | None, found: float) -> str:
    return "" if wanted is None else f"{wanted:>8.1f}{'' if found >= wanted else '  no'}"
