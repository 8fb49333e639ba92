"""What a rank of a lab finds in its environment: what torchrun sets, and which interface gloo is to use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from yafsdp_cc.netlab.interfaces import DEVICE, address
from yafsdp_cc.netlab.links import VARIABLE

if TYPE_CHECKING:
    from yafsdp_cc.netlab.links import Links

MASTER_PORT = "29500"
"""Of a network that nobody else is in."""


def variables(links: Links, rank: int) -> dict[str, str]:
    ranks, machine = len(links.descriptors), links.descriptors[rank]
    # To its ranks every machine looks like one of its own; each has its share of this one's cores.
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(links.machines.index(machine)),
        "LOCAL_RANK": str(links.descriptors[:rank].count(machine)),
        "LOCAL_WORLD_SIZE": str(links.descriptors.count(machine)),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": MASTER_PORT,
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": threads,
        VARIABLE: links.as_variable(),
    }
