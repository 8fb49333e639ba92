"""What ``bench/gpu/flight.py`` runs on a GPU, on the CPU with the device simulated (``tests/simulated_cuda.py``).

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
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench import worlds
from bench.gpu import flight as flights
from bench.gpu.prepare import PACKAGES
from bench.models import GPT
from tests.cli.command import forked
from tests.internals import has_native_kernels
from tests.soak import LONG

ROOT = Path(__file__).resolve().parents[2]
WITH_KERNELS = pytest.mark.skipif(not has_native_kernels(), reason="the native extension is not built")


def run(*command: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "YAFSDP_SOAK": "", **env}
    become = forked(command, variables) if command[1] == "-c" else None
    done = subprocess.run([*command], cwd=ROOT, capture_output=True, text=True, env=variables, preexec_fn=become)
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
is_idle = []
kernels.milliseconds(lambda: is_idle.append(torch.cuda.current_stream().query()), torch.device("cuda"))
assert is_idle == [False], "the time that a launch takes is counted as the kernel's"
sys.argv = ["kernels.py", "--device", "cuda", "--elements", "8192", "--rounds", "1", "--codecs", "onebit,int8"]
sys.argv += ["--side", "32", "--json", "OUT"]
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


FLOWN = """
import sys
from pathlib import Path
from bench.gpu import flight
from bench.gpu.flight import Flight, Part
flight.WHEELS, flight.card, flight.PACKED = Path("OUT/none"), lambda: "a card", 0.1
flight.FLIGHTS = {"1": FLIGHT}
sys.argv = ["flight.py", "1", "--out", "OUT"]
flight.main()
"""


class Flown(NamedTuple):
    """A flight under way."""

    process: subprocess.Popen[str]
    out: Path

    def parts(self) -> dict[str, Any]:
        path = self.out / "flight1.json"
        return json.loads(path.read_text())["parts"] if path.exists() else {}

    def said(self, name: str) -> int:
        """Wait until a part has said a number that its results have, too."""
        while not (found := re.findall(r"(\d+) said", self.logs().get(f"{name}.txt", ""))):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        return int(found[0])

    def exits(self) -> dict[str, Any]:
        """Return how parts have ended, once all have."""
        self.process.communicate(timeout=60)
        return {name: part["exit"] for name, part in self.parts().items()}

    def logs(self) -> dict[str, str]:
        if not (self.out / "flight1-logs.tgz").exists():
            return {}
        with tarfile.open(self.out / "flight1-logs.tgz") as archive:
            return {each.name: archive.extractfile(each).read().decode() for each in archive}  # type: ignore[union-attr]


def flown(tmp_path: Path, flight: str) -> Flown:
    program = FLOWN.replace("FLIGHT}", flight + "}").replace("OUT", str(tmp_path))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: Any = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes)
    return Flown(process, tmp_path)


def has_ended(process: int) -> bool:
    """Return whether a process is not there, or dead and not yet waited for by its new parent."""
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


FAILS_AND_STAYS = """Flight(60, (
    (Part("first", 9, "echo '[1]' > $FIGURES"),),
    (Part("second", 9, "exit 3"), Part("third", 60, "echo '[2]' > $FIGURES; sleep 100 & echo $! said; wait")),
    (Part("fourth", 9, "echo"),),
))"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_results_are_written_after_each_part_and_when_killed(tmp_path: Path, number: signal.Signals) -> None:
    flight = flown(tmp_path, FAILS_AND_STAYS)
    said = flight.said("third")
    flight.process.send_signal(number)
    assert flight.exits() == {"first": 0, "second": 3, "third": "killed"}
    assert flight.process.returncode == 143
    assert [flight.parts()[name].get("figures") for name in ("first", "second", "third")] == [[1], None, [2]]
    assert json.loads((tmp_path / "flight1.json").read_text())["card"] == "a card"
    assert has_ended(said)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_was_found_is_there_if_a_flight_is_killed_without_a_word(tmp_path: Path) -> None:
    flight = flown(tmp_path, FAILS_AND_STAYS)
    said = flight.said("third")
    flight.process.kill()
    assert flight.exits() == {"first": 0, "second": 3, "third": "did not end"}
    os.kill(said, signal.SIGKILL)


def test_a_part_that_takes_too_long_has_failed(tmp_path: Path) -> None:
    late = """Flight(9, ((Part("late", 1, "sleep 100 & echo $!; wait"),), (Part("next", 9, "exit 0"),)))"""
    flight = flown(tmp_path, late)
    assert flight.exits() == {"late": "out of time", "next": 0}
    assert flight.process.returncode == 1
    assert has_ended(int(flight.logs()["late.txt"]))


def test_a_flight_ends_in_time(tmp_path: Path) -> None:
    flight = flown(tmp_path, """Flight(2, ((Part("late", 9, "sleep 100"),), (Part("next", 9, "exit 0"),)))""")
    assert flight.exits() == {"late": "out of time", "next": "no time was left"}


def test_nothing_begins_where_nothing_works(tmp_path: Path) -> None:
    flight = flown(tmp_path, """Flight(9, ((Part("smoke", 9, "exit 1"),), (Part("next", 9, "exit 0"),)))""")
    assert flight.exits() == {"smoke": 1}


def test_parts_of_a_third_flight_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        (["3", "enginee"], "enginee: name parts of smoke, pair2"),
        (["1", "engine"], "flight 3"),
    ):
        monkeypatch.setattr(sys, "argv", ["flight.py", *arguments])
        with pytest.raises(SystemExit, match=r"^2$"):
            flights.main()
        assert message in capsys.readouterr().err


START = 90
"""Seconds that a machine takes until the first part begins."""


def test_flights_fit_into_their_time() -> None:
    """A quarter of an hour with both starts, and some minutes left for what broke."""
    for name, minutes in (("1", 4.7), ("2", 7.7)):
        flight = flights.FLIGHTS[name]
        assert START + flight.limit <= 60 * minutes
        assert all(part.limit <= flight.limit for stage in flight.stages for part in stage)
    assert len(flights.PARTS) == sum(len(stage) for flight in flights.FLIGHTS.values() for stage in flight.stages)


def test_what_flights_run_is_there() -> None:
    """Each program and test file, and each option of ours."""
    for part in flights.PARTS.values():
        command = f"{part.command} {part.rehearsed}"
        assert all((ROOT / file).is_file() for file in re.findall(r"\S+\.py\b", command)), part.name
        for program, arguments in re.findall(r"python3 (\S+\.py)([^;|]*)", command):
            source = (ROOT / program).read_text()
            assert all(f'"{option}"' in source for option in re.findall(r"--\w+", arguments)), part.name


def test_what_a_bare_machine_lacks_is_brought_along() -> None:
    declared = re.search(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert set(re.findall(r'"([a-z]+)', declared[1])) == {"torch", "numpy", *PACKAGES}  # the machine has the first two


def test_the_manual_knows_all_parts() -> None:
    text = (ROOT / "bench" / "gpu" / "README.md").read_text()
    assert all(f"`{name}`" in text for name in flights.PARTS)
    for name, flight in flights.FLIGHTS.items():
        assert re.search(rf"^python3 bench/gpu/flight.py {name} .* at most {flight.limit} seconds$", text, re.MULTILINE)


def spans(**others: Any) -> dict[str, Any]:
    taken = {"communicated_us": [[0, 400], [500, 900]], "computed_us": [[300, 600], [600, 1000]]}
    figures = dict.fromkeys(
        ("exposed_ms", "gb_per_s", "sent_bytes", "reserved_bytes", "blocks", "segments", "host_ms"), 1
    )
    return taken | figures | {"step_ms": 10.0, "links_ms": 4.0, "turns": [[0.1, 0.1]]} | others


def test_the_picture_and_its_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    contestants = {name: spans() for name in ("alone", "fsdp2", "ours", "ours int8")}
    contestants["alone"]["step_ms"] = 8.0
    same = {"policy": "fp32", "truth": "FSDP2", "same_losses": True, "same_weights": True}
    rows: list[dict[str, Any]] = [
        {"rank": rank, "row": "ours"} | same | {"loss": 1.0, "loss_of_fsdp2": 1.0} for rank in (0, 1)
    ]
    rows += [row | {"row": "ours, keeps weights", "same_weights": row["rank"] == 0} for row in rows]
    rows.append({"rank": 0, "row": "int8", "truth": "int8, defined", "loss": 1.01, "loss_of_fsdp2": 1.0})
    parts = {"pair2": {"exit": 1, "figures": {"rows": rows}}, "pair1": {"exit": "out of time"}}
    (tmp_path / "flight1.json").write_text(json.dumps({"card": "H100", "parts": parts}))
    parts = {"picture": {"exit": 0, "figures": {"cases": {"3b": contestants}}}}
    (tmp_path / "flight2.json").write_text(json.dumps({"card": "H100", "parts": parts}))
    program = [sys.executable, "bench/gpu/picture.py", "--picture", str(tmp_path / "picture.svg")]
    printed = run(*program, str(tmp_path / "flight1.json"), str(tmp_path / "flight2.json")).stdout
    assert (tmp_path / "picture.svg").read_text().count("<svg") == 1
    assert "| step, ms · of the bound *modelled wire* | 10.0 · 0.80 | 10.0 · 0.80 | - | 10.0 · 0.80 |" in printed
    assert "| GiB reserved *measured* |" in printed
    equal = "equal to the bit in 1 of 2"
    assert f"| losses and weights over NCCL *measured* | - | {equal} | as left | loss off by 1.0e-02 |" in printed
    assert "| host, ms a step, small model, 1 rank *measured* | - | - | - | - |" in printed
    (tmp_path / "flight1.json").write_text(json.dumps({"card": "H200", "parts": {}}))
    done = run(*program, str(tmp_path / "flight1.json"), str(tmp_path / "flight2.json"), check=False)
    assert done.returncode == 2
    assert "of two kinds of card: H100, H200" in done.stderr


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
@pytest.mark.timeout(3000)
def test_all_parts_are_rehearsed(tmp_path: Path) -> None:
    printed = run(sys.executable, "bench/gpu/rehearse.py", "--out", str(tmp_path)).stdout
    for name in flights.PARTS:
        assert re.search(rf"^{name} +0 ", printed, re.MULTILINE), printed
    assert len(list(tmp_path.iterdir())) <= 8
