"""What one training step launches per parameter group, counted without a GPU and without memory (``kernel_counts``).

    python bench/launches.py                              # Llama-3 8B and 70B on 8, 64, 256 and 1,024 ranks
    python bench/launches.py --shapes 8b --worlds 8 64

*Block* is what another transformer block adds to a step (forward and backward in bf16, nothing recomputed), *rest* what
the root's group and the end of the backward cost, less the all-gathers that the last blocks of the forward are spared.
Kernels and copies are counted as torch enqueues them on CUDA (``kernel_counts.kernels_of``); those of the same model
without an engine are subtracted. *Check*: kernels of the codec fallback's check of a block, in one of ten steps at
most. The exit status is 1 where a count is above its bound (``excesses``).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import yafsdp_cc
from bench import kernel_counts
from bench.kernel_counts import mesh_of, step
from yafsdp_cc import Compression


class Counts(NamedTuple):
    """What was launched (``kernel_counts.launched``)."""

    kernels: int
    collectives: int
    waits: int

    def minus(self, other: Counts, times: int = 1) -> Counts:
        return Counts(*(mine - times * theirs for mine, theirs in zip(self, other, strict=True)))


class Shape(NamedTuple):
    """A Llama's sizes; ``narrow`` is that of keys and values."""

    width: int
    narrow: int
    hidden: int
    vocabulary: int


SHAPES = {
    "8b": Shape(4096, 1024, 14336, 128256),
    "70b": Shape(8192, 1024, 28672, 128256),
    "tiny": Shape(64, 16, 256, 512),
}


class Block(nn.Module):
    """The parameters of a Llama block, each used once."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width, dtype=dtype) for _ in range(2))
        sizes = [(shape.width, out) for out in (shape.width, shape.width, shape.narrow, shape.narrow)]
        sizes += [(shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width)]
        self.matrices = nn.ModuleList(nn.Linear(*size, bias=False, dtype=dtype) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        q, o, k, v, gate, up, down = self.matrices.children()
        y = self.norms[0](x)
        x = x + o(q(y)) + k(y).sum() + v(y).sum()
        y = self.norms[1](x)
        out: Tensor = x + down(gate(y) * up(y))
        return out


def llama(shape: Shape, depth: int, dtype: torch.dtype) -> nn.Sequential:
    """Return an embedding, blocks, a norm and a head."""
    width, vocabulary = shape.width, shape.vocabulary
    blocks = (Block(shape, dtype) for _ in range(depth))
    ends = nn.RMSNorm(width, dtype=dtype), nn.Linear(width, vocabulary, bias=False, dtype=dtype)
    return nn.Sequential(nn.Embedding(vocabulary, width, dtype=dtype), *blocks, *ends)


def _sharded(shard: Callable[..., Any], **more: Any) -> Callable[[nn.Sequential, Any], Any]:
    more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

    def wrap(model: nn.Sequential, mesh: Any) -> Any:
        for block in list(model)[1:-2]:
            shard(block, mesh=mesh, **more)
        return shard(model, mesh=mesh, **more)

    return wrap


_ours = partial(_sharded, yafsdp_cc.fully_shard)
WAYS: Mapping[str, Callable[[nn.Sequential, Any], Any]] = {
    "fsdp2": _sharded(fully_shard),
    "exact": _ours(),
    "hpz": _ours(reshard_after_forward=4),
    "int8": _ours(compression="int8"),
    "onebit": _ours(compression="onebit"),
    "rounded": _ours(compression=Compression("int8", weights="int8")),
    "deltas": _ours(compression=Compression("int8", weights="int4"), reshard_after_forward=False),
}


@cache
def steps_of(way: str, shape: Shape, depth: int, world: int) -> list[Counts]:
    """Return the counts of four steps."""
    with mesh_of(world, "cpu" if way == "fsdp2" else "cuda") as mesh:  # FSDP2 asks tensors for their device
        model = llama(shape, depth, torch.bfloat16 if way == "none" else torch.float32)
        model = model if way == "none" else WAYS[way](model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        counts = []
        for _ in range(4):
            counts.append(Counts(**step(lambda: model(torch.zeros(1, 16, dtype=torch.int64)).sum())))
            optimizer.step()
            optimizer.zero_grad()
        return counts


class Row(NamedTuple):
    """What one way of sharding costs."""

    block: Counts
    rest: Counts
    check: int

    def __str__(self) -> str:
        return "".join(f"{count:>9}" for count in (*self.block, *self.rest, self.check))


def row_of(way: str, shape: Shape, world: int) -> Row:
    """Count one way by models of two and of three blocks."""

    def counted(depth: int) -> list[Counts]:
        bare = steps_of("none", shape, depth, 2)[-1]
        return [each.minus(bare) for each in steps_of(way, shape, depth, world)]

    two, three = counted(2), counted(3)
    block = three[-1].minus(two[-1])
    # Messages are measured in the second step and judged in the third.
    check = sum(three[place].kernels - two[place].kernels - block.kernels for place in (1, 2))
    return Row(block, two[-1].minus(block, 2), check)


_DECODED = 1 << 25
"""Weights whose deltas are decoded at once. The root's group always gets deltas: its weights stay."""


def excesses(rows: Mapping[str, Row], block: int, rest: int, *, padding: int = 0) -> list[str]:
    """Return what is above its bound, on any number of ranks.

    Args:
        rows: of each way.
        block: parameters of a block.
        rest: parameters of the root's group.
        padding: kernels that zero it, of each group.
    """
    fsdp2, exact, int8 = (rows[way] for way in ("fsdp2", "exact", "int8"))
    kernels = {
        "exact": fsdp2.block.kernels + padding,
        "hpz": fsdp2.block.kernels
        + padding,  # to keep the secondary shard is one more, to cast no second time one less
        "int8": exact.block.kernels + 3,  # encode for the ranks below and above, decode
        "onebit": exact.block.kernels + 3,
        "rounded": int8.block.kernels + 4,  # encode and decode, for forward and backward
        "deltas": int8.block.kernels + 6 * -(-block // _DECODED),
    }
    found = []
    for way, most in kernels.items():
        row = rows[way]
        counts = [*row.block, *row.rest, row.check]
        parts = -(-rest // _DECODED) if way in ("rounded", "deltas") else 0
        more = {"exact": 0, "hpz": 2}.get(way, 4) + 6 * parts + padding
        ends = (fsdp2.rest.kernels + more, fsdp2.rest.collectives + (way == "deltas"), 0)
        check = 80 if way == "deltas" else 40  # of gradients, and of deltas
        bounds = [most, fsdp2.block.collectives, 0, *ends, check]
        found += [
            f"{way}: {name} {count}, {bound} are allowed"
            for name, count, bound in zip(COLUMNS, counts, bounds, strict=True)
            if count > bound
        ]
    return found


COLUMNS = ("kernels", "collect.", "waits", "rest: k.", "c.", "w.", "check")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "70b"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--cuda", type=int, choices=(12, 13), default=13, help="the version that torch is built with")
    options = parser.parse_args()
    kernel_counts.cuda_version = options.cuda
    warnings.filterwarnings("ignore")  # data pointers of fake tensors, which are only compared
    print(f"{'':20}" + "".join(f"{name:>9}" for name in COLUMNS))
    found = []
    for name in options.shapes:
        with torch.device("meta"):
            none, one = (
                sum(p.numel() for p in llama(SHAPES[name], depth, torch.float32).parameters()) for depth in (0, 1)
            )
        for world in options.worlds:
            rows = {}
            for way in WAYS:
                rows[way] = row_of(way, SHAPES[name], world)
                print(f"{name:5}{world:>5}  {way:8}{rows[way]}", flush=True)
            excess = excesses(rows, one - none, none, padding=int(name == "tiny"))  # whose shards are that short
            found += [f"{name}, {world} ranks, {each}" for each in excess]
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
