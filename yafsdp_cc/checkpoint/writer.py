"""Writes the files of a checkpoint in torch's format, with checksums that torch's own reader ignores."""

from __future__ import annotations

import io
import os
import pickle
import secrets
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from yafsdp_cc.checkpoint import files
from yafsdp_cc.checkpoint.reader import CRC, EXTRA_SUMS

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan


class CheckpointWriter(DefaultSavePlanner):
    """Writes tensors and a table of contents to a folder; every entry, the extra files and the table get a checksum.

        writer.agree(state, process_group=group)           on every rank, a collective
        numbers = writer.write(folder, state)              on every rank
        content = writer.table(numbers_of_ranks, sums)     on the first rank

    The writer plans as torch does, but for plain tensors, such as buffers and ignored parameters: the first rank alone
    writes them, so that all of them are one rank's, where torch divides them among ranks, whose values may differ.
    Checksums are computed from memory, so that any damage of the files is noticed when they are read.

    Args:
        paths: for each name in the states to write, its path in the nested state.
        dedup_save_to_lowest_rank: whether the lowest rank writes all that several ranks have, or they divide it.
    """

    is_agreed = False
    """Whether ranks have agreed on what each of them writes."""
    total: int
    """Number of bytes of all ranks' tensors, on the first rank."""
    _entries: Sequence[Sequence[MetadataIndex]]
    """Names of the entries of each rank's file, on the first rank."""

    def __init__(self, paths: dict[str, tuple[Any, ...]], *, dedup_save_to_lowest_rank: bool = False) -> None:
        super().__init__(False, False, dedup_save_to_lowest_rank=dedup_save_to_lowest_rank)
        self.paths = paths

    def agree(
        self, state: dict[str, Any], *, process_group: dist.ProcessGroup | None = None, no_dist: bool = False
    ) -> None:
        """Agree with all ranks on the entries that each of them writes of ``state``. A collective."""
        ranks, self.is_agreed = _DistWrapper(process_group, not no_dist, 0), False

        def own_plan() -> SavePlan:
            self.set_up_planner(state, is_coordinator=ranks.is_coordinator)
            return self.create_local_plan()

        self.plan = ranks.reduce_scatter("plan", own_plan, lambda plans: self.create_global_plan(plans)[0])
        self._file, self._size, self.is_agreed = part_name(ranks.rank), _bytes(self.plan), True

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if not self.is_coordinator:
            items = [each for each in plan.items if isinstance(self.state_dict[each.index.fqn], DTensor)]
            plan = replace(plan, items=items)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        del self.global_plan  # it is large with many ranks
        self.metadata = replace(metadata, planner_data=self.paths)
        self.total = sum(map(_bytes, plans))
        self._entries = [[each.index for each in plan.items] for plan in plans]
        return plans, self.metadata

    def write(self, folder: Path, state: dict[str, Any]) -> bytes:
        """Write the entries of this rank to its file, and return the length and the CRC-32 of each as 64-bit integers.

        A file that exists is overwritten in place: its memory need not be freed, found and zeroed, which takes longer
        than writing. Of a file that was longer, the old end remains; no table of contents refers to it.

        Args:
            folder: folder to write to.
            state: values by name, whose tensors have the shapes and dtypes of those of ``agree``.
        """
        self.state_dict = state
        file, numbers = folder / self._file, array("Q")
        mode = "r+b" if file.exists() else "wb"
        with files.writing(folder, self._size), file.open(mode) as stream:
            for item in self.plan.items:
                parts, crc = _saved(self.resolve_data(item))
                numbers += array("Q", (sum(map(stream.write, parts)), crc))
            stream.flush()
            os.fsync(stream.fileno())
        return numbers.tobytes()

    def table(self, numbers: Sequence[bytes], extra_sums: Sequence[int]) -> bytes:
        """Return the content of the table of contents on the first rank, and nothing on others.

        Args:
            numbers: what ``write`` has returned on each rank.
            extra_sums: the CRC-32 of each rank's extra file.
        """
        if not self.is_coordinator:
            return b""
        places: dict[MetadataIndex, _StorageInfo] = {}
        for rank, (names, of_rank) in enumerate(zip(self._entries, numbers, strict=True)):
            offset, found = 0, array("Q", of_rank)
            for index, length, crc in zip(names, found[::2], found[1::2], strict=True):
                places[index] = place = _StorageInfo(part_name(rank), offset, length)
                vars(place)[CRC] = crc
                offset += length
        meta = StorageMeta(save_id=secrets.token_hex(16))
        vars(meta)[EXTRA_SUMS] = list(extra_sums)
        contents = replace(self.metadata, version=CURRENT_DCP_VERSION, storage_data=places, storage_meta=meta)
        return files.sealed(pickle.dumps(contents))


# The bytes of an entry -----------------------------------------------------------------------------------------------


def _saved(data: Tensor | io.BytesIO) -> tuple[Sequence[bytes | memoryview], int]:
    """Return an entry in parts, and its CRC-32: what ``torch.save`` writes for a tensor, or has written for an object.

    The elements of a tensor are read once, for one checksum: the archive needs it, and the whole's follows from it.
    """
    if isinstance(data, Tensor):
        data = data.detach().cpu().resolve_conj().resolve_neg()
    if type(data) is Tensor:
        elements = data.contiguous().as_strided((data.numel(),), (1,)).view(torch.uint8).numpy().data
        archive = _archive(data.dtype, data.shape, torch.serialization.get_crc32_options())
        crc = zlib.crc32(elements)
        tail = _to_bytes(crc).join(archive.tail)
        return (archive.head, elements, tail), zlib.crc32(tail, crc ^ archive.of_head)
    if isinstance(data, Tensor):  # a subclass pickles parts of its own
        torch.save(data.clone(), stream := io.BytesIO())
        data = stream
    return (data.getbuffer(),), zlib.crc32(data.getbuffer())


class _Archive(NamedTuple):
    """``torch.save`` writes ``head`` before the elements of a tensor, and ``tail`` behind them.

    ``tail`` is cut where it has the CRC-32 of the elements. ``of_head`` is the exclusive or of the CRC-32 of the
    elements behind ``head`` and of that of the elements alone, the same for all elements, as CRC-32 is linear.
    """

    head: bytes
    tail: list[bytes]
    of_head: int


@lru_cache(maxsize=4096)
def _archive(dtype: torch.dtype, shape: torch.Size, has_sums: bool) -> _Archive:
    zeros = np.zeros(shape.numel() * dtype.itemsize, np.uint8)  # NumPy's zeros take no memory while they are only read
    stream, crc = _AroundElements(zeros.nbytes), zlib.crc32(zeros.data)
    torch.save(torch.from_numpy(zeros).as_strided(zeros.shape, (1,)).view(dtype).view(shape), cast("IO[bytes]", stream))
    head, tail = bytes(stream.head), bytes(stream.tail)
    cut = tail.split(_to_bytes(crc)) if has_sums else [tail]
    return _Archive(head, cut, zlib.crc32(zeros.data, zlib.crc32(head)) ^ crc)


class _AroundElements(io.RawIOBase):
    """A stream that keeps what ``torch.save`` writes before and behind a tensor's ``size`` bytes, and forgets those."""

    _NAME = b"archive/data/0"

    def __init__(self, size: int) -> None:
        self._left, self.head, self.tail = size, bytearray(), bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")
        at, begin = self.head.find(self._NAME), -1
        if at >= 0:  # two bytes before the name are the length of the fields behind it, which the elements follow
            begin = at + len(self._NAME) + int.from_bytes(self.head[at - 2 : at], "little")
        if len(self.head) != begin:
            self.head += piece
        else:
            forgotten = min(self._left, piece.nbytes)
            self._left -= forgotten
            self.tail += piece[forgotten:]
        return piece.nbytes


def _to_bytes(crc: int) -> bytes:
    return crc.to_bytes(4, "little")


def size_of_part(numbers: bytes) -> int:
    """Return the size in bytes of a rank's file, of which ``CheckpointWriter.write`` has returned ``numbers``."""
    return sum(array("Q", numbers)[::2])


def part_name(rank: int) -> str:
    """Return the name of the file that has a rank's tensors."""
    return f"__{rank}_0.distcp"


def _bytes(plan: SavePlan) -> int:
    return sum(item.tensor_storage_size() or 0 for item in plan.items)
