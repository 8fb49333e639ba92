"""Writes the files of a checkpoint in torch's format, with checksums that torch's own reader ignores."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from array import array
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from yafsdp_cc.checkpoint import files
from yafsdp_cc.checkpoint.ranks import together
from yafsdp_cc.checkpoint.reader import CRC, EXTRA_SUMS

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from yafsdp_cc.checkpoint.files import Beside
    from yafsdp_cc.checkpoint.ranks import Group


class CheckpointWriter(FileSystemWriter):
    """torch's writer of a folder; every entry, the extra files and the table of contents get a checksum.

    Checksums are computed from memory, so that any damage of the files is noticed when they are read. The caller writes
    the table of contents last, as it makes the checkpoint complete.

    Args:
        folder: folder to write to.
        extra_sums: the CRC-32 of each rank's extra file, in rank order.
        is_shared: whether all ranks write to one file system, which must have room for all their tensors.
        beside: returns the context in which this rank writes its part.
    """

    _contents: Metadata | None = None
    _written: Iterable[Sequence[WriteResult]] = ()

    def __init__(
        self, folder: Path, extra_sums: Sequence[int], *, is_shared: bool, beside: Beside = nullcontext
    ) -> None:
        super().__init__(folder)
        self._extra_sums, self._is_shared, self._beside = list(extra_sums), is_shared, beside

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._is_shared:
            files.check_space(Path(self.path), sum(map(_bytes, plans)))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(_results(_part_of(plan), [item.index for item in plan.items], self._write(plan, planner)))
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> array[int]:
        """Write the planned entries to this rank's file, and return the length and the CRC-32 of each of them.

        A file that exists is overwritten in place: its memory need not be freed, found and zeroed, which takes longer
        than writing. Of a file that was longer, the old end remains; no table of contents refers to it.
        """
        file, numbers = Path(self.path) / _part_of(plan), array("Q")
        mode = "r+b" if file.exists() else "wb"
        with self._beside(), files.writing(file.parent, _bytes(plan)), file.open(mode) as stream:
            for item in plan.items:
                parts, crc = _saved(planner.resolve_data(item))
                numbers += array("Q", (sum(map(stream.write, parts)), crc))
            stream.flush()
            os.fsync(stream.fileno())
        return numbers

    def write_again(self, planner: FirstRankPlanner, state: dict[str, Any], group: Group) -> None:
        """Write a state with the tensors of the one that was saved by ``planner``, in other values. A collective."""
        with together(group) as told:
            if planner.is_coordinator:  # other ranks write tensors alone
                planner.set_up_planner(state, is_coordinator=True)
            told.own = self._write(planner.plan, planner).tobytes()  # rank 0 alone makes objects of these bytes
        if planner.is_coordinator:
            by_rank = enumerate(zip(planner.entries, told.of_ranks, strict=True))
            written = (_results(part_name(rank), names, array("Q", each)) for rank, (names, each) in by_rank)
            self.finish(planner.metadata, written)

    def finish(self, metadata: Metadata, results: Iterable[Sequence[WriteResult]]) -> None:
        self._contents, self._written = metadata, results

    def table(self) -> bytes:
        """Return the bytes of the table of contents, with its checksum, on rank 0; nothing on others."""
        if self._contents is None:
            return b""
        places = {each.index: each.storage_data for written in self._written for each in written}
        meta = self.storage_meta()
        contents = replace(self._contents, version=CURRENT_DCP_VERSION, storage_data=places, storage_meta=meta)
        return files.sealed(pickle.dumps(contents))

    def storage_meta(self) -> StorageMeta | None:
        """Return the id of the save, with the checksums of the extra files."""
        meta = super().storage_meta()
        vars(meta)[EXTRA_SUMS] = self._extra_sums
        return meta


class FirstRankPlanner(DefaultSavePlanner):
    """Planner by which the first rank alone writes plain tensors, such as buffers and ignored parameters, so that all
    of them are one rank's; torch's planner divides them among ranks, whose values may differ."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if not self.is_coordinator:
            items = [each for each in plan.items if isinstance(self.state_dict[each.index.fqn], DTensor)]
            self.plan = plan = replace(plan, items=items)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.entries = [[each.index for each in plan.items] for plan in plans]
        """Names of the entries of each rank's file, on the first rank."""
        del self.global_plan  # the plan of many ranks is large, and ``write_again`` does without it
        return plans, metadata


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


def part_name(rank: int) -> str:
    """Return the name of the file that has a rank's tensors."""
    return f"__{rank}_0.distcp"


def _part_of(plan: SavePlan) -> str:
    return f"{plan.storage_data.prefix}0.distcp"


def _results(file: str, entries: Sequence[MetadataIndex], numbers: Sequence[int]) -> list[WriteResult]:
    """Return torch's results of a written file, with checksums, of its entries' lengths and checksums in turn."""
    results: list[WriteResult] = []
    offset = 0
    for index, length, crc in zip(entries, numbers[::2], numbers[1::2], strict=True):
        place = _StorageInfo(file, offset, length)
        vars(place)[CRC] = crc
        results.append(WriteResult(index, length, place))
        offset += length
    return results


def _bytes(plan: SavePlan) -> int:
    return sum(item.tensor_storage_size() or 0 for item in plan.items)
