"""Ranks in a lab: their results, what crosses their links by the counters, and how they fail."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.netlab.labs import MEGABYTE, lab_of, reduced
from yafsdp_cc.tools.netlab import Lab, LabError, Unavailable
from yafsdp_cc.tools.netlab.links import bits_per_second, shaping


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_ring(ranks: int) -> None:
    with lab_of(ranks=ranks, bandwidth="200mbit") as lab:
        payload = 2 * MEGABYTE * (ranks - 1) / ranks
        for phase in lab.run(reduced, lab):
            assert payload < phase.sent < 1.1 * payload
            assert payload < phase.received < 1.1 * payload
        last = lab.bytes()
        assert all(payload < own.payload_sent < own.sent < 1.15 * payload for own in last)
        time.sleep(0.1)
        assert lab.bytes() == last


def test_nothing_crosses_while_nobody_speaks() -> None:
    with lab_of(ranks=2) as lab:
        assert lab.run(dist.get_rank) == [0, 1]
        before = lab.traffic()
        time.sleep(0.3)
        assert lab.traffic() == before


def _two_rates(lab: Lab) -> list[float]:
    taken = []
    for bandwidth in ("unshaped", "10mbit", "unshaped"):
        if dist.get_rank() == 0:
            lab.set_bandwidth(bandwidth)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(torch.ones(MEGABYTE // 4))
        taken.append(time.perf_counter() - start)
    return taken


def test_the_rate_changes_under_a_running_group() -> None:
    with lab_of(ranks=2) as lab:
        for before, slow, after in lab.run(_two_rates, lab):
            assert slow > 0.7  # 1 MiB at 10 Mbit/s takes 0.84 s, less the bucket
            assert slow > 5 * min(before, after)


def _each_way(lab: Lab) -> list[float]:
    if dist.get_rank() == 0:
        lab.set_bandwidth("10mbit", rank=1, receive="unshaped")
    taken = []
    for sender in (1, 0):
        dist.barrier()
        start = time.perf_counter()
        dist.broadcast(torch.ones(MEGABYTE // 4), sender)
        dist.barrier()
        taken.append(time.perf_counter() - start)
    return taken


def test_a_rank_can_be_slow_in_one_direction() -> None:
    with lab_of(ranks=2) as lab:
        for sent, received in lab.run(_each_way, lab):
            assert sent > 0.7
            assert sent > 5 * received


def _round_trip(loops: int) -> float:
    one = torch.ones(1)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(loops):
        if dist.get_rank() == 0:
            dist.send(one, 1)
            dist.recv(one, 1)
        else:
            dist.recv(one, 0)
            dist.send(one, 0)
    return (time.perf_counter() - start) / loops


def test_an_answer_takes_twice_the_delay() -> None:
    with lab_of(ranks=2, delay_ms=10) as lab:
        assert lab.run(_round_trip, 3)[0] > 0.020
        assert all(phase.sent > MEGABYTE for phase in lab.run(reduced, lab))


def _datagrams(count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        for _ in range(count if dist.get_rank() == 0 else 0):
            datagrams.sendto(bytes(100), ("10.77.0.2", 5000))
    time.sleep(0.3)


def test_packets_vanish() -> None:
    with lab_of(ranks=2, loss=0.1) as lab:
        lab.run(_datagrams, 1000)
        sender, receiver = lab.bytes()
        assert sender.sent >= 1000 * 142
        assert sender.frames_sent >= 1000
        assert 0.85 < receiver.received / sender.sent < 0.95


def _through_the_environment() -> tuple[str, ...]:
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def test_the_environment_is_that_of_torchrun() -> None:
    with lab_of(ranks=2) as lab:
        assert lab.run(_through_the_environment) == [("0", "2", "0", "1"), ("1", "2", "0", "1")]


def _fail(how: str) -> int:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("of rank 1's own making")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    dist.barrier()
    return 7


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", r"(?s)rank 1:\nTraceback.*in _fail.*ValueError: of rank 1's own making"),
        ("dies", "rank 1 was killed by signal 9 before the body was done"),
        ("hangs", r"ranks \[0, 1\] did not finish within 1 s"),
    ],
)
def test_a_failing_rank_ends_the_run_and_not_the_lab(how: str, told: str) -> None:
    with lab_of(ranks=2) as lab:
        with pytest.raises(LabError, match=told):
            lab.run(_fail, how, timeout=1 if how == "hangs" else 60)
        assert lab.run(dist.get_world_size) == [2, 2]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bandwidth": "100"}, "bandwidth '100': write 100mbit"),
        ({"bandwidth": "0.0001kbit"}, "write 100mbit"),
        ({"ranks": 0}, "ranks=0: a lab has 1 to 250"),
        ({"delay_ms": -1}, "delay_ms=-1: 0 to 10000 milliseconds"),
        ({"loss": 1}, "loss=1: the fraction of packets to lose, less than 1"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told), lab_of(**options):
        pass


@pytest.mark.parametrize(
    ("programs", "told"),
    [
        ((), "no program 'ip': apt-get install iproute2"),
        (("ip", "tc", "bridge", "nsenter"), "delay and loss need a C compiler: apt-get install gcc"),
    ],
)
def test_what_is_missing_is_named(
    programs: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab_of(ranks=1):
        pass
    for program in programs:
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=told), Lab(ranks=1, delay_ms=1):
        pass


def _say() -> None:
    print(f"rank {dist.get_rank()} was here\n", end="")  # in one piece: both write to the same file


def test_what_a_rank_prints_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with lab_of(ranks=2) as lab:
        lab.run(_say)
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "rank 0 was here", "rank 1 was here"]


def test_rates_as_tc_is_told() -> None:
    assert bits_per_second("2.5gbit") == 2_500_000_000
    assert shaping("eth0", bits_per_second("1gbit")) == (
        "qdisc replace dev eth0 root tbf rate 1000000000bit burst 250000 latency 50ms"
    )
    assert shaping("eth0", bits_per_second("unshaped")) == "qdisc replace dev eth0 root pfifo"


def test_the_relay_is_part_of_the_package() -> None:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    assert '"yafsdp_cc.tools.netlab" = ["relay.c"]' in project.read_text()
