"""What compression costs, apart from any network.

    python bench/wire.py                                     # about two minutes
    python bench/wire.py --codecs onebit,int8 --rounds 15    # some of it, more surely

Section *kernels*: native encoding and decoding on one thread, against copying the same number of bytes (those that are
read and those that are written, together) and against the plain-torch definitions. Contestants take turns round by
round; times are processor milliseconds of the thread, medians over rounds. What is updated in place is in the cache
when it is written, while a copy's target is fetched for nothing: more than a copy's speed is possible.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import kernels

SECTIONS = {"kernels": (kernels.measure, kernels.table)}


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"about": _about()}
    for name in options.sections:
        measure, table = SECTIONS[name]
        results[name] = measure(options.codecs, options.elements, options.rounds)
        print(table(results[name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


def _about() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "command": shlex.join(["python", "bench/wire.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"model": next(models, platform.machine()), "cores": len(os.sched_getaffinity(0))},
        "instructions": os.environ.get("YAFSDP_CC_SIMD", "the best there are"),
        "threads": 1,
    }


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", type=names, default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--codecs", type=names, default=list(kernels.CODECS), help=f"of {', '.join(kernels.CODECS)}")
    parser.add_argument("--elements", type=int, default=1 << 26, help="of each tensor, a multiple of 4096")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    options = parser.parse_args()
    for wanted, known in ((options.sections, SECTIONS), (options.codecs, kernels.CODECS)):
        for one in wanted:
            if one not in known:
                parser.error(f"{one!r} is not one of {', '.join(known)}")
    if options.elements % 4096 or options.elements < 4096:
        parser.error(f"--elements {options.elements}: a multiple of 4096")
    return options


if __name__ == "__main__":
    main()
