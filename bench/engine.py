"""Compare this engine, FSDP2, DDP and no communication on the same model, in interleaved rounds of one run.

    python bench/engine.py                                    # everything: about fifteen minutes on two cores
    python bench/engine.py --models launch --precision fp32   # one table
    python bench/engine.py --models launch --hotspots         # where the time goes, by cProfile

All contestants live in the same forked gloo ranks, of one thread each. Times are processor milliseconds of all threads
of a rank, averaged over ranks: the median step of a round, of which the median and the minimum over rounds are shown.
*Overhead* is forward + backward less that of `alone` in the same round. Counts and allocated bytes come from steps of
their own (`counting`), peak memory from ranks of their own (`memory`). Sharded contestants have the same units (every
block, then the rest) and the same `MixedPrecisionPolicy`; *alone* and *ddp* compute in bf16 by holding bf16 weights.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import yafsdp_cc
from bench.common import about, interleaved, names, save
from bench.counting import count
from bench.memory import measure_memory
from bench.models import GPT, SPECS, Spec
from bench.trainers import shard_by_fsdp2
from tests.ranks import on_ranks
from yafsdp_cc.table import table

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

OURS, ALONE = "yafsdp_cc", "alone"
PHASES = ("forward", "backward", "clip", "step")
TIMEOUT, WARM_UP, MIB = 3600.0, 3, 1 << 20


# What is compared --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    name: str
    wrap: Callable[[GPT, MixedPrecisionPolicy], nn.Module]
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 (frozen)
    dtype: torch.dtype = torch.float32
    """Of the weights the model is built with."""


def contestants(precision: str) -> list[Contestant]:
    """Return all contestants at "fp32" or "bf16"; in bf16 sharded ones reduce in fp32 and again in bf16."""
    plain = [Contestant(ALONE, lambda model, policy: model), Contestant("ddp", lambda m, _: DistributedDataParallel(m))]
    sharded = [
        Contestant("fsdp2", shard_by_fsdp2),
        Contestant("fsdp2-keep", lambda model, policy: shard_by_fsdp2(model, policy, reshard_after_forward=False)),
        Contestant("fsdp2-a2a", _fsdp2_all_to_all),
        Contestant(OURS, lambda model, policy: yafsdp_cc.shard(model, mp_policy=policy)),
    ]
    if precision == "fp32":
        return plain + sharded
    bf16 = torch.bfloat16
    return [replace(each, dtype=bf16) for each in plain] + [
        replace(each, name=f"{each.name}/{name}", policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=dtype))
        for name, dtype in (("fp32", torch.float32), ("bf16", bf16))
        for each in sharded
    ]


def _fsdp2_all_to_all(model: GPT, policy: MixedPrecisionPolicy) -> nn.Module:
    """FSDP2 with the reduce-scatter as an all-to-all and a local sum: gloo's own is a clone and an all-reduce."""
    shard_by_fsdp2(model, policy)
    reduce: Any = _AllToAllReduce()  # torch's protocol for it has no public name
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(reduce)
    return model


class _AllToAllReduce:
    """Keeps its receive buffers, so that FSDP2 is not charged for allocating them."""

    def __init__(self) -> None:
        self.received: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        key = input_tensor.numel(), input_tensor.dtype
        if key not in self.received:
            self.received[key] = torch.empty_like(input_tensor)
        dist.all_to_all_single(self.received[key], input_tensor, group=group)
        torch.sum(self.received[key].view(group.size(), -1), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


class Training:
    """One contestant's training loop on this rank's batch: AdamW behind `clip_grad_norm_`."""

    def __init__(self, contestant: Contestant, spec: Spec) -> None:
        self.is_ours = contestant.name.startswith(OURS)
        self.model = contestant.wrap(spec.build(contestant.dtype), contestant.policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = spec.batch(dist.get_rank())
        self.losses: list[float] = []

    def step(self, phase: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()) -> None:
        with phase("forward"):
            loss = self.model(*self.batch)
        with phase("backward"):
            loss.backward()
        with phase("clip"):
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with phase("step"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())
        float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def bytes_owned(self) -> dict[str, int]:
        """Return the bytes that the engine owns by its plan and by its own count; nothing of other engines."""
        if not self.is_ours:
            return {}
        plan, counters = yafsdp_cc.plan_of(self.model), yafsdp_cc.counters_of(self.model)
        return {
            "planned_bytes": plan.owned_bytes,
            "owned_bytes": counters.owned_bytes,
            "overflow_buffers": counters.overflow_buffers,
        }


# The measurement ---------------------------------------------------------------------------------------------------


class Clock:
    """Milliseconds per phase: processor time of all threads of the process (gloo's too), and wall time."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu[phase] = 1e3 * (time.process_time() - cpu)
        self.wall += 1e3 * (time.perf_counter() - wall)


def measure(spec: Spec, compared: list[Contestant], ranks: int, rounds: int) -> dict[str, Any]:
    """Return all figures of one model at one precision, by contestant."""
    figures: dict[str, dict[str, Any]] = {each.name: {} for each in compared}
    if spec.rounds:
        per_rank = on_ranks(ranks, race, spec, compared, rounds, timeout=TIMEOUT)
        for name, figure in figures.items():
            figure |= _times([rank[name] for rank in per_rank], [rank[ALONE] for rank in per_rank], spec.tokens * ranks)
    if spec.memory:
        for each in compared:
            found = on_ranks(ranks, _memory, each, spec, timeout=TIMEOUT)
            figures[each.name]["memory"] = {key: max(rank[key] for rank in found) for key in found[0]}
    return figures


def _memory(contestant: Contestant, spec: Spec) -> dict[str, int]:
    return measure_memory(lambda: Training(contestant, spec), spec.steps)


def race(spec: Spec, compared: list[Contestant], rounds: int) -> dict[str, dict[str, Any]]:
    """Return, on one rank, every contestant's times round by round, and what a step of it does."""
    trainings = {each.name: Training(each, spec) for each in compared}
    for training in trainings.values():
        for _ in range(WARM_UP):
            training.step()
    counts = {name: vars(count(training.step)) for name, training in trainings.items()}
    gc.collect()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in trainings}
    for _, name in interleaved(trainings, rounds):
        dist.barrier()
        clocks = [Clock() for _ in range(spec.steps)]
        for clock in clocks:
            trainings[name].step(clock)
        turns[name].append(
            {
                **{phase: median(clock.cpu[phase] for clock in clocks) for phase in PHASES},
                "forward_backward": median(clock.cpu["forward"] + clock.cpu["backward"] for clock in clocks),
                "wall": median(clock.wall for clock in clocks),
            }
        )
    return {
        name: {"turns": turns[name], "counts": counts[name], "losses": training.losses[: WARM_UP + 1]}
        | ({"owned": owned} if (owned := training.bytes_owned()) else {})
        for name, training in trainings.items()
    }


def _times(own: list[dict[str, Any]], alone: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Return one contestant's figures from those of all ranks; ``tokens`` are those of all ranks in a step."""

    def rounds(ranks: list[dict[str, Any]], figure: str) -> list[float]:
        turns = zip(*(rank["turns"] for rank in ranks), strict=True)
        return [sum(turn[figure] for turn in of_ranks) / len(ranks) for of_ranks in turns]

    def summary(values: list[float]) -> dict[str, Any]:
        return {"median": median(values), "min": min(values), "rounds": values}

    both, reference, walls = rounds(own, "forward_backward"), rounds(alone, "forward_backward"), rounds(own, "wall")
    return {
        "cpu_ms": {figure: summary(rounds(own, figure)) for figure in (*PHASES, "forward_backward")},
        "overhead_ms": {
            "median": median(mine - theirs for mine, theirs in zip(both, reference, strict=True)),
            "min": min(both) - min(reference),
        },
        "wall_ms": summary(walls),
        "tokens_per_s": 1e3 * tokens / median(walls),
        **{key: value for key, value in own[0].items() if key != "turns"},
    }


def hotspots(contestant: Contestant, spec: Spec, steps: int = 10, lines: int = 30) -> str:
    """Return, on one rank, the functions of forward and backward by their own time, by the calling thread's clock."""
    training, profile, text = Training(contestant, spec), cProfile.Profile(time.thread_time), io.StringIO()
    for _ in range(WARM_UP):
        training.step()
    for _ in range(steps):
        dist.barrier()
        training.step(lambda phase: profile if phase in ("forward", "backward") else nullcontext())
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(lines)
    return f"\n{spec.name}, {contestant.name}: forward + backward of {steps} steps\n{text.getvalue()}"


# Tables ------------------------------------------------------------------------------------------------------------


def show(title: str, spec: Spec, rounds: int, figures: dict[str, Any]) -> None:
    print(f"\n{title}: {spec.blocks} blocks of width {spec.width}, {spec.sequences} x {spec.length} tokens per rank")
    if spec.rounds:
        print(f"CPU ms per step and rank, {rounds} rounds of {spec.steps}: medians, minima; counts of fwd + bwd")
        print(table(_TIME_HEAD, *(_time_row(name, each) for name, each in figures.items())))
        for name, each in figures.items():
            for site, size in each["counts"]["sites"].items() if name.startswith(OURS) else ():
                print(f"  {name} allocates {size} bytes at {site}")
    if spec.memory:
        print("MiB of the fullest rank above those before the model; live: given out by malloc")
        rows = [[name, *(f"{each['memory'][key] / MIB:.1f}" for key in _MEMORY)] for name, each in figures.items()]
        print(table(["", *_MEMORY.values()], *rows))
    print(table(("ours to others", "ours", "other", "", "ratio"), *ratios(figures)), flush=True)


_TIME_HEAD = ("", "fwd", "bwd", "f+b", "min", "overhead", "min", "tok/s", "ops", "copies", "MiB", "engine's KiB")
_MEMORY = {
    "peak_live": "peak live",
    "peak_resident": "peak resident",
    "peak_wrapping": "peak while wrapping",
    "live_after": "live after",
    "resident_after": "resident after",
}


def _time_row(name: str, figure: dict[str, Any]) -> list[str]:
    cpu, over, counts = figure["cpu_ms"], figure["overhead_ms"], figure["counts"]
    ops, copies, size = (counts[key]["forward"] + counts[key]["backward"] for key in ("ops", "copies", "allocated"))
    times = [cpu["forward"]["median"], cpu["backward"]["median"], *list(cpu["forward_backward"].values())[:2]]
    row = [name, *(f"{each:.1f}" for each in (*times, over["median"], over["min"])), f"{figure['tokens_per_s']:.0f}"]
    return [*row, str(ops), str(copies), f"{size / MIB:.0f}", f"{counts['owners'].get('engine', 0) / 1024:.1f}"]


def ratios(figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield rows of this engine's figures beside those of others at the same precision, and beside the plan."""

    def row(what: str, mine: float, other: str, theirs: float) -> tuple[str, ...]:
        return what, f"{mine:.1f}", f"{theirs:.1f}", other, f"{mine / theirs:.2f}" if theirs else "-"

    for name, ours in figures.items():
        if not name.startswith(OURS):
            continue
        for other in ("fsdp2", "fsdp2-a2a"):
            theirs = figures.get(name.replace(OURS, other), {})
            if "cpu_ms" in theirs:
                for kind in ("median", "min"):
                    mine, its = (each["overhead_ms"][kind] for each in (ours, theirs))
                    yield row(f"{name}: overhead, CPU ms ({kind})", mine, other, its)
                mine, its = (each["cpu_ms"]["forward_backward"]["median"] for each in (ours, theirs))
                yield row(f"{name}: forward + backward, CPU ms", mine, other, its)
                mine, its = (sum(each["counts"]["copies"].values()) for each in (ours, theirs))
                yield row(f"{name}: copies per step", mine, other, its)
            for key in ("peak_live", "peak_resident") if "memory" in theirs else ():
                mine, its = (each["memory"][key] / MIB for each in (ours, theirs))
                yield row(f"{name}: {_MEMORY[key]}, MiB", mine, other, its)
        if owned := ours.get("owned") or ours.get("memory"):
            yield row(f"{name}: bytes owned", owned["owned_bytes"], "the plan", owned["planned_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=names, default=["block", "launch", "deep"], help=f"of {', '.join(SPECS)}")
    parser.add_argument("--precision", type=names, default=["fp32", "bf16"], help="of fp32, bf16")
    parser.add_argument("--contestants", type=names, help=f"of {', '.join(each.name for each in contestants('fp32'))}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="instead of each model's own number")
    parser.add_argument("--hotspots", action="store_true", help="print where rank 0 spends its time instead")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    for given, known in ((options.models, SPECS), (options.precision, ("fp32", "bf16"))):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is not one of {', '.join(known)}")
    results: dict[str, Any] = {"about": about(["python", "bench/engine.py", *sys.argv[1:]]), "models": {}}
    for spec in map(SPECS.__getitem__, options.models):
        rounds = options.rounds or spec.rounds
        for precision in options.precision:
            wanted = [ALONE, *(options.contestants or ())]
            compared = [
                each
                for each in contestants(precision)
                if not options.contestants or each.name.partition("/")[0] in wanted
            ]
            if options.hotspots:
                for each in compared:
                    print(on_ranks(options.ranks, hotspots, each, spec, timeout=TIMEOUT)[0], flush=True)
                continue
            figures = measure(spec, compared, options.ranks, rounds)
            results["models"].setdefault(spec.name, {})[precision] = figures
            show(f"{spec.name}, {precision}", spec, rounds, figures)
            save(options.json, results)


if __name__ == "__main__":
    main()
