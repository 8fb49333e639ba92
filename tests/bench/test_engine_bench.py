"""The engine bench runs, and its JSON says what it promises. No figure is asserted that a machine could change."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import also

BENCH = Path(__file__).resolve().parents[2] / "bench" / "engine.py"


@pytest.mark.parametrize(("precision", "suffix"), [also("fp32", ""), ("bf16", "/bf16")])
def test_one_round_of_a_tiny_model(tmp_path: Path, precision: str, suffix: str) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--models", "tiny", "--precision", precision, "--rounds", "1"]
    command += ["--contestants", "fsdp2,yafsdp_cc", "--json", str(out)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert max(map(len, printed.splitlines())) <= 110

    written = json.loads(out.read_text())
    assert {"command", "date", "torch", "cpu", "ranks"} <= written["about"].keys()
    result = written["models"]["tiny"][precision]
    ours, fsdp2 = (result["contestants"][name + suffix] for name in ("yafsdp_cc", "fsdp2"))
    for one in (ours, fsdp2, result["contestants"]["alone"]):
        assert {"cpu_ms", "overhead_ms", "wall_ms", "tokens_per_s", "counts", "memory", "losses"} <= one.keys()
        assert {"forward", "backward", "clip", "step", "forward_backward"} <= one["cpu_ms"].keys()
        assert all(one["counts"]["ops"][phase] > 0 for phase in ("forward", "backward", "clip", "step"))
    assert ours["losses"][0] == pytest.approx(fsdp2["losses"][0], rel=1e-2)
    assert any("overhead" in target["what"] for target in result["targets"])
    assert any(target["rival"] == "the plan" and target["met"] for target in result["targets"])


def test_an_unknown_model_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(BENCH), "--models", "nosuch"])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(BENCH), run_name="__main__")
    assert "'nosuch' is not one of block, launch, deep, tiny" in capsys.readouterr().err
