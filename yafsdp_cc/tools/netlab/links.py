"""The links of a running ``Lab``, a slow network on one machine: their rates, and the bytes that they carried."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

UNSHAPED = "unshaped"
VARIABLE = "YAFSDP_CC_NETLAB"
DEVICE = "eth0"
MASTER_PORT = "29500"
"""Port where the ranks of a ``Lab`` meet: no other program uses the lab's network."""
BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
FRAME = 66_000
"""Bytes of the largest frame, with the headers of all packets that it stands for."""
HEADERS = 66
"""Bytes of headers in a frame, before TCP's payload: Ethernet 14, IPv4 20, TCP 20 and its time stamps 12."""
QUEUE = "50ms"
"""Longest time that packets wait in a link's queue; further packets are dropped, as by a switch."""


class LabError(RuntimeError):
    """A rank of a ``Lab`` failed or hung, or the lab's network broke; the message holds which and why."""


class Unavailable(RuntimeError):
    """Error where a machine cannot have a ``Lab``; the message is one line: what is missing, and what to type."""


class Traffic(NamedTuple):
    """Bytes that one machine sent and received, Ethernet headers included, and the number of frames that it sent."""

    sent: int
    received: int
    frames_sent: int

    def since(self, earlier: Traffic) -> Traffic:
        """Return the bytes and frames since ``earlier``."""
        return Traffic(*(now - before for now, before in zip(self, earlier, strict=True)))

    @property
    def payload_sent(self) -> int:
        """Bytes sent, without the headers of their frames."""
        return self.sent - HEADERS * self.frames_sent


class Links(NamedTuple):
    """The process that keeps a ``Lab``, and for each rank that process's descriptor of the rank's network namespace."""

    keeper: int
    descriptors: tuple[int, ...]

    @classmethod
    def here(cls) -> Links:
        """Return the links of the ``Lab`` in which this process is a rank."""
        if VARIABLE not in os.environ:
            raise LabError(f"not in a lab: {VARIABLE} is not set; run this program by bench/netlab.py or Lab.launch")
        keeper, *descriptors = map(int, os.environ[VARIABLE].split(","))
        return cls(keeper, tuple(descriptors))

    @property
    def machines(self) -> list[str]:
        """Paths of the machines' network namespaces."""
        return [f"/proc/{self.keeper}/fd/{machine}" for machine in dict.fromkeys(self.descriptors)]

    @property
    def hub(self) -> str:
        """Path of the hub's network namespace, which has the ports: the other ends of the machines' links."""
        return f"/proc/{self.keeper}/ns/net"

    @property
    def user(self) -> str:
        """Path of the user namespace to which all network namespaces belong."""
        return f"/proc/{self.keeper}/ns/user"

    def of_rank(self, rank: int) -> str:
        """Return the path of a rank's network namespace."""
        return f"/proc/{self.keeper}/fd/{self.descriptors[rank]}"

    def variables(self, rank: int) -> dict[str, str]:
        """Return a rank's environment variables: those that torchrun sets, and the interface for gloo."""
        ranks, machine = len(self.descriptors), self.descriptors[rank]
        # to its ranks a simulated machine looks like a real one, with a share of this machine's cores
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "GROUP_RANK": str(list(dict.fromkeys(self.descriptors)).index(machine)),
            "LOCAL_RANK": str(self.descriptors[:rank].count(machine)),
            "LOCAL_WORLD_SIZE": str(self.descriptors.count(machine)),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": MASTER_PORT,
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            VARIABLE: ",".join(map(str, (self.keeper, *self.descriptors))),
        }

    def inside(self, namespace: str) -> list[str]:
        """Return the beginning of a command line that runs on a simulated machine, in its network namespace."""
        is_ours = os.path.samefile(self.user, "/proc/self/ns/user")
        user = [] if is_ours else ["--preserve-credentials", f"--user={self.user}"]
        return ["nsenter", *user, f"--net={namespace}", "--"]

    def set_bandwidth(self, bandwidth: str, *, rank: int | None = None, receive: str | None = None) -> None:
        """Limit the rates of links from now on. One rank's call is enough for all ranks; connections stay open.

        Args:
            rank: rank whose machine's link changes; None: all.
            receive: rate at which a machine receives, if that is not ``bandwidth``.
        """
        sends, receives = bits_per_second(bandwidth), bits_per_second(receive or bandwidth)
        chosen = [each for each in enumerate(self.machines) if rank is None or each[1] == self.of_rank(rank)]
        lines = {self.hub: [shaping(port(machine), receives) for machine, _ in chosen]}
        for namespace, shaped in (lines | {machine: [shaping(DEVICE, sends)] for _, machine in chosen}).items():
            batch([*self.inside(namespace), "tc"], shaped, needs="tbf (CONFIG_NET_SCH_TBF)")

    def traffic(self) -> list[Traffic]:
        """Return the bytes that every machine sent and received since the lab began, all read at one moment."""
        counters = {}
        for line in Path(f"/proc/{self.keeper}/net/dev").read_text().splitlines()[2:]:
            name, _, figures = line.partition(":")
            counters[name.strip()] = [int(figure) for figure in figures.split()]
        # a port receives what its machine sends; columns of net/dev: bytes and frames received first, bytes sent ninth
        ports = [counters[port(machine)] for machine in range(len(self.machines))]
        return [Traffic(sent=own[0], received=own[8], frames_sent=own[1]) for own in ports]


def address(machine: int) -> str:
    """Return the IP address of a machine."""
    return f"10.77.0.{machine + 1}"


def port(machine: int) -> str:
    """Return the name of the hub's interface at the other end of a machine's link."""
    return f"port{machine}"


def quantity(text: str, units: Mapping[str, float]) -> float:
    """Read a number that ends in one of ``units``, such as ``100mbit``; return 0 for other texts."""
    matched = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
    return float(matched[1]) * units[matched[2]] if matched else 0.0


def bits_per_second(bandwidth: str) -> int:
    """Return the bits per second of ``100mbit``, ``2.5gbit`` or ``unshaped``, which is 0."""
    bits = round(quantity(bandwidth, BITS))
    if bits < BITS["kbit"] and bandwidth != UNSHAPED:
        raise ValueError(f"bandwidth {bandwidth!r}: write 100mbit, 2.5gbit, 500kbit or {UNSHAPED}")
    return bits


def shaping(device: str, rate: int) -> str:
    """Return the arguments of ``tc`` that limit a device to a number of bits per second, headers included."""
    if rate == 0:
        return f"qdisc replace dev {device} root pfifo"
    # A token bucket of two milliseconds covers a late timer. One that holds the largest frame keeps frames whole, as
    # network cards do, and leaves the processors to the ranks; below 100 mbit such a bucket would let through too much
    # at once.
    burst = max(FRAME if rate >= 100 * BITS["mbit"] else 16_000, rate // 8 // 500)
    return f"qdisc replace dev {device} root tbf rate {rate}bit burst {burst} latency {QUEUE}"


def batch(command: Sequence[str], lines: Sequence[str], needs: str) -> None:
    """Run a program of iproute2 on ``lines``; ``needs`` names the kernel feature that it may lack if it fails."""
    done = subprocess.run([*command, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode != 0:
        why = " ".join(done.stderr.split())
        raise Unavailable(f"{command[-1]} refused {lines[0]!r} ...: {why}; the kernel needs {needs}")
