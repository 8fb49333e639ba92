"""Whatever ends a lab, neither a process nor a namespace of it is left; and it needs no privileges."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.netlab.labs import lab_of, reduced
from yafsdp_cc.tools.netlab import Lab, LabError, Unavailable

NOBODY = 65534
SET_DUMPABLE = 4  # of prctl


def _with_a_stray(told: Connection) -> None:
    """A rank that leaves its session by a child, tells of itself, and hangs."""
    stray = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    told.send((os.getpid(), stray.pid, os.readlink("/proc/self/ns/net")))
    time.sleep(1000)


def _program(told: Connection, folder: Path) -> None:
    """The program that makes a lab and is killed."""
    tempfile.tempdir = str(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Lab(ranks=2, delay_ms=1) as lab:
            hub = os.readlink(lab.links.hub)
            told.send((lab.links.keeper, hub))
            lab.run(_with_a_stray, told)
    except Unavailable as reason:
        told.send(str(reason))
    except KeyboardInterrupt:
        pass


def _left(processes: set[int], namespaces: set[str]) -> dict[int, set[str]]:
    """Which of the processes live, and which are in one of the namespaces or hold it."""
    left = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_alive = " Z " not in (entry / "stat").read_text()
            held = {os.readlink(entry / "ns" / "net"), *(os.readlink(one) for one in (entry / "fd").iterdir())}
        except OSError:
            continue
        if is_alive and (int(entry.name) in processes or held & namespaces):
            left[int(entry.name)] = held & namespaces
    return left


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_killed_program(ending: signal.Signals, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    program = context.Process(target=_program, args=(theirs, tmp_path))
    program.start()
    try:
        theirs.close()
        began = ours.recv()
        if isinstance(began, str):
            pytest.skip(began)  # why no lab can be had on this machine
        keeper, hub = began
        ranks = [ours.recv() for _ in range(2)]
        processes = {keeper, *(one for rank in ranks for one in rank[:2])}
        namespaces = {hub, *(rank[2] for rank in ranks)}
        assert len(namespaces) == 3
        assert len(_left(processes, namespaces).keys() - processes) == 1  # the relay
        assert list(tmp_path.iterdir())
    finally:
        assert program.pid is not None
        os.kill(program.pid, ending)
        program.join()
    deadline = time.monotonic() + 10
    while left := (_left(processes, namespaces) or list(tmp_path.iterdir())):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_an_exception_leaves_nothing() -> None:
    seen = []

    def fail() -> None:
        with lab_of(ranks=2) as lab:
            seen.append((lab.links.keeper, os.readlink(lab.links.hub)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    ((keeper, hub),) = seen
    assert not _left({keeper}, {hub})


def test_the_end_of_the_keeper_is_told() -> None:
    with lab_of(ranks=2) as lab:
        os.kill(lab.links.keeper, signal.SIGKILL)
        with pytest.raises(LabError, match="the process that keeps the lab was killed"):
            lab.run(time.sleep, 60)


def test_the_end_of_the_relay_is_told() -> None:
    with lab_of(ranks=2, delay_ms=1) as lab:
        (relay,) = _left(set(), {os.readlink(lab.links.hub)}).keys() - {lab.links.keeper}
        os.kill(relay, signal.SIGKILL)
        with pytest.raises(LabError, match="the relay between the ranks ended"):
            lab.run(time.sleep, 60)


def _unprivileged(told: Connection, groups: Any) -> None:
    os.setgroups(groups)
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 1, 0, 0, 0)  # as after an exec
    try:
        with Lab(ranks=2, bandwidth="100mbit", delay_ms=1) as lab:
            told.send((True, [phase.sent for phase in lab.run(reduced, lab, timeout=30)], lab.run(dist.get_rank)))
    except Unavailable as reason:
        told.send((False, str(reason)))


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are without privileges already")
def test_no_privileges_are_needed() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_unprivileged, args=(theirs, []))
    process.start()
    theirs.close()
    worked, *found = ours.recv()
    process.join()
    if not worked:
        pytest.skip(found[0])  # why an unprivileged user can have no lab on this machine
    sent, ranks = found
    assert all(1 << 20 < count < 1.1 * (1 << 20) for count in sent)
    assert ranks == [0, 1]
