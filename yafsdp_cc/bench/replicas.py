"""Suite ``replicas``: replicas of a model whose links to each other are slow, synchronized in all ways that there are.

Each replica has a network namespace, which its ranks share: links within it are fast. A step is forward, backward and
AdamW on 1,024 tokens per rank. The bandwidth ``matched`` is that at which the exact sum over replicas takes as long as
an unshaped step of synchronous training. Contestants take turns in interleaved rounds. Each turn begins with a step, or
a whole round of an outer loop, and ends with ``synchronize_replicas``, neither of which is measured: what counts is
training as it goes on, with the exchange of an earlier step under way.
"""

from __future__ import annotations

import sys
import time
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo  # by the optimizers, before ranks are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from yafsdp_cc import replicas
from yafsdp_cc.bench import train
from yafsdp_cc.bench.common import cell, interleaved, table
from yafsdp_cc.bench.contestants import REPLICAS
from yafsdp_cc.bench.trainers import ADAM
from yafsdp_cc.demo.model import GPT, VOCABULARY
from yafsdp_cc.demo.train import loss_of
from yafsdp_cc.netlab import Lab
from yafsdp_cc.netlab.links import UNSHAPED, bits_per_second

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yafsdp_cc.bench.contestants import Contestant

MATCHED = "matched"


class Turn(NamedTuple):
    """Some steps of one contestant on one rank, each on average."""

    seconds: float
    sent: float
    """Bytes that the rank's machine has sent, by the counters of its interface."""


class Trainer:
    """A rank's part of one contestant."""

    def __init__(self, contestant: Contestant, shards: int) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
        sync = None if contestant.maker == "synchronous" else getattr(replicas, contestant.maker)(**contestant.settings)
        self.model = yafsdp_cc.shard(GPT(), mesh=mesh, sync=sync)
        self.period = contestant.settings.get("every", 1)
        """Steps from one exchange to the next."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAM)
        self._draws = torch.Generator("cpu").manual_seed(dist.get_rank())

    def step(self, slowdown: float) -> None:
        """Make a step that computes ``slowdown`` times as long as it takes."""
        size = (train.SEQUENCES, train.LENGTH + 1)
        start = time.perf_counter()
        loss_of(self.model, torch.randint(VOCABULARY, size, generator=self._draws, device="cpu")).backward()
        time.sleep((slowdown - 1) * (time.perf_counter() - start))
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(
    names: Sequence[str],
    ranks: Sequence[int] = (2,),
    bandwidths: Sequence[str] = (MATCHED,),
    rounds: int = 3,
    steps: int = 8,
    delay_ms: float = 0.0,
    shards: int = 1,
    slowdown: float = 1.0,
) -> dict[str, Any]:
    """Measure unshaped and then at each bandwidth, and print; return figures by ranks, bandwidth and contestant.

    Args:
        shards: ranks of each replica.
        slowdown: how many times as long the last replica computes as the others.

    Raises:
        ValueError: there is no such network; nothing was started.
        Unavailable: this machine cannot have a network of its own.
    """
    for bandwidth in bandwidths:
        if bandwidth != MATCHED:
            bits_per_second(bandwidth)
    for count in ranks:
        if count % shards or count // shards < 2:
            raise ValueError(f"ranks={count}, shards={shards}: two replicas or more of so many ranks each")
    contestants = {name: REPLICAS[name] for name in names}
    found: dict[str, Any] = {}
    for count in ranks:
        with Lab(count, delay_ms=delay_ms, ranks_per_machine=shards) as lab:
            figures: dict[str, Any] = {}
            for bandwidth in dict.fromkeys((UNSHAPED, *bandwidths)):
                rate = _matched(figures[UNSHAPED], shards) if bandwidth == MATCHED else bandwidth
                lab.set_bandwidth(rate)
                per_rank = lab.run(
                    _on_rank, lab, contestants, bandwidth, rounds, steps, shards, slowdown, timeout=train.TIMEOUT
                )
                of_each = {name: [turns[name] for turns in per_rank] for name in contestants}
                figures[bandwidth] = {name: _summary(each, count) for name, each in of_each.items()}
                for name, each in figures[bandwidth].items():
                    each["of_unshaped"] = figures[UNSHAPED][name]["seconds"] / each["seconds"]
                slow = f", the last {slowdown:g} times as slow" if slowdown != 1 else ""
                print(f"\n{count // shards} replicas of {shards} ranks at {bandwidth} ({rate}){slow}")
                print(replicas_table(figures[bandwidth]), flush=True)
        found[str(count)] = figures
    return found


def _matched(unshaped: Mapping[str, Any], shards: int) -> str:
    """Return the rate at which a replica's exact sum with one other takes as long as an unshaped step."""
    elements = sum(parameter.numel() for parameter in GPT().parameters())
    first = next(iter(unshaped.values()))
    return f"{8 * 4 * elements / first['seconds'] / 1e6:.1f}mbit"


def _on_rank(
    lab: Lab,
    contestants: Mapping[str, Contestant],
    bandwidth: str,
    rounds: int,
    steps: int,
    shards: int,
    slowdown: float,
) -> dict[str, list[Turn]]:
    rank, last = dist.get_rank(), dist.get_world_size() - shards
    trainers = {name: Trainer(contestant, shards) for name, contestant in contestants.items()}
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}

    def turn(name: str) -> Turn:
        trainer, slow = trainers[name], slowdown if rank >= last else 1.0
        for _ in range(trainer.period):
            trainer.step(slow)
        before, start = lab.traffic()[rank // shards], time.perf_counter()
        count = -(-steps // trainer.period) * trainer.period
        for _ in range(count):
            trainer.step(slow)
        seconds, sent = time.perf_counter() - start, lab.traffic()[rank // shards].since(before).sent
        yafsdp_cc.synchronize_replicas(trainer.model)
        dist.barrier()
        return Turn(seconds / count, sent / count)

    for trainer in trainers.values():
        trainer.step(1.0)
    for number, name in interleaved(contestants, rounds):
        turns[name].append(turn(name))
        if rank == 0:
            print(f"{bandwidth} {number}/{rounds} {name}: {turns[name][-1].seconds:.3f} s/step", file=sys.stderr)
    return turns


def _summary(by_rank: list[list[Turn]], ranks: int) -> dict[str, Any]:
    """Return one contestant's figures; a step of a round is as long as that of the replicas on average."""
    rounds = [mean(turn.seconds for turn in turns) for turns in zip(*by_rank, strict=True)]
    return {
        "seconds": median(rounds),
        "rounds": rounds,
        "tokens_per_s": sum(train.SEQUENCES * train.LENGTH / median(t.seconds for t in turns) for turns in by_rank),
        "sent_bytes": mean(turn.sent for turns in by_rank for turn in turns),
        "ranks": ranks,
    }


def replicas_table(figures: Mapping[str, Any]) -> str:
    """Return a row for each contestant at one bandwidth; bytes are of a replica."""
    return table(
        ("", "s/step", "tokens/s", "of its unshaped", "MB sent"),
        *(
            (
                name,
                f"{each['seconds']:.3f}",
                f"{each['tokens_per_s']:,.0f}",
                cell(each["of_unshaped"], ".2f"),
                f"{each['sent_bytes'] / 1e6:.3f}",
            )
            for name, each in figures.items()
        ),
    )
