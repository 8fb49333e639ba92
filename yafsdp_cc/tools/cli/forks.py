"""Ranks that are forked from a process that has imported torch: a restart takes no seconds of imports.

Ranks are forked from multiprocessing's fork server, a child of the launcher that has imported ``preload``.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import operator
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

_RUNNER = "yafsdp_cc.tools.cli.runner"


def install(*, is_forking: bool) -> None:
    """Let torch's agent fork ranks, if ``is_forking``, and send SIGCONT to stopped ranks that it ends, so they end."""
    if is_forking:
        multiprocessing.set_forkserver_preload(["yafsdp_cc.tools.cli.preload"])
        forkserver.ensure_running()

    class Handler(SubprocessHandler):
        """torch's handle of a rank, whose process may be a fork."""

        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            if not is_forking or _RUNNER not in args:
                return super()._popen(args, env)
            outputs = [each.fileno() if each else number for number, each in ((1, self._stdout), (2, self._stderr))]
            return _Rank(env, list(args[args.index(_RUNNER) + 1 :]), outputs)

        def close(self, death_sig: signal.Signals | None = None) -> None:
            with suppress(ProcessLookupError):  # the fork server reaps a fork as soon as it ends
                super().close(death_sig)
                os.killpg(self.proc.pid, signal.SIGCONT)  # a stopped process handles ``death_sig`` once it goes on

    # torch's agent takes the handler of ranks from this attribute; it has no argument for the handler
    setattr(api, "get_subprocess_handler", Handler)  # noqa: B010  (mypy forbids the assignment)


class _Rank:
    """A forked rank, with the members of ``subprocess.Popen`` that torch's agent uses."""

    def __init__(self, environment: dict[str, str], arguments: list[str], outputs: list[int]) -> None:
        forks = multiprocessing.get_context("forkserver")
        begun, begins = forks.Pipe(duplex=False)
        given = (environment, arguments, [_Descriptor(each) for each in outputs], begins)
        self._process = forks.Process(target=_be_rank, args=given)
        self._process.start()
        begins.close()
        with begun, suppress(EOFError):
            begun.recv_bytes()  # wait for the rank's ``setsid``: the agent may signal its process group
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(_RUNNER, timeout)
        return status


class _Descriptor:
    """A file descriptor of this process; unpickled in a forked rank, it becomes the number of the rank's own copy."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("detach"), (reduction.DupFd(self._number),)


def _be_rank(environment: dict[str, str], arguments: list[str], outputs: list[int], begins: Connection) -> NoReturn:
    """Run ``runner`` in a forked rank as ``python -m`` would, and end the process as the interpreter does."""
    from yafsdp_cc.tools.cli import runner

    status = 1
    try:
        os.setsid()
        for notice in (*runner.NOTICES, signal.SIGTERM):  # the fork server ignores these signals
            signal.signal(notice, signal.SIG_DFL)
        begins.send_bytes(b"begun")
        begins.close()
        for number, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for stream in (sys.stdout, sys.stderr):
            cast("io.TextIOWrapper", stream).reconfigure(write_through=True)  # unbuffered, as by python -u
        with suppress(OSError):  # the launcher may have no standard input
            sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has replaced stdin by an empty file
        multiprocessing.set_start_method(None, force=True)  # none is set now: the script may set one
        # OpenMP read its variable in the fork server. The call also makes a thread pool, which a fork does not inherit:
        # threads of the autograd engine that all made one at a time would abort ("Invalid thread pool").
        with suppress(ValueError):
            torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
        random.seed()
        np.random.seed()
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [runner.__file__, *arguments]
        runner.main()
        status = 0
    except SystemExit as leave:
        if leave.code is not None and not isinstance(leave.code, int):
            print(leave.code, file=sys.stderr)
        status = leave.code & 0xFF if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        runner.drop_names()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
