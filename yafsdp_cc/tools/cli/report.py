"""``yafsdp-cc report``: traces and runs as tables."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from yafsdp_cc.table import table
from yafsdp_cc.tools.report import tables
from yafsdp_cc.tools.report.overlap import measure
from yafsdp_cc.tools.report.trace import Trace, UnreadableError, read

ABOUT = """\
A run is a folder with the metrics.jsonl that yafsdp_cc.Metrics writes, or that file; several are compared.
A trace is what yafsdp-cc profile or torch.profiler has written (.json, .json.gz), or a report of Nsight Systems
(.nsys-rep, .sqlite): its communication, what of it was exposed, by unit, and what it slowed down. A folder stands for
everything of these in it."""
TRACES = (".json", ".json.gz", ".sqlite", ".nsys-rep")


def main(argv: list[str]) -> int:
    """Print the tables of runs and traces; return 1 if a file cannot be read."""
    parser = argparse.ArgumentParser(prog="yafsdp-cc report", description=ABOUT)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders of runs or traces, or files")
    asked = parser.parse_args(argv)
    try:
        files = list({file.resolve(): file for path in asked.paths for file in _files(path)}.values())
        runs = [tables.read_run(file) for file in files if file.suffix == ".jsonl"]
        traces = [measure(each) for each in _traces(files, asked.paths)]
    except (UnreadableError, OSError) as error:
        print(f"yafsdp-cc report: {error}", file=sys.stderr)
        return 1
    for run in runs:
        for line in run.cut_off:
            print(f"{run.name}: line {line} is left out: the run was ended while it wrote it", file=sys.stderr)
    verdict = tables.run_verdict(runs) if runs else []
    for found in traces:
        name = f"{found.trace.title}: " if len(traces) > 1 else ""
        verdict += [f"{name}{line}" for line in tables.trace_verdict(found)]
    if verdict:
        print(*verdict, "", sep="\n")
    if runs:
        print(table(*tables.run_table(runs)))
    for found in traces:
        trace = found.trace
        milliseconds = (trace.end - trace.start) / trace.steps / 1e3
        print(f"\n{trace.title}, {trace.steps} step{'s' * (trace.steps > 1)} of {milliseconds:,.2f} ms")
        for title, rows in tables.trace_tables(found).items():
            print(f"\n{title}\n{table(*rows)}")
    return 0


def _files(path: Path) -> list[Path]:
    """Return the files of runs and traces in a folder, or the file at ``path``."""
    if not path.is_dir():
        return [path]
    found = [each for each in sorted(path.iterdir()) if each.name == "metrics.jsonl" or each.name.endswith(TRACES)]
    exported = {each.with_suffix("") for each in found if each.suffix == ".sqlite"}
    found = [each for each in found if each.suffix != ".nsys-rep" or each.with_suffix("") not in exported]
    if not found:
        runs = ", ".join(str(each.parent) for each in sorted(path.glob("*/metrics.jsonl")))
        hint = f"; name one of those in it: {runs}" if runs else ""
        raise UnreadableError(f"{path}: no metrics.jsonl and no trace in this folder{hint}")
    return found


def _traces(files: list[Path], named: list[Path]) -> list[Trace]:
    """Read the traces of ``files``; skip JSON files of other kinds beside a run or a trace, unless ``named``."""
    traces, others = list[Trace](), dict[Path, UnreadableError]()
    for path in files:
        try:
            traces += [read(_exported(path))] if path.suffix != ".jsonl" else []
        except UnreadableError as error:
            if path in named or path.suffix != ".json":
                raise
            others[path] = error
    shown = {each.parent for each in files if each not in others}
    for path, reason in others.items():
        if path.parent not in shown:
            raise reason
        print(f"yafsdp-cc report: left out: {reason}", file=sys.stderr)
    return traces


def _exported(path: Path) -> Path:
    """Return the path of a readable trace; a ``.nsys-rep`` of Nsight Systems is first exported by its own tool."""
    if path.suffix != ".nsys-rep":
        return path
    database = path.with_suffix(".sqlite")
    command = ["nsys", "export", "--type", "sqlite", "--force-overwrite", "true", "--output", str(database), str(path)]
    if shutil.which("nsys") is None:
        raise UnreadableError(f"{path}: nsys is not on PATH; on a machine that has nsys, run {' '.join(command)}")
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
        raise UnreadableError(f"{path}: nsys could not export it")
    return database
