"""Suite ``replicas``: replicas of a model with slow links between them, synchronized in every way that the package has.

Each replica has a network namespace, which its ranks share: links within it are fast. A step is forward, backward and
AdamW on 1,024 tokens per rank. With ``device_time`` forward and backward also sleep in every block, as a processor
waits for an accelerator and can send meanwhile.

The bandwidth ``matched`` is that at which the exact sum over replicas, alone, takes as long as an unshaped step of the
first contestant. Contestants take turns in interleaved rounds, unshaped and at each bandwidth. Each turn begins with a
step, or a whole round of an outer loop, and ends with ``synchronize_replicas``, neither of which is measured: the
measured steps are those with the exchange of an earlier step under way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo  # the optimizers import it, before ranks are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from bench import train
from bench.common import cell, interleaved
from bench.contestants import REPLICAS
from bench.trainers import ADAM
from yafsdp_cc import replicas
from yafsdp_cc.table import table
from yafsdp_cc.tools.demo.model import GPT, VOCABULARY
from yafsdp_cc.tools.demo.train import loss_of
from yafsdp_cc.tools.netlab import Lab
from yafsdp_cc.tools.netlab.links import UNSHAPED, bits_per_second

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from bench.contestants import Contestant

MATCHED = "matched"
HEADS = 6


class Turn(NamedTuple):
    """Means over some steps of one contestant on one rank."""

    seconds: float
    sent: float
    """Bytes that the rank's machine has sent, by the counters of its interface."""


class Setup(NamedTuple):
    """Settings that all contestants of a run share."""

    shards: int = 1
    """Number of ranks of each replica."""
    width: int = 384
    """Width of the model."""
    device_time: float = 0.0
    """Seconds that forward and backward of a step sleep."""
    slowdown: float = 1.0
    """Time of a step of the last replica, as a multiple of the others'."""
    downlink: float = 1.0
    """Rate at which links receive, as a multiple of the rate at which they send."""

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in self._asdict().items())


class Trainer:
    """One contestant's part on one rank."""

    def __init__(self, contestant: Contestant, mesh: DeviceMesh, setup: Setup) -> None:
        torch.manual_seed(0)
        sync = None if contestant.maker == "synchronous" else getattr(replicas, contestant.maker)(**contestant.settings)
        model = GPT(setup.width, heads=HEADS)
        self.waits = setup.device_time
        """Seconds of a step that forward and backward sleep; two thirds of them in the backward."""
        self._blocks = len(model.blocks)
        for block in model.blocks:
            block.mlp.register_forward_hook(self._wait)  # type: ignore[union-attr]  # a ModuleList's are modules
        self.model = yafsdp_cc.shard(model, mesh=mesh, sync=sync)
        self.period = contestant.settings.get("every", 1)
        """Number of steps from one exchange to the next."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAM)
        self._draws = torch.Generator("cpu").manual_seed(dist.get_rank())

    def _wait(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        part = self.waits / (3 * self._blocks)
        time.sleep(part)
        output.register_hook(lambda _: time.sleep(2 * part))

    def step(self) -> None:
        size = (train.SEQUENCES, train.LENGTH + 1)
        loss_of(self.model, torch.randint(VOCABULARY, size, generator=self._draws, device="cpu")).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(
    names: Sequence[str],
    ranks: Sequence[int] = (2,),
    bandwidths: Sequence[str] = (MATCHED,),
    rounds: int = 3,
    steps: int = 8,
    delay_ms: float = 0.0,
    **setup: Any,
) -> dict[str, Any]:
    """Measure unshaped and at each bandwidth, and print; return figures by ranks, bandwidth and contestant.

    Args:
        setup: as ``Setup`` has it.

    Raises:
        ValueError: no such network or model is possible; nothing was started.
        Unavailable: this machine cannot have a network of its own.
    """
    chosen = Setup(**setup)
    if chosen.width % HEADS:
        raise ValueError(f"width={chosen.width}: the model has {HEADS} heads, write a multiple of {HEADS}")
    for bandwidth in bandwidths:
        if bandwidth != MATCHED:
            bits_per_second(bandwidth)
    for count in ranks:
        if count % chosen.shards or count // chosen.shards < 2:
            raise ValueError(f"ranks={count}, shards={chosen.shards}: two replicas or more of so many ranks each")
    if chosen.device_time < 0 or chosen.slowdown < 1 or chosen.downlink <= 0:
        raise ValueError(f"{chosen}: device_time is 0 or more, slowdown 1 or more, downlink positive")
    contestants = {name: REPLICAS[name] for name in names}
    shaped = tuple(dict.fromkeys((UNSHAPED, *bandwidths)))
    found: dict[str, Any] = {}
    for count in ranks:
        with Lab(count, delay_ms=delay_ms, ranks_per_machine=chosen.shards) as lab:
            per_rank = lab.run(_on_rank, lab, contestants, shaped, rounds, steps, chosen, timeout=train.TIMEOUT)
        rates = per_rank[0][0]
        figures: dict[str, Any] = {}
        print(f"\n{count // chosen.shards} replicas; {chosen}")
        for bandwidth in shaped:
            of_each = {name: [turns[bandwidth, name] for _, turns in per_rank] for name in contestants}
            figures[bandwidth] = {name: _summary(each, count) for name, each in of_each.items()}
            for name, each in figures[bandwidth].items():
                each["of_unshaped"] = figures[UNSHAPED][name]["seconds"] / each["seconds"]
            print(f"\n{bandwidth} ({rates[bandwidth]})\n{replicas_table(figures[bandwidth])}", flush=True)
        found[str(count)] = figures
    return found


def _on_rank(
    lab: Lab,
    contestants: Mapping[str, Contestant],
    bandwidths: Sequence[str],
    rounds: int,
    steps: int,
    setup: Setup,
) -> tuple[dict[str, str], dict[tuple[str, str], list[Turn]]]:
    """Return the rate of each bandwidth, and turns by bandwidth and contestant."""
    rank, world = dist.get_rank(), dist.get_world_size()
    machine, shape = rank // setup.shards, (world // setup.shards, setup.shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    trainers = {name: Trainer(contestant, mesh, setup) for name, contestant in contestants.items()}
    for trainer in trainers.values():
        trainer.step()
    length = _seconds(next(iter(trainers.values())).step, 3)
    if machine == shape[0] - 1:
        for trainer in trainers.values():
            trainer.waits += length * (setup.slowdown - 1)

    def shape_links(rate: str) -> None:
        bits = bits_per_second(rate)
        receive = UNSHAPED if rate == UNSHAPED else f"{bits * setup.downlink / 1e3:.0f}kbit"
        train.set_bandwidth_together(lab, rate, receive)

    def matched() -> str:
        """Return the rate at which the exact sum over replicas takes ``length`` seconds."""
        elements = sum(each.numel() for each in GPT(setup.width, heads=HEADS).parameters())
        buffer, bits = torch.zeros(elements // setup.shards, device="cpu"), 32 * elements / length
        for _ in range(2):  # the first turn only estimates
            shape_links(f"{bits / 1e3:.0f}kbit")
            bits *= _seconds(lambda: dist.all_reduce(buffer, group=mesh["replicate"].get_group()), 1) / length
        return f"{bits / 1e3:.0f}kbit"

    rates = {bandwidth: matched() if bandwidth == MATCHED else bandwidth for bandwidth in bandwidths}
    if rank == 0:
        print(f"a step takes {length:.3f} s; {rates}", file=sys.stderr, flush=True)

    def turn(name: str) -> Turn:
        trainer = trainers[name]
        for _ in range(trainer.period):
            trainer.step()
        before, start = lab.traffic()[machine], time.perf_counter()
        count = -(-steps // trainer.period) * trainer.period
        for _ in range(count):
            trainer.step()
        seconds, sent = time.perf_counter() - start, lab.traffic()[machine].since(before).sent
        yafsdp_cc.synchronize_replicas(trainer.model)
        return Turn(seconds / count, sent / count)

    turns: dict[tuple[str, str], list[Turn]] = {(each, name): [] for name in contestants for each in bandwidths}
    for number, (bandwidth, name) in interleaved(turns, rounds):
        shape_links(rates[bandwidth])
        turns[bandwidth, name].append(turn(name))
        if rank == 0:
            seconds = turns[bandwidth, name][-1].seconds
            print(f"{bandwidth} {number}/{rounds} {name}: {seconds:.3f} s/step", file=sys.stderr, flush=True)
    return rates, turns


def _seconds(action: Callable[[], object], times: int) -> float:
    """Return the mean seconds of an action over ranks and repetitions. A collective."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        action()
    mean_seconds = (time.perf_counter() - start) / times / dist.get_world_size()
    seconds = torch.tensor(mean_seconds, dtype=torch.float64, device="cpu")
    dist.all_reduce(seconds)
    return seconds.item()


def _summary(by_rank: list[list[Turn]], ranks: int) -> dict[str, Any]:
    """Return one contestant's figures; the time of a step is the mean over replicas."""
    rounds = [mean(turn.seconds for turn in turns) for turns in zip(*by_rank, strict=True)]
    return {
        "seconds": median(rounds),
        "rounds": rounds,
        "tokens_per_s": sum(train.SEQUENCES * train.LENGTH / median(t.seconds for t in turns) for turns in by_rank),
        "sent_bytes": mean(turn.sent for turns in by_rank for turn in turns),
        "ranks": ranks,
    }


def replicas_table(figures: Mapping[str, Any]) -> str:
    """Return a row for each contestant at one bandwidth; bytes are per replica."""
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
