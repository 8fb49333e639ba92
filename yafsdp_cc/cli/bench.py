"""``yafsdp-cc bench``: what training over a slow network and its exchanges cost here, beside torch's own."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from yafsdp_cc.bench.contestants import EXCHANGES, TRAINING
from yafsdp_cc.demo.options import positive

if TYPE_CHECKING:
    from collections.abc import Collection

CONTESTANTS = {"train": TRAINING, "exchanges": EXCHANGES}
OF_TRAINING = ("bandwidths", "delay_ms", "steps")
"""What the other suite has no use for."""

ABOUT = """\
train: the demo's model trains over links of the given bandwidth, each rank in a network namespace of this machine.
Tells tokens per second, and the bytes that crossed. exchanges: one buffer is summed over ranks, or gathered from them,
over the loopback. Tells processor and wall milliseconds. Contestants take turns: what slows one down slows all."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line: how it is used, --help tells."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: list[str]) -> int:
    """Measure and print; 0, or 1 where this machine can have no network to measure."""
    parser = _parser()
    asked = vars(parser.parse_args(argv))
    suite, path = asked.pop("suite"), asked.pop("json")
    _check(parser, suite, "suite", CONTESTANTS)
    names = asked.pop("contestants") or list(CONTESTANTS[suite])
    for name in names:
        _check(parser, name, "contestant", CONTESTANTS[suite])
    given = {option: value for option, value in asked.items() if value is not None}
    if suite != "train" and given.keys() & set(OF_TRAINING):
        parser.error("--bandwidth, --delay-ms and --steps are for --suite train")
    if path and not path.absolute().parent.is_dir():
        parser.error(f"--json {path}: there is no such folder")

    from yafsdp_cc.bench import machine, suites  # not before what is asked is known to be good: torch takes seconds
    from yafsdp_cc.netlab import LabError, Unavailable

    measure = suites.train if suite == "train" else suites.exchanges
    try:
        figures = measure(names, **given)
    except ValueError as error:
        parser.error(str(error))
    except (LabError, Unavailable) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if path:
        about = machine.about(["yafsdp-cc", "bench", *argv])
        path.write_text(json.dumps({"about": about, suite: figures}, indent=1) + "\n")
    return 0


def _parser() -> _Parser:
    parser = _Parser(
        prog="yafsdp-cc bench",
        description=ABOUT,
        epilog="\n".join("\n  ".join([f"contestants of {suite}:", *names]) for suite, names in CONTESTANTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--suite", default="train", metavar="NAME", help="train or exchanges (%(default)s)")
    parser.add_argument("--contestants", type=_names, metavar="NAMES", help="some of them, with commas (all)")
    parser.add_argument("--ranks", type=_numbers, metavar="N", help="2, 4 or 2,4 (train: 2, exchanges: 2,4)")
    parser.add_argument("--rounds", type=positive, metavar="N", help="turns of each (train: 3, exchanges: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write everything measured")
    training = parser.add_argument_group("of train")
    training.add_argument(
        "--bandwidth", dest="bandwidths", type=_names, metavar="RATES", help="of links, 100mbit,1gbit (100mbit)"
    )
    training.add_argument("--delay-ms", type=float, metavar="MS", help="one way; an answer takes twice that (0)")
    training.add_argument("--steps", type=positive, metavar="N", help="of each contestant in each turn (2)")
    return parser


def _check(parser: _Parser, name: str, what: str, known: Collection[str]) -> None:
    """End with the nearest name where there is none like this."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
        parser.error(f"no {what} {name!r}; {hint}")


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    try:
        return [positive(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write 2, or 2,4 for one run after the other") from None
