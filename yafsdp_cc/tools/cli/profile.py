"""``yafsdp-cc profile``: start a script on its ranks, as ``launch`` does, and record some of its steps."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from itertools import takewhile
from pathlib import Path

ABOUT = """\
Records some optimizer steps of every rank, without a change to the script: by torch.profiler (kineto), also without a
GPU, or by Nsight Systems (nsys), whose command is printed. Afterwards: yafsdp-cc report FOLDER."""


def main(argv: list[str]) -> int:
    """Run the script under the profiler; return the script's exit status, or 1 where nothing was recorded."""
    parser = argparse.ArgumentParser(
        prog="yafsdp-cc profile",
        usage="%(prog)s [flags below] [torchrun's flags] script.py ...",
        description=ABOUT,
        allow_abbrev=False,
    )
    parser.add_argument("--tool", choices=["kineto", "nsys"], default="kineto", help="what records (%(default)s)")
    steps = "optimizer steps, from 1 on (4:6)"
    parser.add_argument("--steps", type=_steps, default=(4, 6), metavar="FIRST:LAST", help=steps)
    output = "of a trace for each rank, in place of those there (%(default)s)"
    parser.add_argument("--output", type=Path, default=Path("profile"), metavar="FOLDER", help=output)
    parser.add_argument("--trace", default="cuda,nvtx", help="what nsys traces (%(default)s); osrt: also system calls")
    asked, rest = own_flags(parser, argv)

    from yafsdp_cc.tools.cli import launch

    folder = asked.output.absolute()
    wanted = f"{asked.tool}:{asked.steps[0]}:{asked.steps[1]}:{folder}"
    if asked.tool == "nsys":
        rest = nsys_arguments(rest, folder, asked.trace)
        print(shlex.join(["env", f"YAFSDP_CC_PROFILE={wanted}", "yafsdp-cc", "launch", *rest]), flush=True)
        import torch

        lacking = "nsys is not on PATH" if shutil.which("nsys") is None else ""
        if lacking := lacking or ("" if torch.cuda.is_available() else "there is no GPU here, and it records one"):
            print(f"{parser.prog}: not run: {lacking}. --tool kineto needs neither", file=sys.stderr)
            return 1
    make_output(parser, asked.output)
    # remove old traces, perhaps of more ranks: a report of the folder would mix them with the new ones
    for trace in _traces(folder):
        trace.unlink(missing_ok=True)
    os.environ["YAFSDP_CC_PROFILE"] = wanted
    status = launch.main(rest)
    written = len(_traces(folder))
    if written:
        traces = "1 trace" if written == 1 else f"{written} traces"
        print(f"{parser.prog}: {traces} in {asked.output}; yafsdp-cc report {asked.output} shows what they tell")
    else:
        print(f"{parser.prog}: nothing was recorded", file=sys.stderr)
    return status or int(not written)


def make_output(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make the folder of ``--output``, or end the command with the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {folder}: this folder cannot be made, {error.strerror}: name another")


def _traces(folder: Path) -> list[Path]:
    return [each for kind in ("json.gz", "nsys-rep", "sqlite") for each in folder.glob(f"rank*.{kind}")]


def nsys_arguments(argv: list[str], folder: Path, trace: str) -> list[str]:
    """Return arguments of ``launch`` that run each rank under ``nsys``, which writes a report of each to ``folder``."""
    flags, script = flags_and_script(argv)
    nsys = ["nsys", "profile", f"--output={folder}/rank%q{{RANK}}", "--force-overwrite=true", f"--trace={trace}"]
    # let nsys only stop recording at the end of the range: if it killed its rank, other ranks would wait for the rank
    nsys += ["--sample=none", "--cpuctxsw=none", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    return [*flags, "--no-python", *nsys, sys.executable, "-m", "yafsdp_cc.tools.cli.runner", *script]


def flags_and_script(argv: list[str]) -> tuple[list[str], list[str]]:
    """Divide arguments of ``launch`` into flags, and the script (or ``-m`` and a module) with its own arguments."""
    from yafsdp_cc.tools.cli.launch import all_flags

    options = all_flags().parse_args(argv)
    script = [options.training_script, *options.training_script_args]
    flags = [each for each in argv[: len(argv) - len(script)] if each not in ("-m", "--module")]
    return flags, [*(["-m"] if options.module else []), *script]


def _is_script(path: str) -> bool:
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, "__main__.py"))  # no OSError if path is too long


def own_flags(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the leading flags, those of ``parser``, and return the rest: flags of the script may look like them."""
    flags = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
    place = 0
    while place < len(argv) and argv[place].partition("=")[0] in flags:
        place += 1 if "=" in argv[place] else 2
    place = len(argv) if argv[place : place + 1] in (["-h"], ["--help"]) else min(place, len(argv))
    asked, rest = parser.parse_args(argv[:place]), argv[place:]
    if not rest:
        parser.error("name a script to run")
    before_script = list(takewhile(lambda each: each not in ("-m", "--module") and not _is_script(each), rest))
    late = next((place for place, each in enumerate(before_script) if each.partition("=")[0] in flags), None)
    if late is not None:
        missing = next((each for each in before_script[:late] if each.endswith(".py")), "")
        parser.error(f"no such script: {missing}" if missing else f"{rest[late]} comes first, before torchrun's flags")
    return asked, rest


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"{text!r}: write 4:6 for the steps 4, 5 and 6; the first one is 1")
    return first, last
