"""Messages of several codecs in one exchange: in rank order, those of a codec next to each other encoded at once.

to rank      0        1        2        3        from rank 1, which is near rank 0
          | fp32 |        | int4 | int4 |
             └─ a batch      └─ another
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yafsdp_cc.wire.codec import Codec


class Batch(NamedTuple):
    """Messages of one codec, to ranks that follow each other."""

    codec: Codec
    rank: int
    """The first of these ranks."""
    row: int
    """The place of its message among all."""
    rows: int
    """How many there are."""
    start: int
    """Bytes of the messages before."""
    size: int
    """Bytes of each."""


def batches_of(codecs: Sequence[Codec], rank: int, chunk: int) -> list[Batch]:
    """Those of a ``rank`` whose messages of ``chunk`` elements to the others have these codecs, in rank order."""
    batches: list[Batch] = []
    start = row = 0
    for (_, is_above), same in groupby(enumerate(codecs), key=lambda each: (each[1].name, each[0] >= rank)):
        (_, codec), *more = same
        rows, size = 1 + len(more), codec.message_bytes(chunk)
        batches.append(Batch(codec, row + is_above, row, rows, start, size))
        start, row = start + rows * size, row + rows
    return batches
