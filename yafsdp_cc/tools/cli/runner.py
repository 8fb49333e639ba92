"""The program that ``yafsdp-cc launch`` runs in every rank: ``python -m yafsdp_cc.tools.cli.runner [-m]
script_or_module args...``.

The runner acts as ``python script_or_module``, with three differences. An exception is written whole to torchelastic's
error file, for the launcher to print. Ctrl-C exits silently with status 130. And no rank outlives its launcher.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import json
import os
import pickle
import re
import runpy
import signal
import stat
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

from yafsdp_cc.tools.netlab import namespaces
from yafsdp_cc.tools.netlab.links import VARIABLE, Links

INTERRUPTED = 130
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which batch systems announce that a job will end, for the script to save what it has."""
OUR_FRAMES = {__file__, runpy.__file__, "<frozen runpy>"}


def main() -> None:
    """Run the program named on the command line as ``__main__``."""
    if "YAFSDP_CC_JOIN" in os.environ:
        _join_lab()
    namespaces.die_with(os.getppid())
    signal.signal(signal.SIGINT, _interrupt_once)
    if "YAFSDP_CC_LOG" in os.environ:
        with suppress(OSError):  # the script of another rank may have removed the logs
            log = open(os.environ["YAFSDP_CC_LOG"], "a")  # noqa: SIM115 (stays open until this process ends)
            # log where this rank is when the launcher ends it after a failure: Python's own handler may never run
            faulthandler.register(signal.SIGTERM, file=log, chain=True)
    try:
        _run_and_record(sys.argv[1:])
    except KeyboardInterrupt:
        _leave_quietly()


def _join_lab() -> None:
    """Enter this rank's network namespace of the launcher's ``Lab``, before torch starts threads."""
    os.environ[VARIABLE] = os.environ.pop("YAFSDP_CC_JOIN")
    links, rank = Links.here(), int(os.environ["RANK"])
    namespaces.enter(links.of_rank(rank), links.user)
    # make ranks serve their own store: the launcher's is on a loopback interface, which the lab does not reach
    os.environ.update(links.variables(rank), TORCHELASTIC_USE_AGENT_STORE="False")


def _run_and_record(argv: list[str]) -> None:
    # register first, as atexit then runs these last: the script's exit functions may use process groups, and write.
    atexit.register(_flush_files)
    atexit.register(_end_process_groups, os.getpid())
    try:
        _run(argv)
        _warn_of_unused_settings()
    except SystemExit as leave:
        status = leave.code & 0xFF if isinstance(leave.code, int) else int(leave.code is not None)
        if status:
            _record(leave, "", status)
        raise
    except Exception as error:
        # after Ctrl-C an error is no failure: ranks that have left have closed their connections to this one
        if _interrupts:
            _leave_quietly()
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in OUR_FRAMES:
            frames = frames.tb_next  # begin the traceback at the user's code
        _record(error, "".join(traceback.format_exception(type(error), error, frames)), 1)
        sys.exit(1)


def _end_process_groups(rank: int) -> None:
    """End process groups: a gloo group open at the interpreter's exit aborts the process about every other time.

    Args:
        rank: id of the rank's process; in a process that the script has forked, the groups have no threads.
    """
    dist = sys.modules.get("torch.distributed")
    if os.getpid() == rank and dist is not None and dist.is_initialized():
        dist.destroy_process_group()


def _warn_of_unused_settings() -> None:
    """Warn if the script has not asked for the run's settings: training may have gone on unsharded."""
    config = sys.modules.get("yafsdp_cc.config")
    if os.environ.get("YAFSDP_CC_RUN", "{}") == "{}" or (config is not None and config.parsed.cache_info().currsize):
        return
    if os.environ.get("RANK", "0") == "0":
        names = ", ".join(json.loads(os.environ["YAFSDP_CC_RUN"]))
        told = f"the script has called neither shard, fully_shard nor compress, so nothing was done with {names}"
        print(f"yafsdp-cc: {told}", file=sys.stderr)


def _run(argv: list[str]) -> None:
    if wanted := os.environ.pop("YAFSDP_CC_PROFILE", ""):
        from yafsdp_cc.tools.cli.capture import capture

        capture(wanted)
    with ExitStack() as watches:
        if wanted := os.environ.pop("YAFSDP_CC_TRY", ""):
            from yafsdp_cc.tools.trial import on_trial

            watches.enter_context(on_trial(wanted))
        _run_program(argv)


class _ScriptMain(ModuleType):
    """The module ``__mp_main__``, in which processes that a script starts look up what the script defines.

    ``multiprocessing``, when imported, makes ``__mp_main__`` another name of ``__main__``. If it was imported before
    the script began, that ``__main__`` is not the script's.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)


def _run_program(argv: list[str]) -> None:
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = _ScriptMain("__mp_main__")
    run = partial(runpy.run_path, argv[0])
    if argv[0] == "-m":
        argv = argv[1:]
        run = partial(runpy.run_module, argv[0], alter_sys=True)
        first = os.getcwd()
    else:
        first = argv[0] if os.path.isdir(argv[0]) else os.path.dirname(os.path.realpath(argv[0]))
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first  # as Python sets ``sys.path[0]`` for a module, a script or a folder
    sys.argv = argv
    try:
        _names.update(run(run_name="__main__"))
    finally:
        _flush_files()


_names: dict[str, Any] = {}
"""Global names of the script, whose objects live to the end of the process, as those of ``python script.py`` do."""


def _flush_files() -> None:
    """Write the buffers of files that the script has left open.

    ``python script.py`` does so at its end. A forked rank would not, and the garbage collector, when it frees what
    ``runpy`` has returned, may close a file's byte buffer before the text above it is in that buffer.
    """
    for each in gc.get_objects():
        if issubclass(type(each), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with suppress(Exception):  # a closed file, a full disk, a class of the script's
                if stat.S_ISREG(os.fstat(each.fileno()).st_mode):  # a flush of a pipe that nobody reads would block
                    each.flush()


def drop_names() -> None:
    """Free the script's objects, as the interpreter does at its end, which closes compressed files, for instance."""
    functions = [each for each in _names.values() if isinstance(each, FunctionType)]
    for names in (_names, *(each.__globals__ for each in functions if each.__module__ == "__main__")):
        names.clear()
    gc.collect()


def _record(error: BaseException, story: str, exit_code: int) -> None:
    """Write the error file in torch's format, with a time that tells the first failure from its consequences."""
    faulthandler.unregister(signal.SIGTERM)
    atexit.unregister(_end_process_groups)  # ending groups could wait for collectives that others never issue
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        print(story, end="", file=sys.stderr)
        return
    if re.search(r"tim(ed|e)[- ]?out", story, re.IGNORECASE):
        _dump_collectives()
    now = time.time_ns()
    extra = {
        "py_callstack": story,
        "timestamp": str(now // 1_000_000_000),
        "time_ns": now,
        "rank": int(os.environ.get("RANK", "0")),
        "exit_code": exit_code,
    }
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    # write the error file atomically: the launcher may end this rank meanwhile, and torch cannot read half a file
    with open(f"{path}.part", "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    os.replace(f"{path}.part", path)


def _dump_collectives() -> None:
    """Write the flight recorder's trace of gloo collectives; for NCCL torch writes it by itself."""
    dist, prefix = sys.modules.get("torch.distributed"), os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    if dist is None or prefix is None or not dist.is_initialized() or "nccl" in str(dist.get_backend_config()):
        return
    trace = getattr(sys.modules["torch._C._distributed_c10d"], "_dump_fr_trace", None)  # private in torch: may be gone
    if trace is not None:
        with suppress(Exception):  # the failure is then reported without this trace
            recorded = pickle.loads(trace())
            groups = {pg.group_name: [*ranks] for pg, ranks in dist.distributed_c10d._world.pg_group_ranks.items()}
            # torchfrtrace looks groups up in ``pg_config``, in which torch describes those of NCCL alone
            recorded["pg_config"] = {
                name: {"name": name, "desc": about, "ranks": str(groups.get(name, []))}
                for name, about in {each["process_group"] for each in recorded["entries"]}
            }
            Path(f"{prefix}{os.environ.get('RANK', '0')}").write_bytes(pickle.dumps(recorded))


_interrupts: list[int] = []
"""Signals that ``_interrupt_once`` has handled so far. An ignored SIGINT proves no Ctrl-C: a script may ignore it."""


def _interrupt_once(number: int, _frame: FrameType | None) -> None:
    """Handle the first Ctrl-C only: terminal and launcher may both send one, and a second would break the exit."""
    _interrupts.append(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _leave_quietly() -> NoReturn:
    """Exit without the interpreter's shutdown, which would wait for interrupted collectives, or complain of them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
