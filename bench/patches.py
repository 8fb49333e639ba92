"""What ``weight_patch`` costs beside a training step, in processor time, bytes and memory.

    python bench/patches.py                        # ten minutes on two cores

A GPT of ~10 M parameters (`bench.models`), batches of 8 x 256 tokens, AdamW at 3e-6, on gloo ranks of one thread each.
Steps with and without a patch after them take turns. *CPU* is the processor time of all threads of a rank in
milliseconds, averaged over ranks, the median over rounds: of a step, of the patch alone, and their ratio, *of a step*.
*Slower* is the median of the ratios of neighbouring steps with and without a patch, the machine's noise included.
*Changed* is the share of weights that a patch holds, *bytes* what it takes per changed weight. *Kept* is the memory
that the first patch leaves behind, and *peak* what a later one takes on top, by the bytes that malloc has handed out,
both in bytes per element of this rank's shards.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import yafsdp_cc
from bench.common import about, interleaved, names, save
from bench.memory import _live, _peak
from bench.models import SPECS
from tests.ranks import on_ranks
from yafsdp_cc.table import table

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
PLAIN, PATCHED = "step", "step and patch"
WARM_UP = 2


def measured(dtype: torch.dtype, rounds: int, tiny: bool) -> dict[str, Any]:
    """Return what this rank has measured."""
    spec = SPECS["tiny"] if tiny else replace(SPECS["block"], length=256)
    model = yafsdp_cc.shard(spec.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    elements = sum(parameter.to_local().numel() for parameter in model.parameters())
    batch = spec.batch(dist.get_rank())

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    before = _live()
    yafsdp_cc.weight_patch(model, dtype=dtype)
    gc.collect()
    kept = _live() - before
    step()
    gc.collect()
    before = _live()
    with _peak() as seen:
        patch = yafsdp_cc.weight_patch(model, dtype=dtype)
    figures: dict[str, Any] = {"kept": kept / elements, "peak": (max(seen) - before) / elements}
    taken: dict[str, list[float]] = {PLAIN: [], PATCHED: []}
    alone: list[float] = []
    changed, size = 0, 0
    for number, what in interleaved(taken, rounds + WARM_UP):
        dist.barrier()
        start = time.process_time()
        step()
        if what == PATCHED:
            patching = time.process_time()
            patch = yafsdp_cc.weight_patch(model, dtype=dtype)
            alone.append(1e3 * (time.process_time() - patching))
            changed += int(patch.metadata["total_changed_elements"])
            size += sum(tensor.nbytes for tensor in patch.tensors.values())
        if number > WARM_UP:
            taken[what].append(1e3 * (time.process_time() - start))
    slower = median(own / other for own, other in zip(taken[PATCHED], taken[PLAIN], strict=True)) - 1
    cpu = {"step": median(taken[PLAIN]), "patch": median(alone)}
    return (
        figures
        | cpu
        | {
            "slower": slower,
            "changed": changed / (rounds + WARM_UP) / elements,
            "bytes": size / max(changed, 1),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=names, default=["2", "4"], metavar="N,M")
    parser.add_argument("--dtypes", type=names, default=list(DTYPES), metavar="NAME,NAME")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="to see the bench itself run")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    results: dict[str, Any] = {"about": about(["python", "bench/patches.py", *sys.argv[1:]]), "figures": []}
    rows = [["ranks, dtype", "step, CPU ms", "patch", "of a step", "slower", "changed", "bytes", "kept", "peak"]]
    for world in map(int, options.ranks):
        for dtype in options.dtypes:
            ranks = on_ranks(world, measured, DTYPES[dtype], options.rounds, options.tiny, timeout=3600.0)
            mean = {name: sum(rank[name] for rank in ranks) / world for name in ranks[0]}
            results["figures"].append({"ranks": world, "dtype": dtype, **mean})
            save(options.json, results)
            shares = [f"{each:.2%}" for each in (mean["patch"] / mean["step"], mean["slower"], mean["changed"])]
            sizes = [f"{mean[name]:.2f}" for name in ("bytes", "kept", "peak")]
            rows.append([f"{world}, {dtype}", f"{mean['step']:.0f}", f"{mean['patch']:.1f}", *shares, *sizes])
            print(table(rows[0], rows[-1]), "\n", flush=True)


if __name__ == "__main__":
    main()
