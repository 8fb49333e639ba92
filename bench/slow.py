"""Training over a slow network: tokens per second and bytes of every contestant, in one run.

    python bench/slow.py                                              # two ranks, 100 Mbit/s, about six minutes
    python bench/slow.py --ranks 4 --bandwidth 100mbit,1gbit

The demo's model (10 M parameters, bf16 forwards unless said otherwise) trains with AdamW on 1,024 tokens of random
bytes per rank and step, each rank in a network namespace of its own. Contestants take turns, round by round, at each
bandwidth; a step's time is the median over rounds. Bytes are the interfaces' own counts, headers included, a step's
mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo  # by the optimizers, before the fork
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import yafsdp_cc
import yafsdp_cc.api
import yafsdp_cc.wire.native
from yafsdp_cc import Compression
from yafsdp_cc.demo.model import GPT, VOCABULARY
from yafsdp_cc.netlab import Lab

if TYPE_CHECKING:
    from collections.abc import Callable

SEQUENCES, LENGTH = 8, 128
TOKENS = SEQUENCES * LENGTH
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def fsdp2(policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> nn.Module:  # noqa: B008
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def ddp(hook: Callable[..., Any] | None = None, state: object = None) -> nn.Module:
    model = nn.parallel.DistributedDataParallel(GPT())
    if hook is not None:
        model.register_comm_hook(state, hook)
    return model


def ours(compression: Compression | str | None, **more: Any) -> nn.Module:
    return yafsdp_cc.shard(GPT(), mp_policy=BF16, compression=compression, **more)


def adapted() -> nn.Module:
    model = fsdp2(BF16)
    yafsdp_cc.compress(model, Compression(gradients="int8", weights="int8"))
    return model


CONTESTANTS: dict[str, Callable[[], nn.Module]] = {
    "fsdp2 fp32": fsdp2,
    "fsdp2 bf16": lambda: fsdp2(BF16),
    "fsdp2 bf16 + compress int8/int8": adapted,
    "ddp fp32": ddp,
    "ddp fp16 hook": lambda: ddp(fp16_compress_hook),
    "ours exact bf16": lambda: ours(None),
    "ours int8 / int8 weights": lambda: ours(Compression(gradients="int8", weights="int8")),
    "ours onebit / int8 weights": lambda: ours(Compression(gradients="onebit", weights="int8")),
    "ours onebit / int8 kept": lambda: ours(Compression(gradients="onebit", weights="int8"), zero_stage=2),
}
REFERENCE = "fsdp2 bf16"


class Run:
    """One contestant, trained a few steps at a time."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = CONTESTANTS[name]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.draws = torch.Generator().manual_seed(dist.get_rank())

    def steps(self, count: int, lab: Lab) -> tuple[float, float]:
        """Seconds and bytes sent per step."""
        dist.barrier()
        before, start = lab.traffic()[dist.get_rank()], time.perf_counter()
        for _ in range(count):
            tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=self.draws)
            logits = self.model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        seconds = time.perf_counter() - start
        return seconds / count, lab.traffic()[dist.get_rank()].since(before).sent / count


def measure(lab: Lab, names: list[str], bandwidths: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """On every rank; the figures of this one."""
    torch.set_num_threads(1)
    runs = {name: Run(name) for name in names}
    for run in runs.values():
        run.steps(1, lab)
    found: dict[str, Any] = {}
    for bandwidth in bandwidths:
        if dist.get_rank() == 0:
            lab.set_bandwidth(bandwidth)
        dist.barrier()
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, run in runs.items():
                figures[name].append(run.steps(steps, lab))
        found[bandwidth] = {
            name: {
                "seconds": statistics.median(seconds for seconds, _ in each),
                "bytes": statistics.mean(sent for _, sent in each),
            }
            for name, each in figures.items()
        }
    return found


def table(bandwidth: str, ranks: int, figures: dict[str, Any]) -> str:
    reference = figures.get(REFERENCE)
    lines = [
        f"{ranks} ranks at {bandwidth}",
        "| | s / step | tokens / s | against fsdp2 bf16 | MB sent / step | bytes ratio |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for name, each in figures.items():
        faster = reference["seconds"] / each["seconds"] if reference else float("nan")
        fewer = reference["bytes"] / each["bytes"] if reference else float("nan")
        lines.append(
            f"| {name} | {each['seconds']:.3f} | {ranks * TOKENS / each['seconds']:,.0f} | {faster:.2f} x "
            f"| {each['bytes'] / 1e6:.2f} | {fewer:.2f} x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bandwidth", default="100mbit", help="one or several, with commas; unshaped for none")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="some of: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of each contestant in each round")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    names, bandwidths = asked.contestants.split(","), asked.bandwidth.split(",")
    with Lab(ranks=asked.ranks) as lab:
        figures = lab.run(measure, lab, names, bandwidths, asked.rounds, asked.steps, timeout=3600)[0]
    for bandwidth, each in figures.items():
        print(table(bandwidth, asked.ranks, each), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"ranks": asked.ranks, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
