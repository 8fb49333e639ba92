"""Programs that tests fork do what an interpreter does that is started, and none of them is left behind unseen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import forked, started

SHOWS = """
import os, sys, atexit
atexit.register(print, "the last word", flush=True)
print(__name__, sys.argv[1:], os.environ["A_NAME"], "torch" in sys.modules, __import__("beside").NAME)
"""


def run(*words: object, with_children: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    command, pipes = [sys.executable, *map(str, words)], {"capture_output": True, "text": True}
    become = forked(command, {**os.environ, **environment}, with_children=with_children)
    done: Any = subprocess.run(command, preexec_fn=become, check=False, **pipes)  # type: ignore[call-overload]
    return done


@pytest.mark.parametrize("flags", [(), ("-u",)])
def test_a_file_is_the_main_module_beside_its_own(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'neighbour'")
    (tmp_path / "shows.py").write_text(SHOWS)
    done = run(*flags, tmp_path / "shows.py", "--flag", A_NAME="a value")
    assert done.stdout == "__main__ ['--flag'] a value True neighbour\nthe last word\n"
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_a_program_ends_as_its_interpreter_would(program: str, status: int, said: str) -> None:
    done = run("-c", program)
    assert done.returncode == status
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)


@pytest.mark.parametrize("with_children", [False, True])
def test_programs_that_it_starts_are_forked_if_they_are_to_be(with_children: bool) -> None:
    asks = "import sys; print('torch' in sys.modules)"
    done = run(
        "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {asks!r}])", with_children=with_children
    )
    assert done.stdout == f"{with_children}\n"


def leaves_a_process(_: list[str]) -> None:
    if os.fork() == 0:
        os.setsid()
        os.close(1), os.close(2)
        time.sleep(60)


def test_what_is_left_behind_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="left behind"), started(folder=tmp_path, main=leaves_a_process) as process:
        process.wait()
