"""Shared by all benchmarks: interleaved rounds, cells of tables, and files of figures."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def interleaved(contestants: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, contestant) from round 1 on, with another contestant first in every round.

    A machine that slows down then slows all contestants.
    """
    order = list(contestants)
    for number in range(rounds):
        first = number % len(order)
        for each in (*order[first:], *order[:first]):
            yield number + 1, each


def about(command: Sequence[str]) -> dict[str, Any]:
    """Return the command, machine and software of a run, for the head of a file of figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "command": shlex.join(command),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"model": next(models, platform.machine()), "cores": len(os.sched_getaffinity(0))},
        "instructions": os.environ.get("YAFSDP_CC_SIMD", "the best there are"),
    }


def save(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures to ``path``, if there is one. Call it after each measurement, as a run may be interrupted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


def cell(value: float | None, form: str) -> str:
    """Format a number; a dash stands for None."""
    return "-" if value is None else format(value, form)


def times(ratio: float | None) -> str:
    """Format the ratio to the baseline, as times better."""
    return "-" if ratio is None else f"{ratio:.2f} x"


def names(text: str) -> list[str]:
    """Split an argument of the command line at its commas."""
    return text.split(",")
