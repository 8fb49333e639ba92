"""Reading a checkpoint folder without running anything that lies in it.

torch loads tensors with ``weights_only``, but the table of contents (``.metadata``) and everything that is not a tensor
through plain pickle, which runs whatever the file says. Here the table may name torch's checkpoint classes and nothing
else, and the rest is loaded with ``weights_only`` too.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from yafsdp_cc.checkpoint.files import check_sums

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"no layout {name!r}")
    return found


_ALLOWED: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING,
        metadata.ChunkStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        _StorageInfo,
        torch.Size,
    )
} | {
    ("torch.serialization", "_get_layout"): _layout,
    # Where it was written to, on whatever system and under whatever Python: kept as a path that nobody opens.
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class CheckpointReader(FileSystemReader):
    """torch's reader of a folder, which trusts none of its files. ``contents`` is what the checkpoint holds.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no checkpoint, one whose save never finished, or files shorter than they should be.
        UntrustedError: its table of contents names something that no checkpoint needs; nothing of it was run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        table = path / METADATA
        if not table.is_file():
            raise _not_a_checkpoint(path)
        with table.open("rb") as file:
            contents = _unpickle(file, table)
        if not isinstance(contents, metadata.Metadata):
            raise ValueError(f"{table} holds a {type(contents).__name__}, not the contents of a checkpoint")
        _check_files(path, contents)
        contents.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        self.contents = contents

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.contents

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        # In memory, which is where it goes anyway: torch's view of a part of a file cannot be sought from its end.
        content = io.BytesIO(super()._slice_file(file, sinfo).read(-1))
        check_sums(content, f"{Path(self.path) / sinfo.relative_path}, from byte {sinfo.offset:,} on,")
        return content


class SafePlanner(DefaultLoadPlanner):
    """torch's planner, with everything that is not a tensor loaded with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], torch.load(value, weights_only=True))


class UntrustedError(pickle.UnpicklingError):
    """A file wants code to be run."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return self._member
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise self._error(f"{module}.{name}")
        return found

    def _member(self, kind: object, name: str) -> Any:
        """Take the place of ``getattr``, by which early patches of Python 3.11 write members of enumerations."""
        if kind is not metadata._MEM_FORMAT_ENCODING or name not in metadata._MEM_FORMAT_ENCODING.__members__:
            raise self._error(f"builtins.getattr of {kind!r} and {name!r}")
        return metadata._MEM_FORMAT_ENCODING[name]

    def _error(self, what: str) -> UntrustedError:
        return UntrustedError(
            f"{self._path} names {what}, which no checkpoint needs: it was not loaded, and nothing of it was run. Ask "
            "where this checkpoint comes from"
        )


def _unpickle(file: IO[bytes], path: Path) -> Any:
    # A pickle may set attributes of what it names, classes too: no class shall be another one afterwards.
    kinds = {kind for kind in _ALLOWED.values() if isinstance(kind, type)}
    before = {kind: dict(vars(kind)) for kind in kinds}
    try:
        return _Unpickler(file, path).load()
    except UntrustedError:
        raise
    except Exception as error:  # whatever the opcodes of a damaged file come upon
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): load another checkpoint") from error
    finally:
        for kind in kinds:
            _restore(kind, before[kind], path)


def _restore(kind: type, attributes: dict[str, Any], path: Path) -> None:
    now = dict(vars(kind))
    changed = {name for name in now.keys() | attributes.keys() if now.get(name) is not attributes.get(name)}
    for name in changed:
        if name in attributes:
            setattr(kind, name, attributes[name])
        else:
            delattr(kind, name)
    if changed:
        raise UntrustedError(f"{path} changes the class {kind.__qualname__}, which no checkpoint does")


def _check_files(folder: Path, contents: Metadata) -> None:
    ends: Counter[str] = Counter()
    for place in (contents.storage_data or {}).values():
        ends[place.relative_path] = max(ends[place.relative_path], place.offset + place.length)
    for name, end in ends.items():
        if Path(name).name != name:
            raise ValueError(f"{folder / METADATA} refers to '{name}', which is not a file of this folder")
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            seen = "is missing" if size is None else f"has {size:,} bytes of {end:,}"
            raise ValueError(f"{file} {seen}: the checkpoint is damaged, load another one")


def _not_a_checkpoint(folder: Path) -> Exception:
    if not folder.exists():
        near = sorted(each.name for each in folder.parent.glob("*") if (each / METADATA).is_file())
        hint = f"; checkpoints in {folder.parent}: {', '.join(near)}" if near else ""
        return FileNotFoundError(f"there is no checkpoint {folder}{hint}")
    if not folder.is_dir():
        return ValueError(f"{folder} is a file; a checkpoint is a folder that yafsdp_cc.save has written")
    names = sorted(each.name for each in folder.iterdir())
    if any(name.endswith(".distcp") for name in names):
        return ValueError(f"{folder} is a save that never finished (it has no {METADATA}): load an earlier checkpoint")
    if any(name.endswith(".safetensors") for name in names):
        return ValueError(f"{folder} holds safetensors: yafsdp_cc.load_safetensors(path, model) reads them")
    return ValueError(f"{folder} is not a checkpoint: it has no {METADATA}, but {', '.join(names[:5]) or 'nothing'}")
