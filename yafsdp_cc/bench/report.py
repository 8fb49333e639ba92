"""Figures as tables of fixed width, at most 120 columns."""

from __future__ import annotations

from typing import Any

from yafsdp_cc.bench.contestants import TRAINING

_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))


def training_table(title: str, figures: dict[str, Any]) -> str:
    """A line for each contestant, of one bandwidth."""
    lines = [
        "",
        f"{title}; ratios are to {TRAINING[next(iter(figures))].beside}, MB are per step and rank",
        f"{'':<32}{'s/step':>9}{'tokens/s':>10}{'faster':>9}{'MB sent':>9}{'fewer':>9}{'MB by its own count':>21}"
        f"{'less headers':>14}",
    ]
    for name, each in figures.items():
        lines.append(
            f"{name:<32}{each['seconds']:>9.3f}{each['tokens_per_s']:>10,.0f}{_times(each['times_as_fast'])}"
            f"{each['sent_bytes'] / 1e6:>9.2f}{_times(each['times_fewer_bytes'])}{_counted(each)}"
        )
    return "\n".join(lines)


def slow_table(title: str, runs: dict[str, Any]) -> str:
    """A line for each contestant, of one bandwidth: whole runs of as many tokens."""
    lines = [
        "",
        f"{title}; ratios are to {TRAINING[next(iter(runs))].beside}, MB are of the whole run and a rank",
        f"{'':<32}{'held-out loss':>14}{'minutes':>10}{'faster':>9}{'MB sent':>11}{'s/step, settled':>17}",
    ]
    for name, run in runs.items():
        lines.append(
            f"{name:<32}{run['loss']:>14.4f}{run['seconds'] / 60:>10.2f}{_times(run['times_as_fast'])}"
            f"{run['sent_bytes'] / 1e6:>11.1f}{run['steady_seconds']:>17.3f}"
        )
    return "\n".join(lines)


def _times(ratio: float | None) -> str:
    return f"{'-':>9}" if ratio is None else f"{ratio:>7.2f} x"


def _counted(each: dict[str, Any]) -> str:
    """What the contestant says itself that it has sent, by how much the interface says more, and without headers."""
    if each["counted_bytes"] is None:
        return f"{'-':>12}"
    above, payload = each["sent_above_counted"], each["payload_above_counted"]
    return f"{each['counted_bytes'] / 1e6:>12.2f} {above:>+8.1%}{payload:>+14.2%}"


def exchanges_table(title: str, figures: dict[str, Any]) -> str:
    """A line for each contestant and clock, a column for each size."""
    lines = []
    for clock, what in (("processor_ms", "processor ms per exchange and rank"), ("wall_ms", "wall ms per exchange")):
        lines += ["", f"{title}, {what}; ratios are to the first of each kind", " " * 26]
        lines[-1] += "".join(f"{_size(int(size)):>13}{'ratio':>8}" for size in figures)
        for name in next(iter(figures.values())):
            found = [each[name] for each in figures.values()]
            lines.append(f"{name:<26}" + "".join(f"{one[clock]:>13.3f}{_part(one[clock + '_ratio'])}" for one in found))
    return "\n".join(lines)


def _part(ratio: float | None) -> str:
    return f"{'-':>8}" if ratio is None else f"{ratio:>8.2f}"


def _size(count: int) -> str:
    unit, name = next((unit, name) for unit, name in _UNITS if count >= unit)
    return f"{count / unit:g} {name}"
