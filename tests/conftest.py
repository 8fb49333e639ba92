"""What holds for all tests: one thread in the process that ranks are forked from; no long forms in ``make test``; the
order of files."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

from tests.soak import SOAK

torch.set_num_threads(1)  # threads that an operation has started here would not be there in a forked rank

FIRST = (
    "tests/test_device.py",
    "tests/compression/test_cuda_emulated.py",
    "tests/bench/test_gpu_rehearsal.py",
    "tests/bench/test_launches.py",
    "tests/cli/test_launch.py",
    "tests/cli/test_demo.py",
    "tests/cli/test_bench.py",
    "tests/checkpoint/test_exchange.py",
    "tests/integrations/test_titan.py",
    "tests/integrations/test_trl.py",
)
"""Files of few tests that take long: of two workers, the one that ended with such a file would leave the other idle."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is marked long, unless in ``make soak``: skipped is only what lacks hardware or a framework."""
    if not SOAK:
        long = {item for item in items if item.get_closest_marker("long")}
        config.hook.pytest_deselected(items=list(long))
        items[:] = [item for item in items if item not in long]
    tests = Counter(map(_file_of, items))
    items.sort(key=lambda item: _place(_file_of(item), tests))


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _place(file: str, tests: Counter[str]) -> tuple[int, int, str]:
    """Return what a file is sorted by: those of ``FIRST``, then those of many tests, each file's tests together."""
    return (FIRST.index(file), 0, file) if file in FIRST else (len(FIRST), -tests[file], file)


def pytest_collection_finish() -> None:
    """Hide from the garbage collector what stays for good: looking at all modules takes longer than many a test."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Show it again: triton, where it is there, would print what it holds at the end as leaked."""
    gc.unfreeze()
