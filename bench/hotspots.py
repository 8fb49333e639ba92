"""Where a contestant's processor time goes: functions by their own time, and ATen ops, per step of rank 0.

    python bench/hotspots.py --model launch [--precision bf16] [--contestants alone,yafsdp_cc]

The first line, measured without a profiler, parts a step's processor time into that of the calling thread and that
of all others: over gloo those are the transport's, which no engine can save. Functions are timed by cProfile on the
calling thread's processor clock, so that waiting is free; each call is charged about a microsecond for being seen.
C functions that call into ATen (`backward`, collectives) appear by name. Ops are in wall time, as torch has them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from bench.contestants import Contestant, contestants
from bench.models import SPECS, Spec
from bench.training import Training
from tests.ranks import on_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SPECS, default="launch")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--contestants", type=lambda text: text.split(","), default=["alone", "yafsdp_cc"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lines", type=int, default=30)
    options = parser.parse_args()
    for one in contestants(options.precision):
        if one.name in options.contestants or one.name.partition("/")[0] in options.contestants:
            spec = SPECS[options.model]
            print(on_ranks(options.ranks, hotspots, one, spec, options.steps, options.lines, timeout=3600.0)[0])


def hotspots(one: Contestant, spec: Spec, steps: int, lines: int) -> str:
    """On one rank: both lists, for forward and backward."""
    training = Training(one, spec)
    for _ in range(WARM_UP):
        training.step()
    thread, process = _processor_ms(training, steps)
    functions = cProfile.Profile(time.thread_time)
    for _ in range(steps):
        dist.barrier()
        training.step(lambda phase: functions if phase in ("forward", "backward") else nullcontext())
    with profile(activities=[ProfilerActivity.CPU]) as operations:
        for _ in range(steps):
            training.step()
    return "\n".join(
        [
            f"\n{spec.name}: {one.name} ({one.recipe}), per step",
            f"forward + backward: {thread:.1f} CPU ms in the calling thread, {process - thread:.1f} in others",
            f"{'own ms':>8}{'total ms':>10}{'calls':>8}  function (forward + backward)",
            *_functions(functions, steps, lines),
            f"{'own ms':>8}{'total ms':>10}{'calls':>8}  op (whole step)",
            *_operations(operations, steps, lines),
        ]
    )


def _processor_ms(training: Training, steps: int) -> tuple[float, float]:
    """Median CPU ms of forward + backward: of this thread, and of the process."""
    threads, processes = [], []
    for _ in range(steps):
        clocks: list[tuple[float, float]] = []

        @contextmanager
        def clocked(phase: str, clocks: list[tuple[float, float]] = clocks) -> Iterator[None]:
            thread, process = time.thread_time(), time.process_time()
            yield
            if phase in ("forward", "backward"):
                clocks.append((time.thread_time() - thread, time.process_time() - process))

        dist.barrier()
        training.step(clocked)
        threads.append(1e3 * sum(thread for thread, _ in clocks))
        processes.append(1e3 * sum(process for _, process in clocks))
    return median(threads), median(processes)


def _functions(functions: cProfile.Profile, steps: int, lines: int) -> list[str]:
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(functions).stats  # type: ignore[attr-defined]
    rows = [(own, total, calls, place) for place, (_, calls, own, total, _) in stats.items()]
    rows.sort(reverse=True)
    return [
        f"{1e3 * own / steps:>8.2f}{1e3 * total / steps:>10.2f}{calls / steps:>8.0f}  {_short(place)}"
        for own, total, calls, place in rows[:lines]
    ]


def _operations(operations: profile, steps: int, lines: int) -> list[str]:
    rows = sorted(operations.key_averages(), key=lambda row: row.self_cpu_time_total, reverse=True)
    return [
        f"{row.self_cpu_time_total / 1e3 / steps:>8.2f}{row.cpu_time_total / 1e3 / steps:>10.2f}"
        f"{row.count / steps:>8.0f}  {row.key[:80]}"
        for row in rows[:lines]
    ]


def _short(place: tuple[str, int, str]) -> str:
    path, line, name = place
    return name if path == "~" else f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"


if __name__ == "__main__":
    main()
