"""Real ranks for tests: below ``@ranks(2)``, the body of a test runs on two forked gloo processes.

``on_ranks(2, body, *args)`` does the same within a test that goes on with the results, or starts several groups. With
another ``backend`` ranks are spawned, and each takes a GPU, the same one where there are too few, which NCCL is told to
bear. A rank that raises ends the others, and the test fails with that rank's traceback; a hang fails within ``timeout``
seconds.

Ranks stay for the tests after this one, each in a new group: what a process does for the first time takes longer than
most tests. Forked ones serve one file. They end with a test that fails or leaves anything behind (``tests.leftovers``),
and other ones are forked where this process is not as it was, where a body cannot be pickled, or by ``fresh=True``.

The parent imports torch and computes nothing: threads do not survive a fork. (A worker of pytest-xdist has one thread
besides, which waits for messages of its controller and holds no lock that a rank takes.)

What ranks import lazily is imported here, before the fork, and the objects that they inherit are hidden from their
garbage collectors: looking at those would copy most of the parent's memory into each rank.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, ClassVar

import torch
import torch._dynamo  # by the optimizers
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import tests.internals  # noqa: F401 - by the first operation on a sharded parameter
import yafsdp_cc.api  # noqa: F401 - by the first of yafsdp_cc's names
from tests.leftovers import Before


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def ranks(
    world: int | str,
    *,
    timeout: float = 240.0,
    patience: float | None = None,
    backend: str = "",
    fresh: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on so many ranks of one group, each with the test's own arguments.

    Args:
        world: how many, or the name of the test's argument that says so.
        timeout: seconds until the test fails.
        patience: seconds that a collective waits; None for as long as the whole test.
        backend: of the process group; gloo on forked ranks if empty, else ranks are spawned.
        fresh: whether ranks are forked for this test alone.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            count = arguments[world] if isinstance(world, str) else world
            # A spawned rank finds a function by its name, which is the decorated one's.
            settings: Any = {"timeout": timeout, "patience": patience, "backend": backend, "fresh": fresh}
            on_ranks(count, _body_of, test, arguments, **settings)

        return test

    return decorate


def _body_of(test: Callable[..., None], arguments: dict[str, Any]) -> None:
    inspect.unwrap(test)(**arguments)


def on_ranks(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 240.0,
    patience: float | None = None,
    backend: str = "",
    fresh: bool = False,
) -> list[Any]:
    """Run ``body(*args)`` on ``world`` ranks of one group; its picklable results, in rank order.

    A collective waits for ``patience`` seconds, as long as the whole job if it is None.
    """
    patience = patience or timeout
    if backend:
        spawned = _SpawnedRanks.idle.pop(world, None) or _SpawnedRanks(world)
        return spawned.run((patience, body, args, backend), timeout)
    if not fresh and (job := _pickled(body, args)) is not None:
        return _ForkedRanks.of(world).run((patience, job), timeout)
    with tempfile.TemporaryDirectory() as folder:
        started = [_start("fork", _rank, rank, world, folder, patience, body, args) for rank in range(world)]
        try:
            return _collect([pipe for pipe, _ in started], time.monotonic() + timeout)
        finally:
            _end(started)


SPAWN = "spawn"
"""How ranks of another backend than gloo are started: CUDA does not survive a fork."""


class _SpawnedRanks:
    """Ranks that run one body after another."""

    idle: ClassVar[dict[int, Any]] = {}
    """Those that wait for a body, by how many they are."""

    def __init__(self, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory()  # with the stores of all groups; NCCL's threads read them
        self._started = self._start(world)
        self.world = world

    def _start(self, world: int) -> list[tuple[Any, Any]]:
        return [_start(SPAWN, _serve, rank, world, self._folder.name) for rank in range(world)]

    def run(self, job: Any, timeout: float) -> list[Any]:
        results = None
        try:
            for pipe, _ in self._started:
                pipe.send(job)
            results = _collect([pipe for pipe, _ in self._started], time.monotonic() + timeout)
        finally:
            if results is None:  # whoever failed may have left anything behind
                _end(self._started)
        self.idle[self.world] = self
        return results


class _ForkedRanks(_SpawnedRanks):
    """Ranks that run one body after another of a file."""

    idle: ClassVar[dict[int, Any]] = {}

    @classmethod
    def of(cls, world: int) -> _ForkedRanks:
        """Return ranks forked from a process that was like this one is now."""
        found = cls.idle.pop(world, None)
        if found is not None and found._before.changes():
            _end(found._started)
            found = None
        return found or cls(world)

    def _start(self, world: int) -> list[tuple[Any, Any]]:
        self._before = Before()
        return [_start("fork", _keep, rank, world, self._folder.name) for rank in range(world)]

    def run(self, job: Any, timeout: float) -> list[Any]:
        found = super().run((*job, dict(os.environ), os.getcwd()), timeout)
        if any(left for _, left in found):
            del self.idle[self.world]
            _end(self._started)
        return [result for result, _ in found]


def end_of_file() -> None:
    """End the ranks that have served a file of tests."""
    while _ForkedRanks.idle:
        _, ranks = _ForkedRanks.idle.popitem()
        _end(ranks._started)


def _pickled(*job: Any) -> bytes | None:
    """Return what ranks that are there are sent; None if that cannot be."""
    try:
        return pickle.dumps(job)
    except Exception:  # of any class: what is pickled says so
        return None


def _start(method: str, target: Callable[..., None], *args: Any) -> tuple[Any, Any]:
    """Start a process that is given the other end of a pipe; return this end, and the process."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _end(started: list[tuple[Any, Any]]) -> None:
    for pipe, process in started:
        process.kill()
        process.join()
        pipe.close()


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {[r for r in range(len(pipes)) if r not in results]} did not finish in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failed, value = pipe.recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if failed:
                raise RankError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe: Any, rank: int, world: int, folder: str, patience: float, body: Callable[..., Any], args: Any) -> None:
    """Run one body, and stay until the parent ends this process: its own end would break the others' connections."""
    gc.freeze()
    _run(pipe, rank, world, os.path.join(folder, "store"), patience, body, args, "gloo")
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()


def _keep(pipe: Any, rank: int, world: int, folder: str) -> None:
    """Run one body after another, and send what each has left behind, too."""
    gc.freeze()
    before, parent = Before(), multiprocessing.parent_process()
    for count in itertools.count():
        if pipe not in wait([pipe, parent.sentinel]):  # type: ignore[union-attr] # the parent has ended
            return
        patience, job, environment, place = pipe.recv()
        if dist.is_initialized():  # only now: the other ranks may have needed it until all were done
            _forget_group()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(place)
        file = os.path.join(folder, str(count))
        with warnings.catch_warnings():
            _run(pipe, rank, world, file, patience, _watched, (job, before), "gloo")


def _watched(job: bytes, before: Before) -> tuple[Any, list[str]]:
    body, args = pickle.loads(job)
    return body(*args), before.changes()


def _forget_group() -> None:
    """Leave the group, with what knows its ranks by their numbers: the next one's have the same."""
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    getattr(_redistribute, "clear_redistribute_planner_cache", int)()  # torch before 2.13 may have none
    gc.collect()


def _serve(pipe: Any, rank: int, world: int, folder: str) -> None:
    """Run one body after another."""
    if world > torch.cuda.device_count():
        os.environ |= ranks_of_one_gpu(rank)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    for count in itertools.count():
        job = pipe.recv()
        if dist.is_initialized():  # only now: the other ranks may have needed it until all were done
            dist.destroy_process_group()
        gc.collect()
        _run(pipe, rank, world, os.path.join(folder, str(count)), *job)


def ranks_of_one_gpu(rank: int) -> dict[str, str]:
    """Return environment variables by which NCCL takes ranks of one GPU, where it reads them: before its first group.

    It refuses two ranks with the same GPU of the same host. So each names a host of its own, and they talk over sockets
    of the loopback interface: rightly, but not fast.
    """
    sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    others = dict.fromkeys(("NCCL_MNNVL_ENABLE", "NCCL_RAS_ENABLE"), "0")  # what asks the machine about its neighbours
    return {"NCCL_HOSTID": f"rank {rank}"} | sockets | others


def _run(
    pipe: Any,
    rank: int,
    world: int,
    file: str,
    patience: float,
    body: Callable[..., Any],
    args: Any,
    backend: str,
) -> None:
    """Run a body in a group of its own, and send whether it failed, and its result or traceback."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        store = dist.FileStore(file, world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience))
        pipe.send((False, body(*args)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()


@contextmanager
def short_timeout(seconds: float) -> Iterator[None]:
    """A process group that gives up after ``seconds``."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
    yield
