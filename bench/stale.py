"""Held-out loss with stale gradients: ASGD and DC-ASGD beside the same updates without a delay.

    python bench/stale.py                                              # three seeds: some three hours of one core
    python bench/stale.py --seeds 0 --ways "no delay,asgd" --steps 100

A language model of 0.35 million parameters reads the Python standard library. Four workers take turns, in one process:
each pulls, and pushes the gradient of 16 x 64 bytes when the three others have pushed theirs (delay 3), or at once (no
delay). Each push is an update by ``yafsdp_cc.server.ServerShard``, 20 warm-up steps of all workers and a cosine; a step
is four updates. *Recovered* is the part of the damage, ASGD's loss less that of no delay, that compensation undoes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from yafsdp_cc.bench.common import names, save
from yafsdp_cc.demo import data
from yafsdp_cc.demo.model import GPT
from yafsdp_cc.demo.train import loss_of
from yafsdp_cc.server import ServerShard

WORKERS, SEQUENCES, LENGTH, WARMUP = 4, 16, 64, 20
SGD: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 1.0}
MOMENTUM = SGD | {"lr": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"optimizer": torch.optim.AdamW, "lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}
WAYS: dict[str, dict[str, Any]] = {
    f"{name}{how}": settings | more
    for name, settings, strength in (("sgd", SGD, 2.0), ("momentum", MOMENTUM, 2.0), ("adamw", ADAMW, 2.0))
    for how, more in {
        ", no delay": {},
        ", asgd": {"delayed": True},
        f", dc-asgd {strength:g} adaptive": {"delayed": True, "delay_compensation": strength, "adaptive": True},
    }.items()
}
for strength in (0.5, 1.0, 4.0):
    WAYS[f"sgd, dc-asgd {strength:g} adaptive"] = SGD | {
        "delayed": True,
        "delay_compensation": strength,
        "adaptive": True,
    }
"""Ways to train; the first of each optimizer is its control, the second the damage."""


def learn(seed: int, steps: int, *, delayed: bool = False, lr: float, **rule: Any) -> float:
    """Return the held-out loss, in nats per byte."""
    torch.manual_seed(seed)
    model = GPT(width=80, depth=4, heads=4)
    text, updates = data.read(None), steps * WORKERS
    draws = torch.Generator().manual_seed(seed)

    def lr_lambda(update: int) -> float:
        step = update / WORKERS
        return min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * update / updates)) / 2

    weights = parameters_to_vector(model.parameters()).detach().clone()
    shard = ServerShard(weights, WORKERS, lr=lr, lr_lambda=lr_lambda, **rule)
    for update in range(updates):
        worker = update % WORKERS
        if not delayed:
            shard.pull(worker)
        vector_to_parameters(shard.pulled[worker], model.parameters())
        starts = torch.randint(len(text.train) - LENGTH, (SEQUENCES,), generator=draws)
        model.zero_grad()
        loss_of(model, data.windows(text.train, starts, LENGTH)).backward()
        shard.push(worker, parameters_to_vector([param.grad for param in model.parameters()]))
        if delayed:
            shard.pull(worker)
    vector_to_parameters(shard.weights.detach(), model.parameters())
    with torch.no_grad():
        return float(loss_of(model, data.spread_windows(text.held_out, 256, LENGTH, 0, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=list(WAYS), metavar="NAMES", help="; between them")
    parser.add_argument("--seeds", type=names, default=["0", "1", "2"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, help="in the place of each optimizer's own")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    ways = asked.ways.split(";") if isinstance(asked.ways, str) else asked.ways
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for seed in asked.seeds:
        for way in ways:
            start = time.perf_counter()
            settings = WAYS[way] | ({"lr": asked.rate} if asked.rate else {})
            found.setdefault(way, []).append(learn(int(seed), asked.steps, **settings))
            print(f"seed {seed}, {way}: {found[way][-1]:.4f}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
            save(asked.json, found)


if __name__ == "__main__":
    main()
