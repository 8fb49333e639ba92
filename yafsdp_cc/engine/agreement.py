"""How ranks agree on a collective that they do not expect, before any of them issues it.

Two ranks that issue different collectives hang, end (gloo, where a message is too long) or mix up numbers. So one is
issued at once only where ranks expect it: it has come behind all since the last final reduce before, or behind the
eight before it the last time, or it goes on from unit to unit as those before it. Any other one waits until all ranks
have told the store that theirs is the same. All ranks expect alike, for they have agreed on all before: where some are
to issue what is expected and others are not, these do not meet, and all of them time out by name.
"""

from __future__ import annotations

import itertools
import re
import time
import zlib
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from torch.distributed.distributed_c10d import _get_default_store

from yafsdp_cc.engine.mesh import backend_of, exchange_over_store, is_python_group, timeout_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

    from yafsdp_cc.engine.param import FlatParam

Operation: TypeAlias = "tuple[str, str, tuple[bool, ...], tuple[float, ...]]"
"""What must be alike on all ranks: its kind, the name of its group; of a sum of gradients, which of the parameters
require one, and by what it is divided."""

_SHOWN = 6
"""Operations, and frozen parameters, of each rank that an error names."""
_KNOWN = 1 << 16
"""Paths and contexts that a rank keeps in mind: all ranks forget theirs at the same operation."""
_FEW, _PROMPT = 16, 0.003
"""So many ranks look for the verdict often, for so many seconds: some stores sleep between two looks."""
_AGREED, _DIFFERENT = "agreed", "different"


class Agreement:
    """What ranks have agreed on, and how they ask each other.

    Args:
        rank: among the ``ranks`` of the model.
        ranks: the numbers of these ranks among all.
        group: some or all of them; fake ranks, and those that Python plays, give no answers and are not asked.
        device: what the group communicates.
    """

    def __init__(self, rank: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> None:
        self._rank, self._world, self._store = rank, len(ranks), _get_default_store()
        self.has_peers = self._world > 1 and not is_python_group(group) and backend_of(group, device) != "fake"
        """Whether there is somebody to ask."""
        self._key = f"yafsdp_cc/fingerprint/{zlib.crc32(repr(list(ranks)).encode())}"
        if self.has_peers:
            self._store = self._store.clone()  # type: ignore[attr-defined]  # skip_together waits in that of all
            if (timeout := timeout_of(group)) is not None:
                self._store.set_timeout(timeout)
            self._key += f"/{self._store.add(f'{self._key}/times of {rank}', 1)}"  # all of these ranks count alike
        self.count = self.path = self.context = 0
        """How many operations there were; hashes of those since the last final reduce, and of the last eight."""
        self.hashes: dict[Operation, int] = {}
        self.followers: dict[int, int] = {}
        """Hashes of what has come behind paths and contexts the last time."""
        self.last: deque[Operation] = deque(maxlen=_SHOWN)
        self._questions = itertools.count()  # goes on also where a batch is rolled back
        self._answered = ""

    def hash(self, operation: Operation) -> int:
        """Return the operation's hash, the same on all ranks."""
        return self.hashes.setdefault(operation, zlib.crc32(repr(operation).encode()))

    def follow(self, operation: Operation, flats: Sequence[FlatParam]) -> None:
        """Ask all ranks unless they expect this operation, and expect it the next time."""
        usual = self.followers.get(self.path, self.followers.get(self.context))
        if not (self._goes_on(operation) if usual is None else usual == self.hash(operation)):
            self._ask(operation, flats)
        if len(self.followers) > _KNOWN:
            self.followers.clear()
        self.followers[self.path] = self.followers[self.context] = self.hash(operation)

    def _goes_on(self, operation: Operation) -> bool:
        """Return whether the last operations went on by a unit, perhaps in turns of two or three, and this one does."""
        for period in range(1, _SHOWN // 2 + 1):
            before = list(self.last)[-2 * period :: period]
            if len(before) == 2 and (step := _next_number(*before)) is not None:
                return _next_number(before[1], operation) == step
        return False

    def _ask(self, operation: Operation, flats: Sequence[FlatParam]) -> None:
        """Ask all ranks for their next operation: one number has how many have answered, and the sum of the hashes."""
        key = f"{self._key}/{next(self._questions)}"
        own = zlib.crc32(f"{self.hash(operation)} {self.path}".encode())
        try:
            answers = self._store.add(key, (1 << 48) + own)
            if answers >> 48 == self._world:
                verdict = _AGREED if answers & ((1 << 48) - 1) == self._world * own else _DIFFERENT
                self._store.set(f"{key}/over", verdict)
                self._forget(self._answered)
            else:
                until, pause = time.monotonic() + _PROMPT, 1e-4
                while self._world <= _FEW and time.monotonic() < until and not self._store.check([f"{key}/over"]):
                    time.sleep(pause)
                    pause *= 2
                verdict = self._store.get(f"{key}/over").decode()
        except RuntimeError as error:
            raise self.explain(error, self._described(operation, flats)) from error
        if verdict != _AGREED:
            differ = RuntimeError("ranks were about to issue different ones")
            raise self.explain(differ, self._described(operation, flats))
        self._answered = key

    def _forget(self, key: str) -> None:
        """Remove what ranks have agreed on: all of them have read it, for they have answered the next question."""
        with suppress(RuntimeError):  # not all stores can
            for each in (key, f"{key}/over") if key else ():
                self._store.delete_key(each)

    def _described(self, operation: Operation, flats: Sequence[FlatParam]) -> str:
        frozen = [p.spec.name for flat in flats for p in flat.params if not p.parameter.requires_grad]
        factors = sorted(set(operation[3]) - {self._world})
        return (
            f"; next: {operation[0]} {operation[1]}"
            + (f" without {', '.join(frozen[:_SHOWN])}, frozen ({len(frozen)} in all)" if frozen else "")
            + (f", divided by {factors}" if factors else "")
        )

    def explain(self, error: RuntimeError, following: str = "") -> RuntimeError:
        """Return the failure of a collective, with what the other ranks were doing, and this one was about to do."""
        last = ", ".join(" ".join(each[:2]) for each in self.last)
        mine = f"{self.count} operations, the last: {last}{following}"
        reason, table = exchange_over_store(self._store, f"{self._key}/last", self._rank, self._world, mine)
        return RuntimeError(
            f"an operation failed: {reason}: the same forwards and backwards, requires_grad and "
            "set_requires_gradient_sync (parameters inside a unit may go unused).\n"
            f"What ranks did last:\n{table}\n{error}"
        )


def _next_number(before: Operation, after: Operation) -> tuple[int, int] | None:
    """Return which number in the group's name has changed, and by how much, if nothing else has."""
    old, new = re.split(r"(\d+)", before[1]), re.split(r"(\d+)", after[1])
    places = [place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other]
    is_like = before[0] == after[0] and before[2:] == after[2:] and len(old) == len(new)
    if not is_like or len(places) != 1 or places[0] % 2 == 0:
        return None
    return places[0], int(new[places[0]]) - int(old[places[0]])
