"""Records some optimizer steps of this process, whatever its script does, for ``yafsdp-cc profile``."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from yafsdp_cc.profiling import Span


def capture(wanted: str) -> Recording:
    """Record the steps that ``wanted`` names.

    Args:
        wanted: ``tool:first:last:folder``: ``kineto`` writes ``rank0.json.gz`` and so on into the folder, ``nsys``
            starts and stops the range that Nsight Systems records. Steps are counted from 1, at the first optimizer
            that makes one; each is a range ``YaFSDP::iteration (number)``.
    """
    tool, first, last, folder = wanted.split(":", 3)
    recording = Recording(tool == "kineto", int(first), int(last), folder)
    register_optimizer_step_post_hook(recording.after_step)
    atexit.register(recording.at_exit)
    return recording


class Recording:
    """Records the optimizer steps ``first`` to ``last``; step 1 begins when the object is made."""

    def __init__(self, by_kineto: bool, first: int, last: int, folder: str) -> None:
        self._tool: Any = torch.profiler.profile(record_shapes=True) if by_kineto else torch.cuda.profiler.profile()
        self._by_kineto, self._first, self._last, self._folder = by_kineto, first, last, folder
        self._optimizer: Any = None
        self._made = 0
        self._span: Span | None = None
        self._begin_step()

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self._made += 1
            self._end_step(is_last=self._made == self._last)
            self._begin_step()

    def _begin_step(self) -> None:
        number = self._made + 1
        if not self._first <= number <= self._last:
            return
        if number == self._first:
            synchronize()
            self._tool.__enter__()
        self._span = Span("iteration", str(number)).__enter__()

    def _end_step(self, is_last: bool) -> None:
        if self._span is None:
            return
        if is_last:
            synchronize()
        self._span.__exit__(None, None, None)
        self._span = None
        if not is_last:
            return
        self._tool.__exit__(None, None, None)
        if self._by_kineto:
            path = os.path.join(self._folder, f"rank{os.environ.get('RANK', '0')}.json.gz")
            self._tool.export_chrome_trace(f"{path}.part.json.gz")
            os.replace(f"{path}.part.json.gz", path)

    def at_exit(self) -> None:
        """Write the recording, and warn, if the script ends before the last step to record."""
        if self._made < self._last:
            self._end_step(is_last=True)
            wanted = f"steps {self._first} to {self._last} were to be recorded"
            print(f"yafsdp-cc profile: {wanted}, and the script made {self._made}", file=sys.stderr)


def synchronize() -> None:
    """Wait until the GPU has done its work, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
