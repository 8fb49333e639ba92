"""``yafsdp-cc launch [torchrun's own flags] script.py ...``: torchrun, with failures one can read.

Every rank runs the script through ``runner``, which keeps its traceback in a file instead of printing it. When a rank
fails, the launcher prints the one that failed first, whole and last. Ctrl-C ends every rank, in silence.
"""

from __future__ import annotations

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


def main(argv: list[str]) -> int:
    """Run the script on all ranks of this node; return its exit status."""
    parser = torchrun.get_args_parser()
    parser.prog = "yafsdp-cc launch"
    parser.description = "Runs a training script on several ranks. The flags are torchrun's own."
    options = parser.parse_args(argv)
    # Report once, here, what every rank would report by a traceback.
    if not (options.module or options.no_python) and not Path(options.training_script).is_file():
        parser.error(f"no such script: {options.training_script}")
    try:
        ranks = torchrun.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        parser.error(f"--nproc-per-node: {error}")
    # Each rank has its share of the cores. (torchrun gives one thread to each, and warns.)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // max(1, ranks))))
    if "LOGLEVEL" not in os.environ:
        for name in REPEATED_BY_US:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if not (options.no_python or options.run_path):
        form = ["-m"] if options.module else []
        options.training_script_args = [*form, options.training_script, *options.training_script_args]
        options.training_script, options.module = "yafsdp_cc.cli.runner", True
    with tempfile.TemporaryDirectory(prefix="yafsdp-cc-") as folder:
        options.log_dir = options.log_dir or folder  # torchrun would leave one in /tmp at every start
        try:
            torchrun.run(options)
        except ChildFailedError as failed:
            return _report(failed)
        except SignalException as stopped:
            return 128 + stopped.sigval
    return 0


class Failure(NamedTuple):
    """How a rank ended; what it has not written itself (killed, or not run by our runner) has no time or traceback."""

    time_ns: int
    rank: int
    exit_code: int
    summary: str
    traceback: str


def _report(failed: ChildFailedError) -> int:
    """Print how the job failed, the first failing rank's traceback last; return the exit status to leave with."""
    first, *later = _in_order(failed)
    for failure in later:
        print(f"yafsdp-cc: rank {failure.rank} failed after it: {failure.summary}", file=sys.stderr)
    print(f"yafsdp-cc: rank {first.rank} failed first: {first.summary}", file=sys.stderr)
    if first.traceback:
        print(f"\n{first.traceback}", file=sys.stderr)
    return first.exit_code if first.exit_code > 0 else 128 - first.exit_code


def _in_order(failed: ChildFailedError) -> list[Failure]:
    """Return this node's failures, the first one first. (torch goes by whole seconds, and forgets who wrote why.)"""
    written = [Path(failure.error_file) for failure in failed.failures.values() if failure.error_file]
    wrote = []
    for file in {file for path in written for file in path.parent.parent.glob("*/error.json")}:  # of all ranks
        message = json.loads(file.read_text())["message"]
        extra = message["extraInfo"] if isinstance(message, dict) else {}
        if "time_ns" in extra:
            summary = message["message"].partition("\n")[0]
            story = extra["py_callstack"]
            wrote.append(Failure(int(extra["time_ns"]), extra["rank"], extra["exit_code"], summary, story))
    known = {failure.rank for failure in wrote}
    silent = []
    for rank, failure in failed.failures.items():
        if rank not in known:
            code = failure.exitcode
            memory = " (the system may be out of memory)" if code == -signal.SIGKILL else ""
            summary = f"exit status {code}" if code >= 0 else f"killed by signal {-code}{memory}"
            silent.append(Failure(0, rank, code, summary, ""))
    # Whoever was killed wrote nothing, and the others then lost their connection to it. But SIGTERM is how the launcher
    # itself ends the ranks that still run.
    killed = [failure for failure in silent if failure.exit_code < 0 and failure.exit_code != -signal.SIGTERM]
    left = [failure for failure in silent if failure.exit_code > 0]
    return [*killed, *sorted(wrote), *left] or silent
