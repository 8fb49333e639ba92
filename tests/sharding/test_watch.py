"""While ranks wait, one of them says for which rank, and what that does instead, before anything times out."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import yafsdp_cc
from tests.ranks import RankError
from tests.ranks import on_ranks as on_kept_ranks
from yafsdp_cc.checkpoint import files
from yafsdp_cc.sharding.watch import SECONDS

on_ranks = partial(on_kept_ranks, fresh=True)  # a watch prints to its process's own standard error


def trained(steps: int = 2, seconds: float = 1) -> nn.Module:
    os.environ[SECONDS] = str(seconds)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    yafsdp_cc.shard(model, units=[nn.Linear])
    for _ in range(steps):
        model(torch.ones(1, 64)).sum().backward()
    return model


def slow_batch(seconds: float) -> None:
    time.sleep(seconds)


def test_a_rank_that_is_stuck_elsewhere_is_named_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        model = trained()
        if dist.get_rank() == 1:
            slow_batch(4)
        model(torch.ones(1, 64)).sum().backward()

    on_ranks(3, body)
    told = capfd.readouterr().err
    head = r"yafsdp-cc: ranks 0, 2 wait for rank 1, \d+ s so far \(the process group's time-out is 240 s\)\n"
    found, *more = re.findall(f"{head}((?:  .*\n)+)", told)
    assert len(more) < 3  # again only after twice as long
    at = r"  rank 1: at test_watch.py:\d+ slow_batch < test_watch.py:\d+ body < .*; \d+ operations, the last: .*\n"
    assert re.search(at, found), told
    assert re.search(r"  rank 0: at .*test_watch.py:\d+ body .*\n(    .*\n)+  rank 1", found), told


def stop_for(seconds: float, after: float = 0.0) -> None:
    """Stop this process, in a while, from a child of it."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(after)
        os.kill(parent, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)


def test_another_rank_tells_when_the_first_one_is_stopped_while_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        model = trained(seconds=2)
        if dist.get_rank() == 0:
            stop_for(7, after=1.5)  # it has written by then where it waits
        if dist.get_rank() == 1:
            slow_batch(8)
        model(torch.ones(1, 64)).sum().backward()

    on_ranks(3, body)
    told = capfd.readouterr().err
    assert re.search(r"yafsdp-cc: rank 2 waits for ranks 0, 1, .*\n  rank 0: no answer: stopped, or gone\n", told), told


def test_a_rank_that_is_stopped_gives_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        model = trained()
        if dist.get_rank() == 0:
            stop_for(4)
            time.sleep(0.5)
        model(torch.ones(1, 64)).sum().backward()

    on_ranks(2, body)
    told = capfd.readouterr().err
    assert "yafsdp-cc: rank 1 waits for rank 0, " in told
    assert "  rank 0: no answer: stopped, or gone\n" in told


def test_ranks_that_wait_for_nobody_are_not_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        trained()
        slow_batch(3)

    on_ranks(2, body)
    assert capfd.readouterr().err == ""


def test_ranks_in_different_operations_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        model = trained()
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            model(torch.ones(1, 64))

    with pytest.raises(RankError):
        on_ranks(2, body, timeout=10)
    assert "yafsdp-cc: the ranks wait in different operations, " in capfd.readouterr().err


def test_a_long_save_that_one_rank_writes_slowly_is_no_hang(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = compile("def slow(*_): time.sleep(4)", "<frozen slow disk>", "exec")  # ``<frozen`` is no script

    def body() -> None:
        model = trained()
        if dist.get_rank() == 0:
            names: dict[str, Any] = {"time": time}
            exec(code, names)
            files.check_space = names["slow"]
        yafsdp_cc.save(tmp_path / "last", model)

    on_ranks(2, body)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("ends", ["engine", "process group"])
def test_a_watch_ends_with_what_it_looks_at(ends: str) -> None:
    """Its thread holds the group's store, whose server or file would otherwise be there for seconds more."""

    def body() -> None:
        model = trained(seconds=3600)
        (watch,) = (each for each in threading.enumerate() if each.name == "yafsdp_cc.watch")
        if ends == "engine":
            del model
            gc.collect()
        else:
            dist.destroy_process_group()
        watch.join(30)
        assert not watch.is_alive()

    on_ranks(2, body)


def test_a_number_of_seconds_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        os.environ[SECONDS] = "soon"
        with pytest.raises(ValueError, match="YAFSDP_CC_WATCH=soon"):
            yafsdp_cc.shard(nn.Sequential(nn.Linear(8, 8)))(torch.ones(1, 64))

    on_ranks(2, body)
