"""What near ranks say more by, where some links are faster than others.

    one machine    rank 0 ═══ rank 1
                       │ ╲   ╱ │             ═══  as much as is said here in the time of
                       │   ╳   │              │   a message there
                       │ ╱   ╲ │
    another        rank 2 ═══ rank 3

A sum is over when its slowest message is there. Until then other messages may take their time, and say more.

Pure: no communication, no clock. Whoever has the same numbers comes to the same codecs, so both ends of a pair do.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Pair: TypeAlias = "tuple[int, int]"
"""Two ranks, the lower one first."""

ALIKE = 1.5
"""Links that are not so many times as fast are alike: a trial of one says no more than that."""


def richer(paces: Mapping[Pair, float], codec: str, bits: Mapping[str, float]) -> dict[Pair, str]:
    """Of each pair that can say more than ``codec`` does, in the time that this takes the slowest pair: by what.

    A rank's messages to all near ranks count as one after another. Each pair was tried out by itself, and they may
    share what carries them.

    Args:
        paces: seconds for a byte.
        codec: of messages between the slowest pairs.
        bits: for an element, by codecs, those that leave out least first.
    """
    alike = classed(paces)
    slowest = max(paces.values())
    near = [pair for pair, pace in alike.items() if pace < slowest]
    crowd = max(Counter(rank for pair in near for rank in pair).values(), default=0)
    names = list(bits)
    found = {}
    for pair in near:
        room = slowest * bits[codec] / (crowd * alike[pair])
        fits = (name for name in names[: names.index(codec)] if bits[name] <= room)
        if (better := next(fits, None)) is not None:
            found[pair] = better
    return found


def classed(paces: Mapping[Pair, float]) -> dict[Pair, float]:
    """The pace that each goes by: of the slowest pair that it is like, where classes begin with the slowest of all."""
    found: dict[Pair, float] = {}
    pace = max(paces.values())
    for pair in sorted(paces, key=lambda each: (-paces[each], each)):
        if paces[pair] * ALIKE <= pace:
            pace = paces[pair]
        found[pair] = pace
    return found
