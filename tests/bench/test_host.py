"""What Python does in a step of one rank, counted: the same on any number of ranks."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest

import yafsdp_cc
from bench import host
from tests.ranks import on_ranks
from yafsdp_cc import Compression

PACKAGE = str(Path(yafsdp_cc.__file__).parent)
WAYS = {
    "exact": {},
    "int8": {"compression": "int8"},
    "weights too": {"compression": Compression("int8", weights="int8")},
}


def executed_in_step(world: int, kind: str, settings: dict[str, object]) -> dict[str, int]:
    """Return the bytecodes that a step executes by function of the package, and its calls of C functions by name."""
    counts: Counter[str] = Counter()

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        name = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}: {frame.f_code.co_name}"

        def count(frame, event, argument):
            counts[name] += 1
            return count

        return count

    def profile(frame, event, argument):
        if event == "c_call" and frame.f_code.co_filename.startswith(PACKAGE):
            counts[f"C: {argument.__name__}"] += 1

    with host.idle_ranks(world, kind) as (mesh, device):
        training = host.Training(host.OURS, mesh, blocks=2, **settings)
        for _ in range(4):
            training.step()
        gc.collect()
        device.__exit__(None, None, None)  # which would be traced too
        for watch, what in ((sys.settrace, trace), (sys.setprofile, profile)):
            watch(what)
            training.step()
            watch(None)
        device.__enter__()
    return dict(counts)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_does_not_grow_with_the_ranks(kind, way):
    few = on_ranks(1, executed_in_step, 32, kind, WAYS[way], group=False)[0]
    many = on_ranks(1, executed_in_step, 1024, kind, WAYS[way], group=False)[0]
    differing = {name: (few.get(name, 0), many.get(name, 0)) for name in few | many}
    differing = {name: counts for name, counts in differing.items() if counts[0] != counts[1]}
    assert not differing
