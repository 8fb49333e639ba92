"""Host time of one rank per unit and step, beside FSDP2's: what bounds training where kernels are short.

    python bench/host.py                        # the branches of CUDA and of the CPU on 8, 64 and 1,024 ranks
    python bench/host.py --kinds cuda --worlds 64 --hotspots     # where the time goes, by cProfile

Ranks are fake (``yafsdp_cc.tools.fake_ranks``): collectives are calls that do nothing, streams and events are
stand-ins in Python, for FSDP2 as well. Tensors are real ones in host memory, of a few KiB, equally large for any number
of ranks: what is measured is Python and torch's dispatch, and a little of copying. Times are those of the calling
thread's processor clock, per block, with the root's share: forward and backward less those of the model alone, and
AdamW's step (of the model alone it is one over whole parameters). *First step*: with sharding, seconds.
Each number of ranks and each kind of device has a process; all of them take turns, round by round, so a machine that
slows down slows every figure. Shown are medians over rounds of the median step, and their ratio to FSDP2's.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import multiprocessing
import pstats
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import yafsdp_cc
from bench.common import about, interleaved, names, save
from yafsdp_cc.table import table
from yafsdp_cc.tools import fake_ranks

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

BLOCKS, WARM_UP, STEPS = 24, 4, 6
ROWS, WIDTH = 1024, 4
"""Of a matrix: a row for each of 1,024 ranks."""
ALONE, FSDP2, OURS = "alone", "fsdp2", "yafsdp_cc"


class Block(nn.Module):
    """The parameters of a transformer block, small: seven matrices and two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.matrices = nn.ModuleList(nn.Linear(WIDTH, ROWS, bias=False) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        for matrix in self.matrices:
            x = x + matrix(x).narrow(1, 0, WIDTH)
        return x


class Model(nn.Sequential):
    """Blocks and a head. The input is its own: it is on no fake device, where the root would move it."""

    def __init__(self, blocks: int) -> None:
        super().__init__(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, ROWS, bias=False))
        self.input = torch.ones(1, WIDTH)

    def forward(self) -> Tensor:
        return super().forward(self.input).sum()


class HostMemory(fake_ranks.FakeDevice):
    """Has tensors of a fake device in host memory."""

    def memory(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def read(self, method: str, tensor: Tensor) -> Any:
        return getattr(tensor, method)()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave the mode, which takes time: a step of a warm engine asks for no tensor on a device."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


class Handle(fake_ranks.Event):
    """Stands for streams and events, those of FSDP2 as well."""

    def wait_stream(self, stream: Handle) -> None:
        pass


class _Over(dist.Work):
    """A collective that is over, and did nothing."""

    def wait(self, timeout: Any = None) -> bool:
        return True


@contextmanager
def idle_ranks(world: int, kind: str) -> Iterator[tuple[Any, HostMemory]]:
    """Be a rank of ``world`` ranks whose collectives do nothing; yield the mesh, and the mode that places tensors."""
    over, device = _Over(), HostMemory()
    # Those of torch's fake group copy rank by rank; 2.13 has new names for them.
    copying = ("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single")
    idle = {name: lambda *_, **__: over for name in copying if hasattr(dist.ProcessGroup, name)}
    with fake_ranks.fake_ranks((world,), kind, device, Handle) as mesh, ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(dist.ProcessGroup, **idle))
        if kind == "cuda":  # FSDP2 asks tensors for their device, and then torch.cpu for streams
            handles = {name: getattr(torch.cuda, name) for name in ("Stream", "Event", "current_stream", "stream")}
            stack.enter_context(mock.patch.multiple(torch.cpu, **handles))
        yield mesh, device


def _by(shard: Callable[..., Any], whole: Model, mesh: Any, **settings: Any) -> Any:
    for block in list(whole)[:-1]:
        shard(block, mesh=mesh, **settings)
    return shard(whole, mesh=mesh, **settings)


WAYS: dict[str, Callable[..., Any]] = {
    ALONE: lambda whole, _: whole,
    FSDP2: partial(_by, fully_shard),
    OURS: partial(_by, yafsdp_cc.fully_shard),
}


class Training:
    """Steps of one way on one rank."""

    def __init__(self, way: str, mesh: Any, blocks: int = BLOCKS, **settings: Any) -> None:
        if way == FSDP2:
            mesh = init_device_mesh("cpu", mesh.mesh.shape)
        start = time.thread_time()
        self.model = WAYS[way](Model(blocks), mesh, **settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.step()  # assembles
        self.first_seconds = time.thread_time() - start

    def step(self) -> list[float]:
        """Return the microseconds of forward, backward and optimizer."""
        clock = [time.thread_time()]
        loss = self.model()
        clock.append(time.thread_time())
        # Not Tensor.backward, which runs without the mode that places tensors.
        _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
        clock.append(time.thread_time())
        self.optimizer.step()
        self.optimizer.zero_grad()
        clock.append(time.thread_time())
        return [1e6 * (end - start) for start, end in pairwise(clock)]


def serve(turns: Connection, world: int, kind: str) -> None:
    """Run what ``turns`` asks for, steps of a way, whose medians go back."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with idle_ranks(world, kind) as (mesh, device):
        trainings = {way: Training(way, mesh) for way in WAYS}
        for _ in range(WARM_UP):
            for training in trainings.values():
                training.step()
        gc.collect()
        gc.freeze()
        turns.send({way: training.first_seconds for way, training in trainings.items()})
        with device.left():
            while way := turns.recv():
                steps = [trainings[way].step() for _ in range(STEPS)]
                turns.send([median(times) for times in zip(*steps, strict=True)])


def measure(kinds: list[str], worlds: list[int], rounds: int) -> dict[str, Any]:
    """Return the microseconds per block and phase, and the seconds of a first step, by kind, ranks and way."""
    context = multiprocessing.get_context("fork")
    servers: dict[tuple[str, int], Connection] = {}
    first: dict[tuple[str, int], dict[str, float]] = {}
    for place in product(kinds, worlds):
        servers[place], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, place[1], place[0]), daemon=True).start()
        theirs.close()  # so that the end of the process ends the wait for it
        first[place] = servers[place].recv()
    turns: dict[tuple[str, int, str], list[list[float]]] = defaultdict(list)
    for _, (place, way) in interleaved(product(servers, WAYS), rounds):
        servers[place].send(way)
        turns[(*place, way)].append(servers[place].recv())
    figures: dict[str, Any] = {}
    for kind, world in servers:
        alone = turns[kind, world, ALONE]
        for way in (FSDP2, OURS):
            added = [
                [(mine - its) / BLOCKS for mine, its in zip(*both, strict=True)]
                for both in zip(turns[kind, world, way], alone, strict=True)
            ]
            figures.setdefault(kind, {}).setdefault(world, {})[way] = {
                "forward": median(each[0] for each in added),
                "backward": median(each[1] for each in added),
                "both": median(each[0] + each[1] for each in added),
                "optimizer": median(each[2] for each in turns[kind, world, way]) / BLOCKS,
                "first step, s": first[kind, world][way],
            }
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print one row for each kind, number of ranks and way."""
    rows = []
    for kind, by_world in figures.items():
        fewest = next(iter(by_world.values()))
        for world, ways in by_world.items():
            for way, each in ways.items():
                ratios = [each["both"] / other["both"] for other in (ways[FSDP2], fewest[way])]
                cells = [f"{each[name]:.0f}" for name in ("forward", "backward", "both", "optimizer")]
                cells += [*(f"{ratio:.2f}" for ratio in ratios), f"{each['first step, s']:.1f}"]
                rows.append([f"{kind}, {world} ranks, {way}", *cells])
    head = ("host us per block", "forward", "backward", "both", "optimizer", "to FSDP2's", "to the fewest ranks'")
    print(table((*head, "first step, s"), *rows))


def hotspots(world: int, kind: str, lines: int = 45) -> None:
    """Print the functions of this engine's steps by their own time."""
    profile = cProfile.Profile(time.thread_time)
    with idle_ranks(world, kind) as (mesh, device):
        training = Training(OURS, mesh)
        for _ in range(WARM_UP):
            training.step()
        with device.left(), profile:
            for _ in range(10):
                training.step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", type=names, default=["cuda", "cpu"], help="of cuda, cpu")
    parser.add_argument("--worlds", nargs="+", type=int, default=[8, 64, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hotspots", action="store_true", help="print where the time goes instead")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    if options.hotspots:
        for kind, world in product(options.kinds, options.worlds):
            hotspots(world, kind)
        return
    figures = measure(options.kinds, options.worlds, options.rounds)
    show(figures)
    save(options.json, {"about": about(["python", "bench/host.py", *sys.argv[1:]]), "figures": figures})


if __name__ == "__main__":
    main()
