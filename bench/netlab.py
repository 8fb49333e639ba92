"""Run a program on a slow network of this machine, or measure what the network carries.

    python bench/netlab.py --ranks 2 --bandwidth 100mbit,1gbit -- python train.py --your-own flags
    python bench/netlab.py --ranks 2,4 --bandwidth 100mbit,500mbit,1gbit          # the network itself, in a minute
    python bench/netlab.py --delay-ms 5 --loss 0.01                               # what it delays and loses

A program runs once for each bandwidth, as every rank, each in a network namespace of its own from which nothing leads
outside, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. Then a line per rank shows, by the counters
of its interface, what it sent and received. See docs/netlab.md.

The network is measured by plain sockets and by gloo: every rank sends each other rank a chunk (in an all-reduce, two),
in three rounds of a second at the nominal rate. A round takes as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from bench.common import names
from yafsdp_cc.tools.netlab import Lab, LabError, Unavailable
from yafsdp_cc.tools.netlab.links import address, bits_per_second

ROUNDS, MOST, PORT = 3, 64 << 20, 5000
ECHOES, DATAGRAMS, SETTLED = 50, 4000, 0.5
"""Round trips, packets of the loss, and seconds after which nothing is in flight any more."""


# A program ---------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, ranks: int, bandwidth: str) -> None:
    with Lab(ranks, bandwidth, options.delay_ms, options.loss) as lab:
        start = time.perf_counter()
        lab.launch(options.command, timeout=options.timeout)
        wall = time.perf_counter() - start
        for rank, own in enumerate(lab.bytes()):
            sent, received = own.sent, own.received
            rates = f"sent_mbit_s={8e-6 * sent / wall:.1f} received_mbit_s={8e-6 * received / wall:.1f}"
            print(f"netlab {bandwidth=!s} {ranks=} {rank=} wall_s={wall:.2f} {sent=} {received=} {rates}", flush=True)


# The network -------------------------------------------------------------------------------------------------------


class Carried(NamedTuple):
    """One operation at one bandwidth, on one rank."""

    operation: str
    bandwidth: str
    payload: int
    """Bytes that each rank must send and receive."""
    seconds: list[float]
    sent: list[int]
    """Bytes, by the interface."""


def measure(options: argparse.Namespace, ranks: int) -> None:
    """Print a line for each operation at each bandwidth, and one for delay and loss."""
    with Lab(ranks, options.bandwidth[0], options.delay_ms, options.loss) as lab:
        per_rank = lab.run(carry, lab, options.bandwidth, timeout=600.0)
        for on_ranks in zip(*per_rank, strict=True):
            print(_line(on_ranks, ranks), flush=True)
        if ranks > 1:
            round_trip_ms, lost = lab.run(delay_and_loss, lab)[1]
            print(f"netlab {ranks=} {round_trip_ms=:.2f} {lost=:.2%}", flush=True)


def carry(lab: Lab, bandwidths: Sequence[str]) -> list[Carried]:
    """Return, on one rank, every operation at every bandwidth; operations take turns."""
    rank, world = dist.get_rank(), dist.get_world_size()
    peers = _connect(rank, world)
    found = []
    for bandwidth in bandwidths:
        if rank == 0:
            lab.set_bandwidth(bandwidth)
        dist.barrier()
        chunk = min(MOST, int(bits_per_second(bandwidth) / 8) or MOST) // world // 64 * 64
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
                rows[name].sent.append(lab.traffic()[rank].since(before).sent)
        found.extend(rows.values())
    return found


def delay_and_loss(lab: Lab) -> tuple[float, float]:
    """Return, between ranks 0 and 1, the median round trip in milliseconds and the share of packets lost."""
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
    lost = 1 - after[0].since(before[0]).received / max(1, after[1].since(before[1]).sent)
    return 1e3 * median(echoes or [0.0]), max(0.0, lost)


def _operations(peers: dict[int, socket.socket], chunk: int, world: int) -> dict[str, Callable[[], Any]]:
    sent = torch.ones(world * chunk // 4)
    received = torch.empty_like(sent)
    return {
        "sockets": lambda: _exchange(peers, bytes(chunk)),
        "all_reduce": lambda: dist.all_reduce(sent),
        "all_to_all": lambda: dist.all_to_all_single(received, sent),
        "send_recv": lambda: _send_recv(received.chunk(world), sent.chunk(world)),
    }


def _send_recv(received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
    """Do the all-to-all by messages, all receives first: none waits for what another direction carries."""
    rank = dist.get_rank()
    others = [other % len(sent) for other in range(rank + 1, rank + len(sent))]
    works = [dist.irecv(received[other], other) for other in others]
    works += [dist.isend(sent[other], other) for other in others]
    for work in works:
        work.wait()


def _exchange(peers: dict[int, socket.socket], content: bytes) -> None:
    def receive(peer: socket.socket) -> None:
        buffer, left = bytearray(1 << 18), len(content)
        while left:
            left -= peer.recv_into(buffer, min(left, len(buffer)))

    with ThreadPoolExecutor(2 * len(peers) or 1) as threads:
        done = [threads.submit(peer.sendall, content) for peer in peers.values()]
        done += [threads.submit(receive, peer) for peer in peers.values()]
        for each in done:
            each.result()


def _connect(rank: int, world: int) -> dict[int, socket.socket]:
    """Return a connection to every other rank."""
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


def _line(on_ranks: Sequence[Carried], ranks: int) -> str:
    one = on_ranks[0]
    rounds = [max(turn) for turn in zip(*(each.seconds for each in on_ranks), strict=True)]
    above = median(count for each in on_ranks for count in each.sent) / max(1, one.payload) - 1
    nominal = bits_per_second(one.bandwidth)
    shown = []
    for name, seconds in (("median", median(rounds)), ("best", min(rounds))):
        achieved = 8 * one.payload / seconds
        shown.append(f"{name} {1e-6 * achieved:7.1f} Mbit/s" + (f" ({achieved / nominal:.0%})" if nominal else ""))
    return (
        f"netlab {ranks=} {one.bandwidth:>8} {one.operation:<10} {one.payload / 2**20:6.2f} MiB  {'  '.join(shown)}  "
        f"counted {above:+.1%} on the payload"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    several = "one number or several: 2,4"
    parser.add_argument("--ranks", type=lambda text: [*map(int, text.split(","))], default=[2], help=several)
    parser.add_argument("--bandwidth", type=names, default=["100mbit"], help="each way of each rank: 100mbit,1gbit")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way; an answer takes twice that")
    parser.add_argument("--loss", type=float, default=0.0, help="the fraction of packets that are lost: 0.01")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that the program may take")
    parser.add_argument("command", nargs="*", help="after --: what to run; without it, the network is measured")
    options = parser.parse_args()
    try:
        for ranks in options.ranks:
            if not options.command:
                measure(options, ranks)
                continue
            for bandwidth in options.bandwidth:
                run(options, ranks, bandwidth)
    except (LabError, Unavailable, ValueError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
