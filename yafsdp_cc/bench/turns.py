"""Whose turn it is, in every suite alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def in_turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Everybody once in each round, another one first each time: the round, counted from 1, and the name."""
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number + 1, name
