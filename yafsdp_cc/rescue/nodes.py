"""Nodes, whose ranks share a memory, and transfers of files from one node's memory to another's."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from yafsdp_cc.checkpoint.files import writing
from yafsdp_cc.checkpoint.ranks import TICK, Group, place_in, together
from yafsdp_cc.ranks.checks import all_gather_objects, named_ranks

_PART = 1 << 19
"""Bytes of one message between nodes: training may wait for it some milliseconds on a link of 1 Gbit/s."""
_TAG = 71
_PAUSE = 0.005
"""Seconds from a ``may_send`` that returned False to the next call."""
_LIBC = ctypes.CDLL(None)
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of ``linux/mman.h``."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Nodes:
    """The nodes of a run: ranks are on one node if they see the same ``folder``, which must exist. A collective."""

    def __init__(self, folder: Path, group: Group) -> None:
        boot = _BOOT.read_text().strip() if _BOOT.exists() else os.uname().nodename
        place = os.stat(folder)
        places = all_gather_objects((boot, place.st_dev, place.st_ino), group)
        names = list(dict.fromkeys(places))
        self.rank, _ = place_in(group)
        self.of = [names.index(each) for each in places]
        """For each rank, the index of its node in ``members``."""
        self.members = [[rank for rank, node in enumerate(self.of) if node == each] for each in range(len(names))]
        """For each node, its ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one of its node."""
        return self.members[self.of[self.rank]][0] == self.rank

    def buddy_of(self, rank: int) -> int | None:
        """Return the rank of the next node that keeps copies of ``rank``'s files; None if there is only one node."""
        if len(self.members) == 1:
            return None
        own, others = (self.members[(self.of[rank] + step) % len(self.members)] for step in (0, 1))
        return others[own.index(rank) % len(others)]


class LostError(ValueError):
    """Raised if a file of a snapshot is in no node's memory any more."""


class Transfer(NamedTuple):
    """A file that goes from one rank's memory to another's."""

    name: str
    size: int
    source: int
    target: int


def files_in(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each complete file in a folder, by name."""
    return {each.name: each.stat().st_size for each in folder.iterdir() if each.suffix != ".part"}


def fetch(names: Collection[str], folder: Path, nodes: Nodes, group: Group) -> list[Transfer]:
    """Bring files that ``folder`` lacks on this rank's node from other nodes; return the transfers of all ranks.

    A collective, which raises a ``LostError`` on every rank if no node has one of the files.
    """
    here = files_in(folder)
    missing = sorted(name for name in names if name not in here)
    found = all_gather_objects((here, missing), group)
    transfers: dict[tuple[str, int], Transfer] = {}
    for rank, (_, wanted) in enumerate(found):
        for name in wanted:
            source = next((other for other, (has, _) in enumerate(found) if name in has), None)
            if source is None:
                raise LostError(f"{folder.name}/{name} is in no node's memory any more")
            size = found[source][0][name]
            transfers.setdefault((name, nodes.of[rank]), Transfer(name, size, source, rank))
    ordered = list(transfers.values())
    transfer(ordered, folder, group)
    if ordered:
        all_gather_objects(None, group)  # wait for files that other ranks of this node receive
    return ordered


def copy_to_buddies(
    found: Sequence[dict[str, int]], folder: Path, nodes: Nodes, group: Group, may_send: Callable[[float], bool]
) -> None:
    """Copy each file that only one node has to the next node. A collective.

    ``found`` has, by name, the sizes in bytes of the complete files that each rank has in ``folder``.
    """
    if len(nodes.members) == 1:
        return
    copies: list[Transfer] = []
    for name in sorted({name for each in found for name in each}):
        sources = [rank for rank, each in enumerate(found) if name in each]
        source = sources[len(copies) % len(sources)]  # ranks of a node take turns to send
        buddy = nodes.buddy_of(source)
        if buddy is not None and {nodes.of[each] for each in sources} == {nodes.of[source]}:
            copies.append(Transfer(name, found[source][name], source, buddy))
    transfer(copies, folder, group, may_send)


def transfer(
    transfers: Sequence[Transfer], folder: Path, group: Group, may_send: Callable[[float], bool] = lambda _: True
) -> None:
    """Move files between the folders of several ranks, in parts. A collective.

    A file appears under its name when all of its bytes have arrived.

    Args:
        transfers: the same on all ranks, in the same order.
        folder: folder of this rank.
        may_send: returns whether to send a part now, given the fraction of this rank's bytes sent so far.

    Raises:
        RuntimeError: on every rank: the program of some rank ends while parts are left, and would wait for this thread.
    """
    rank, _ = place_in(group)
    sent = [each for each in transfers if each.source == rank]
    received = [each for each in transfers if each.target == rank]
    try:
        with together(group):  # allocate files first: writing to a mapped file in a full memory would kill the process
            try:
                with writing(folder, sum(each.size for each in received)):
                    for each in received:
                        unfinished = _part_of(folder, each)
                        with suppress(FileNotFoundError):  # overwrite the file of an earlier snapshot in place
                            (folder / each.name).rename(unfinished)
                        with unfinished.open("ab") as file:
                            file.truncate(each.size)
                            if each.size:
                                os.posix_fallocate(file.fileno(), 0, each.size)
            except OSError as error:  # ``Rescue.restore`` tries another snapshot after a ``ValueError``
                raise ValueError(str(error)) from error
    except ValueError:  # some rank has no room: another snapshot needs what was taken
        for each in received:
            _part_of(folder, each).unlink(missing_ok=True)
        raise
    # Issue all receives first: ranks that only received once their own message was taken could wait in a circle.
    parts = ((each.source, part) for each in received for part in _mapped(_part_of(folder, each), each.size))
    receives = [group[0].recv([part], source, _TAG) for source, part in parts]
    left = deque((each, offset) for each in sent for offset in range(0, each.size, _PART))
    total, gone = sum(each.size for each in sent), 0
    told = [(bool(transfers), True)]
    while any(is_left for is_left, _ in told):
        if ending := [rank for rank, (_, is_alive) in enumerate(told) if not is_alive]:
            raise RuntimeError(f"the program of {named_ranks(ending)} ended while files were copied to other nodes")
        tick = time.monotonic() + TICK
        while left and time.monotonic() < tick:
            if may_send(gone / total):
                each, offset = left.popleft()
                size = min(_PART, each.size - offset)
                part = np.fromfile(folder / each.name, np.uint8, size, offset=offset)  # mapping it would take longer
                group[0].send([torch.from_numpy(part)], each.target, _TAG).wait()
                gone += size
            else:
                time.sleep(_PAUSE)
        told = all_gather_objects((bool(left), threading.main_thread().is_alive()), group)
    for work in receives:
        work.wait()
    for each in received:
        os.replace(_part_of(folder, each), folder / each.name)


def _part_of(folder: Path, transfer: Transfer) -> Path:
    return folder / f"{transfer.name}.part"


def _mapped(file: Path, size: int) -> Sequence[Tensor]:
    """Return a file mapped into memory, as uint8 tensors of at most ``_PART`` bytes; writing to one writes the file."""
    if not size:
        return ()
    memory = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
    # The kernel maps all pages now, as a fault for each would take as long as a copy. Linux before 5.14 does not.
    _LIBC.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), _POPULATE_WRITE)
    parts: Sequence[Tensor] = memory.split(_PART)
    return parts
