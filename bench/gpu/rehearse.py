"""Fly without a GPU: both flights on a simulated device, in small, and what each part takes.

    python bench/gpu/rehearse.py                    # some four minutes of CPU time
    python bench/gpu/rehearse.py --parts pair1,speed

Each Python process of a flight finds the device of tests/simulated_cuda.py. Whether a part begins, ends well and writes
its figures is found here; what it takes on a GPU is not: *at most* is the time that it may take there, and the last
column what makes it small here. Meant for the torch and Python of the machine with the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import names
from bench.gpu.flight import FLIGHTS, PARTS, ROOT
from yafsdp_cc.table import table

SITE = """
import multiprocessing, sys
if not sys.flags.no_site:
    from tests import simulated_cuda
    simulated_cuda.install()
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # what is spawned would simulate a device once more
"""
TOOL = """#!/bin/sh
# In the place of compute-sanitizer: what it would run.
while [ "$1" != python3 ]; do shift; done
exec "$@"
"""


def fly(flight: list[str], out: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each part of a flight has come to."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    results = out / f"flight{flight[0]}.json"
    results.unlink(missing_ok=True)  # those of another rehearsal are none of a flight that does not begin
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "flight.py"), *flight]
    subprocess.run([*command, "--out", str(out), "--rehearse", str(folder)], env=environment)
    parts: dict[str, dict[str, Any]] = json.loads(results.read_text())["parts"]
    return parts


def end_of(name: str, part: dict[str, Any]) -> str:
    """Return how a part ended: "0" only if it has written the figures that its command asks for."""
    if part["exit"] == 0 and "$FIGURES" in PARTS[name].command and "figures" not in part:
        return "no figures"
    return str(part["exit"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", type=names, help="some instead of both flights")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out" / "rehearsal")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(SITE)
        (folder / "compute-sanitizer").write_text(TOOL)
        (folder / "compute-sanitizer").chmod(0o755)
        flights = [["3", *options.parts]] if options.parts else [[name] for name in FLIGHTS]
        found = {name: part for flight in flights for name, part in fly(flight, options.out, folder).items()}
    rows = [
        [
            name,
            end_of(name, part),
            f"{part.get('seconds', 0):.0f}",
            str(PARTS[name].limit),
            PARTS[name].rehearsed or "as it flies",
        ]
        for name, part in found.items()
    ]
    print(table(["part", "exit", "s, rehearsed", "s, at most", "rehearsed in small by"], *rows))
    for name, flight in FLIGHTS.items():
        limits = [max(part.limit for part in stage) for stage in flight.stages]
        print(f"flight {name}: {flight.limit} s at most, {sum(limits)} s if each stage took all that its parts may")
    print(
        "files:",
        *(f"{path.name} {path.stat().st_size / 1e6:.2f} MB" for path in sorted(options.out.iterdir())),
        sep="\n  ",
    )
    sys.exit(any(end_of(name, part) != "0" for name, part in found.items()))


if __name__ == "__main__":
    main()
