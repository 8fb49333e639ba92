"""``yafsdp-cc launch [torchrun's own flags] script.py ...``: a training script on several ranks, with a run file.

This module settles the options: flags, environment, run file, in this order. ``elastic`` runs the ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from yafsdp_cc.config import RUN, SET, Settings, mistake_in, read, to_environment

# torch's loggers that warn of passed-on signals and failed processes, which the launcher reports at the end
REPEATED_BY_US = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")
SLURM = ("SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")
USAGE = "yafsdp-cc launch [--config FILE] [--set NAME=VALUE] [--name NAME] [torchrun's flags] script.py ..."
ABOUT = """\
Runs a training script on several ranks. Flags before the script are torchrun's own, all of them (torchrun --help), and
these. Rank 0 is shown; the output of every rank is in runs/NAME/logs/rank-N.log, attempt after attempt. When a rank
fails, its last lines and its traceback come last. Under srun with one task per machine, machines find each other."""


def _own_flags() -> argparse.ArgumentParser:
    ours = argparse.ArgumentParser("yafsdp-cc launch", USAGE, ABOUT, add_help=False)
    ours.add_argument("-c", "--config", metavar="FILE", help="settings of the run; yafsdp-cc config writes one")
    setting = "one of its settings, such as shard.zero_stage=2; as often as needed"
    ours.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help=setting)
    ours.add_argument("--name", help="of the run, and so of its folder (that of the script)")
    rate = "of the links between the ranks, 100mbit: each is put in a network namespace of its own"
    ours.add_argument("--bandwidth", metavar="RATE", help=rate)
    return ours


def all_flags() -> argparse.ArgumentParser:
    """Return the parser of this command's own flags and torchrun's."""
    from torch.distributed import run as torchrun  # not for ``--help``: importing torch takes seconds

    parents = [ours := _own_flags(), torchrun.get_args_parser()]
    # with abbreviations, argparse refuses a script's own ``--r 8``, which may stand for several of torchrun's flags
    whole: dict[str, Any] = {"conflict_handler": "resolve", "allow_abbrev": False}
    return argparse.ArgumentParser(ours.prog, USAGE, ABOUT, parents=parents, **whole)


def main(argv: list[str]) -> int:
    """Run the script on all ranks of this node; return its exit status."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_own_flags().format_help())
        return 0

    from torch.distributed import run as torchrun

    from yafsdp_cc.tools.cli import elastic, forks

    parser = all_flags()
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # torch before 2.13 defaults to port 29500, as if the user had named it
    options = _by_precedence(parser, argv, _settings(parser, parser.parse_args(argv)))
    forks.install(is_forking=options.start_method != "spawn")
    ranks = _check(parser, options, torchrun.determine_local_world_size)
    # divide the cores among the ranks; torchrun gives each rank one thread, and warns
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    if "LOGLEVEL" not in os.environ:
        for name in REPEATED_BY_US:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    script = options.training_script
    named_by = script.rpartition(".")[2] if options.module else Path(os.path.abspath(script)).stem
    options.name = name = options.name or named_by
    folder = Path(options.log_dir or Path("runs", name, "logs"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"no folder for logs can be made, {error}: name another, --log-dir=DIR")
    title = " ".join([options.training_script, *options.training_script_args])
    options.run_path = False  # drop torchrun's --run-path: the runner runs every script by runpy anyway
    if not options.no_python:
        form = ["-m"] if options.module else []
        options.training_script_args = [*form, options.training_script, *options.training_script_args]
        options.training_script, options.module = "yafsdp_cc.tools.cli.runner", True
    if options.bandwidth is None:
        return elastic.run(options, parser, folder, title)
    from yafsdp_cc.tools.netlab import Lab, Unavailable
    from yafsdp_cc.tools.netlab.links import VARIABLE

    if options.no_python or options.nnodes not in ("1", "1:1"):
        parser.error("--bandwidth is for a Python script on this machine alone")
    try:
        with Lab(ranks, options.bandwidth) as lab:
            os.environ["YAFSDP_CC_JOIN"] = lab.links.variables(0)[VARIABLE]
            return elastic.run(options, parser, folder, title)
    except ValueError as error:
        parser.error(f"--bandwidth: {error}")
    except Unavailable as reason:
        parser.exit(1, f"{parser.prog}: {reason}\n")


def _settings(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Settings:
    """Read the settings of run file, environment and command line; pass those of the engine on to the ranks."""
    from yafsdp_cc.compression.config import compression_of_run

    try:
        settings = read(given.config, given.set)
        # set ``RUN`` even without settings: ranks must not inherit the settings of an outer launcher
        os.environ[RUN] = to_environment(settings)
        compression_of_run()
    except ValueError as error:
        parser.exit(2, f"yafsdp-cc launch: nothing is started with these settings\n{error}\n")
    return settings


def _by_precedence(parser: argparse.ArgumentParser, argv: list[str], settings: Settings) -> argparse.Namespace:
    """Return torchrun's options, from the command line, else the environment, else the run file, else the defaults."""
    launch = {name.partition(".")[2]: one for name, one in settings.items() if name.startswith("launch.")}
    for option, one in launch.items():
        if one.source == "--set" or f"PET_{option.upper()}" not in os.environ:
            is_text = isinstance(parser.get_default(option), str) and one.value is not None
            parser.set_defaults(**{option: str(one.value) if is_text else one.value})
    options = parser.parse_args(argv)
    if options.standalone:  # --standalone means one machine, whatever the run file or the environment says of nnodes
        parser.set_defaults(nnodes="1:1")
        return parser.parse_args(argv)
    if options.rdzv_endpoint or options.rdzv_backend != "static":
        return options  # --rdzv-endpoint or --rdzv-backend already says how nodes meet
    for option, value in _from_slurm(parser).items():
        is_asked = option in launch and launch[option].source in (SET, "--set")
        if not is_asked and f"PET_{option.upper()}" not in os.environ:
            parser.set_defaults(**{option: value})
    return parser.parse_args(argv)


def _from_slurm(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return torchrun's options by which launchers that srun has started on several machines find each other."""
    nodes, tasks = (int(os.environ.get(f"SLURM_STEP_NUM_{what}", "1")) for what in ("NODES", "TASKS"))
    if tasks > nodes:
        parser.error(
            f"srun has started {tasks} of these launchers on {nodes} machines: start one on each, srun "
            "--ntasks-per-node=1, and name its ranks by --nproc-per-node"
        )
    if nodes == 1 or any(name not in os.environ for name in SLURM):
        return {}
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", os.environ["SLURM_STEP_NODELIST"])  # such as node[01-04,07],login
    job = int(os.environ["SLURM_JOB_ID"]) * 64 + int(os.environ["SLURM_STEP_ID"])
    return {
        "nnodes": str(nodes),
        "node_rank": int(os.environ["SLURM_NODEID"]),
        "master_addr": re.sub(r"\[(\d+)[^]]*\]", r"\1", first.group() if first else ""),
        "master_port": 20000 + job % 12000,  # below the ephemeral ports; Slurm's steps get different ports
    }


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, ranks_of: Callable[[str], int]) -> int:
    """Refuse, with one message, options on which every rank would fail; return the number of ranks on this node."""
    script = Path(options.training_script)
    if not (options.module or options.no_python or script.is_file() or (script / "__main__.py").is_file()):
        why = ", a folder without __main__.py" if script.is_dir() else ""
        parser.error(f"no such script: {options.training_script}{why}")
    try:
        ranks = ranks_of(options.nproc_per_node)
    except ValueError as error:
        parser.error(f"--nproc-per-node: {error}")
    if ranks < 1:
        parser.error(f"--nproc-per-node must be at least 1, got {ranks}")
    if options.monitor_interval <= 0:
        parser.error(f"--monitor-interval must be more than 0, got {options.monitor_interval}")
    for option in ("max_restarts", "nnodes", "name"):
        if wrong := mistake_in(f"launch.{option}", getattr(options, option)):
            parser.error(wrong.replace(f"launch.{option}", f"--{option.replace('_', '-')}"))
    least, _, most = options.nnodes.rpartition(":")
    if options.standalone and int(least or most) > 1:
        parser.error(f"--standalone is for this machine alone: leave it out, or --nnodes={options.nnodes}")
    if options.rdzv_backend == "static" and not options.standalone and not 0 <= options.node_rank < int(most):
        parser.error(f"--node-rank counts from 0: {options.node_rank} is none of the --nnodes={options.nnodes}")
    return ranks
