"""What a machine has sent and received, by the counters of its interface."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from yafsdp_cc.netlab.interfaces import port

HEADERS = 66
"""Bytes of a frame before what TCP carries: Ethernet 14, IPv4 20, TCP 20 with 12 of time stamps."""


class Traffic(NamedTuple):
    """Bytes that one machine sent and received, from the Ethernet header on, and the frames that it sent them in."""

    sent: int
    received: int
    frames_sent: int

    def since(self, earlier: Traffic) -> Traffic:
        """What was counted since."""
        return Traffic(*(now - before for now, before in zip(self, earlier, strict=True)))

    @property
    def payload_sent(self) -> int:
        """Bytes sent but for headers."""
        return self.sent - HEADERS * self.frames_sent


def read(table: str, machines: int) -> list[Traffic]:
    """Of every machine at one moment, from the hub's table of interfaces (``/proc/PID/net/dev``)."""
    counters = {}
    for line in Path(table).read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        counters[name.strip()] = figures.split()
    # What its port received is what the machine sent; columns: bytes and frames received first, bytes sent ninth.
    ports = [counters[port(machine)] for machine in range(machines)]
    return [Traffic(sent=int(own[0]), received=int(own[8]), frames_sent=int(own[1])) for own in ports]
