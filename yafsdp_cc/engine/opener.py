"""Who has called a forward, and whether that is still being run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import FrameType

_OWN = (str(Path(__file__).parent), str(Path(torch.__file__).parent / "_dynamo"))


class Opener:
    """The innermost frame that is neither the engine's nor one of those that keep its hooks out of compilation."""

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(_OWN):
            frame = frame.f_back
        self._frame = frame

    def is_running(self) -> bool:
        """Whether it is among the callers of this."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None
