"""``yafsdp-cc config``: ask for the settings of a run, show them, or check them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ASKED = (
    ("launch.nproc_per_node", "Ranks on each machine"),
    ("launch.nnodes", "Machines"),
    ("launch.master_addr", "Machine 0"),
    ("launch.master_port", "Port on machine 0"),
    ("precision.param", "Precision of the computation"),
    ("shard.zero_stage", "ZeRO stage"),
    ("shard.replicate", "Replicas of the sharded model"),
    ("compression.gradients", "Compression of gradients; fp32 for none"),
    ("launch.log_dir", "Folder for logs"),
)
"""Settings that are asked for, in order; the schema has the description of each."""


def main(argv: list[str]) -> int:
    """Run one of the forms; return 0, or 1 with everything that is wrong on stderr."""
    parser = _parser()
    asked = parser.parse_args(argv)

    # only after the flags are checked: it takes seconds
    from yafsdp_cc.config import RunFileError, read, schema, to_environment, to_yaml

    try:
        if asked.form == "schema":
            print(json.dumps(schema(), indent=2))
        elif asked.form == "show":
            settings = _with_torchrun(read(asked.file, asked.set))
            print(to_environment(settings) if asked.json else _table(settings))
        elif asked.default:
            print(to_yaml({}), end="")
        else:
            if Path(asked.out).exists():
                raise FileExistsError(f"{asked.out} is there already: name another, --out=FILE, or remove it")
            text = to_yaml(_answers())
            with open(asked.out, "x", encoding="utf-8") as file:
                file.write(text)
            print(f"{asked.out} is written; yafsdp-cc launch --config {asked.out} script.py takes it")
    except BrokenPipeError:
        raise
    except (RunFileError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except EOFError:
        print("\nno more answers: nothing is written; --default prints a file without asking", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    about = "Asks for the settings that matter and writes them as YAML, for yafsdp-cc launch --config FILE script.py."
    parser = argparse.ArgumentParser(prog="yafsdp-cc config", description=about, allow_abbrev=False)
    parser.add_argument("--out", default="run.yaml", metavar="FILE", help="where to write (%(default)s)")
    parser.add_argument("--default", action="store_true", help="print all settings with their defaults instead")
    forms = parser.add_subparsers(dest="form", title="other forms", metavar="FORM")
    show = forms.add_parser("show", help="check a run file, and print its settings and where each is from")
    show.add_argument("file", nargs="?", help="a run file (the one that YAFSDP_CC_CONFIG names)")
    show.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="as of yafsdp-cc launch")
    value = "print what YAFSDP_CC_RUN takes instead, for ranks that another launcher starts"
    show.add_argument("--json", action="store_true", help=value)
    forms.add_parser("schema", help="print the JSON schema of run files, for editors")
    return parser


def _with_torchrun(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add settings that torchrun's own variables make, with a precedence just below ``--set``."""
    from yafsdp_cc.config import Setting, known

    variables = {name: f"PET_{name.partition('.')[2].upper()}" for name in known() if name.startswith("launch.")}
    from_torchrun = {
        name: Setting(os.environ[variable], variable)
        for name, variable in variables.items()
        if variable in os.environ and (name not in settings or settings[name].source != "--set")
    }
    return {**settings, **from_torchrun}


def _table(settings: Mapping[str, Any]) -> str:
    from yafsdp_cc.config import known

    rows = []
    for name, one in known().items():
        value, source = settings.get(name, (one.get("default", {}), "default"))
        rows.append((name, json.dumps(value), source))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)


# Questions ------------------------------------------------------------------------------------------------------------


def _answers() -> dict[str, Any]:
    """Ask for settings until each answer is valid; return those that are not defaults."""
    import yaml

    from yafsdp_cc.config import allowed, known, mistake_in, summary

    defaults = {name: known()[name].get("default") for name, _ in ASKED}
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    proposed = {**defaults, "launch.nproc_per_node": gpus or 2}
    answers: dict[str, Any] = {}
    for name, question in ASKED:
        if name.startswith("launch.master") and "launch.nnodes" not in answers:
            continue
        one = known()[name]
        print(f"\n{question}: {allowed(one)}.\n  {summary(one)}")
        while True:
            text = input(f"{name} [{'null' if proposed[name] is None else proposed[name]}]: ").strip()
            try:
                value = yaml.safe_load(text) if text else proposed[name]
            except yaml.YAMLError:
                value = text
            wrong = mistake_in(name, value)
            if not wrong:
                break
            print(wrong)
        if value != defaults[name]:
            answers[name] = value
    return answers
