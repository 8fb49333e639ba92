"""What ``yafsdp-cc launch`` runs in every rank: ``python -m yafsdp_cc.cli.runner [-m] script_or_module args...``.

It behaves as ``python script_or_module`` does, but for three ends. An exception goes whole into torchelastic's error
file, for the launcher to print. Ctrl-C leaves in silence with status 130. And no rank outlives its launcher.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
OUR_FRAMES = {__file__, runpy.__file__, "<frozen runpy>"}
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the program named on the command line as ``__main__``."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, _interrupt_once)
    try:
        _run_and_record(sys.argv[1:])
    except KeyboardInterrupt:
        _leave_quietly()


def _run_and_record(argv: list[str]) -> None:
    try:
        _run(argv)
        # A gloo group left open at the interpreter's shutdown aborts the process about every other time.
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit as leave:
        if leave.code not in (None, 0):
            _record(leave, "", leave.code if isinstance(leave.code, int) else 1)
        raise
    except Exception as error:
        # Another rank that left on Ctrl-C takes its connections with it: what breaks here is then no failure.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            _leave_quietly()
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in OUR_FRAMES:
            frames = frames.tb_next  # the traceback is told from the user's first frame on
        _record(error, "".join(traceback.format_exception(type(error), error, frames)), 1)
        sys.exit(1)


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))  # as ``python script.py`` has it
    runpy.run_path(argv[0], run_name="__main__")


def _record(error: BaseException, story: str, exit_code: int) -> None:
    """Write the error file in torch's format, with what distinguishes the first failure from its consequences."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # Only the last attempt's error files reach the launcher.
    last_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    if path is None or not last_attempt:
        print(story, end="", file=sys.stderr)
    if path is None:
        return
    now = time.time_ns()
    extra = {
        "py_callstack": story,
        "timestamp": str(now // 1_000_000_000),
        "time_ns": now,
        "rank": int(os.environ.get("RANK", "0")),
        "exit_code": exit_code,
    }
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    # Whole or not at all: the launcher ends ranks at any moment, and torch cannot read half a file.
    with open(f"{path}.part", "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    os.replace(f"{path}.part", path)


def _interrupt_once(_signal: int, _frame: FrameType | None) -> None:
    """Ctrl-C, once: the terminal and the launcher may both send it, and the second would break the way out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _leave_quietly() -> NoReturn:
    """End without the interpreter's shutdown, which would wait for, or complain of, collectives cut in the middle."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
