"""The bench of Muon runs, and its JSON holds what it promises. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import forked
from yafsdp_cc.tools.netlab import Lab, Unavailable

BENCH = Path(__file__).resolve().parents[2] / "bench" / "muon.py"


def test_one_round_of_a_tiny_model(tmp_path: Path) -> None:
    try:
        with Lab(2):
            pass
    except Unavailable as error:  # to count what crosses the bench needs interfaces, which only root may make
        pytest.skip(f"this machine has no network namespaces: {error}")
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--model", "tiny", "--ranks", "2", "--bandwidth", "unshaped"]
    command += ["--rounds", "1", "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True, preexec_fn=forked(command))
    found = {each["what"]: each for each in json.loads(out.read_text())["figures"]}
    assert len(found) == 6
    muon, adamw = found["yafsdp_cc, Muon, ns_dtype=fp32"], found["yafsdp_cc, AdamW"]
    assert muon["share"] < 0.6
    assert muon["sent"] <= 1.1 * adamw["sent"]
