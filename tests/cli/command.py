"""Run the command line as a user does, and see that nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def yafsdp_cc(*argv: object, folder: Path, timeout: float = 250) -> subprocess.CompletedProcess[str]:
    """One command in ``folder``, to its end."""
    with started(*argv, folder=folder) as process:
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(*argv: object, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that runs; afterwards none of its processes may be left (they are ended, and the test fails)."""
    mark = f"YAFSDP_CC_TEST={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", name: value}
    process = subprocess.Popen(
        [sys.executable, "-m", "yafsdp_cc", *map(str, argv)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # where the tests run behind a shell's "&"
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        left = _left_behind(mark.encode(), seconds=5)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    assert not left, f"processes left behind: {left}"


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    """Everything printed up to the line that holds ``text``."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return "".join(seen)
    raise AssertionError(f"ended without {text!r}:\n{''.join(seen)}{process.stderr.read() if process.stderr else ''}")


def children_of(pid: int) -> list[int]:
    """The processes that ``pid`` has started and that have not ended."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def _left_behind(mark: bytes, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _marked(mark: bytes) -> list[int]:
    """Live processes that carry ``mark`` in the environment they started with."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # gone meanwhile, or not ours
    return found
