"""What this rank has issued, in order: to tell ranks that run different programs from ranks that are merely late."""

from __future__ import annotations

import itertools
import time
import zlib
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from yafsdp_cc.compression_autotune import CodecAutotuner
    from yafsdp_cc.engine.lanes import Ticket

_FACTOR, _MASK = 1_000_003, (1 << 61) - 1
_DIGITS = 5
_BASE = 64
_PATIENCE, _GLANCE = 5.0, 0.05
"""Seconds that all ranks together have to answer, and that each has at least."""
_ids = itertools.count()


class Note(NamedTuple):
    """One kind of operation on one unit: its name, and a number for the fingerprint. Made once."""

    text: str
    code: int

    @classmethod
    def of(cls, kind: str, name: str) -> Note:
        text = f"{kind} {name}"
        return cls(text, zlib.crc32(text.encode()))


class Journal:
    """A running fingerprint of the issued collectives, and the last of them by name.

    The fingerprint crosses ranks as ``sums``: five digits below 64 and their squares, whose sums over ranks are exact
    in fp32 up to 4,096 ranks. All ranks agree on a digit if and only if N·Σd² = (Σd)².
    """

    def __init__(self, rank: int, world: int, store: Store, first: int) -> None:
        """``first`` is the first of the ``world`` ranks among all."""
        self._rank = rank
        self._world = world
        self._store = store
        self._key = f"yafsdp_cc/journal/{first}/{next(_ids)}"
        self._count = 0
        self._hash = 0
        self._last: deque[str] = deque(maxlen=64)
        self.observer: CodecAutotuner | None = None
        """Told before and after each wait."""

    def write(self, note: Note) -> None:
        """Note one operation."""
        self._hash = (self._hash * _FACTOR + note.code) & _MASK
        self._count += 1
        self._last.append(note.text)

    @staticmethod
    def width() -> int:
        """How many numbers ``sums`` gives."""
        return 2 * _DIGITS

    def sums(self) -> list[float]:
        """The fingerprint as numbers to be summed over ranks."""
        digits = [float((self._hash >> 31) // _BASE**place % _BASE) for place in range(_DIGITS)]
        return digits + [digit * digit for digit in digits]

    def check(self, totals: list[float]) -> None:
        """Raise where ``sums``, summed over ranks, tell that ranks have issued different collectives."""
        pairs = zip(totals[:_DIGITS], totals[_DIGITS:], strict=True)
        if any(self._world * squares != total * total for total, squares in pairs):
            raise RuntimeError(
                "ranks ran units in different orders, so their gradients are worthless; every rank must run the same "
                f"forward (parameters inside a unit may go unused)\n{self._compare()}"
            )

    def wait(self, ticket: Ticket) -> None:
        """Wait, and where that fails say what the other ranks were doing."""
        if self.observer is not None:
            self.observer.before_wait()
        try:
            ticket.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}\nEvery rank must issue the same operations in the same order; what they did last:\n"
                f"{self._compare()}"
            ) from error
        if self.observer is not None:
            self.observer.after_wait()

    def _compare(self) -> str:
        """What the ranks did last, side by side, as far as they answer."""
        self._store.set(
            f"{self._key}/{self._rank}", f"{self._count} operations, the last: {', '.join(list(self._last)[-6:])}"
        )
        lines, until = [], time.monotonic() + _PATIENCE
        for rank in range(self._world):
            try:
                left = max(until - time.monotonic(), _GLANCE)
                self._store.wait([f"{self._key}/{rank}"], timedelta(seconds=left))
                said = self._store.get(f"{self._key}/{rank}").decode()
            except (RuntimeError, ValueError):
                said = "no answer"
            lines.append(f"  rank {rank}: {said}")
        return "\n".join(lines)
