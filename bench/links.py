"""What a lab's links carry, delay and lose: by plain sockets, which are the truth of it, and by gloo."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from yafsdp_cc.netlab.rate import Rate
from yafsdp_cc.netlab.wiring import address

if TYPE_CHECKING:
    from collections.abc import Callable

    from yafsdp_cc.netlab import Lab

ROUNDS = 3
SECONDS = 1.0
"""What each round would take at the nominal rate."""
MOST = 64 << 20
ECHOES = 50
DATAGRAMS = 4000
SETTLED = 0.5
"""Seconds after which nothing is under way any more."""
PORT = 5000


class Carried(NamedTuple):
    """One operation at one bandwidth, on one rank."""

    operation: str
    bandwidth: str
    payload: int
    """Bytes that each rank must send and receive."""
    seconds: list[float]
    counted: list[int]
    """Bytes sent, by the interface."""


class Quality(NamedTuple):
    round_trip_ms: float
    lost: float


def show(lab: Lab, ranks: int, bandwidths: list[str]) -> None:
    """Print a line for each operation at each bandwidth, and one for delay and loss."""
    per_rank = lab.run(carry, lab, bandwidths, timeout=600.0)
    for on_ranks in zip(*per_rank, strict=True):
        print(_line(on_ranks, ranks), flush=True)
    if ranks > 1:
        found = lab.run(quality, lab)[1]
        print(f"netlab {ranks=} round_trip_ms={found.round_trip_ms:.2f} lost={found.lost:.2%}", flush=True)


def carry(lab: Lab, bandwidths: list[str]) -> list[Carried]:
    """On one rank: everything at every bandwidth, the operations taking turns."""
    rank, world = dist.get_rank(), dist.get_world_size()
    peers = _connect(rank, world)
    found = []
    for bandwidth in bandwidths:
        if rank == 0:
            lab.set_bandwidth(bandwidth)
        dist.barrier()
        bits = Rate.parse(bandwidth).bits
        chunk = min(MOST, int(bits / 8 * SECONDS) or MOST) // world // 64 * 64
        operations = _operations(peers, chunk, world)
        rows = {
            name: Carried(name, bandwidth, (2 if name == "all_reduce" else 1) * chunk * (world - 1), [], [])
            for name in operations
        }
        for _ in range(ROUNDS):
            for name, operation in operations.items():
                dist.barrier()
                before, start = lab.traffic()[rank], time.perf_counter()
                operation()
                rows[name].seconds.append(time.perf_counter() - start)
                dist.barrier()
                rows[name].counted.append(lab.traffic()[rank].since(before).sent)
        found.extend(rows.values())
    return found


def quality(lab: Lab) -> Quality:
    """Between ranks 0 and 1: the median time of an answer, and the share of packets that never came."""
    rank = dist.get_rank()
    peers = _connect(rank, dist.get_world_size())
    echoes = []
    for _ in range(ECHOES if rank < 2 else 0):
        start = time.perf_counter()
        if rank == 1:
            peers[0].sendall(b"?")
        peers[1 - rank].recv(1)
        if rank == 0:
            peers[1].sendall(b"!")
        echoes.append(time.perf_counter() - start)
    return Quality(1e3 * median(echoes or [0.0]), _lost(lab))


def _lost(lab: Lab) -> float:
    """The share of rank 1's datagrams that never came to rank 0, by the counters."""
    rank = dist.get_rank()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind((address(rank), PORT))
        dist.barrier()
        time.sleep(SETTLED)
        before = lab.traffic()
        for _ in range(DATAGRAMS if rank == 1 else 0):
            datagrams.sendto(bytes(100), (address(0), PORT))
            time.sleep(1e-4)
        time.sleep(SETTLED)
        after = lab.traffic()
        dist.barrier()
    return max(0.0, 1 - after[0].since(before[0]).received / max(1, after[1].since(before[1]).sent))


def _operations(peers: dict[int, socket.socket], chunk: int, world: int) -> dict[str, Callable[[], Any]]:
    """Each makes every rank send and receive a chunk for every other rank; the all-reduce, two."""
    given = torch.ones(world * chunk // 4)
    taken = torch.empty_like(given)
    return {
        "sockets": lambda: _exchange(peers, bytes(chunk)),
        "all_reduce": lambda: dist.all_reduce(given),
        "all_to_all": lambda: dist.all_to_all_single(taken, given),
        "send_recv": lambda: _swap(taken.chunk(world), given.chunk(world)),
    }


def _swap(taken: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> None:
    """The all-to-all by messages, all receives before any send: none waits for what another direction carries."""
    rank, others = dist.get_rank(), [other for other in range(len(given)) if other != dist.get_rank()]
    works = [dist.irecv(taken[other], other) for other in others]
    works += [dist.isend(given[other], other) for other in (*others[rank:], *others[:rank])]
    for work in works:
        work.wait()


def _exchange(peers: dict[int, socket.socket], content: bytes) -> None:
    def receive(peer: socket.socket) -> None:
        room, left = bytearray(1 << 18), len(content)
        while left:
            left -= peer.recv_into(room, min(left, len(room)))

    with ThreadPoolExecutor(2 * len(peers) or 1) as threads:
        done = [threads.submit(peer.sendall, content) for peer in peers.values()]
        done += [threads.submit(receive, peer) for peer in peers.values()]
        for one in done:
            one.result()


def _connect(rank: int, world: int) -> dict[int, socket.socket]:
    """A connection to every other rank."""
    with socket.create_server((address(rank), PORT), backlog=world) as server:
        dist.barrier()
        peers = {}
        for other in range(rank):
            peers[other] = socket.create_connection((address(other), PORT))
            peers[other].sendall(rank.to_bytes(1, "big"))
        for _ in range(rank + 1, world):
            peer, _ = server.accept()
            peers[peer.recv(1)[0]] = peer
    for peer in peers.values():
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peers


def _line(on_ranks: tuple[Carried, ...], ranks: int) -> str:
    """A round takes as long as its slowest rank."""
    one = on_ranks[0]
    rounds = [max(turn) for turn in zip(*(rank.seconds for rank in on_ranks), strict=True)]
    extra = median(count for rank in on_ranks for count in rank.counted) / max(1, one.payload) - 1
    nominal = Rate.parse(one.bandwidth).bits
    shown = []
    for name, seconds in (("median", median(rounds)), ("best", min(rounds))):
        achieved = 8 * one.payload / seconds
        share = f" ({achieved / nominal:.0%})" if nominal else ""
        shown.append(f"{name} {1e-6 * achieved:7.1f} Mbit/s{share}")
    carried = f"{one.payload / 2**20:6.2f} MiB"
    return (
        f"netlab {ranks=} {one.bandwidth:>8} {one.operation:<10} {carried}  {'  '.join(shown)}  "
        f"counted {extra:+.1%} on the payload"
    )
