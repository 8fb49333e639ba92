"""Held-out loss of a small language model, trained in every compressed way from the same weights on the same text.

    python bench/curves.py                                          # three seeds: an hour and a half on two cores
    python bench/curves.py --ways fp32,int8 --seeds 0 --steps 300
    python bench/curves.py --ways fp32,1-bit --seeds 0,1,2,3,4 --lr 2e-3 --json curves.json
    python bench/curves.py --ways "fp32 at 2e-3,muon at 0.02,muon int4/int4 at 0.02" --json curves.json

The demo's model with a million parameters, its text, its optimizer (AdamW, clipped, half a cosine); each of four gloo
ranks takes 128 bytes of text per step. Runs of one seed and learning rate differ in the way alone: a codec of gradients
with AdamW (``int8/int4``: and one of deltas of weights), an optimizer of the 1-bit family, or Muon (``muon``: exact;
``muon int4/int4``: encoded with EF21, ``muon int4/int4 ef``: with classic error feedback, ``muon int4/int4 ef 64``: and
blocks of 64, ``unclipped``: with gradients clipped of nothing but what AdamW updates; its rate is that of matrices, and
all else has AdamW at that of ``--lr``). *Gap* is the loss at the end less that of exact sums of AdamW with the same
seed, at the same rate or, of Muon, the first among the ways; the spread of exact sums over seeds is what a gap is to be
held against. *CPU* is seconds of all ranks per 100 steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from re import split
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import yafsdp_cc
from bench.common import save
from bench.slow import learn
from bench.trainers import ADAM, Trainer
from tests.ranks import on_ranks
from yafsdp_cc import Compression
from yafsdp_cc.optim import Muon, OneBitAdam
from yafsdp_cc.table import table
from yafsdp_cc.tools.demo.model import GPT
from yafsdp_cc.tools.demo.train import CLIP, loss_of

CODECS = ("fp32", "int8", "int4", "ternary", "onebit", "powersgd")
_ONE_BIT = Compression("onebit", weights="int4", residual="int8")
ONE_BIT_ADAM: dict[str, tuple[Compression, dict[str, Any]]] = {
    "1-bit": (_ONE_BIT, {}),
    "1-bit, ternary weights": (replace(_ONE_BIT, weights="ternary"), {}),
    "1-bit, weights exact": (replace(_ONE_BIT, weights=None), {}),
    "1-bit, gradients": (_ONE_BIT, {"form": "gradient"}),
    "1-bit, never refreshed": (_ONE_BIT, {"refreshes": 0}),
}
MUON, MUON_RATE = "muon", 0.02
"""The paper's algorithm, with its warm-up of 15 % and nothing sharded."""
RATE, VALIDATE_EVERY = ADAM["lr"], 100


class UnclippedMatrices(Trainer):
    """Clips the gradients of what AdamW updates, and no others."""

    def step(self, tokens: torch.Tensor, clip: float | None = None) -> None:
        loss_of(self.model, tokens).backward()
        if clip is not None:
            groups = self.optimizer.param_groups
            torch.nn.utils.clip_grad_norm_(
                [each for group in groups if "betas" in group for each in group["params"]], clip
            )
        self.optimizer.step()
        self.optimizer.zero_grad()


def make(way: str, steps: int, rate: float, muon_rate: float) -> Trainer:
    """Return a sharded model and its optimizer."""
    model = GPT(width=128, depth=5, heads=4)
    adam = ADAM | {"lr": rate}
    if way in ONE_BIT_ADAM:
        compression, settings = ONE_BIT_ADAM[way]
        yafsdp_cc.shard(model, compression=compression, zero_stage=2)
        settings = adam | {"warmup_steps": max(1, steps // 20), "max_grad_norm": CLIP} | settings
        return Trainer(model, optimizer=OneBitAdam(model.parameters(), **settings))
    if way.split()[0] == MUON:
        _, codecs, *options = f"{way} ".split(" ")
        gradients, _, weights = codecs.partition("/")
        form: Any = True if "ef" in options else "ef21"
        block: Any = next((int(each) for each in options if each.isdecimal()), 256)
        encoding = Compression(gradients or "fp32", weights or None, feedback=form, residual="fp32", block=block)
        yafsdp_cc.shard(model, compression=encoding if gradients else None, zero_stage=2, ownership="matrix")
        kind = UnclippedMatrices if "unclipped" in options else Trainer
        return kind(model, optimizer=Muon(model.parameters(), muon_rate, adamw=adam, ns_dtype=torch.float32))
    gradients, _, weights = way.partition("/")
    compression = None if way == "fp32" else Compression(gradients, weights or None)
    yafsdp_cc.shard(model, compression=compression, zero_stage=2 if weights else 3)
    return Trainer(model, optimizer=torch.optim.AdamW(model.parameters(), **adam, fused=True))


def curve(way: str, seed: int, steps: int, rate: float, muon_rate: float) -> dict[str, Any]:
    """Return, on every rank, held-out losses by step, bytes that a rank sent in a step, on average, and CPU seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.filterwarnings("ignore", message="gradients=")
    trainer = make(way, steps, rate, muon_rate)
    before = time.process_time()
    found = learn(trainer, steps, 1, VALIDATE_EVERY, seed)
    dist.all_reduce(cpu := torch.tensor(time.process_time() - before))
    counters = yafsdp_cc.counters_of(trainer.model)
    sent = counters.reduced_bytes / steps, counters.gathered_bytes / steps
    return {"losses": found["losses"], "sent": sent, "seconds": found["seconds"], "cpu": cpu.item()}


def row(way: str, runs: dict[str, Any], exact: dict[str, Any], seeds: list[str]) -> tuple[str, ...]:
    """Return what a way sent, its losses, and how far they are from those of exact sums."""

    def end(run: dict[str, Any]) -> float:
        return list(run["losses"].values())[-1]

    ends = {seed: end(runs[seed]) for seed in seeds if seed in runs}
    gaps = [loss - end(exact[seed]) for seed, loss in ends.items() if seed in exact]
    gap = f"{mean(gaps):+.4f}" if gaps else ""
    if len(gaps) > 1:
        gap += f" ± {stdev(gaps) / len(gaps) ** 0.5:.4f}"
    reduced, gathered = (f"{each / 1e6:.3f}" for each in next(iter(runs.values()))["sent"])
    by_seed = ", ".join(f"{loss:.3f}" for loss in ends.values())
    some = next(iter(runs.values()))
    cpu = f"{100 * some['cpu'] / max(map(int, some['losses'])):.1f}" if "cpu" in some else ""
    return way, reduced, gathered, by_seed, f"{mean(ends.values()):.4f}", gap, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    others = " · ".join(ONE_BIT_ADAM)
    parser.add_argument(
        "--ways",
        default=",".join(CODECS),
        help=f"with commas (%(default)s); also {others} · muon · muon CODEC/CODEC [ef] [BLOCK] [unclipped] · "
        "each also ... at RATE",
    )
    parser.add_argument("--lr", type=float, default=RATE, help="the largest learning rate (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="with commas (%(default)s)")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="where curves are written, run by run; those there are not run again")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    seeds, asked = options.seeds.split(","), dict(rate_of(way, options.lr) for way in split(r",(?! )", options.ways))
    for seed in seeds:
        for name, (way, rate, muon_rate) in asked.items():
            runs = found.setdefault(name, {})
            if seed not in runs:
                args = (curve, way, int(seed), options.steps, rate, muon_rate)
                runs[seed] = on_ranks(options.ranks, *args, timeout=7200)[0]
                print(f"seed {seed} {name}: {runs[seed]['losses'][options.steps]:.4f}", flush=True)
                save(options.json, found)
    exact = [name for name, (way, *_) in asked.items() if way == "fp32"] or [rate_of("fp32", options.lr)[0]]
    rows = [
        row(name, found[name], found.get(rate_of("fp32", rate)[0] if way[:4] != MUON else exact[0], {}), seeds)
        for name, (way, rate, _) in asked.items()
    ]
    head = ("way", "MB of gradients", "of weights, per step", "held-out loss, by seed", "mean", "gap", "CPU")
    print(table(head, *rows))


def rate_of(asked: str, lr: float) -> tuple[str, tuple[str, float, float]]:
    """Return the name of some runs, their way, the largest rate of AdamW and that of Muon's matrices."""
    way, _, own = asked.partition(" at ")
    is_muon = way.split()[0] == MUON
    rate, muon_rate = lr, MUON_RATE
    if own:
        rate, muon_rate = (lr, float(own)) if is_muon else (float(own), MUON_RATE)
    name = way if rate == RATE else f"{way} at {rate:g}"
    if is_muon and muon_rate != MUON_RATE:
        name += f" at {muon_rate:g}"
    return name, (way, rate, muon_rate)


if __name__ == "__main__":
    main()
