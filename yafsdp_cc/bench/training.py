"""Suite ``train``: every contestant trains over a slow network, each rank in a network namespace of its own.

A step is forward, backward and AdamW on 1,024 tokens of random bytes per rank. Contestants take turns, in rounds whose
order rotates, at each bandwidth. A step's time is the median over the rounds; bytes are means over ranks and rounds.
"""

from __future__ import annotations

import sys
import time
import warnings
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo  # by the optimizers, before ranks are forked
import torch.distributed as dist

from yafsdp_cc.bench import trainees
from yafsdp_cc.bench.contestants import TRAINING
from yafsdp_cc.bench.turns import in_turns
from yafsdp_cc.compression.autotune import FIRST
from yafsdp_cc.compression.config import AUTO
from yafsdp_cc.demo.model import VOCABULARY
from yafsdp_cc.netlab.rate import UNSHAPED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yafsdp_cc.netlab import Lab

SEQUENCES, LENGTH = 8, 128
WARM_UP = 3
"""Steps of each contestant before any is measured: by then every way of compressing has begun."""
PATIENCE = 24 * 3600.0
"""Seconds that a run may take: FSDP2 alone sends 92 MB a step, and somebody may ask what that takes at 1 Mbit/s."""


class Turn(NamedTuple):
    """Some steps of one contestant on one rank, each in the mean."""

    seconds: float
    sent: float
    """Bytes, by the counters of the interface."""
    payload: float
    """The same without headers."""
    counted: float | None
    """Bytes, as the contestant itself counts them."""


def measure(lab: Lab, names: Sequence[str], bandwidths: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Figures of every contestant at every bandwidth, of a lab that has begun."""
    found = {}
    for bandwidth in bandwidths:
        lab.set_bandwidth(bandwidth)
        per_rank = lab.run(_on_rank, lab, names, bandwidth, rounds, steps, timeout=PATIENCE)
        found[bandwidth] = _figures({name: [turns[name] for turns in per_rank] for name in names}, len(per_rank))
    return found


def _on_rank(lab: Lab, names: Sequence[str], bandwidth: str, rounds: int, steps: int) -> dict[str, list[Turn]]:
    """Of each contestant, its turns."""
    warnings.simplefilter("ignore", FutureWarning)  # of torch's, of names that rivals use
    warnings.filterwarnings("ignore", message="gradients=")  # of few bits with Adam: nobody keeps what is learnt
    runs = {name: _Run(name, lab) for name in names}
    choosing = [name for name in names if TRAINING[name].told.get("gradients") == AUTO]
    _set_bandwidth(lab, UNSHAPED)
    for name, run in runs.items():
        if name not in choosing:
            run.turn(WARM_UP)
    _set_bandwidth(lab, bandwidth)
    for name in choosing:  # by the network that they are measured on
        runs[name].turn(FIRST + 2)
    found: dict[str, list[Turn]] = {name: [] for name in names}
    for number, name in in_turns(names, rounds):
        turn = runs[name].turn(steps)
        found[name].append(turn)
        if dist.get_rank() == 0:
            print(f"{bandwidth} {number}/{rounds} {name}: {turn.seconds:.3f} s/step", file=sys.stderr)
    return found


def _set_bandwidth(lab: Lab, bandwidth: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        lab.set_bandwidth(bandwidth)
    dist.barrier()


class _Run:
    """One contestant, trained a few steps at a time."""

    def __init__(self, name: str, lab: Lab) -> None:
        torch.manual_seed(0)
        self._lab = lab
        self._trainee = trainees.trainee_of(name)
        self._draws = torch.Generator().manual_seed(dist.get_rank())

    def turn(self, steps: int) -> Turn:
        batches = [
            torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=self._draws, dtype=torch.int64)
            for _ in range(steps)
        ]
        rank, counted = dist.get_rank(), self._trainee.counted
        dist.barrier()
        before, said = self._lab.traffic()[rank], counted() if counted else 0
        start = time.perf_counter()
        for tokens in batches:
            self._trainee.step(tokens)
        dist.barrier()
        seconds = time.perf_counter() - start
        crossed = self._lab.traffic()[rank].since(before)
        by_itself = (counted() - said) / steps if counted else None
        return Turn(seconds / steps, crossed.sent / steps, crossed.payload_sent / steps, by_itself)


def _figures(turns: dict[str, list[list[Turn]]], ranks: int) -> dict[str, Any]:
    """Of each contestant, whose turns are given by rank."""
    figures = {name: _summary(of_ranks, ranks) for name, of_ranks in turns.items()}
    for name, each in figures.items():
        beside = figures.get(TRAINING[name].beside)
        each["times_as_fast"] = beside and beside["seconds"] / each["seconds"]
        each["times_fewer_bytes"] = beside and beside["sent_bytes"] / each["sent_bytes"]
    return figures


def _summary(of_ranks: list[list[Turn]], ranks: int) -> dict[str, Any]:
    rounds = [max(turn.seconds for turn in turns) for turns in zip(*of_ranks, strict=True)]
    turns = [turn for turns in of_ranks for turn in turns]
    sent = mean(turn.sent for turn in turns)
    said = [turn.counted for turn in turns if turn.counted is not None]
    return {
        "seconds": median(rounds),
        "rounds": rounds,
        "tokens_per_s": ranks * SEQUENCES * LENGTH / median(rounds),
        "sent_bytes": sent,
        "counted_bytes": mean(said) if said else None,
        "sent_above_counted": sent / mean(said) - 1 if said else None,
        "payload_above_counted": mean(turn.payload for turn in turns) / mean(said) - 1 if said else None,
    }
