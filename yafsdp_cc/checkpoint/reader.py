"""Reads a checkpoint folder without running code from it, and without trusting inconsistent files.

torch loads tensors with ``weights_only``, but the table of contents (``.metadata``) and everything that is not a tensor
through plain pickle, which runs whatever the file says. This reader allows only torch's checkpoint classes in the
table, and loads everything else with ``weights_only``, too.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import is_dataclass
from itertools import groupby, product
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from yafsdp_cc.checkpoint.files import METADATA, Beside, Present, check_entry, load_plain, reading, unsealed
from yafsdp_cc.checkpoint.state import MODEL, paths_in, plain_name

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

_HELD = 256
"""Largest number of open files of a reader: a process may have about a thousand."""
CRC, EXTRA_SUMS = "crc32", "extra_crc32"
"""Attributes that ``save`` adds to torch's table of contents: the CRC-32 of each entry, and those of the ranks' extra
files. torch's own reader ignores them. They are names in files, which earlier versions' checkpoints need unchanged."""


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
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # A table has the path of the folder that it was written to, of any system and Python version: nobody opens the
    # unpickled path.
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class CheckpointReader(FileSystemReader):
    """torch's reader of a folder, which trusts none of its files.

    Without ``present``, files of tensors are opened now, up to a limit: another save may replace the folder meanwhile.

    Args:
        path: folder of the checkpoint.
        present: returns the context in which files of given names are in the folder, where some may be missing before;
            None: all are there. Entering and leaving it may be collectives of the ranks that load.

    ``contents`` is what the checkpoint holds, ``names`` the files of its tensors with their least sizes in bytes,
    ``stored_names`` the names of a model's tensors with wrappers in them, by those without, ``extra_sums`` the CRC-32
    of the ranks' extra files (None: not written down), ``digest`` the SHA-256 of the table of contents, in which each
    save has an id of its own: ranks with equal digests read the same save. ``beside`` returns the context in which this
    rank reads its part.

    Raises:
        FileNotFoundError: there is no folder ``path``.
        ValueError: ``path`` holds no checkpoint, one whose save never finished, or a table of contents that is damaged
            or does not fit its files.
        UntrustedError: the table of contents names something that no checkpoint needs; nothing of it was run.
    """

    def __init__(self, path: Path, present: Present | None = None) -> None:
        super().__init__(path)
        self.present: Present = present or nullcontext
        self.beside: Beside = nullcontext
        table = path / METADATA
        if not table.is_file():
            raise _not_a_checkpoint(path)
        with reading(table):
            content = table.read_bytes()
            self.digest = hashlib.sha256(content).hexdigest()
            contents = _unpickle(unsealed(content), table)
            self.names = _check_contents(contents)
            self.extra_sums: list[int] | None = getattr(contents.storage_meta, EXTRA_SUMS, None)
            contents.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        for name in self.names:
            if Path(name).name != name:
                raise ValueError(f"{table} refers to '{name}', which is not a file of this folder")
        self.contents = contents
        stored = [path[0] for path in paths_in(contents, MODEL).values()]
        self.stored_names = {plain: name for name in stored if (plain := plain_name(name)) != name}
        self._held: dict[str, IO[bytes]] = {}
        closing = ExitStack()
        weakref.finalize(self, closing.close)
        if present is not None:
            return
        _check_files(path, self.names)
        for name in list(self.names)[:_HELD]:
            self._held[name] = closing.enter_context((path / name).open("rb"))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.contents

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned entries, each once and in the order of the files, as torch's reader does.

        Raises:
            ValueError: an entry is damaged, or is not what the table of contents says.
            pickle.UnpicklingError: an entry wants code to be run.
        """

        def place_of(item: ReadItem) -> tuple[str, int, int]:
            place = self.storage_data[item.storage_index]
            return place.relative_path, place.offset, place.length

        with self.present({place_of(item)[0] for item in plan.items}), self.beside():
            for (name, offset, length), items in groupby(sorted(plan.items, key=place_of), key=place_of):
                file = Path(self.path) / name
                with reading(file, f", from byte {offset:,} on,"):
                    with nullcontext(self._held[name]) if name in self._held else file.open("rb") as stream:
                        stream.seek(offset)
                        content = stream.read(length)
                    self._read_entry(content, list(items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_entry(self, content: bytes, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        index = items[0].storage_index
        place, stored = self.storage_data[index], self.contents.state_dict_metadata[index.fqn]
        check_entry(content, vars(place).get(CRC))
        entry = self.transforms.transform_load_stream(items[0], place.transform_descriptors or (), io.BytesIO(content))
        entry = io.BytesIO(entry.read(-1))
        if items[0].type == LoadItemType.BYTE_IO:
            planner.load_bytes(items[0], entry)
            return
        tensor = load_plain(entry)
        assert isinstance(stored, TensorStorageMetadata)
        size = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)
        dtype = stored.properties.dtype
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (size, dtype):
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"the entry of '{index.fqn}' holds {found}, not {dtype} {list(size)}")
        for item in items:
            part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.shape != part.shape:  # ``copy_`` would broadcast a smaller part
                raise ValueError(f"{list(part.shape)} of '{index.fqn}' is wanted as {list(target.shape)}")
            target.copy_(part)
            planner.commit_tensor(item, target)


class SafePlanner(DefaultLoadPlanner):
    """torch's planner of loads, with everything that is not a tensor loaded with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], load_plain(value))


class DryPlanner(SafePlanner):
    """Planner of a load that reads every entry, but stores no tensors, to find damage before any change."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return torch.empty(read_item.lengths, dtype=torch.float32, device="meta")


class UntrustedError(pickle.UnpicklingError):
    """Raised where reading a file would run code."""


_UNUSED = {code[0] for code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.ADDITEMS, pickle.FROZENSET)}
"""Pickle's opcodes that no checkpoint has: other ways to call classes than those that are checked, and sets."""
_READ: dict[int, Any] = {**pickle._Unpickler.dispatch}
"""Methods of Python's own unpickler, by the opcode that each of them reads."""
_BUILT = tuple(kind for kind in _ALLOWED.values() if is_dataclass(kind))
_SMALL = (str, int, float, bool, type(None), torch.Size, torch.dtype, type)


def _is_small(value: object) -> bool:
    """Return whether a pickled value is quick to hash, compare and print: tuples that share parts may fill memory."""
    if isinstance(value, metadata.MetadataIndex):
        return all(isinstance(each, _SMALL) for each in vars(value).values())
    if type(value) is tuple:
        return all(isinstance(each, _SMALL) for each in value)
    return isinstance(value, _SMALL)


class _Unpickler(pickle._Unpickler):
    """Makes objects of classes in ``_ALLOWED`` alone. It is pickle's unpickler in Python, because one changed bit may
    make the native unpickler fill all memory."""

    stack: list[Any]

    def __init__(self, content: bytes, path: Path) -> None:
        self.file = io.BytesIO(content)
        super().__init__(self.file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return self._member
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise self._error(f"names {module}.{name}", "needs")
        return found

    def _member(self, kind: object, name: str) -> Any:
        """Replace ``getattr``, by which early releases of Python 3.11 pickle members of enumerations."""
        if kind is not metadata._MEM_FORMAT_ENCODING or name not in metadata._MEM_FORMAT_ENCODING.__members__:
            raise self._error(f"names builtins.getattr of {kind!r} and {name!r}", "needs")
        return metadata._MEM_FORMAT_ENCODING[name]

    def _error(self, what: str, why: str) -> UntrustedError:
        """Return the error that says: the file ``what`` ("names os.system"), which no checkpoint ``why`` ("needs")."""
        return UntrustedError(
            f"{self._path} {what}, which no checkpoint {why}: it was not loaded, and nothing of it was run. Ask "
            "where this checkpoint comes from"
        )

    def _build(self) -> None:
        """Set the attributes of an object that this unpickler has made; refuse classes and members of enumerations."""
        if type(self.stack[-2]) not in _BUILT:
            target = self.stack[-2]
            what = f"the class {target.__qualname__}" if isinstance(target, type) else f"a {type(target).__qualname__}"
            raise self._error(f"changes {what}", "does")
        _READ[pickle.BUILD[0]](self)

    def _checked(self, code: bytes, values: Sequence[object]) -> None:
        if not all(map(_is_small, values)):
            raise ValueError("its pickle has nested objects as keys or as arguments, which no table of contents has")
        _READ[code[0]](self)

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: read for code, read in _READ.items() if code not in _UNUSED},
        pickle.BUILD[0]: _build,
        pickle.REDUCE[0]: lambda self: self._checked(pickle.REDUCE, self.stack[-1]),
        pickle.NEWOBJ[0]: lambda self: self._checked(pickle.NEWOBJ, self.stack[-1]),
        pickle.SETITEM[0]: lambda self: self._checked(pickle.SETITEM, self.stack[-2:-1]),
        pickle.SETITEMS[0]: lambda self: self._checked(pickle.SETITEMS, self.stack[::2]),
        pickle.DICT[0]: lambda self: self._checked(pickle.DICT, self.stack[::2]),
    }


def _unpickle(content: bytes, path: Path) -> Metadata:
    unpickler = _Unpickler(content, path)
    try:
        contents = unpickler.load()
    except UntrustedError:
        raise
    except Exception as error:  # the opcodes of a damaged file may raise anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(contents, metadata.Metadata):
        raise ValueError(f"it holds a {type(contents).__name__}, not the contents of a checkpoint")
    if rest := unpickler.file.read():
        raise ValueError(f"{len(rest)} bytes follow its end")
    return contents


def _check_contents(contents: Metadata) -> dict[str, int]:
    """Return, by name, each file's least size in bytes; raise any ``Exception`` if ``contents`` are inconsistent.

    A table of contents that torch has written has no checksum, and may come from a stranger.
    """
    for value, kinds in _kinds(contents):
        if not isinstance(value, kinds):
            wanted_kinds = " or ".join(each.__name__ for each in kinds)
            raise ValueError(f"the metadata hold a {type(value).__name__} where {wanted_kinds} belongs")
    stored, entries = contents.state_dict_metadata, contents.storage_data
    wanted = set()
    for name, each in stored.items():
        if isinstance(each, BytesStorageMetadata):
            wanted.add(MetadataIndex(name))
            continue
        if not _tile(each):
            raise ValueError(f"the chunks of '{name}' do not make up its {list(each.size)}")
        for chunk in each.chunks:
            wanted.add(index := MetadataIndex(name, chunk.offsets))
            place = entries[index]
            least = math.prod(chunk.sizes) * each.properties.dtype.itemsize
            if not place.transform_descriptors and place.length < least:
                raise ValueError(f"{place.length} bytes do not hold {list(chunk.sizes)} of '{name}'")
    if wanted != entries.keys():
        some = sorted(str(each.fqn) for each in wanted ^ entries.keys())[:3]
        raise ValueError(f"of {some} it lists a tensor without a place in a file, or a place without a tensor")
    ends: dict[str, int] = {}
    for place in sorted(entries.values(), key=lambda place: (place.relative_path, place.offset)):
        if place.offset < ends.get(place.relative_path, 0) or place.length < 0:
            raise ValueError(f"two entries share byte {place.offset:,} of {place.relative_path}")
        ends[place.relative_path] = place.offset + place.length
    if contents.planner_data is not None:
        names = {name: ".".join(map(str, path)) for name, path in contents.planner_data.items()}
        if strange := [name for name in names.keys() | stored.keys() if name not in stored or names.get(name) != name]:
            raise ValueError(f"it lists '{strange[0]}' in one place only")
    return ends


def _kinds(contents: Metadata) -> Iterator[tuple[object, tuple[type, ...]]]:
    """Yield each part of a table of contents with its allowed types; a container comes first, to be checked first."""
    none = type(None)
    yield contents.state_dict_metadata, (dict,)
    yield contents.storage_data, (dict,)
    yield contents.planner_data, (dict, none)
    if (sums := getattr(contents.storage_meta, EXTRA_SUMS, None)) is not None:
        yield sums, (list,)
        for each in (sums[0], *sums):
            yield each, (int,)
    for name, each in contents.state_dict_metadata.items():
        yield name, (str,)
        yield each, (TensorStorageMetadata, BytesStorageMetadata)
        if isinstance(each, TensorStorageMetadata):
            yield each.properties.dtype, (torch.dtype,)
            yield each.size, (torch.Size,)
            yield each.chunks, (list,)
            for chunk in each.chunks:
                yield chunk.offsets, (torch.Size,)
                yield chunk.sizes, (torch.Size,)
    for place in contents.storage_data.values():
        yield place.relative_path, (str,)
        yield place.offset, (int,)
        yield place.length, (int,)
    for path in (contents.planner_data or {}).values():
        yield path, (tuple,)
        yield path[0], (str,)
        for step in path[1:]:
            yield step, (str, int)


_CUT = 8
"""Largest number of dimensions in which a stored tensor may be cut: ``_tile`` holds 2**_CUT corners of each chunk."""


def _tile(stored: TensorStorageMetadata) -> bool:
    """Return whether the chunks of a tensor cover each of its elements once.

    Chunks cover each element once if their corners, counted modulo 2, are the tensor's own, which means that an odd
    number of chunks cover each element and nothing else, and if chunks have as many elements as the tensor.
    """
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(stored.size)), sizes=stored.size)
    corners: set[tuple[int, ...]] = set()
    boxes = [
        [(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)] for box in (whole, *stored.chunks)
    ]
    cut = [dim for dim, ranges in enumerate(zip(*boxes, strict=True)) if len(set(ranges)) > 1]
    for box in boxes:
        if len(cut) > _CUT or any(not 0 <= low <= high for low, high in box):
            return False
        if all(low < high for low, high in box):
            corners ^= set(product(*(box[dim] for dim in cut)))
    return not corners and sum(math.prod(each.sizes) for each in stored.chunks) == math.prod(stored.size)


def _check_files(folder: Path, ends: Mapping[str, int]) -> None:
    """Raise a ``ValueError`` if a checkpoint's file is missing, or has fewer bytes than the table of contents says."""
    for name, end in ends.items():
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
