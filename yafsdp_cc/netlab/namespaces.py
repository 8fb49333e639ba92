"""Network namespaces without names: each lives as long as a process is in it or a descriptor holds it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

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
        _unshare(NEW_NET)
    except PermissionError:
        _unshare(NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def create() -> int:
    """Move to a new network namespace; a descriptor that holds it."""
    _unshare(NEW_NET)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(net: str | int, user: str = "") -> None:
    """Move to the network namespace at a path or descriptor; first to its user namespace, unless one is there.

    The latter for a process of one thread only, so soon after a fork.
    """
    with _Opened(net) as where:
        if user and not os.path.samefile(user, "/proc/self/ns/user"):
            with _Opened(user) as owner:
                _checked(_libc.setns(owner, NEW_USER))
        _checked(_libc.setns(where, NEW_NET))


def die_with(parent: int) -> None:
    """From now on, be killed when the thread of ``parent`` that forked this process ends."""
    _checked(_libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def number(path: str | int) -> int:
    """Return what identifies the namespace at a path or descriptor."""
    return os.stat(path).st_ino


def sweep(namespaces: Collection[int]) -> None:
    """Kill every process in network namespaces of these numbers but this one; raises if some do not die."""
    deadline = time.monotonic() + PATIENCE
    while alive := list(_kill(namespaces)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {alive} were killed {PATIENCE:.0f} s ago and are still there")
        time.sleep(0.005)


def _kill(namespaces: Collection[int]) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            process = os.pidfd_open(int(entry))
        except OSError:
            continue
        try:  # the descriptor is what is looked at and killed: its number may be another process's by now
            if number(f"/proc/{entry}/ns/net") in namespaces:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                yield int(entry)
        except OSError:  # it has ended, or is none of ours to look at
            continue
        finally:
            os.close(process)


class _Opened:
    """A descriptor of a path, closed afterwards; one that is given is left open."""

    def __init__(self, where: str | int) -> None:
        self._is_ours = isinstance(where, str)
        self._descriptor = os.open(where, os.O_RDONLY) if isinstance(where, str) else where

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            os.close(self._descriptor)


def _unshare(what: int) -> None:
    _checked(_libc.unshare(what))


def _checked(status: int) -> None:
    if status != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
