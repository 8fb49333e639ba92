"""What ``bench/gpu.sh`` runs on a GPU, rehearsed on the CPU with the device simulated (``tests/simulated_cuda.py``).

Errors that need no GPU are found here: an attribute that does not exist any more, an argument that cannot be pickled, a
tensor made on the wrong device, a wait of the host, figures that are not written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import worlds
from bench.models import GPT
from tests.internals import has_native_kernels
from tests.soak import LONG

ROOT = Path(__file__).resolve().parents[2]
WITH_KERNELS = pytest.mark.skipif(not has_native_kernels(), reason="the native extension is not built")


def run(*command: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "YAFSDP_SOAK": "", **env}
    done = subprocess.run([*command], cwd=ROOT, capture_output=True, text=True, env=variables)
    assert not check or done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done


def rehearse(*which: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    plugins = ("-p", "tests.simulated_cuda", "-p", "no:xdist")
    return run(sys.executable, "-m", "pytest", *plugins, *which, check=check, **env)


CHOSEN = {
    "tests/test_cuda.py": "test_the_engine_allocates or never_waits or what_is_offloaded or without_cuda",
    "tests/bench/test_modelled.py": "numbers or train",
    **({"tests/compression/test_kernels_cuda.py": "(captured or stream) and topk"} if has_native_kernels() else {}),
}
"""Of each file, which tests."""


def test_tests_for_a_gpu_run_and_what_it_would_refuse_is_seen(tmp_path: Path) -> None:
    """In one process, and with the same ranks."""
    refused = tmp_path / "test_refused.py"
    refused.write_text(REFUSED)
    files = CHOSEN | {str(refused): "test_refused"}
    chosen = " or ".join(f"{Path(file).name} and ({which})" for file, which in files.items())
    printed = rehearse("-rp", *files, "-k", chosen).stdout
    passed = re.findall(r"^PASSED (.*?)::", printed, re.MULTILINE)  # a file that lies elsewhere is not named
    assert set(passed) == {*CHOSEN, ""}, printed
    assert passed.count("") == 9, printed
    assert "failed" not in printed


REFUSED = """
import pytest, torch
from tests.ranks import RankError, on_ranks

def fails(): raise KeyError("here")
def rank(*_): return torch.ones(1, device="cuda").device.type

def on_both(): torch.ones(2) + torch.ones(2, device="cuda")
def item(): torch.ones(1, device="cuda").item()
def tolist(): torch.ones(2, device="cuda").tolist()
def to_host(): torch.ones(2, device="cuda").cpu()
def from_pageable(): torch.ones(2, device="cuda").copy_(torch.ones(2), non_blocking=True)

@pytest.mark.parametrize("body", [on_both, item, tolist, to_host, from_pageable])
def test_refused(body):
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="same device|synchronizing"):
            body()
    finally:
        torch.cuda.set_sync_debug_mode("default")

def test_what_cannot_be_pickled_is_refused():
    with pytest.raises((AttributeError, TypeError, Exception), match="pickle|local"):
        on_ranks(1, lambda: None, backend="gloo")

def test_ranks_serve_several_bodies_and_start_anew_after_one_that_fails():
    assert on_ranks(2, rank, backend="gloo") == on_ranks(2, rank, 1, backend="gloo") == ["cuda"] * 2
    with pytest.raises(RankError, match="here"):
        on_ranks(2, fails, backend="gloo")
    assert on_ranks(2, rank, backend="gloo") == ["cuda"] * 2

def test_what_is_there_stays_there_where_it_is_the_default():
    with torch.device("cuda"):
        assert torch.ones(1).to("cuda").is_cuda and torch.ones(1).cuda().is_cuda and torch.ones(1).cpu().is_cpu

def test_pinned_memory_is_copied_without_a_wait():
    torch.cuda.set_sync_debug_mode("error")
    torch.ones(2, device="cuda").copy_(torch.ones(2, pin_memory=True), non_blocking=True)
    torch.cuda.set_sync_debug_mode("default")
"""

WORLD = """
import json
from tests import simulated_cuda
simulated_cuda.install()
from bench import worlds
case = worlds.Case("tiny", 64, 25.0, 32, ())
print(json.dumps(worlds.measure("NAME", case, "cuda", 1, 1)))
"""


@pytest.mark.parametrize(
    "name", ["ours int8", *(pytest.param(name, marks=LONG) for name in ("ours", "fsdp2", "alone"))]
)
@pytest.mark.timeout(900)
def test_a_world_is_measured(name: str) -> None:
    figures = json.loads(run(sys.executable, "-c", WORLD.replace("NAME", name)).stdout.splitlines()[-1])
    assert figures["step_ms"] > 0
    assert (figures["sent_bytes"] > 0) == (figures["gb_per_s"] > 0) == (name != "alone")
    # On this device nothing runs beside anything else, so all that is communicated is exposed, by any engine.
    assert figures["exposed_ms"] == pytest.approx(figures["communicated_ms"])
    assert figures["kernels"] > 0
    assert figures.keys() >= {*worlds.ALLOCATED, "communicated_us", "computed_us"}


KERNEL_BENCH = """
import sys
from tests import simulated_cuda
simulated_cuda.install()
import torch
from bench import kernels
kernels.SIDE = 32
is_idle = []
kernels.milliseconds(lambda: is_idle.append(torch.cuda.current_stream().query()), torch.device("cuda"))
assert is_idle == [False], "the time that a launch takes is counted as the kernel's"
sys.argv = ["kernels.py", "--device", "cuda", "--elements", "8192", "--rounds", "1", "--codecs", "onebit,int8"]
sys.argv += ["--json", "OUT"]
kernels.main()
"""


@WITH_KERNELS
def test_kernels_are_timed(tmp_path: Path) -> None:
    run(sys.executable, "-c", KERNEL_BENCH.replace("OUT", str(tmp_path / "kernels.json")))
    written = json.loads((tmp_path / "kernels.json").read_text())
    assert written.keys() == {"about", "jobs", "beside_matrix_products"}
    assert {job["multiprocessors"] for job in written["jobs"]} == {99, 132}


@pytest.mark.parametrize("model", ["tiny", "small"])
def test_activations_are_estimated(model: str) -> None:
    """Within a factor of two, and never too low."""
    case = worlds.Case(model, 1, 1.0, 64, ())
    spec = replace(worlds.SPECS[model], length=64)
    plain = GPT(spec).bfloat16()
    weights = {parameter.untyped_storage().data_ptr() for parameter in plain.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        plain(*spec.batch(0))
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert found <= worlds.activation_bytes(case) <= 2 * found


def test_what_does_not_fit_on_a_card_is_left_out() -> None:
    left_out = {
        card: {
            (case.model, name)
            for case in worlds.CASES
            for name in case.contestants
            if worlds.lacking(name, case, card << 30)
        }
        for card in (139, 79, 24)
    }
    assert left_out[139] == set()
    assert left_out[79] == set()
    assert {("8b", "ours"), ("3b", "alone")} <= left_out[24]


PYTHON = """#!/bin/bash
case "$1" in -S) exec REAL "$@" ;; -c) echo 9.0; exit ;; esac
case "$*" in *test_kernels*) exit 0 ;; *test_cuda*) exit 1 ;; *worlds*) echo begun; sleep 100 ;; esac
"""


def scripted(tmp_path: Path, **env: str) -> tuple[subprocess.Popen[str], Path]:
    python = tmp_path / "python"
    python.write_text(PYTHON.replace("REAL", sys.executable))
    python.chmod(0o755)
    variables = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path), **env}
    command = ["bash", str(ROOT / "bench" / "gpu.sh")]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True), tmp_path / "everything.json"


def test_results_are_written_after_each_part_and_when_killed(tmp_path: Path) -> None:
    process, results = scripted(tmp_path, PARTS="kernels,engine,worlds")
    parts: dict[str, Any] = {}
    while "worlds" not in parts and process.poll() is None:
        time.sleep(0.05)
        parts = json.loads(results.read_text())["parts"] if results.exists() else {}
    assert [parts[name]["exit"] for name in ("kernels", "engine", "worlds")] == [0, 1, "did not end"]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert json.loads(results.read_text())["parts"]["worlds"]["exit"] == "killed"


def test_a_part_ends_with_the_time_and_others_are_kept(tmp_path: Path) -> None:
    (tmp_path / "everything.json").write_text(json.dumps({"parts": {"kernels": {"exit": 0}}}))
    process, results = scripted(tmp_path, PARTS="worlds", LIMIT="7")
    process.communicate(timeout=60)
    assert process.returncode == 1
    exits = {name: part["exit"] for name, part in json.loads(results.read_text())["parts"].items()}
    assert exits == {"kernels": 0, "worlds": 124}


def test_a_tool_of_the_sanitizer_ends_with_the_script(tmp_path: Path) -> None:
    tool, begun = tmp_path / "tool", tmp_path / "begun"
    tool.write_text(f"#!/bin/bash\necho $$ > {begun}.new; mv {begun}.new {begun}; sleep 100")
    tool.chmod(0o755)
    process, results = scripted(tmp_path, PARTS="sanitizer", SANITIZER=str(tool))
    while not begun.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)  # as a terminal does that is closed
    process.communicate(timeout=60)
    assert json.loads(results.read_text())["parts"]["sanitizer"]["exit"] == "killed"
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


def test_what_would_write_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for settings in ({"PARTS": "kernels,enginee"}, {"OUT": str(tmp_path / "file" / "out")}):
        process, results = scripted(tmp_path, **settings)
        assert process.wait(timeout=60) == 2
        assert not results.exists()


SITE = """
import sys
if not sys.flags.no_site:
    from tests import simulated_cuda
    simulated_cuda.install()
"""


@LONG
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "which",
    [
        "tests/test_cuda.py",
        "tests/bench/test_modelled.py",
        "tests/test_order.py::test_programs_on_a_gpu",
        "tests/compression/test_kernels_cuda.py",
    ],
)
def test_all_tests_for_a_gpu_run(which: str) -> None:
    assert " failed" not in rehearse(which).stdout


@LONG
@pytest.mark.timeout(900)
def test_the_script_runs_on_a_simulated_gpu(tmp_path: Path) -> None:
    """In every Python process that it starts, and that those spawn."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    command = ["bash", "bench/gpu.sh"]
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OUT": str(tmp_path), "PYTHON": sys.executable, "PARTS": "speed"}
    run(*command, check=False, **env, LIMIT="60")
    assert (tmp_path / "kernels.json").exists()
