"""``yafsdp-cc launch [torchrun's own flags] script.py ...``: torchrun, with failures one can read.

Every rank runs the script through ``runner``, which keeps its traceback in a file instead of printing it. When a rank
fails, the launcher prints the one that failed first, whole and last. Ctrl-C ends every rank, in silence.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# What these two warn of (signals passed on, which process failed) this launcher reports once, at the end.
REPEATED_BY_US = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")


class Failure(NamedTuple):
    """How a rank ended; ``traceback`` is empty when it left no word (killed, or not run by our runner)."""

    rank: int
    exit_code: int
    summary: str
    traceback: str


def main(argv: list[str]) -> int:
    """Run the script on all ranks of this node; its exit status."""
    parser = torchrun.get_args_parser()
    parser.prog = "yafsdp-cc launch"
    parser.description = "Runs a training script on several ranks. The flags are torchrun's own."
    options = parser.parse_args(argv)
    _check(options, parser)
    _share_cores(options)
    if "LOGLEVEL" not in os.environ:
        for name in REPEATED_BY_US:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if not (options.no_python or options.run_path):
        _through_the_runner(options)
    with tempfile.TemporaryDirectory(prefix="yafsdp-cc-") as folder:
        options.log_dir = options.log_dir or folder  # torchrun would leave one in /tmp at every start
        try:
            torchrun.run(options)
        except ChildFailedError as failed:
            return _report(failed)
        except SignalException as stopped:
            return 128 + stopped.sigval
    return 0


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Report once, here, what every rank would report by a traceback."""
    if not (options.module or options.no_python) and not Path(options.training_script).is_file():
        parser.error(f"no such script: {options.training_script}")
    try:
        torchrun.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        parser.error(f"--nproc-per-node: {error}")


def _share_cores(options: argparse.Namespace) -> None:
    """Give each rank its share of the cores. (torchrun gives one thread to each, and warns.)"""
    ranks = torchrun.determine_local_world_size(options.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // max(1, ranks))))


def _through_the_runner(options: argparse.Namespace) -> None:
    form = ["-m"] if options.module else []
    options.training_script_args = [*form, options.training_script, *options.training_script_args]
    options.training_script, options.module = "yafsdp_cc.cli.runner", True


def _report(failed: ChildFailedError) -> int:
    """Print how the job failed, the first failing rank's traceback last; the exit status to leave with."""
    first, *later = _in_order(failed)
    for failure in later:
        print(f"yafsdp-cc: rank {failure.rank} failed after it: {failure.summary}", file=sys.stderr)
    print(f"yafsdp-cc: rank {first.rank} failed first: {first.summary}", file=sys.stderr)
    if first.traceback:
        print(f"\n{first.traceback}", file=sys.stderr)
    return first.exit_code if first.exit_code > 0 else 128 - first.exit_code


def _in_order(failed: ChildFailedError) -> list[Failure]:
    """This node's failures, the first one first. (torch goes by whole seconds, and forgets who wrote why.)"""
    wrote = [failure for _, failure in sorted(_written(failed))]
    silent = [
        Failure(rank, failure.exitcode, _of_the_dead(failure.exitcode), "")
        for rank, failure in failed.failures.items()
        if rank not in {failure.rank for failure in wrote}
    ]
    # Whoever was killed wrote nothing, and the others then lost their connection to it. But SIGTERM is how the launcher
    # itself ends the ranks that still run.
    ended = [failure for failure in silent if failure.exit_code == -signal.SIGTERM]
    killed = [failure for failure in silent if failure.exit_code < 0 and failure not in ended]
    left = [failure for failure in silent if failure.exit_code > 0]
    return [*killed, *wrote, *left] or ended


def _written(failed: ChildFailedError) -> list[tuple[int, Failure]]:
    """What the ranks' runners wrote, each with its time. All error files of an attempt lie side by side."""
    files = {
        file
        for failure in failed.failures.values()
        if failure.error_file
        for file in Path(failure.error_file).parent.parent.glob("*/error.json")
    }
    found = []
    for file in files:
        message = json.loads(file.read_text())["message"]
        extra = message["extraInfo"] if isinstance(message, dict) else {}
        if "time_ns" in extra:
            summary = message["message"].partition("\n")[0]
            found.append(
                (int(extra["time_ns"]), Failure(extra["rank"], extra["exit_code"], summary, extra["py_callstack"]))
            )
    return found


def _of_the_dead(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit status {exit_code}"
    memory = " (the system may be out of memory)" if exit_code == -9 else ""
    return f"killed by signal {-exit_code}{memory}"
