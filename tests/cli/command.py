"""Run the command line as a user does, and see that nothing of it stays behind."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import yafsdp_cc.tools.cli.launch
from yafsdp_cc.tools import cli

ROOT = Path(__file__).resolve().parents[2]
MARK = "YAFSDP_CC_TEST"
"""The environment variable that tells the processes of a test."""
PR_SET_NAME = 15


def yafsdp_cc(
    *argv: object,
    folder: Path,
    timeout: float = 250,
    afresh: bool = False,
    main: Callable[[list[str]], Any] = cli.main,
) -> subprocess.CompletedProcess[str]:
    """One command in ``folder``, to its end."""
    with started(*argv, folder=folder, afresh=afresh, main=main) as process:
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(
    *argv: object, folder: Path, afresh: bool = False, main: Callable[[list[str]], Any] = cli.main
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
    mark = str(uuid.uuid4())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: mark}
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
            process.wait()  # else it would be found as one that is left, by its name
        left = _left_behind(mark, seconds=5)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    assert not left, f"processes left behind: {left}"


def forked(
    words: Sequence[object], environment: Mapping[str, str] | None = None, *, with_children: bool = False
) -> Callable[[], None]:
    """Return the ``preexec_fn`` by which ``subprocess`` runs a Python program in a fork of this process.

    It is a process of its own, but does not import torch anew, which takes longer than most programs.

    Args:
        words: the command: an interpreter, ``-u`` or not, and ``-c program``, ``-m module`` or a file, with arguments.
        environment: of the program, this process's if None.
        with_children: whether the programs that it starts are forked, too, and those that they start.
    """
    argv = [str(word) for word in words[1:]]
    return partial(_be_the_command, partial(_program, with_children), argv, dict(environment or os.environ))


class _ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]  # a parameter fails at run time here
    """Starts programs of this interpreter as ``forked`` says; all others as they are."""

    def __init__(self, args: Any, *more: Any, **settings: Any) -> None:
        if not isinstance(args, str) and args[0] == sys.executable:
            settings["preexec_fn"] = forked(args, settings.get("env"), with_children=True)
        super().__init__(args, *more, **settings)


def _program(with_children: bool, argv: list[str]) -> None:
    """Run a program as ``python *argv`` does."""
    if with_children:
        subprocess.Popen = subprocess_handler.Popen = _ForkingPopen  # type: ignore[misc]  # programs start others by it
    for number in range(1, signal.NSIG):  # of whoever has forked this process
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    warnings.filterwarnings("ignore", ".* found in sys.modules")  # by runpy, of what this process has imported
    atexit._clear()
    argv = argv[argv[0] == "-u" :]
    try:
        if argv[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
            sys.modules["__main__"] = module = ModuleType("__main__")
            exec(compile(argv[1], "<string>", "exec"), vars(module))
        elif argv[0] == "-m":
            sys.argv, sys.path[0] = argv[1:], os.getcwd()
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


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


def _short(mark: str) -> bytes:
    """Return a mark as the name of a process, which a fork inherits and a program that is started does not."""
    return mark[:15].encode()


def _left_behind(mark: str, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _marked(mark: str) -> list[int]:
    """Live processes that carry ``mark`` in the environment they started with, or were forked from one that is named
    so."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            named = (folder / "comm").read_bytes().strip() == _short(mark)
            if named or entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # gone meanwhile, or not ours
    return found


def _be_the_command(main: Callable[[list[str]], Any], argv: list[str], environment: dict[str, str]) -> None:
    """Run the command in this process, which was forked to start it, and end as its interpreter would."""
    if MARK in environment:
        ctypes.CDLL(None).prctl(PR_SET_NAME, _short(environment[MARK]))
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # by one of them the other process waits for the program to start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # a fork inherits no thread pool, and threads that made one at a time would abort
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


def forking(argv: list[str]) -> Any:
    """Be ``yafsdp-cc``, and fork the programs that it starts: take it as ``main``."""
    _program(True, ["-m", "yafsdp_cc", *argv])


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
