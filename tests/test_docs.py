"""The examples in the documentation run, all of a page in one script, on two ranks."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

from tests.ranks import ranks

ROOT = Path(__file__).parent.parent


PAGES = ["README.md", "docs/using.md", "docs/migrating.md", "docs/compression.md", "docs/one-bit.md"]


@pytest.mark.parametrize("page", PAGES)
@ranks(2)
def test_examples_run(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    script = tmp_path / f"examples{os.getpid()}.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    os.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
