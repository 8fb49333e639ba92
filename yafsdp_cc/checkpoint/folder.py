"""A checkpoint folder comes into being whole: written beside its place, and renamed when every rank is done.

    step-10.saving      being written, or left behind by a save that was killed
    step-10             complete, always
    step-10.previous    what was there before, for the moment between two renames

Whenever the job is killed, ``step-10`` or, if that is missing, ``step-10.previous`` is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

CHECKPOINT = (".metadata", "*.distcp", "extra_*.pt")
"""The files of a checkpoint."""


def place(path: str | os.PathLike[str]) -> Path:
    """The folder that ``path`` means: where links lead, for a rename would replace a link and not what lies there."""
    return Path(path).resolve()


def unfinished(path: Path) -> Path:
    """Where a checkpoint for ``path`` is written."""
    return path.with_name(path.name + ".saving")


def previous(path: Path) -> Path:
    """Where the checkpoint that was at ``path`` waits until the new one has taken its place."""
    return path.with_name(path.name + ".previous")


def complete(path: Path) -> Path:
    """The folder to read for ``path``: the previous one if a save was killed between its two renames."""
    return previous(path) if not path.exists() and previous(path).exists() else path


def begin(path: Path, replaceable: Sequence[str] = ()) -> Path:
    """An empty folder to write what shall be at ``path`` into. For one rank to call.

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
    folder, old = unfinished(path), previous(path)
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
