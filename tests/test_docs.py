"""The examples in the documentation run, each by itself after the definitions of its page, on two ranks."""

from __future__ import annotations

import os
import re
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
    definitions, *examples = blocks
    os.chdir(tmp_path)
    for number, example in enumerate(examples or [""], start=1):
        script = compile(f"{definitions}\n{example}", f"<{page}, example {number}>", "exec")
        exec(script, {"__name__": f"example{number}"})
