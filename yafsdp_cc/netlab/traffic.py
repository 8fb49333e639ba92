"""What crossed a rank's link, by the counters of its interface."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from yafsdp_cc.netlab.wiring import port


class Traffic(NamedTuple):
    """Bytes that one rank sent and received, from the Ethernet header on."""

    sent: int
    received: int

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


def read(table: str, ranks: int) -> list[Traffic]:
    """Of every rank at one moment, from the hub's table of interfaces (``/proc/PID/net/dev``)."""
    counters = {}
    for line in Path(table).read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        counters[name.strip()] = figures.split()
    # What its port received is what the rank sent; columns: bytes received first, bytes sent ninth.
    return [Traffic(sent=int(counters[port(r)][0]), received=int(counters[port(r)][8])) for r in range(ranks)]
