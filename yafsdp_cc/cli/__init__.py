"""The command line, ``yafsdp-cc``. Each command's module is imported only when it runs, so help comes at once."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import NamedTuple


class Command(NamedTuple):
    """Where a command's ``main(argv) -> exit status`` lives, and its line in the help."""

    module: str
    summary: str


COMMANDS = {
    "launch": Command("yafsdp_cc.cli.launch", "run a training script on several ranks, with torchrun's own flags"),
    "convert": Command("yafsdp_cc.cli.convert", "write a checkpoint's model as safetensors"),
    "demo": Command("yafsdp_cc.cli.demo", "train a small language model on two ranks of this machine"),
    "bench": Command("yafsdp_cc.cli.bench", "measure training over a slow network, beside torch's own engines"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see yafsdp-cc --help"
        print(f"yafsdp-cc: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[name].module).main(rest))
    except KeyboardInterrupt:
        return 130


def _help() -> str:
    commands = "\n".join(f"  {name:<8} {command.summary}" for name, command in COMMANDS.items())
    return f"usage: yafsdp-cc COMMAND ...\n\n{commands}\n\nyafsdp-cc COMMAND --help shows more."
