"""Stretches of time, as pairs of where they begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Span: TypeAlias = "tuple[float, float]"


def joined(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """The same time in as few spans as there can be, in order; those no further apart than ``gap`` are one."""
    found: list[Span] = []
    for begun, ended in sorted(spans):
        if found and begun <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((begun, ended))
    return found


def without(spans: list[Span], covers: list[Span]) -> list[Span]:
    """The time of ``spans`` that is in none of ``covers``; both are ``joined``."""
    found = []
    for begun, ended in spans:
        for cover in covers:
            if begun < cover[1] and cover[0] < ended:
                found.append((begun, cover[0]))
                begun = cover[1]
        found.append((begun, ended))
    return [(begun, ended) for begun, ended in found if begun < ended]
