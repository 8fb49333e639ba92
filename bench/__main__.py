"""``python -m bench``: measure training over a slow network, and collectives, beside torch's own."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from bench.common import about, names, save
from bench.contestants import EXCHANGES, PIPELINE, REPLICAS, SLOW, TRAINING
from yafsdp_cc.tools.cli import interruptible
from yafsdp_cc.tools.cli.demo import positive

CONTESTANTS = {
    "train": list(TRAINING),
    "slow": list(SLOW),
    "exchanges": list(EXCHANGES),
    "pipeline": list(PIPELINE),
    "replicas": list(REPLICAS),
}
PICTURES = (".svg", ".png")

ABOUT = """\
train: the demo's model trains over links of the given bandwidth, each rank in a network namespace of this machine.
Shows tokens per second and the bytes sent. slow: the same for whole runs of as many tokens, as loss against
wall-clock. exchanges: one buffer is summed over ranks, or gathered from them, over the loopback. Shows processor and
wall milliseconds; with --bandwidth, over links, also bytes, with one slow rank and with links that send slowly.
pipeline: stages send each other activations and gradients, exactly or encoded, forward / backward.
replicas: whole replicas, each in a namespace of its own, are summed over in every backward, or synchronized otherwise.
Contestants take turns: what slows one down slows all."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line; --help shows the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: list[str]) -> int:
    """Measure and print; return 0, or 1 if this machine cannot have a network of its own."""
    parser = _parser()
    known, rest = parser.parse_known_args(argv)
    if rest:
        one = any(name in CONTESTANTS[suite] for name in rest for suite in CONTESTANTS)
        hint = "; contestants are one argument, with commas between them" if one else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    asked = vars(known)
    suite, path = asked.pop("suite"), asked.pop("json")
    _check(parser, suite, "suite", CONTESTANTS)
    contestants = asked.pop("contestants") or list(CONTESTANTS[suite])
    for name in contestants:
        _check(parser, name, "contestant", CONTESTANTS[suite])
    given = {option: value for option, value in asked.items() if value is not None}
    if suite == "exchanges" and "steps" in given:
        parser.error("--steps is for --suite train, slow, pipeline and replicas")
    if suite == "exchanges" and "delay_ms" in given and "bandwidths" not in given:
        parser.error("--delay-ms needs --bandwidth: without it, exchanges go over the loopback")
    for option in ("picture", "learnt"):
        if suite != "slow" and option in given:
            parser.error(f"--{option} is for --suite slow")
    for option in ("epochs", "seeds"):
        if suite != "pipeline" and option in given:
            parser.error(f"--{option} is for --suite pipeline")
    for option in ("shards", "width", "device_time", "slowdown", "downlink"):
        if suite != "replicas" and option in given:
            parser.error(f"--{option.replace('_', '-')} is for --suite replicas")
    for option, file in (("--json", path), ("--picture", given.get("picture"))):
        if file and not file.absolute().parent.is_dir():
            parser.error(f"{option} {file}: there is no such folder")
    if "picture" in given and given["picture"].suffix not in PICTURES:
        parser.error(f"--picture {given['picture']}: name a file that ends with {' or '.join(PICTURES)}")

    from yafsdp_cc.tools.netlab import LabError, Unavailable

    try:
        # only after the arguments are checked: importing torch takes seconds
        figures = import_module(f"bench.{suite}").run(contestants, **given)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    except (LabError, Unavailable) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    save(path, {"about": about(["python", "-m", "bench", *argv]), suite: figures})
    return 0


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m bench",
        description=ABOUT,
        epilog="\n".join("\n  ".join([f"contestants of {suite}:", *names]) for suite, names in CONTESTANTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    suites = f"{', '.join(CONTESTANTS)} (%(default)s)"
    parser.add_argument("--suite", default="train", metavar="NAME", help=suites)
    some = "some of them, as 'ddp fp32,ours 1-bit adam' (all)"
    parser.add_argument("--contestants", type=names, metavar="NAMES", help=some)
    parser.add_argument("--ranks", type=_numbers, metavar="N", help="2, 4 or 2,4 (train, pipeline: 2, others: 2,4)")
    parser.add_argument("--rounds", type=positive, metavar="N", help="turns of each (exchanges: 7, others: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write everything measured")
    training = parser.add_argument_group("of train, slow, pipeline and replicas; the first two of exchanges, too")
    rates = "of links, 100mbit,1gbit,unshaped (exchanges: none; replicas: matched)"
    training.add_argument("--bandwidth", dest="bandwidths", type=names, metavar="RATES", help=rates)
    training.add_argument("--delay-ms", type=float, metavar="MS", help="one way; an answer takes twice that (0)")
    steps = "of each contestant (in each turn: 2; slow, in all: 300)"
    training.add_argument("--steps", type=positive, metavar="N", help=steps)
    where = "slow: where to draw, .svg or .png; FILE-2-ranks.svg and so on where --ranks has several"
    training.add_argument("--picture", type=Path, metavar="FILE", help=where)
    learnt = "slow: what an earlier run's --json wrote; losses in there of as many steps are not learnt again"
    training.add_argument("--learnt", type=Path, metavar="FILE", help=learnt)
    epochs = "pipeline: that each contestant learns, for its loss, in its whole run (0)"
    training.add_argument("--epochs", type=positive, metavar="N", help=epochs)
    shards = "replicas: ranks of each, without a slow link among them (1)"
    training.add_argument("--shards", type=positive, metavar="N", help=shards)
    training.add_argument("--width", type=positive, metavar="N", help="replicas: of the model (384)")
    waits = "replicas: each step waits so long besides, as for an accelerator (0)"
    training.add_argument("--device-time", type=float, metavar="SECONDS", help=waits)
    slowdown = "replicas: how many times as long a step of the last one is (1)"
    training.add_argument("--slowdown", type=float, metavar="X", help=slowdown)
    downlink = "replicas: how many times as fast links receive as they send (1)"
    training.add_argument("--downlink", type=float, metavar="X", help=downlink)
    training.add_argument("--seeds", type=positive, metavar="N", help="pipeline: runs of --epochs each (1)")
    return parser


def _check(parser: _Parser, name: str, what: str, known: Collection[str]) -> None:
    """Exit with the nearest known name if ``name`` is unknown."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
        parser.error(f"no {what} {name!r}; {hint}")


def _numbers(text: str) -> list[int]:
    try:
        return [positive(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write 2, or 2,4 for one run after the other") from None


if __name__ == "__main__":
    sys.exit(interruptible(lambda: main(sys.argv[1:])))
