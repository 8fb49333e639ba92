"""Forked ranks of a lab: each enters its namespace before it has threads, joins the gloo group, and runs the body."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from yafsdp_cc.netlab import namespaces
from yafsdp_cc.netlab.environment import variables
from yafsdp_cc.netlab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Callable

    from yafsdp_cc.netlab.keeper import Keeper

GRACE = 0.3
"""Seconds that the end of a process may be seen after what it did to others."""


class Ranks:
    """All ranks of one run. Who has answered waits for the end: a connection closed early may fail another's last call.

    They find each other by a file, so that nothing crosses the links but what they send to each other.
    """

    def __init__(self, keeper: Keeper, timeout: float, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._keeper = keeper
        self._timeout = timeout
        context = multiprocessing.get_context("fork")
        self._processes, self._answers = [], []
        store = f"file://{tempfile.mkdtemp(dir=keeper.folder)}/store"
        for rank in range(len(keeper.links.descriptors)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(os.getpid(), rank, keeper, timeout, store, theirs, body, args)
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._answers.append(ours)

    def finish(self) -> list[Any]:
        """Wait for all results, in rank order; raises what went wrong first."""
        deadline = time.monotonic() + self._timeout
        results: dict[int, Any] = {}
        while missing := [rank for rank in range(len(self._answers)) if rank not in results]:
            waited = [self._keeper.word, *(self._answers[rank] for rank in missing)]
            ready = wait(waited, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LabError(f"ranks {missing} did not finish within {self._timeout:g} s")
            self._keeper.check()
            for rank in missing:
                if self._answers[rank] in ready:
                    results[rank] = self._answer(rank)
        return [results[rank] for rank in range(len(self._answers))]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process, answer in zip(self._processes, self._answers, strict=True):
            process.join()
            answer.close()

    def _answer(self, rank: int) -> Any:
        try:
            failed, value = self._answers[rank].recv()
        except EOFError:
            raise LabError(self._end_of(rank)) from None
        if failed:
            # A rank that is killed sends nothing, and the others lose their connection to it.
            ended = wait([process.sentinel for process in self._processes], timeout=GRACE)
            killed = [other for other, process in enumerate(self._processes) if process.sentinel in ended]
            raise LabError(self._end_of(killed[0]) if killed else f"rank {rank}:\n{value}")
        return value

    def _end_of(self, rank: int) -> str:
        self._processes[rank].join()
        status = self._processes[rank].exitcode or 0
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"rank {rank} {how} before the body was done"


def _rank(
    parent: int,
    rank: int,
    keeper: Keeper,
    timeout: float,
    store: str,
    answer: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the lab, which then ends its ranks
        namespaces.enter(keeper.links.rank(rank), keeper.links.user)
        namespaces.die_with(parent)
        os.environ.update(variables(keeper.links, rank))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo", store, timeout=timedelta(seconds=timeout), rank=rank, world_size=len(keeper.links.descriptors)
        )
        result = body(*args)
        _flush()
        answer.send((False, result))
    except BaseException:
        _flush()
        answer.send((True, traceback.format_exc()))
    while True:  # until all have answered, and are killed
        signal.pause()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
