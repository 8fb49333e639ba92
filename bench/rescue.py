"""What snapshots in memory cost: steps with and without ``Rescue``, interleaved, on four ranks of two nodes.

python -m bench.rescue                        links between the nodes unshaped, and of 1 Gbit/s
python -m bench.rescue --pairs 20 --every 10

A pair is four steps without a snapshot and four with one. The cost is the median difference of a pair, in relation to
``every`` steps: seconds, and CPU seconds of all ranks together, as steps on a shared machine differ by more than that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import yafsdp_cc
from yafsdp_cc.rescue.memory import MEMORY
from yafsdp_cc.tools.demo.model import GPT
from yafsdp_cc.tools.demo.train import loss_of
from yafsdp_cc.tools.netlab import Lab

FOLDER = Path("/dev/shm/yafsdp_cc-bench")
STEPS = 4


class Round(NamedTuple):
    """Seconds of a round of ``STEPS`` steps, CPU seconds of all ranks, and bytes that a node sent."""

    seconds: float
    cpu_seconds: float
    sent: int


def body(lab: Lab, pairs: int, windows: int) -> list[tuple[Round, Round]]:
    """Train rounds of ``STEPS`` steps without and with a snapshot; return both of each pair."""
    rank = dist.get_rank()
    os.environ[MEMORY] = str(FOLDER / f"node-{rank // 2}")
    torch.manual_seed(0)
    model = GPT()
    yafsdp_cc.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rescue = yafsdp_cc.Rescue(model, optimizer, every=2 * STEPS)
    rescue.restore()
    drawn = torch.Generator().manual_seed(rank)

    def train(is_rescued: bool) -> Round:
        dist.barrier()
        sent = lab.traffic()[rank // 2].sent
        begin, cpu = time.perf_counter(), time.process_time()
        rescue._next = rescue._steps + 1  # a snapshot behind the first step, with the others of the round for its copy
        for _ in range(STEPS):
            loss_of(model, torch.randint(256, (windows, 257), generator=drawn)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_rescued:
                rescue.step()
        rescue._wait()
        used = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu])
        dist.all_reduce(used)
        return Round(used[0].item() / dist.get_world_size(), used[1].item(), lab.traffic()[rank // 2].sent - sent)

    train(True), train(True)  # the first snapshots make what later ones write over
    measured = [(train(False), train(True)) for _ in range(pairs)]
    rescue.close()
    return measured


def main() -> None:
    """Print a table of medians, with the quartiles of what a snapshot costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--windows", type=int, default=4, help="sequences of a rank and step, of 256 bytes each")
    asked = parser.parse_args()
    print(
        f"| link | step, s | a snapshot, % of {asked.every} steps | CPU of a step, s | a snapshot, % | a node sends |"
    )
    print("|---|---|---|---|---|---|")
    for bandwidth in ("unshaped", "1gbit"):
        with Lab(4, bandwidth, ranks_per_machine=2) as lab:
            measured = lab.run(body, lab, asked.pairs, asked.windows, timeout=1800)[0]
        shutil.rmtree(FOLDER, ignore_errors=True)
        told = [bandwidth]
        for field in ("seconds", "cpu_seconds"):
            without = statistics.median(getattr(plain, field) for plain, _ in measured) / STEPS
            costs = [getattr(rescued, field) - getattr(plain, field) for plain, rescued in measured]
            low, middle, high = (100 * each / without / asked.every for each in statistics.quantiles(costs, n=4))
            told += [f"{without:.3f}", f"{middle:.1f} ({low:.1f} to {high:.1f})"]
        sent = statistics.median(rescued.sent - plain.sent for plain, rescued in measured)
        print(f"| {' | '.join(told)} | {sent:,.0f} bytes |", flush=True)


if __name__ == "__main__":
    main()
