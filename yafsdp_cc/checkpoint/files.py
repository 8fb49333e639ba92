"""The files of a checkpoint: a folder that is complete or not there, and in it an extra file of each rank.

    step-10.saving      being written, or left behind by a save that was killed
    step-10             complete, always
    step-10.previous    what was there before, for the moment between two renames

Whenever the job is killed, ``step-10`` or, if that is missing, ``step-10.previous`` is complete. Extra files hold what
travels beside the model and is each rank's own, ``extra_<rank>_of_<ranks>.pt``. A damaged file is a ``ValueError`` that
names it.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import warnings
import zipfile
import zlib
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHECKPOINT = (".metadata", "*.distcp", "extra_*.pt")
"""The files of a checkpoint."""
_AT_ONCE = 1 << 20
"""Bytes that are checked at a time."""


# The folder


def place(path: str | os.PathLike[str]) -> Path:
    """Return the folder that ``path`` means: where links lead, for a rename would replace a link, not its target."""
    return Path(path).resolve()


def unfinished(path: Path) -> Path:
    """Return where a checkpoint for ``path`` is written."""
    return path.with_name(path.name + ".saving")


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def complete(path: Path) -> Path:
    """Return the folder to read for ``path``: the previous one if a save was killed between its two renames."""
    return _previous(path) if not path.exists() and _previous(path).exists() else path


def begin(path: Path, replaceable: Sequence[str] = ()) -> Path:
    """Return an empty folder to write what shall be at ``path`` into. For one rank to call.

    Args:
        path: the folder that shall be.
        replaceable: patterns of the files that may be at ``path`` already, and go when the new folder takes its place.

    Raises:
        ValueError: there is something else at ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if (kept := complete(path)) != path:
        os.rename(kept, path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: choose another path")
    for name in sorted(os.listdir(path)) if path.exists() else ():
        if not any(fnmatch(name, pattern) for pattern in replaceable):
            raise ValueError(f"{path} holds '{name}', which would be lost: choose another path, or move that away")
    folder = unfinished(path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def commit(path: Path) -> None:
    """Put what was written for ``path`` in its place. For one rank to call, when all have written."""
    folder, old = unfinished(path), _previous(path)
    _sync(folder)
    shutil.rmtree(old, ignore_errors=True)  # of a commit that was killed before its end
    if path.exists():
        os.rename(path, old)
    os.rename(folder, path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Make the names in ``folder`` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Space and damage


def check_space(folder: Path, needed: int) -> None:
    """Raise an ``OSError`` where fewer than ``needed`` bytes are free; where the file system does not tell, do not."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < needed:
        raise _no_space(folder, needed, usage.free)


@contextmanager
def writing(folder: Path, needed: int) -> Iterator[None]:
    """Raise the ``OSError`` behind what torch's native code makes of it; of a full disk, with bytes free and needed."""
    free = shutil.disk_usage(folder).free
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(folder, needed, free) from error
        if cause is not None:
            raise cause from error
        raise


def _no_space(folder: Path, needed: int, free: int) -> OSError:
    text = f"No space left in {folder.parent}: {needed:,} bytes are needed, and {free:,} were free"
    return OSError(errno.ENOSPC, text)


@contextmanager
def reading(file: Path, part: str = "") -> Iterator[None]:
    """Raise whatever a damaged file makes of its reader as a ``ValueError`` that names it, and ``part`` of it.

    Raises:
        pickle.UnpicklingError: as it is, with the file's name: it wants code to be run.
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


def crc_of(file: IO[bytes], length: int) -> int:
    """Return the CRC-32 of the next ``length`` bytes of a file."""
    crc = 0
    while length > 0 and (block := file.read(min(length, _AT_ONCE))):
        crc = zlib.crc32(block, crc)
        length -= len(block)
    return crc


def check_crc(content: bytes, expected: int) -> None:
    """Compare a CRC-32 that was written down when ``content`` was saved."""
    if (found := zlib.crc32(content)) != expected:
        raise ValueError(f"its CRC-32 is {found:08x}, and {expected:08x} when it was saved")


_SEAL = b"yafsdp_cc crc32 %08x"
"""Behind the pickle in ``.metadata``, where unpickling does not come: the CRC-32 of all before it."""


def seal(table: Path) -> None:
    """Append its checksum to a table of contents."""
    with table.open("r+b") as file:
        content = file.read()
        file.write(_SEAL % zlib.crc32(content))
        file.flush()
        os.fsync(file.fileno())


def unsealed(content: bytes) -> bytes:
    """Return a table of contents without its checksum, after comparing that.

    Of torch, and of earlier versions of this package, there is none.
    """
    size = len(_SEAL % 0)
    body, end = content[:-size], content[-size:]
    if not end.startswith(_SEAL[: -len(b"%08x")]):
        return content
    check_crc(body, int(end[-8:], 16))
    return body


# Extra files


def pack_extra(extra: dict[str, Any]) -> bytes:
    """Return the content of an extra file: what ``extra`` is now."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    return buffer.getvalue()


def write_extra(folder: Path, rank: int, world: int, content: bytes) -> None:
    """Write one rank's file, which is on the disk when this returns."""
    with writing(folder, len(content)), (folder / _extra(rank, world)).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _extra(rank: int, world: int) -> str:
    return f"extra_{rank}_of_{world}.pt"


def read_extra(folder: Path, rank: int, world: int, sums: Sequence[int] | None = None) -> dict[str, Any]:
    """Return what this rank has saved; with another number of ranks than then, what all ranks had saved alike.

    The rest is left out with a warning that names it: two ranks with one rank's random state would draw the same.

    Args:
        folder: the checkpoint.
        rank: this one's.
        world: the number of ranks now.
        sums: the files' CRC-32, of each rank that saved; None: not written down.

    Raises:
        ValueError: the file of a rank is missing or damaged.
    """
    numbers = [int(file.stem.rpartition("_")[2]) for file in folder.glob("extra_*_of_*.pt")]
    if not numbers and sums is None:  # not of yafsdp_cc.save
        return {}
    saved = max(numbers) if sums is None else len(sums)

    def read(each: int) -> dict[str, Any]:
        return _load_extra(folder / _extra(each, saved), None if sums is None else sums[each])

    if saved == world:
        return read(rank)
    first, *others = map(read, range(saved))
    alike = {
        name: value
        for name, value in first.items()
        if all(name in other and _same(other[name], value) for other in others)
    }
    named = {name for each in (first, *others) for name in each}
    if own := sorted(name for name in named - alike.keys() if not name.startswith("_wire")):
        warnings.warn(
            f"{folder} was saved by {saved} ranks and is loaded by {world}: {', '.join(own)} differed between ranks "
            "and is left out",
            stacklevel=3,
        )
    return alike


def _load_extra(file: Path, crc: int | None) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} is missing: the checkpoint is damaged, load another one")
    with reading(file):
        content = file.read_bytes()
        check_entry(content, crc)
        extra = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(extra, dict):
            raise TypeError(f"it holds a {type(extra).__name__}")
    return extra


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def check_entry(content: bytes, crc: int | None) -> None:
    """Compare the checksum of what ``torch.save`` has written: ``crc``, or those that it put in, which torch does not.

    Of those, sums of 0 are left out: torch was told not to compute any. What is no archive is left to who reads it.
    """
    if crc is not None:
        check_crc(content, crc)
    elif zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for entry in (each for each in archive.infolist() if each.CRC):
                with archive.open(entry) as data:
                    while data.read(_AT_ONCE):
                        pass
