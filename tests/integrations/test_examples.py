"""Every example says how it is started, is on the page about frameworks, and starts like that."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.integrations.examples import EXAMPLES
from tests.soak import LONG

ROOT = EXAMPLES.parent.parent
COMMAND = re.compile(r"^yafsdp-cc (launch --standalone --nproc-per-node=[24] docs/examples/(\w+\.py))$", re.MULTILINE)


FRAMEWORKS = sorted(
    path.name for path in EXAMPLES.glob("*.py") if path.name not in ("checkpoint.py", "plan_ahead.py", "shampoo.py")
)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_its_command_and_its_page(name: str) -> None:
    command = COMMAND.search((EXAMPLES / name).read_text(encoding="utf-8"))
    assert command is not None
    assert command[2] == name
    assert f"(examples/{name})" in (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")


@LONG
def test_the_command_as_it_stands() -> None:
    command = COMMAND.search((EXAMPLES / "compiled_blocks.py").read_text(encoding="utf-8"))
    assert command is not None
    done = subprocess.run(
        [sys.executable, "-m", "yafsdp_cc", *command[1].split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("losses ")
