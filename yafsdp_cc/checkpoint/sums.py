"""Checksums of what ``torch.save`` has written: torch stores one with every entry, and does not look at it."""

from __future__ import annotations

import zipfile
from typing import IO

_AT_ONCE = 1 << 20
"""Bytes."""


def check_sums(content: IO[bytes], name: object) -> None:
    """See that nothing has changed in ``content`` since, and go back to its start.

    What is no archive is left to who reads it, and so are sums of 0: torch was told not to compute any.

    Raises:
        ValueError: something has; it says so of ``name``.
    """
    try:
        if zipfile.is_zipfile(content):
            with zipfile.ZipFile(content) as archive:
                for entry in archive.infolist():
                    if entry.CRC:
                        with archive.open(entry) as data:
                            while data.read(_AT_ONCE):
                                pass
    except zipfile.BadZipFile as error:
        raise ValueError(f"{name} is damaged ({error}): load another checkpoint") from error
    content.seek(0)
