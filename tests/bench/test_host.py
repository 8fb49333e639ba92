"""What Python does in a step of one rank, counted: the same on any number of ranks."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

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
    dist.destroy_process_group()

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
        for _ in range(5):  # the codecs are judged within the first steps
            training.step()
        gc.collect()
        with device.left():
            for watch, what in ((sys.settrace, trace), (sys.setprofile, profile)):
                watch(what)
                training.step()
                watch(None)
    return dict(counts)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_does_not_grow_with_the_ranks(kind, way):
    few, many = (on_ranks(1, executed_in_step, world, kind, WAYS[way], fresh=True)[0] for world in (32, 1024))
    assert {name: (few.get(name), many.get(name)) for name in few | many if few.get(name) != many.get(name)} == {}
