"""The examples of docs/netlab.md run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import forked
from tests.netlab.labs import lab_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "netlab.md"


def blocks() -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(found) == 3
    return found


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    with lab_of(ranks=1):
        pass
    names: dict[str, Any] = {}
    for block in blocks()[:2]:
        exec(compile(block, str(PAGE), "exec"), names)
    assert re.search(r"rank 1 sent 1[01]\d{5} bytes and received 1[01]\d{5}", capsys.readouterr().out)


def test_the_example_of_a_modelled_world_runs() -> None:
    """By itself: such a world is a process's for good."""
    as_planned = "assert yafsdp_cc.plan_of(model).communication.total == traffic.sent_bytes"
    command = [sys.executable, "-c", blocks()[2] + as_planned]
    done = subprocess.run(
        command,
        preexec_fn=forked(command, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
