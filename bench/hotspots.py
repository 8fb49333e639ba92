"""Where a contestant's processor time goes: functions by their own time, per step of rank 0.

    python bench/hotspots.py --model launch [--precision bf16] [--contestant yafsdp_cc]

Forward and backward by cProfile on the calling thread's processor clock, so that waiting is free; each call is charged
about a microsecond for being seen. C functions that call into ATen (`backward`, collectives) appear by name.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

from bench.engine import WARM_UP, Contestant, Training, contestants
from bench.models import SPECS, Spec
from tests.ranks import on_ranks


def hotspots(contestant: Contestant, spec: Spec, steps: int, lines: int) -> str:
    """Return, on one rank, a list of functions; times are of all steps together."""
    training = Training(contestant, spec)
    for _ in range(WARM_UP):
        training.step()
    profile = cProfile.Profile(time.thread_time)
    for _ in range(steps):
        dist.barrier()
        training.step(lambda phase: profile if phase in ("forward", "backward") else nullcontext())
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(lines)
    return f"{spec.name}, {contestant.name}: forward + backward of {steps} steps\n{text.getvalue()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SPECS, default="launch")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--contestant", default="yafsdp_cc")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lines", type=int, default=30)
    options = parser.parse_args()
    for each in contestants(options.precision):
        if each.name.partition("/")[0] == options.contestant:
            args = (hotspots, each, SPECS[options.model], options.steps, options.lines)
            print(on_ranks(2, *args, timeout=3600.0)[0])


if __name__ == "__main__":
    main()
