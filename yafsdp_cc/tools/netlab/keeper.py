"""The process that keeps a ``Lab``: it holds the network namespaces, and cleans up however the lab ends.

The lab forks the keeper into a session of its own. The keeper makes the network, and waits for the end of the lab or of
the process that made the lab, by whatever signal. Then the keeper kills everything that is still in the lab's network
namespaces, and the namespaces, which have no names, end with the keeper.

    machine 0: eth0 ──── port0 ┐                 ┌ port1 ──── eth0 :machine 1
    10.77.0.1                  ├ bridge or relay ┤                  10.77.0.2
    machine 2: eth0 ──── port2 ┘                 └ port3 ──── eth0 :machine 3

Every machine and the hub, which holds the ports, have a network namespace each. Both ends of each link are shaped: eth0
limits what the machine sends, the port what it receives. Addresses are set by hand and only IPv4 is sent, so that the
counters stand still while the ranks send nothing.

Packets of one connection are sent in frames of up to 64 KB, as between a machine and its network card, and a frame
counts its headers once; two cores could not carry a gigabit otherwise. Where packets are lost, each is a frame.

A relay program between the ports, compiled when a lab needs it, makes delay and loss. The kernel's own netem is missing
from many kernels, and a lab should be the same on all of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from yafsdp_cc.tools.netlab import namespaces
from yafsdp_cc.tools.netlab.links import DEVICE, LabError, Unavailable, address, batch, port

RELAY = Path(__file__).with_name("relay.c")
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
"""Programs that a ``Lab`` needs, and the Debian package of each."""
QUIET = "flood off learning off mcast_flood off bcast_flood off"
NOT_ALLOWED = (
    "network namespaces are not allowed here ({error}): run as root (containers: --cap-add SYS_ADMIN,NET_ADMIN), or "
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0)"
)


def keep(maker: int, lab: Connection, machines: int, ranks_per_machine: int, delay_ms: float, loss: float) -> NoReturn:
    """Hold the namespaces of a ``Lab`` until it, or the process ``maker`` that has made it, ends.

    Send the lab a temporary folder and the descriptor of each rank's namespace, or an exception that says why there is
    no lab or what has broken it.
    """
    try:
        os.setsid()
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        ends: list[Connection | int] = [lab, os.pidfd_open(maker)]
        with tempfile.TemporaryDirectory(prefix="yafsdp-cc-") as folder:
            held = _make_namespaces(machines)
            try:
                relayed = bool(delay_ms or loss)
                _connect(held, relayed, single=loss > 0)
                relay = _start_relay(folder, machines, delay_ms, loss) if relayed else None
                lab.send((folder, *(machine for machine in held for _ in range(ranks_per_machine))))
                if relay and (ended := os.pidfd_open(relay.pid)) in wait([*ends, ended]):
                    lab.send(LabError(f"the relay between the ranks ended with status {relay.wait()}"))
                wait(ends)
            finally:
                namespaces.sweep({*map(namespaces.number, [*map(_path, held), "/proc/self/ns/net"])})
    except Unavailable as reason:
        lab.send(reason)
    except (ProcessLookupError, ConnectionError):
        pass  # the process that made the lab has ended: nobody reads messages
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _make_namespaces(machines: int) -> list[int]:
    """Make a network namespace for each machine; return descriptors. This process ends up in one more, the hub."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise Unavailable(f"no program {program!r}: apt-get install {package}")
    try:
        namespaces.become_capable()
        held = [namespaces.create() for _ in range(machines)]
        os.close(namespaces.create())
    except OSError as error:
        raise Unavailable(NOT_ALLOWED.format(error=error)) from None
    return held


def _connect(held: list[int], relayed: bool, single: bool) -> None:
    """Join the simulated machines by a bridge, or leave their ports to a relay. ``single``: a packet is one frame."""
    # the relay finds the receiver of a frame by the last bytes of its MAC address
    hardware = [f"02:00:00:00:00:{machine + 1:02x}" for machine in range(len(held))]
    hub = [] if relayed else ["link add hub type bridge mcast_snooping 0", "link set hub addrgenmode none up"]
    for machine, mac in enumerate(hardware):
        far_end = f"peer name {DEVICE} address {mac} netns {_path(held[machine])}"
        hub.append(f"link add {port(machine)} type veth {far_end}")
        hub.append(f"link set {port(machine)} addrgenmode none up")
        if not relayed:
            hub.append(f"link set {port(machine)} master hub")
            hub.append(f"link set {port(machine)} type bridge_slave {QUIET}")
    batch(["ip"], hub, needs="veth and bridge")
    if not relayed:
        learnt = [f"fdb add {mac} dev {port(machine)} master static" for machine, mac in enumerate(hardware)]
        batch(["bridge"], learnt, needs="bridge")
    with open("/proc/self/ns/net") as hub_namespace:
        for machine, descriptor in enumerate(held):
            namespaces.enter(_path(descriptor))
            neighbours = [
                f"neighbour add {address(other)} lladdr {mac} dev {DEVICE} nud permanent"
                for other, mac in enumerate(hardware)
                if other != machine
            ]
            up = f"link set {DEVICE} addrgenmode none {'gso_max_segs 1 ' if single else ''}up"
            own = f"address add {address(machine)}/24 dev {DEVICE}"
            batch(["ip"], ["link set lo up", up, own, *neighbours], needs="veth")
        namespaces.enter(_path(hub_namespace.fileno()))


def _start_relay(folder: str, machines: int, delay_ms: float, loss: float) -> subprocess.Popen[str]:
    """Compile and start the relay, which carries frames between the hub's ports until this process ends; return it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unavailable("delay and loss need a C compiler: apt-get install gcc libc6-dev")
    program = f"{folder}/relay"
    done = subprocess.run([compiler, "-O2", "-o", program, str(RELAY)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{compiler} could not compile {RELAY.name}: {' '.join(done.stderr.split())[:300]}")
    command = [program, str(delay_ms * 1000), str(loss), *map(port, range(machines))]
    try:
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise Unavailable(f"the relay cannot run from {folder} ({error}): set TMPDIR to another folder") from None
    assert relay.stdout is not None
    if relay.stdout.readline() != "ready\n":
        raise Unavailable(f"the relay could not start: {relay.communicate()[1].strip()}")
    return relay


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
