"""Under ``yafsdp-cc launch`` a run goes on after a fault of a rank, with the same numbers; nothing is left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command import yafsdp_cc
from tests.soak import also
from yafsdp_cc.rescue.memory import folder_of_run

SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist, yafsdp_cc
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
yafsdp_cc.shard(model, units=[model])
optimizer = torch.optim.AdamW(model.parameters())
drawn = torch.Generator().manual_seed(rank)
rescue = yafsdp_cc.Rescue(model, optimizer, every=2, drawn=drawn)
for step in range(rescue.restore(), 10):
    if (rank, step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, 5, "0"):
        FAULT
    loss = model(torch.randn(4, 64, generator=drawn)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    rescue.step()
if rank == 0:
    print("loss", loss.item().hex(), torch.get_num_threads())
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


def run(folder: Path, fault: str, method: str) -> tuple[str, str]:
    (folder / "job.py").write_text(SCRIPT.replace("FAULT", fault))
    flags = ["--nproc-per-node=2", "--max-restarts=1", f"--start-method={method}", f"--name={folder.name}"]
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
    assert re.search("going on behind step [24], from memory; steps [35] to [56] are made again", err), err
