"""Suite ``exchanges``: the processor time of summing or gathering a buffer over ranks, for every contestant.

Ranks are processes of this machine, of one thread each, that communicate over its loopback: nothing limits them but
the processor. Contestants take turns in interleaved rounds at each size; times are medians over the rounds.

With a bandwidth, ranks have links of their own, and only contestants that leave the whole sum on every rank take turns:
over equal links, with one slow rank, and where ranks receive faster than they send. Bytes are counted beside the time.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from bench.common import cell, interleaved
from bench.contestants import EXCHANGES
from yafsdp_cc.compression.all_gather import RoundedAllGather
from yafsdp_cc.compression.codec import codec_of
from yafsdp_cc.compression.config import Compression
from yafsdp_cc.compression.error_feedback import PlainBuffer
from yafsdp_cc.compression.fsdp2 import CompressedCommunication
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter
from yafsdp_cc.compression.schedule import CompressionSchedule
from yafsdp_cc.engine.collectives import ExactAllGather, ExactReduceScatter
from yafsdp_cc.engine.communicator import Communicator
from yafsdp_cc.engine.layout import Extent, Layout
from yafsdp_cc.engine.param import Divisor
from yafsdp_cc.engine.protocols import AllGather, ReduceScatter
from yafsdp_cc.sharding.links import probe_links
from yafsdp_cc.table import table
from yafsdp_cc.tools.netlab import Lab, namespaces
from yafsdp_cc.tools.netlab.links import UNSHAPED, bits_per_second

SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
"""Bytes of a buffer."""
RANKS = (2, 4, 8, 16, 32, 64)
"""Numbers of ranks that divide every buffer into whole blocks."""
LINK_SIZES = (1 << 16, 1 << 20)
"""Bytes of a buffer that is summed over links."""
TURN_BYTES = 1 << 24
"""Bytes of buffers exchanged in one turn: small buffers are exchanged one after the other."""


# What is compared --------------------------------------------------------------------------------------------------


class Buffers(NamedTuple):
    """The fp32 buffers that one rank exchanges."""

    whole: Tensor
    """[world * chunk], other numbers on every rank; NCCL sums in place."""
    gathered: Tensor
    """[world * chunk], every rank's own chunk after an all-gather; the sum after an all-reduce."""
    chunk: Tensor
    """[chunk], the sum after a reduce-scatter."""

    @classmethod
    def of(cls, nbytes: int, device: torch.device) -> Buffers:
        draws = torch.Generator("cpu").manual_seed(dist.get_rank())
        whole = torch.randn(nbytes // 4, generator=draws, device="cpu").to(device)
        return cls(whole, torch.zeros_like(whole), torch.zeros_like(whole[: len(whole) // dist.get_world_size()]))

    @property
    def own(self) -> Tensor:
        """[chunk], this rank's input of an all-gather."""
        return self.whole.view(dist.get_world_size(), -1)[dist.get_rank()]

    @property
    def layout(self) -> Layout:
        """Layout of one parameter that fills the buffer."""
        n = self.whole.numel()
        return Layout((Extent((n,), 0, n),), (self.chunk.numel(),) * dist.get_world_size())


def make_exchange(name: str, buffers: Buffers) -> Callable[[], object]:
    """Return a function that exchanges the buffers once, as the contestant of this name does."""
    maker, settings, _ = EXCHANGES[name]
    exchange: Callable[[], object] = globals()[maker](buffers, **settings)
    return exchange


def torch_reduce_scatter(buffers: Buffers) -> Callable[[], object]:
    return lambda: dist.reduce_scatter_tensor(buffers.chunk, buffers.whole)


def torch_all_to_all(buffers: Buffers) -> Callable[[], object]:
    received = torch.empty_like(buffers.whole)

    def exchange() -> None:
        dist.all_to_all_single(received, buffers.whole)
        torch.sum(received.view(dist.get_world_size(), -1), dim=0, out=buffers.chunk)

    return exchange


def reduce_scatter(buffers: Buffers, *, codec: str | None = None) -> Callable[[], object]:
    """Exchange by this package's reduce-scatter, exact without a codec."""
    device, world = buffers.whole.device, dist.group.WORLD
    assert world is not None
    collective: ReduceScatter = ExactReduceScatter(buffers.whole.numel(), buffers.whole.dtype)
    if codec is not None:
        flat = PlainBuffer("bench", buffers.layout, world.rank(), device, Divisor(world.size(), device))
        schedule = CompressionSchedule(Compression(codec, residual="bf16"))
        collective = CompressedReduceScatter(flat, schedule, codec)
    collective.bind(CompressedCommunication(Compression()).context(world, device))

    def exchange() -> None:
        for work in collective.start(buffers.whole, async_op=False):
            work.wait()
        for start, part in collective.finish(buffers.whole):
            buffers.chunk.narrow(0, start, part.numel()).copy_(part)

    return exchange


def torch_all_gather(buffers: Buffers) -> Callable[[], object]:
    return lambda: dist.all_gather_into_tensor(buffers.gathered, buffers.own)


def all_gather(buffers: Buffers, *, codec: str | None = None) -> Callable[[], object]:
    """Exchange by this package's all-gather, exact without a codec."""
    device, world = buffers.whole.device, dist.group.WORLD
    assert world is not None
    shard: Any = _Shard(buffers)
    collective: AllGather = ExactAllGather(shard)
    if codec is not None:
        collective = RoundedAllGather(shard, CompressionSchedule(Compression()), codec_of(codec))
    collective.bind(CompressedCommunication(Compression()).context(world, device))
    scratch = torch.empty(collective.scratch_bytes(), dtype=torch.uint8, device=device)

    def exchange() -> None:
        for work in collective.start(buffers.gathered, None, scratch, async_op=False):
            work.wait()
        collective.finish(buffers.gathered, scratch)

    return exchange


class _Shard:
    """The attributes of a ``FlatParam`` that all-gathers use."""

    host_bytes = 0

    def __init__(self, buffers: Buffers) -> None:
        self.layout = buffers.layout
        self.sharded = buffers.own
        self.compute_dtype = buffers.whole.dtype

    def send_buffer(self, own: Tensor, *, in_place: bool) -> Tensor:
        return own.copy_(self.sharded) if in_place else self.sharded


# Ways to leave the whole sum on every rank, buffers.gathered, without changing buffers.whole ------------------------


def torch_all_reduce(buffers: Buffers) -> Callable[[], object]:
    return lambda: dist.all_reduce(buffers.gathered.copy_(buffers.whole))


def exact_all_reduce(buffers: Buffers) -> Callable[[], object]:
    """Exchange by this package's reduce-scatter, and its all-gather of the sums."""
    device, group = buffers.whole.device, dist.group.WORLD
    assert group is not None
    comm, summed = Communicator(group, device), reduce_scatter(buffers)
    own = comm.own_chunk(buffers.gathered)

    def exchange() -> None:
        summed()
        own.copy_(buffers.chunk)
        for work in comm.all_gather(buffers.gathered, own, async_op=False):
            work.wait()

    return exchange


def parameter_server(buffers: Buffers) -> Callable[[], object]:
    """Send all buffers to rank 0, which sums them in rank order and sends the sum to all."""
    rank, world, total = dist.get_rank(), dist.get_world_size(), buffers.gathered
    others = range(1, world)
    received = [torch.empty_like(total) for _ in others] if rank == 0 else []

    def exchange() -> None:
        total.copy_(buffers.whole)
        if rank == 0:
            _transfer([], zip(received, others, strict=True))
            for each in received:
                total.add_(each)
            _transfer([(total, other) for other in others], [])
        else:
            _transfer([(total, 0)], [])
            _transfer([], [(total, 0)])

    return exchange


def direct(buffers: Buffers) -> Callable[[], object]:
    """Send every rank its chunk, which it sums in rank order, and whose sum it sends to all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own, sums = buffers.whole.view(world, -1), buffers.gathered.view(world, -1)
    received = torch.empty_like(own)
    others = [other for other in range(world) if other != rank]

    def exchange() -> None:
        received[rank] = own[rank]
        _transfer([(own[other], other) for other in others], [(received[other], other) for other in others])
        torch.sum(received, dim=0, out=sums[rank])
        _transfer([(sums[rank], other) for other in others], [(sums[other], other) for other in others])

    return exchange


def ring(buffers: Buffers) -> Callable[[], object]:
    """Pass partial sums of chunks to the right until they are complete, then pass on the sums."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks, received = buffers.gathered.view(world, -1), torch.empty_like(buffers.chunk)
    left, right = (rank - 1) % world, (rank + 1) % world

    def exchange() -> None:
        buffers.gathered.copy_(buffers.whole)
        for step in range(world - 1):
            _transfer([(chunks[rank - step], right)], [(received, left)])
            chunks[rank - step - 1].add_(received)
        for step in range(world - 1):
            _transfer([(chunks[(rank + 1 - step) % world], right)], [(chunks[rank - step], left)])

    return exchange


def halving_and_doubling(buffers: Buffers) -> Callable[[], object]:
    """Swap halves with a partner, halves of the half with the next one, until a chunk is left; then reverse."""
    rank, scratch = dist.get_rank(), torch.empty_like(buffers.whole)

    def exchange(part: Tensor, distance: int) -> None:
        if distance:
            lower, upper = part.chunk(2)
            keep, give = (upper, lower) if rank & distance else (lower, upper)
            received, partner = scratch[: len(keep)], rank ^ distance
            _transfer([(give, partner)], [(received, partner)])
            keep.add_(received)
            exchange(keep, distance // 2)
            _transfer([(keep, partner)], [(give, partner)])

    return lambda: exchange(buffers.gathered.copy_(buffers.whole), dist.get_world_size() // 2)


def tree(buffers: Buffers) -> Callable[[], object]:
    """Sum everything towards rank 0 along a binomial tree, and send the sum back along it."""
    rank, total, received = dist.get_rank(), buffers.gathered, torch.empty_like(buffers.whole)
    distances = [1 << bit for bit in range(dist.get_world_size().bit_length() - 1)]
    children = [rank + distance for distance in distances if rank % (2 * distance) == 0]
    parent = rank & (rank - 1)

    def exchange() -> None:
        total.copy_(buffers.whole)
        for child in children:
            _transfer([], [(received, child)])
            total.add_(received)
        if rank:
            _transfer([(total, parent)], [])
            _transfer([], [(total, parent)])
        for child in reversed(children):
            _transfer([(total, child)], [])

    return exchange


def _transfer(sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]) -> None:
    """Send to ranks and receive from ranks, all at once."""
    works: list[Any] = [dist.irecv(tensor, rank) for tensor, rank in receives]
    works += [dist.isend(tensor, rank) for tensor, rank in sends]
    for work in works:
        work.wait()


class Route(NamedTuple):
    """Cost of one way to sum S bytes on r ranks."""

    rounds: Callable[[int], int]
    """Function of the number of ranks: messages that must wait for one another."""
    sent: Callable[[int], float]
    """Function of the number of ranks: bytes that the rank that sends most sends, in S."""


def _log2(ranks: int) -> int:
    return ranks.bit_length() - 1


def _least(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


ROUTES = {
    "torch all-reduce": Route(lambda r: 2 * (r - 1), _least),  # gloo's all-reduce is a ring
    "ours exact + gather": Route(lambda r: 2, _least),
    "parameter server": Route(lambda r: 2, lambda r: r - 1),
    "direct": Route(lambda r: 2, _least),
    "ring": Route(lambda r: 2 * (r - 1), _least),
    "halving and doubling": Route(lambda r: 2 * _log2(r), _least),
    "tree": Route(lambda r: 2 * _log2(r), _log2),
}
LINKS = ("equal links", "slow rank", "slow to send")
"""Kinds of links: all alike; rank 1 with a quarter of the rate; all sending at a quarter of the rate."""


# The measurement ---------------------------------------------------------------------------------------------------


CLOCKS = {"processor_ms": "processor ms per rank", "wall_ms": "wall ms"}
"""Clocks of an exchange: processor time of all threads, gloo's included, and wall time."""


def run(
    names: Sequence[str],
    ranks: Sequence[int] = (2, 4),
    rounds: int = 7,
    sizes: Sequence[int] = SIZES,
    bandwidths: Sequence[str] = (),
    delay_ms: float = 0.0,
) -> dict[str, Any]:
    """Measure and print; return figures by backend or bandwidth, ranks, bytes of the buffer and contestant.

    Raises:
        ValueError: a buffer cannot be divided among so many ranks, or a bandwidth is given and no contestant leaves the
            whole sum on every rank; nothing was started.
        Unavailable: this machine cannot have a network of its own.
    """
    for count in ranks:
        if count not in RANKS:
            raise ValueError(f"ranks={count}: buffers are divided among {', '.join(map(str, RANKS))}")
    if bandwidths:
        return _run_on_links([name for name in names if name in ROUTES], ranks, rounds, bandwidths, delay_ms)
    found: dict[str, Any] = {}
    for backend in ("gloo", "nccl"):
        for count in ranks:
            if backend == "nccl" and (gpus := torch.cuda.device_count()) < count:
                print(f"\nnccl with {count} ranks: skipped, it needs a GPU for each and there are {gpus}", flush=True)
                continue
            figures = measure(names, count, rounds, sizes, backend)
            for clock, what in CLOCKS.items():
                print(f"\n{count} ranks, {backend}, {what} of an exchange; ratios are to the first of each kind")
                print(exchanges_table(figures, clock), flush=True)
            found.setdefault(backend, {})[str(count)] = figures
    return found


def measure(
    names: Sequence[str], ranks: int, rounds: int, sizes: Sequence[int] = SIZES, backend: str = "gloo"
) -> dict[str, Any]:
    """Return figures of every contestant at every size; over NCCL, with a GPU per rank."""
    # CUDA does not survive a fork, and starting new processes takes seconds
    method = "spawn" if backend == "nccl" else "fork"
    with tempfile.TemporaryDirectory() as folder:
        job = (os.getpid(), folder, backend, ranks, names, rounds, sizes)
        start_processes(_rank, job, nprocs=ranks, daemon=True, start_method=method)
        per_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return {str(size): _figures([found[str(size)] for found in per_rank]) for size in sizes}


def _rank(
    rank: int, parent: int, folder: str, backend: str, ranks: int, names: Sequence[str], rounds: int, sizes: list[int]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and this process ends with it
    namespaces.die_with(parent)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch have other names for these functions
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {size: _measure_size(Buffers.of(size, device), names, rounds) for size in sizes}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measure_size(buffers: Buffers, names: Sequence[str], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return processor and wall milliseconds of each contestant's exchange on this rank, in every round."""
    exchanges = {name: make_exchange(name, buffers) for name in names}
    repeats = max(1, TURN_BYTES // buffers.whole.nbytes)
    for exchange in exchanges.values():
        exchange()
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _, name in interleaved(names, rounds):
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            exchanges[name]()
        if buffers.whole.is_cuda:
            torch.cuda.synchronize()
        processor, wall = time.process_time() - processor, time.perf_counter() - wall
        turns[name].append((1e3 * processor / repeats, 1e3 * wall / repeats))
    return turns


def _figures(by_rank: list[dict[str, list[tuple[float, float]]]]) -> dict[str, Any]:
    """Return medians over rounds, of the slowest rank's wall time and of the processor time that ranks share."""
    figures: dict[str, Any] = {}
    for name in by_rank[0]:
        rounds = [list(zip(*turns, strict=True)) for turns in zip(*(found[name] for found in by_rank), strict=True)]
        figures[name] = {
            "processor_ms": median(mean(processor) for processor, _ in rounds),
            "wall_ms": median(max(wall) for _, wall in rounds),
        }
    for name, each in figures.items():
        baseline = figures.get(EXCHANGES[name].baseline)
        for clock in CLOCKS:
            each[f"{clock}_ratio"] = baseline and each[clock] / baseline[clock]
    return figures


def exchanges_table(figures: dict[str, Any], clock: str) -> str:
    """Return a row for each contestant, with a time and a ratio for each size."""
    head = [""]
    for size in map(int, figures):
        head += [f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB", "ratio"]
    rows = []
    for name in next(iter(figures.values())):
        row = [name]
        for each in figures.values():
            row += [f"{each[name][clock]:.3f}", cell(each[name][f"{clock}_ratio"], ".2f")]
        rows.append(row)
    return table(head, *rows)


# Over links --------------------------------------------------------------------------------------------------------


def _run_on_links(
    names: Sequence[str], ranks: Sequence[int], rounds: int, bandwidths: Sequence[str], delay_ms: float
) -> dict[str, Any]:
    if not names:
        raise ValueError(f"with --bandwidth, exchanges compares {', '.join(ROUTES)}: name one of these")
    if UNSHAPED in bandwidths:
        raise ValueError(f"bandwidth {UNSHAPED}: exchanges have links that are four times as slow, name a rate")
    found: dict[str, Any] = {}
    for count in ranks:
        with Lab(count, delay_ms=delay_ms) as lab:
            for bandwidth in bandwidths:
                figures = found.setdefault(bandwidth, {})[str(count)] = measure_on_links(lab, names, bandwidth, rounds)
                for size, each in figures.items():
                    print(f"\n{count} ranks at {bandwidth}, {delay_ms:g} ms one way: the sum of {int(size) >> 10} KiB")
                    print(links_table(each, count, int(size)), flush=True)
    return found


def measure_on_links(
    lab: Lab, names: Sequence[str], bandwidth: str, rounds: int, sizes: Sequence[int] = LINK_SIZES
) -> dict[str, Any]:
    """Return figures of contestants by size: milliseconds for each kind of links, and the most bytes that a rank
    sent."""
    slow = f"{bits_per_second(bandwidth) / 4e3:g}kbit"
    by_rank = lab.run(_measure_on_links, lab, names, bandwidth, slow, rounds, sizes, timeout=3600.0)
    figures: dict[str, Any] = {}
    for size in sizes:
        for name in names:
            each = figures.setdefault(str(size), {})[name] = {}
            for kind in LINKS:
                turns = [found[size, kind, name] for found in by_rank]
                each[kind] = median(max(turn) for turn in zip(*([ms for ms, _ in own] for own in turns), strict=True))
            each["sent_bytes"] = max(
                median(sent for kind in LINKS for _, sent in found[size, kind, name]) for found in by_rank
            )
    return figures


def _measure_on_links(
    lab: Lab, names: Sequence[str], bandwidth: str, slow: str, rounds: int, sizes: Sequence[int]
) -> dict[tuple[int, str, str], list[tuple[float, int]]]:
    """Return milliseconds and bytes sent of each turn on this rank, by size, kind of links and contestant."""
    warnings.simplefilter("ignore", FutureWarning)
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    if rank == 0:
        lab.set_bandwidth(bandwidth)
    dist.barrier()
    probe_links(group, group)  # the engine probes links, too, when a model is sharded
    turns: dict[tuple[int, str, str], list[tuple[float, int]]] = {}
    for size in sizes:
        buffers = Buffers.of(size, torch.device("cpu"))
        exchanges = {name: make_exchange(name, buffers) for name in names}
        for kind in LINKS:
            if rank == 0:
                lab.set_bandwidth(slow if kind == "slow to send" else bandwidth, receive=bandwidth)
                if kind == "slow rank":
                    lab.set_bandwidth(slow, rank=1)
            for _, name in interleaved(names, rounds):
                dist.barrier()
                before, start = lab.traffic()[rank], time.perf_counter()
                exchanges[name]()
                wall = time.perf_counter() - start
                dist.barrier()
                sent = lab.traffic()[rank].since(before).payload_sent
                turns.setdefault((size, kind, name), []).append((1e3 * wall, sent))
    return turns


def links_table(figures: dict[str, Any], ranks: int, size: int) -> str:
    """Return a row for each contestant: rounds, bytes predicted and counted, and milliseconds by kind of links."""
    head = ("", "rounds", "KB sent most", "counted", *(f"ms, {kind}" for kind in LINKS))
    return table(
        head,
        *(
            (
                name,
                str(ROUTES[name].rounds(ranks)),
                f"{ROUTES[name].sent(ranks) * size / 1e3:.0f}",
                f"{each['sent_bytes'] / 1e3:.0f}",
                *(f"{each[kind]:.0f}" for kind in LINKS),
            )
            for name, each in figures.items()
        ),
    )
