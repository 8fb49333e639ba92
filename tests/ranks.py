"""Real ranks for tests: ``on_ranks(world, body, *args)`` runs ``body`` on forked gloo processes.

With another ``backend`` they are spawned, and each takes a GPU, the same one where there are too few. The parent
imports torch and computes nothing (threads do not survive a fork). A rank that raises ends the others, and the test
fails with that rank's traceback; a hang fails within ``timeout`` seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # by the optimizers, at a second for every rank if not before the fork
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def on_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = 120.0, backend: str = "") -> list[Any]:
    """Run ``body(*args)`` on ``world`` ranks of one group; its picklable results, in rank order."""
    context: Any = multiprocessing.get_context("spawn" if backend else "fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, world, folder, timeout, sender, body, args, backend), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {[r for r in range(len(pipes)) if r not in results]} did not finish in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failed, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if failed:
                raise RankError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int,
    world: int,
    folder: str,
    timeout: float,
    sender: Any,
    body: Callable[..., Any],
    args: Any,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world)
        if backend:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            backend or "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        sender.send((False, body(*args)))
    except BaseException:
        sender.send((True, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def short_timeout(seconds: float) -> Iterator[None]:
    """A process group that gives up after ``seconds``."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
    yield
