"""Network namespaces without names: each lives as long as a process is in it or a descriptor holds it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

NEW_USER = 0x10000000
NEW_NET = 0x40000000
PARENT_DEATH_SIGNAL = 1  # of prctl
PATIENCE = 10.0
"""Seconds that a killed process may take to die."""

_libc = ctypes.CDLL(None, use_errno=True)


def become_capable() -> None:
    """Be able to make network namespaces: as root, or as the root of a user namespace of one's own.

    For a process of one thread only; raises OSError where the kernel allows neither.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", NEW_NET)
    except PermissionError:
        _call("unshare", NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def create() -> int:
    """Move to a new network namespace, whose interfaces do not announce themselves; return a descriptor of it."""
    _call("unshare", NEW_NET)
    with suppress(OSError):  # /proc/sys may be read-only, and then some 90 bytes of IPv6 are counted now and then
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(net: str, user: str = "/proc/self/ns/user") -> None:
    """Move to the network namespace at a path, and to its user namespace, unless this process is there.

    The latter for a process of one thread only, so soon after a fork.
    """
    with open(net) as where, open(user) as owner:
        if not os.path.samefile(user, "/proc/self/ns/user"):
            _call("setns", owner.fileno(), NEW_USER)
        _call("setns", where.fileno(), NEW_NET)


def die_with(parent: int) -> None:
    """From now on, be killed when the thread of ``parent`` that forked this process ends."""
    _call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def number(path: str) -> int:
    """Return what identifies the namespace at a path."""
    return os.stat(path).st_ino


def sweep(namespaces: Collection[int]) -> None:
    """Kill every process in network namespaces of these numbers but this one; raise if some do not die."""
    deadline = time.monotonic() + PATIENCE
    while alive := [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _kill(int(entry), namespaces)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {alive} were killed {PATIENCE:.0f} s ago and are still there")
        time.sleep(0.005)


def _kill(pid: int, namespaces: Collection[int]) -> bool:
    """Kill another process if it is in one of these network namespaces; return whether it was."""
    if pid == os.getpid():
        return False
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:  # the descriptor is what is looked at and killed: its number may be another process's by now
        if number(f"/proc/{pid}/ns/net") not in namespaces:
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    except OSError:  # it has ended, or is none of ours to look at
        return False
    finally:
        os.close(process)


def _call(function: str, *args: int) -> None:
    """Call the C library; raise OSError where that fails."""
    if getattr(_libc, function)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
