"""Text to learn from, as bytes: by default the Python standard library's own source, which every machine has."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

HELD_OUT = 16  # one file of 16, or 1/16 of a single file, is for validation
ASIDE = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders of the standard library whose files are not read."""


class Text(NamedTuple):
    """Bytes to train on, and other bytes to validate on."""

    train: Tensor
    held_out: Tensor


def read(path: Path | None) -> Text:
    """Return the text of a file, of the files under a folder, or (None) of the standard library.

    A hash of a file's name says whether the file is held out: the same files on every rank, in every run. Of a single
    file, the last part is held out.
    """
    if path is not None and path.is_file():
        content = path.read_bytes()
        cut = len(content) - len(content) // HELD_OUT
        return Text(_tensor(content[:cut]), _tensor(content[cut:]))
    folder = path or Path(sysconfig.get_paths()["stdlib"])
    train, held_out = bytearray(), bytearray()
    for file in sorted(folder.rglob("*" if path else "*.py")):
        name = file.relative_to(folder)
        if not file.is_file() or (path is None and not ASIDE.isdisjoint(name.parts)):
            continue
        content = file.read_bytes()
        if b"\0" not in content[:4096]:  # a file with zero bytes is no text
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            (held_out if digest[0] % HELD_OUT == 0 else train).extend(content)
    return Text(_tensor(train), _tensor(held_out))


def windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return tokens [starts, length + 1]: from each start, the inputs and the byte after the last input."""
    return data[starts[:, None] + torch.arange(length + 1, device="cpu")].long()


def spread_windows(data: Tensor, count: int, length: int, rank: int, ranks: int) -> Tensor:
    """Return this rank's ``count`` windows; the windows of all ranks are spread evenly over ``data``."""
    last, others = len(data) - length - 1, max(1, count * ranks - 1)
    starts = torch.arange(count * ranks, device="cpu") * last // others  # in integers: fp32 rounds large starts up
    return windows(data, starts[rank::ranks], length)


def _tensor(content: bytes | bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))  # torch.frombuffer refuses empty text
