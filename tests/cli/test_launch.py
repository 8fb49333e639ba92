"""``yafsdp-cc launch``: scripts run as under torchrun; failures are readable; nothing stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import ROOT, started, wait_for_line, yafsdp_cc
from tests.soak import also

TWO = ("launch", "--standalone", "--nproc-per-node=2")
GROUP = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
def say(text):
    os.write(1, f"{text}\\n".encode())
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(GROUP + body)
    return path


def test_help_names_the_commands_at_once(tmp_path: Path) -> None:
    shown = yafsdp_cc("--help", folder=tmp_path)
    assert shown.returncode == 0
    assert "launch" in shown.stdout
    assert "demo" in shown.stdout
    program = "import sys, yafsdp_cc.cli as cli; cli.main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)


def test_an_unknown_command_gets_the_nearest_name(tmp_path: Path) -> None:
    shown = yafsdp_cc("lunch", folder=tmp_path)
    assert shown.returncode == 2
    assert "did you mean 'launch'?" in shown.stderr


def test_two_ranks_run_a_script_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'the neighbour'")
    body = """
import beside
total = torch.ones(1); dist.all_reduce(total)
say(f"{rank} {total.item()} {sys.argv} {beside.NAME} {__name__}")
"""
    (tmp_path / "deeper").mkdir()
    train = script(tmp_path, body)
    ran = yafsdp_cc(*TWO, train, "--lr", "3", "-m", folder=tmp_path / "deeper")
    assert ran.returncode == 0, ran.stderr
    said = [f"{rank} 2.0 {[str(train), '--lr', '3', '-m']} the neighbour __main__" for rank in range(2)]
    assert sorted(ran.stdout.splitlines()) == said
    assert ran.stderr == ""


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("NAME = 'sibling'")
    train = script(package, "from .other import NAME\nsay(f'{sys.argv} {NAME}')\n")
    ran = yafsdp_cc(*TWO, "-m", "job.train", "--lr", "3", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [f"{[str(train), '--lr', '3']} sibling"] * 2


def test_the_first_failing_rank_has_the_last_word(tmp_path: Path) -> None:
    body = """
def inner():
    if rank == 1:
        raise ValueError("two\\nlines")
    dist.all_reduce(torch.ones(1))
inner()
"""
    ran = yafsdp_cc(*TWO, script(tmp_path, body), folder=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.count("Traceback (most recent call last)") == 1
    assert "yafsdp-cc: rank 1 failed first: ValueError: two\n" in ran.stderr
    traceback = ran.stderr[ran.stderr.index("Traceback") :]
    assert traceback.rstrip().endswith("ValueError: two\nlines")
    assert 'train.py", line' in traceback.splitlines()[1], "starts at the user's own frame"
    assert "runpy" not in traceback
    assert "    raise ValueError" in traceback


@pytest.mark.parametrize(
    ("last_words", "status", "summary"),
    [
        also("sys.exit(7)", 7, "SystemExit: 7"),
        ("os.kill(os.getpid(), 9)", 137, "killed by signal 9"),
    ],
)
def test_the_exit_status_is_passed_on(tmp_path: Path, last_words: str, status: int, summary: str) -> None:
    body = f"if rank == 1:\n    {last_words}\ndist.all_reduce(torch.ones(1))\n"
    ran = yafsdp_cc(*TWO, script(tmp_path, body), folder=tmp_path)
    assert ran.returncode == status
    assert f"rank 1 failed first: {summary}" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_script_that_cannot_be_compiled(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("one = 1\ntwo =\n")
    ran = yafsdp_cc("launch", "train.py", folder=tmp_path)
    assert ran.returncode == 1
    assert "line 2" in ran.stderr
    assert ran.stderr.rstrip().endswith("SyntaxError: invalid syntax")
    assert "runpy" not in ran.stderr


def test_each_attempt_shows_why_it_failed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nraise ValueError('attempt ' + os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    ran = yafsdp_cc("launch", "--max-restarts=1", "train.py", folder=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.count("\nValueError: attempt 0\n") == 1
    assert ran.stderr.count("\nValueError: attempt 1\n") == 1


def test_mistakes_are_told_once_by_the_launcher(tmp_path: Path) -> None:
    ran = yafsdp_cc(*TWO, "nowhere.py", folder=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.endswith("no such script: nowhere.py\n")
    ran = yafsdp_cc("launch", "--nproc-per-node=many", "-m", "json", folder=tmp_path)
    assert ran.returncode == 2
    assert "--nproc-per-node: Unsupported nproc_per_node value: many" in ran.stderr


WAITING = {
    "in Python": "say('ready')\ntime.sleep(100)\n",
    "in a collective that never comes": "say('ready')\nif rank == 0: time.sleep(100)\ndist.all_reduce(torch.ones(1))\n",
    "in a collective, catching what breaks": """
say('ready')
try:
    if rank == 0: time.sleep(100)
    dist.all_reduce(torch.ones(1))
finally:
    say('cleaned up')
""",
}


@pytest.mark.parametrize(
    "body", [also(body) if name == "in Python" else body for name, body in WAITING.items()], ids=WAITING.keys()
)
def test_ctrl_c_ends_every_rank_quietly(tmp_path: Path, body: str) -> None:
    with started(*TWO, script(tmp_path, body), folder=tmp_path) as process:
        wait_for_line(process, "ready")
        wait_for_line(process, "ready")
        time.sleep(0.2)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - begin < 10
        assert process.returncode == 130
        assert err == ""
        assert out.count("cleaned up") == body.count("cleaned up") * 2


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with started(*TWO, script(tmp_path, WAITING["in Python"]), folder=tmp_path) as process:
        wait_for_line(process, "ready")
        process.kill()
