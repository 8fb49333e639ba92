"""What a figure was measured on, and by which command: the first thing in every file of figures."""

from __future__ import annotations

import os
import platform
import shlex
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def about(command: Sequence[str]) -> dict[str, Any]:
    """This machine, now."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "command": shlex.join(command),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"model": next(models, platform.machine()), "cores": len(os.sched_getaffinity(0))},
        "instructions": os.environ.get("YAFSDP_CC_SIMD", "the best there are"),
    }
