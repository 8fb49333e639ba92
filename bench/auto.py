"""What ``compression="auto"`` chooses over links of many speeds, and what that costs beside fixed choices.

    python bench/auto.py                                             # about ten minutes
    python bench/auto.py --bandwidths 1gbit --rounds 5 --steps 4
    python bench/auto.py --bandwidths 100mbit --ranks 4 --near 2     # two machines of two ranks each

The demo's model (ten million parameters) with AdamW in bf16 on two ranks, each in a network namespace of its own, or on
several in each; 256 tokens a rank and step; weights are kept whole after the forward, so that a backward sends
gradients alone. Contestants take turns in rounds whose order rotates; every figure is the median over rounds, of the
slower rank. Processor milliseconds are those of all threads. *theory* is how many units have to be encoded at least,
found by trying every choice on what ``auto`` has measured. *alike* is ``auto`` with the same codec between near ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo  # by the optimizers, before ranks are forked
import torch.distributed as dist
from yafsdp_cc.engine.chooser import FIRST
from yafsdp_cc.engine.problem import Problem
from yafsdp_cc.wire.choice import seconds

from yafsdp_cc.bench import machine, trainees
from yafsdp_cc.bench.turns import in_turns
from yafsdp_cc.demo.model import VOCABULARY
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.netlab import Lab, Unavailable

if TYPE_CHECKING:
    from yafsdp_cc.engine.chooser import Chooser

CONTESTANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"gradients": "int8"},
    "int4": {"gradients": "int4"},
    "auto": {"gradients": "auto"},
}
ALIKE = "alike"
SEQUENCES, LENGTH = 2, 128


class Turn(NamedTuple):
    """Some steps on one rank, each in the mean."""

    seconds: float
    processor_ms: float


class Found(NamedTuple):
    """Of one rank."""

    turns: dict[str, list[Turn]]
    chosen: dict[str, str]
    why: dict[str, str]
    """Of contestants who choose."""
    theory: int


def on_rank(stage: int, rounds: int, steps: int, near: int) -> Found:
    """All contestants' turns over the network that there is."""
    torch.set_num_threads(1)
    runs = {name: trainees.ours(zero_stage=stage, **told) for name, told in CONTESTANTS.items()}
    if near > 1:
        runs[ALIKE] = trainees.ours(zero_stage=stage, gradients="auto")
        _chooser(runs[ALIKE]).tries_pairs = False
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
    chosen = dict(root_of(runs["auto"].model).counters.chosen)
    why = {name: root_of(runs[name].model).counters.why for name in ("auto", ALIKE) if name in runs}
    return Found(turns, chosen, why, _theory(_chooser(runs["auto"])))


def _chooser(run: trainees.Trainee) -> Chooser:
    chooser = root_of(run.model).chooser
    assert chooser is not None
    return chooser


def _theory(chooser: Chooser) -> int:
    """The least number of units that have to be encoded for what was measured last."""
    problem = chooser.problem
    assert isinstance(problem, Problem)
    every = list(itertools.product(*[range(len(leg.options)) for leg in problem.legs]))
    took = [seconds(problem.legs, picks) for picks in every]
    limit = min(took) + problem.tolerance
    return min(sum(map(bool, picks)) for picks, each in zip(every, took, strict=True) if each <= limit)


def measure(bandwidth: str, options: argparse.Namespace) -> dict[str, Any]:
    with Lab(options.ranks, bandwidth=bandwidth, near=options.near) as lab:
        found = lab.run(on_rank, options.stage, options.rounds, options.steps, options.near, timeout=3600.0)
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
    best = min((name for name in each if name not in found["why"]), key=lambda name: each[name]["seconds"])
    encoded = [f"{name} {codec}" for name, codec in chosen.items() if codec != "fp32"]
    counts = f"{len(encoded)} of {len(chosen)} units encoded, theory {found['theory']}"
    print(f"\n{bandwidth}: {counts}; {', '.join(encoded)}")
    for name, why in found["why"].items():
        print(f"  {name}: {why}")
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
    parser.add_argument("--near", type=int, default=1, help="ranks on each machine")
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
