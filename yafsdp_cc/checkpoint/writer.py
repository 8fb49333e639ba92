"""Writing the files of a checkpoint: torch's format, with checksums that torch's own reader does not look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from yafsdp_cc.checkpoint import files
from yafsdp_cc.checkpoint.reader import CRC, EXTRA_SUMS, METADATA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future


class CheckpointWriter(FileSystemWriter):
    """torch's writer of a folder; every entry, the extra files and the table of contents get a checksum.

    Args:
        folder: where to write.
        extra_sums: the CRC-32 of each rank's extra file, in rank order.
    """

    def __init__(self, folder: Path, extra_sums: Sequence[int]) -> None:
        super().__init__(folder)
        self._extra_sums = list(extra_sums)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As torch's, once there is room for all ranks' tensors."""
        files.check_space(Path(self.path), sum(map(_bytes, plans)))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's; the sums are of what is in the files now."""
        folder = Path(self.path)
        with files.writing(folder, _bytes(plan)):
            done = super().write_data(plan, planner)
        for result in done.value():
            place = result.storage_data
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                vars(place)[CRC] = files.crc_of(file, place.length)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As torch's, and seal the table of contents."""
        super().finish(metadata, results)
        files.seal(Path(self.path) / METADATA)

    def storage_meta(self) -> StorageMeta | None:
        """Return the id of the save, with the sums of the extra files."""
        meta = super().storage_meta()
        vars(meta)[EXTRA_SUMS] = self._extra_sums
        return meta


def _bytes(plan: SavePlan) -> int:
    return sum(item.tensor_storage_size() or 0 for item in plan.items)
