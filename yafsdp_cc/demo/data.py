"""Text to learn from, as bytes: by default the Python standard library's own source, which every machine has."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

HELD_OUT = 16  # one file in so many


class Text(NamedTuple):
    """Bytes to train on, and bytes of other files to validate on."""

    train: Tensor
    held_out: Tensor


def read(path: Path | None) -> Text:
    """The text of a file, of the files under a folder, or (None) of the standard library.

    Files are held out by a hash of their name: the same on every rank, in every run. A single file gives its last part.
    """
    if path is not None and path.is_file():
        content = path.read_bytes()
        cut = len(content) - len(content) // HELD_OUT
        return Text(_tensor([content[:cut]]), _tensor([content[cut:]]))
    folder = path or Path(sysconfig.get_paths()["stdlib"])
    files = _text_files(folder) if path else _standard_library(folder)
    train: list[bytes] = []
    held_out: list[bytes] = []
    for file in files:
        digest = hashlib.sha256(file.relative_to(folder).as_posix().encode()).digest()
        (held_out if digest[0] % HELD_OUT == 0 else train).append(file.read_bytes())
    return Text(_tensor(train), _tensor(held_out))


def windows(data: Tensor, starts: Tensor, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets (the next bytes) of ``length`` from each start."""
    rows = data[starts[:, None] + torch.arange(length + 1)].long().to(device)
    return rows[:, :-1], rows[:, 1:]


def _standard_library(folder: Path) -> list[Path]:
    aside = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    return [file for file in sorted(folder.rglob("*.py")) if not aside & set(file.relative_to(folder).parts)]


def _text_files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and b"\0" not in file.read_bytes()[:4096]]


def _tensor(parts: Iterable[bytes]) -> Tensor:
    joined = bytearray(b"".join(parts))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
