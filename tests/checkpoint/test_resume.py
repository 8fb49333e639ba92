"""Killed without warning, in training and in the middle of a save, a job goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import yafsdp_cc
from tests.checkpoint.jobs import in_a_process
from tests.cli.command import ROOT, children_of, forking, started, wait_for_line
from tests.internals import break_exchange_of_folders
from tests.ranks import RankError, on_ranks
from tests.soak import LONG

EXAMPLE = ROOT / "docs" / "examples" / "checkpoint.py"
LINE = re.compile(r"step (\d+) loss (\S+)")


def finished(folder: Path, steps: int) -> str:
    """Run the same program on forked ranks, which nobody kills; return the output of rank 0."""
    return on_ranks(2, _run, folder, steps)[0]


def _run(folder: Path, steps: int) -> str:
    sys.argv = [str(EXAMPLE), f"--folder={folder}", f"--steps={steps}", "--save-every=20"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def losses(out: str) -> dict[int, str]:
    return {int(step): loss for step, loss in LINE.findall(out)}


def killed(folder: Path) -> str:
    """Launch a run without an end, kill its ranks and then its launcher after the first save; return its output."""
    job = ("launch", "--standalone", "--nproc-per-node=2", EXAMPLE, f"--folder={folder}", "--steps=1000000000")
    with started(*job, "--save-every=20", folder=folder.parent, main=forking) as process:
        out = wait_for_line(process, "step 30 ")
        ranks = children_of(process.pid)
        for each in (*ranks, process.pid):
            os.kill(each, signal.SIGKILL)
        assert len(ranks) == 2
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
    (tmp_path / "checkpoint.saving-1f3a90c2").mkdir()
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.saving-1f3a90c2" / "previous")
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
    """Return the step of the checkpoint at ``path``, which must be complete."""
    model = net(0.0)
    step = yafsdp_cc.load(path, model)["step"]
    assert all((p == step).all() for p in model.parameters())
    return step


def half_written_in(folder):
    """Return the folders that a save has begun to write and did not finish."""
    unfinished = folder.glob("checkpoint.saving-*/new")
    return [each for each in unfinished if list(each.glob("*.distcp")) and not (each / ".metadata").exists()]


def gone_on(path):
    """Load the checkpoint at ``path``, see ``load`` refuse half written folders, and save once more.

    Returns:
        100, ten for each refused folder and the step of the checkpoint: an exit status that nothing else has.
    """
    step, unfinished = found(path), half_written_in(path.parent)
    for each in unfinished:
        with pytest.raises(ValueError, match=r"/new is a save that never finished .* load an earlier"):
            yafsdp_cc.load(each, net(0.0))
    yafsdp_cc.save(path, net(3.0), step=3)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert found(path) == 3
    return 100 + 10 * len(unfinished) + step


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_moment_of_a_save_leaves_a_checkpoint(exchanges, tmp_path):
    steps, half_written = [], False
    for event in range(1, 100):
        path = tmp_path / str(event) / "checkpoint"
        if (status := in_a_process(killed_at, event, exchanges, path)) == 0:
            break  # it has fewer
        assert status == -signal.SIGKILL
        refused, step = divmod(in_a_process(gone_on, path) - 100, 10)
        half_written |= refused > 0
        steps.append(step)
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
    assert found(path) == 1


def test_another_rank_killed_while_it_writes(tmp_path):
    with pytest.raises(RankError):
        on_ranks(2, killed_between_writing_and_commit, tmp_path / "step")
    on_ranks(2, found_1, tmp_path / "step")
