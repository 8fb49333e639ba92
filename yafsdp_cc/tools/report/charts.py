"""Charts as SVG within an HTML page: lines, stacked bars, and lanes of a timeline.

Colours are classes ``c0`` to ``c8`` (grey) of the page's style sheet, so that they follow its light and dark scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

from yafsdp_cc.tools.report.overlap import Span

WIDTH, WIDE, HEIGHT, LEFT, RIGHT, BOTTOM, TOP, ROW = 480, 1440, 230, 74, 28, 40, 10, 30
MOST_POINTS = 300
"""Largest number of points of a line, beyond which they cannot be told apart."""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from ``low`` to ``high``, ``most`` of them at most."""
    span = max((high - low) or abs(high), 1e-300)  # a fraction of a smaller span could underflow to 0
    power = 10.0 ** floor(log10(span / most))
    step = next(power * each for each in (1, 2, 5, 10, 20) if span / (power * each) <= most - 1)
    return [step * each for each in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Format a number of an axis or a tooltip."""
    if value and not 1e-3 <= abs(value) < 1e6:
        for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= factor:
                return f"{value / factor:.4g} {unit}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def lines(
    title: str, across: str, up: str, curves: Mapping[str, Sequence[tuple[float, float]]], from_zero: bool = False
) -> str:
    """Draw ``curves``, points [x, y] by the name of a line, and their legend.

    With more than ``MOST_POINTS`` points, a line goes through medians of adjacent ones, and a band covers all of them.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    if low == high:
        low, high = low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)
    if left == right:  # one point: an axis needs a width to have marks
        left, right = left - 0.5 * abs(left or 1), right + 0.5 * abs(right or 1)
    low = 0.0 if low > 0 and (from_zero or low < 0.3 * high) else low
    high += 0.03 * (high - low)
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - BOTTOM - TOP

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + wide * (x - left) / ((right - left) or 1), TOP + tall * (high - y) / (high - low)

    drawn = [_text(place(x, low)[0], HEIGHT - BOTTOM + 16, number(x)) for x in ticks(left, right)]
    for y in ticks(low, high):
        drawn.append(f'<path class="grid" d="M{LEFT} {place(left, y)[1]:.1f}h{wide}"/>')
        drawn.append(_text(LEFT - 6, place(left, y)[1] + 4, number(y), "end"))
    drawn.append(_text(LEFT + wide / 2, HEIGHT - 6, across))
    drawn.append(
        f'<text transform="translate(13 {TOP + tall / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(up)}</text>'
    )

    def path(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))

    for colour, curve in enumerate(curves.values()):
        every = ceil(len(curve) / MOST_POINTS) or 1
        parts = [sorted(curve[at : at + every], key=lambda point: point[1]) for at in range(0, len(curve), every)]
        if every > 1:
            band = path([part[0] for part in parts] + [part[-1] for part in reversed(parts)])
            drawn.append(f'<polygon class="band c{colour % 8}" points="{band}"/>')
        drawn.append(f'<polyline class="line c{colour % 8}" points="{path(part[len(part) // 2] for part in parts)}"/>')
        if len(curve) < 40:
            for x, y in curve:
                (across_px, up_px), told = place(x, y), f"{number(x)}: {number(y)}"
                dot = f'<circle class="c{colour % 8}" r="3" cx="{across_px:.1f}" cy="{up_px:.1f}">'
                drawn.append(f"{dot}<title>{escape(told)}</title></circle>")
    return _figure(title, WIDTH, HEIGHT, drawn, {name: place % 8 for place, name in enumerate(curves) if curves[name]})


def bars(
    title: str, unit: str, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, int] | None = None
) -> str:
    """Draw a bar for each row, its parts one after another, and the parts' legend; ``colours`` are by part."""
    rows = {name: parts for name, parts in rows.items() if any(parts.values())}
    if not rows:
        return ""
    kinds = dict.fromkeys(kind for parts in rows.values() for kind in parts)
    colours = colours or {kind: place for place, kind in enumerate(kinds)}
    most = max(sum(parts.values()) for parts in rows.values())
    left = min(170, 24 + 8 * max(map(len, rows)))
    wide, height = WIDTH - left - 60, TOP + ROW * len(rows) + BOTTOM
    drawn = _axis(left, wide, height, most, unit, 6)
    for row, (name, parts) in enumerate(rows.items()):
        x, y = float(left), TOP + ROW * row + 4
        drawn.append(_text(left - 8, y + 15, _short(name, left // 8 - 1), "end"))
        for kind, value in parts.items():
            length = wide * value / most
            box = f'<rect class="c{colours[kind]}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{ROW - 8}">'
            drawn.append(f"{box}<title>{escape(f'{name}, {kind}: {number(value)} {unit}')}</title></rect>")
            x += length
        drawn.append(_text(x + 6, y + 15, number(sum(parts.values())), "start"))
    return _figure(title, WIDTH, height, drawn, {kind: colours[kind] for kind in kinds})


def timeline(
    title: str, most: float, colours: Mapping[str, int], lanes: Mapping[str, Mapping[str, Sequence[Span]]]
) -> str:
    """Draw the spans of each lane by kind of work, in milliseconds, on a time axis that ends at ``most``."""
    left = 150
    wide, height = WIDE - left - 16, TOP + ROW * len(lanes) + BOTTOM
    drawn = _axis(left, wide, height, most, "milliseconds", 12)
    for row, (name, lane) in enumerate(lanes.items()):
        y = TOP + ROW * row + 4
        drawn.append(_text(left - 8, y + 15, _short(name, 20), "end"))
        for kind, spans in lane.items():
            # one path for all spans of a kind: thousands of kernels would make a page of megabytes
            boxes = "".join(
                f"M{left + wide * begin / most:.2f} {y}h{max(0.1, wide * (end - begin) / most):.2f}v{ROW - 8}H"
                f"{left + wide * begin / most:.2f}z"
                for begin, end in spans
            )
            drawn.append(f'<path class="c{colours[kind]}" d="{boxes}"><title>{escape(kind)}</title></path>')
    present = {kind for lane in lanes.values() for kind in lane}
    return _figure(title, WIDE, height, drawn, {kind: colour for kind, colour in colours.items() if kind in present})


def _axis(left: float, wide: float, height: float, end: float, unit: str, most: int) -> list[str]:
    """Draw a horizontal axis from 0 to ``end``, with ``most`` marks at most, and their grid."""
    drawn = [_text(left + wide / 2, height - 6, unit)]
    for mark in ticks(0, end, most):
        x = left + wide * mark / end
        drawn.append(f'<path class="grid" d="M{x:.1f} {TOP}V{height - BOTTOM}"/>')
        drawn.append(_text(x, height - BOTTOM + 16, number(mark)))
    return drawn


def _figure(title: str, width: int, height: int, drawn: Sequence[str], legend: Mapping[str, int]) -> str:
    keys = "".join(f'<span><i class="c{colour}"></i>{escape(name)}</span>' for name, colour in legend.items())
    picture = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(drawn)}</svg>'
    shape = ' class="wide"' if width == WIDE else ""
    figure = f'<figcaption>{escape(title)}</figcaption><div class="scroll">{picture}</div><p class="legend">{keys}</p>'
    return f"<figure{shape}>{figure}</figure>"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"
