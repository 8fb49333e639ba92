"""Steps of Muon on whole matrices beside those of ``torch.optim.Muon`` on FSDP2, and what they send and compute.

    python bench/muon.py                                               # ten minutes on two cores
    python bench/muon.py --ranks 2 --bandwidth 1gbit --rounds 3
    python bench/muon.py --ranks 4 --bytes                             # with fewer matrices in a block than ranks

One GPT in fp32 (`bench.models`), 2 and 4 gloo ranks of one thread each, joined by links of a rate that `netlab` makes.
All contestants live in the same ranks and take turns round by round; none drops weights after the forward. A step is
forward, backward, `clip_grad_norm_` and `optimizer.step()`, between two barriers. *Step* is the median over rounds in
milliseconds of wall time, *of FSDP2* that of the ratio to FSDP2's step in the same round, and *CPU* the processor time
of all threads of a rank, averaged over ranks. *Sent* is what the ranks' interfaces have sent in a step, headers
included, per rank. *Newton-Schulz* is how much of the operations of all iterations the rank with the most of them
makes.

With ``--bytes``, blocks of two matrices in fp32 and nothing else, sharded by ZeRO-2 and ZeRO-3, for AdamW and for Muon:
bytes that a rank's interface sends in a step, and those that the model's counters have, both per parameter and averaged
over ranks; and collectives in ``optimizer.step()``. In ZeRO-3 the matrices are assembled where there are more ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from bench.common import about, interleaved, names, save, times
from bench.models import GPT, SPECS, Block, Spec
from bench.trainers import shard_by_fsdp2
from yafsdp_cc import Compression
from yafsdp_cc.optim import Muon
from yafsdp_cc.table import table
from yafsdp_cc.tools.netlab import Lab

FSDP2, ADAMW = "FSDP2, torch.optim.Muon", "yafsdp_cc, AdamW"
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
INT4 = Compression("int4", weights="int4")
EF21 = Compression("int4", weights="int4", feedback="ef21", residual="fp32")
WARM_UP = 2

Step = tuple[nn.Module, "Sequence[torch.optim.Optimizer]"]


def by_fsdp2(model: GPT) -> Step:
    shard_by_fsdp2(model, MixedPrecisionPolicy(), reshard_after_forward=False)
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if name.startswith("blocks.") and each.ndim == 2]
    others = [each for name, each in named.items() if not (name.startswith("blocks.") and each.ndim == 2)]
    return model, [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAM)]


def by_us(model: GPT, dtype: torch.dtype | None, compression: Compression | None = None) -> Step:
    ownership = "flat" if dtype is None else "matrix"
    sharded = yafsdp_cc.shard(model, units=[Block], zero_stage=2, ownership=ownership, compression=compression)
    if dtype is None:
        return sharded, [torch.optim.AdamW(sharded.parameters(), **ADAM)]
    return sharded, [Muon(sharded.parameters(), **MUON, adamw=ADAM, ns_dtype=dtype)]


CONTESTANTS: dict[str, Callable[[GPT], Step]] = {
    FSDP2: by_fsdp2,
    ADAMW: lambda model: by_us(model, None),
    "yafsdp_cc, Muon, ns_dtype=bf16": lambda model: by_us(model, torch.bfloat16),
    "yafsdp_cc, Muon, ns_dtype=fp32": lambda model: by_us(model, torch.float32),
    "yafsdp_cc, Muon, int4 both ways": lambda model: by_us(model, torch.float32, INT4),
    "yafsdp_cc, Muon, int4, EF21": lambda model: by_us(model, torch.float32, EF21),
}


def race(spec: Spec, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Return on each rank what each contestant's rounds took: seconds of wall and processor time, and bytes."""
    torch.set_num_threads(1)
    batch = spec.batch(dist.get_rank())
    made = {name: make(spec.build()) for name, make in CONTESTANTS.items()}
    found: dict[str, dict[str, Any]] = {name: {"wall": [], "cpu": [], "sent": []} for name in made}
    for number, name in interleaved(made, rounds + WARM_UP):
        model, optimizers = made[name]
        dist.barrier()
        start, cpu, sent = time.perf_counter(), time.process_time(), _interface_bytes()
        for _ in range(steps):
            model(*batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        dist.barrier()
        if number > WARM_UP:
            found[name]["wall"].append((time.perf_counter() - start) / steps)
            found[name]["cpu"].append((time.process_time() - cpu) / steps)
            found[name]["sent"].append((_interface_bytes() - sent) / steps)
    for name, (model, _) in made.items():
        if name != FSDP2 and (owners := yafsdp_cc.plan_of(model).owners):
            work = [each.newton_schulz_flops for each in owners]
            found[name]["share"] = max(work) / sum(work)
    return found


def traffic(width: int, steps: int) -> dict[str, tuple[float, float, int]]:
    """Return on each rank bytes of the interface and of the counters per step, and exchanges of the optimizer."""
    found: dict[str, tuple[float, float, int]] = {}
    batch = torch.randn(4, width)
    for stage in (2, 3):
        for name in ("AdamW", "Muon"):
            model: Any = nn.Sequential(*(Perceptron(width) for _ in range(6)))
            zero: Any = stage
            yafsdp_cc.shard(model, zero_stage=zero, ownership="matrix" if name == "Muon" else "flat")
            make = Muon if name == "Muon" else torch.optim.AdamW
            optimizer = make(model.parameters(), lr=1e-3)
            numel, counters = sum(each.numel() for each in model.parameters()), yafsdp_cc.counters_of(model)
            for step in range(steps + 1):
                if step == 1:  # the first one also probes links
                    dist.barrier()
                    before = _interface_bytes(), counters.gathered_bytes + counters.reduced_bytes
                model(batch).square().mean().backward()
                with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanges:
                    optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
            after = _interface_bytes(), counters.gathered_bytes + counters.reduced_bytes
            sent = [(end - start) / steps / numel for start, end in zip(before, after, strict=True)]
            found[f"ZeRO-{stage}, {name}"] = sent[0], sent[1], exchanges.call_count
    return found


class Perceptron(nn.Module):
    """Two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def _interface_bytes() -> int:
    """Return the bytes that the interfaces of this network namespace have sent, the loopback left out."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


def figures(ranks: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return medians over rounds of what the ranks have measured."""
    baseline = ranks[0][FSDP2]["wall"]
    return [
        {
            "what": name,
            "step_ms": 1e3 * median(ranks[0][name]["wall"]),
            "of_fsdp2": median(own / other for own, other in zip(ranks[0][name]["wall"], baseline, strict=True)),
            "cpu_ms": 1e3 * sum(median(rank[name]["cpu"]) for rank in ranks) / len(ranks),
            "sent": sum(median(rank[name]["sent"]) for rank in ranks) / len(ranks),
            "share": ranks[0][name].get("share"),
        }
        for name in CONTESTANTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SPECS, default="block")
    parser.add_argument("--ranks", type=names, default=["2", "4"], metavar="N,M")
    parser.add_argument("--bandwidth", type=names, default=["unshaped", "1gbit"], metavar="RATE,RATE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="of each contestant in each round")
    parser.add_argument("--bytes", action="store_true", help="what steps send, by stage, and nothing else")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    for world in map(int, options.ranks) if options.bytes else ():
        with Lab(world, "unshaped") as lab:
            sent = lab.run(traffic, 256, 3, timeout=600.0)
        rows = [
            [name, *(f"{sum(rank[name][kind] for rank in sent) / world:.2f}" for kind in (0, 1)), str(exchanges)]
            for name, (*_, exchanges) in sent[0].items()
        ]
        print(table([f"{world} ranks", "bytes sent, per parameter", "counted", "exchanges of the optimizer"], *rows))
    if options.bytes:
        return
    results: dict[str, Any] = {"about": about(["python", "bench/muon.py", *sys.argv[1:]]), "figures": []}
    for bandwidth in options.bandwidth:
        for world in map(int, options.ranks):
            with Lab(world, bandwidth) as lab:
                found = figures(lab.run(race, SPECS[options.model], options.rounds, options.steps, timeout=3600.0))
            results["figures"] += [{"ranks": world, "bandwidth": bandwidth, **each} for each in found]
            save(options.json, results)
            rows = [
                [
                    str(each["what"]),
                    f"{each['step_ms']:.0f}",
                    times(each["of_fsdp2"]),
                    f"{each['cpu_ms']:.0f}",
                    f"{each['sent'] / 1e6:.1f}",
                    "-" if each["share"] is None else f"{each['share']:.2f}",
                ]
                for each in found
            ]
            head = [f"{world} ranks, {bandwidth}", "step, ms", "of FSDP2", "CPU, ms", "sent, MB", "Newton-Schulz"]
            print(table(head, *rows), "\n", flush=True)


if __name__ == "__main__":
    main()
