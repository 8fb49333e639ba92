"""The examples of docs/netlab.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.netlab.labs import lab_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "netlab.md"


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    with lab_of(ranks=1):
        pass
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert re.search(r"rank 1 sent 1[01]\d{5} bytes and received 1[01]\d{5}", capsys.readouterr().out)
