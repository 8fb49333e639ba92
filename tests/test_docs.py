"""The examples in the documentation run, all of a page in one script, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["docs/using.md", "docs/migrating.md", "docs/compression.md", "docs/one-bit.md"])
def test_examples_run(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    (tmp_path / "examples.py").write_text("\n".join(blocks), encoding="utf-8")
    command = [sys.executable, "-m", "yafsdp_cc", "launch", "--standalone", "--nproc-per-node=2", "examples.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
