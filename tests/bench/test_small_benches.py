"""Benches that have little to be tested run, and print what they promise. No figure that a machine could change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import lazy_error
from tests.ranks import ranks
from yafsdp_cc.bench import pipeline

BENCHES = Path(__file__).resolve().parents[2] / "bench"


def figures(name: str, *options: str, folder: Path) -> list[dict[str, Any]]:
    out = folder / "figures.json"
    command = [sys.executable, str(BENCHES / name), "--ranks", "2", *options, "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    found: list[dict[str, Any]] = json.loads(out.read_text())["figures"]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="it reads the kernel's counts and malloc's")
def test_patches(tmp_path: Path) -> None:
    (found,) = figures("patches.py", "--tiny", "--dtypes", "bf16", "--rounds", "1", folder=tmp_path)
    assert 0 <= found["changed"] < 1
    assert found["bytes"] == 0 or 4 < found["bytes"] <= 6
    assert found["kept"] < 8


@pytest.mark.skipif(sys.platform != "linux", reason="it reads the kernel's counts and malloc's")
def test_loading(tmp_path: Path) -> None:
    found = figures("loading.py", "--blocks", "2", "--width", "64", folder=tmp_path)
    assert len({each["way"] for each in found}) == len(found) == 5
    assert all(len(each["peak"]) == 2 for each in found)


@ranks(1)
def test_lazy_error() -> None:
    model = pipeline._model(32, 2, seed=0)
    halves = [pipeline.Part(model, stage, 2) for stage in range(2)]
    exact = lazy_error.gradients(halves, 2, None, lazy=False)
    for lazy in (False, True):
        rough, fine = (
            lazy_error.error(lazy_error.gradients(halves, 2, lazy_error.ENCODINGS[name](), lazy), exact, 2)
            for name in ("int2", "int4")
        )
        assert 0 < fine < rough < 1
    assert lazy_error.error(exact, exact, 2) == 0
