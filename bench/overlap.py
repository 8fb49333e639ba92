"""What spans cost, and whether the report of a trace finds the exposed communication that a clock finds.

    python bench/overlap.py                      # needs network namespaces, as bench/netlab.py does
    python bench/overlap.py --bandwidth 50mbit

Two ranks train four units over a slow link under the profiler. The clock is around ``Work.wait`` on rank 0, where a
rank stands while nothing is computed; the report goes by the trace alone. The clock leaves out what Python does between
two operators while something is sent, and the trace what the profiler itself takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import yafsdp_cc
from yafsdp_cc.profiling import Span
from yafsdp_cc.tools.netlab import Lab
from yafsdp_cc.tools.report.overlap import measure
from yafsdp_cc.tools.report.trace import read

WIDTH, UNITS, ROWS, STEPS = 2048, 4, 512, 2


def span_cost(count: int = 20_000) -> float:
    """Return the processor's microseconds to open and close a span; the best of five."""
    span = Span("gather", "block", byte_count=1)

    def once() -> None:
        span.end(span.start())

    return 1e6 * min(timeit.repeat(once, number=count, repeat=5, timer=time.thread_time)) / count


class Waits:
    """The seconds that this process stands in ``Work.wait``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = dist.Work.wait

        def timed(work: dist.Work, *args: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(work, *args)
            finally:
                self.seconds += time.perf_counter() - start

        dist.Work.wait = timed


def train(folder: str) -> float:
    """Train under the profiler, which writes a trace; return the milliseconds of a step that this rank waited."""
    waits = Waits()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(UNITS)))
    yafsdp_cc.shard(model, units=list(model))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        waits.seconds = 0.0
        for _ in range(STEPS):
            step()
        waited = waits.seconds
    profiled.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json")
    return 1e3 * waited / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bandwidth", default="100mbit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with Lab(2, options.bandwidth) as lab:
            waited = lab.run(train, folder, timeout=600)
        for rank, clock in enumerate(waited):
            found = measure(read(Path(folder) / f"rank{rank}.json"))
            exposed, sent = (1e-3 * each / STEPS for each in (found.communication.exposed, found.communication.total))
            print(f"overlap {rank=} sent_ms={sent:.1f} {exposed=:.1f} waited={clock:.1f} ratio={exposed / clock:.3f}")
    off = span_cost()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True):
        on = span_cost()
    print(f"span off_us={off:.3f} on_us={on:.3f}")


if __name__ == "__main__":
    main()
