"""The interfaces between the ranks, as lines for ``ip -batch`` and ``bridge -batch``.

    rank 0: eth0 ──── port0 ┐                 ┌ port1 ──── eth0 :rank 1
    10.77.0.1               ├ bridge or relay ┤                10.77.0.2
    rank 2: eth0 ──── port2 ┘                 └ port3 ──── eth0 :rank 3

Every rank and the hub, which holds the ports, have a network namespace each. Both ends of each pair are shaped: eth0 is
what the rank sends, the port what it receives. Nobody has to ask for an address or to learn one, and nothing but IPv4
is sent: the counters stand still while the ranks send nothing.

Packets of one connection are sent in frames of up to 64 KB, as between a machine and its network card, and a frame
counts its headers once; two cores could not carry a gigabit otherwise. Where packets are lost, each is a frame.
"""

from __future__ import annotations

DEVICE = "eth0"
MOST_RANKS = 250


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def port(rank: int) -> str:
    return f"port{rank}"


def hub(ranks: list[str], bridge: bool) -> list[str]:
    """For ``ip``: the pairs, each with its far end in the namespace at the rank's path; a bridge to join them."""
    lines = ["link add hub type bridge mcast_snooping 0", "link set hub addrgenmode none up"] if bridge else []
    for rank, path in enumerate(ranks):
        far = f"peer name {DEVICE} address {_hardware(rank)} netns {path}"
        lines.append(f"link add {port(rank)} type veth {far}")
        lines.append(f"link set {port(rank)} addrgenmode none up")
        if bridge:
            quiet = "flood off learning off mcast_flood off bcast_flood off"
            lines.append(f"link set {port(rank)} master hub")
            lines.append(f"link set {port(rank)} type bridge_slave {quiet}")
    return lines


def forwarding(ranks: int) -> list[str]:
    """For ``bridge``: behind which port each rank is."""
    return [f"fdb add {_hardware(rank)} dev {port(rank)} master static" for rank in range(ranks)]


def station(rank: int, ranks: int, single: bool) -> list[str]:
    """For ``ip``, in the rank's own namespace; ``single`` if every packet is to be a frame."""
    return [
        "link set lo up",
        f"link set {DEVICE} addrgenmode none {'gso_max_segs 1 ' if single else ''}up",
        f"address add {address(rank)}/24 dev {DEVICE}",
        *(
            f"neighbour add {address(other)} lladdr {_hardware(other)} dev {DEVICE} nud permanent"
            for other in range(ranks)
            if other != rank
        ),
    ]


def _hardware(rank: int) -> str:
    """The relay reads the rank from the last two bytes."""
    return f"02:00:00:00:00:{rank + 1:02x}"
