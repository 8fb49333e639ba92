"""Suite ``slow``: whole runs are put together from what steps teach and what they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bench import slow
from bench.slow import draw, slow_table

if TYPE_CHECKING:
    from pathlib import Path

TIMED: dict[str, Any] = {
    "fsdp2 bf16": {"seconds": 5.0, "sent_bytes": 40e6},
    "ours 1-bit adam": {"seconds": 1.0, "sent_bytes": 3e6},
    "ours 1-bit adam warm-up": {"seconds": 3.0, "sent_bytes": 30e6},
    "ours 1-bit adam refresh": {"seconds": 2.0, "sent_bytes": 13e6},
}
PHASES = ["exact", "kept", "both", "encoded", "both", "encoded"]


def runs() -> dict[str, Any]:
    ours = {"losses": {"2": 3.0, "4": 2.5, "6": 2.25}, "phases": PHASES}
    theirs = {"losses": {"2": 3.0, "4": 2.75, "6": 2.5}, "phases": [""] * 6}
    return {
        "fsdp2 bf16": slow._run(theirs, "fsdp2 bf16", TIMED),
        "ours 1-bit adam": slow._run(ours, "ours 1-bit adam", TIMED),
    }


def test_steps_of_each_phase_take_their_own_time() -> None:
    both = runs()
    ours = both["ours 1-bit adam"]
    assert ours["curve"] == [(6.0, 3.0), (9.0, 2.5), (12.0, 2.25)]  # 3 + 3, 2 + 1, 2 + 1
    assert ours["seconds"] == 12.0
    assert ours["sent_bytes"] == 2 * 30e6 + 2 * 13e6 + 2 * 3e6
    assert ours["times_as_fast"] == 30.0 / 12.0
    assert ours["steady_seconds"] == 1.0
    assert both["fsdp2 bf16"]["curve"] == [(10.0, 3.0), (20.0, 2.75), (30.0, 2.5)]
    assert both["fsdp2 bf16"]["times_as_fast"] == 1.0


def test_the_table_has_them_all() -> None:
    *_, theirs, ours = slow_table(runs()).splitlines()
    assert theirs.split() == ["fsdp2", "bf16", "2.5000", "0.50", "1.00", "x", "240.0", "5.000"]
    assert ours.split() == ["ours", "1-bit", "adam", "2.2500", "0.20", "2.50", "x", "92.0", "1.000"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra, yafsdp_cc[bench]")
    path = tmp_path / "loss.svg"
    draw(path, "2 ranks", {"100mbit": runs(), "unshaped": runs()})
    drawn = path.read_text()
    draw(path, "2 ranks", {"100mbit": runs(), "unshaped": runs()})
    assert path.read_text() == drawn
    assert drawn.startswith("<?xml")
