"""``yafsdp-cc config``: write a run file, show its settings, or check them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from yafsdp_cc.config import Setting, Settings, known, read, schema, to_environment, to_yaml
from yafsdp_cc.table import table


def main(argv: list[str]) -> int:
    """Do what the arguments of ``yafsdp-cc config`` ask; return 0, or print what is wrong to stderr and return 1."""
    asked = _parser().parse_args(argv)
    try:
        if asked.form == "schema":
            print(json.dumps(schema(), indent=2))
        elif asked.form == "show":
            settings = _with_torchrun(read(asked.file, asked.set))
            if any(name.startswith("compression.") and name != "compression.gradients" for name in settings):
                # check that settings of the compression do not exclude each other, for which torch is imported
                from yafsdp_cc.compression.config import compression_of_run

                compression_of_run(settings)
            print(to_environment(settings) if asked.json else _table(settings))
        elif asked.default:
            print(to_yaml({}), end="")
        else:
            gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
            with open(asked.out, "x", encoding="utf-8") as file:
                file.write(to_yaml({"launch.nproc_per_node": gpus or 2}))
            print(f"{asked.out} is written: edit it; yafsdp-cc launch --config {asked.out} script.py takes it")
    except BrokenPipeError:
        raise
    except FileExistsError:
        print(f"{asked.out} is there already: name another, --out=FILE, or remove it", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    about = "Writes every setting as YAML, with what it does, for yafsdp-cc launch --config FILE script.py."
    parser = argparse.ArgumentParser(prog="yafsdp-cc config", description=about, allow_abbrev=False)
    parser.add_argument("--out", default="run.yaml", metavar="FILE", help="where to write (%(default)s)")
    parser.add_argument("--default", action="store_true", help="print it instead, all of it commented out")
    forms = parser.add_subparsers(dest="form", title="other forms", metavar="FORM")
    show = forms.add_parser("show", help="check a run file, and print its settings and where each is from")
    show.add_argument("file", nargs="?", help="a run file (the one that YAFSDP_CC_CONFIG names)")
    show.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="as of yafsdp-cc launch")
    value = "print what YAFSDP_CC_RUN takes instead, for ranks that another launcher starts"
    show.add_argument("--json", action="store_true", help=value)
    forms.add_parser("schema", help="print the JSON schema of run files, for editors")
    return parser


def _with_torchrun(settings: Settings) -> Settings:
    """Add settings from torchrun's environment variables (``PET_...``), which only ``--set`` overrules."""
    variables = {name: f"PET_{name.partition('.')[2].upper()}" for name in known() if name.startswith("launch.")}
    from_torchrun = {
        name: Setting(os.environ[variable], variable)
        for name, variable in variables.items()
        if variable in os.environ and (name not in settings or settings[name].source != "--set")
    }
    return {**settings, **from_torchrun}


def _table(settings: Settings) -> str:
    rows = []
    for name, one in known().items():
        value, source = settings.get(name, (one.get("default", {}), "default"))
        rows.append((name, json.dumps(value), source))
    return table(*rows, left=3)
