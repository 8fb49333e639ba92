"""Prints what each rank does if training hangs, and which ranks others wait for, long before a time-out ends the run.

A thread of each rank checks whether its engines issue operations. A rank whose engines have issued none for half a
minute writes to the store where its main thread is: waiting for other ranks, or in a loader, say. When a rank has
waited for a minute, the lowest rank that still writes prints what all ranks have written.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.distributed_c10d import _get_default_store

from yafsdp_cc.ranks.checks import named_ranks, table_of_ranks
from yafsdp_cc.ranks.groups import timeout_of
from yafsdp_cc.sharding.status import describe

if TYPE_CHECKING:
    from types import FrameType

    from torch._C._distributed_c10d import Store

    from yafsdp_cc.engine.param_group import GroupContext

SECONDS = "YAFSDP_CC_WATCH"
"""Environment variable: seconds that a rank waits for others before all ranks' states are printed (60); 0: never."""
_OURS, _TORCH = (str(Path(file).parent) for file in (sys.modules["yafsdp_cc"].__file__ or "", torch.__file__))
_ENGINE = os.path.join(_OURS, "engine")
_NOT_THE_USERS = (_OURS, _TORCH, sysconfig.get_path("stdlib"), "<frozen")
_watches: list[_Watch] = []
"""The thread of this process that watches the engines of its default process group, if there are any."""


def watch(context: GroupContext) -> None:
    """Let this process's watch thread look for hangs of the engine of ``context`` as long as it exists."""
    try:
        seconds = float(os.environ.get(SECONDS) or 60)
    except ValueError:
        raise ValueError(f"{SECONDS}={os.environ[SECONDS]}: it takes a number of seconds, 0 for never") from None
    if not context.fingerprint.has_peers or seconds <= 0:
        return
    store = _get_default_store()
    found = next((each for each in _watches if each.of() is store and each.is_alive()), None)
    if found is None:
        _watches[:] = [found := _Watch(store, torch.distributed.get_rank(), seconds)]
        found.add(context)
        found.start()
    found.add(context)


os.register_at_fork(after_in_child=_watches.clear)  # the watch thread does not survive a fork


class _Seen(NamedTuple):
    """State of one rank's engines and main thread, which its watch thread writes to the store."""

    operations: int
    """Number of operations that the rank's engines have issued so far."""
    place: str
    """Name of the function in which the rank waits for other ranks; "" if it does not wait for any."""
    waited: float
    """Seconds that the rank has waited in ``place``."""
    text: str


class _Watch(threading.Thread):
    def __init__(self, store: Store, rank: int, seconds: float) -> None:
        super().__init__(name="yafsdp_cc.watch", daemon=True)
        # ``SimpleQueue``: the garbage collector may call ``put`` in this thread within ``get``, without a deadlock.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.of = weakref.ref(store, lambda _: self._wakes.put(None))
        self._engines: weakref.WeakSet[GroupContext] = weakref.WeakSet()
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # a wait on ``store`` blocks its connection
        self._rank, self._seconds = rank, seconds
        self._read: dict[int, tuple[bytes, float]] = {}
        """Each rank's last entry in the store, and the time, by this rank's clock, at which this rank first read it."""

    def add(self, context: GroupContext) -> None:
        """Look for hangs of the engine of ``context``, too, as long as the engine exists."""
        self._engines.add(context)
        weakref.finalize(context, self._wakes.put, None).atexit = False

    def run(self) -> None:
        """Look for hangs of the engines until all engines, or their process group, are gone."""
        with suppress(RuntimeError):
            self._look()

    def _look(self) -> None:
        count, is_written, tells_after = -1, False, self._seconds
        moved = waits = time.monotonic()
        place = ""
        while self.of() is not None and (engines := list(self._engines)):
            now, present = time.monotonic(), sum(each.fingerprint.count for each in engines)
            found = self._waits_in(engines)
            if (present, found) != (count, place):
                waits = now
            if present != count:
                moved, tells_after = now, self._seconds
                if is_written:
                    self._store.delete_key(_key(self._rank))
                    is_written = False
            count, place = present, found
            if now - moved >= self._seconds / 2:
                seen = _Seen(count, place, now - waits if place else 0, self._text(engines))
                self._store.set(_key(self._rank), json.dumps(seen))
                is_written = True
                ranks = sorted({rank for each in engines for rank in each.fingerprint.ranks})
                if now - moved >= tells_after and self._tell(ranks, engines):
                    tells_after = 2 * (now - moved)
            del engines
            with suppress(queue.Empty):
                self._wakes.get(timeout=self._seconds / 6)

    def _frames(self) -> Iterator[FrameType]:
        """Yield the main thread's frames, the innermost one first."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _waits_in(self, engines: Iterable[GroupContext]) -> str:
        """Return the name of the function in which this rank waits for other ranks; "" if it does not wait for any.

        The function is one of the engine, or else the one that the script has called: within one call, such as a large
        checkpoint, a rank may write its files while others wait for it.
        """
        found = ""
        for frame in self._frames():
            file = frame.f_code.co_filename
            if file.startswith(_ENGINE) and not found:
                return f"engine {frame.f_code.co_name}"
            if file.startswith((_OURS, os.path.join(_TORCH, "distributed"))):
                found = f"call {frame.f_code.co_name}"
            elif not file.startswith(_NOT_THE_USERS):
                break
        if found:
            return found
        # on a GPU the host may wait for collectives anywhere, also in threads of autograd
        return "engine operation" if any(each.is_communicating() for each in engines) else ""

    def _text(self, engines: Iterable[GroupContext]) -> str:
        """Return the innermost lines of the user's code that the main thread is in, and what the engines do."""
        frames = [each for each in self._frames() if not each.f_code.co_filename.startswith(_NOT_THE_USERS)][:3]
        lines = (f"{Path(each.f_code.co_filename).name}:{each.f_lineno} {each.f_code.co_name}" for each in frames)
        told = f"at {' < '.join(lines) or 'no line of a script'}"
        for each in engines:
            with suppress(Exception):  # the main thread may change what ``describe`` reads
                phases = describe(each).splitlines()[1:]  # skip the first line, on the calling thread
                told += "\n  ".join([f"; {each.fingerprint.told()}", *phases])
        return told

    def _tell(self, ranks: list[int], engines: list[GroupContext]) -> bool:
        """Print what all ranks do, on the lowest rank that still writes to the store; return whether it was printed."""
        seen: dict[int, _Seen] = {}
        for rank in ranks:
            if self._store.check([_key(rank)]):
                written, now = self._store.get(_key(rank)), time.monotonic()
                if self._read.get(rank, (b"", now))[0] != written:
                    self._read[rank] = written, now
                if now - self._read[rank][1] > self._seconds / 2:
                    continue  # no new entry for half of ``_seconds``: that rank has stopped
                if not seen and rank != self._rank:
                    return False
                seen[rank] = _Seen(*json.loads(written))
        waiting = [rank for rank, each in seen.items() if each.place]
        longest = max(each.waited for each in seen.values())
        if longest < self._seconds:
            return False
        others, silent = [rank for rank in seen if rank not in waiting], [rank for rank in ranks if rank not in seen]
        if others or silent:
            wait = f"wait{'s' * (len(waiting) == 1)}"
            why = f"{named_ranks(waiting)} {wait} for {named_ranks(sorted([*others, *silent]))}"
        elif len({each[:2] for each in seen.values()}) > 1:
            why = "the ranks wait in different operations"
        elif seen[waiting[0]].place.startswith("engine"):
            why = "all ranks wait in the same operation: the network is slow or broken, or one of them hangs in it"
        else:
            return False  # all ranks are in the same call, such as a save() that takes minutes
        timeout = timeout_of(engines[0].info.shard_group)
        until = "" if timeout is None else f" (the process group's time-out is {timeout.total_seconds():.0f} s)"
        told = [seen[rank].text if rank in seen else "no answer: stopped, or gone" for rank in ranks]
        text = f"yafsdp-cc: {why}, {longest:.0f} s so far{until}\n{table_of_ranks(told, ranks)}"
        print(text, file=sys.stderr, flush=True)
        return True


def _key(rank: int) -> str:
    return f"yafsdp_cc/watch/{rank}"
