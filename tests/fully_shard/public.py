"""FSDP2's own tests, of a checkout of PyTorch, on CPUs: which pass with torch's ``fully_shard``, and which with ours.

    python -m tests.fully_shard.public CHECKOUT [WORD ...]

runs the tests of ``test/distributed/_composable/fsdp/test_fully_shard_*.py`` whose names have one of the words in them,
and prints what passes. It needs expecttest, as torch's own tests do, and downloads nothing. Copies of the files are
changed as little as it takes: they run on CPUs, with gloo, on as many ranks as on a machine with four GPUs; and
``fully_shard`` is yafsdp_cc's in the second run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

import yafsdp_cc

FOLDER = "test/distributed/_composable/fsdp"
API = "FULLY_SHARD"
"""Environment variable: whose functions a test runs with."""
RANKS = 4
SECONDS = 240
"""After which a test that hangs has failed."""
CHANGES = [
    (r"@skip_if_lt_x_gpu\((\d+)\)", r"@skip_if_lt_x_gpu(\1, allow_cpu=True)"),
    (r"torch\.get_device_module\([^()]*\)\.device_count\(\)", str(RANKS)),
    (r"torch\.(cuda|accelerator)\.device_count\(\)", str(RANKS)),
    (r"torch\.accelerator\.current_accelerator\(\)\.type", '"cpu"'),
    (r"return min_world_size\b", f"return min({RANKS}, min_world_size)"),
    (r"device_ids=\[self\.rank\],?", ""),
    (r'device="cuda"', 'device="cpu"'),
    (r"\.cuda\(\)", ".cpu()"),
    (r"self\.assertGreater\(self\.rank, 0\)", "pass"),
]
"""Patterns of what ties a test to GPUs, and what takes their place.

The last one has it that rank 0 has elements of each parameter: see ``check_values``.
"""


def adapt(text: str) -> str:
    """Return the text of a test file, made to run on CPUs."""
    for pattern, replacement in CHANGES:
        text = re.sub(pattern, replacement, text)
    return f"from tests.fully_shard.public import prepare\n\nprepare()\n{text}"


def prepare() -> None:
    """Before a test file is imported: give torch's names our functions where the environment asks for them."""
    from torch.testing._internal import common_distributed, common_fsdp, common_utils

    cases: Any = common_distributed.MultiProcessTestCase
    context = torch.multiprocessing.get_context("fork")  # imports once
    cases._spawn_processes = lambda case: case._start_processes(context.Process)
    common_fsdp.DEVICE_COUNT = RANKS
    common_fsdp.check_sharded_parity = check_values
    common_utils.device_sleep = lambda *_: None  # CPUs have no streams to keep busy
    torch.accelerator.device_count = lambda: RANKS  # the ranks ask whether there are enough
    if os.environ.get(API) == "yafsdp_cc":
        for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx", "UnshardHandle"):
            for module in (torch_fsdp, common_fsdp):
                if hasattr(module, name):
                    setattr(module, name, getattr(yafsdp_cc, name))


def check_values(case: Any, plain: nn.Module, sharded: nn.Module, prefixes_to_ignore: Sequence[str] = ()) -> None:
    """As torch's ``check_sharded_parity``, of whole tensors: which elements a rank holds is another matter here."""
    check = case.assertEqual  # with the test's tolerances
    for (name, expected), (found_name, found) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        for prefix in prefixes_to_ignore:
            found_name = found_name.replace(prefix, "")
        check(found_name, name)
        check(_whole(found), _whole(expected))
        check(found.grad is None, expected.grad is None)
        if expected.grad is not None:
            check(_whole(found.grad), _whole(expected.grad))


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcomes(file: Path, words: Sequence[str], api: str) -> Iterator[tuple[str, str]]:
    """Run the tests of ``file``; yield each one's name and ``passed``, ``skipped``, or the error's last line."""
    report = file.with_suffix(f".{api}.xml")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)]
    if words:
        command += ["-k", " or ".join(words)]
    environment = os.environ | {
        API: api,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run(command, env=environment, cwd=file.parent, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1, 5):  # not: all passed, some failed, none has one of the words
        raise RuntimeError(f"{file.name} cannot be run:\n{ran.stdout[-3000:]}")
    for case in ElementTree.parse(report).iter("testcase"):
        yield f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}", _outcome(case)


def _outcome(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    failed = case.find("failure") if case.find("failure") is not None else case.find("error")
    if failed is None:
        return "passed"
    text = failed.text or failed.get("message") or ""
    errors = re.findall(r"^(?:E\s+)?(?:[\w.]*\.)?((?:\w*Error|\w*Exception)\b.*)$", text, re.MULTILINE)
    named = [each for each in errors if not each.startswith(("RuntimeError: Process ", "AssertionError: None"))]
    return (named or errors or [text.strip().rpartition("\n")[2]])[-1][:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of PyTorch, of the version that is installed")
    parser.add_argument("words", nargs="*", help="of names of tests; all without any")
    arguments = parser.parse_args()
    files = sorted((arguments.checkout / FOLDER).glob("test_fully_shard_*.py"))
    if not files:
        parser.error(f"there are no tests at {arguments.checkout / FOLDER}")
    total: list[int] = [0, 0]
    with tempfile.TemporaryDirectory() as folder:
        for source in files:
            copy = Path(folder, source.name)
            copy.write_text(adapt(source.read_text()))
            truth, found = (dict(outcomes(copy, arguments.words, api)) for api in ("torch", "yafsdp_cc"))
            passed = [name for name, outcome in truth.items() if outcome == "passed"]
            left = {name: found.get(name, "not run") for name in passed if found.get(name) != "passed"}
            counts = len(passed), len(passed) - len(left)
            total = [before + count for before, count in zip(total, counts, strict=True)]
            summary = f"{counts[0]} of {len(truth)} pass with FSDP2, {counts[1]} of these with yafsdp_cc"
            print(f"{source.name}: {summary}", flush=True)
            for name, outcome in left.items():
                print(f"    {name}: {outcome}", flush=True)
    print(f"in all {total[0]} with FSDP2, {total[1]} with yafsdp_cc")


if __name__ == "__main__":
    main()
