"""Makes the namespaces and what joins them, from inside the process that keeps them."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from yafsdp_cc.netlab import interfaces, namespaces
from yafsdp_cc.netlab.errors import Unavailable

NOT_ALLOWED = (
    "network namespaces are not allowed here ({error}): run as root (containers: --cap-add SYS_ADMIN,NET_ADMIN), or "
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0)"
)


def look_for_programs() -> None:
    """Raise ``Unavailable`` if one is missing."""
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            raise Unavailable(f"no program {program!r}: apt-get install {package}")


def namespaces_of(ranks: int) -> list[int]:
    """A descriptor of each rank's namespace; the caller is left in one more, the hub."""
    try:
        namespaces.become_capable()
        held = [_silent() for _ in range(ranks)]
        os.close(_silent())
    except OSError as error:
        raise Unavailable(NOT_ALLOWED.format(error=error)) from None
    return held


def connect(ranks: list[int], bridge: bool, single: bool) -> None:
    """Join the ranks' namespaces; without a bridge, the relay takes the ports. ``single``: see ``interfaces``."""
    _batch("ip", interfaces.hub([f"/proc/{os.getpid()}/fd/{held}" for held in ranks], bridge))
    if bridge:
        _batch("bridge", interfaces.forwarding(len(ranks)))
    with open("/proc/self/ns/net") as hub:
        for rank, held in enumerate(ranks):
            namespaces.enter(held)
            _batch("ip", interfaces.station(rank, len(ranks), single))
        namespaces.enter(hub.fileno())


def _silent() -> int:
    """A namespace whose interfaces do not announce themselves by IPv6."""
    held = namespaces.create()
    with suppress(OSError):  # /proc/sys may be read-only, and then some 90 bytes are counted now and then
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    return held


def _batch(program: str, lines: list[str]) -> None:
    done = subprocess.run([program, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{program} refused: {' '.join(done.stderr.split())}; the kernel needs veth and bridge")
