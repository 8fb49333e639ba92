"""Held-out loss of a small language model, trained with every codec from the same weights on the same text.

    python bench/curves.py                                          # three seeds: an hour and a half on two cores
    python bench/curves.py --codecs fp32,int8 --seeds 0 --steps 300

The demo's model with a million parameters, its text, its optimizer (AdamW, clipped, half a cosine); each of four gloo
ranks takes 128 bytes of text per step. Runs of one seed differ in the codec alone. *Gap* is the loss at the end less
that of exact sums with the same seed; the spread of exact sums over seeds is what a gap is to be held against.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo  # by the optimizers, before the fork
import torch.distributed as dist

import yafsdp_cc
import yafsdp_cc.api
import yafsdp_cc.wire.native
from tests.ranks import on_ranks
from yafsdp_cc import Compression
from yafsdp_cc.demo import data
from yafsdp_cc.demo.model import GPT
from yafsdp_cc.demo.train import CLIP, learning_rate, loss_of, mean_over_ranks

CODECS = ("fp32", "int8", "int4", "ternary", "onebit", "powersgd")
WINDOWS, HELD_OUT, VALIDATE_EVERY = 1, 32, 100
"""Windows of text per rank: in a step, and to validate on; steps between."""


def curve(codec: str, seed: int, steps: int) -> dict[str, Any]:
    """On every rank: held-out losses in nats per byte, by step, and bytes that a rank sent to sum gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.filterwarnings("ignore", message="gradients=")
    model = GPT(width=128, depth=5, heads=4)
    yafsdp_cc.shard(model, compression=None if codec == "fp32" else Compression(gradients=codec))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
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
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % VALIDATE_EVERY == 0 or step == steps:
            with torch.no_grad():
                losses[step] = mean_over_ranks(loss_of(model, *held_out))
    wire = yafsdp_cc.plan_of(model).wire
    return {"losses": losses, "reduce_bytes": wire.reduce, "seconds": time.perf_counter() - start}


def table(found: dict[str, dict[str, Any]], seeds: list[int]) -> str:
    """A row for each codec: what it sent, its losses, and how far they are from those of exact sums."""
    lines = ["| codec | MB per step | held-out loss, by seed | mean | gap |", "|---|---|---|---|---|"]
    exact = found.get("fp32", {})
    for codec, runs in found.items():
        ends = {seed: list(runs[str(seed)]["losses"].values())[-1] for seed in seeds if str(seed) in runs}
        gaps = [end - list(exact[str(seed)]["losses"].values())[-1] for seed, end in ends.items() if str(seed) in exact]
        by_seed = ", ".join(f"{end:.3f}" for end in ends.values())
        sent = next(iter(runs.values()))["reduce_bytes"] / 1e6
        gap = f"{mean(gaps):+.3f}" if gaps else ""
        lines.append(f"| {codec} | {sent:.3f} | {by_seed} | {mean(ends.values()):.3f} | {gap} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codecs", default=",".join(CODECS), help="with commas (%(default)s)")
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
        for codec in asked.codecs.split(","):
            runs = found.setdefault(codec, {})
            if str(seed) not in runs:
                (run, *_) = on_ranks(asked.ranks, curve, codec, seed, asked.steps, timeout=7200)
                runs[str(seed)] = json.loads(json.dumps(run))
                print(f"seed {seed} {codec}: {run['losses'][asked.steps]:.4f} ({run['seconds']:.0f} s)", flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found, seeds))


if __name__ == "__main__":
    main()
