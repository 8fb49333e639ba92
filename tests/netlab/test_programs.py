"""Any command as the ranks of a lab, from Python and by ``bench/netlab.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import yafsdp_cc
from tests.netlab.labs import lab_of
from yafsdp_cc.tools.netlab import LabError, Links

ROOT = Path(__file__).resolve().parents[2]

SEND = """
import os, socket, time
master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    peer, _ = socket.create_server(master).accept()
    received = 0
    while content := peer.recv(1 << 16):
        received += len(content)
    assert received == 300_000
else:
    while True:
        try:
            peer = socket.create_connection(master)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    peer.sendall(bytes(300_000))
"""


def test_launch_puts_ranks_on_links_of_the_bandwidth(tmp_path: Path) -> None:
    with lab_of(ranks=2):
        pass  # skips where there can be none
    (tmp_path / "train.py").write_text(f"{SEND}\nprint(os.readlink('/proc/self/ns/net'), time.time())\n")
    flags = ("--bandwidth=1mbit", "--nproc-per-node=2", "--local-ranks-filter=0,1")
    began = time.time()
    ran = yafsdp_cc("launch", *flags, "train.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (one, *ended), (other, last) = (line.split() for line in ran.stdout.splitlines())
    assert len({one, other, os.readlink("/proc/self/ns/net")}) == 3, "each rank is in a network namespace of its own"
    assert max(map(float, [*ended, last])) - began > 300_000 * 8 / 1e6 * 0.8, (
        "the link has carried no more than its rate"
    )


def test_what_a_program_sends_is_counted() -> None:
    with lab_of(ranks=2, bandwidth="50mbit") as lab:
        lab.launch([sys.executable, "-c", SEND], timeout=60)
        receiver, sender = lab.bytes()
        assert 300_000 < sender.sent < 330_000
        assert 300_000 < receiver.received < 330_000
        assert receiver.sent < 60_000


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("exit 3", "rank 1: exit status 3: sh -c"),
        ("kill -9 $$", "rank 1: killed by signal 9: sh -c"),
        ("sleep 1000", r"ranks \[0, 1\] did not finish within 1 s"),
    ],
)
def test_a_failing_program_ends_the_others(program: str, told: str) -> None:
    with lab_of(ranks=2) as lab, pytest.raises(LabError, match=told):
        lab.launch(["sh", "-c", f"test $RANK = 0 && sleep 1000; {program}"], timeout=1 if "sleep" in program else 60)


def test_a_program_that_is_not_there_is_named() -> None:
    with lab_of(ranks=1) as lab, pytest.raises(LabError, match=r"rank 0: .*No such file or directory: 'nowhere'"):
        lab.launch(["nowhere"])


def test_links_are_found_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    with lab_of(ranks=2) as lab:
        monkeypatch.setenv("YAFSDP_CC_NETLAB", lab.links.variables(0)["YAFSDP_CC_NETLAB"])
        assert Links.here() == lab.links
        assert len(Links.here().traffic()) == 2
    monkeypatch.delenv("YAFSDP_CC_NETLAB")
    with pytest.raises(LabError, match="not in a lab: YAFSDP_CC_NETLAB is not set"):
        Links.here()


def test_the_command_line_counts_by_bandwidth() -> None:
    with lab_of(ranks=2):
        pass
    command = [sys.executable, "bench/netlab.py", "--bandwidth", "20mbit,50mbit", "--", sys.executable, "-c", SEND]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in done.stdout.splitlines()]
    assert [(line["bandwidth"], line["rank"]) for line in lines] == [
        (bandwidth, rank) for bandwidth in ("20mbit", "50mbit") for rank in "01"
    ]
    # With headers, and what a busy machine sends again.
    assert all(300_000 < int(line["sent"]) < 400_000 for line in lines if line["rank"] == "1")
    assert all(float(line["wall_s"]) > 0 and float(line["sent_mbit_s"]) >= 0 for line in lines)
