"""The files of a checkpoint: a folder that is either complete or absent, with an extra file of each rank.

    step-10                      complete, always
    step-10.saving-1f3a90c2/     the folder of one save: under way, or left behind by one that was killed
        lock                     locked as long as the process that saves lives
        new                      what is being written; it changes places with ``step-10`` in one step
        previous                 what was at ``step-10``, where the file system cannot exchange folders

Whenever jobs are killed, and however many save to one path, ``step-10`` or, if that is missing, a ``previous`` is the
whole of one save. Extra files, ``extra_<rank>_of_<ranks>.pt``, hold each rank's own data beside the model. A damaged
file is a ``ValueError`` that names it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import pickle
import re
import secrets
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from torch import Tensor

METADATA = ".metadata"
"""Name of the file with a checkpoint's table of contents."""
CHECKPOINT = (METADATA, "*.distcp", "extra_*.pt")
"""Patterns of the names of a checkpoint's files."""
_LOCK, _PREVIOUS = "lock", "previous"
_TRIES = 20
_AT_ONCE = 1 << 20
"""Number of bytes that ``check_entry`` reads at a time."""


# Making, replacing and removing a checkpoint's folder


def place(path: str | os.PathLike[str]) -> Path:
    """Return the folder that ``path`` means, with links resolved: a rename would replace a link, not its target."""
    return Path(path).resolve()


def _folders(path: Path) -> list[Path]:
    """Return the folders of saves to ``path`` that are under way or were killed; other folders are a user's own."""
    ours = re.compile(re.escape(path.name) + r"\.saving-[0-9a-f]{8}")
    return [each for each in path.parent.iterdir() if ours.fullmatch(each.name)] if path.parent.is_dir() else []


def complete(path: Path) -> Path:
    """Return the folder to read for ``path``: the previous checkpoint, if a save was killed between two renames."""
    # a save may complete ``path`` and delete the previous checkpoint between the two checks: repeat them
    for _ in range(3):
        if path.exists():
            break
        kept = [each / _PREVIOUS for each in _folders(path)]
        with suppress(FileNotFoundError):
            ages = {(each / METADATA).stat().st_mtime_ns: each for each in kept if each.exists()}
            if ages:
                return ages[max(ages)]
    return path


def version(path: Path) -> tuple[int, int]:
    """Return an id of the save at ``path``: inode and time of its table of contents, which each save changes."""
    with suppress(OSError), (complete(path) / METADATA).open("rb") as table:
        found = os.fstat(table.fileno())
        return found.st_ino, found.st_mtime_ns
    return 0, 0


class Replacement:
    """A new content of ``path``, written beside it in a folder that no other save has. Only one rank makes the object.

    Close a ``Replacement`` at the end, whether it was committed or not. ``new`` is the folder to write into. What is
    at ``path`` is deleted when the new folder takes its place: a ``ValueError`` refuses files whose names match none of
    the patterns ``replaceable``.
    """

    def __init__(self, path: Path, replaceable: Sequence[str] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._replaceable = path, replaceable
        self._check_what_is_there()
        if path.exists():  # otherwise a killed save's folder may hold the only checkpoint
            _clear(path)
        self._folder, self._lock = _locked_folder(path)
        self.new, self._previous = self._folder / "new", self._folder / _PREVIOUS
        self.new.mkdir()

    def _check_what_is_there(self) -> None:
        path = self._path
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file: choose another path")
        if path.exists() and path.samefile("."):
            raise ValueError(f"{path} is the working directory, which would be replaced: name a folder in it")
        for name in sorted(os.listdir(path)) if path.exists() else ():
            if not any(fnmatch(name, pattern) for pattern in self._replaceable):
                raise ValueError(f"{path} holds '{name}', which would be lost: choose another path, or move that away")

    def commit(self) -> None:
        """Replace ``path`` by the new folder, after all ranks have written; delete the folders of killed saves."""
        _sync(self.new)
        with suppress(FileNotFoundError):  # another save may replace the path at this moment
            self._check_what_is_there()
        while not (self._replaceable and _exchange(self.new, self._path)):
            try:
                os.rename(self.new, self._path)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self._replaceable:
                    raise
            # an earlier turn of this loop has left ``_previous`` if another save then put its own folder at ``path``
            shutil.rmtree(self._previous, ignore_errors=True)
            with suppress(FileNotFoundError):
                os.rename(self._path, self._previous)
        _sync(self._path.parent)
        shutil.rmtree(self._previous, ignore_errors=True)
        self.close()
        _clear(self._path)

    def close(self) -> None:
        """Delete the folder of this save, and in it the replaced checkpoint, or the new one if it was not committed."""
        if self._lock.closed:
            return
        if self._previous.exists() and not self._path.exists():  # an exception ended ``commit`` between two renames
            os.rename(self._previous, self._path)
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # unlock explicitly: a forked process may have the file open, too
        self._lock.close()


def _locked_folder(path: Path) -> tuple[Path, IO[bytes]]:
    """Make the folder of one save, and return it with its lock file, locked unless the file system has no locks."""
    for _ in range(_TRIES):
        folder = path.with_name(f"{path.name}.saving-{secrets.token_hex(4)}")
        # before the folder is locked, another save may take it for left behind and delete it: try again
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir()
            file = (folder / _LOCK).open("wb")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                pass  # the file system has no locks, and the folder stays unlocked
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / _LOCK)):
                return folder, file
    raise OSError(f"no folder could be made in {path.parent}: something deletes what begins with '{path.name}.saving'")


def _clear(path: Path) -> None:
    """Delete the folders of killed saves to ``path``, not those of live processes."""
    for folder in _folders(path):
        try:
            with (folder / _LOCK).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:  # the folder of a save without a lock file is half deleted, or just made
            with suppress(OSError):
                folder.rmdir()
            if not (folder / _LOCK).exists():
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # the saving process is alive, or the file system has no locks
            continue


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return False if one is missing, or the system cannot exchange folders."""
    rename: Any = getattr(ctypes.CDLL(None), "renameat2", None)  # renameat2 exists on Linux alone
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _sync(folder: Path) -> None:
    """Make the names in ``folder`` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Room on the disk, and damaged files


def check_space(folder: Path, needed: int) -> None:
    """Raise an ``OSError`` if fewer than ``needed`` bytes are free, as far as the file system tells."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < needed:
        raise _no_space(folder, needed, usage.free)


@contextmanager
def writing(folder: Path, needed: int) -> Iterator[None]:
    """Raise the ``OSError`` of a full disk with a message that says how many bytes were needed, and how many free."""
    free = shutil.disk_usage(folder).free
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(folder, needed, free) from error
        raise


def _no_space(folder: Path, needed: int, free: int) -> OSError:
    where = folder.parent.parent  # the folder with the checkpoint, two levels above the one that is written to
    text = f"No space left in {where}: {needed:,} bytes are needed, and {free:,} were free"
    return OSError(errno.ENOSPC, text)


@contextmanager
def reading(file: Path, part: str = "") -> Iterator[None]:
    """Turn any error of reading a damaged file into a ``ValueError`` that names the file, and the ``part`` of it.

    An ``UnpicklingError``, of a file that wants code to be run, stays one, and names the file, too.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        if str(file) in str(error):
            raise
        raise pickle.UnpicklingError(f"{file}{part}: {error}") from error
    except OSError as error:
        raise ValueError(f"{file}{part} cannot be read ({error}): see to that, or load another checkpoint") from error
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{file}{part} is damaged ({kind}{error}): load another checkpoint") from error


def check_crc(content: bytes, expected: int) -> None:
    """Compare the CRC-32 of ``content`` with the one stored when it was saved."""
    if (found := zlib.crc32(content)) != expected:
        raise ValueError(f"its CRC-32 is {found:08x}, and {expected:08x} when it was saved")


_SEAL = b"yafsdp_cc crc32 %08x"
"""Marker of the seal behind the pickle in ``.metadata``, which unpickling ignores: a CRC-32 of all bytes before it."""


def sealed(content: bytes) -> bytes:
    """Return the bytes of a table of contents with their checksum appended."""
    return content + _SEAL % zlib.crc32(content)


def unsealed(content: bytes) -> bytes:
    """Verify and remove the checksum of a table of contents.

    Tables of contents by torch, and by earlier versions of this package, have no checksum.
    """
    size = len(_SEAL % 0)
    body, end = content[:-size], content[-size:]
    if not end.startswith(_SEAL[: -len(b"%08x")]):
        return content
    check_crc(body, int(end[-8:], 16))
    return body


# Extra files


def pack_extra(extra: dict[str, Any]) -> bytes:
    """Return the bytes of an extra file that holds ``extra`` as it is now."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    return buffer.getvalue()


def write(file: Path, content: bytes) -> None:
    """Write a file, and return when it is on the disk."""
    with writing(file.parent, len(content)), file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def extra_name(rank: int, world: int) -> str:
    return f"extra_{rank}_of_{world}.pt"


Present: TypeAlias = "Callable[[Collection[str]], AbstractContextManager[object]]"
"""Function from file names to a context in which a folder has these files; entering and leaving may be collectives."""
Beside: TypeAlias = "Callable[[], AbstractContextManager[object]]"
"""Function that returns a context in which a rank may read or write for long, such as ``ranks.Ticks.beside``."""


def extra_readers(
    folder: Path, sums: Sequence[int] | None = None, present: Present = nullcontext
) -> list[Callable[[], dict[str, Any]]]:
    """Return, for each rank that saved, a function that reads its extra file; an empty list if there are no such files.

    Each file is read in the context that ``present`` returns for its name. ``sums`` are the CRC-32 of the files; None
    if the checkpoint has none.
    """
    found = [re.fullmatch(r"extra_\d+_of_(\d+)", file.stem) for file in folder.glob("extra_*_of_*.pt")]
    crcs: Sequence[int | None] = sums or [None] * max((int(each[1]) for each in found if each), default=0)
    return [partial(_load_extra, folder / extra_name(rank, len(crcs)), crc, present) for rank, crc in enumerate(crcs)]


def read_extra(ranks: Sequence[Callable[[], dict[str, Any]]], rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Return this rank's extra data; with another number of ranks than saved, only the data that all ranks saved alike.

    A warning names what is left out: two ranks with one rank's random state, for example, would draw the same numbers.
    So random states that a single rank saved are left out, too. ``ranks`` are the checkpoint's ``extra_readers``.
    """
    if len(ranks) in (0, world):
        return ranks[rank]() if ranks else {}
    alike = ranks[0]()
    named = set(alike)
    if len(ranks) == 1:
        alike = {name: value for name, value in alike.items() if not _is_random_state(value)}
    for read in ranks[1:]:  # read one extra file at a time: each may have residuals as large as the model
        other = read()
        named |= other.keys()
        alike = {name: value for name, value in alike.items() if name in other and same(other[name], value)}
    if own := sorted(name for name in named - alike.keys() if not name.startswith("_wire")):
        warnings.warn(
            f"{folder} was saved by {len(ranks)} ranks and is loaded by {world}: {', '.join(own)} "
            f"{'differed' if len(ranks) > 1 else 'is to differ'} between ranks and is left out",
            stacklevel=3,
        )
    return alike


def _is_random_state(value: object) -> bool:
    """Return whether ``value`` is the state of a generator of torch, on a CPU or GPU, or ``Rescue``'s of several."""
    value = value.get("torch") if isinstance(value, dict) else value
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.shape in ((5056,), (16,))


def _load_extra(file: Path, crc: int | None, present: Present) -> dict[str, Any]:
    with present([file.name]), reading(file):
        content = file.read_bytes()
        check_entry(content, crc)
        extra = load_plain(io.BytesIO(content))
        if not isinstance(extra, dict):
            raise TypeError(f"it holds a {type(extra).__name__}")
    return extra


def load_plain(stream: IO[bytes]) -> Any:
    """Return what ``torch.save`` has written, without running code from it: tensors, in host memory, and plain data.

    Compressed entries are refused: ``torch.save`` writes none, and they may expand a thousandfold and fill the memory.
    """
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            if packed := next((each.filename for each in archive.infolist() if each.compress_type), ""):
                raise ValueError(f"its entry '{packed}' is compressed, and torch.save writes none that are")
    stream.seek(0)
    # Transformer Engine's extra states are in a ``BytesIO``, and pickles have empty ``bytes`` made by their class.
    with torch.serialization.safe_globals([io.BytesIO, bytes]):
        return torch.load(stream, map_location="cpu", weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are alike: tensors in dtype, shape and elements, where NaN is like NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return False
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if a.is_complex():
            a, b = (torch.view_as_real(each.resolve_conj()) for each in (a, b))
        return bool(a.equal(b) or (a.is_floating_point() and a.double().allclose(b.double(), 0, 0, equal_nan=True)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a.getvalue() == b.getvalue() if isinstance(a, io.BytesIO) else a == b or (a != a and b != b))


def check_entry(content: bytes, crc: int | None) -> None:
    """Verify an entry that ``torch.save`` has written: by ``crc``, or by the archive's own checksums, which torch
    ignores.

    Checksums of 0 are skipped: torch was told not to compute them. Without ``crc``, only zip archives are verified.
    """
    if crc is not None:
        check_crc(content, crc)
    elif zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for entry in (each for each in archive.infolist() if each.CRC):
                with archive.open(entry) as data:
                    while data.read(_AT_ONCE):
                        pass
