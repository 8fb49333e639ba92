"""Delay and loss: a program of ours between the ranks' ports, compiled when a lab first needs it.

The kernel's own way, netem, is missing from many kernels, and a lab should be the same on all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from yafsdp_cc.netlab.errors import Unavailable
from yafsdp_cc.netlab.interfaces import port

SOURCE = Path(__file__).with_name("relay.c")


class Relay:
    """The running relay, in the namespace of the ports; it ends with the process that made it."""

    def __init__(self, folder: str, ranks: int, delay_ms: float, loss: float) -> None:
        command = [_compiled(folder), str(delay_ms * 1000), str(loss), *(port(rank) for rank in range(ranks))]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        except OSError as error:
            raise Unavailable(f"the relay cannot run from {folder} ({error}): set TMPDIR to another folder") from None
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise Unavailable(f"the relay could not start: {self._process.communicate()[1].strip()}")
        self.descriptor = os.pidfd_open(self._process.pid)
        """Readable when it has ended."""

    def status(self) -> str:
        """How it ended: once ``descriptor`` is readable."""
        return f"{self._process.wait()}"


def _compiled(folder: str) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unavailable("delay and loss need a C compiler: apt-get install gcc libc6-dev")
    program = f"{folder}/relay"
    done = subprocess.run([compiler, "-O2", "-o", program, str(SOURCE)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{compiler} could not compile {SOURCE.name}: {' '.join(done.stderr.split())[:300]}")
    return program
