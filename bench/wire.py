"""Everything that is measured of the wire.

    python bench/wire.py                                                        # about a quarter of an hour
    python bench/wire.py --sections kernels --codecs onebit,int8 --rounds 15    # some of it, more surely

Sections *training* and *exchanges* are the suites of ``yafsdp-cc bench``: training over 100 Mbit/s and 1 Gbit/s between
network namespaces of this machine, and what sums and gathers cost the processor, over its loopback.

Section *kernels*: native encoding and decoding on one thread, against copying the same number of bytes (those that are
read and those that are written, together) and against the plain-torch definitions. Contestants take turns round by
round; times are processor milliseconds of the thread, medians over rounds. What is updated in place is in the cache
when it is written, while a copy's target is fetched for nothing: more than a copy's speed is possible.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench import kernels
from yafsdp_cc.bench import machine, suites
from yafsdp_cc.bench.contestants import EXCHANGES, TRAINING
from yafsdp_cc.netlab import Unavailable

BANDWIDTHS = ("100mbit", "1gbit")


def training(options: argparse.Namespace) -> dict[str, Any]:
    try:
        return suites.train(list(TRAINING), bandwidths=BANDWIDTHS, rounds=options.rounds or 3)
    except Unavailable as reason:
        print(f"training: skipped, {reason}", flush=True)
        return {"skipped": str(reason)}


def exchanges(options: argparse.Namespace) -> dict[str, Any]:
    return suites.exchanges(list(EXCHANGES), rounds=options.rounds or 7)


def native(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    result = kernels.measure(options.codecs, options.elements, options.rounds or 7)
    print(kernels.table(result), flush=True)
    return result


# In this order, whichever are asked for: the ranks of the first two are forked, and kernels may have started threads.
SECTIONS = {"training": training, "exchanges": exchanges, "kernels": native}


def main() -> None:
    options = _options()
    results: dict[str, Any] = {"about": machine.about(["python", "bench/wire.py", *sys.argv[1:]])}
    for name in [name for name in SECTIONS if name in options.sections]:
        results[name] = SECTIONS[name](options)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")  # as far as it has come


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", type=names, default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--codecs", type=names, default=list(kernels.CODECS), help=f"of {', '.join(kernels.CODECS)}")
    parser.add_argument("--elements", type=int, default=1 << 26, help="of each tensor of kernels, a multiple of 4096")
    parser.add_argument("--rounds", type=int, help="of training 3, of the others 7, unless told")
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
