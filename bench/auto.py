"""What ``compression="auto"`` chooses over links of many speeds, and what that costs beside fixed choices.

    python bench/auto.py                                             # about ten minutes
    python bench/auto.py --bandwidths 1gbit --rounds 5 --steps 4

The demo's model (ten million parameters) with AdamW in bf16 on two ranks, each in a network namespace of its own; 256
tokens a rank and step; weights are kept whole after the forward, so that a backward sends gradients alone. Contestants
take turns in rounds whose order rotates; every figure is the median over rounds, of the slower rank. Processor
milliseconds are those of all threads. *Theory* is how many units have to be encoded at least, found by trying every
choice on what ``auto`` has measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo  # by the optimizers, before ranks are forked
import torch.distributed as dist
from yafsdp_cc.bench.turns import in_turns

from yafsdp_cc.bench import machine, trainees
from yafsdp_cc.compression.autotune import FIRST, autotuner_of, backward_seconds
from yafsdp_cc.demo.model import VOCABULARY
from yafsdp_cc.engine.module import require_state
from yafsdp_cc.netlab import Lab, Unavailable

CONTESTANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"gradients": "int8"},
    "int4": {"gradients": "int4"},
    "auto": {"gradients": "auto"},
}
SEQUENCES, LENGTH = 2, 128


class Turn(NamedTuple):
    """Some steps on one rank, each in the mean."""

    seconds: float
    processor_ms: float


class Found(NamedTuple):
    """Of one rank."""

    turns: dict[str, list[Turn]]
    chosen: dict[str, str]
    why: str
    theory: int


def on_rank(stage: int, rounds: int, steps: int) -> Found:
    """All contestants' turns over the network that there is."""
    torch.set_num_threads(1)
    runs = {name: trainees.ours(zero_stage=stage, **told) for name, told in CONTESTANTS.items()}
    draws = torch.Generator().manual_seed(dist.get_rank())

    def turn(name: str, count: int) -> Turn:
        batches = [torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=draws) for _ in range(count)]
        dist.barrier()
        start, spent = time.perf_counter(), time.process_time()
        for tokens in batches:
            runs[name].step(tokens)
        dist.barrier()
        return Turn((time.perf_counter() - start) / count, 1e3 * (time.process_time() - spent) / count)

    for name in runs:
        turn(name, FIRST + 2)
    turns: dict[str, list[Turn]] = {name: [] for name in runs}
    for _, name in in_turns(list(runs), rounds):
        turns[name].append(turn(name, steps))
    counters = require_state(runs["auto"].model).counters
    return Found(turns, dict(counters.chosen), counters.why, _theory(runs["auto"]))


def _theory(run: trainees.Trainee) -> int:
    """The least number of units that have to be encoded for what was measured last."""
    tuner = autotuner_of(require_state(run.model))
    assert tuner is not None
    assert tuner.last is not None
    costs = tuner.last.costs
    every = list(itertools.product(*[range(len(group.codecs)) for group in costs]))
    took = [backward_seconds(costs, picks) for picks in every]
    limit = min(took) + tuner.last.tolerance
    return min(sum(map(bool, picks)) for picks, each in zip(every, took, strict=True) if each <= limit)


def measure(bandwidth: str, options: argparse.Namespace) -> dict[str, Any]:
    with Lab(options.ranks, bandwidth=bandwidth) as lab:
        found = lab.run(on_rank, options.stage, options.rounds, options.steps, timeout=3600.0)
    assert all(each.chosen == found[0].chosen for each in found)
    figures: dict[str, Any] = {}
    for name in found[0].turns:
        by_round = list(zip(*[each.turns[name] for each in found], strict=True))
        figures[name] = {
            "seconds": median(max(turn.seconds for turn in turns) for turns in by_round),
            "processor_ms": median(max(turn.processor_ms for turn in turns) for turns in by_round),
            "rounds": [max(turn.seconds for turn in turns) for turns in by_round],
        }
    chosen, theory = found[0].chosen, min(each.theory for each in found)
    return {"contestants": figures, "chosen": chosen, "theory": theory, "why": found[0].why}


def show(bandwidth: str, found: dict[str, Any]) -> None:
    each, chosen = found["contestants"], found["chosen"]
    best = min((name for name in each if name != "auto"), key=lambda name: each[name]["seconds"])
    encoded = [f"{name} {codec}" for name, codec in chosen.items() if codec != "fp32"]
    counts = f"{len(encoded)} of {len(chosen)} units encoded, theory {found['theory']}"
    print(f"\n{bandwidth}: {counts}; {', '.join(encoded)}")
    print(f"  {found['why']}")
    for name, figures in each.items():
        beside = figures["seconds"] / each[best]["seconds"]
        spent = figures["processor_ms"] / each["exact"]["processor_ms"]
        print(
            f"  {name:6} {1e3 * figures['seconds']:8.1f} ms a step, {beside:.3f} of {best}; "
            f"processor {figures['processor_ms']:7.1f} ms, {spent:.3f} of exact",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bandwidths", default="unshaped,2gbit,1gbit,500mbit,100mbit")
    parser.add_argument("--stage", type=int, default=2, help="zero_stage of all contestants")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of each turn")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    options = parser.parse_args()
    results: dict[str, Any] = {"about": machine.about(["python", "bench/auto.py", *sys.argv[1:]])}
    for bandwidth in options.bandwidths.split(","):
        try:
            results[bandwidth] = measure(bandwidth, options)
        except Unavailable as reason:
            print(f"skipped, {reason}")
            return
        show(bandwidth, results[bandwidth])
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
