"""Everything that needs a GPU, in flights of a few minutes, for a machine that can be had now and then, for minutes.

    python3 bench/gpu/flight.py 1                   # does it fly: correctness, everything at once
    python3 bench/gpu/flight.py 2                   # what is it worth: figures, one part after another
    python3 bench/gpu/flight.py 3 pair2+wires host  # these parts of either again, the first two at once
    python3 bench/gpu/flight.py list                # what each part runs, and its time

Results go to ``--out``, ``$OUT`` or bench/out: flightN.json with each part's end and figures, flightN-logs.tgz, and
flightN-traces.tgz. They are written anew when a part ends, every few seconds, and when the flight is ended from
outside, so that nothing is lost of what was found. A part that runs out of time has failed. Wheels in ``.whl``, where
bench/gpu/prepare.py puts them, are installed into a folder that is gone afterwards. bench/gpu/rehearse.py flies without
a GPU. An H100 took 126 seconds for flight 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".whl"
PYTEST = "python3 -m pytest -p no:cacheprovider --color=no --tb=short -rf --durations=5"
SANITIZER = "compute-sanitizer --error-exitcode 9 --tool"
MEMCHECK = f"PYTORCH_NO_CUDA_MEMORY_CACHING=1 {SANITIZER} memcheck python3 bench/gpu/sanitize.py"
WORLDS = "python3 bench/worlds.py --json $FIGURES"
ENVIRONMENT = {
    "YAFSDP_CC_NATIVE": "1",  # kernels that are missing are an error, and not plain torch instead
    "GLOO_SOCKET_IFNAME": "lo",  # a machine without network may not know its own name
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "YAFSDP_SOAK": "",
}
GATE = "smoke"
"""The part without which no other begins."""
PACKED, GRACE = 10.0, 5.0
"""Seconds between writings of results, and those that a part has to end by itself once it is told to."""
TAIL = 12
"""Lines of a part's output that are printed at the end, of at most ``WIDTH`` characters."""
WIDTH = 170


class Part(NamedTuple):
    """A program of a flight, whose time is its own."""

    name: str
    limit: int
    """Seconds."""
    command: str
    """For a shell; $FIGURES is a file for JSON, $TRACES a folder."""
    rehearsed: str = ""
    """What is added where a device is simulated on a CPU, so that it takes a moment."""


class Flight(NamedTuple):
    """Parts, a few at a time."""

    limit: int
    """Seconds of all parts together."""
    stages: tuple[tuple[Part, ...], ...]
    """Parts of a stage run at once."""


SMALL_PAIR = "--shape 2,64,4,256,2,32"
SMALL_WORLD = "--model tiny --length 1024 --rounds 1 --steps 1"  # long enough for all embeddings to be units
SMALL_KERNELS = "--elements 8192 --rounds 1 --side 32"
FLIGHTS = {
    "1": Flight(
        190,
        (
            (
                Part(
                    "smoke", 75, "nvidia-smi -L; nvcc --version | tail -2; python3 bench/gpu/smoke.py", "--copied 4096"
                ),
            ),
            (
                Part("pair2", 150, "python3 bench/gpu/pair.py --world 2 --json $FIGURES", SMALL_PAIR),
                Part("pair1", 150, "python3 bench/gpu/pair.py --world 1 --json $FIGURES", SMALL_PAIR),
                Part(
                    "engine",
                    150,
                    f"{PYTEST} -n 4 tests/test_cuda.py",
                    "-n 2 -k 'over_nccl or (nothing and lane and forward)'",
                ),
                Part("wires", 150, f"{PYTEST} tests/bench/test_modelled.py", "-k cuda"),
                Part("order", 150, f"{PYTEST} tests/test_order.py -k on_a_gpu", "-k 'on_a_gpu and 1'"),
                Part("kernels", 150, f"{PYTEST} -n 6 tests/compression/test_kernels_cuda.py", "-n 2 -k captured"),
            ),
            (
                Part(
                    "speed",
                    45,
                    "python3 bench/kernels.py --device cuda --codecs onebit,int8 --rounds 5 --json $FIGURES",
                    SMALL_KERNELS,
                ),
            ),
        ),
    ),
    "2": Flight(
        370,
        (
            (
                Part(
                    "picture",
                    140,
                    f"{WORLDS} --model 3b --world 256 --rate 50 --length 8192 --rounds 3 --steps 2"
                    " --contestants 'alone,fsdp2,ours,ours apart,ours int8,ours int8 weights' --traces $TRACES",
                    SMALL_WORLD,
                ),
            ),
            (
                Part(
                    "faster",
                    60,
                    f"{WORLDS} --model 3b --world 256 --rate 100 --length 8192 --rounds 2 --steps 2"
                    " --contestants 'fsdp2,ours,ours int8 weights'",
                    SMALL_WORLD,
                ),
            ),
            (
                Part(
                    "host",
                    75,
                    f"{WORLDS} --model small --world 1 --length 256 --rounds 5 --steps 4"
                    " --contestants alone,fsdp2,ours",
                    SMALL_WORLD,
                ),
            ),
            (Part("encode", 70, "python3 bench/kernels.py --device cuda --json $FIGURES", SMALL_KERNELS),),
            (
                Part(
                    "updates",
                    35,
                    "python3 bench/optimizers.py --device cuda --layers 16 --width 2048 --json $FIGURES",
                    "--layers 1 --width 64 --rounds 1",
                ),
            ),
            (
                Part("memcheck", 100, f"{MEMCHECK} --only fp32,bf16,fp8"),
                Part("memcheck2", 100, f"{MEMCHECK} --only int8,int6,int4"),
                Part("memcheck3", 100, f"{MEMCHECK} --only int3,int2"),
                Part("memcheck4", 100, f"{MEMCHECK} --only ternary,onebit"),
                Part("memcheck5", 100, f"{MEMCHECK} --only topk,update,lamb"),
                Part("racecheck", 100, f"{SANITIZER} racecheck python3 bench/gpu/sanitize.py --only topk,lamb"),
            ),
            (
                Part(
                    "large",
                    90,
                    f"{WORLDS} --model 8b --world 256 --rate 50 --length 4096 --rounds 2 --steps 1"
                    " --contestants 'fsdp2,ours,ours int8 weights'",
                    SMALL_WORLD,
                ),
            ),
        ),
    ),
}
PARTS = {part.name: part for flight in FLIGHTS.values() for stage in flight.stages for part in stage}
AGAIN, HOUR = 240, 3600
"""Seconds of the third flight, and of a rehearsal."""


class Running:
    """A part that has begun, with all processes that it starts in a group of their own."""

    def __init__(self, part: Part, limit: float, folder: Path, environment: dict[str, str]) -> None:
        self.part, self.limit = part, limit
        self.figures, self.log = folder / f"{part.name}.json", folder / f"{part.name}.txt"
        self.start = time.monotonic()
        places = {"FIGURES": str(self.figures), "TRACES": str(folder / "traces")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", part.command],
                cwd=ROOT,
                env=environment | places,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=os.setpgrp,  # not a session of its own, which would outlive a flight that is killed
            )

    def ended(self) -> int | str | None:
        """Return its exit code, "out of time" once that is over, or None while it runs."""
        code = self.process.poll()
        if code is None and time.monotonic() - self.start < self.limit:
            return None
        self.kill()  # also what it has left behind
        return "out of time" if code is None else code

    def kill(self) -> None:
        """End all of its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + GRACE
            while self.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        self.process.wait()

    def found(self, end: int | str) -> dict[str, Any]:
        """Return how it ended, when, and its figures, if it has written any."""
        found: dict[str, Any] = {"exit": end, "seconds": round(time.monotonic() - self.start, 1), "limit": self.limit}
        with suppress(OSError, ValueError):  # none, or not yet all of them
            found["figures"] = json.loads(self.figures.read_text())
        return found


class Results:
    """What a flight has found so far, in files."""

    def __init__(self, name: str, card: str, out: Path, folder: Path) -> None:
        self._name, self._card, self._out, self._folder = name, card, out, folder
        self._start = time.monotonic()
        self.parts: dict[str, dict[str, Any]] = {}
        self.packed = 0.0

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def write(self) -> None:
        """Write all anew, each file at once."""
        found = {"flight": self._name, "card": self._card, "seconds": round(self.seconds(), 1), "parts": self.parts}
        self._replace("json", lambda path: path.write_text(json.dumps(found, indent=1) + "\n"))
        traces = self._folder / "traces"
        self._replace("logs.tgz", lambda path: self._pack(path, sorted(self._folder.glob("*.txt"))))
        if traces.exists():
            self._replace("traces.tgz", lambda path: self._pack(path, sorted(traces.iterdir())))
        self.packed = time.monotonic()

    def _replace(self, kind: str, write: Any) -> None:
        path = self._out / f"flight{self._name}{'.' if kind == 'json' else '-'}{kind}"
        fresh = path.with_name(f"new.{path.name}")
        write(fresh)
        os.replace(fresh, path)

    def _pack(self, path: Path, files: list[Path]) -> None:
        with tarfile.open(path, "w:gz") as archive:
            for each in files:
                archive.add(each, each.name)

    def show(self) -> None:
        """Print how each part ended, and the end of what it said."""
        for name, found in self.parts.items():
            log = self._folder / f"{name}.txt"
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            print(f"=== {name}: exit {found['exit']}, {found.get('seconds', 0)} s of {found.get('limit', 0):.0f}")
            print("\n".join(line[:WIDTH] for line in lines[-TAIL:]))
        print(f"=== flight {self._name}: {self.seconds():.0f} s", flush=True)


def fly(flight: Flight, results: Results, folder: Path, environment: dict[str, str]) -> bool:
    """Run all stages; return whether all parts have ended well."""
    for stage in flight.stages:
        left = flight.limit - results.seconds()
        running = []
        for part in stage:
            if left < 1:
                results.parts[part.name] = {"exit": "no time was left"}
                continue
            begun = Running(part, min(part.limit, left), folder, environment)
            results.parts[part.name] = begun.found("did not end")
            running.append(begun)
        wait(running, results)
        if results.parts.get(GATE, {"exit": 0})["exit"] != 0:
            break
    return all(found["exit"] == 0 for found in results.parts.values())


def wait(running: list[Running], results: Results) -> None:
    """Wait for parts, and write what they have found as they end."""
    try:
        while running:
            for each in tuple(running):
                if (end := each.ended()) is not None:
                    running.remove(each)
                    results.parts[each.part.name] = each.found(end)
                    results.write()
            if time.monotonic() - results.packed > PACKED:
                for each in running:
                    results.parts[each.part.name] = each.found("did not end")
                results.write()
            time.sleep(0.05)
    finally:
        for each in running:
            each.kill()
            results.parts[each.part.name] = each.found("killed")
        results.write()


def install_wheels(folder: Path) -> Iterator[str]:
    """Install what lies in ``WHEELS`` into a folder, and yield that as a place to import from."""
    if wheels := sorted(map(str, WHEELS.glob("*.whl"))):
        where = str(folder / "site")
        flags = "-q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --target"
        if subprocess.run([sys.executable, "-m", "pip", "install", *flags.split(), where, *wheels]).returncode == 0:
            yield where
        else:
            print(f"wheels of {WHEELS} are not for this Python: going on without", file=sys.stderr)


def card() -> str:
    """Return the name of the GPU: figures of two kinds do not belong into one table."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def terminated(*_: Any) -> NoReturn:
    raise SystemExit(143)


def chosen(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Flight:
    """Return the flight that was asked for."""
    if arguments.flight != "3":
        if arguments.parts:
            parser.error("parts are named for flight 3 alone, which runs them again")
        return FLIGHTS[arguments.flight]
    stages = [each.split("+") for each in arguments.parts]
    unknown = [name for stage in stages for name in stage if name not in PARTS]
    if unknown or not arguments.parts:
        parser.error(f"flight 3 {' '.join(unknown)}: name parts of {', '.join(PARTS)}")
    return Flight(AGAIN, tuple(tuple(PARTS[name] for name in stage) for stage in stages))


def rehearsed(flight: Flight) -> Flight:
    """Return a flight of small parts that have all the time they need."""

    def small(part: Part) -> Part:
        return part._replace(limit=HOUR, command=f"{part.command} {part.rehearsed}")

    return Flight(HOUR, tuple(tuple(map(small, stage)) for stage in flight.stages))


def show_parts() -> None:
    for name, flight in FLIGHTS.items():
        print(f"flight {name}, at most {flight.limit} s")
        for number, stage in enumerate(flight.stages, 1):
            for part in stage:
                print(f"  {number}  {part.name:9}  {part.limit:4} s  {part.command}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("flight", choices=(*FLIGHTS, "3", "list"))
    parser.add_argument("parts", nargs="*", help="of flight 3; those joined by + run at once")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT", ROOT / "bench" / "out"))
    parser.add_argument("--rehearse", help=argparse.SUPPRESS)  # bench/gpu/rehearse.py: what simulates a GPU on import
    options = parser.parse_args()
    if options.flight == "list":
        return show_parts()
    flight = chosen(options, parser)
    if options.rehearse:
        flight = rehearsed(flight)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, terminated)
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    results = Results(options.flight, "simulated" if options.rehearse else card(), options.out, folder)
    succeeded = False
    try:
        python = folder / "bin" / "python3"  # the one that runs this, for all parts
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        given = filter(None, [options.rehearse, os.environ.get("PYTHONPATH")])
        places = [str(ROOT), *given, *install_wheels(folder)]
        tools = f"{python.parent}:{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": ":".join(places), "PATH": tools}
        succeeded = fly(flight, results, folder, environment)
    finally:
        results.write()
        results.show()
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(not succeeded)


if __name__ == "__main__":
    main()
