"""Suite ``train``: every contestant trains over a slow network, each rank in a network namespace of its own.

A step is forward, backward and AdamW on 1,024 tokens of random bytes per rank. Contestants take turns in interleaved
rounds at each bandwidth. A step's time is the median over the rounds; bytes are means over ranks and rounds.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo  # the optimizers import it, before ranks are forked
import torch.distributed as dist

from bench.common import cell, interleaved, times
from bench.contestants import TRAINING
from bench.trainers import Trainer, make
from yafsdp_cc.compression.autotune import FIRST
from yafsdp_cc.compression.codec import AUTO
from yafsdp_cc.table import table
from yafsdp_cc.tools.demo.model import VOCABULARY
from yafsdp_cc.tools.netlab import Lab
from yafsdp_cc.tools.netlab.links import UNSHAPED, bits_per_second

if TYPE_CHECKING:
    from bench.contestants import Contestant

SEQUENCES, LENGTH = 8, 128
WARM_UP = 3
"""Number of steps of each contestant before any is measured; by then every form of compression is active."""
TIMEOUT = 24 * 3600.0
"""Seconds that a run may take: FSDP2 sends 92 MB a step, which takes long at 1 Mbit/s."""


class Turn(NamedTuple):
    """Means over some steps of one contestant on one rank."""

    seconds: float
    processor_ms: float
    """Milliseconds of processor time of all threads, gloo's included."""
    sent: float
    """Bytes sent, by the counters of the interface."""
    payload: float
    """Bytes sent without headers, by the counters of the interface."""
    counted: float | None
    """Bytes sent, by the contestant's own count."""


def run(
    names: Sequence[str],
    ranks: Sequence[int] = (2,),
    bandwidths: Sequence[str] = ("100mbit",),
    rounds: int = 3,
    steps: int = 2,
    delay_ms: float = 0.0,
) -> dict[str, Any]:
    """Measure and print; return figures by ranks, bandwidth and contestant.

    Raises:
        ValueError: no such network is possible; nothing was started.
        Unavailable: this machine cannot have a network of its own.
    """
    found = {}
    for count, lab in make_labs(ranks, bandwidths, delay_ms).items():
        with lab:
            figures = measure(lab, {name: TRAINING[name] for name in names}, bandwidths, rounds, steps)
        for bandwidth, each in figures.items():
            print(f"\n{count} ranks at {bandwidth}; ratios are to fsdp2 bf16, MB are per step and rank")
            print(training_table(each), flush=True)
        found[str(count)] = figures
    return found


def make_labs(ranks: Sequence[int], bandwidths: Sequence[str], delay_ms: float) -> dict[int, Lab]:
    """Return a network for each number of ranks, not started, after checking everything."""
    for bandwidth in bandwidths:
        bits_per_second(bandwidth)
    if min(ranks) < 2:
        raise ValueError(f"ranks={min(ranks)}: nothing crosses a network among fewer than 2")
    return {count: Lab(count, delay_ms=delay_ms) for count in ranks}


def measure(
    lab: Lab,
    contestants: Mapping[str, Contestant],
    bandwidths: Sequence[str],
    rounds: int,
    steps: int,
    sequences: int = SEQUENCES,
    inspect: Callable[[Trainer], Any] = lambda trainer: None,
) -> dict[str, Any]:
    """Return figures of every contestant at every bandwidth of a started network.

    Args:
        steps: number of steps of each contestant in each round.
        sequences: number of sequences, of ``LENGTH`` tokens, in the batch of a rank.
        inspect: function whose result for each trainer, after measuring on rank 0, is added to the figures.
    """
    found = {}
    for bandwidth in bandwidths:
        lab.set_bandwidth(bandwidth)
        args = (lab, contestants, bandwidth, rounds, steps, sequences, inspect)
        per_rank = lab.run(_on_rank, *args, timeout=TIMEOUT)
        figures = {
            name: _summary([turns[name] for turns, _ in per_rank], len(per_rank) * sequences * LENGTH)
            for name in contestants
        }
        for name, each in figures.items():
            baseline = figures.get(contestants[name].baseline)
            each["times_as_fast"] = baseline and baseline["seconds"] / each["seconds"]
            each["times_fewer_bytes"] = baseline and baseline["sent_bytes"] / each["sent_bytes"]
            each["inspected"] = per_rank[0][1][name]
        found[bandwidth] = figures
    return found


def _on_rank(
    lab: Lab,
    contestants: Mapping[str, Contestant],
    bandwidth: str,
    rounds: int,
    steps: int,
    sequences: int,
    inspect: Callable[[Trainer], Any],
) -> tuple[dict[str, list[Turn]], dict[str, Any]]:
    """Return the turns of each contestant, and the result of ``inspect`` for it."""
    warnings.simplefilter("ignore", FutureWarning)  # torch warns of names that its other users import
    # a warning of few bits with Adam does not matter, as the trained model is dropped
    warnings.filterwarnings("ignore", message="gradients=")
    trainers, draws = {}, {}
    for name, contestant in contestants.items():
        torch.manual_seed(0)
        trainers[name], draws[name] = make(contestant), torch.Generator("cpu").manual_seed(dist.get_rank())

    def turn(name: str, count: int) -> Turn:
        batches = [
            torch.randint(VOCABULARY, (sequences, LENGTH + 1), generator=draws[name], device="cpu")
            for _ in range(count)
        ]
        rank, sent_bytes = dist.get_rank(), trainers[name].sent_bytes
        dist.barrier()
        before, counted = lab.traffic()[rank], sent_bytes() if sent_bytes else 0
        wall, processor = time.perf_counter(), time.process_time()
        for tokens in batches:
            trainers[name].step(tokens)
        dist.barrier()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        traffic = lab.traffic()[rank].since(before)
        own = (sent_bytes() - counted) / count if sent_bytes else None
        return Turn(wall / count, 1e3 * processor / count, traffic.sent / count, traffic.payload_sent / count, own)

    tuned = [name for name, contestant in contestants.items() if contestant.settings.get("gradients") == AUTO]
    set_bandwidth_together(lab, UNSHAPED)
    for name in contestants:
        if name not in tuned:
            turn(name, WARM_UP)
    set_bandwidth_together(lab, bandwidth)
    for name in tuned:  # ``auto`` chooses its codecs by the network that it is measured on
        turn(name, FIRST + 2)
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for number, name in interleaved(contestants, rounds):
        turns[name].append(turn(name, steps))
        if dist.get_rank() == 0:
            print(f"{bandwidth} {number}/{rounds} {name}: {turns[name][-1].seconds:.3f} s/step", file=sys.stderr)
    return turns, {name: inspect(trainer) for name, trainer in trainers.items()}


def set_bandwidth_together(lab: Lab, bandwidth: str, receive: str | None = None) -> None:
    """Change the bandwidth of a network from within, while no rank sends anything. A collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        lab.set_bandwidth(bandwidth, receive=receive)
    dist.barrier()


def _summary(by_rank: list[list[Turn]], tokens: int) -> dict[str, Any]:
    """Return one contestant's figures; ``tokens`` are those of all ranks in a step."""
    rounds = [max(turn.seconds for turn in turns) for turns in zip(*by_rank, strict=True)]
    turns = [turn for of_rank in by_rank for turn in of_rank]
    sent = mean(turn.sent for turn in turns)
    own = [turn.counted for turn in turns if turn.counted is not None]
    counted = mean(own) if own else None
    return {
        "seconds": median(rounds),
        "rounds": rounds,
        "processor_ms": median(mean(turn.processor_ms for turn in each) for each in zip(*by_rank, strict=True)),
        "tokens_per_s": tokens / median(rounds),
        "sent_bytes": sent,
        "counted_bytes": counted,
        "sent_above_counted": counted and sent / counted - 1,
        "payload_above_counted": counted and mean(turn.payload for turn in turns) / counted - 1,
    }


def training_table(figures: Mapping[str, Any]) -> str:
    """Return a row for each contestant at one bandwidth: bytes by the interface and by the contestant's own count."""
    return table(
        ("", "s/step", "tokens/s", "faster", "MB sent", "fewer", "MB by its own count", "interface", "less headers"),
        *(
            (
                name,
                f"{each['seconds']:.3f}",
                f"{each['tokens_per_s']:,.0f}",
                times(each["times_as_fast"]),
                f"{each['sent_bytes'] / 1e6:.2f}",
                times(each["times_fewer_bytes"]),
                cell(each["counted_bytes"] and each["counted_bytes"] / 1e6, ".2f"),
                cell(each["sent_above_counted"], "+.1%"),
                cell(each["payload_above_counted"], "+.2%"),
            )
            for name, each in figures.items()
        ),
    )
