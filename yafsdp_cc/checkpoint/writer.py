"""Writes the files of a checkpoint in torch's format, with checksums that torch's own reader ignores."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

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

    table = b""
    """Bytes of the table of contents with its checksum, which ``finish`` sets on rank 0."""

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
            told.own = self._write(planner.plan, planner).tobytes()  # quick to send: rank 0 alone makes objects of it
        if planner.is_coordinator:
            by_rank = enumerate(zip(planner.entries, told.of_ranks, strict=True))
            results = [_results(part_name(rank), names, array("Q", each)) for rank, (names, each) in by_rank]
            self.finish(planner.metadata, results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {each.index: each.storage_data for written in results for each in written}
        contents = replace(metadata, version=CURRENT_DCP_VERSION, storage_data=places, storage_meta=self.storage_meta())
        self.table = files.sealed(pickle.dumps(contents))

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
        """On the first rank, the names of the entries of each rank's file."""
        del self.global_plan  # of many ranks it is large, and ``write_again`` needs the planner, but not this
        return plans, metadata


# The bytes of an entry -----------------------------------------------------------------------------------------------


def _saved(data: Tensor | io.BytesIO) -> tuple[Sequence[bytes | memoryview], int]:
    """Return, in parts, what ``torch.save`` writes for a dense tensor or has written, and the CRC-32 of all of it.

    The elements of a tensor are read once, for one checksum: the archive needs it, and the whole's follows from it.
    """
    if not isinstance(data, Tensor):
        return (data.getbuffer(),), zlib.crc32(data.getbuffer())
    dense = data.detach().cpu().contiguous().resolve_conj().resolve_neg()
    elements = dense.view(-1).view(torch.uint8).numpy().data
    archive, crc = _archive(data.dtype, data.shape), zlib.crc32(elements)
    tail = _to_bytes(crc).join(archive.tail)
    return (archive.head, elements, tail), zlib.crc32(tail, crc ^ archive.of_head)


class _Archive(NamedTuple):
    """What ``torch.save`` writes around the elements of a tensor.

    ``tail`` is cut where it has the CRC-32 of the elements. ``of_head`` is the exclusive or of the CRC-32 of the
    elements behind ``head`` and of that of the elements alone, the same for all elements, as CRC-32 is linear.
    """

    head: bytes
    tail: list[bytes]
    of_head: int


@lru_cache(maxsize=4096)
def _archive(dtype: torch.dtype, shape: torch.Size) -> _Archive:
    zeros = torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8)  # memory that is only read takes no pages
    stream = _WithoutElements()
    torch.save(zeros.view(dtype).view(shape), cast("IO[bytes]", stream))
    kept, name, crc = bytes(stream.kept), b"archive/data/0", zlib.crc32(zeros.numpy().data)
    at = kept.index(name)
    begin = at + len(name) + int.from_bytes(kept[at - 2 : at], "little")  # other fields are between name and elements
    end = begin + (zeros.nbytes if zeros.nbytes < stream.LONG else 0)
    head, tail = kept[:begin], kept[end:].split(_to_bytes(crc))
    return _Archive(head, tail, zlib.crc32(zeros.numpy().data, zlib.crc32(head)) ^ crc)


class _WithoutElements(io.RawIOBase):
    """A stream that forgets what is written to it in long pieces, as the elements of a large tensor are."""

    LONG = 1 << 12
    """Bytes of the shortest piece that is forgotten: ``torch.save`` writes nothing else in pieces as long."""

    def __init__(self) -> None:
        self.kept = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < self.LONG:
            self.kept += data
        return size


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
