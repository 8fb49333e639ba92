"""Peak memory of a few steps, each contestant in fresh ranks.

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
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contestants import bytes_owned
from bench.training import Training

if TYPE_CHECKING:
    from types import TracebackType

    from bench.contestants import Contestant
    from bench.models import Spec

LOOK_EVERY = 1e-3
_libc = ctypes.CDLL(None)


def memory(contestant: Contestant, spec: Spec) -> dict[str, int]:
    """On one rank: bytes at the peak of wrapping and of the steps, and after them, above those before the model."""
    _give_back()
    resident, live = _status("VmRSS"), _live()
    with Peak() as wrapping:
        training = Training(contestant, spec)
    _give_back()
    wrapped = _live()
    Path("/proc/self/clear_refs").write_text("5")
    with Peak() as stepping:
        for _ in range(spec.steps):
            training.step()
    peak_resident = _status("VmHWM")
    _give_back()
    return {
        "peak_resident": peak_resident - resident,
        "peak_live": stepping.bytes - live,
        "peak_wrapping": wrapping.bytes - live,
        "live_wrapped": wrapped - live,
        "live_after": _live() - live,
        "resident_after": _status("VmRSS") - resident,
        "optimizer_state": training.optimizer_bytes(),
        **(bytes_owned(training.model) if contestant.is_ours else {}),
    }


class Peak:
    """The most live bytes that a thread of its own sees while the context lasts."""

    def __enter__(self) -> Peak:
        self.bytes = _live()
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            self.bytes = max(self.bytes, _live())
            self.looks += 1


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
    """Bytes malloc has handed out, in all of its arenas and in mappings of their own."""
    _libc.mallinfo2.restype = _Mallinfo
    now = _libc.mallinfo2()
    return int(now.uordblks + now.hblkhd)


def _status(field: str) -> int:
    """Bytes in a line of /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def _give_back() -> None:
    """Return what is free to the system."""
    gc.collect()
    _libc.malloc_trim(0)
