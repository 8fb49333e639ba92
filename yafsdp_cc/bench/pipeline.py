"""Suite ``pipeline``: stages of a pipeline, each in a network namespace of its own, with all kinds of compression.

A byte-level GPT of one block per stage trains under 1F1B. Contestants take turns in interleaved rounds, each at all
bandwidths one after another, for the time and the bytes of a step in which every sample has been seen before. With
``epochs``, each also learns a fixed set of samples by itself, on an unshaped network, from each of several seeds.
"""

from __future__ import annotations

import sys
import time
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo  # by the optimizers, before ranks are forked
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from yafsdp_cc.bench import train
from yafsdp_cc.bench.common import cell, interleaved, table, times
from yafsdp_cc.bench.contestants import PIPELINE
from yafsdp_cc.demo import data
from yafsdp_cc.demo.model import GPT
from yafsdp_cc.demo.train import learning_rate
from yafsdp_cc.netlab.links import UNSHAPED
from yafsdp_cc.pipelining import CompressedStage, prepare_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yafsdp_cc.bench.contestants import Contestant
    from yafsdp_cc.netlab import Lab

WIDTH, HEADS, LENGTH = 128, 4, 128
SAMPLES, BATCH = 256, 16
CPU = torch.device("cpu")


class Part(nn.Module):
    """The share of a GPT that one stage has."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        share = len(model.blocks) // stages
        self.tokens = model.tokens if stage == 0 else None
        self.blocks = model.blocks[stage * share : (stage + 1) * share]
        self.head = nn.Sequential(model.norm, model.head) if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream [samples, LENGTH, WIDTH], or logits on the last stage."""
        if self.tokens is not None:
            x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """One rank's stage of a contestant.

    Args:
        windows: [samples, LENGTH + 1] bytes, the same on every rank.
        depth: blocks of the whole model.
        seed: of its weights.
    """

    def __init__(self, contestant: Contestant, windows: Tensor, depth: int, seed: int = 0) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self._module = Part(GPT(WIDTH, depth, HEADS, LENGTH), rank, ranks)
        self._windows = windows
        self._takes_ids = contestant.maker == "stages"
        if self._takes_ids:
            settings = dict(contestant.settings)
            if settings.get("forward_delta"):
                settings["cache_samples"] = len(windows)
            self.stage: PipelineStage = CompressedStage(self._module, rank, ranks, CPU, **settings)
        else:
            self.stage = PipelineStage(self._module, rank, ranks, CPU)
        self._schedule = Schedule1F1B(self.stage, 2 * ranks, loss_of)
        if self._takes_ids:
            prepare_schedule(self._schedule)
        self.optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def step(self, ids: Tensor) -> float:
        """Train on some of the samples; the mean loss on the last rank, 0 elsewhere."""
        loss = self._run(self._windows[ids], {"sample_ids": ids} if self._takes_ids else {})
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def evaluate(self, windows: Tensor) -> float:
        """Return the mean loss on ``windows`` on the last rank, 0 elsewhere."""
        return mean(self._run(part, {}, trains=False) for part in windows.split(BATCH))

    def _run(self, windows: Tensor, extra: dict[str, Any], *, trains: bool = True) -> float:
        losses: list[Tensor] = []
        run = self._schedule.step if trains else self._schedule.eval
        if self.stage.is_first:
            run(windows[:, :-1], **extra)
        elif self.stage.is_last:
            run(target=windows[:, 1:], losses=losses, **extra)
        else:
            run(**extra)
        return torch.stack(losses).mean().item() if losses else 0.0


def run(
    names: Sequence[str],
    ranks: Sequence[int] = (2,),
    bandwidths: Sequence[str] = ("100mbit", UNSHAPED),
    rounds: int = 3,
    steps: int = 2,
    delay_ms: float = 0.0,
    epochs: int = 0,
    seeds: int = 1,
) -> dict[str, Any]:
    """Measure and print; return figures by number of ranks, which is that of stages.

    Args:
        epochs: that each contestant learns besides; 0: none.
        seeds: how many times it does.

    Raises:
        ValueError: there is no such network; nothing was started.
        Unavailable: this machine cannot have a network of its own.
    """
    contestants = {name: PIPELINE[name] for name in names}
    found = {}
    for count, lab in train.make_labs(ranks, bandwidths, delay_ms).items():
        with lab:
            timed = _timed(lab, contestants, bandwidths, rounds, steps)
            for bandwidth, figures in timed.items():
                print(f"\n{count} stages at {bandwidth}; ratios are to exact sends, MB are per step and rank")
                print(timing_table(figures), flush=True)
            learnt = _learnt(lab, contestants, epochs, seeds) if epochs else {}
            if learnt:
                print(f"\n{count} stages, {epochs} epochs of {SAMPLES} samples, {seeds} seeds; nats per byte")
                print(loss_table(learnt), flush=True)
        found[str(count)] = {"timed": timed, "learnt": learnt}
    return found


def _timed(
    lab: Lab, contestants: Mapping[str, Contestant], bandwidths: Sequence[str], rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Return figures of every contestant, by bandwidth."""
    per_rank = lab.run(_turns, lab, contestants, bandwidths, rounds, steps, timeout=train.TIMEOUT)
    figures: dict[str, dict[str, Any]] = {}
    for bandwidth in bandwidths:
        figures[bandwidth] = {}
        for name in contestants:
            seconds, unshaped = (
                [max(each) for each in zip(*[turns[rate, name].seconds for turns in per_rank], strict=True)]
                for rate in (bandwidth, UNSHAPED if UNSHAPED in bandwidths else bandwidth)
            )
            figures[bandwidth][name] = {
                "seconds": median(seconds),
                "rounds": seconds,
                "to_unshaped": median(slow / fast for slow, fast in zip(seconds, unshaped, strict=True))
                if UNSHAPED in bandwidths
                else None,
                "sent_bytes": mean(each for turns in per_rank for each in turns[bandwidth, name].sent),
            }
    return figures


class Turns(NamedTuple):
    """A contestant's turns at one bandwidth on one rank, each a mean over its steps."""

    seconds: list[float]
    sent: list[float]
    """Bytes, by the counters of the interface."""


def _turns(
    lab: Lab, contestants: Mapping[str, Contestant], bandwidths: Sequence[str], rounds: int, steps: int
) -> dict[tuple[str, str], Turns]:
    """Return turns by bandwidth and contestant."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    windows = _windows()[: 2 * BATCH]
    batches = torch.arange(len(windows), device="cpu").split(BATCH)
    trainers = {name: Trainer(each, windows, ranks) for name, each in contestants.items()}
    for trainer in trainers.values():
        for ids in batches:  # from here on no sample is new
            trainer.step(ids)
    turns = {(bandwidth, name): Turns([], []) for bandwidth in bandwidths for name in contestants}
    for number, name in interleaved(contestants, rounds):
        for bandwidth in bandwidths:
            train.set_bandwidth_together(lab, bandwidth)
            before, start = lab.traffic()[rank], time.perf_counter()
            for count in range(steps):
                trainers[name].step(batches[count % len(batches)])
            dist.barrier()
            seconds = (time.perf_counter() - start) / steps
            turns[bandwidth, name].seconds.append(seconds)
            turns[bandwidth, name].sent.append(lab.traffic()[rank].since(before).sent / steps)
            if rank == 0:
                print(f"{number}/{rounds} {name} at {bandwidth}: {seconds:.3f} s/step", file=sys.stderr)
    return turns


def _learnt(lab: Lab, contestants: Mapping[str, Contestant], epochs: int, seeds: int) -> dict[str, Any]:
    """Return the losses of every contestant, by seed."""
    lab.set_bandwidth(UNSHAPED)
    found: dict[str, Any] = {}
    for name, contestant in contestants.items():
        runs = [lab.run(_learn, contestant, epochs, seed, timeout=train.TIMEOUT)[-1] for seed in range(seeds)]
        found[name] = {"by_epoch": [each[0] for each in runs], "held_out": [each[1] for each in runs]}
        print(f"{name}: held-out loss {mean(found[name]['held_out']):.4f}", file=sys.stderr)
    return found


def _learn(contestant: Contestant, epochs: int, seed: int) -> tuple[list[float], float]:
    """Return the mean loss of each epoch, and that on held-out text at the end, on the last rank."""
    trainer = Trainer(contestant, _windows(), depth=4, seed=seed)
    by_epoch, step, steps = [], 0, epochs * SAMPLES // BATCH
    for epoch in range(epochs):
        draws = torch.Generator("cpu").manual_seed(1000 * seed + epoch)
        losses = []
        for ids in torch.randperm(SAMPLES, generator=draws, device="cpu").split(BATCH):
            step += 1
            trainer.optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
            losses.append(trainer.step(ids))
        by_epoch.append(mean(losses))
    held_out = data.spread_windows(data.read(None).held_out, 4 * BATCH, LENGTH, 0, 1)
    return by_epoch, trainer.evaluate(held_out)


def _windows() -> Tensor:
    return data.spread_windows(data.read(None).train, SAMPLES, LENGTH, 0, 1)


def timing_table(figures: Mapping[str, Any]) -> str:
    """Return a row for each contestant at one bandwidth, with the ratio to its own steps on an unshaped network."""
    exact = figures.get("exact")
    return table(
        ("", "s/step", "to its unshaped", "faster", "MB sent", "fewer"),
        *(
            (
                name,
                f"{each['seconds']:.3f}",
                cell(each["to_unshaped"], ".2f"),
                times(exact and exact["seconds"] / each["seconds"]),
                f"{each['sent_bytes'] / 1e6:.3f}",
                times(exact and exact["sent_bytes"] / each["sent_bytes"]),
            )
            for name, each in figures.items()
        ),
    )


def loss_table(learnt: Mapping[str, Any]) -> str:
    """Return a row for each contestant: means over seeds, and how far above exact sends."""
    exact = learnt.get("exact")

    def above(each: Mapping[str, Any], of: str) -> str:
        return cell(_last(each[of]) / _last(exact[of]) - 1 if exact else None, "+.2%")

    return table(
        ("", "last epoch", "above exact", "held-out", "above exact"),
        *(
            (
                name,
                f"{_last(each['by_epoch']):.4f}",
                above(each, "by_epoch"),
                f"{_last(each['held_out']):.4f}",
                above(each, "held_out"),
            )
            for name, each in learnt.items()
        ),
    )


def _last(losses: Sequence[list[float] | float]) -> float:
    """Return the mean over seeds of a loss, or of the last of a list of them."""
    return mean(each[-1] if isinstance(each, list) else each for each in losses)
