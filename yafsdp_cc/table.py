"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(*rows: Sequence[str], left: int = 1, width: int | None = None) -> str:
    """Align columns, the first ``left`` of them to the left and the others to the right. The first row is the head.

    Where a line would be longer than ``width``, the first column loses the middle of its cells: both ends of a module's
    name are informative.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        widths[0] = min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1))
    tail = (widths[0] - 2) * 2 // 3
    lines = []
    for first, *rest in rows:
        row = [first if len(first) <= widths[0] else f"{first[: widths[0] - 2 - tail]}..{first[-tail:]}", *rest]
        cells = [*map(str.ljust, row[:left], widths[:left]), *map(str.rjust, row[left:], widths[left:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
