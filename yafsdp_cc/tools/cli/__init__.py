"""The command line, ``yafsdp-cc``. Each command's module is imported only when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable

import yafsdp_cc

COMMANDS = {
    "config": "write, show or check a run file",
    "launch": "run a training script on several ranks, with a run file and torchrun's own flags",
    "try": "run a training script under several settings for some steps, and recommend one",
    "env": "describe this machine and installation, for a report of a problem",
    "convert": "write a checkpoint's model as safetensors",
    "demo": "train a small language model on two ranks of this machine",
    "estimate": "tell what a training job will hold, send and take, before it runs",
    "profile": "record some steps of a training script, by torch.profiler or Nsight Systems",
    "report": "show traces and runs as tables",
}
"""Description of each command; the module of a command has ``main(argv) -> exit status``."""
MODULES = {"try": "try_"}
"""Module of each command whose own name is a keyword of Python, and so cannot be a module's."""


def main(argv: list[str] | None = None) -> int:
    """Run one command of ``yafsdp-cc``; return its exit status."""
    _open_what_is_closed()
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        commands = "\n".join(f"  {name:<8} {summary}" for name, summary in COMMANDS.items())
        print(f"usage: yafsdp-cc [--version] COMMAND ...\n\n{commands}\n\nyafsdp-cc COMMAND --help shows more.")
        return 0
    if name == "--version":
        print(f"yafsdp_cc {yafsdp_cc.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see yafsdp-cc --help"
        if name == "bench":
            hint = "type `python -m bench` in a clone of the repository"
        print(f"yafsdp-cc: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    status = interruptible(lambda: importlib.import_module(f"yafsdp_cc.tools.cli.{MODULES.get(name, name)}").main(rest))
    if argv is None and name == "estimate":
        # A backward starts autograd's threads: one that begins only as the interpreter shuts down aborts the process.
        sys.stderr.flush()
        os._exit(status)
    return status


def _open_what_is_closed() -> None:
    """Open closed standard streams on /dev/null: files opened later would get their numbers, and what is printed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  # stays open until this process ends
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def interruptible(command: Callable[[], int]) -> int:
    """Run a command; return its exit status, also where Ctrl-C or a closed pipe has ended it."""
    try:
        status = int(command())
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter's flush at exit must not fail
        return 141
