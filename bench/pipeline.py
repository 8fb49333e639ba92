"""Suite ``pipeline``: stages of a pipeline, each in a network namespace of its own, with all kinds of compression.

A byte-level GPT of one block per stage trains under 1F1B. Contestants take turns in interleaved rounds, each at all
bandwidths one after another, for the time and the bytes of a step in which every sample has been seen before. With
``epochs``, each also fine-tunes a model of four blocks by itself, on an unshaped network, from each of several seeds:
one that has learnt the standard library's source goes on with a fixed set of samples of torch.nn's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo  # the optimizers import it, before ranks are forked
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from bench import train
from bench.common import cell, interleaved, times
from bench.contestants import PIPELINE
from yafsdp_cc.pipelining import CompressedStage, prepare_schedule
from yafsdp_cc.table import table
from yafsdp_cc.tools.demo import data
from yafsdp_cc.tools.demo.model import GPT
from yafsdp_cc.tools.demo.train import learning_rate
from yafsdp_cc.tools.netlab.links import UNSHAPED

if TYPE_CHECKING:
    from bench.contestants import Contestant
    from yafsdp_cc.tools.netlab import Lab

WIDTH, HEADS, LENGTH = 128, 4, 128
SAMPLES, BATCH = 256, 16
TIMED_WIDTH, TIMED_BATCH = 32, 128
"""Width and batch of timed steps: a narrow model on a CPU sends as many bytes per computed operation as a wide one on a
GPU."""
DEPTH, PRETRAINING_STEPS = 4, 800
FINE_TUNING_RATE = 3e-4
"""Learning rate of the first step of fine-tuning; it falls to a tenth, as half a cosine."""
CPU = torch.device("cpu")


class Part(nn.Module):
    """The part of a GPT that one stage has."""

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
        model: the whole model, equal on all ranks, of which each trains its part.
    """

    def __init__(self, contestant: Contestant, windows: Tensor, model: GPT) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._module = Part(model, rank, ranks)
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
        self.optimizer = torch.optim.AdamW(self._module.parameters(), lr=FINE_TUNING_RATE, betas=(0.9, 0.95))

    def step(self, ids: Tensor) -> float:
        """Train on some of the samples; return the mean loss on the last rank, 0 on others."""
        loss = self._run(self._windows[ids], {"sample_ids": ids} if self._takes_ids else {})
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def evaluate(self, windows: Tensor) -> float:
        """Return the mean loss on ``windows`` on the last rank, 0 on others."""
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
        epochs: number of epochs that each contestant also fine-tunes for.
        seeds: number of seeds for fine-tuning.

    Raises:
        ValueError: no such network is possible; nothing was started.
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
    """Bytes sent, by the counters of the interface."""


def _turns(
    lab: Lab, contestants: Mapping[str, Contestant], bandwidths: Sequence[str], rounds: int, steps: int
) -> dict[tuple[str, str], Turns]:
    """Return turns by bandwidth and contestant."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    windows = data.spread_windows(data.read(None).train, 2 * TIMED_BATCH, LENGTH, 0, 1)
    batches = torch.arange(len(windows), device="cpu").split(TIMED_BATCH)
    trainers = {name: Trainer(each, windows, _model(TIMED_WIDTH, ranks, 0)) for name, each in contestants.items()}
    for trainer in trainers.values():
        for ids in batches:  # a pass over all samples, so that the timed steps see none that is new
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
    found: dict[str, Any] = {name: {"by_epoch": [], "held_out": []} for name in contestants}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            lab.run(_pretrain, path := Path(folder, "model.pt"), seed, timeout=train.TIMEOUT)
            for name, contestant in contestants.items():
                by_epoch, held_out = lab.run(_fine_tune, contestant, path, epochs, seed, timeout=train.TIMEOUT)[-1]
                found[name]["by_epoch"].append(by_epoch)
                found[name]["held_out"].append(held_out)
                print(f"seed {seed}, {name}: {by_epoch[-1]:.4f}, held-out {held_out:.4f}", file=sys.stderr)
    return found


def _model(width: int, depth: int, seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(width, depth, HEADS, LENGTH)


def pretrained(seed: int) -> GPT:
    """Return a model that was trained on the standard library's source for some minutes."""
    model, text = _model(WIDTH, DEPTH, seed), data.read(None).train
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(1, PRETRAINING_STEPS + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, PRETRAINING_STEPS)
        batch = data.windows(text, torch.randint(len(text) - LENGTH - 1, (BATCH,), device="cpu"), LENGTH)
        loss_of(model(batch[:, :-1]), batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _pretrain(path: Path, seed: int) -> None:
    """Write a pretrained model to ``path``, on rank 0."""
    if dist.get_rank() == 0:
        torch.save(pretrained(seed).state_dict(), path)


def _fine_tune(contestant: Contestant, path: Path, epochs: int, seed: int) -> tuple[list[float], float]:
    """Return the mean loss of each epoch, and the final one on held-out text, on the last rank."""
    model, text = _model(WIDTH, DEPTH, seed), data.read(Path(nn.__file__).parent)
    model.load_state_dict(torch.load(path))
    trainer = Trainer(contestant, data.spread_windows(text.train, SAMPLES, LENGTH, 0, 1), model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        trainer.optimizer, epochs * SAMPLES // BATCH, FINE_TUNING_RATE / 10
    )
    by_epoch = []
    for epoch in range(epochs):
        draws = torch.Generator("cpu").manual_seed(1000 * seed + epoch)
        losses = []
        for ids in torch.randperm(SAMPLES, generator=draws, device="cpu").split(BATCH):
            losses.append(trainer.step(ids))
            schedule.step()
        by_epoch.append(mean(losses))
    return by_epoch, trainer.evaluate(data.spread_windows(text.held_out, 4 * BATCH, LENGTH, 0, 1))


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
    """Return a row for each contestant: the mean over seeds, its difference to exact sends, and the loss of each
    seed."""
    exact = learnt.get("exact")

    def above(each: Mapping[str, Any], of: str) -> str:
        return cell(_last(each[of]) / _last(exact[of]) - 1 if exact else None, "+.2%")

    def by_seed(each: Mapping[str, Any]) -> str:
        if exact is None:
            return "-"
        pairs = zip(each["by_epoch"], exact["by_epoch"], strict=True)
        return " ".join(f"{ours[-1] / theirs[-1] - 1:+.2%}" for ours, theirs in pairs)

    return table(
        ("", "last epoch", "above exact", "by seed", "held-out", "above exact"),
        *(
            (
                name,
                f"{_last(each['by_epoch']):.4f}",
                above(each, "by_epoch"),
                by_seed(each),
                f"{_last(each['held_out']):.4f}",
                above(each, "held_out"),
            )
            for name, each in learnt.items()
        ),
    )


def _last(losses: Sequence[list[float] | float]) -> float:
    """Return the mean over seeds of a loss, or of the last of a list of them."""
    return mean(each[-1] if isinstance(each, list) else each for each in losses)
