"""The optimizer bench runs, and its JSON holds what it promises. No figure is asserted that a machine could change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import forked
from tests.internals import has_native_kernels

BENCH = Path(__file__).resolve().parents[2] / "bench" / "optimizers.py"


@pytest.mark.skipif(not has_native_kernels(), reason="the native extension is not built")
def test_one_round_of_small_matrices(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--layers", "2", "--width", "64", "--rounds", "1", "--threads", "1"]
    command += ["--json", str(out)]
    subprocess.run(command, check=True, capture_output=True, preexec_fn=forked(command))
    figures = json.loads(out.read_text())["figures"]
    assert {each["kind"] for each in figures} == {"update", "step"}
    assert all(each["ms"] > 0 and each["of_adamw"] > 0 for each in figures)
