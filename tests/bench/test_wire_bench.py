"""The wire bench runs, and its JSON says what it promises. No figure is asserted that a machine could change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.internals import has_native_kernels

BENCH = Path(__file__).resolve().parents[2] / "bench" / "wire.py"


@pytest.mark.skipif(not has_native_kernels(), reason="the native extension is not built")
def test_one_round_of_a_few_elements(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--sections", "kernels", "--elements", "8192", "--rounds", "1"]
    command += ["--codecs", "onebit,topk", "--json", str(out)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert max(map(len, printed.splitlines())) <= 110
    written = json.loads(out.read_text())
    assert {"command", "date", "torch", "cpu", "instructions"} <= written["about"].keys()
    for job in written["kernels"]["jobs"]:
        assert job["ms"]["median"] > 0
        assert job["of_a_copy"] > 0
    assert [one["codec"] for one in written["kernels"]["plain"]] == ["onebit", "topk"]


def test_an_unknown_codec_is_named() -> None:
    done = subprocess.run([sys.executable, str(BENCH), "--codecs", "nosuch"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'nosuch' is not one of onebit" in done.stderr
