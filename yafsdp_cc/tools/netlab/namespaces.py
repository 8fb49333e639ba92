"""Network namespaces without names: each lives as long as a process is in it or a descriptor holds it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

NEW_USER = 0x10000000
NEW_NET = 0x40000000
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
PATIENCE = 10.0
"""Seconds that a killed process may take to die."""

_libc = ctypes.CDLL(None, use_errno=True)


def become_capable() -> None:
    """Gain the right to make network namespaces: as root, or as the root of a new user namespace.

    Call ``become_capable`` only in a process of one thread; it raises OSError if the kernel allows neither way.
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
    with suppress(OSError):  # /proc/sys is read-only: IPv6 then sends some 90 bytes now and then
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(net: str, user: str = "/proc/self/ns/user") -> None:
    """Move to the network namespace at ``net``, and to the user namespace at ``user`` unless this process is in that.

    Entering a user namespace works only in a process of one thread, so call it soon after a fork.
    """
    with open(net) as where, open(user) as owner:
        if not os.path.samefile(user, "/proc/self/ns/user"):
            _call("setns", owner.fileno(), NEW_USER)
        _call("setns", where.fileno(), NEW_NET)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of ``parent`` that forked it ends."""
    _call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def number(path: str) -> int:
    """Return the number that identifies the namespace at a path."""
    return os.stat(path).st_ino


def sweep(namespaces: Collection[int]) -> None:
    """Kill every other process in the network namespaces with these numbers; raise TimeoutError if some do not die."""
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
    try:  # check and kill by descriptor: the process's number may belong to another one by now
        if number(f"/proc/{pid}/ns/net") not in namespaces:
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    except OSError:  # the process has ended, or belongs to another user
        return False
    finally:
        os.close(process)


def _call(function: str, *args: int) -> None:
    """Call a function of the C library; raise OSError if it fails."""
    if getattr(_libc, function)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
