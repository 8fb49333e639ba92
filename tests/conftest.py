"""What holds for all tests: one thread in the process that ranks are forked from, which is cheap to fork; no long forms
in ``make test``; the order of files."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.soak import SOAK

torch.set_num_threads(1)  # threads that an operation has started here would not be there in a forked rank
gc.disable()  # until all files are collected: what they import stays

_PARENT, _run_backward = os.getpid(), torch.autograd.graph._engine_run_backward


def _only_in_ranks(*args: Any, **kwargs: Any) -> Any:
    """Run a backward, but not in the process that ranks are forked from: autograd of a torch that is built for CUDA has
    threads then, and raises in every rank that is forked afterwards."""
    if os.getpid() == _PARENT:
        raise RuntimeError("a test runs a backward in the process that ranks are forked from: use tests.ranks.ranks(1)")
    return _run_backward(*args, **kwargs)


torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = _only_in_ranks

FIRST = (
    "tests/test_device.py",
    "tests/compression/test_cuda_emulated.py",
    "tests/cli/test_launch.py",
    "tests/fully_shard/test_frameworks.py",
    "tests/fully_shard/test_programs.py",
    "tests/test_tensor_parallel.py",
    "tests/training/test_writes.py",
    "tests/engine/test_streams.py",
    "tests/bench/test_launches.py",
    "tests/checkpoint/test_resume.py",
    "tests/optim/test_schedules.py",
    "tests/bench/test_gpu_rehearsal.py",
    "tests/training/test_skipping.py",
    "tests/integrations/test_titan.py",
    "tests/checkpoint/test_exchange.py",
    "tests/compression/test_delta.py",
    "tests/replicas/test_checkpoints.py",
    "tests/compression/test_set_codec.py",
    "tests/test_offload.py",
    "tests/cli/test_demo.py",
    "tests/fully_shard/test_spmd.py",
    "tests/compression/test_fsdp2.py",
    "tests/bench/test_replicas_bench.py",
    "tests/bench/test_command.py",
    "tests/integrations/test_trl.py",
    "tests/pipelining/test_stage.py",
    "tests/training/test_penalties.py",
    "tests/replicas/test_outer.py",
    "tests/checkpoint/test_state_dicts.py",
    "tests/pipelining/test_sharded.py",
    "tests/bench/test_engine_bench.py",
    "tests/compression/test_decode_fuzz.py",
    "tests/integrations/test_transformers.py",
    "tests/optim/test_sgd.py",
    "tests/checkpoint/test_matrix.py",
    "tests/test_names.py",
    "tests/netlab/test_docs.py",
    "tests/replicas/test_membership.py",
    "tests/server/test_server.py",
)
"""Files of few tests that take long: of two workers, the one that ended with such a file would leave the other idle."""


LONGEST = 3600
"""Seconds that a long form may take, which says nothing else: those of a test of ``make test`` are too few for most."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is marked long, unless in ``make soak``: skipped is only what lacks hardware or a framework."""
    if not SOAK:
        long = {item for item in items if item.get_closest_marker("long")}
        config.hook.pytest_deselected(items=list(long))
        items[:] = [item for item in items if item not in long]
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONGEST))
    tests = Counter(map(_file_of, items))
    items.sort(key=lambda item: _place(_file_of(item), tests))


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _place(file: str, tests: Counter[str]) -> tuple[int, int, str]:
    """Return what a file is sorted by: those of ``FIRST``, then those of many tests, each file's tests together."""
    return (FIRST.index(file), 0, file) if file in FIRST else (len(FIRST), -tests[file], file)


def pytest_collection_finish() -> None:
    """Hide from the garbage collector what stays for good: looking at all modules takes longer than many a test."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        _take_huge_pages()


MADV_COLLAPSE = 25
HUGE = 2 << 20


def _take_huge_pages() -> None:
    """Put this process's memory into huge pages, where the system can (Linux 6.1): a fork copies the table of pages,
    and takes it down at its end, which is half of what it costs to start a rank."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, inode = line.split()[:5]
        start, end = (int(address, 16) for address in addresses.split("-"))
        if rights == "rw-p" and inode == "0":
            for page in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):
                madvise(page, HUGE, MADV_COLLAPSE)  # refused where nothing is: then all stays as it is


def pytest_unconfigure() -> None:
    """Show it again: triton, where it is there, would print what it holds at the end as leaked."""
    gc.unfreeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks of a file with its last test."""
    if nextitem is None or _file_of(nextitem) != _file_of(item):
        ranks.end_of_file()
