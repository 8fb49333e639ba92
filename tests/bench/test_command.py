"""``python -m bench``: what it refuses, how it stops, and that bytes which it reports are bytes that crossed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import train
from bench.__main__ import main
from tests.cli.command import ROOT, started, yafsdp_cc
from tests.netlab.labs import lab_of
from tests.soak import LONG
from yafsdp_cc.tools import cli

OURS = "ours int8 / int8 weights"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--suite=trian"], "no suite 'trian'; did you mean 'train'?"),
        (["--contestants=ddp fp32,ours int9 / int8 weights"], f"'ours int9 / int8 weights'; did you mean '{OURS}'?"),
        (["--suite=exchanges", "--contestants=zzz"], "no contestant 'zzz'; one of torch reduce-scatter, torch all-to"),
        (["--suite=exchanges", "--steps=3"], "--steps is for --suite train, slow, pipeline and replicas"),
        (["--suite=exchanges", "--delay-ms=3"], "--delay-ms needs --bandwidth"),
        (["--suite=exchanges", "--ranks=3"], "ranks=3: buffers are divided among 2, 4, 8"),
        (["--suite=exchanges", "--bandwidth=unshaped"], "bandwidth unshaped: exchanges have links that are four"),
        (["--suite=replicas", "--width=64"], "width=64: the model has 6 heads, write a multiple of 6"),
        (["--bandwidth=100mbit,100mbits"], "bandwidth '100mbits': write 100mbit, 2.5gbit, 500kbit or unshaped"),
        (["--delay-ms=-1"], "delay_ms=-1.0: 0 to 10000 milliseconds"),
        (["--ranks=1"], "ranks=1: nothing crosses a network among fewer than 2"),
        (["--ranks=two"], "--ranks: 'two': write 2, or 2,4"),
        (["--rounds=0"], "--rounds: must be at least 1, got 0"),
        (["--json=nowhere/figures"], "--json nowhere/figures: there is no such folder"),
        (["--picture=loss.svg"], "--picture is for --suite slow"),
        (["--epochs=3"], "--epochs is for --suite pipeline"),
        (["--learnt=figures.json"], "--learnt is for --suite slow"),
        (["--suite=slow", "--learnt=nowhere"], "nowhere is not what `python -m bench --suite slow --json nowhere` wr"),
        (["--suite=slow", "--picture=loss.pdf"], "--picture loss.pdf: name a file that ends with .svg or .png"),
        (["--contestants", "ddp fp32", OURS], f"arguments: {OURS}; contestants are one argument, with commas between"),
        (["--suite=slow", "--picture=nowhere/loss.svg"], "--picture nowhere/loss.svg: there is no such folder"),
    ],
)
def test_what_cannot_be_asked_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_the_command_of_old_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--suite=slow"]) == 2
    told = "yafsdp-cc: no command 'bench'; type `python -m bench` in a clone of the repository\n"
    assert capsys.readouterr() == ("", told)


def test_a_machine_without_networks_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([]) == 1
    assert capsys.readouterr() == ("", "python -m bench: no program 'ip': apt-get install iproute2\n")


def test_help_names_the_contestants_without_torch() -> None:
    program = """
import runpy, sys
sys.argv = ["bench", "--help"]
try:
    runpy.run_module("bench", run_name="__main__")
finally:
    assert "torch" not in sys.modules
"""
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert f"\n  {OURS}\n" in shown.stdout
    assert "\n  torch reduce-scatter\n" in shown.stdout


def test_training_reports_the_bytes_that_crossed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as with longer sequences and after more steps."""
    with lab_of(ranks=2):
        pass
    flags = ["--bandwidth=200mbit", "--rounds=1", "--steps=1", "--json=figures.json"]
    command = ["--suite=train", f"--contestants=fsdp2 bf16,{OURS}", *flags]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "LENGTH", 16)
    monkeypatch.setattr(train, "WARM_UP", 1)
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "2 ranks at 200mbit" in printed
    assert max(map(len, printed.splitlines())) <= 120
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["about"]["command"].startswith("python -m bench --suite=train")
    figures = written["train"]["2"]["200mbit"]
    assert figures["fsdp2 bf16"]["counted_bytes"] is None
    assert figures["fsdp2 bf16"]["times_as_fast"] == 1
    ours = figures[OURS]
    assert ours["tokens_per_s"] > 0
    assert ours["counted_bytes"] > 10e6
    assert 0 < ours["sent_above_counted"] < 0.08
    assert -0.01 < ours["payload_above_counted"] < 0.02
    assert ours["times_fewer_bytes"] > 2


@LONG
def test_whole_runs_are_told_by_what_they_learn(tmp_path: Path) -> None:
    with lab_of(ranks=2):
        pass
    names = "fsdp2 bf16,ours exact bf16,ours 1-bit adam"
    flags = ["--ranks=2", "--bandwidth=unshaped", "--rounds=1", "--steps=6", "--json=figures.json"]
    ran = yafsdp_cc("--suite=slow", f"--contestants={names}", *flags, folder=tmp_path, main=main)
    assert ran.returncode == 0, ran.stderr
    assert "2 ranks at unshaped, 6 steps" in ran.stdout
    found = json.loads((tmp_path / "figures.json").read_text())["slow"]["2"]
    theirs, exact, ours = (found["learnt"][name]["losses"]["6"] for name in names.split(","))
    assert abs(theirs - exact) < 0.02 * theirs
    assert ours < 1.1 * theirs < 5.0
    assert found["learnt"]["ours 1-bit adam"]["phases"][:5] == ["kept", "both", "both", "both", "both"]
    run = found["runs"]["unshaped"]["ours 1-bit adam"]
    assert run["sent_bytes"] < found["runs"]["unshaped"]["ours exact bf16"]["sent_bytes"]
    assert [seconds for seconds, _ in run["curve"]] == sorted(seconds for seconds, _ in run["curve"])

    again = ["--ranks=2", "--bandwidth=1gbit", "--rounds=1", "--steps=6", "--learnt=figures.json", "--json=again.json"]
    names = "ours exact bf16,ours auto / int8 weights"  # of which one has learnt before
    ran = yafsdp_cc("--suite=slow", f"--contestants={names}", *again, folder=tmp_path, main=main)
    assert ran.returncode == 0, ran.stderr
    assert "ours exact bf16: loss" not in ran.stderr
    assert "ours auto / int8 weights: loss" in ran.stderr
    taken = json.loads((tmp_path / "again.json").read_text())["slow"]["2"]["learnt"]
    assert taken["ours exact bf16"] == found["learnt"]["ours exact bf16"]


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    with lab_of(ranks=2):
        pass
    flags = ["--suite=replicas", "--contestants=overlap", "--ranks=2", "--width=48", "--bandwidth=unshaped"]
    flags += ["--rounds=10000", "--steps=1"]
    with started(*flags, folder=tmp_path, main=lambda argv: cli.interruptible(lambda: main(argv))) as process:
        assert process.stderr is not None
        assert any("unshaped 1/10000 overlap" in line for line in process.stderr)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in err
