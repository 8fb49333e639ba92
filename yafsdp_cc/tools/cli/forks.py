"""Ranks that are forked from a process that has imported torch: a restart takes no seconds of imports.

The launcher forks the server before it has threads, or asks for GPUs. The server imports what every rank needs, and
computes nothing: a fork of it is as good as a new process.

    launcher ──request: environment, arguments, files for its output──> server ──fork──> rank
             <──────────── its process id; its status, when it ends ────────────
"""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import pickle
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import IO, Any, NoReturn, cast

import torch
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

_LENGTH = struct.Struct("<Q")
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_LOOK = 0.02
"""Seconds after which a wait for a rank's end looks again."""


class ForkServer:
    """The process that ranks are forked from. Make it before this process has threads."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        launcher = os.getpid()
        if os.fork() == 0:
            self._socket.close()
            _serve(theirs, launcher)
        theirs.close()
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        """Exit status of ranks that have ended, by process id."""

    def start(self, environment: dict[str, str], arguments: list[str], outputs: list[int]) -> int:
        """Fork a rank that runs ``runner`` with ``arguments``; return its process id.

        Args:
            environment: its environment variables.
            arguments: of the runner.
            outputs: descriptors of files for its standard output and errors.
        """
        request = pickle.dumps((environment, arguments))
        with self._lock:
            socket.send_fds(self._socket, [_LENGTH.pack(len(request))], outputs)
            self._socket.sendall(request)
            while True:
                kind, pid, status = pickle.loads(_received(self._socket))
                if kind == "started":
                    return int(pid)
                self._statuses[pid] = status

    def status_of(self, pid: int) -> int | None:
        """Return the exit status of a rank, negative for a signal; None while it runs."""
        with self._lock:
            while pid not in self._statuses and _is_readable(self._socket):
                _, ended, status = pickle.loads(_received(self._socket))
                self._statuses[ended] = status
            return self._statuses.get(pid)


_RUNNER = "yafsdp_cc.tools.cli.runner"


def install(server: ForkServer | None) -> None:
    """Let torch's agent start our runner's ranks from a server, if there is one, and end them if they are stopped."""

    class Handler(SubprocessHandler):
        """torch's handle of a rank, whose process may be a fork."""

        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            if server is None or _RUNNER not in args:
                return super()._popen(args, env)
            return _Rank(server, env, list(args[args.index(_RUNNER) + 1 :]), self._stdout, self._stderr)

        def close(self, death_sig: signal.Signals | None = None) -> None:
            super().close(death_sig)
            with suppress(ProcessLookupError):
                os.killpg(self.proc.pid, signal.SIGCONT)  # a stopped process takes no other signal than SIGKILL

    def handler_of(**kwargs: Any) -> Handler:
        return Handler(**kwargs)

    # torch takes the handler from this module's attribute only
    setattr(api, "get_subprocess_handler", handler_of)  # noqa: B010  (mypy forbids the assignment)


class _Rank:
    """A forked rank, with the members of ``subprocess.Popen`` that torch's agent uses."""

    def __init__(
        self,
        server: ForkServer,
        environment: dict[str, str],
        arguments: list[str],
        out: IO[str] | None,
        err: IO[str] | None,
    ) -> None:
        self._server = server
        outputs = [each.fileno() if each is not None else number for number, each in ((1, out), (2, err))]
        self.pid = server.start(environment, arguments, outputs)

    def poll(self) -> int | None:
        return self._server.status_of(self.pid)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(_RUNNER, timeout)
            time.sleep(_LOOK)
        return status


def _is_readable(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


def _received(connection: socket.socket, head: bytes = b"") -> bytes:
    """Return a message of the other side; raise ``ConnectionError`` if that has ended."""

    def exactly(count: int, content: bytes = b"") -> bytes:
        while len(content) < count:
            some = connection.recv(count - len(content))
            if not some:
                raise ConnectionError("the process that ranks are forked from has ended")
            content += some
        return content

    (length,) = _LENGTH.unpack(exactly(_LENGTH.size, head))
    return exactly(length)


# In the server -------------------------------------------------------------------------------------------------------


def _serve(launcher: socket.socket, parent: int) -> NoReturn:
    """Fork ranks until the launcher ends, and send it their statuses."""
    try:
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()  # Ctrl-C in a terminal is for the launcher and the ranks
        _import_what_ranks_need()
        wake, woken = socket.socketpair()
        for each in (wake, woken):
            each.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        for end in (launcher, woken):
            selector.register(end, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                with suppress(BlockingIOError):
                    woken.recv(4096)
                _tell_statuses(launcher)
            if launcher in ready:
                _fork(launcher, [selector, wake, woken])
    except (ConnectionError, KeyboardInterrupt):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _import_what_ranks_need() -> None:
    import torch._dynamo  # the first step of any optimizer imports it  # noqa: F401

    import yafsdp_cc.api
    import yafsdp_cc.checkpoint.load
    import yafsdp_cc.checkpoint.save
    import yafsdp_cc.rescue.rescue
    import yafsdp_cc.tools.cli.runner
    import yafsdp_cc.tools.metrics  # noqa: F401


def _tell(launcher: socket.socket, *message: object) -> None:
    content = pickle.dumps(message)
    launcher.sendall(_LENGTH.pack(len(content)) + content)


def _tell_statuses(launcher: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = ended
            _tell(launcher, "ended", pid, os.waitstatus_to_exitcode(status))


def _fork(launcher: socket.socket, ours: list[Any]) -> None:
    head, outputs, _, _ = socket.recv_fds(launcher, _LENGTH.size, 2)
    if not head:
        raise ConnectionError
    environment, arguments = pickle.loads(_received(launcher, head))
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(begins)
        os.close(begun)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (launcher, *ours):
            each.close()
        _be_rank(environment, arguments, outputs)
    os.close(begins)
    os.read(begun, 1)  # the launcher may signal the rank's process group at once
    for each in (begun, *outputs):
        os.close(each)
    _tell(launcher, "started", pid, 0)


def _be_rank(environment: dict[str, str], arguments: list[str], outputs: list[int]) -> NoReturn:
    """Run the runner as ``python -m`` would, and end as the interpreter does."""
    from yafsdp_cc.tools.cli import runner

    status = 1
    try:
        for number, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for stream in (sys.stdout, sys.stderr):
            cast("io.TextIOWrapper", stream).reconfigure(write_through=True)  # as by python -u
        with suppress(KeyError, ValueError):
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # which OpenMP has read when it was loaded
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
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
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
