"""On one GPU, world size 1 over NCCL: the bare model, FSDP2 and this engine, in interleaved rounds of one run.

    python bench/gpu.py --json bench/out/gpu.json         # bench/gpu.sh runs the tests for CUDA, too

One rank sends nothing: what is measured is the host's work, the copies and casts, and memory. *Step* is wall time per
step of a run of steps that ends in a synchronisation; *host* is the time until the last of them was enqueued, per
step: where it is well below *step*, the host is not what a step waits for. Peak memory is that of a process of its
own, after two steps. Written where there was no GPU: it has not run yet.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from bench.contestants import Contestant, contestants
from bench.models import Spec
from tests.ranks import on_ranks

BACKEND = "cpu:gloo,cuda:nccl"
NAMES = ("alone", "fsdp2", "yafsdp_cc")
WARM_UP, MIB = 3, 1 << 20
SPECS = (
    Spec("host", 32, 256, 4, 4096, sequences=2, length=128, rounds=5, steps=10),
    Spec("large", 24, 1024, 16, 32768, sequences=8, length=1024, rounds=5, steps=5),
    Spec("tiny", 2, 32, 2, 64, sequences=2, length=8, rounds=2, steps=2),
)


class Steps:
    """A training loop that never looks at a number."""

    def __init__(self, contestant: Contestant, spec: Spec) -> None:
        with torch.device("cuda"):
            torch.manual_seed(20)
            model = spec.build(contestant.dtype)
        self.model: nn.Module = contestant.wrap(model, contestant.policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batch = [tensor.cuda() for tensor in spec.batch(0)]

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(*self.batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def timed(self, steps: int) -> dict[str, float]:
        """Milliseconds per step."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        return {
            "step_ms": 1e3 * (time.perf_counter() - begin) / steps,
            "host_ms": 1e3 * (enqueued - begin) / steps,
        }


def race(spec: Spec, field: list[Contestant]) -> dict[str, dict[str, Any]]:
    """Every contestant's times, in turns whose order rotates."""
    runs = {one.name: Steps(one, spec) for one in field}
    losses = {name: [float(run.step()) for _ in range(WARM_UP)] for name, run in runs.items()}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(spec.rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            turns[name].append(runs[name].timed(spec.steps))
    return {
        name: {
            **{figure: median(turn[figure] for turn in turns[name]) for figure in ("step_ms", "host_ms")},
            "rounds": turns[name],
            "losses": losses[name],
        }
        for name in names
    }


def memory(spec: Spec, one: Contestant) -> dict[str, int]:
    """Bytes of torch's allocator, alone in a process."""
    steps = Steps(one, spec)
    for _ in range(2):
        steps.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    for _ in range(3):
        steps.step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "new_segments": after["segment.all.allocated"] - before["segment.all.allocated"],
        "blocks_per_step": (after["allocation.all.allocated"] - before["allocation.all.allocated"]) // 3,
    }


def table(name: str, figures: dict[str, dict[str, Any]]) -> str:
    head = f"\n{name:<18}{'step ms':>10}{'host ms':>10}{'peak MiB':>10}{'reserved':>10}{'blocks':>8}{'segments':>10}"
    return "\n".join(
        [
            head,
            *(
                f"{who:<18}{one['step_ms']:>10.2f}{one['host_ms']:>10.2f}{one['peak_bytes'] / MIB:>10.0f}"
                f"{one['reserved_bytes'] / MIB:>10.0f}{one['blocks_per_step']:>8}{one['new_segments']:>10}"
                for who, one in figures.items()
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("bench/out/gpu.json"))
    parser.add_argument("--models", default="host,large", help=f"of {', '.join(spec.name for spec in SPECS)}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    results: dict[str, Any] = {
        "about": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "device": torch.cuda.get_device_name(),
            "python": platform.python_version(),
        },
        "models": {},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for spec in SPECS:
        if spec.name not in options.models.split(","):
            continue
        field = [
            one for one in contestants("bf16") if one.name in NAMES or one.name in [f"{name}/fp32" for name in NAMES]
        ]
        figures = on_ranks(1, race, spec, field, timeout=200.0, backend=BACKEND)[0]
        for one in field:
            figures[one.name] |= on_ranks(1, memory, spec, one, timeout=100.0, backend=BACKEND)[0]
        results["models"][spec.name] = figures
        print(table(spec.name, figures), flush=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")  # as far as it has come


if __name__ == "__main__":
    main()
