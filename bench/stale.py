"""Held-out loss with stale gradients: ASGD and DC-ASGD beside the same updates without a delay.

    python bench/stale.py --json stale.json                      # three seeds: half an hour for one free core
    python bench/stale.py --ways "sgd, asgd;sgd, dc-asgd" --seeds 0 --steps 100
    python bench/stale.py --pace 20mbit                          # one slow worker; a minute and a half

A language model of 0.35 million parameters reads the Python standard library. Four workers take turns in one process:
each pushes the gradient of 16 x 64 bytes, and pulls again, when the other three have pushed theirs (delay 3); or pulls
just before (no delay). A push is an update by ``yafsdp_cc.server.ServerShard``, a step is four of them; the rate warms
up for 20 steps and is then a cosine. For SGD workers clip gradients to norm 1, and compensation is adaptive with λ₀ = 4
and m = 0; for AdamW with λ₀ = 2 and m = 0.95. *Damage* is ASGD's loss less that without a delay, *recovered* the part
of it that compensation undoes.

``--pace``: four workers over links of this bandwidth, by ``ParameterServer``. Each waits 0.2 s instead of computing,
rank 1 three times as long, for 20 s at every bound of staleness.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench.common import names, save
from yafsdp_cc.server import ParameterServer, ServerShard
from yafsdp_cc.table import table
from yafsdp_cc.tools.demo import data
from yafsdp_cc.tools.demo.model import GPT
from yafsdp_cc.tools.demo.train import loss_of
from yafsdp_cc.tools.netlab import Lab

WORKERS, SEQUENCES, LENGTH, WARMUP, WINDOWS = 4, 16, 64, 20, 256
SECONDS = 20.0
"""Of each bound of staleness."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": torch.optim.SGD, "lr": 1.0, "clip": 1.0},
    "adamw": {"optimizer": torch.optim.AdamW, "lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.0},
}
COMPENSATION: dict[str, dict[str, Any]] = {
    "sgd": {"delay_compensation": 4.0, "adaptive": True, "mean_square_decay": 0.0},
    "adamw": {"delay_compensation": 2.0, "adaptive": True},
}
DELAYS = ("no delay", "asgd", "dc-asgd")
WAYS = {
    f"{name}, {delay}": settings | {"delayed": delay != "no delay"} | (COMPENSATION[name] if delay == "dc-asgd" else {})
    for name, settings in OPTIMIZERS.items()
    for delay in DELAYS
}


def learn(seed: int, steps: int, *, delayed: bool, lr: float, clip: float = math.inf, **rule: Any) -> float:
    """Return the held-out loss in nats per byte; workers clip what they push to the norm ``clip``."""
    torch.manual_seed(seed)
    model = GPT(width=80, depth=4, heads=4)
    text, draws, updates = data.read(None), torch.Generator().manual_seed(seed), steps * WORKERS

    def lr_lambda(update: int) -> float:
        return min(1.0, (update / WORKERS + 1) / WARMUP) * (1 + math.cos(math.pi * update / updates)) / 2

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
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        shard.push(worker, parameters_to_vector([param.grad for param in model.parameters() if param.grad is not None]))
        if delayed:
            shard.pull(worker)
    vector_to_parameters(shard.weights.detach(), model.parameters())
    with torch.no_grad():
        return float(loss_of(model, data.spread_windows(text.held_out, WINDOWS, LENGTH, 0, 1)))


def losses_table(found: dict[str, dict[str, float]]) -> str:
    """Return a row for each seed and optimizer."""
    rows = [("seed", "optimizer", *DELAYS, "damage", "recovered")]
    for seed, losses in found.items():
        for optimizer in OPTIMIZERS:
            if all(f"{optimizer}, {delay}" in losses for delay in DELAYS):
                control, asgd, compensated = (losses[f"{optimizer}, {delay}"] for delay in DELAYS)
                figures = [f"{each:.3f}" for each in (control, asgd, compensated, asgd - control)]
                rows.append((seed, optimizer, *figures, f"{(asgd - compensated) / (asgd - control):.0%}"))
    return table(*rows)


def pace(bandwidth: str) -> str:
    """Return a row for each bound of staleness: pushes of both kinds of workers, their delays, and bytes per push."""
    head = ("max_staleness", "pushes/s", "of rank 0", "of rank 1", "mean delay", "largest", "KB sent per push")
    rows: list[tuple[str, ...]] = [head]
    with Lab(WORKERS, bandwidth) as lab:
        for bound in (0, 1, 4, None):
            ranks = lab.run(_work, lab, bound)
            pushes, delays = [each[0] for each in ranks], sum((each[2] for each in ranks), Counter[int]())
            figures = (sum(pushes) / SECONDS, pushes[0] / SECONDS, pushes[1] / SECONDS, fmean(delays.elements()))
            sent = sum(each[1] for each in ranks) / sum(pushes) / 1e3
            rows.append((str(bound), *(f"{each:.2f}" for each in figures), str(max(delays)), f"{sent:.0f}"))
    return table(*rows)


def _work(lab: Lab, bound: int | None) -> tuple[int, int, Counter[int]]:
    """Return the pushes of this rank, the bytes it sent, and the delays at its shard."""
    rank, pushes = dist.get_rank(), 0
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    with ParameterServer(model, lr=0.01, max_staleness=bound) as server:
        before, start = lab.traffic()[rank], time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            server.pull()
            model(torch.randn(8, 64)).square().mean().backward()
            time.sleep(0.6 if rank == 1 else 0.2)
            server.push()
            pushes += 1
    return pushes, lab.traffic()[rank].since(before).payload_sent, server.shard.delays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=list(WAYS), help="; between them (all)")
    parser.add_argument("--seeds", type=names, default=["0", "1", "2"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, help="in the place of each optimizer's own")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pace", metavar="BANDWIDTH", help="measure this instead")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.pace:
        print(pace(asked.pace))
        return
    lr = {} if asked.lr is None else {"lr": asked.lr}
    found: dict[str, dict[str, float]] = {}
    for seed in asked.seeds:
        for way in asked.ways:
            start = time.perf_counter()
            loss = found.setdefault(seed, {})[way] = learn(int(seed), asked.steps, **WAYS[way] | lr)
            print(f"seed {seed}, {way}: {loss:.4f}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
            save(asked.json, found)
    print(losses_table(found))


if __name__ == "__main__":
    main()
