"""The files of a checkpoint: a folder that is complete or not there, and in it an extra file of each rank.

    step-10.saving      being written, or left behind by a save that was killed
    step-10             complete, always
    step-10.previous    what was there before, for the moment between two renames

Whenever the job is killed, ``step-10`` or, if that is missing, ``step-10.previous`` is complete. Extra files hold what
travels beside the model and is each rank's own, ``extra_<rank>_of_<ranks>.pt``.
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

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


# Extra files


def pack_extra(extra: dict[str, Any]) -> bytes:
    """Return the content of an extra file: what ``extra`` is now."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    return buffer.getvalue()


def write_extra(folder: Path, rank: int, world: int, content: bytes) -> None:
    """Write one rank's file, which is on the disk when this returns."""
    with (folder / f"extra_{rank}_of_{world}.pt").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_extra(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Return what this rank has saved; with another number of ranks than then, what all ranks had saved alike.

    The rest is left out with a warning that names it: two ranks with one rank's random state would draw the same.

    Raises:
        ValueError: the file of a rank is missing.
    """
    numbers = [int(file.stem.rpartition("_")[2]) for file in folder.glob("extra_*_of_*.pt")]
    if not numbers:  # not of yafsdp_cc.save
        return {}
    saved = max(numbers)
    if saved == world:
        return _load_extra(folder / f"extra_{rank}_of_{saved}.pt")
    first, *others = (_load_extra(folder / f"extra_{each}_of_{saved}.pt") for each in range(saved))
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


def _load_extra(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} is missing: the checkpoint is damaged, load another one")
    with file.open("rb") as content:
        check_sums(content, file)
        extra: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
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


def check_sums(content: IO[bytes], name: object) -> None:
    """Compare the checksums in what ``torch.save`` has written, which torch does not, and go back to its start.

    What is no archive is left to who reads it, and so are sums of 0: torch was told not to compute any.

    Raises:
        ValueError: something has changed; it says so of ``name``.
    """
    try:
        if zipfile.is_zipfile(content):
            with zipfile.ZipFile(content) as archive:
                for entry in (each for each in archive.infolist() if each.CRC):
                    with archive.open(entry) as data:
                        while data.read(_AT_ONCE):
                            pass
    except zipfile.BadZipFile as error:
        raise ValueError(f"{name} is damaged ({error}): load another checkpoint") from error
    content.seek(0)
