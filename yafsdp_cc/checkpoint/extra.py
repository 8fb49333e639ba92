"""What travels beside the model: each rank's own file of plain data, ``extra_<rank>.pt``."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yafsdp_cc.checkpoint.sums import check_sums


def packed(extra: dict[str, Any]) -> bytes:
    """The file's content: what ``extra`` is now."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    return buffer.getvalue()


def write(folder: Path, rank: int, world: int, content: bytes) -> None:
    """One rank's file, on the disk when this returns."""
    with _file(folder, rank, world).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """What this rank has saved; with another number of ranks than then, what all ranks had saved alike.

    The rest is left out with a warning that names it: two ranks with one rank's random state would draw the same.

    Raises:
        ValueError: the file of a rank is missing.
    """
    saved = _world(folder)
    if saved == 0:  # not of yafsdp_cc.save
        return {}
    if saved == world:
        return _load(_file(folder, rank, saved))
    first, *others = (_load(_file(folder, each, saved)) for each in range(saved))
    alike = {name: value for name, value in first.items() if all(_holds(other, name, value) for other in others)}
    named = {name for each in (first, *others) for name in each}
    if own := sorted(name for name in named - alike.keys() if not name.startswith("_wire")):
        warnings.warn(
            f"{folder} was saved by {saved} ranks and is loaded by {world}: {', '.join(own)} differed between ranks "
            "and is left out",
            stacklevel=3,
        )
    return alike


def _file(folder: Path, rank: int, world: int) -> Path:
    return folder / f"extra_{rank}_of_{world}.pt"


def _world(folder: Path) -> int:
    """How many ranks have saved."""
    names = (file.stem for file in folder.glob("extra_*_of_*.pt"))
    return max((int(name.rpartition("_")[2]) for name in names), default=0)


def _load(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} is missing: the checkpoint is damaged, load another one")
    with file.open("rb") as content:
        check_sums(content, file)
        extra: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
    return extra


def _holds(saved: dict[str, Any], name: str, value: object) -> bool:
    return name in saved and _same(saved[name], value)


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
