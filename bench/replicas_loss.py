"""Held-out loss of a small language model whose replicas are synchronized in every way that there is.

    python bench/replicas_loss.py                                            # 2 and 4 replicas, three seeds
    python bench/replicas_loss.py --replicas 2 --steps 300 --seeds 0 --ways sync,overlap --json replicas.json

The demo's model with a million parameters, its text, its optimizer (AdamW, clipped, half a cosine); each gloo rank is
a replica. A step is ``--sequences`` of 128 bytes of text, whatever the number of replicas; each half of half batches
has half of them. All train at the rate at which synchronous training (``sync``) is best of ``--rates``, with that seed
and number of replicas; with ``--way-rates`` all others at the one of those at which each is best itself. The *gap* is
the loss less that of ``sync``. Losses are those after all replicas have met; *apart* is how far the replica that is
furthest from their mean was before, by norms.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from bench.common import save
from bench.train import LENGTH
from bench.trainers import ADAM, Trainer
from tests.ranks import on_ranks
from yafsdp_cc.replicas import Gossip, Outer, Overlap, ReplicaSync
from yafsdp_cc.table import table
from yafsdp_cc.tools.demo import data
from yafsdp_cc.tools.demo.model import GPT
from yafsdp_cc.tools.demo.train import CLIP, LEARNING_RATE, VALIDATION_WINDOWS, learning_rate, loss_of


class Way(NamedTuple):
    """A contestant."""

    sync: Callable[[], ReplicaSync | None]
    halves: int = 1
    """Calls of ``optimizer.step()`` per step, each with as large a part of the batch."""


SYNC = "sync"
WAYS = {
    SYNC: Way(lambda: None),
    "overlap": Way(Overlap),
    "overlap int4": Way(lambda: Overlap("int4")),
    "half batches": Way(lambda: Overlap(half_batches=True), halves=2),
    "gossip": Way(Gossip),
    "gossip late": Way(lambda: Gossip(overlap=1)),
    "gossip int8": Way(lambda: Gossip(codec="int8")),
    "gossip int4": Way(lambda: Gossip(codec="int4")),
    "diloco": Way(lambda: Outer(sync_steps=60)),
    "local steps": Way(lambda: Outer(every=4, sync_steps=60, lr=1, momentum=0)),
    "local steps onebit": Way(lambda: Outer(every=4, sync_steps=60, lr=1, momentum=0, codec="onebit", decay=1)),
    "sparseloco": Way(lambda: Outer(sync_steps=60, lr=1, momentum=0, codec="topk2bit")),
}


class Job(NamedTuple):
    """A training run."""

    name: str
    """Of the way."""
    steps: int
    rate: float
    ranks: int
    sequences: int
    """Of each rank, per step."""


def run(job: Job, size: tuple[int, int], seed: int) -> dict[str, float]:
    """Train a model of a width and depth.

    Returns:
        On every rank the held-out loss, how far replicas were apart, seconds, and bytes per step.
    """
    name, steps, rate, _, sequences = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")  # of a model in one shard
    way, rank, world = WAYS[name], dist.get_rank(), dist.get_world_size()
    sync, model = way.sync(), GPT(*size, heads=4)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    yafsdp_cc.shard(model, mesh=mesh, sync=sync)
    trainer = Trainer(model, optimizer=torch.optim.AdamW(model.parameters(), **ADAM | {"lr": rate}))
    text, draws = data.read(None), torch.Generator("cpu").manual_seed(seed * world + rank)
    held_out = data.spread_windows(text.held_out, VALIDATION_WINDOWS, LENGTH, rank, world)
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        for group in trainer.optimizer.param_groups:
            group["lr"] = learning_rate(step, steps) / LEARNING_RATE * rate
        starts = torch.randint(len(text.train) - LENGTH, (sequences,), generator=draws, device="cpu")
        for part in starts.chunk(way.halves):
            trainer.step(data.windows(text.train, part, LENGTH), clip=CLIP)
    seconds = time.perf_counter() - begun
    if isinstance(sync, Overlap):
        yafsdp_cc.synchronize_replicas(model)  # predictions are apart by design
    own = weights_of(model)
    yafsdp_cc.synchronize_replicas(model)
    together = weights_of(model)
    apart = ((own - together).norm() / together.norm()).max()
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    with torch.no_grad():
        loss = loss_of(model, held_out)
    dist.all_reduce(loss)
    sent = (way.halves * sync.planned_bytes()) if sync else yafsdp_cc.counters_of(model).reduced_bytes / steps
    return {"loss": loss.item() / world, "apart": apart.item(), "seconds": seconds, "sent": sent}


def weights_of(model: Any) -> torch.Tensor:
    """Return all weights of this rank."""
    return torch.cat([each.detach().to_local().flatten() for each in model.parameters()])


def row(runs: dict[str, dict[str, float]], exact: dict[str, dict[str, float]]) -> tuple[str, ...]:
    """Return losses by seed, their mean gap to synchronous training, and the rest."""
    gaps = [found["loss"] - exact[seed]["loss"] for seed, found in runs.items() if seed in exact]
    some = list(runs.values())
    return (
        ", ".join(f"{found['loss']:.4f}" for found in some),
        ", ".join(f"{found['rate']:g}" for found in some),
        f"{mean(gaps):+.4f}" if gaps else "",
        f"{max(found['apart'] for found in some):.1e}",
        f"{some[0]['sent'] / 1e6:.2f}",
        f"{mean(found['seconds'] for found in some):.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas (%(default)s)")
    parser.add_argument("--replicas", default="2,4", help="with commas (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="with commas (%(default)s)")
    parser.add_argument("--rates", default="2e-3,4e-3,8e-3", help="of synchronous training, with commas (%(default)s)")
    parser.add_argument("--way-rates", help="of all other ways (that at which synchronous training is best)")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--sequences", type=int, default=8, help="of all replicas, per step (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (%(default)s)")
    parser.add_argument("--depth", type=int, default=5, help="of the model (%(default)s)")
    parser.add_argument(
        "--json", type=Path, help="where figures are written, run by run; those there are not run again"
    )
    options = parser.parse_args()
    asked, rates = options.ways.split(","), [float(rate) for rate in options.rates.split(",")]
    way_rates = [float(rate) for rate in options.way_rates.split(",")] if options.way_rates else []
    if unknown := set(asked) - set(WAYS):
        parser.error(f"there is no way {', '.join(unknown)}, only {', '.join(WAYS)}")
    found: dict[str, dict[str, Any]] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())

    def measured(replicas: str, seed: str, job: Job) -> dict[str, float]:
        key = f"{job.name} at {job.rate:g}, {job.steps} steps of {job.ranks * job.sequences} sequences"
        runs = found.setdefault(replicas, {}).setdefault(key, {})
        if seed not in runs:
            size = options.width, options.depth
            runs[seed] = on_ranks(job.ranks, run, job, size, int(seed), timeout=7200)[0]
            runs[seed]["rate"] = job.rate
            print(f"{replicas} replicas, seed {seed}, {key}: {runs[seed]['loss']:.4f}", flush=True)
            save(options.json, found)
        kept: dict[str, float] = runs[seed]
        return kept

    def best(*runs: dict[str, float]) -> dict[str, float]:
        return min(runs, key=lambda each: each["loss"])

    def show(runs: dict[str, dict[str, dict[str, float]]], exact: dict[str, dict[str, float]]) -> None:
        head = ("way", "held-out loss, by seed", "rate", "gap", "apart", "MB per step", "seconds")
        print(table(head, *((name, *row(each, exact)) for name, each in runs.items())), flush=True)

    for replicas in options.replicas.split(","):
        shown: dict[str, dict[str, dict[str, float]]] = {name: {} for name in dict.fromkeys([SYNC, *asked])}
        n = int(replicas)
        synchronous = Job(SYNC, options.steps, 0.0, n, options.sequences // n)
        for seed in options.seeds.split(","):
            shown[SYNC][seed] = best(*(measured(replicas, seed, synchronous._replace(rate=rate)) for rate in rates))
            for name in shown:
                if name != SYNC:
                    jobs = [synchronous._replace(name=name, rate=r) for r in way_rates or [shown[SYNC][seed]["rate"]]]
                    shown[name][seed] = best(*(measured(replicas, seed, job) for job in jobs))
        print(f"\n{replicas} replicas, {options.steps} steps")
        show(shown, shown[SYNC])


if __name__ == "__main__":
    main()
