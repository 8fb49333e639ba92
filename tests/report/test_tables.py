"""The tables show what was written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import ROOT
from tests.ranks import on_ranks
from tests.report.traces import write_kineto, write_nsys
from tests.soak import LONG
from yafsdp_cc.tools import cli
from yafsdp_cc.tools.cli.capture import capture
from yafsdp_cc.tools.cli.profile import own_flags
from yafsdp_cc.tools.report.overlap import Overlap, Shared, Slowed
from yafsdp_cc.tools.report.tables import read_run, run_table, trace_tables
from yafsdp_cc.tools.report.trace import Trace, UnreadableError, read


def write_run(folder: Path, **figures: Any) -> Path:
    """A run of fifty reports, with something of everything."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {"event": "start", "ranks": 2, "planned_bytes": 2e6, "plan": "the <plan>", "first_step": 0}
    ]
    for step in range(1, 51):
        line = {"event": "step", "step": step, "seconds": 2.0 * step, "loss": 5 / step, "tokens_per_s": 900 + step}
        line |= {"s_per_step": 2.0, "forward_s": 0.5, "backward_s": 1.0, "optimizer_s": 0.25}
        line |= {"gathered_bytes_per_step": 3_000_000, "reduced_bytes_per_step": 1_500_000, "owned_bytes": 2_000_000}
        lines.append(line | figures)
    lines[20]["loss"] = None  # was not finite
    lines.append({"event": "eval", "step": 50, "seconds": 101.0, "val_loss": 1.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_command_without_torch(tmp_path: Path) -> None:
    """All of it, help and tables: torch alone would take seconds."""
    one, other = write_run(tmp_path / "runs" / "one"), write_run(tmp_path / "runs" / "other", tokens_per_s=100)
    traces = [write_kineto(tmp_path / "rank0.json.gz"), write_nsys(tmp_path / "rank1.sqlite")]
    program = (
        "import sys\nfrom yafsdp_cc.tools.cli import main\nstatus = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\nsys.exit(status)"
    )
    command = [sys.executable, "-c", program, "report", str(one), str(other)]
    done = subprocess.run([*command, *map(str, traces)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines()]
    row = next(line for line in table if line and line[0] == str(one))
    times = ["2,000.0", "500.0", "1,000.0", "250.0"]
    assert row[1:] == ["2", "50", "0.1000", "1.2500", "926", *times, "4.50", "2.0", "2.0", "-"]
    assert ["all", "communication", "0.450", "0.250", "25.0"] in table
    assert ["b", "0.150", "0.050", "0.000", "0.000"] in table
    assert "All kernels that ran both ways: 1.25 times as long beside communication" in done.stdout
    assert f"{other} against {one}: tokens/s x 0.11." in done.stdout
    assert (
        "First: keep the device busy (input pipeline, host work, small kernels). It costs 30% of a step" in done.stdout
    )


@pytest.mark.parametrize("flags", [["report", "--help"], ["profile", "--help"]])
def test_help_comes_without_torch(flags: list[str]) -> None:
    program = (
        "import atexit, sys\nfrom yafsdp_cc.tools.cli import main\n"
        "atexit.register(lambda: print('torch' in sys.modules))\nmain(sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: yafsdp-cc")
    assert done.stdout.endswith("False\n")


def test_the_table_of_kernels_sums_to_what_its_title_says() -> None:
    """Ten kernels, some faster beside communication: the rows that are shown and the rest add up to the whole."""
    slowed = [Slowed(f"kernel{n}", 2, 100.0, 130.0 - 10 * n) for n in range(10)]
    alone, beside = 10 * 2 * 100.0, sum(2 * each.beside_us for each in slowed)
    trace = Trace("", [], 0.0, 1000.0, 1)
    parts = dict.fromkeys(("idle", "codec"), 0.0)
    found = Overlap(trace, {}, Shared(0.0, 0.0), parts, {}, slowed, beside / alone, {})
    title, (_, *rows) = list(trace_tables(found).items())[-1]
    assert "0.85 times" in title
    assert [row[0] for row in rows[-2:]] == ["2 other kernels", "all of them"]
    assert float(rows[-1][-1]) == pytest.approx((beside - alone) / 1e3)
    assert sum(float(row[-1]) for row in rows[:-1]) == pytest.approx(float(rows[-1][-1]))


def test_a_loss_that_is_not_finite_at_the_end_is_not_passed_over(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", loss=None) / "metrics.jsonl")
    (head, row) = run_table([run])
    assert (row[head.index("loss")], row[head.index("val loss")], row[head.index("MB at most")]) == (
        "nan",
        "1.2500",
        "-",
    )


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    """Half a line is left out where a kill can leave it, and nowhere else."""
    file = write_run(tmp_path / "run") / "metrics.jsonl"
    whole, half = file.read_text(), '{"event": "step", "st'
    file.write_text(whole + half)
    run = read_run(file)
    assert (len(run.records), run.cut_off) == (51, [53])
    file.write_text(whole + half + '\n{"event": "start", "first_step": 10}\n')
    run = read_run(file)
    assert (len(run.records), run.cut_off) == (10, [53])
    for rest in ("\n", f"\n{half}", "\n" + whole.splitlines()[5]):
        file.write_text(whole + half + rest)
        with pytest.raises(UnreadableError, match=r"metrics.jsonl, line 53: not a JSON object"):
            read_run(file)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"event": "step", "step": 51, "seconds": 1, "loss": "x"}', "loss: Input should be a valid number"),
        ('{"event": "step", "step": "a", "seconds": 1}', "step: Input should be a valid integer"),
        ('{"event": "step", "step": -1, "seconds": 1}', "step: Input should be greater than or equal to 0"),
        ('{"event": "step", "step": true, "seconds": 1}', "step: Input should be a valid integer"),
        ('{"event": "step", "seconds": 1}', "step: Field required"),
        ('{"event": "step", "step": 51, "seconds": null}', "seconds: Input should be a valid number"),
        ('{"event": "step", "step": 51, "seconds": 1, "loss": 1e400}', "loss: Input should be a finite number"),
        ('{"event": "step", "step": 51, "seconds": 1, "loss": NaN}', "loss: Input should be a finite number"),
        ('{"event": "start", "ranks": "5"}', "ranks: Input should be a valid integer"),
        ('{"event": "stop"}', 'not a JSON object with an "event" of start, step, eval or end'),
        ("[1]", "not a JSON object"),
    ],
)
def test_a_line_that_metrics_does_not_write(
    tmp_path: Path, line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path / "run") / "metrics.jsonl"
    file.write_text(f"{file.read_text()}{line}\n{file.read_text()}")
    assert cli.main(["report", str(file)]) == 1
    assert f"run/metrics.jsonl, line 53: {told}" in capsys.readouterr().err


def test_a_run_is_shown_once_by_a_name_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    shutil.copy(folder / "metrics.jsonl", folder / "other.jsonl")
    paths = [str(folder), f"{folder}/../run", str(folder / "metrics.jsonl"), str(folder / "other.jsonl")]
    assert cli.main(["report", *paths]) == 0
    table = capsys.readouterr().out.partition("\nrun ")[2]
    names = [line.split()[0] for line in table.splitlines() if str(folder) in line]
    assert names == [str(folder), str(folder / "other.jsonl")]


def test_what_is_no_run_is_told_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, message in (
        ("words", "some words\nand more\n", "line 1: not a JSON object"),
        ("list", "[1]\n[2]\n", "line 1: not a JSON object"),
        ("start", '{"event": "start"}\n', "no step in it"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
        with pytest.raises(UnreadableError, match=message):
            read_run(tmp_path / name / "metrics.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "profile.nsys-rep").touch()
    for path, message in (
        ("empty", "no metrics.jsonl and no trace in this folder"),
        ("nowhere", "nowhere: No such file or directory"),
        ("words", "not a JSON object"),
        ("profile.nsys-rep", "nsys is not on PATH"),
    ):
        assert cli.main(["report", str(tmp_path / path)]) == 1
        assert message in capsys.readouterr().err


def test_other_files_in_a_run_s_folder_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "trainer_state.json").write_text('{"epoch": 1}')
    write_kineto(folder / "trace.json")
    assert cli.main(["report", str(folder)]) == 0
    printed = capsys.readouterr()
    assert f"\n{folder}/trace.json, " in printed.out
    assert printed.err.startswith(f"yafsdp-cc report: left out: {folder}/trainer_state.json")
    assert cli.main(["report", str(folder), str(folder / "trainer_state.json")]) == 1
    (folder / "metrics.jsonl").unlink()
    assert cli.main(["report", str(folder)]) == 0, "a trace is beside it"
    (folder / "trace.json").unlink()
    assert cli.main(["report", str(folder)]) == 1


# yafsdp-cc profile, whose commands tests/test_docs.py runs -----------------------------------------------------------


def steps_of_a_trace(folder: Path, wanted: str) -> int:
    recording = capture(f"{wanted}:{folder}")
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter])
    for _ in range(5):
        parameter.grad = torch.ones(4)
        optimizer.step()
    recording.at_exit()
    return read(folder / "rank0.json.gz").steps


@pytest.mark.parametrize(("wanted", "steps"), [("kineto:1:1", 1), ("kineto:2:4", 3), ("kineto:4:9", 2)])
def test_the_steps_that_were_asked_for_or_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], wanted: str, steps: int
) -> None:
    assert on_ranks(1, steps_of_a_trace, tmp_path, wanted, fresh=True) == [steps]  # on the stderr of this test
    assert ("steps 4 to 9 were to be recorded, and the script made 5" in capfd.readouterr().err) == (wanted[-1] == "9")


def test_nsys_is_told_when_steps_begin_and_end() -> None:
    on_ranks(1, tell_nsys)


def tell_nsys() -> None:
    told: list[object] = []
    torch.cuda.profiler.start = lambda: told.append("start")  # there is no GPU to tell it to
    torch.cuda.profiler.stop = lambda: told.append("stop")
    recording = capture("nsys:2:3:nowhere")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))])
    for step in range(1, 6):
        told.append(step)
        optimizer.step()
    recording.at_exit()
    assert told == [1, "start", 2, 3, "stop", 4, 5]


def test_flags_of_a_folder_with_a_script_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    parser = ArgumentParser()
    parser.add_argument("--steps")
    rest = ["--nproc-per-node=2", str(tmp_path), "--steps=4"]
    assert own_flags(parser, ["--steps=2", *rest]) == (Namespace(steps="2"), rest)
    rest += ['{"prompt": "' + 1000 * "x" + '"}']  # no file system has a name of that length
    assert own_flags(parser, ["--steps=2", *rest]) == (Namespace(steps="2"), rest)


def test_the_command_of_nsys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").touch()
    flags = ["--tool=nsys", "--steps=10:12", f"--output={tmp_path}/out", "--trace", "cuda,nvtx,osrt"]
    ours = ["--config", "run.yaml", "--set=shard.zero_stage=2", "--name=a"]
    assert cli.main(["profile", *flags, *ours, "--nproc-per-node=8", "-m", "train", "--steps", "9"]) == 1
    printed = capsys.readouterr()
    assert printed.out == (
        f"env YAFSDP_CC_PROFILE=nsys:10:12:{tmp_path}/out yafsdp-cc launch {' '.join(ours)} --nproc-per-node=8 "
        "--no-python nsys profile "
        f"'--output={tmp_path}/out/rank%q{{RANK}}' --force-overwrite=true --trace=cuda,nvtx,osrt --sample=none "
        "--cpuctxsw=none --capture-range=cudaProfilerApi --capture-range-end=stop "
        f"{sys.executable} -m yafsdp_cc.tools.cli.runner -m train --steps 9\n"
    )
    assert "nsys is not on PATH" in printed.err
    assert not (tmp_path / "out").exists()


STAND_IN = """#!/bin/sh
# What nsys does, but for recording: it runs the command behind its flags, and leaves a report where --output says.
for flag in "$@"; do case $flag in --output=*) output=${flag#--output=};; esac; done
while case $1 in profile|--*) true;; *) false;; esac; do shift; done
"$@" || exit 1
touch "$(echo "$output" | sed "s/%q{RANK}/$RANK/").nsys-rep"
"""


@LONG
def test_ranks_run_under_nsys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As ``launch`` starts them; there is no GPU here to record, so the steps are never reached."""
    (tmp_path / "nsys").write_text(STAND_IN)
    (tmp_path / "nsys").chmod(0o755)
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(f\"rank {os.environ['RANK']} has {sys.argv[1:]}\", flush=True)"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    on_ranks(1, profile_by_nsys, fresh=True)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["rank0.nsys-rep", "rank1.nsys-rep"]
    out, err = capfd.readouterr()
    assert all(f"rank {rank} has ['--steps', '9']" in out for rank in (0, 1))
    assert err.count("steps 4 to 6 were to be recorded, and the script made 0") == 2


def profile_by_nsys() -> None:
    torch.cuda.is_available = lambda: True
    flags = ["--tool", "nsys", "--nproc-per-node=2", "--local-ranks-filter=0,1"]
    assert cli.main(["profile", *flags, "train.py", "--steps", "9"]) == 0


@pytest.mark.parametrize("steps", ["3", "0:2", "5:4", "a:b"])
def test_bad_steps_are_told_before_anything_starts(capsys: pytest.CaptureFixture[str], steps: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["profile", f"--steps={steps}", "train.py"])
    assert "write 4:6" in capsys.readouterr().err
