"""Ranks of this machine joined by a slow network, for as long as a ``with`` lasts."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn

from yafsdp_cc.tools.netlab import namespaces
from yafsdp_cc.tools.netlab.keeper import keep
from yafsdp_cc.tools.netlab.links import UNSHAPED, LabError, Links, Traffic, Unavailable, bits_per_second

MOST_RANKS = 250
START = 30.0
"""Seconds that making the network namespaces of a ``Lab`` may take."""
GRACE = 0.3
"""Seconds by which the end of a rank's process may be seen later than the failures that it causes in others."""


class Lab:
    """Network namespaces, one per rank by default, joined by links of a given rate, delay and loss.

    The namespaces and all processes in them end with the ``with``, or with the process that made the ``Lab``. Raises
    ``Unavailable`` if the machine cannot have network namespaces.

    Args:
        bandwidth: what each rank can send, and receive, per second, headers included: ``100mbit``, ``2.5gbit`` or
            ``unshaped``.
        delay_ms: milliseconds that a frame takes one way; an answer takes twice that.
        loss: fraction of packets that are lost.
        ranks_per_machine: ranks that share a namespace, with one link to all others and none among themselves.
    """

    def __init__(
        self,
        ranks: int = 2,
        bandwidth: str = UNSHAPED,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        ranks_per_machine: int = 1,
    ) -> None:
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"ranks={ranks}: a lab has 1 to {MOST_RANKS}")
        if not 1 <= ranks_per_machine <= ranks or ranks % ranks_per_machine:
            raise ValueError(f"ranks_per_machine={ranks_per_machine}: the {ranks} ranks cannot be divided so")
        if not 0 <= delay_ms <= 10_000:
            raise ValueError(f"delay_ms={delay_ms}: 0 to 10000 milliseconds, one way")
        if not 0 <= loss < 1:
            raise ValueError(f"loss={loss}: the fraction of packets to lose, less than 1; 0.001: one in a thousand")
        bits_per_second(bandwidth)
        self._ranks, self._bandwidth = ranks, bandwidth
        self._options = (ranks // ranks_per_machine, ranks_per_machine, delay_ms, loss)

    def __enter__(self) -> Lab:
        maker, self._folder = os.getpid(), ""
        self._keeper, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            self._keeper.close()
            keep(maker, theirs, *self._options)
        theirs.close()
        self._keeper_pid = pid
        try:
            if not self._keeper.poll(START):
                os.kill(pid, signal.SIGKILL)
                raise Unavailable(f"making network namespaces took more than {START:.0f} s")
            try:
                self._folder, *descriptors = self._hear_keeper()
            except LabError as error:
                raise Unavailable(f"no network namespaces were made: {error}") from None
            self.links = Links(pid, tuple(descriptors))
            self._namespaces = {*map(namespaces.number, self.links.machines)}
            self.set_bandwidth(self._bandwidth)
            self._started = self.traffic()
            self._ended: list[Traffic] | None = None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ConnectionError):  # closing is not enough: forks hold the pipe, too
            self._keeper.send(None)
        self._keeper.close()
        os.waitpid(self._keeper_pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)  # a killed keeper has left the folder

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Run ``body(*args)`` on forked ranks in one gloo group with equal seeds; return the results, by pickle.

        The caller must have imported torch and computed nothing: threads do not survive a fork. The first rank that
        raises ends the others, and ``LabError`` holds its traceback. A hang ends all after ``timeout`` seconds.
        """
        store = f"{tempfile.mkdtemp(dir=self._folder)}/store"
        return self._on_ranks(timeout, _with_gloo, store, timeout, body, args)

    def launch(self, command: Sequence[str], timeout: float = 3600.0) -> None:
        """Run a command as every rank, with torchrun's variables set; raise ``LabError`` if a rank fails or hangs."""
        self._on_ranks(timeout, _execute, command)

    def set_bandwidth(self, bandwidth: str, *, rank: int | None = None, receive: str | None = None) -> None:
        """Change the rate of every link, or of one rank's link, also while ranks run; ranks may call it, too."""
        self.links.set_bandwidth(bandwidth, rank=rank, receive=receive)

    def traffic(self) -> list[Traffic]:
        """Return the bytes that every machine has sent and received since the lab began; ranks may call it, too."""
        return self.links.traffic()

    def bytes(self) -> list[Traffic]:
        """Return the bytes that every machine sent and received in the last run, or so far in the present one."""
        return [now.since(then) for now, then in zip(self._ended or self.traffic(), self._started, strict=True)]

    def _on_ranks(self, timeout: float, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of ``body(*args)`` on each rank, a process forked into its namespace.

        ``bytes`` counts what links carry meanwhile. The processes, and all that they have started, end with this call.
        """
        self._started, self._ended = self.traffic(), None
        context, deadline = multiprocessing.get_context("fork"), time.monotonic() + timeout
        processes: list[ForkProcess] = []
        missing: dict[Connection, int] = {}
        results = {}
        try:
            for rank in range(self._ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_be_rank, args=(os.getpid(), theirs, rank, self.links, body, args))
                process.start()
                theirs.close()
                processes.append(process)
                missing[ours] = rank
            while missing:
                ready = wait([self._keeper, *missing], timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise LabError(f"ranks {list(missing.values())} did not finish within {timeout:g} s")
                if self._keeper in ready:
                    self._hear_keeper()
                for answer in [each for each in missing if each in ready]:
                    rank = missing.pop(answer)
                    results[rank] = _received(answer, rank, processes)
            self._ended = self.traffic()
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            namespaces.sweep(self._namespaces)
        return [results[rank] for rank in range(self._ranks)]

    def _hear_keeper(self) -> Any:
        """Return the keeper's message, or raise it if it is an error: why there is no lab, or what broke the lab."""
        try:
            sent = self._keeper.recv()
        except (EOFError, ConnectionError):
            sent = LabError("the process that keeps the lab was killed")
        if isinstance(sent, Exception):
            raise sent
        return sent


def _received(answer: Connection, rank: int, processes: Sequence[ForkProcess]) -> Any:
    """Return the result of a rank's body; raise its error, or how its process ended."""

    def end_of(rank: int) -> LabError:
        processes[rank].join()
        status = processes[rank].exitcode or 0
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return LabError(f"rank {rank} {how} before the body was done")

    try:
        failed, value = answer.recv()
    except EOFError:
        raise end_of(rank) from None
    if failed:
        # look for a killed rank, which sends no error: other ranks fail as they lose their connection to that rank
        ended = wait([process.sentinel for process in processes], timeout=GRACE)
        killed = [other for other, process in enumerate(processes) if process.sentinel in ended]
        raise end_of(killed[0]) if killed else LabError(f"rank {rank}:{value}")
    return value


# In the process of a rank ------------------------------------------------------------------------------------------


def _be_rank(
    parent: int, answer: Connection, rank: int, links: Links, body: Callable[..., Any], args: tuple[Any, ...]
) -> NoReturn:
    """Enter the rank's namespace before there are threads, run the body and send what it returns.

    A rank that has answered waits to be killed: if it closed its connections, another rank's last call might fail.
    """
    try:
        os.setsid()  # only the lab handles Ctrl-C, and then ends its ranks
        namespaces.enter(links.of_rank(rank), links.user)
        namespaces.die_with(parent)
        os.environ.update(links.variables(rank))
        result = body(*args)
        _flush()
        answer.send((False, result))
    except LabError as error:
        answer.send((True, f" {error}"))
    except BaseException:
        _flush()
        answer.send((True, f"\n{traceback.format_exc()}"))
    while True:  # wait to be killed, when all ranks have answered
        signal.pause()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _with_gloo(store: str, timeout: float, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    # ranks find each other by a file, so that the links carry only their own messages
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=timeout), world_size=world, rank=rank)
    return body(*args)


def _execute(command: Sequence[str]) -> None:
    try:
        status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise LabError(str(error)) from None
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
        raise LabError(f"{how}: {shlex.join(command)}")
