"""Records some optimizer steps of this process, whatever its script does, for ``yafsdp-cc profile``."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from yafsdp_cc.profiling import Span

if TYPE_CHECKING:
    from yafsdp_cc.profiling import Handle


def capture(wanted: str) -> Recording:
    """Record the steps that ``wanted`` names.

    Args:
        wanted: ``tool:first:last:folder``: ``kineto`` writes ``rank0.json.gz`` and so on into the folder, ``nsys``
            starts and stops the range that Nsight Systems records. Steps are those of the first optimizer that makes
            one, from 1 on; each is a range ``YaFSDP::iteration (number)``.
    """
    tool, first, last, folder = wanted.split(":", 3)
    recording = Recording(tool == "kineto", int(first), int(last), folder)
    register_optimizer_step_post_hook(recording.after_step)
    atexit.register(recording.at_exit)
    recording.before_step(1)
    return recording


class Recording:
    """A recording in progress."""

    def __init__(self, by_kineto: bool, first: int, last: int, folder: str) -> None:
        self._profile = torch.profiler.profile(record_shapes=True) if by_kineto else None
        self._first, self._last, self._folder = first, last, folder
        self._optimizer: Any = None
        self._made = 0
        self._open: tuple[Span, Handle | None] | None = None

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self._made += 1
            self._end_step(is_last=self._made == self._last)
            self.before_step(self._made + 1)

    def before_step(self, number: int) -> None:
        if not self._first <= number <= self._last:
            return
        if number == self._first:
            _synchronize()
            if self._profile is None:
                torch.cuda.profiler.start()
            else:
                self._profile.start()
        span = Span("iteration", str(number))
        self._open = span, span.start()

    def _end_step(self, is_last: bool) -> None:
        if self._open is None:
            return
        if is_last:
            _synchronize()
        span, handle = self._open
        span.end(handle)
        self._open = None
        if is_last and self._profile is None:
            torch.cuda.profiler.stop()
        elif is_last and self._profile is not None:
            self._profile.stop()
            path = os.path.join(self._folder, f"rank{os.environ.get('RANK', '0')}.json.gz")
            self._profile.export_chrome_trace(f"{path}.part.json.gz")
            os.replace(f"{path}.part.json.gz", path)

    def at_exit(self) -> None:
        """Write the recording of a script that ends before its last step."""
        if self._made < self._last:
            self._end_step(is_last=True)
            wanted = f"steps {self._first} to {self._last} were to be recorded"
            print(f"yafsdp-cc profile: {wanted}, and the script made {self._made}", file=sys.stderr)


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
