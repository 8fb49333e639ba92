"""What snapshots in memory cost: steps with and without ``Rescue``, interleaved, on four ranks of two nodes.

python -m bench.rescue                        links between the nodes unshaped, and of 1 Gbit/s
python -m bench.rescue --rounds 5 --every 10
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


class Round(NamedTuple):
    """Medians over a round's steps of one rank, and bytes that its node sent."""

    seconds: float
    cpu_seconds: float
    sent: int


def body(lab: Lab, every: int, rounds: int, windows: int) -> list[tuple[Round, Round]]:
    """Train rounds of ``every`` steps without and with a snapshot; return both of each round."""
    rank = dist.get_rank()
    os.environ[MEMORY] = str(FOLDER / f"node-{rank // 2}")
    torch.manual_seed(0)
    model = GPT()
    yafsdp_cc.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rescue = yafsdp_cc.Rescue(model, optimizer, every=every)
    rescue.restore()
    drawn = torch.Generator().manual_seed(rank)

    def train(is_rescued: bool, steps: int) -> Round:
        dist.barrier()
        sent = lab.traffic()[rank // 2].sent
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss_of(model, torch.randint(256, (windows, 257), generator=drawn)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_rescued:
                rescue.step()
        rescue._wait()
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        dist.barrier()
        return Round(wall / steps, cpu / steps, lab.traffic()[rank // 2].sent - sent)

    train(True, every + every // 2)  # so that later rounds begin their snapshots halfway, and steps follow it
    measured = [(train(False, every), train(True, every)) for _ in range(rounds)]
    rescue.close()
    return measured


def main() -> None:
    """Print a table of medians and of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--windows", type=int, default=4, help="sequences of a rank and step, of 256 bytes each")
    asked = parser.parse_args()
    print("| link | step, ms | with snapshots, ms | ratio | CPU ratio | bytes that a node sends for a snapshot |")
    print("|---|---|---|---|---|---|")
    for bandwidth in ("unshaped", "1gbit"):
        with Lab(4, bandwidth, ranks_per_machine=2) as lab:
            measured = lab.run(body, lab, asked.every, asked.rounds, asked.windows, timeout=1200)[0]
        shutil.rmtree(FOLDER, ignore_errors=True)
        without, rescued = ([pair[side] for pair in measured] for side in (0, 1))
        wall = statistics.median(b.seconds / a.seconds for a, b in measured)
        cpu = statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in measured)
        sent = statistics.median(b.sent - a.sent for a, b in measured)
        times = [1e3 * statistics.median(each.seconds for each in some) for some in (without, rescued)]
        print(f"| {bandwidth} | {times[0]:.0f} | {times[1]:.0f} | {wall:.3f} | {cpu:.3f} | {sent:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
