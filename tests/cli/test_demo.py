"""``yafsdp-cc demo``: the built-in job runs whole in a few steps, and stops at once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import yafsdp_cc.tools.cli as cli
from tests.cli.command import forking, started, wait_for_line, yafsdp_cc
from tests.ranks import ranks
from tests.soak import LONG, also
from yafsdp_cc.tools.demo import data, train


def metrics(folder: Path, name: str = "demo") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("precision", ["fp32", also("bf16")])
@ranks(2)
def test_three_steps_on_two_ranks(tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "VALIDATION_WINDOWS", 2)
    monkeypatch.setattr(train, "SAMPLE_LENGTH", 8)
    monkeypatch.setattr(sys, "argv", ["demo", "--steps=3", f"--precision={precision}", "--name=short"])
    os.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train.main()
    if dist.get_rank() > 0:
        assert not printed.getvalue()
        return
    start, first, last, validation, end = metrics(tmp_path, "short")
    assert (start["event"], start["ranks"], start["precision"]) == ("start", 2, precision)
    assert str(start["plan"]) in printed.getvalue()
    assert (first["step"], last["step"]) == (1, 3)
    assert 0 < last["loss"] < first["loss"] < 6
    assert 0 < validation["val_loss"] < 6
    assert first["gathered_bytes_per_step"] == last["gathered_bytes_per_step"] > 10e6
    assert first["reduced_bytes_per_step"] == last["reduced_bytes_per_step"] > 10e6
    assert start["planned_bytes"] == end["owned_bytes"]
    assert end["peak_memory_bytes"] > end["memory_before_bytes"] > 0
    assert end["overflow_buffers"] == 0
    assert end["sample"].startswith("def ")
    assert end["sample"] in printed.getvalue()
    assert printed.getvalue().endswith("Everything is in runs/short/metrics.jsonl\n")


@LONG
def test_the_command_trains_on_one_file_of_text_in_one_process(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 64)
    ran = yafsdp_cc("demo", "--steps=1", "--ranks=1", f"--text={text}", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "15,360 bytes of text to train on, 1,024 held out" in ran.stdout
    assert ran.stdout.endswith("Everything is in runs/demo/metrics.jsonl\n")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--steps=0", "--steps: must be at least 1, got 0"),
        ("--ranks=0", "--ranks: must be at least 1, got 0"),
        ("--text=nowhere", "--text: no such file or folder: nowhere"),
        ("--precision=fp16", "invalid choice: 'fp16'"),
    ],
)
def test_bad_flags_are_told_before_anything_starts(capsys: pytest.CaptureFixture[str], flag: str, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", flag])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err


@ranks(1)
def test_too_little_text_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short").write_text("too short")
    monkeypatch.setattr(sys, "argv", ["demo", f"--text={tmp_path / 'short'}"])
    with pytest.raises(SystemExit, match=r"^too little text: "):
        train.main()


@pytest.mark.parametrize("whole_group", [also(False), True], ids=["the launcher alone", "the whole terminal"])
def test_ctrl_c_stops_it_in_the_middle(tmp_path: Path, whole_group: bool) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 64)
    with started("demo", f"--text={text}", folder=tmp_path, main=forking) as process:
        assert "15,360 bytes of text to train on, 1,024 held out" in wait_for_line(process, "step    1/")
        time.sleep(0.3)
        if whole_group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err == ""
    assert [record["event"] for record in metrics(tmp_path)][:2] == ["start", "step"]


def test_files_are_held_out_by_name(tmp_path: Path) -> None:
    for number in range(64):
        (tmp_path / f"{number:02}.txt").write_bytes(b"%02d" % number)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0")
    text = data.read(tmp_path)
    train, held_out = (bytes(part.tolist()) for part in text)
    assert sorted(train[i : i + 2] for i in range(0, len(train), 2)) == sorted(
        {b"%02d" % number for number in range(64)} - {held_out[i : i + 2] for i in range(0, len(held_out), 2)}
    )
    assert 0 < len(held_out) < len(train) / 4
    assert data.read(tmp_path).held_out.equal(text.held_out)


def test_windows_end_within_a_text_whose_length_fp32_rounds_up() -> None:
    text = torch.zeros(2**24 + 3 + 129, dtype=torch.uint8)
    text[-1] = 1
    seen = [data.spread_windows(text, 32, 128, rank, 2) for rank in range(2)]
    assert seen[0].shape == seen[1].shape == (32, 129)
    assert (int(seen[0].sum()), int(seen[1][-1, -1])) == (0, 1)
