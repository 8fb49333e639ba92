"""Suite ``exchanges``: what summing and gathering a buffer costs the processor, in every way that is compared.

Ranks are processes of this machine, of one thread each, that speak over its loopback: nothing limits them but the
processor. Contestants take turns, in rounds whose order rotates, at each size; times are medians over the rounds.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import warnings
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from yafsdp_cc.bench import exchanges
from yafsdp_cc.bench.contestants import EXCHANGES
from yafsdp_cc.bench.turns import in_turns
from yafsdp_cc.netlab import namespaces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
"""Bytes of a buffer."""
RANKS = (2, 4, 8, 16, 32, 64)
"""Among which every buffer can be divided in whole blocks."""
A_TURN = 1 << 24
"""Bytes of the buffers that are exchanged in one turn: small ones one after the other."""


class Turn(NamedTuple):
    """Some exchanges of one contestant on one rank, each in the mean."""

    processor_ms: float
    """Of all threads, gloo's among them."""
    wall_ms: float


def measure(
    names: Sequence[str], ranks: int, rounds: int, sizes: Sequence[int] = SIZES, backend: str = "gloo"
) -> dict[str, Any]:
    """Figures of every contestant at every size; over NCCL, a GPU per rank."""
    # CUDA does not survive a fork, and starting afresh takes seconds.
    method = "spawn" if backend == "nccl" else "fork"
    with tempfile.TemporaryDirectory() as folder:
        job = (os.getpid(), folder, backend, ranks, names, rounds, sizes)
        start_processes(_rank, job, nprocs=ranks, daemon=True, start_method=method)
        per_rank = [json.loads(_found(folder, rank).read_text()) for rank in range(ranks)]
    return {
        str(size): _figures({name: [found[str(size)][name] for found in per_rank] for name in names}) for size in sizes
    }


def why_no_nccl(ranks: int) -> str | None:
    """What stands in the way of measuring NCCL with so many ranks, if something does."""
    gpus = torch.cuda.device_count()
    return f"nccl with {ranks} ranks: skipped, it needs a GPU for each and there are {gpus}" if gpus < ranks else None


def _rank(
    rank: int, parent: int, folder: str, backend: str, ranks: int, names: Sequence[str], rounds: int, sizes: list[int]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, and its end is this one's
    namespaces.die_with(parent)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for what older has by these alone
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {size: _race(exchanges.Buffers.of(size, device), names, rounds) for size in sizes}
    _found(folder, rank).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _found(folder: str, rank: int) -> Path:
    """Where a rank leaves what it has measured."""
    return Path(folder, f"{rank}.json")


def _race(buffers: exchanges.Buffers, names: Sequence[str], rounds: int) -> dict[str, list[Turn]]:
    """Each contestant's turns, by this rank's clocks."""
    exchange_of = {name: exchanges.exchange_of(name, buffers) for name in names}
    repeats = max(1, A_TURN // buffers.whole.nbytes)
    for exchange in exchange_of.values():
        exchange()
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for _, name in in_turns(names, rounds):
        turns[name].append(_turn(exchange_of[name], repeats, buffers.whole.device))
    return turns


def _turn(exchange: Callable[[], object], repeats: int, device: torch.device) -> Turn:
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        exchange()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    processor, wall = time.process_time() - processor, time.perf_counter() - wall
    return Turn(1e3 * processor / repeats, 1e3 * wall / repeats)


def _figures(turns: dict[str, list[list[tuple[float, float]]]]) -> dict[str, Any]:
    """Of each contestant, whose turns are given by rank."""
    figures = {name: _summary([[Turn(*turn) for turn in of_rank] for of_rank in each]) for name, each in turns.items()}
    for name, each in figures.items():
        beside = figures.get(EXCHANGES[name].beside)
        for clock in Turn._fields:
            each[f"{clock}_ratio"] = beside and each[clock] / beside[clock]
    return figures


def _summary(of_ranks: list[list[Turn]]) -> dict[str, Any]:
    """Ranks share the machine's processors, and an exchange takes as long as its slowest rank."""
    rounds = list(zip(*of_ranks, strict=True))
    return {
        "processor_ms": median(mean(turn.processor_ms for turn in turns) for turns in rounds),
        "wall_ms": median(max(turn.wall_ms for turn in turns) for turns in rounds),
    }
