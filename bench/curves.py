"""Held-out loss of a small language model, trained in every compressed way from the same weights on the same text.

    python bench/curves.py                                          # three seeds: an hour and a half on two cores
    python bench/curves.py --ways fp32,int8 --seeds 0 --steps 300
    python bench/curves.py --ways fp32,1-bit --seeds 0,1,2,3,4 --lr 2e-3 --json curves.json

The demo's model with a million parameters, its text, its optimizer (AdamW, clipped, half a cosine); each of four gloo
ranks takes 128 bytes of text per step. Runs of one seed and learning rate differ in the way alone: a codec of gradients
with AdamW (``int8/int4``: and one of changes of weights), or an optimizer of the 1-bit family. *Gap* is the loss at the
end less that of exact sums with the same seed and rate; the spread of exact sums over seeds is what a gap is to be held
against.
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
import torch._dynamo  # by the optimizers, before the fork
import torch.distributed as dist

import yafsdp_cc
import yafsdp_cc.api
import yafsdp_cc.compression.kernels
from tests.ranks import on_ranks
from yafsdp_cc import Compression
from yafsdp_cc.demo import data
from yafsdp_cc.demo.model import GPT
from yafsdp_cc.demo.train import CLIP, learning_rate, loss_of, mean_over_ranks
from yafsdp_cc.optim import OneBitAdam, ReplicatedOneBitAdam

CODECS = ("fp32", "int8", "int4", "ternary", "onebit", "powersgd")
BOTH_WAYS = Compression("onebit", weights="int4", residual="int8")
LED: dict[str, tuple[Compression, dict[str, Any]]] = {
    "1-bit": (BOTH_WAYS, {}),
    "1-bit, ternary weights": (replace(BOTH_WAYS, weights="ternary"), {}),
    "1-bit, weights exact": (replace(BOTH_WAYS, weights=None), {}),
    "1-bit, gradients": (BOTH_WAYS, {"form": "gradient"}),
    "1-bit, never refreshed": (BOTH_WAYS, {"refreshes": 0}),
}
"""What OneBitAdam is tried with."""
REPLICATED = "1-bit, replicated"
"""The paper's algorithm, with its warm-up of 15 % and nothing sharded."""
RATE = 1e-3
"""The demo's learning rate."""
WINDOWS, HELD_OUT, VALIDATE_EVERY = 1, 32, 100
"""Windows of text per rank: in a step, and to validate on; steps between."""


def learner(way: str, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """A model, sharded unless its optimizer keeps it whole, and the optimizer."""
    model = GPT(width=128, depth=5, heads=4)
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    if way == REPLICATED:
        return model, ReplicatedOneBitAdam(model.parameters(), **settings, warmup_steps=max(1, 3 * steps // 20))
    if way in LED:
        compression, more = LED[way]
        yafsdp_cc.shard(model, compression=compression, zero_stage=2)
        more = {"warmup_steps": max(1, steps // 20), "max_grad_norm": CLIP} | more
        return model, OneBitAdam(model.parameters(), **settings, **more)
    gradients, _, weights = way.partition("/")
    compression = None if way == "fp32" else Compression(gradients, weights or None)
    yafsdp_cc.shard(model, compression=compression, zero_stage=2 if weights else 3)
    return model, torch.optim.AdamW(model.parameters(), **settings, fused=True)


def curve(way: str, seed: int, steps: int, rate: float) -> dict[str, Any]:
    """On every rank: held-out losses in nats per byte, by step, and bytes that a rank sent in a step, in the mean."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.filterwarnings("ignore", message="gradients=")
    model, optimizer = learner(way, steps)
    rank, ranks, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    text = data.read(None)
    drawn = torch.Generator().manual_seed(seed * ranks + rank)
    spread = torch.linspace(0, len(text.held_out) - model.context - 1, HELD_OUT * ranks).long()
    held_out = data.windows(text.held_out, spread[rank::ranks], model.context, cpu)
    losses: dict[int, float] = {}
    start = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(text.train) - model.context, (WINDOWS,), generator=drawn)
        loss_of(model, *data.windows(text.train, starts, model.context, cpu)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps) * rate / RATE
        optimizer.step()
        optimizer.zero_grad()
        if step % VALIDATE_EVERY == 0 or step == steps:
            with torch.no_grad():
                losses[step] = mean_over_ranks(loss_of(model, *held_out))
    return {"losses": losses, "sent": sent(model, optimizer, steps), "seconds": time.perf_counter() - start}


def sent(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, float]:
    """Bytes of a step, in the mean."""
    if isinstance(optimizer, ReplicatedOneBitAdam):
        mean, exact = optimizer.mean, optimizer.warmup_steps / steps
        whole = 2 * (mean.world - 1) * mean.chunk * 4  # there and back, in fp32
        return {"reduced": exact * whole + (1 - exact) * mean.sent_bytes, "gathered": 0.0}
    counters = yafsdp_cc.counters_of(model)
    return {"reduced": counters.reduced_bytes / steps, "gathered": counters.gathered_bytes / steps}


def table(found: dict[str, dict[str, Any]], seeds: list[int]) -> str:
    """A row for each way: what it sent, its losses, and how far they are from those of exact sums."""
    lines = [
        "| way | MB of gradients, weights per step | held-out loss, by seed | mean | gap |",
        "|---|---|---|---|---|",
    ]
    for way, runs in found.items():
        exact = found.get("fp32" + way[way.find(" at ") :] if " at " in way else "fp32", {})
        ends = {seed: list(runs[str(seed)]["losses"].values())[-1] for seed in seeds if str(seed) in runs}
        gaps = [end - list(exact[str(seed)]["losses"].values())[-1] for seed, end in ends.items() if str(seed) in exact]
        by_seed = ", ".join(f"{end:.3f}" for end in ends.values())
        if not ends:
            continue
        sent = next(iter(runs.values()))["sent"]
        gap = f"{mean(gaps):+.4f}" if gaps else ""
        if len(gaps) > 1:
            gap += f" ± {stdev(gaps) / len(gaps) ** 0.5:.4f}"
        each = f"{sent['reduced'] / 1e6:.3f}, {sent['gathered'] / 1e6:.3f}"
        lines.append(f"| {way} | {each} | {by_seed} | {mean(ends.values()):.4f} | {gap} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--ways", default=",".join(CODECS), help=f"with commas (%(default)s); also {' · '.join([*LED, REPLICATED])}"
    )
    parser.add_argument("--lr", type=float, default=RATE, help="the largest learning rate (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="with commas (%(default)s)")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="where curves are written, run by run; those there are not run again")
    asked = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    if asked.json and asked.json.exists():
        found = json.loads(asked.json.read_text())
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    for seed in seeds:
        for way in split(r",(?! )", asked.ways):
            name = way if asked.lr == RATE else f"{way} at {asked.lr:g}"
            runs = found.setdefault(name, {})
            if str(seed) not in runs:
                (run, *_) = on_ranks(asked.ranks, curve, way, seed, asked.steps, asked.lr, timeout=7200)
                runs[str(seed)] = json.loads(json.dumps(run))
                print(f"seed {seed} {name}: {run['losses'][asked.steps]:.4f} ({run['seconds']:.0f} s)", flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found, seeds))


if __name__ == "__main__":
    main()
