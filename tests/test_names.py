"""Every name ``yafsdp_cc.x.y`` that the documentation or a message uses is there after ``import yafsdp_cc`` alone."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"(?<!from )(?<!import )(?<!-m )(?<!::: )\byafsdp_cc((?:\.[A-Za-z]\w*)+)")
RESOLVE = """
import functools, json, sys, warnings
import yafsdp_cc
warnings.simplefilter("error")
assert "torch" not in sys.modules
missing = []
for name in json.loads(sys.argv[1]):
    try:
        functools.reduce(getattr, name.split(".")[1:], yafsdp_cc)
    except AttributeError as error:
        missing.append(f"{name}: {error}")
missing += [f"{name} is not in dir()" for name in yafsdp_cc.__all__ if name not in dir(yafsdp_cc)]
sys.exit("\\n".join(missing) or 0)
"""


def texts() -> Iterator[str]:
    """The documentation, and the strings of the package that are more than one word."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/examples").glob("*.py")):
        yield page.read_text(encoding="utf-8")
    for file in (ROOT / "yafsdp_cc").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.value


def test_one_import_is_enough() -> None:
    names = sorted({f"yafsdp_cc{found}" for text in texts() for found in NAME.findall(text)})
    assert len(names) > 25
    assert "yafsdp_cc.optim" in names
    ran = subprocess.run([sys.executable, "-c", RESOLVE, json.dumps(names)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_package_that_is_missing_is_named() -> None:
    program = "import sys; sys.modules['pydantic'] = None; import yafsdp_cc"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.endswith("\nModuleNotFoundError: yafsdp_cc needs pydantic: pip install pydantic\n")
