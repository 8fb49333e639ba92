"""The engine bench runs, and its JSON holds what it promises. No figure is asserted that a machine could change."""

from __future__ import annotations

import functools
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import forked
from tests.soak import also

BENCH = Path(__file__).resolve().parents[2] / "bench" / "engine.py"


@pytest.mark.parametrize(("precision", "suffix"), [also("fp32", ""), ("bf16", "/bf16")])
def test_one_round_of_a_tiny_model(tmp_path: Path, precision: str, suffix: str) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--models", "tiny", "--precision", precision, "--rounds", "1"]
    command += ["--contestants", "fsdp2,yafsdp_cc", "--json", str(out)]
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    printed = run(command, preexec_fn=forked(command)).stdout
    assert max(map(len, printed.splitlines())) <= 110
    assert "overhead" in printed

    written = json.loads(out.read_text())
    assert {"command", "date", "torch", "cpu"} <= written["about"].keys()
    figures = written["models"]["tiny"][precision]
    ours, fsdp2 = (figures[name + suffix] for name in ("yafsdp_cc", "fsdp2"))
    for each in (ours, fsdp2, figures["alone"]):
        assert {"cpu_ms", "overhead_ms", "wall_ms", "tokens_per_s", "counts", "memory", "losses"} <= each.keys()
        assert {"forward", "backward", "clip", "step", "forward_backward"} <= each["cpu_ms"].keys()
        assert all(each["counts"]["ops"][phase] > 0 for phase in ("forward", "backward", "clip", "step"))
    assert ours["losses"][0] == pytest.approx(fsdp2["losses"][0], rel=1e-2)
    assert ours["owned"]["owned_bytes"] == ours["owned"]["planned_bytes"]


def test_an_unknown_model_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(BENCH), "--models", "nosuch"])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(BENCH), run_name="__main__")
    assert "'nosuch' is not one of block, launch, deep, tiny" in capsys.readouterr().err
