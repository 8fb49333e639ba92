"""Any command as the ranks of a lab: started in their namespaces with what torchrun would set, output passed on."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from yafsdp_cc.netlab.environment import variables
from yafsdp_cc.netlab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yafsdp_cc.netlab.keeper import Keeper


class Programs:
    """The same command on every rank."""

    def __init__(self, keeper: Keeper, timeout: float, command: Sequence[str]) -> None:
        self._keeper = keeper
        self._timeout = timeout
        self._command = command
        links = keeper.links
        self._processes = [
            subprocess.Popen(
                [*links.inside(links.rank(rank)), *command],
                env={**os.environ, **variables(links, rank)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the lab, which then ends its ranks
            )
            for rank in range(len(links.descriptors))
        ]

    def finish(self) -> None:
        """Wait for all to succeed; raises what went wrong first."""
        deadline = time.monotonic() + self._timeout
        running = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes)}
        try:
            while running:
                ready = wait([self._keeper.word, *running], timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise LabError(f"ranks {sorted(running.values())} did not finish within {self._timeout:g} s")
                self._keeper.check()
                for descriptor in [one for one in running if one in ready]:
                    self._check(running[descriptor])
                    del running[descriptor]
                    os.close(descriptor)
        finally:
            for descriptor in running:
                os.close(descriptor)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _check(self, rank: int) -> None:
        status = self._processes[rank].wait()
        if status != 0:
            how = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
            raise LabError(f"rank {rank}: {how}: {shlex.join(self._command)}")
