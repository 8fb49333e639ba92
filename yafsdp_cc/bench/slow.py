"""Suite ``slow``: loss against wall-clock, for everybody who takes part, at every bandwidth.

What a model learns in a step does not depend on the network, and what a step takes does not depend on what is learnt.
So each contestant trains once, on an unshaped network, for its loss by steps; and steps of each are timed at each
bandwidth, in rounds whose order rotates. (What ``auto`` learns does depend on the network, by what it has encoded; its
loss is that of encoding everything.) Time against loss is put together from both: a contestant whose steps are of
several phases is timed in each of them, and its run is as many steps of each as its optimizer has made.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # by the optimizers, before ranks are forked
import torch.distributed as dist

from yafsdp_cc.bench import trainees, training
from yafsdp_cc.bench.contestants import LEARNS_AS, PHASES, TRAINING
from yafsdp_cc.demo import data
from yafsdp_cc.demo.train import CLIP, learning_rate, mean_over_ranks
from yafsdp_cc.optim.one_bit import OneBitOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yafsdp_cc.netlab import Lab

HELD_OUT = 32
"""Windows of text that each rank validates on."""
POINTS = 20
"""Of each curve."""


def measure(
    lab: Lab,
    names: Sequence[str],
    bandwidths: Sequence[str],
    rounds: int,
    steps: int,
    learnt_before: Mapping[str, Any],
) -> dict[str, Any]:
    """Curves of every contestant, and its seconds per step by bandwidth, of a lab that has begun.

    Curves of as many steps that were ``learnt_before`` are not learnt again.
    """
    learnt = {}
    for name in names:
        if name in learnt_before and len(learnt_before[name]["phases"]) == steps:
            learnt[name] = learnt_before[name]
            continue
        (learnt[name], *_) = lab.run(_learn, LEARNS_AS.get(name, name), steps, timeout=training.PATIENCE)
        last = list(learnt[name]["losses"].values())[-1]
        print(f"{name}: loss {last:.4f} after {steps} steps", file=sys.stderr)
    timed = list(dict.fromkeys(phase for name in names for phase in (name, *PHASES.get(name, {}).values())))
    figures = training.measure(lab, timed, bandwidths, rounds, 1)
    return {
        "learnt": learnt,
        "timed": figures,
        "runs": {
            bandwidth: {name: _run(learnt[name], name, each) for name in names} for bandwidth, each in figures.items()
        },
    }


def _learn(name: str, steps: int) -> dict[str, Any]:
    """Losses on held-out text by step, nats per byte, and the phase of each step."""
    warnings.simplefilter("ignore", FutureWarning)  # of torch's, of names that rivals use
    torch.manual_seed(0)
    trainee = trainees.trainee_of(name, steps=steps)
    rank, ranks, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    text = data.read(None)
    length, drawn = training.LENGTH, torch.Generator().manual_seed(rank)
    spread = torch.linspace(0, len(text.held_out) - length - 1, HELD_OUT * ranks).long()
    held_out = _tokens(text.held_out, spread[rank::ranks], cpu)
    losses: dict[int, float] = {}
    phases = []
    start = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(text.train) - length, (training.SEQUENCES,), generator=drawn)
        optimizer = trainee.optimizer
        phases.append(optimizer.phase.value if isinstance(optimizer, OneBitOptimizer) else "")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        trainee.step(_tokens(text.train, starts, cpu), clip=CLIP)
        if step == steps or step % -(-steps // POINTS) == 0:
            with torch.no_grad():
                losses[step] = mean_over_ranks(trainee.loss(held_out))
    return {"losses": losses, "phases": phases, "seconds": time.perf_counter() - start}


def _tokens(text: torch.Tensor, starts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[sequences, length + 1] tokens from each start."""
    inputs, targets = data.windows(text, starts, training.LENGTH, device)
    return torch.cat([inputs, targets[:, -1:]], dim=1)


def _run(learnt: dict[str, Any], name: str, timed: dict[str, Any]) -> dict[str, Any]:
    """Seconds and loss at each point of a whole run, and what it took and sent in all."""
    as_timed = [PHASES.get(name, {}).get(phase, name) for phase in learnt["phases"]]
    seconds = [timed[each]["seconds"] for each in as_timed]
    curve = [(sum(seconds[: int(step)]), loss) for step, loss in learnt["losses"].items()]
    beside = len(seconds) * timed[TRAINING[name].beside]["seconds"] if TRAINING[name].beside in timed else None
    return {
        "curve": curve,
        "seconds": sum(seconds),
        "times_as_fast": beside and beside / sum(seconds),
        "sent_bytes": sum(timed[each]["sent_bytes"] for each in as_timed),
        "loss": curve[-1][1],
        "steady_seconds": timed[name]["seconds"],
    }
