"""``yafsdp-cc launch``: scripts run as under torchrun; failures are readable; nothing stays behind."""

from __future__ import annotations

import argparse
import fcntl
import gzip
import importlib.metadata
import importlib.util
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDescGenerator,
)

from tests.cli.command import ROOT, children_of, forking, started, wait_for_line, yafsdp_cc
from tests.soak import LONG, also
from yafsdp_cc import __version__
from yafsdp_cc.config import Setting
from yafsdp_cc.rescue.memory import folder_of_run
from yafsdp_cc.tools import cli
from yafsdp_cc.tools.cli import elastic, launch
from yafsdp_cc.tools.cli.profile import flags_and_script

EXAMPLE = ROOT / "docs/examples/checkpoint.py"
TWO = ("launch", "--standalone", "--nproc-per-node=2")
SHOWN = (*TWO, "--local-ranks-filter=0,1")
ALONE = """
import os, sys, time
rank = int(os.environ["RANK"])
def say(text):
    os.write(1, f"{text}\\n".encode())
"""
GROUP = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    """A script of ranks that are in a group."""
    return alone(folder, GROUP + body, name)


def alone(folder: Path, body: str, name: str = "train.py") -> Path:
    """A script of ranks that know nothing of each other, and do without torch: importing it takes seconds."""
    path = folder / name
    path.write_text(ALONE + body)
    return path


def test_help_names_the_commands_at_once(tmp_path: Path) -> None:
    shown = yafsdp_cc("--help", folder=tmp_path, afresh=True)
    assert shown.returncode == 0
    assert "launch" in shown.stdout
    assert "demo" in shown.stdout
    assert __version__ == importlib.metadata.version("yafsdp_cc")
    assert yafsdp_cc("--version", folder=tmp_path).stdout == f"yafsdp_cc {importlib.metadata.version('yafsdp_cc')}\n"
    program = "import sys, yafsdp_cc.tools.cli as cli; cli.main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)


def test_an_unknown_command_gets_the_nearest_name(tmp_path: Path) -> None:
    shown = yafsdp_cc("lunch", folder=tmp_path, afresh=True)
    assert shown.returncode == 2
    assert "did you mean 'launch'?" in shown.stderr


def log(folder: Path, rank: int, run: str = "train") -> str:
    """What is kept of what a rank has printed."""
    return (folder / "runs" / run / "logs" / f"rank-{rank}.log").read_text()


def test_two_ranks_run_a_script_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'the neighbour'")
    body = """
import beside
say(f"{rank} of {os.environ['WORLD_SIZE']} {sys.argv} {beside.NAME} {__name__}")
"""
    (tmp_path / "deeper").mkdir()
    train = alone(tmp_path, body)
    ran = yafsdp_cc(*TWO, train, "--lr", "3", "-m", folder=tmp_path / "deeper", afresh=True)
    assert ran.returncode == 0, ran.stderr
    said = [f"{rank} of 2 {[str(train), '--lr', '3', '-m']} the neighbour __main__\n" for rank in range(2)]
    assert (ran.stdout, ran.stderr) == (said[0], "")
    for rank in range(2):
        head, kept = log(tmp_path / "deeper", rank).split("\n", 1)
        assert re.fullmatch(rf"==== [-\d]+ [:\d]+, attempt 1: rank {rank} of 2, {train} --lr 3 -m", head)
        assert kept == said[rank]


@pytest.mark.parametrize("method", ["fork", also("spawn")])
def test_a_module_runs_as_with_python_m(tmp_path: Path, method: str) -> None:
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("NAME = 'sibling'")
    train = alone(package, "from .other import NAME\nsay(f'{sys.argv} {NAME}')\n")
    ran = yafsdp_cc(*SHOWN, f"--start-method={method}", "-m", "job.train", "--lr", "3", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [f"{[str(train), '--lr', '3']} sibling"] * 2


def test_a_link_to_a_script_finds_what_is_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "beside.py").write_text("NAME = 'neighbour'")
    (tmp_path / "real" / "train.py").write_text("import sys, beside; print(sys.path[0], sys.argv, beside.NAME)")
    (tmp_path / "link.py").symlink_to(Path("real", "train.py"))
    by_itself = subprocess.run([sys.executable, "link.py"], cwd=tmp_path, capture_output=True, text=True)
    ran = yafsdp_cc("launch", "link.py", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, by_itself.stdout), ran.stderr


@pytest.mark.parametrize("method", ["spawn", also("fork")])
def test_a_folder_runs_as_with_python_folder(tmp_path: Path, method: str) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "beside.py").write_text("NAME = 'neighbour'")
    (tmp_path / "job" / "__main__.py").write_text("import sys, beside; print(__name__, sys.argv, beside.NAME)")
    (tmp_path / "none").mkdir()
    ran = yafsdp_cc("launch", f"--start-method={method}", "job/", "--lr", "3", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "__main__ ['job/', '--lr', '3'] neighbour\n"), ran.stderr
    assert log(tmp_path, 0, "job").endswith(ran.stdout)
    ran = yafsdp_cc("launch", "none", folder=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.endswith("no such script: none, a folder without __main__.py\n")


def test_the_first_failing_rank_has_the_last_word(tmp_path: Path) -> None:
    body = """
def inner():
    say(f"rank {rank} has come so far")
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
    assert "yafsdp-cc: the output of every rank is in runs/train/logs\n" in ran.stderr
    assert "yafsdp-cc: the last lines of rank 1:\n  rank 1 has come so far\n" in ran.stderr
    assert log(tmp_path, 1).endswith(f"rank 1 has come so far\n{traceback.rstrip()}\n")
    assert "rank 0 has come so far\n" in log(tmp_path, 0)


def test_a_rank_that_left_without_an_exception_was_first(tmp_path: Path) -> None:
    body = """
dist.barrier()
if rank == 1:
    say("a library gives up")
    os._exit(3)
dist.all_reduce(torch.ones(1000))
"""
    seldom = "--monitor-interval=3"  # a rank that fails after the launcher has looked is ended, perhaps without a word
    ran = yafsdp_cc(*TWO, seldom, script(tmp_path, body), folder=tmp_path)
    assert ran.returncode == 3
    assert "yafsdp-cc: rank 0 failed after it: RuntimeError: " in ran.stderr
    assert "yafsdp-cc: the last lines of rank 1:\n  a library gives up\n" in ran.stderr
    assert ran.stderr.endswith("yafsdp-cc: rank 1 failed first: exit status 3\n")


def test_a_rank_that_left_with_status_0_is_named(tmp_path: Path) -> None:
    body = """
left = torch.tensor(os.getpid())
dist.broadcast(left, 1)
if rank == 1:
    sys.exit(0)
while os.path.exists(f"/proc/{left}"):
    time.sleep(0.1)
dist.all_reduce(torch.ones(1000))
"""
    ran = yafsdp_cc(*TWO, script(tmp_path, body), folder=tmp_path)
    assert ran.returncode == 1
    assert "yafsdp-cc: rank 1 had ended with status 0\nyafsdp-cc: rank 0 failed first: Runt" in ran.stderr


@pytest.mark.parametrize(
    ("last_words", "status", "summary"),
    [
        also("sys.exit(7)", 7, "SystemExit: 7"),
        ("sys.exit(-1)", 255, "SystemExit: -1"),
        also("os.kill(os.getpid(), 9)", 137, "killed by signal 9"),
        (
            "import json; json.dump = lambda *_: os.kill(os.getpid(), 9); 1 / 0",
            137,
            "killed by signal 9",
        ),  # while it tells why
    ],
)
def test_the_exit_status_is_passed_on(tmp_path: Path, last_words: str, status: int, summary: str) -> None:
    # A rank that is killed breaks the other one's collective, and has failed first all the same.
    write, wait = (script, "dist.all_reduce(torch.ones(1))") if "kill" in last_words else (alone, "time.sleep(100)")
    body = f"say('here')\nif rank == 1:\n    {last_words}\n{wait}\n"
    ran = yafsdp_cc(*TWO, write(tmp_path, body), folder=tmp_path)
    assert ran.returncode == status
    assert f"rank 1 failed first: {summary}" in ran.stderr.splitlines()[-1]
    assert "the last lines of rank 1:\n  here\n" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_script_that_cannot_be_compiled(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("one = 1\ntwo =\n")
    ran = yafsdp_cc("launch", "train.py", folder=tmp_path)
    assert ran.returncode == 1
    assert "line 2" in ran.stderr
    assert ran.stderr.rstrip().endswith("SyntaxError: invalid syntax")
    assert "runpy" not in ran.stderr


@pytest.mark.parametrize("flags", ["--standalone", also("--master-port=29637")])  # both ways in which launchers meet
@pytest.mark.parametrize("names_files", [False, True])
def test_each_attempt_shows_why_it_failed_and_starts_with_an_empty_store(
    tmp_path: Path, flags: str, names_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if names_files:
        monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{tmp_path}/trace-")  # the older name
    body = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
store = dist.distributed_c10d._get_default_store()
found = store.check(["left behind"])
store.set("left behind", "")
if attempt == "0":
    open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0", "w").close()  # as if a collective had timed out
    time.sleep(0.1)
raise ValueError(f"attempt {attempt}" + " sees what the one before it has left" * found)
"""
    ran = yafsdp_cc("launch", flags, "--max-restarts=1", script(tmp_path, body), folder=tmp_path, main=forking)
    assert ran.returncode == 1
    assert ran.stderr.count("\nValueError: attempt 0\n") == 1
    assert ran.stderr.count("\nValueError: attempt 1\n") == 1
    assert ran.stderr.index("rank 0 failed first: ValueError: attempt 0") < ran.stderr.index("starting the ranks again")
    assert ran.stderr.count("a collective timed out") == 1, "the second attempt has none"
    kept = log(tmp_path, 0)
    assert re.findall("(, attempt .):|^(ValueError: .*)", kept, re.MULTILINE) == [
        (", attempt 1", ""),
        ("", "ValueError: attempt 0"),
        (", attempt 2", ""),
        ("", "ValueError: attempt 1"),
    ]


@pytest.mark.parametrize("seed", [None, *(also(seed) for seed in range(50))])
def test_training_goes_on_bit_for_bit_when_ranks_are_killed(tmp_path: Path, seed: int | None) -> None:
    chance = random.Random(seed)
    kills = 1 if seed is None else 3
    # When: at a line that rank 0 prints, and some time after it. Without a seed: two steps after a checkpoint.
    at = [6] if seed is None else sorted(chance.sample(range(1, 13), kills))
    losses: dict[int, str] = {}
    with started(*TWO, f"--max-restarts={kills}", EXAMPLE, folder=tmp_path, main=forking) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("step"):
                continue
            _, step, _, loss = line.split()
            assert losses.setdefault(int(step), loss) == loss, f"step {step}"
            if at and int(step) == at[0]:
                del at[0]
                time.sleep(0 if seed is None else chance.random() * 0.3)
                with suppress(ProcessLookupError, IndexError):  # where all have ended meanwhile
                    os.kill(chance.choice(children_of(process.pid)), signal.SIGKILL)
        assert process.wait(timeout=60) == 0, process.stderr and process.stderr.read()
    assert sorted(losses) == list(range(1, 13))
    assert seed is None or losses == undisturbed()


@cache
def undisturbed() -> dict[int, str]:
    """The losses of the same program when nobody kills it."""
    with tempfile.TemporaryDirectory() as folder:
        ran = yafsdp_cc(*TWO, EXAMPLE, folder=Path(folder), main=forking)
    return {int(line.split()[1]): line.split()[3] for line in ran.stdout.splitlines()}


MISTAKES = {
    "nowhere.py": "no such script: nowhere.py",
    "--nproc-per-node=many": "--nproc-per-node: Unsupported nproc_per_node value: many",
    "--nproc-per-node=0": "--nproc-per-node must be at least 1, got 0",
    "--nnodes=0": '--nnodes: "0" cannot be; it takes a whole number of at least 1',
    "--nnodes=3:2": '--nnodes: "3:2" cannot be; it takes',
    "--node-rank=1": "--node-rank counts from 0: 1 is none of the --nnodes=1:1",
    "--name=../x": '--name: "../x" cannot be; it takes a name of letters',
    "--max-restarts=-1": "--max-restarts: -1 cannot be; it takes a whole number of at least 0",
    "--monitor-interval=0": "--monitor-interval must be more than 0, got 0.0",
    "--rdzv-conf=timeout": "'timeout' must have a value",
}


@pytest.mark.parametrize("flag", MISTAKES)
def test_mistakes_are_told_once_by_the_launcher(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        launch.main([flag, "-m", "json"] if flag.startswith("-") else [flag])
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: yafsdp-cc launch")
    assert MISTAKES[flag] in error


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--config=nowhere"], "nowhere: No such file or directory; yafsdp-cc config writes a run file"),
        (["--set=shard.zero_stagge=2"], "--set: there is no setting shard.zero_stagge; did you mean shard.zero_stage?"),
        (
            ["--set=compression=onebit", "--set=compression.feedback=false"],
            "compression (--set): gradients='onebit' with feedback=False: what it leaves out would be lost",
        ),
        (["--set=launch.log_dir=/proc/logs"], "error: no folder for logs can be made"),
        (["--standalone", "--nnodes=2"], "--standalone is for this machine alone: leave it out, or --nnodes=2"),
    ],
)
def test_settings_are_checked_before_a_rank_starts(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("YAFSDP_CC_RUN", "{}")
    with pytest.raises(SystemExit) as ended:
        launch.main([*flags, "-m", "json"])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_flags_win_over_the_environment_and_that_over_the_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(flag: str, settings: dict[str, Setting]) -> dict[str, Any]:
        parser = torchrun.get_args_parser()
        parser.add_argument("--name")
        parser.set_defaults(master_port=None)
        return vars(launch._by_precedence(parser, [flag, "job.py"], settings))

    monkeypatch.setattr(launch, "_from_slurm", lambda _: {"master_port": 20001, "node_rank": 1})
    monkeypatch.setenv("PET_NODE_RANK", "0")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    settings = {
        "launch.nnodes": Setting(2, "run.yaml:1"),
        "launch.nproc_per_node": Setting(8, "run.yaml:2"),
        "launch.max_restarts": Setting(1, "--set"),
        "launch.name": Setting("a", "run.yaml:3"),
        "launch.master_port": Setting(1234, "run.yaml:4"),
        "shard.zero_stage": Setting(2, "run.yaml:5"),
    }
    found = options("--max-restarts=2", settings)
    expected = {"nnodes": "2", "nproc_per_node": "3", "max_restarts": 2, "master_port": 20001, "name": "a"}
    assert expected.items() <= found.items()
    assert found["node_rank"] == 0
    assert options("--rdzv-endpoint=a:1", {})["master_port"] is None
    assert options("--standalone", settings)["nnodes"] == "1:1", "the run file is also for runs on several machines"
    monkeypatch.setenv("PET_LOG_DIR", "logs")
    assert options("--max-restarts=2", {"launch.log_dir": Setting(None, "--set")})["log_dir"] is None


@pytest.mark.parametrize("argument", ["--r", "--n=3", "--log", "--rank", "--name", "--nnodes=2", "-r"])
def test_arguments_of_a_script_may_look_like_flags(argument: str) -> None:
    given = ["--nproc-per-node=2", "train.py", argument, "8"]
    options = launch.all_flags().parse_args(given)
    assert (options.nproc_per_node, options.training_script_args) == ("2", [argument, "8"])
    assert flags_and_script(given) == (given[:1], given[1:])


def test_a_flag_that_is_written_in_part_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.all_flags().parse_args(["--nproc-per=2", "train.py"])
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --nproc-per=2\n")


@pytest.mark.skipif(importlib.util.find_spec("etcd") is not None, reason="python-etcd is installed")
def test_a_package_that_a_rendezvous_needs_is_named(tmp_path: Path) -> None:
    flags = ("--rdzv-backend=etcd", "--rdzv-endpoint=localhost:1", "--rdzv-id=a")
    ran = yafsdp_cc("launch", *flags, "-m", "json", folder=tmp_path)
    told = "--rdzv-backend, --rdzv-endpoint or --rdzv-conf: The 'etcd' module is required but not installed"
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 2)
    assert told in ran.stderr


def test_a_run_file_reaches_launcher_and_ranks(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("launch: {nproc_per_node: 2, log_dir: kept}\nshard: {zero_stage: 2}\n")
    body = """
say(os.environ["YAFSDP_CC_RUN"])
if rank == 0:  # the other one does without torch: importing it takes seconds
    os.environ["WORLD_SIZE"] = "1"
    import torch, yafsdp_cc
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    yafsdp_cc.shard(model, units=[torch.nn.Linear], sync_module_states=True)
    say(f"{yafsdp_cc.plan_of(model)}")
"""
    flags = ["--config=run.yaml", "--set=shard.separate_reduce_group=true"]
    ran = yafsdp_cc("launch", *flags, alone(tmp_path, body), folder=tmp_path, main=forking)
    assert ran.returncode == 0, ran.stderr
    settings, told = ran.stdout.split("\n", 1)
    assert "2 units on 1 rank" in told
    assert settings in (tmp_path / "kept" / "rank-1.log").read_text().splitlines()
    assert "  shard.zero_stage = 2  (run.yaml:2)\n  shard.separate_reduce_group = True  (--set)\n" in ran.stdout
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_a_launcher_within_a_rank_does_not_take_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YAFSDP_CC_RUN", json.dumps({"shard.zero_stage": [2, "of a rank's launcher"]}))
    (tmp_path / "train.py").write_text("import os; print(os.environ['YAFSDP_CC_RUN'])")
    ran = yafsdp_cc("launch", "train.py", folder=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "{}\n", "")


def test_a_launch_that_names_no_port_needs_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    with socket.socket() as other:
        with suppress(OSError):  # another job has torchrun's port already
            other.bind(("", 29500))
            other.listen()
        ran = yafsdp_cc("launch", "train.py", folder=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ran\n", "")


def test_logs_that_cannot_be_kept_are_told(tmp_path: Path) -> None:
    """One that cannot be written ends the launch in a line; one of another run is written by both."""
    logs = tmp_path / "runs/train/logs"
    logs.mkdir(parents=True)
    (tmp_path / "train.py").write_text("import sys; sys.stderr.write('1/2\\r2/2\\r\\n' + 'x' * 9999); sys.exit(3)")
    (logs / "rank-0.log").symlink_to("/dev/full")
    ran = yafsdp_cc("launch", "train.py", folder=tmp_path)
    assert ran.returncode == 1
    told = "cannot be written, No space left on device: name another folder, --log-dir=DIR"
    assert ran.stderr == f"yafsdp-cc: runs/train/logs/rank-0.log {told}\n"

    (logs / "rank-0.log").unlink()
    with (logs / "rank-0.log").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ran = yafsdp_cc("launch", "--local-ranks-filter=1", "train.py", folder=tmp_path)
    assert ran.returncode == 3
    assert "another run is writing runs/train/logs/rank-0.log" in ran.stderr.splitlines()[0]
    assert f"last lines of rank 0:\n  2/2\n  {'x' * 400}\n" in ran.stderr, "the end of a bar and of a long line"
    assert log(tmp_path, 0).endswith("x" * 9999)


def test_a_script_may_remove_its_run_s_folder(tmp_path: Path) -> None:
    """Its failure is told all the same, and the next attempt has a log."""
    body = """
import shutil
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    shutil.rmtree("runs")
raise ValueError("no data")
"""
    flags = ("--max-restarts=1", "--local-ranks-filter=1")
    ran = yafsdp_cc("launch", *flags, alone(tmp_path, body), folder=tmp_path, main=forking)
    assert ran.returncode == 1
    assert ran.stderr.count("rank 0 failed first: ValueError: no data\n") == 2, ran.stderr
    assert re.findall(", attempt .", log(tmp_path, 0)) == [", attempt 2"]


def test_an_exception_of_a_script_that_ignores_ctrl_c_is_told(tmp_path: Path) -> None:
    """Its log is in a folder that is gone: another rank was faster, and has removed it."""
    body = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nraise ValueError('no data')"
    ran = subprocess.run(
        [sys.executable, "-m", "yafsdp_cc.tools.cli.runner", alone(tmp_path, body)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "YAFSDP_CC_LOG": str(tmp_path / "gone/rank-0.log"), "RANK": "0"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "ValueError: no data"


def test_closed_streams_are_nobody_s(tmp_path: Path) -> None:
    """Pipes of the launcher would get the numbers of closed streams, and the ranks' output would go round in them."""
    (tmp_path / "train.py").write_text("import sys; print('trains'); print(sys.stdin.read(), file=sys.stderr)")
    words = ["sh", "-c", 'exec "$0" -m yafsdp_cc launch train.py <&- >&- 2>&-', sys.executable]
    assert subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60).returncode == 0
    assert log(tmp_path, 0).partition("\n")[2] == "trains\n\n"


def test_any_text_is_kept(tmp_path: Path) -> None:
    """Names of files need not be UTF-8, messages may hold halves of characters, and the locale may know ASCII alone."""
    (tmp_path / "train.py").write_text("raise ValueError('\u0434\u0430 \\udce9')", encoding="utf-8")
    words = [sys.executable, "-m", "yafsdp_cc", "launch", "train.py", b"caf\xe9"]
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(words, cwd=tmp_path, env={**os.environ, **plain}, capture_output=True)
    assert ran.returncode == 1
    assert ran.stderr.endswith(b"ValueError: \\u0434\\u0430 \\udce9\n\n"), ran.stderr
    kept = (tmp_path / "runs/train/logs/rank-0.log").read_bytes()
    assert b"of 1, train.py caf\xe9\n" in kept
    assert kept.endswith("ValueError: \u0434\u0430 \\udce9\n".encode()), kept


def test_settings_that_nothing_asks_for_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trains unsharded')")
    settings = json.dumps({"shard.zero_stage": [2, "run.yaml:2"]})
    ran = subprocess.run(
        [sys.executable, "-m", "yafsdp_cc.tools.cli.runner", tmp_path / "train.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "YAFSDP_CC_RUN": settings},
        capture_output=True,
        text=True,
    )
    told = "yafsdp-cc: the script has called neither shard, fully_shard nor compress, so nothing was done with "
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "trains unsharded\n", f"{told}shard.zero_stage\n")


def test_a_time_out_names_the_last_collectives_and_where_ranks_were(tmp_path: Path) -> None:
    body = "def hangs(): time.sleep(60)\nif rank == 1: hangs()\ndist.all_reduce(torch.ones(1))\n"
    train = script(tmp_path, body)
    seconds = "timeout=__import__('datetime').timedelta(seconds=4)"
    train.write_text(train.read_text().replace('"gloo"', f'"gloo", {seconds}'))
    ran = yafsdp_cc(*TWO, train, folder=tmp_path, main=forking)
    assert ran.returncode == 1
    assert "rank 0 failed first: RuntimeError" in ran.stderr
    assert "in hangs" in log(tmp_path, 1)
    told = re.search(r"torchfrtrace (\S+) --prefix (\S+) --allow-incomplete-ranks -j", ran.stderr)
    assert told, ran.stderr
    trace = pickle.loads((Path(told[1]) / f"{told[2]}0").read_bytes())
    assert [entry["profiling_name"] for entry in trace["entries"]][-1] == "gloo:all_reduce"
    if torch.__version__ >= "2.13":  # before, torchfrtrace refuses gloo
        command = [Path(sys.executable).with_name("torchfrtrace"), *told[0].split()[1:]]
        (tmp_path / "tabulate.py").write_text("def tabulate(rows, headers): return str(rows)")
        shown = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
        assert "all_reduce" in shown.stdout + shown.stderr, shown.stderr

    # the recorder's file of that run does not make a death of the next one a time-out, wherever it is started
    (tmp_path / "runs/error.json").write_text("{}")
    ran = yafsdp_cc(*TWO, alone(tmp_path, "os.kill(os.getpid(), 9)"), folder=tmp_path, main=forking)
    assert (ran.returncode, "torchfrtrace" in ran.stderr) == (137, False), ran.stderr


def test_with_torchrun_s_own_redirects_the_first_failure_and_its_reason_are_told(tmp_path: Path) -> None:
    logs = tmp_path / "runs/train/logs"
    logs.mkdir(parents=True)
    (logs / "flight-recorder-rank-0").touch()
    os.utime(logs / "flight-recorder-rank-0", (1, 1))
    train = alone(tmp_path, "time.sleep(0.5 * (1 - rank))\nraise ValueError(f'of rank {rank}')")
    ran = yafsdp_cc(*TWO, "--redirects=3", train, folder=tmp_path, main=forking)
    assert "rank 1 failed first: ValueError: of rank 1\n" in ran.stderr
    assert "timed out" not in ran.stderr


@LONG
def test_torchrun_s_own_redirects_are_kept(tmp_path: Path) -> None:
    ran = yafsdp_cc(*TWO, "--redirects=1:3", alone(tmp_path, "say(f'rank {rank}')"), folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "rank 0\n"), ran.stderr
    (kept,) = (tmp_path / "runs/train/logs").glob("*/attempt_0/1/stdout.log")
    assert kept.read_text() == "rank 1\n"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"STEP_NUM_NODES": "2", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost,other[01-03]"}
    for name, value in (step | {"JOB_ID": str(os.getpid()), "STEP_ID": "0", "NODEID": "1"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.usefixtures("slurm")
def test_a_slurm_step_names_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    port = 20000 + os.getpid() * 64 % 12000
    found = {"nnodes": "2", "node_rank": 1, "master_addr": "localhost", "master_port": port}
    assert launch._from_slurm(parser) == found
    monkeypatch.setenv("SLURM_STEP_NODELIST", "rack[2-3]n[07-09,12]-ib,login")
    assert launch._from_slurm(parser)["master_addr"] == "rack2n07-ib"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    with pytest.raises(SystemExit):
        launch._from_slurm(parser)
    assert "started 16 of these launchers on 2 machines" in capsys.readouterr().err


@pytest.mark.usefixtures("slurm")
def test_several_launchers_of_a_machine_say_how_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interactive shell is one task of many; and some users start a launcher for each GPU."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    parser = torchrun.get_args_parser()
    for flag in ("--standalone", "--rdzv-endpoint=a:1"):
        assert launch._by_precedence(parser, [flag, "job.py"], {}).nnodes == "1:1"
    with pytest.raises(SystemExit):
        launch._by_precedence(parser, ["job.py"], {})


@LONG
@pytest.mark.usefixtures("slurm")
def test_machines_of_a_slurm_step_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = script(tmp_path, "total = torch.ones(1); dist.all_reduce(total); say(f'{rank} {total.item()}')")
    with ExitStack() as stack:
        nodes = []
        for number in range(2):
            monkeypatch.setenv("SLURM_NODEID", str(number))
            nodes.append(stack.enter_context(started("launch", train, folder=tmp_path)))
        printed = [node.communicate(timeout=200)[0] for node in nodes]
    assert printed == ["0 2.0\n", ""]
    assert log(tmp_path, 1).endswith("1 2.0\n")


@pytest.mark.parametrize(
    "flags",
    ["--master-port={}", also("--rdzv-backend=c10d --rdzv-endpoint=localhost:{} --rdzv-conf=read_timeout=2")],
)
def test_a_port_in_use_is_one_line(tmp_path: Path, flags: str) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        ran = yafsdp_cc("launch", *flags.format(port).split(), "-m", "json", folder=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert re.match(f"yafsdp-cc: .*:{port}: .*another program", ran.stderr), ran.stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--master-port={}",
        also(""),
        also("--rdzv-backend=c10d"),
        also("--nnodes=1:1 --rdzv-endpoint=localhost:{}"),
        also("--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{}"),
    ],
)
def test_on_one_machine_no_store_listens_to_others(tmp_path: Path, flags: str) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    train = alone(tmp_path, "say(f'ready {os.environ[\"MASTER_PORT\"]}')\ntime.sleep(100)\n")
    with started("launch", *flags.format(port).split(), train, folder=tmp_path) as process:
        said = wait_for_line(process, "ready")
        places = listening(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert len(places) == 2, "where launchers meet, and the ranks' store"
    assert {address for address, _ in places} <= {"127.0.0.1", "::1"}
    assert int(said.split()[1]) in {port for _, port in places}
    if "master-port" in flags:
        assert said == f"ready {port}\n"


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses and ports on which a process listens."""
    files = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, place, _, state, *others = line.split()
            if state == "0A" and f"socket:[{others[5]}]" in files:
                address, number = place.split(":")
                words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(number, 16)))
    return found


@pytest.mark.parametrize("flags", [also("--node-rank={}"), also("--rdzv-backend=c10d --rdzv-id=a --rdzv-endpoint={}")])
def test_two_nodes_restart_together_and_tell_which_rank_has_ended(tmp_path: Path, flags: str) -> None:
    body = """
import yafsdp_cc
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
yafsdp_cc.shard(model, units=[torch.nn.Linear])
for step in range(10):
    if rank == 1 and step == 5:
        os.kill(os.getpid(), 9)
    model(torch.ones(1, 64)).sum().backward()
"""
    train = script(tmp_path, body)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    both = ["launch", "--nnodes=2", "--max-restarts=2", f"--master-port={port}"]
    each = [flags.format(f"localhost:{port}" if "id" in flags else node).split() for node in range(2)]
    with ExitStack() as stack:
        nodes = [stack.enter_context(started(*both, *each[node], train, folder=tmp_path)) for node in range(2)]
        told = [node.communicate(timeout=200)[1] for node in nodes]
    assert [text.count("starting the ranks again") for text in told] == [2, 2], told
    (alive,) = [text for text in told if "rank 1 failed" not in text]
    (other,) = [text for text in told if "rank 1 failed" in text]
    assert "rank 1 failed first on this node: killed by signal 9" in other
    # Where nodes join in rounds, the other one's restarts are none of this one's, but it has given up.
    ends = ["rank 0 failed first on this node: RuntimeError: an operation failed: no answer from rank 1, which ended"]
    ends += ["the launcher of another node has given up"]
    assert any(end in alive for end in ends), alive
    assert "same order" not in alive


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
    "body", [body if "catching" in name else also(body) for name, body in WAITING.items()], ids=WAITING.keys()
)
def test_ctrl_c_ends_every_rank_quietly(tmp_path: Path, body: str) -> None:
    with started(*SHOWN, script(tmp_path, body), folder=tmp_path) as process:
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


def test_a_second_ctrl_c_kills_what_does_not_end(tmp_path: Path) -> None:
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntry: time.sleep(100)\nfinally: say('stays'); time.sleep(100)\n"
    )
    with started(*SHOWN, alone(tmp_path, "import signal\nsay('ready')\n" + body), folder=tmp_path) as process:
        for _ in range(2):
            wait_for_line(process, "ready")
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        wait_for_line(process, "stays")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)  # torch's own patience is 30 seconds
        assert process.returncode == 130
        assert err == "yafsdp-cc: interrupted again: killed the ranks that had not ended\n"


@pytest.mark.parametrize("node", [0, also(1)])
def test_ctrl_c_ends_a_launcher_that_waits_for_another_node(tmp_path: Path, node: int) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    flags = ["--nnodes=2", f"--node-rank={node}", f"--master-port={port}"]
    with started("launch", *flags, "-m", "json", folder=tmp_path) as process:
        while node == 0 and process.poll() is None:  # it listens before it waits; the other one cannot be seen to wait
            with suppress(OSError), socket.create_connection(("localhost", port)):
                break
            time.sleep(0.05)
        time.sleep(0.3 if node == 0 else 4)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130


@pytest.mark.parametrize("method", ["fork", also("spawn")])
def test_a_notice_that_the_job_will_end_reaches_the_ranks(tmp_path: Path, method: str) -> None:
    body = """
import signal
noticed = []
signal.signal(signal.SIGUSR1, lambda *_: noticed.append(True))
say('ready')
while not noticed: time.sleep(0.05)
say('saved')
"""
    with started(*SHOWN, f"--start-method={method}", alone(tmp_path, body), folder=tmp_path) as process:
        for _ in range(2):
            wait_for_line(process, "ready")
        for pid in {process.pid, *(children_of(process.pid) if method == "fork" else ())}:  # as Slurm does
            os.kill(pid, signal.SIGUSR1)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "saved\n" * 2), err


def slow_to_start(argv: list[str]) -> Any:
    """The command, of which torch's agent knows the ranks long after they have started, as on a busy machine."""
    start = local_elastic_agent.start_processes

    def start_slowly(*given: Any, **settings: Any) -> PContext:
        started = start(*given, **settings)
        time.sleep(2)
        return started

    with mock.patch.object(local_elastic_agent, "start_processes", start_slowly):
        return cli.main(argv)


@pytest.mark.parametrize(
    ("sent", "status"),
    [([signal.SIGUSR1], 0), ([signal.SIGTERM], 143), ([signal.SIGTERM, signal.SIGHUP], 143)],
    ids=["notice", "end", "as systemd does"],
)
def test_a_signal_while_ranks_start_reaches_them(tmp_path: Path, sent: list[signal.Signals], status: int) -> None:
    body = f"""
import signal
noticed = []
signal.signal({sent[0]:d}, lambda *_: noticed.append(True))
say('ready')
while not noticed: time.sleep(0.05)
open(f"saved-{{rank}}", "w")
"""
    with started(*SHOWN, alone(tmp_path, body), folder=tmp_path, main=slow_to_start) as process:
        for _ in range(2):
            wait_for_line(process, "ready")
        for number in sent:
            process.send_signal(number)
            time.sleep(0.2)  # Python handles the lower number first of two signals that wait
        _, err = process.communicate(timeout=60)
        assert process.returncode == status, err
    assert [each.name for each in sorted(tmp_path.glob("saved-*"))] == ["saved-0", "saved-1"]


def test_a_notice_while_ranks_start_ends_none_without_a_handler(tmp_path: Path) -> None:
    body = "say('ready')\ntime.sleep(4)\nsay('done')"
    with started(*SHOWN, alone(tmp_path, body), folder=tmp_path, main=slow_to_start) as process:
        for _ in range(2):
            wait_for_line(process, "ready")
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "done\n" * 2), err


def test_a_sigterm_that_reaches_the_fork_server_ends_no_rank(tmp_path: Path) -> None:
    body = "say('ready')\ntime.sleep(3)\nsay('saved')"
    with started(*SHOWN, "--start-method=fork", alone(tmp_path, body), folder=tmp_path) as process:
        for _ in range(2):
            wait_for_line(process, "ready")
        for pid in children_of(process.pid):
            os.kill(pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "saved\n" * 2), err


@pytest.mark.parametrize("last", ["", "group = dist.group.WORLD\ndist.destroy_process_group()"], ids=["", "destroyed"])
def test_gloo_s_threads_get_the_interpreter_once_more_before_it_ends(tmp_path: Path, last: str) -> None:
    """Without the launcher: a thread that asks for the interpreter while it ends would abort the process."""
    body = f"""
import sys, threading, torch.distributed as dist, yafsdp_cc.ranks.groups
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ends = threading.Event()
def release():
    ends.wait()
    print("released", flush=True)
threading.Thread(target=release, daemon=True).start()
{last}
sys.setswitchinterval(10)
ends.set()
"""
    command = [sys.executable, "-c", body]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert ran.stdout == "released\n"


@pytest.mark.parametrize("method", ["fork", also("spawn")])
def test_threads_and_exit_functions_of_a_script_have_its_groups(tmp_path: Path, method: str) -> None:
    body = """
import atexit, threading
def total(): out = torch.ones(1); dist.all_reduce(out); return out.item()
def late(): time.sleep(0.5); say(f'late {total()}')
atexit.register(lambda: say(f'last {total()}'))
threading.Thread(target=late).start()
"""
    ran = yafsdp_cc(*SHOWN, f"--start-method={method}", script(tmp_path, body), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["last 2.0"] * 2 + ["late 2.0"] * 2


@pytest.mark.parametrize("end", ["", "\nsys.exit(3)", "\nraise ValueError"], ids=["good", "status", "exception"])
@pytest.mark.parametrize("method", ["fork", also("spawn")])
def test_files_that_a_script_leaves_open_have_what_was_written(tmp_path: Path, method: str, end: str) -> None:
    """A pipe that nobody reads holds up nothing."""
    body = """
import atexit, gzip, threading
unread, pipe = os.pipe()
threading.Thread(target=open(pipe, 'wb').write, args=(bytes(10**6),), daemon=True).start()
text, data = open(f'text-{rank}', 'w'), open(f'data-{rank}', 'wb')
packed = gzip.open(f'packed-{rank}', 'wt')
packed.write('packed')
def note(word): text.write(word)  # refers to the names of the script: nothing frees them before the end
note('trained')
data.write(b'1')
atexit.register(note, ', ended')
"""
    yafsdp_cc(*TWO, f"--start-method={method}", alone(tmp_path, body + end), folder=tmp_path)
    rank = 0 if (tmp_path / "text-0").read_text() else 1  # the launcher ends the other rank, if one has failed
    for each in (0, 1) if not end else (rank,):
        assert (tmp_path / f"text-{each}").read_text() == "trained, ended"
        assert (tmp_path / f"data-{each}").read_bytes() == b"1"
    if not end:
        assert gzip.decompress((tmp_path / "packed-0").read_bytes()) == b"packed"


@pytest.mark.parametrize("method", ["fork", also("spawn")])
def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path, method: str) -> None:
    body = """
import signal
say('ready')
while not os.path.exists('hung up'): time.sleep(0.05)
say('went on')
"""
    words = ["nohup", sys.executable, "-m", "yafsdp_cc", *TWO, f"--start-method={method}", alone(tmp_path, body)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_for_line(process, "ready")
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)  # the launcher looks at its signals ten times a second
        (tmp_path / "hung up").touch()
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "went on\n")


@pytest.mark.parametrize("method", ["fork", also("spawn")])
def test_a_script_reads_and_starts_processes_as_by_itself(tmp_path: Path, method: str) -> None:
    (tmp_path / "train.py").write_text("""
import multiprocessing, sys
class Batch:
    number = 7
def make(text):
    batch = Batch()
    batch.text = text
    return batch
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (batch,) = pool.map_async(make, [sys.stdin.read()]).get(timeout=60)
    print(type(batch) is Batch, batch.number, batch.text)
""")
    words = [sys.executable, "-m", "yafsdp_cc", "launch", f"--start-method={method}", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(words, cwd=tmp_path, env=environment, input="a line", capture_output=True, text=True)
    assert ran.stdout == "True 7 a line\n", ran.stderr


JUST_ENDED = """
import os, sys, time
from torch.distributed.elastic.multiprocessing import api
from yafsdp_cc.tools.cli import forks

if __name__ == "__main__":
    forks.install(is_forking=True)
    rank = [sys.executable, "-m", "yafsdp_cc.tools.cli.runner", "no-such-script.py"]
    handler = api.get_subprocess_handler("rank", tuple(rank), {}, None, None, 0, None)
    try:
        while True:
            os.kill(handler.proc.pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        handler.close()  # as by an agent that has not yet heard of the end
    print("status", handler.proc.wait(10))
"""


def test_a_rank_that_has_just_ended_can_be_told_to_end(tmp_path: Path) -> None:
    """The fork server has reaped it, and nobody has its process number any more."""
    (tmp_path / "agent.py").write_text(JUST_ENDED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "agent.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "status 1\n", done.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_a_launcher_that_comes_behind_the_end_of_a_run_tells_how_that_ended(tmp_path: Path, status: int) -> None:
    flags = ["--nnodes=1:2", "--rdzv-conf=last_call_timeout=1", f"--rdzv-endpoint={tmp_path}/meeting", "--rdzv-id=7"]
    name, job = tmp_path.name, alone(tmp_path, f"sys.exit({status})")
    ran = [yafsdp_cc("launch", *flags, f"--name={name}", job, folder=tmp_path) for _ in range(2)]
    assert [each.returncode for each in ran] == [status, 1]  # another run in the old place has trained nothing
    told = f"the run 7 that meets at {tmp_path}/meeting has ended" if status == 0 else "another node has given up"
    assert told in ran[1].stderr, ran[1].stderr
    shutil.rmtree(folder_of_run(name, "any").parent, ignore_errors=True)
    if status == 0:
        folder_of_run(name, f"7-{tmp_path}/meeting").mkdir(parents=True)  # a launcher that was killed leaves that
        again = yafsdp_cc("launch", *flags, f"--name={name}", job, folder=tmp_path)
        assert (again.returncode, told in again.stderr) == (0, True), again.stderr
        assert not folder_of_run(name, "any").parent.exists()


def test_a_node_whose_clock_is_another_one_lives_as_long_as_its_heart_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RendezvousSettings("run", 1, 2, RendezvousTimeout(), timedelta(seconds=1), 5)
    store, passed = HashStore(), [0.0]
    asleep: list[float] = []
    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: passed[0], sleep=asleep.append))
    one = _BackendRendezvousStateHolder(elastic._OwnClock(store, "run", 1), settings, 0)
    nodes = _NodeDescGenerator()
    here, there = nodes.generate("here"), nodes.generate("there")

    def beats(holder: _BackendRendezvousStateHolder, node: Any, ahead: float) -> set[Any]:
        holder.sync()
        holder.state.participants.setdefault(node, 0)
        holder.state.last_heartbeats[node] = datetime.now(timezone.utc) + timedelta(seconds=ahead)
        holder.mark_dirty()
        assert holder.sync()
        return set(holder.state.participants)

    beats(one, here, 0)
    other = _BackendRendezvousStateHolder(elastic._OwnClock(store, "run", 1), settings, 0)
    for ahead in (-3600, 3600, 3599, -60, 0):
        passed[0] += 3
        assert beats(other, there, ahead) == {here, there}
        assert beats(one, here, 0) == {here, there}
    passed[0] += 6
    assert beats(one, here, 0) == {here}
    assert asleep == [2]  # only ``other`` found a state, and waited for heartbeats to change


START = datetime.now(timezone.utc)


@pytest.mark.parametrize("interval", [1, 6])
def test_heartbeats_of_a_dead_launcher_are_as_old_as_they_say(monkeypatch: pytest.MonkeyPatch, interval: int) -> None:
    """A launcher that comes again to the place where it was killed must not meet its own ghost."""
    settings = RendezvousSettings("run", 2, 2, RendezvousTimeout(), timedelta(seconds=interval), 5)
    store, nodes, lived = HashStore(), _NodeDescGenerator(), [0]
    dead, slow = nodes.generate("dead"), nodes.generate("slow")
    writer = _BackendRendezvousStateHolder(C10dRendezvousBackend(store, "run"), settings, 0)

    def write(seconds: float = 0.0) -> None:
        writer.sync()
        lived[0] += int(seconds / 2)
        for node, age in ((dead, 5 * interval + 4), (slow, 60 - lived[0] // interval)):
            writer.state.participants[node] = len(writer.state.participants)
            writer.state.last_heartbeats[node] = START - timedelta(seconds=age)
        writer.mark_dirty()
        assert writer.sync()

    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=write))
    monkeypatch.setattr(writer, "_sanitize", lambda: None)
    write()
    newcomer = _BackendRendezvousStateHolder(elastic._OwnClock(store, "run", interval), settings, 0)
    newcomer.sync()
    assert set(newcomer.state.participants) == {slow}  # its clock is a minute late, but its heart beats


def test_launchers_that_have_met_without_enough_nodes_meet_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    settings: Any = {"meets_by": "c10d", "is_here": False, "store_type": "file"}
    meeting = elastic.FreshStores(
        RendezvousParameters(elastic.FreshStores.BACKEND, f"{tmp_path}/meeting", "run", 2, 3, "127.0.0.1", **settings)
    )
    worlds = iter([1, 1, 2])
    monkeypatch.setattr(meeting._inner, "next_rendezvous", lambda: RendezvousInfo(HashStore(), 0, next(worlds), None))
    assert meeting.next_rendezvous().world_size == 2
    assert "a node was lost while launchers met: meeting again" in capsys.readouterr().err


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with started(*TWO, alone(tmp_path, WAITING["in Python"]), folder=tmp_path) as process:
        wait_for_line(process, "ready")
        process.kill()
