"""``Before`` finds functions, constants and settings that a test has left changed in its process; ``tests.ranks`` runs
no further test there then."""

from __future__ import annotations

import logging
import resource
import signal
import sys
from types import ModuleType
from typing import Any

import torch
import torch.autograd.graph
import torch.distributed as dist
import torch.futures
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as nn_module
from torch.utils import _python_dispatch

PACKAGES = ("yafsdp_cc", "bench")
"""All names of their modules are looked at, and those of their classes."""
MODULES = (
    "os",
    "socket",
    "subprocess",
    "time",
    "torch",
    "torch.autograd",
    "torch.autograd.graph",
    "torch.cuda",
    "torch.cuda.profiler",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.tensor._random",
    "torch.futures",
    "torch.nn.functional",
    "torch.nn.utils",
)
CLASSES = (
    torch.Tensor,
    torch.nn.Parameter,
    torch.optim.Optimizer,
    torch.autograd.Function,
    dist.ProcessGroup,
    dist.Work,
    DTensor,
)
CHANGING = {"_backend", "_group_count", "__slotnames__", "step"}
"""Names that are meant to change: torch wraps ``step`` of an optimizer's class when its first object is made."""


class Before:
    """Functions, constants and settings of a process before a test."""

    def __init__(self) -> None:
        self._names = [(owner, dict(vars(owner))) for owner in _owners()]
        self._settings = _settings()

    def changes(self) -> list[str]:
        """Return what has become another, as far as it is looked at; a module imported later has changed nothing."""
        settings = _settings()
        found = [name for name, value in self._settings.items() if settings[name] != value]
        for owner, names in self._names:
            now = vars(owner)
            if _same(now, names):
                continue
            found += [f"{owner.__name__}.{name}" for name, value in names.items() if now.get(name) is not value]
            if isinstance(owner, type) and len(now) != len(names):
                found += [f"{owner.__name__}.{name}" for name in now if name not in names]
        return [each for each in found if each.rpartition(".")[2] not in CHANGING]


def _same(now: Any, names: dict[str, Any]) -> bool:
    """Return whether all is as before, which is looked at faster than what is not."""
    try:
        return bool(now == names)
    except Exception:  # of a comparison of what a name stands for
        return False


def _owners() -> list[Any]:
    owners: list[Any] = list(CLASSES)
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name in MODULES or name.partition(".")[0] in PACKAGES):
            owners.append(module)
            if name not in MODULES:
                owners += [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
    return owners


def _settings() -> dict[str, Any]:
    log = logging.getLogger("yafsdp_cc")
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "dispatch modes": _python_dispatch._get_current_dispatch_mode_stack(),
        "global hooks": [
            len(each)
            for name, each in vars(nn_module).items()
            if name.startswith("_global_") and isinstance(each, dict)
        ],
        "limits": [resource.getrlimit(which) for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)],
        # pytest-timeout has a handler of SIGALRM for each test
        "signals": [signal.getsignal(number) for number in range(1, signal.NSIG) if number != signal.SIGALRM],
        "log": (log.level, log.propagate, log.disabled, tuple(log.handlers), tuple(log.filters)),
    }
