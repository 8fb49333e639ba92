"""Native kernels beside a copy of as many bytes, and beside plain torch.

    python bench/kernels.py                                  # about five minutes, one thread
    python bench/kernels.py --codecs onebit,int8 --rounds 15
    python bench/kernels.py --device cuda                    # as bench/gpu does

A kernel moves what it reads and writes at least: gradients, residual, messages, sum. Messages are of a quarter of the
elements; 256 messages, which a rank of as many sums, are of 442,368 elements at most. *Of a copy* is the median of the
time of a copy that reads half as many bytes and writes the other half, taken just before, over the kernel's. Kernels
take turns round by round; times are medians over rounds. On a CPU they are processor milliseconds of the thread. What
is updated in place is in the cache when it is written, while a copy's target is fetched for nothing: more than a copy's
speed is possible.

On a GPU they are CUDA events', recorded behind a nap in which the host enqueues, and with nothing of the operands in
the cache. Kernels run on three quarters of the multiprocessors, as the engine launches them, and once more on all
(YAFSDP_CC_CUDA_SMS), which is what a copy has; 0.85 of it is aimed at. The last table has matrix products with a kernel
beside them on a few multiprocessors, which are to lose less than 2 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from bench.common import about, names, save
from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import Codec, Noise, codec_of
from yafsdp_cc.compression.error_feedback import Residual
from yafsdp_cc.table import table

CODECS = ("onebit", "ternary", "int2", "int3", "int4", "int6", "int8", "fp8", "topk", "bf16", "fp32")
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}
MESSAGES = 4
MANY, SHARD = 256, 442_368
"""Messages of a sum of many ranks, and elements of each at most: a rank's part of a block of 113 million parameters."""
PLAIN = 16
"""Plain torch is compared on a part this many times smaller."""
NAP = 400_000
"""Cycles, of some 0.2 ms: longer than Python and an operator take to launch a kernel."""
WARM_UP, PRODUCTS = 3, 8
"""Of matrix products: rounds before the first that counts, and products of a round."""
FEW_SMS = (8, 16, 32, 64)


class Job(NamedTuple):
    """One kernel."""

    codec: str
    what: str
    moved: int
    """Bytes read and written."""
    run: Callable[[], object]
    multiprocessors: int | None = None
    """How many of them it runs on; None on a CPU."""

    def on(self, count: int) -> Job:
        """Return the same kernel, on so many multiprocessors."""

        def limited() -> None:
            os.environ["YAFSDP_CC_CUDA_SMS"] = str(count)  # read at each launch
            self.run()

        return self._replace(run=limited, multiprocessors=count)


def jobs(name: str, gradients: dict[torch.dtype, Tensor]) -> Iterator[Job]:
    """Yield the kernels of a codec. ``gradients`` are [MESSAGES, n] of each dtype."""
    codec, (fp32, bf16) = codec_of(name), gradients.values()
    n, device = fp32.shape[1], fp32.device
    messages = torch.zeros(MESSAGES, codec.message_bytes(n), dtype=torch.uint8, device=device)
    error_feedback.encode(codec, fp32, messages)

    def encode(values: Tensor, kept: torch.dtype | None, noise: Noise | None = None) -> Job:
        residual = None if kept is None else Residual.zeros(MESSAGES, n, kept, codec.block, device)
        moved = values.nbytes + messages.nbytes + (0 if residual is None else 2 * residual.nbytes)
        what = f"encode {SHORT[values.dtype]}, " + ("random" if noise else "none" if kept is None else SHORT[kept])
        return Job(
            name, what, moved, lambda: error_feedback.encode(codec, values, messages, residual=residual, noise=noise)
        )

    yield encode(fp32, torch.float32)
    yield encode(bf16, torch.float32)
    yield encode(bf16, torch.bfloat16)
    yield encode(bf16, torch.int8)
    yield encode(bf16, None)
    if codec.rounds_randomly:
        yield encode(bf16, None, Noise(1))
    total, decoded = torch.zeros(n, device=device), torch.zeros(MESSAGES, n, dtype=torch.bfloat16, device=device)
    yield Job(
        name,
        f"sum of {MESSAGES} messages",
        messages.nbytes + total.nbytes,
        lambda: error_feedback.decode_sum(codec, messages, n, None, 0, total),
    )
    many, shard = _of_many_ranks(codec, fp32), torch.zeros(min(n, SHARD), device=device)
    yield Job(
        name,
        f"sum of {MANY} messages",
        many.nbytes + shard.nbytes,
        lambda: error_feedback.decode_sum(codec, many, shard.numel(), None, 0, shard),
    )
    yield Job(
        name,
        "decode bf16",
        messages.nbytes + decoded.nbytes,
        lambda: error_feedback.decode(codec, messages, decoded),
    )


def _of_many_ranks(codec: Codec, gradients: Tensor) -> Tensor:
    """Return MANY messages of at most SHARD elements each: MESSAGES different ones, again and again."""
    part = gradients[:, :SHARD].contiguous()
    messages = torch.zeros(MESSAGES, codec.message_bytes(part.shape[1]), dtype=torch.uint8, device=part.device)
    error_feedback.encode(codec, part, messages)
    return messages.repeat(MANY // MESSAGES, 1)


def accumulate_jobs(gradients: Tensor) -> Iterator[Job]:
    for dtype in SHORT:
        residual = Residual.zeros(*gradients.shape, dtype, 256, gradients.device)
        moved = gradients.nbytes + 2 * residual.nbytes
        yield Job(
            "any", f"accumulate in {SHORT[dtype]}", moved, partial(error_feedback.accumulate, gradients, residual)
        )


@cache
def _larger_than_the_cache(device: torch.device) -> Tensor:
    return torch.ones(torch.cuda.get_device_properties(device).L2_cache_size // 2, device=device)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Time one call: on the processor of this thread, or on the GPU, whose cache holds other things then."""
    if device.type == "cpu":
        start = time.thread_time()
        run()
        return 1e3 * (time.thread_time() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _larger_than_the_cache(device).sum()  # reads twice what the cache holds, and leaves nothing to be written back
    torch.cuda._sleep(NAP)  # the host enqueues meanwhile: what it takes to launch is not the kernel's time
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def everywhere(compared: Iterable[Job], device: torch.device) -> list[Job]:
    """Return kernels for a GPU on three quarters of its multiprocessors and on all; those for a CPU as they are."""
    if device.type == "cpu":
        return list(compared)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return [job.on(count) for job in compared for count in (processors * 3 // 4, processors)]


def race(compared: list[Job], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return figures of each kernel, in turns, each with a copy just before."""
    # Random, since what is alike everywhere takes less power to move, and a GPU's clocks rise.
    source = torch.randint(256, (max(job.moved for job in compared) // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times: list[list[tuple[float, float]]] = [[] for _ in compared]
    for turn in range(rounds + 1):
        for job, taken in zip(compared, times, strict=True):
            half = job.moved // 2
            copied = milliseconds(lambda half=half: target[:half].copy_(source[:half]), device)
            own = milliseconds(job.run, device)
            if turn:  # the first one warms up
                taken.append((own, copied))
    return [
        {
            "codec": job.codec,
            "what": job.what,
            **({} if job.multiprocessors is None else {"multiprocessors": job.multiprocessors}),
            "moved_bytes": job.moved,
            "ms": (ms := median(own for own, _ in taken)),
            "gb_per_s": job.moved / ms / 1e6,
            "of_a_copy": median(copied / own for own, copied in taken),
        }
        for job, taken in zip(compared, times, strict=True)
    ]


def beside_plain_torch(name: str, gradients: Tensor, rounds: int) -> dict[str, Any]:
    """Return how fast it encodes fp32 with an fp32 residual, by the definitions and natively."""
    codec, (messages, n) = codec_of(name), gradients.shape
    message = torch.zeros(messages, codec.message_bytes(n), dtype=torch.uint8)
    residual = Residual.zeros(messages, n, torch.float32, codec.block, gradients.device)
    encode = partial(error_feedback.encode, codec, gradients, message, residual=residual)
    found = {}
    for what, native, count in (("native_ms", "1", 4 * rounds), ("plain_ms", "0", min(rounds, 3))):
        with mock.patch.dict(os.environ, YAFSDP_CC_NATIVE=native):
            found[what] = median([milliseconds(encode, gradients.device) for _ in range(count + 1)][1:])
    return {"codec": name, "elements": gradients.numel(), **found}


def beside_matrix_products(job: Job, side: int, rounds: int) -> list[dict[str, Any]]:
    """Return how much longer products of matrices [side, side] take while ``job`` runs on so many multiprocessors."""
    device = torch.device("cuda")
    factors = [torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2)]
    product, stream = torch.empty_like(factors[0]), torch.cuda.Stream(priority=-1)

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(*factors, out=product)

    def both() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            job.run()
        products()

    times: dict[int, list[tuple[float, float]]] = {count: [] for count in FEW_SMS}
    for turn in range(WARM_UP + rounds):
        for count, taken in times.items():
            os.environ["YAFSDP_CC_CUDA_SMS"] = str(count)
            alone, together = milliseconds(products, device), milliseconds(both, device)
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                taken.append((alone, together))
    del os.environ["YAFSDP_CC_CUDA_SMS"]
    return [
        {
            "codec": job.codec,
            "multiprocessors": count,
            "ms": median(alone for alone, _ in taken),
            "longer_by": median(together / alone for alone, together in taken) - 1,
        }
        for count, taken in times.items()
    ]


def show(figures: list[dict[str, Any]]) -> None:
    """Print a table whose head are the keys."""
    cells = [[f"{each:.4g}" if isinstance(each, float) else str(each) for each in row.values()] for row in figures]
    print(table([key.replace("_", " ") for key in figures[0]], *cells), "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--codecs", type=names, default=CODECS, help=f"of {', '.join(CODECS)}")
    parser.add_argument("--elements", type=int, default=1 << 26, help="of all gradients, a multiple of 4096")
    parser.add_argument("--side", type=int, default=8192, help="rows of the matrices that a GPU multiplies meanwhile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    for name in options.codecs:
        if name not in CODECS:
            parser.error(f"{name!r} is not one of {', '.join(CODECS)}")
    if options.elements % 4096 or options.elements < 4096:
        parser.error(f"--elements {options.elements}: a multiple of 4096")
    device = torch.device(options.device)
    if error_feedback.ops_for(device) is None:
        parser.error(f"the native kernels for {device} are not built")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fp32 = torch.randn(MESSAGES, options.elements // MESSAGES, device=device).mul_(1e-3)
    gradients = {dtype: fp32.to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    results: dict[str, Any] = {"about": about(["python", "bench/kernels.py", *sys.argv[1:]])}
    print(f"{options.elements / 2**20:.1f} Mi elements, medians of {options.rounds} rounds")
    results["jobs"] = []
    for name in options.codecs:  # one after another: buffers of all of them together take too much memory
        results["jobs"] += race(everywhere(jobs(name, gradients), device), options.rounds, device)
        save(options.json, results)
    results["jobs"] += race(everywhere(accumulate_jobs(fp32), device), options.rounds, device)
    show(results["jobs"])
    save(options.json, results)
    if device.type == "cpu":
        part = fp32[:, : max(fp32.shape[1] // PLAIN // 1024, 1) * 1024].contiguous()
        results["plain"] = [beside_plain_torch(name, part, options.rounds) for name in options.codecs]
        show([each | {"times": each["plain_ms"] / each["native_ms"]} for each in results["plain"]])
    else:
        job = next(jobs(options.codecs[0], gradients))
        results["beside_matrix_products"] = beside_matrix_products(job, options.side, options.rounds)
        show(results["beside_matrix_products"])
    save(options.json, results)


if __name__ == "__main__":
    main()
