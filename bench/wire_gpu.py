"""On one GPU: bytes that the wire's kernels move, over time, against a copy from device memory to device memory.

    python bench/wire_gpu.py --json bench/out/wire_gpu.json         # bench/gpu.sh runs it

*Moved* is what a kernel has to read and write at least: gradients, residual, message, sum. The copy moves as many bytes
(it reads half of them and writes the other half), and all of a table's entries take turns in one run. *Ratio* is the
median of the copy's time over the kernel's in the same turn: 1 is as fast as memory is copied; wanted is 0.85. The last
two tables give the kernels fewer multiprocessors (YAFSDP_CC_CUDA_SMS), and matrix products beside them, which are to
lose less than 2 %. Times are CUDA events'. Written where there was no GPU: it has not run yet.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from yafsdp_cc.compression import kernels
from yafsdp_cc.compression.codec import Noise, codec_of
from yafsdp_cc.compression.error_feedback import Residual
from yafsdp_cc.compression.kernels import ops_for

NAMES = ("fp32", "bf16", "fp8", "int8", "int4", "ternary", "onebit", "topk")
TARGET = 0.85
MESSAGES, ROUNDS, WARM_UP = 8, 15, 3
PRODUCTS, FEW, GIVES_WAY = 8, (8, 16, 32, 64), 0.02
"""Matrix products beside which something is encoded, on how many multiprocessors, and by what it may hold them up."""
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}


class Entry(NamedTuple):
    """A kernel to time, and how many bytes it moves."""

    label: str
    moved: int
    run: Callable[[], None]
    processors: int | None = None


def encodes(name: str, gradients: Tensor, residual: torch.dtype | None, noise: Noise | None = None) -> Entry:
    codec, (messages, n) = codec_of(name), gradients.shape
    message = torch.empty(messages, codec.message_bytes(n), dtype=torch.uint8, device="cuda")
    left = None if residual is None else Residual(messages, n, residual, codec.block, gradients.device)
    moved = gradients.nbytes + messages * codec.body_bytes(n) + (0 if left is None else 2 * left.nbytes)
    memory = "no residual" if residual is None else f"residual {SHORT[residual]}"
    label = f"encode {name} of {SHORT[gradients.dtype]}, {memory}{'' if noise is None else ', at random'}"
    return Entry(label, moved, lambda: kernels.encode(codec, gradients, message, residual=left, noise=noise, scale=0.5))


def accumulates(gradients: Tensor, dtype: torch.dtype) -> Entry:
    messages, n = gradients.shape
    left = Residual(messages, n, dtype, 256, gradients.device)
    moved = gradients.nbytes + 2 * left.nbytes
    label = f"accumulate {SHORT[gradients.dtype]} in {SHORT[dtype]}"
    return Entry(label, moved, lambda: kernels.accumulate(gradients, left))


def sums(name: str, gradients: Tensor) -> Entry:
    """All messages but one, and this rank's own part."""
    codec, (messages, n) = codec_of(name), gradients.shape
    message = torch.empty(messages, codec.message_bytes(n), dtype=torch.uint8, device="cuda")
    kernels.encode(codec, gradients, message)
    total = torch.empty(n, device="cuda")
    moved = (messages - 1) * codec.body_bytes(n) + gradients[0].nbytes + total.nbytes
    return Entry(
        f"sum of {messages} parts, {name}",
        moved,
        lambda: kernels.decode_sum(codec, message[1:], n, gradients[0], 0, total),
    )


def timed(run: Callable[[], None]) -> float:
    """Milliseconds, on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def race(entries: list[Entry]) -> list[dict[str, Any]]:
    """Each against a copy of as many bytes, in turns."""
    largest = max(entry.moved for entry in entries) // 2
    source, target = (torch.zeros(largest, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copy_of(entry: Entry) -> Callable[[], None]:
        half = entry.moved // 2 // 16 * 16
        return lambda: (target[:half].copy_(source[:half]), None)[1]

    turns: list[list[tuple[float, float]]] = [[] for _ in entries]
    for turn in range(WARM_UP + ROUNDS):
        for entry, times in zip(entries, turns, strict=True):
            os.environ.pop("YAFSDP_CC_CUDA_SMS", None)
            copied = timed(copy_of(entry))
            if entry.processors is not None:
                os.environ["YAFSDP_CC_CUDA_SMS"] = str(entry.processors)
            took = timed(entry.run)
            if turn >= WARM_UP:
                times.append((took, copied))
    os.environ.pop("YAFSDP_CC_CUDA_SMS", None)
    return [
        {
            "label": entry.label,
            "processors": entry.processors,
            "moved_bytes": entry.moved,
            "ms": (milliseconds := median(took for took, _ in times)),
            "gb_per_s": entry.moved / milliseconds / 1e6,
            "ratio": median(copied / took for took, copied in times),
        }
        for entry, times in zip(entries, turns, strict=True)
    ]


def beside(entry: Entry, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """How much longer matrix products take while ``entry`` runs on so many multiprocessors, once in all of them."""
    factors = [torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    product, side = torch.empty_like(factors[0]), torch.cuda.Stream(priority=-1)
    turns: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(*factors, out=product)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            entry.run()
        products()

    for turn in range(WARM_UP + ROUNDS):
        for count, times in turns.items():
            os.environ["YAFSDP_CC_CUDA_SMS"] = str(count)
            alone, together = timed(products), timed(both)
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                times.append((alone, together))
    os.environ.pop("YAFSDP_CC_CUDA_SMS", None)
    return [
        {
            "label": entry.label,
            "processors": count,
            "ms": median(alone for alone, _ in times),
            "longer": median(together / alone for alone, together in times) - 1,
        }
        for count, times in turns.items()
    ]


def table(title: str, figures: list[dict[str, Any]]) -> str:
    head = f"\n{title:<52}{'SMs':>6}{'MiB':>8}{'ms':>8}{'GB/s':>8}{'ratio':>8}"
    lines = [
        f"{one['label']:<52}{one['processors'] or '':>6}{one['moved_bytes'] / (1 << 20):>8.0f}{one['ms']:>8.3f}"
        f"{one['gb_per_s']:>8.0f}{one['ratio']:>8.2f}{'' if one['ratio'] >= TARGET else '  below the target'}"
        for one in figures
    ]
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("bench/out/wire_gpu.json"))
    parser.add_argument("--elements", type=int, default=1 << 27, help="of all messages together")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    if ops_for(torch.device("cuda")) is None:
        parser.error("no native extension with CUDA kernels")
    torch.manual_seed(0)
    n = options.elements // MESSAGES // 65_536 * 65_536
    fp32 = torch.randn(MESSAGES, n, device="cuda")
    bf16 = fp32.bfloat16()
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    # A table's entries are alive together: made when their turn comes, or large GPUs alone could hold them.
    tables: dict[str, Callable[[], list[Entry]]] = {
        "encode, fp32": lambda: [encodes(name, fp32, torch.float32) for name in NAMES],
        "encode, bf16": lambda: [encodes(name, bf16, torch.bfloat16) for name in NAMES],
        "encode, int8 residual": lambda: [encodes(name, bf16, torch.int8) for name in NAMES],
        "encode, no residual": lambda: [
            *(encodes(name, bf16, None) for name in NAMES),
            *(encodes(name, bf16, None, Noise(1)) for name in ("int8", "int4", "ternary")),
        ],
        "accumulate": lambda: [accumulates(bf16, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)],
        "sum": lambda: [sums(name, bf16) for name in NAMES],
        "few multiprocessors": lambda: [
            entry._replace(processors=count)
            for entry in (encodes("onebit", bf16, torch.bfloat16), sums("onebit", bf16))
            for count in (8, 16, 32, 64, processors)
        ],
    }
    results: dict[str, Any] = {
        "about": {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "processors": processors,
            "messages": MESSAGES,
            "elements": n,
            "target": TARGET,
        },
        "tables": {},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for title, make in tables.items():
        results["tables"][title] = race(make())
        print(table(title, results["tables"][title]), flush=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")  # as far as it has come
        torch.cuda.empty_cache()
    found = [figure for name in ("onebit", "int8") for figure in beside(encodes(name, bf16, torch.bfloat16), FEW)]
    results["tables"]["beside matrix products"] = found
    print(f"\n{'beside matrix products':<52}{'SMs':>6}{'ms alone':>10}{'longer by':>11}")
    for one in found:
        told = "" if one["longer"] <= GIVES_WAY else "  above the target"
        print(f"{one['label']:<52}{one['processors']:>6}{one['ms']:>10.3f}{one['longer']:>10.1%}{told}", flush=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
