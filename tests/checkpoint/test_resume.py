"""Killed without warning, in training and in the middle of a save, a job goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from torch import nn

import yafsdp_cc
from tests.checkpoint.jobs import in_a_process
from tests.cli.command import ROOT
from tests.internals import break_exchange_of_folders
from tests.ranks import RankError, on_ranks
from tests.soak import LONG

EXAMPLE = ROOT / "docs" / "examples" / "checkpoint.py"
LINE = re.compile(r"step (\d+) loss (\S+)")


def launched(folder: Path, steps: int, mark: str) -> subprocess.Popen[str]:
    command = ["-m", "yafsdp_cc", "launch", "--standalone", "--nproc-per-node=2", str(EXAMPLE)]
    command += [f"--folder={folder}", f"--steps={steps}", "--save-every=20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MARK": mark}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *command], env=environment, cwd=folder.parent, text=True, **pipes)


def finished(folder: Path, steps: int) -> str:
    """What a run prints that is not killed: of the same program, on forked ranks."""
    return on_ranks(2, _run, folder, steps)[0]


def _run(folder: Path, steps: int) -> str:
    sys.argv = [str(EXAMPLE), f"--folder={folder}", f"--steps={steps}", "--save-every=20"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def kill_all(mark: str) -> int:
    """SIGKILL every process that carries ``mark``, ranks before their launcher; how many were ranks."""
    ranks, others = [], []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or not ours
        if f"MARK={mark}".encode() in environment:
            is_rank = any(each.startswith(b"RANK=") for each in environment)
            (ranks if is_rank else others).append(int(folder.name))
    for process in ranks + others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return len(ranks)


def losses(out: str) -> dict[int, str]:
    return {int(step): loss for step, loss in LINE.findall(out)}


def killed(folder: Path) -> str:
    """What a run without an end printed until it was killed, somewhere after its first save."""
    mark = str(uuid.uuid4())
    process = launched(folder, steps=10**9, mark=mark)
    out = ""
    for line in process.stdout:
        out += line
        if "step 30 " in line:
            break
    assert kill_all(mark) == 2
    return out + process.communicate()[0]


def test_killed_and_run_again_the_losses_are_the_same_bit_for_bit(tmp_path):
    before = losses(killed(tmp_path / "killed"))
    steps = max(before) + 20
    after = finished(tmp_path / "killed", steps)
    [saved] = map(int, re.findall(r"goes on after step (\d+)", after))
    assert 20 <= saved <= max(before)
    resumed = losses(after)
    assert set(resumed) == set(range(saved + 1, steps + 1))
    whole = losses(finished(tmp_path / "whole", steps))
    assert set(whole) == set(range(1, steps + 1))
    assert {step: whole[step] for step in resumed} == resumed
    assert {step: whole[step] for step in before} == before


@LONG
def test_killed_between_the_two_renames_of_a_save_it_goes_on_too(tmp_path):
    before = finished(tmp_path, steps=20)
    assert "goes on" not in before
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.previous")
    assert "goes on after step 20" in finished(tmp_path, steps=21)


# In the middle of a save


def net(value):
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def killed_at(event, exchanges, path):
    """A save that ends at its ``event``-th touch of the file system, if it has so many."""
    if not exchanges:
        break_exchange_of_folders()
    yafsdp_cc.save(path, net(1.0), step=1)
    seen = 0

    def hook(name, _):
        nonlocal seen
        if name in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}:
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    yafsdp_cc.save(path, net(2.0), step=2)


def found(path):
    """The step at ``path``, which is complete; offset, for an exit status that nothing else has."""
    model = net(0.0)
    step = yafsdp_cc.load(path, model)["step"]
    assert all((p == step).all() for p in model.parameters())
    return 100 + step


def refused(path):
    """A folder that is half written, given to ``load`` by name."""
    with pytest.raises(ValueError, match=r"/new is a save that never finished .* load an earlier"):
        yafsdp_cc.load(path, net(0.0))
    return 42


def saved_again(path):
    yafsdp_cc.save(path, net(3.0), step=3)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    return found(path)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_moment_of_a_save_leaves_a_checkpoint(exchanges, tmp_path):
    steps, half_written = [], 0
    for event in range(1, 100):
        path = tmp_path / str(event) / "checkpoint"
        if (status := in_a_process(killed_at, event, exchanges, path)) == 0:
            break  # it has fewer
        assert status == -signal.SIGKILL
        steps.append(in_a_process(found, path) - 100)
        for unfinished in path.parent.glob("checkpoint.saving-*/new"):
            if list(unfinished.glob("*.distcp")) and not (unfinished / ".metadata").exists():
                half_written += in_a_process(refused, unfinished) == 42
        assert in_a_process(saved_again, path) == 103
    assert half_written
    assert len(steps) > 8
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def killed_between_writing_and_commit(path):
    yafsdp_cc.save(path, net(1.0), step=1)
    if torch.distributed.get_rank() == 1:

        def hook(name, args):
            if name == "open" and str(args[0]).endswith(".distcp"):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
    yafsdp_cc.save(path, net(2.0), step=2)


def found_1(path):
    assert found(path) == 101


def test_another_rank_killed_while_it_writes(tmp_path):
    with pytest.raises(RankError):
        on_ranks(2, killed_between_writing_and_commit, tmp_path / "step")
    on_ranks(2, found_1, tmp_path / "step")
