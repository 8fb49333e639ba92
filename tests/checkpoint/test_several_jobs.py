"""Several jobs that save and load at one path, and are killed at any moment: what is there is the whole of one save."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import yafsdp_cc
from tests.checkpoint.jobs import in_a_process
from tests.internals import break_exchange_of_folders
from tests.ranks import ranks
from tests.soak import LONG

CALLS = 6
"""Saves and loads of each rank, if it is not killed."""


def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return yafsdp_cc.shard(model, units=[nn.Linear]) if dist.is_initialized() else model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def loaded(path: Path, model: nn.Module) -> int:
    """The number of the save that was loaded, of which everything is."""
    fill(model, -1.0)
    number: int = yafsdp_cc.load(path, model)["number"]
    for name, parameter in model.named_parameters():
        values = getattr(parameter, "_local_tensor", parameter).detach()
        assert values.eq(number).all(), f"{name} has {values.unique().tolist()} in save {number}"
    return number


class Log:
    """What the jobs of a round say, a line each; what was written before a kill stays."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file = file

    def say(self, *words: Any) -> None:
        os.write(self._descriptor, (" ".join(map(str, words)) + "\n").encode())

    def lines(self) -> list[list[str]]:
        return [line.split(" ", 2) for line in self._file.read_text().splitlines()]


def die_at(event: int) -> None:
    """SIGKILL this process at its ``event``-th touch of files, locks or the C library."""
    seen = 0

    def hook(name: str, _: Any) -> None:
        nonlocal seen
        if name.startswith(("open", "os.", "shutil.", "fcntl.", "ctypes.")):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def work(path: Path, log: Log, job: int, seed: int, rank: int, world: int, event: int) -> None:
    """Save and load in turn, as the seed tells, alike on all ranks of the job."""
    folder = path.parent.parent / f"store-{job}"
    store = dist.FileStore(str(folder), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    draw, model = random.Random(seed), sharded()
    dist.barrier()
    if event:
        die_at(event)
    for call in range(CALLS):
        number = 100 * job + call
        if draw.random() < 0.6:
            fill(model, float(number))
            log.say("begin", number)
            saving = yafsdp_cc.save(path, model, asynchronous=draw.random() < 0.3, number=number)
            saving.result()
            log.say("saved", number)
        else:
            log.say("read", loaded(path, model))
    dist.barrier()


def started(path: Path, log: Log, job: int, draw: random.Random) -> list[int]:
    """Fork the ranks of a job, which are one group of processes; one of them may die by itself."""
    world, seed = draw.choice((1, 2)), draw.randrange(2**31)
    dying, event = draw.randrange(world), draw.choice((0, draw.randrange(1, 120)))
    processes: list[int] = []
    for rank in range(world):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                os.setpgid(0, processes[0] if processes else 0)
                work(path, log, job, seed, rank, world, event if rank == dying else 0)
                status = 0
            except BaseException as error:
                is_alone = event or "Connection" in str(error) or "timed out" in str(error)
                log.say("alone" if is_alone and isinstance(error, RuntimeError) else "error", job, repr(error))
                if not is_alone:
                    traceback.print_exc()
            finally:
                os._exit(status)
        processes.append(process)
        with contextlib.suppress(OSError):  # it has done so itself, or ended
            os.setpgid(process, processes[0])
    return processes


def one_round(folder: Path, seed: int) -> dict[str, int]:
    """Two to four jobs, some killed whole or in part; what they did, counted."""
    draw, path, log = random.Random(seed), folder / "runs" / "checkpoint", Log(folder / "log")
    if seed % 2:
        break_exchange_of_folders()
    path.parent.mkdir(parents=True)
    model = sharded()
    fill(model, 99.0)
    yafsdp_cc.save(path, model, number=99)
    jobs = [started(path, log, job, draw) for job in range(1, draw.randint(2, 4) + 1)]
    for processes in jobs:
        if draw.random() < 0.5:
            time.sleep(draw.random() * 0.4)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(processes[0], signal.SIGKILL)
    ends = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for processes in jobs for process in processes]
    left = len(os.listdir(path.parent)) - path.exists()
    lines = log.lines()
    errors = [line for line in lines if line[0] == "error"]
    assert not errors, errors
    number = loaded(path, model)
    begun = {99, *(int(value) for word, value, *_ in lines if word == "begin")}
    saved = {int(value) for word, value, *_ in lines if word == "saved"}
    assert number in begun
    # A job saves one after the other: its older ones do not come back. And what was saved replaces what was there.
    assert all(other <= number for other in saved if other // 100 == number // 100), (number, saved)
    assert number != 99 or not saved, (number, saved)
    fill(model, 7.0)
    yafsdp_cc.save(path, model, number=7)
    assert os.listdir(path.parent) == [path.name]
    assert loaded(path, model) == 7
    counts = {word: sum(line[0] == word for line in lines) for word in ("begin", "saved", "read", "alone")}
    return {"jobs": len(jobs), "killed": ends.count(-signal.SIGKILL), "left": left, **counts}


@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 202), marks=LONG)], ids=["short", "long"])
def test_jobs_that_save_to_one_path(seeds, tmp_path):
    total: dict[str, int] = {}

    def body(seed: int) -> int:
        counts = one_round(tmp_path / str(seed), seed)
        (tmp_path / str(seed) / "counts").write_text(json.dumps(counts))
        return 0

    for seed in seeds:
        (tmp_path / str(seed)).mkdir()
        assert in_a_process(body, seed) == 0, f"round {seed}"
        for name, count in json.loads((tmp_path / str(seed) / "counts").read_text()).items():
            total[name] = total.get(name, 0) + count
    print(f"\n{len(seeds)} rounds: {total}")
    assert total["saved"] + total["read"] > 0
    if len(seeds) > 2:
        assert all(total.values()), total


@ranks(1)
def test_of_what_killed_saves_have_left_the_newest_is_loaded(tmp_path):
    model = sharded()
    for number, age in ((1, 10), (2, 30), (3, 20)):
        yafsdp_cc.save(tmp_path / str(number), model, number=number)
        left = tmp_path / f"step.saving-0000000{number}"
        left.mkdir()
        (tmp_path / str(number)).rename(left / "previous")
        os.utime(left / "previous" / ".metadata", (age, age))
    assert yafsdp_cc.load(tmp_path / "step", model)["number"] == 2
