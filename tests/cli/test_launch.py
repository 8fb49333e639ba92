"""``yafsdp-cc launch``: scripts run as under torchrun; failures are readable; nothing stays behind."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import pytest

from tests.cli.command import ROOT, children_of, started, wait_for_line, yafsdp_cc
from tests.soak import also
from yafsdp_cc.cli import launch

EXAMPLE = ROOT / "docs/examples/checkpoint.py"
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
        also("os.kill(os.getpid(), 9)", 137, "killed by signal 9"),
        (
            "import json; json.dump = lambda *_: os.kill(os.getpid(), 9); 1 / 0",
            137,
            "killed by signal 9",
        ),  # while it tells why
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


@pytest.mark.parametrize("flags", ["--standalone", also("--master-port=29637")])  # both ways in which launchers meet
def test_each_attempt_shows_why_it_failed_and_starts_with_an_empty_store(tmp_path: Path, flags: str) -> None:
    body = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
store = dist.distributed_c10d._get_default_store()
found = store.check(["left behind"])
store.set("left behind", "")
raise ValueError(f"attempt {attempt}" + " sees what the one before it has left" * found)
"""
    ran = yafsdp_cc("launch", flags, "--max-restarts=1", script(tmp_path, body), folder=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.count("\nValueError: attempt 0\n") == 1
    assert ran.stderr.count("\nValueError: attempt 1\n") == 1


@pytest.mark.parametrize("seed", [None, *(also(seed) for seed in range(50))])
def test_training_goes_on_bit_for_bit_when_ranks_are_killed(tmp_path: Path, seed: int | None) -> None:
    chance = random.Random(seed)
    kills = 1 if seed is None else 3
    # When: at a line that rank 0 prints, and some time after it. Without a seed: two steps after a checkpoint.
    at = [6] if seed is None else sorted(chance.sample(range(1, 13), kills))
    losses: dict[int, str] = {}
    with started(*TWO, f"--max-restarts={kills}", EXAMPLE, folder=tmp_path) as process:
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
        ran = yafsdp_cc(*TWO, EXAMPLE, folder=Path(folder))
    return {int(line.split()[1]): line.split()[3] for line in ran.stdout.splitlines()}


MISTAKES = {
    "nowhere.py": "no such script: nowhere.py",
    "--nproc-per-node=many": "--nproc-per-node: Unsupported nproc_per_node value: many",
    "--nproc-per-node=0": "--nproc-per-node must be at least 1, got 0",
    "--nnodes=0": "--nnodes must be a number of nodes, or MIN:MAX of at least 1, got 0",
    "--nnodes=3:2": "min_nodes=3, max_nodes=2",
    "--max-restarts=-1": "--max-restarts must be at least 0",
    "--monitor-interval=0": "--monitor-interval more than 0, got 0 and 0.0",
    "--rdzv-conf=timeout": "'timeout' must have a value",
}


@pytest.mark.parametrize("flag", MISTAKES)
def test_mistakes_are_told_once_by_the_launcher(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    with pytest.raises(SystemExit) as ended:
        launch.main([flag, "-m", "json"] if flag.startswith("-") else [flag])
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: yafsdp-cc launch")
    assert MISTAKES[flag] in error


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
    assert sum(end in alive for end in ends) == 1, alive
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


def test_a_second_ctrl_c_kills_what_does_not_end(tmp_path: Path) -> None:
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntry: time.sleep(100)\nfinally: say('stays'); time.sleep(100)\n"
    )
    with started(*TWO, script(tmp_path, "import signal\nsay('ready')\n" + body), folder=tmp_path) as process:
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
    with started("launch", "--nnodes=2", f"--node-rank={node}", "-m", "json", folder=tmp_path) as process:
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with started(*TWO, script(tmp_path, WAITING["in Python"]), folder=tmp_path) as process:
        wait_for_line(process, "ready")
        process.kill()
