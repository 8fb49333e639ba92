"""``yafsdp-cc try``: its figures are those of the script by itself, and what it recommends follows from them."""

from __future__ import annotations

import json
import re
import shlex
from math import inf
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile

from tests.cli.command import forking, yafsdp_cc
from tests.ranks import on_ranks
from tests.soak import LONG
from yafsdp_cc.config import read
from yafsdp_cc.tools import cli
from yafsdp_cc.tools.cli import launch
from yafsdp_cc.tools.cli.try_ import SETTINGS, Comparison, Row, _recommend, sent_in

SCRIPT = """
import os, sys, torch, torch.distributed as dist, yafsdp_cc
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)])
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(60):
    loss = model(torch.randn(4, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.9f}", flush=True)
"""
EVALUATION = """
    if step % 2:
        with torch.no_grad():
            model(torch.ones(4, 64))
"""
WEIGHTS = 2 * (2 * 64 * 256 + 256 + 64)


def test_figures_are_those_of_the_script_by_itself(tmp_path: Path) -> None:
    """A script that imports torch's ``fully_shard`` and has an optimizer that OneBitAdam does not replace."""
    (tmp_path / "train.py").write_text(SCRIPT + 'print("this is the last line")')
    flags = ("--rounds=1", "--steps=4", "--settings=fsdp2,exact,OneBitAdam")
    ran = yafsdp_cc("try", *flags, "--nproc-per-node=2", "train.py", folder=tmp_path, main=forking)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "runs/try/figures.json").read_text())
    rows = {each["name"]: each for each in found["rows"]}
    fsdp2, exact, one_bit = (rows[name] for name in ("fsdp2", "exact", "OneBitAdam"))

    # torch gathers in the forward and in the backward, and gloo sums by an all-reduce
    assert fsdp2["sent"] == (1 + 1 + 2) * 4 * WEIGHTS // 2
    # two blocks fit into the two weight buffers, and are gathered once; small parameters are replicated
    assert 1 < exact["sent"] / ((1 + 1) * 4 * WEIGHTS // 2) < 1.01
    assert exact["planned"] > 0 == fsdp2["planned"]
    for row in (fsdp2, exact):
        printed = [
            [float(loss) for loss in re.findall(r"loss (\S+)", log.read_text())]
            for log in (tmp_path / f"runs/try/{row['name']}-1").glob("rank-*.log")
        ]
        means = [sum(losses) / 2 for losses in zip(*printed, strict=True)]
        *losses, _ = row["losses"][0]
        assert losses == pytest.approx(means, rel=1e-6), "the run ends in its last step, before its loss is printed"
        assert len(losses) <= 4 + 8, "steps for the loss, one that is recorded, and those that are timed"
        assert 2 <= len(row["turns"][0]) <= 8
        assert 0 < row["exposed"][0] < 1
    assert exact["losses"][0][:4] == pytest.approx(fsdp2["losses"][0][:4], rel=1e-5)
    assert one_bit["reason"] == "TypeError: OneBitAdam replaces torch's Adam and AdamW, and this script has SGD"
    assert f"OneBitAdam: {one_bit['reason']}" in ran.stdout
    assert f"Recommended: {found['recommended']}" in ran.stdout
    assert "this is the last line" not in (tmp_path / "runs/try/exact-1/rank-0.log").read_text()


def test_exact_steps_of_a_1_bit_optimizer_are_not_timed(tmp_path: Path) -> None:
    """The optimizer sums exactly in steps 6, 7, 8, 9, 11, 13, 15 and 17, behind a warm-up of five steps. Steps in which
    the script evaluates, and so gathers more, are like others."""
    script = SCRIPT.replace("SGD(model.parameters(), lr=0.1)", "AdamW(model.parameters())")
    script = script.replace("fully_shard(block)", "fully_shard(block, reshard_after_forward=True)")
    (tmp_path / "train.py").write_text(script + EVALUATION)
    (tmp_path / "run.yaml").write_text("compression: {gradients: topk, carry: 0.5}")
    flags = ("--rounds=1", "--steps=10", "--settings=exact,OneBitAdam", "--config=run.yaml")
    ran = yafsdp_cc("try", *flags, "--nproc-per-node=2", "train.py", folder=tmp_path, main=forking)
    rows = {each["name"]: each for each in json.loads((tmp_path / "runs/try/figures.json").read_text())["rows"]}
    assert rows["exact"]["sent"] > 8 * rows["OneBitAdam"]["sent"] > 0, ran.stdout + ran.stderr
    assert len(rows["exact"]["turns"][0]) > len(rows["OneBitAdam"]["turns"][0]) >= 2
    assert len(rows["exact"]["turns"][0]) == len(rows["exact"]["losses"][0]) - 10 - 1, "all but the recorded one"
    assert rows["exact"]["replaced"] == ["compression"]
    assert rows["OneBitAdam"]["replaced"] == ["compression", "reshard_after_forward="]


def test_a_short_script_may_end_its_process_group(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("range(60)", "range(8)") + "dist.destroy_process_group()")
    flags = ("--rounds=1", "--settings=exact", "--nproc-per-node=2")
    ran = yafsdp_cc("try", *flags, "train.py", folder=tmp_path, main=forking)
    (row,) = json.loads((tmp_path / "runs/try/figures.json").read_text())["rows"]
    assert (row["reason"], len(row["losses"][0])) == ("", 8), ran.stdout + ran.stderr
    assert row["planned"] > 0


def train_by_fsdp2(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for _ in range(2):
        with profile(record_shapes=True) as profiled:
            model(torch.ones(1, 64)).sum().backward()
    profiled.export_chrome_trace(str(folder / f"{dist.get_rank()}.json"))


def test_what_fsdp2_sends_to_replicas_is_counted(tmp_path: Path) -> None:
    """Two gathers of the halves, a sum of the whole by an all-reduce of gloo, and a sum of a half over replicas."""
    on_ranks(4, train_by_fsdp2, tmp_path)
    weights = 4 * 64 * 64
    assert sent_in(tmp_path / "0.json", 4) == (2 * weights // 2) + 2 * weights // 2 + 2 * (weights // 2) // 2


@pytest.mark.parametrize("name", ["exact", "bf16", "int8", "OneBitAdam"])
def test_the_command_recommended_runs_what_was_measured(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the run file and the user's own flags say."""
    (tmp_path / "run.yaml").write_text("compression: {gradients: auto, error_budget: 0.01}\nprecision: {reduce: fp32}")
    (tmp_path / "train.py").touch()
    measured = row(name, 0.1)
    measured.replaced = ["compression", "compression=", *(["mp_policy=", "precision"] if name == "bf16" else [])]
    argv = ["--config", f"{tmp_path}/run.yaml", "--set=compression.carry=0.5", f"{tmp_path}/train.py", "--set=own"]
    assert _recommend(Comparison([row("exact", 1.0), measured][name == "exact" :], 0.5), argv, ()) == 0
    *_, told = capsys.readouterr().out.splitlines()
    changes, _, command = told.partition("yafsdp-cc launch ")
    assert "no compression= in the script" in changes
    assert ("no mp_policy= in the script" in changes) == (name == "bf16")
    given = launch.all_flags().parse_args(shlex.split(command))
    assert given.training_script_args == ["--set=own"]
    values = {name: one.value for name, one in read(given.config, given.set).items()}
    assert values == {
        **({} if name == "bf16" else {"precision.reduce": "fp32"}),
        **({} if name == "exact" else SETTINGS[name]),
    }


def test_the_reason_of_a_failure_need_not_be_utf_8(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; os.write(2, b'no caf\\xe9\\n\\n'); os._exit(0)")
    ran = yafsdp_cc("try", "--settings=exact", "--nproc-per-node=2", "train.py", folder=tmp_path)
    assert ran.returncode == 1
    assert "no caf\ufffd\n\nNothing is recommended" in ran.stdout, ran.stderr


@LONG
@pytest.mark.parametrize("case", ["one rank", "no sharding"])
def test_a_script_that_cannot_be_tried_is_told_why(tmp_path: Path, case: str) -> None:
    plain = re.sub(r"^ *(for block in model:|fully_shard\(.*)\n", "", SCRIPT, flags=re.MULTILINE)
    (tmp_path / "train.py").write_text(SCRIPT if case == "one rank" else plain)
    ran = yafsdp_cc("try", f"--nproc-per-node={1 + (case != 'one rank')}", "train.py", folder=tmp_path)
    assert ran.returncode == 1
    told = {"one rank": "start several, --nproc-per-node=2", "no sharding": "neither shard nor fully_shard"}[case]
    assert ran.stdout.count(told) > 1
    assert "round 1, int8" not in ran.stdout, "nothing else is run"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--settings=int9", "train.py"), "no setting 'int9': there are fsdp2, exact, bf16, int8, OneBitAdam"),
        (("--minutes=0", "train.py"), "--minutes must be more than 0"),
        (("--nproc-per-node=2", "--steps=4", "train.py"), "--steps=4 comes first, before torchrun's flags"),
        (("--nproc-per-node=2", "missing.py", "--steps=4"), "no such script: missing.py"),
        ((), "name a script to run"),
        (("--output=/proc/x", "train.py"), "--output /proc/x: this folder cannot be made, No such file or directory"),
    ],
)
def test_bad_flags_are_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["try", *flags])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err


def one_turn(name: str, *steps: float) -> Row:
    return Row(name, losses=[[2.0] * 20], turns=[[*steps]])


def row(name: str, seconds: float, loss: float = 2.0, spread: float = 0.0, again: float | None = None) -> Row:
    turns = [[seconds - spread], [seconds], [seconds + spread]]
    losses = [[3.0, 2.5, loss, loss], [3.0, 2.5 if again is None else again]]
    return Row(name, losses=losses, turns=turns)


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([row("exact", 1.0), row("int8", 0.5)], "int8"),
        ([row("exact", 1.0), row("int8", 0.5, loss=2.009)], "int8"),
        ([row("exact", 1.0), row("int8", 0.5, loss=2.011)], "exact"),
        ([row("exact", 1.0), row("int8", 0.5, loss=1.5)], "int8"),
        ([row("exact", 1.0, again=2.55), row("int8", 0.5, loss=2.011)], "int8"),
        ([row("exact", 1.0, spread=0.3), row("int8", 0.8, spread=0.1)], "exact"),
        ([row("exact", 1.0, spread=0.1), row("int8", 0.8, spread=0.05)], "int8"),
        ([row("fsdp2", 1.01, spread=0.1), row("exact", 1.0), row("int8", 1.0)], "fsdp2"),
        ([row("exact", 1.0), row("int8", 0.5), row("OneBitAdam", 0.1, loss=2.2)], "int8"),
        ([row("exact", 1.0), Row("int8", reason="an error")], "exact"),
        # one turn, in which the optimizer makes two exact steps
        ([one_turn("exact", *[2.7, 2.8] * 4), one_turn("OneBitAdam", *[1.2, 0.15, 0.15, 0.16] * 2)], "OneBitAdam"),
        ([one_turn("exact", *[1.0, 1.4] * 4), one_turn("int8", *[0.9, 1.2] * 4)], "exact"),
        ([Row("exact", reason="an error"), row("int8", 0.5)], None),
        ([row("exact", 1.0), row("int8", 0.5, loss=inf)], "exact"),
        # of fsdp2 most steps of most turns were some in which the script evaluates
        ([Row("fsdp2", losses=[[2.0] * 4], turns=[[0.1], [1.2], [1.2]]), row("exact", 0.1)], "exact"),
    ],
)
def test_the_fastest_whose_loss_is_near_is_recommended_and_of_equals_the_simplest(
    rows: list[Row], best: str | None
) -> None:
    chosen, _ = Comparison(rows, within=0.5).best()
    assert (chosen.name if chosen else None) == best
