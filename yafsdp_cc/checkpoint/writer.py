"""Writes the files of a checkpoint in torch's format, with checksums that torch's own reader ignores."""

from __future__ import annotations

import io
import pickle
import weakref
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemWriter
from torch.distributed.tensor import DTensor

from yafsdp_cc.checkpoint import files
from yafsdp_cc.checkpoint.reader import CRC, EXTRA_SUMS

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from yafsdp_cc.checkpoint.files import Beside


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
        self._streams: dict[MetadataIndex, _SummingStream] = {}
        self.transforms: Any = weakref.proxy(self)  # a cycle would keep the tables until a garbage collection

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._is_shared:
            files.check_space(Path(self.path), sum(map(_bytes, plans)))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the planned entries as torch's writer does, and add the checksum of each of them."""
        with self._beside(), files.writing(Path(self.path), _bytes(plan)):
            done = super().write_data(plan, planner)
            for result in done.value():
                stream = self._streams[result.index]
                if stream.failure is not None:
                    raise stream.failure
                vars(result.storage_data)[CRC] = stream.crc
        return done

    def transform_save_stream(self, item: WriteItem, stream: IO[bytes]) -> tuple[_SummingStream, list[str]]:
        """Return a stream for an entry, which computes its checksum, and the names of the stream's transforms: none."""
        self._streams[item.index] = summing = _SummingStream(stream)
        return summing, []

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


class _SummingStream(io.RawIOBase):
    """A stream that writes to another one, which it does not close, and computes the CRC-32 of the bytes.

    ``write`` raises no ``OSError``: an exception that passes torch's native writer damages the memory of torch 2.11.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.crc = stream, 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        if self.failure is None:
            try:
                self._stream.write(data)
            except OSError as error:
                self.failure = error
        return memoryview(data).nbytes


def _bytes(plan: SavePlan) -> int:
    return sum(item.tensor_storage_size() or 0 for item in plan.items)
