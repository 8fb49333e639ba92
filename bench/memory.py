"""Peak memory of a few steps, in a process of their own.

*Resident* is the kernel's own peak (VmHWM, reset once the model is wrapped): what a user sees, with what the C
allocator keeps and cannot give back. *Live* is what malloc has handed out and not got back, in all threads, looked
at every millisecond. (The profiler's live bytes are no use here: it does not see what the threads of gloo free, so
an engine whose buffers they hold last would seem to leak.) Both are above what the process had before the model.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LOOK_EVERY = 1e-3
_libc = ctypes.CDLL(None)


def measure_memory(make: Callable[[], Any], steps: int) -> dict[str, int]:
    """Return bytes at the peaks of making a ``Training`` and of its steps, and after them."""
    _give_back()
    resident, live = _status("VmRSS"), _live()
    with _peak() as wrapping:
        training = make()
    _give_back()
    Path("/proc/self/clear_refs").write_text("5")
    with _peak() as stepping:
        for _ in range(steps):
            training.step()
    peak_resident = _status("VmHWM")
    _give_back()
    return {
        "peak_resident": peak_resident - resident,
        "peak_live": max(stepping) - live,
        "peak_wrapping": max(wrapping) - live,
        "live_after": _live() - live,
        "resident_after": _status("VmRSS") - resident,
        **training.bytes_owned(),
    }


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Collect the live bytes that another thread sees meanwhile."""
    seen, over = [_live()], threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_EVERY):
            seen[:] = [max(seen[0], _live())]

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield seen
    over.set()
    thread.join()


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _live() -> int:
    """Return the bytes that malloc has handed out, in all of its arenas and in mappings of their own."""
    _libc.mallinfo2.restype = _Mallinfo
    now = _libc.mallinfo2()
    return int(now.uordblks + now.hblkhd)


def _status(field: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def _give_back() -> None:
    """Return what is free to the system."""
    gc.collect()
    _libc.malloc_trim(0)
