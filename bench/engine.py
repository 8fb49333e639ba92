"""This engine, FSDP2, DDP and no communication on the same model, in interleaved rounds of one run.

    python bench/engine.py                                    # everything: about fifteen minutes on two cores
    python bench/engine.py --models launch --precision fp32   # one table

All contestants live in the same forked gloo ranks, one thread each, and take turns; the order of turns rotates, so
that a spell of a slow machine hits all. Times are processor milliseconds of all threads of a rank, averaged over
ranks: the median step of a round, of which the median and the minimum over rounds are shown. *Overhead* is forward +
backward less that of `alone` in the same round. Counts and bytes come from separate steps (`counting`), peak
memory from separate ranks (`memory`).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from bench import report
from bench.contestants import ALONE, Contestant, bytes_owned, contestants
from bench.counting import count
from bench.memory import memory
from bench.models import SPECS, Spec
from bench.training import PHASES, Clock, Training
from tests.ranks import on_ranks

TIMEOUT = 3600.0
WARM_UP = 3


def main() -> None:
    options = _options()
    results: dict[str, Any] = {"about": _about(options), "models": {}}
    for name in options.models:
        spec = SPECS[name]
        for precision in options.precision:
            field = [one for one in contestants(precision) if _takes_part(one, options.contestants)]
            result = measure(spec, field, options.ranks, options.rounds)
            results["models"].setdefault(name, {})[precision] = result
            print(report.table(name, precision, result), flush=True)
            if options.json:  # as far as it has come, should the rest be interrupted
                options.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(spec: Spec, field: list[Contestant], ranks: int, rounds: int | None) -> dict[str, Any]:
    """Everything about one model at one precision."""
    rounds = rounds if rounds is not None and spec.rounds else spec.rounds
    result: dict[str, Any] = {
        "spec": {**vars(spec), "rounds": rounds, "parameters": _parameters(spec)},
        "contestants": {one.name: {"recipe": one.recipe} for one in field},
    }
    if rounds:
        per_rank = on_ranks(ranks, race, spec, field, rounds, timeout=TIMEOUT)
        for one in field:
            result["contestants"][one.name].update(
                _times([rank[one.name] for rank in per_rank], [rank[ALONE] for rank in per_rank], spec.tokens * ranks)
            )
    if spec.memory:
        for one in field:
            per_rank = on_ranks(ranks, memory, one, spec, timeout=TIMEOUT)
            result["contestants"][one.name]["memory"] = {
                key: max(rank[key] for rank in per_rank) for key in per_rank[0]
            }
    result["targets"] = report.targets(spec, result["contestants"])
    return result


def race(spec: Spec, field: list[Contestant], rounds: int) -> dict[str, dict[str, Any]]:
    """On one rank: every contestant's times, round by round, and what a step of it does."""
    trainings = [Training(one, spec) for one in field]
    for training in trainings:
        for _ in range(WARM_UP):
            training.step()
    counts = {training.contestant.name: count(training).as_dict() for training in trainings}
    gc.collect()
    clocks: dict[str, list[dict[str, float]]] = {one.name: [] for one in field}
    for turn in range(rounds):
        first = turn % len(trainings)
        for training in (*trainings[first:], *trainings[:first]):
            dist.barrier()
            clocks[training.contestant.name].append(_turn(training, spec.steps))
    return {
        training.contestant.name: {
            "rounds": clocks[training.contestant.name],
            "counts": counts[training.contestant.name],
            "losses": training.losses[: WARM_UP + 1],
            "norms": training.norms[: WARM_UP + 1],
            **({"owned": bytes_owned(training.model)} if training.contestant.is_ours else {}),
        }
        for training in trainings
    }


def _turn(training: Training, steps: int) -> dict[str, float]:
    """Medians over the steps of one turn: processor ms per phase and of forward + backward, wall ms of a step."""
    clocks = [Clock() for _ in range(steps)]
    for clock in clocks:
        training.step(clock)
    return {
        **{phase: median(clock.cpu[phase] for clock in clocks) for phase in PHASES},
        "forward_backward": median(clock.cpu["forward"] + clock.cpu["backward"] for clock in clocks),
        "wall": median(sum(clock.wall.values()) for clock in clocks),
    }


def _times(own: list[dict[str, Any]], alone: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """One contestant's figures from those of all ranks. ``tokens`` are those of all ranks in a step."""

    def rounds(ranks: list[dict[str, Any]], figure: str) -> list[float]:
        turns = zip(*(rank["rounds"] for rank in ranks), strict=True)
        return [sum(turn[figure] for turn in of_ranks) / len(ranks) for of_ranks in turns]

    both, reference = rounds(own, "forward_backward"), rounds(alone, "forward_backward")
    walls = rounds(own, "wall")
    return {
        "cpu_ms": {figure: _summary(rounds(own, figure)) for figure in (*PHASES, "forward_backward")},
        "overhead_ms": {
            "median": median(mine - theirs for mine, theirs in zip(both, reference, strict=True)),
            "min": min(both) - min(reference),
        },
        "wall_ms": _summary(walls),
        "tokens_per_s": {"median": 1e3 * tokens / median(walls), "max": 1e3 * tokens / min(walls)},
        **{key: own[0][key] for key in ("counts", "losses", "norms", "owned") if key in own[0]},
    }


def _summary(values: list[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "rounds": values}


def _parameters(spec: Spec) -> dict[str, int]:
    with torch.device("meta"):
        parameters = list(spec.build().parameters())
    return {"tensors": len(parameters), "elements": sum(parameter.numel() for parameter in parameters)}


def _about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "bench/engine.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "ranks": options.ranks,
        "backend": "gloo",
        "threads_per_rank": 1,
        "optimizer": "AdamW(lr=1e-3) behind clip_grad_norm_(1.0)",
    }


def _cpu() -> dict[str, Any]:
    import os

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return {"model": model, "cores": len(os.sched_getaffinity(0))}


def _takes_part(one: Contestant, wanted: list[str] | None) -> bool:
    return wanted is None or one.name == ALONE or one.name.partition("/")[0] in wanted


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=names, default=["block", "launch", "deep"], help=f"of {', '.join(SPECS)}")
    parser.add_argument("--precision", type=names, default=["fp32", "bf16"], help="of fp32, bf16")
    parser.add_argument("--contestants", type=names, help=f"of {', '.join(one.name for one in contestants('fp32'))}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="interleaved rounds instead of each model's own number")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    options = parser.parse_args()
    for given, known in ((options.models, SPECS), (options.precision, ("fp32", "bf16"))):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return options


if __name__ == "__main__":
    main()
