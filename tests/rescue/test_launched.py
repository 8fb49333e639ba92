"""Under ``yafsdp-cc launch`` a run goes on after a fault of a rank, with the same numbers; nothing is left behind."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.cli.command import started, yafsdp_cc
from tests.netlab.labs import lab_of
from tests.soak import also
from yafsdp_cc.rescue.memory import folder_of_run

SCRIPT = """
import multiprocessing, os, signal, sys, time, torch, torch.distributed as dist, yafsdp_cc
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
yafsdp_cc.shard(model, units=[model])
optimizer = torch.optim.AdamW(model.parameters())
drawn = torch.Generator().manual_seed(rank)
rescue = yafsdp_cc.Rescue(model, optimizer, every=3, drawn=drawn)
for step in range(rescue.restore(), 10):
    if (rank, step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, 5, "0"):
        FAULT
    loss = model(torch.randn(4, 64, generator=drawn)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    rescue.step()
if rank == 0:
    print("loss", loss.item().hex(), torch.get_num_threads(), multiprocessing.get_start_method())
"""
FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stuck": "time.sleep(1000)",
    "raises": "raise ValueError('no such sample')",
}
TOLD = {
    "killed": "rank 1 failed first: killed by signal 9",
    "stopped": "rank 1: no answer",
    "stuck": "rank 1: no answer",
    "raises": "rank 1 failed first: ValueError: no such sample",
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("undisturbed"), "pass", "spawn")[0]


def run(folder: Path, fault: str, method: str, more_flags: Sequence[str] = (), before: str = "") -> tuple[str, str]:
    (folder / "job.py").write_text(before + SCRIPT.replace("FAULT", fault))
    flags = ["--nproc-per-node=2", "--max-restarts=1", f"--start-method={method}", f"--name={folder.name}"]
    flags += more_flags
    ran = yafsdp_cc("launch", *flags, "job.py", folder=folder)
    assert ran.returncode == 0, ran.stderr
    assert not folder_of_run(folder.name, "any").parent.exists()
    return ran.stdout, ran.stderr


@pytest.mark.parametrize("fault", [each if each in ("killed", "stopped") else also(each) for each in FAULTS])
@pytest.mark.parametrize("method", ["fork", also("spawn")])
def test_a_run_goes_on_with_the_same_numbers(tmp_path: Path, fault: str, method: str, undisturbed: str) -> None:
    out, err = run(tmp_path, FAULTS[fault], method)
    assert out == undisturbed
    assert TOLD[fault] in err, err
    assert re.search("going on behind step 4, from memory; steps 5 to [56] are made again", err), err


def test_a_run_of_one_node_without_an_id_leaves_nothing_that_the_next_could_take_for_its_own(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("raise ValueError('no such sample')")
    flags = ["--nproc-per-node=1", "--master-port=29639", f"--name={tmp_path.name}"]
    assert yafsdp_cc("launch", *flags, "job.py", folder=tmp_path).returncode == 1
    assert not folder_of_run(tmp_path.name, "any").parent.exists()


LINK = """
import subprocess
from yafsdp_cc.tools.netlab.links import Links, port
def link_of_rank_1(state):
    links = Links.here()
    subprocess.run([*links.inside(links.hub), "ip", "link", "set", port(1), state], check=True)
link_of_rank_1("up")
"""


def test_a_link_that_drops_everything_is_found_by_the_time_out(tmp_path: Path) -> None:
    with lab_of(ranks=2, bandwidth="unshaped"):
        pass  # skips where there can be none
    flags = ["--bandwidth=unshaped"]
    undisturbed, _ = run(tmp_path, "pass", "fork", flags)
    out, err = run(tmp_path, "link_of_rank_1('down')", "fork", flags, LINK)
    assert out == undisturbed
    assert re.search("rank [01]: no answer", err), err
    assert re.search("going on behind step 4, from memory; steps 5 to [56] are made again", err), err


MEMBERS = """
import os, sys, time, torch, torch.distributed as dist, yafsdp_cc
from datetime import timedelta
from pathlib import Path
dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
yafsdp_cc.shard(model, units=[model])
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1:]:  # the independent way: a checkpoint on the disk
    begin = yafsdp_cc.load(sys.argv[1], model, optimizer)["step"]
    steps, name = range(begin, begin + 3), "from-disk"
else:
    rescue = yafsdp_cc.Rescue(model, optimizer, every=3)
    begin = rescue.restore()
    steps, name = range(begin, 100_000), "rescued"
for step in steps:
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    loss = model(torch.randn(4, 64, generator=drawn)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ends = torch.tensor(float(Path("ends").exists()))
    dist.all_reduce(ends)
    if rank == 0:
        with open(name, "a") as file:
            print(world, begin, step, loss.item().hex(), file=file)
    if not sys.argv[1:]:
        if (step + 1) % 2 == 0 and not Path(f"checkpoint-{step + 1}").exists():
            yafsdp_cc.save(f"checkpoint-{step + 1}", model, optimizer, step=step + 1)
        rescue.step()
        time.sleep(0.05)
    if ends:
        break
"""


def test_a_run_goes_on_with_the_nodes_that_are_left_and_takes_in_one_that_comes(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(MEMBERS)
    meeting = [f"--rdzv-endpoint={tmp_path}/meeting", f"--rdzv-id={tmp_path.name}", "--local-addr=127.0.0.1"]
    flags = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-conf=last_call_timeout=2", *meeting]

    def launcher(number: int) -> AbstractContextManager[subprocess.Popen[str]]:
        return started("launch", *flags, f"--log-dir=logs-{number}", "job.py", folder=tmp_path)

    with launcher(0) as first:
        with launcher(1) as second:
            wait_for(tmp_path, world=2, begin=0, steps=5)
            second.kill()
        alone = wait_for(tmp_path, world=1, begin=1, steps=3)
        with launcher(2) as newcomer:
            both = wait_for(tmp_path, world=2, begin=2, steps=3)
            (tmp_path / "ends").touch()
            assert [each.wait(timeout=60) for each in (first, newcomer)] == [0, 0]
    (tmp_path / "ends").unlink()
    assert int(both[0][1]) > int(alone[0][1]), both
    ran = yafsdp_cc("launch", "--nproc-per-node=1", "job.py", f"checkpoint-{alone[0][1]}", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert lines(tmp_path / "from-disk") == alone[:3]


def lines(file: Path) -> list[list[str]]:
    """Return number of ranks, step at which they started, step, and loss of every step."""
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(folder: Path, world: int, begin: int, steps: int) -> list[list[str]]:
    """Return the lines of a start with ``world`` ranks at step ``begin`` or later, as soon as there are so many."""
    for _ in range(1200):
        found = [each for each in lines(folder / "rescued") if int(each[0]) == world and int(each[1]) >= begin]
        if len(found) >= steps:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {steps} steps of {world} ranks in a minute: {lines(folder / 'rescued')}")
