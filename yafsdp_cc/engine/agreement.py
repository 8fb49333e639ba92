"""Ranks agree on a collective that they do not expect before any of them issues it.

Ranks that issue different collectives hang, abort (gloo, where a message is longer than the buffer for it) or mix up
numbers. A rank expects an operation in three cases: the same operation has followed the same operations since the last
final reduce; it has followed the same eight operations the last time; it is a recent one with the next unit's number,
as "gather blocks.5" behind "gather blocks.4". A rank issues an expected operation at once. Before any other one it
waits until all ranks have told the store that they are about to issue the same. All ranks expect alike, because they
have agreed on every earlier operation. If only some of the ranks are about to issue what is expected, the others wait
in the store, and all time out with an error that says which operation each was about to issue.
"""

from __future__ import annotations

import itertools
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from torch.distributed.distributed_c10d import _get_default_store

from yafsdp_cc.engine.step_state import StepState, history
from yafsdp_cc.ranks.checks import exchange_over_store, named_ranks
from yafsdp_cc.ranks.groups import backend_of, is_python_group, timeout_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.streams import CommHandle

Operation: TypeAlias = "tuple[str, str, tuple[bool, ...], tuple[float, ...]]"
"""Description of a collective, alike on all ranks: its kind, the name of the parameter group, whether each parameter of
the group requires the gradient that the collective sums, and the divisor of each sum."""
Describe: TypeAlias = "Callable[[CommHandle | None], str]"
"""Function that returns, as text, what this rank is doing and for which operation (the argument) it waits."""

_SHOWN = 6
"""Largest number of operations, and of frozen parameters, that an error message names for each rank."""
_KNOWN = 1 << 16
"""Largest number of entries of ``Agreement.followers``; all ranks clear it at the same operation."""
_AGREED, _DIFFERENT = "agreed", "different"


class Agreement(StepState):
    """Operations that ranks have agreed on, and the questions that they ask each other over the store.

    Args:
        rank: index of this rank among ``ranks``.
        ranks: global ranks of the model.
        group: process group of some or all of ``ranks``; if it is fake or written in Python, ranks compare nothing.
        device: device of the tensors that the group communicates.
    """

    count: int = history(0)
    """Number of operations (collectives and recorded decisions) of this rank so far."""
    path: int = history(0)
    """Hash of this rank's operations since the last ``FINAL_REDUCE``."""
    context: int = history(0)
    """Hash of this rank's last eight operations."""
    hashes: dict[Operation, int] = history(dict)
    followers: dict[int, int] = history(dict)
    """Hash of the operation that last followed each ``path`` and each ``context``, which are hashes, too."""
    last: deque[Operation] = history(partial(deque, maxlen=_SHOWN))

    def __init__(self, rank: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> None:
        self._rank, self.ranks, self._world, self._store = rank, list(ranks), len(ranks), _get_default_store()
        self.has_peers = self._world > 1 and not is_python_group(group) and backend_of(group, device) != "fake"
        """Whether this rank has other ranks to compare operations with over the store."""
        self._key = f"yafsdp_cc/fingerprint/{zlib.crc32(repr(list(ranks)).encode())}"
        if self.has_peers:
            # The clone has its own connection to the store: ``skip_together`` blocks the connection of the original.
            self._store = self._store.clone()  # type: ignore[attr-defined]
            if (timeout := timeout_of(group)) is not None:
                self._store.set_timeout(timeout)
            # All ranks make their ``Agreement`` objects in the same order: each object has the same number on all.
            self._key += f"/{self._store.add(f'{self._key}/times of {rank}', 1)}"
        self._questions = itertools.count()  # no ``history`` member: skipped batches would make it reuse store keys
        self._answered = ""

    def hash(self, operation: Operation) -> int:
        """Return the operation's hash, the same on all ranks."""
        return self.hashes.setdefault(operation, zlib.crc32(repr(operation).encode()))

    def follow(self, operation: Operation, flats: Sequence[FlatParam], describe: Describe) -> None:
        """Compare ``operation`` with what all ranks are about to issue, unless this rank expects ``operation``."""
        usual = self.followers.get(self.path, self.followers.get(self.context))
        if not (self._goes_on(operation) if usual is None else usual == self.hash(operation)):
            self.ask(operation, flats, describe)
        if len(self.followers) > _KNOWN:
            self.followers.clear()
        self.followers[self.path] = self.followers[self.context] = self.hash(operation)

    def _goes_on(self, operation: Operation) -> bool:
        """Return whether ``operation`` continues a series like "gather 1", "gather 2"; up to three may alternate."""
        for period in range(1, _SHOWN // 2 + 1):
            before = list(self.last)[-2 * period :: period]
            if len(before) == 2 and (step := _next_number(*before)) is not None:
                return _next_number(before[1], operation) == step
        return False

    def ask(self, operation: Operation, flats: Sequence[FlatParam], describe: Describe) -> None:
        """Compare the next operations of all ranks: a number in the store counts the ranks and adds up their hashes."""
        key = f"{self._key}/{next(self._questions)}"
        own = zlib.crc32(f"{self.hash(operation)} {self.path}".encode())
        try:
            answers = self._store.add(key, (1 << 48) + own)
            if answers >> 48 == self._world:
                verdict = _AGREED if answers & ((1 << 48) - 1) == self._world * own else _DIFFERENT
                self._store.set(f"{key}/over", verdict)
                self._forget(self._answered)
            else:
                verdict = wait_for_key(self._store, f"{key}/over", self._world)
        except RuntimeError as error:
            raise self.explain(error, describe(None), self._described(operation, flats)) from error
        if verdict != _AGREED:
            differ = RuntimeError("ranks were about to issue different ones")
            raise self.explain(differ, describe(None), self._described(operation, flats))
        self._answered = key

    def _forget(self, key: str) -> None:
        """Remove the question ``key`` and its verdict from the store: ranks that answer a later one have read it."""
        with suppress(RuntimeError):  # some stores cannot remove keys
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

    def told(self) -> str:
        """Return in words how many operations this rank has issued, and the last of them."""
        return f"{self.count} operations, the last: {', '.join(' '.join(each[:2]) for each in list(self.last))}"

    def explain(self, error: RuntimeError, doing: str, following: str = "") -> RuntimeError:
        """Return an error with the text of ``error``, about a collective, and what each rank was doing. ``doing`` are
        lines about this rank, ``following`` names the operation that this rank was about to issue."""
        mine = f"{self.told()}{following}"
        if doing:
            mine += "\n    " + doing.replace("\n", "\n    ")
        silent, table = exchange_over_store(self._store, f"{self._key}/last", self._rank, self.ranks, mine)
        reason = "every rank must issue the same operations in the same order"
        if silent:
            reason = (
                f"no answer from {named_ranks(silent)}, which ended or hangs: see its own output. A rank with fewer "
                "batches than the others needs yafsdp_cc.uneven(model); a forward, evaluation's too, must not stand "
                "under `if rank == 0`"
            )
        return RuntimeError(
            f"an operation failed: {reason}. Run the same forwards and backwards, freeze the same parameters and call "
            "set_requires_gradient_sync alike (parameters inside a unit may go unused).\n"
            f"What ranks did last:\n{table}\n{error}"
        )


def _next_number(before: Operation, after: Operation) -> tuple[int, int] | None:
    """Return the place of the only number by which the names of two groups differ, and the difference; else None."""
    old, new = re.split(r"(\d+)", before[1]), re.split(r"(\d+)", after[1])
    places = [place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other]
    is_like = before[0] == after[0] and before[2:] == after[2:] and len(old) == len(new)
    if not is_like or len(places) != 1 or places[0] % 2 == 0:
        return None
    return places[0], int(new[places[0]]) - int(old[places[0]])


def wait_for_key(store: Store, key: str, world: int) -> str:
    """Wait until one of the ``world`` ranks has set ``key`` in the store; return the value.

    ``Store.wait`` would hold back Ctrl-C, so this function polls. The pauses grow with the time waited, so that the
    last one adds a tenth of that time at most, and with the number of ranks, which all poll.

    Raises:
        RuntimeError: no rank has set ``key`` within the store's timeout.
    """
    started, timeout = time.monotonic(), store.timeout.total_seconds()  # type: ignore[attr-defined]
    while not store.check([key]):
        waited = time.monotonic() - started
        if waited > timeout:
            raise RuntimeError(f"no rank has answered within {timeout:g} seconds")
        time.sleep(min(max(waited / 10, 1e-5 * world, 1e-4), 1))
    return store.get(key).decode()
