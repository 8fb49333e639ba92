"""Peak memory of giving a sharded model its weights, beside what the caller holds: shards and a part of one block.

    python bench/loading.py                        # a minute on two cores

A model of equal blocks, one matrix each, is filled on gloo ranks of one thread, each way in ranks of its own. *Peak* is
resident memory by the kernel's count (VmHWM) above that before the call, with glibc returning what is freed, of the
rank that needs most; *rank N* is what is left of it without that rank's shards, in blocks. State dicts that the caller
passes are there before, and so are not counted: full tensors on the first rank, or rows of every matrix on each. Where
rows are passed, the model takes their place: shards are no more memory than they were. ``shard`` makes gradient shards,
too, which are left out as well.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

import yafsdp_cc
from bench.common import about, names, save
from tests.ranks import on_ranks
from yafsdp_cc.table import table

MIB = 1 << 20


def on_meta(blocks: int, width: int) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(blocks)])
    for block in model:
        yafsdp_cc.fully_shard(block)
    return yafsdp_cc.fully_shard(model)


def by_assignment(blocks: int, width: int, _: str) -> tuple[Callable[[], Any], float]:
    model = on_meta(blocks, width)
    state = {
        name: nn.Parameter(distribute_tensor(torch.ones(width, width), like.device_mesh, like.placements))
        for name, like in model.state_dict().items()
    }
    return lambda: model.load_state_dict(state, assign=True), 0.0


def by_broadcast(blocks: int, width: int, _: str) -> tuple[Callable[[], Any], float]:
    model, full = on_meta(blocks, width), {}
    if dist.get_rank() == 0:
        full = {f"{block}.weight": torch.ones(width, width) for block in range(blocks)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return lambda: set_model_state_dict(model, full, options=options), 1.0


def from_full(blocks: int, width: int, _: str) -> tuple[Callable[[], Any], float]:
    model = on_meta(blocks, width)
    full = {f"{block}.weight": torch.ones(width, width) for block in range(blocks)}
    return lambda: model.load_state_dict(full, assign=True), 1.0


def by_initialisation(blocks: int, width: int, _: str) -> tuple[Callable[[], Any], float]:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(blocks)])

    return lambda: yafsdp_cc.shard(model, units=["*"], param_init_fn=lambda module: module.reset_parameters()), 2.0


def from_checkpoint(blocks: int, width: int, folder: str) -> tuple[Callable[[], Any], float]:
    dcp.save(filled(blocks, width).state_dict(), checkpoint_id=folder)
    model = on_meta(blocks, width)
    model.to_empty(device="cpu")  # not resident before it is written to
    state = model.state_dict()
    return lambda: (dcp.load(state, checkpoint_id=folder), model), 1.0


def filled(blocks: int, width: int) -> Any:
    model = on_meta(blocks, width)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model(torch.zeros(1, width))
    return model


WAYS: dict[str, Callable[[int, int, str], tuple[Callable[[], Any], float]]] = {
    "load_state_dict(assign=True) of rows": by_assignment,
    "load_state_dict(assign=True) of full tensors": from_full,
    "set_model_state_dict(broadcast_from_rank0)": by_broadcast,
    "shard(param_init_fn)": by_initialisation,
    "dcp.load": from_checkpoint,
}


def measured(way: str, blocks: int, width: int, folder: str) -> tuple[int, float]:
    """Return bytes at the peak, and how many of the shards' bytes are new."""
    ctypes.CDLL(None).mallopt(-3, MIB)  # tensors come from the kernel and return to it at once
    run, new = WAYS[way](blocks, width, folder)
    with peak() as found:
        run()
    return found[0], new


@contextmanager
def peak() -> Iterator[list[int]]:
    gc.collect()
    dist.barrier()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, found = _status("VmRSS"), [0]
    yield found
    found[0] = _status("VmHWM") - before


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=names, default=["2", "4"], metavar="N,M")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048, help="of the square matrices, in fp32")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    block = 4 * options.width**2
    results: dict[str, Any] = {"about": about(["python", "bench/loading.py", *sys.argv[1:]]), "figures": []}
    for world in map(int, options.ranks):
        rows = []
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                found = on_ranks(world, measured, way, options.blocks, options.width, f"{folder}/weights")
            shards = options.blocks * block / world
            beside = [(most - new * shards) / block for most, new in found]
            results["figures"].append({"ranks": world, "way": way, "peak": [most for most, _ in found]})
            rows.append([way, f"{max(most for most, _ in found) / MIB:.0f}", *(f"{each:.2f}" for each in beside)])
            save(options.json, results)
        head = [f"{world} ranks, blocks of {block / MIB:.0f} MiB", "peak, MiB"]
        print(table([*head, *(f"rank {rank}" for rank in range(world))], *rows), "\n", flush=True)


if __name__ == "__main__":
    main()
