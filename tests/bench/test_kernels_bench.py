"""The kernel bench runs, and its JSON holds what it promises. No figure is asserted that a machine could change."""

from __future__ import annotations

import functools
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import forked
from tests.internals import has_native_kernels

BENCH = Path(__file__).resolve().parents[2] / "bench" / "kernels.py"


@pytest.mark.skipif(not has_native_kernels(), reason="the native extension is not built")
def test_one_round_of_a_few_elements(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--elements", "8192", "--rounds", "1", "--codecs", "onebit,topk"]
    command += ["--json", str(out)]
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    printed = run(command, preexec_fn=forked(command)).stdout
    assert max(map(len, printed.splitlines())) <= 110
    written = json.loads(out.read_text())
    assert {"command", "date", "torch", "cpu", "instructions"} <= written["about"].keys()
    assert all(job["ms"] > 0 and job["of_a_copy"] > 0 for job in written["jobs"])
    sums = [job["codec"] for job in written["jobs"] if job["what"] == "sum of 256 messages"]
    assert sums == ["onebit", "topk"]
    assert [each["codec"] for each in written["plain"]] == ["onebit", "topk"]


def test_an_unknown_codec_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(BENCH), "--codecs", "nosuch"])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(BENCH), run_name="__main__")
    assert "'nosuch' is not one of onebit" in capsys.readouterr().err
