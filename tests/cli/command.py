"""Run the command line as a user does, and see that nothing of it stays behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

import yafsdp_cc.tools.cli.launch
from yafsdp_cc.tools import cli

ROOT = Path(__file__).resolve().parents[2]


def yafsdp_cc(
    *argv: object,
    folder: Path,
    timeout: float = 250,
    afresh: bool = False,
    main: Callable[[list[str]], int] = cli.main,
) -> subprocess.CompletedProcess[str]:
    """One command in ``folder``, to its end."""
    with started(*argv, folder=folder, afresh=afresh, main=main) as process:
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(
    *argv: object, folder: Path, afresh: bool = False, main: Callable[[list[str]], int] = cli.main
) -> Iterator[subprocess.Popen[str]]:
    """A command that runs; afterwards none of its processes may be left (they are ended, and the test fails).

    It is a process of its own, with a session, streams and environment of its own, forked from this one, which has
    imported torch: that takes longer than most commands. What they start are programs as for a user.

    Args:
        argv: of the command.
        folder: that it runs in.
        afresh: start an interpreter, as a shell does.
        main: the program that the forked process becomes, in the place of ``yafsdp-cc``.
    """
    mark = f"YAFSDP_CC_TEST={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", name: value}
    words = [str(word) for word in argv]
    process = subprocess.Popen(
        [sys.executable, "-m", "yafsdp_cc", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # SIGINT is ignored where the tests run behind a shell's "&".
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        if afresh
        else partial(_be_the_command, main, words, environment),
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


def _be_the_command(main: Callable[[list[str]], int], argv: list[str], environment: dict[str, str]) -> None:
    """Run the command in this process, which was forked to start it, and end as its interpreter would."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # by one of them the other process waits for the program to start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(ROOT / "yafsdp_cc" / "__main__.py"), *argv]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.getLogger().handlers.clear()  # pytest's
    for handler in (each for logger in logging.Logger.manager.loggerDict.values() for each in _handlers_of(logger)):
        handler.setStream(sys.stderr)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)  # as an interpreter does
    # Not a check: pytest's recorder, which the fork inherits, would keep the warnings that tests look for on stderr.
    warnings.showwarning = _to_stderr
    status: int | str | None = 1
    try:
        status = main(argv)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    if isinstance(status, str):  # sys.exit("why")
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(status or 0))


def _handlers_of(logger: object) -> list[logging.StreamHandler[TextIO]]:
    return [each for each in getattr(logger, "handlers", ()) if type(each) is logging.StreamHandler]


def _to_stderr(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))
