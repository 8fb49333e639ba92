"""Ranges are read back from where users look: a Kineto trace, and a library listening to NVTX."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import timeit
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.ranks import on_ranks
from yafsdp_cc.profiling import Span, span


class Range(NamedTuple):
    name: str
    start: float
    end: float
    event: dict[str, Any]


def ranges(profiled: profile, folder: Path) -> list[Range]:
    """Our ranges in the exported trace, by start."""
    path = folder / "trace.json"
    profiled.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name", "").startswith("YaFSDP::")]
    return sorted((Range(e["name"], e["ts"], e["ts"] + e["dur"], e) for e in events), key=lambda r: r.start)


def cpu_profile(**options: Any) -> profile:
    return profile(activities=[ProfilerActivity.CPU], **options)


def forked(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own: others fork this one, and a parent that profiled has threads to lose."""

    @wraps(test)
    def in_a_child(**fixtures: object) -> None:
        on_ranks(1, partial(test, **fixtures))

    return in_a_child


def work() -> None:
    torch.ones(64, 64).sum()


@forked
def test_nested_and_repeated(tmp_path: Path) -> None:
    outer, inner = Span("forward", "model"), Span("forward", "model.layers.3")
    with cpu_profile() as profiled, outer:
        work()
        for _ in range(2):
            with inner:
                work()
    found = ranges(profiled, tmp_path)
    assert [r.name for r in found] == ["YaFSDP::forward (model)"] + ["YaFSDP::forward (model.layers.3)"] * 2
    whole, first, second = found
    assert whole.start <= first.start <= first.end <= second.start <= second.end <= whole.end


@forked
def test_the_same_span_inside_itself(tmp_path: Path) -> None:
    forward = Span("forward", "block")
    with cpu_profile() as profiled, forward:
        work()
        with forward:
            work()
        work()
    outer, inner = ranges(profiled, tmp_path)
    assert outer.start < inner.start < inner.end < outer.end


@forked
def test_overlapping_ranges_keep_their_own_ends(tmp_path: Path) -> None:
    gather, reduce = Span("gather", "a"), Span("reduce", "b")
    with cpu_profile() as profiled:
        first = gather.start()
        work()
        second = reduce.start()
        work()
        gather.end(first)
        work()
        reduce.end(second)
    a, b = ranges(profiled, tmp_path)
    assert (a.name, b.name) == ("YaFSDP::gather (a)", "YaFSDP::reduce (b)")
    assert a.start < b.start < a.end < b.end


@forked
def test_never_ended_ranges_break_nothing(tmp_path: Path) -> None:
    forward, backward = Span("forward", "kept"), Span("backward", "block")
    with cpu_profile() as profiled:
        kept = forward.start()
        Span("forward", "dropped").start()
        with backward:
            work()
    assert {r.name for r in ranges(profiled, tmp_path)} == {
        "YaFSDP::forward (kept)",
        "YaFSDP::forward (dropped)",
        "YaFSDP::backward (block)",
    }
    forward.end(kept)  # the profiler is gone by now
    with cpu_profile() as profiled, backward:
        work()
    assert [r.name for r in ranges(profiled, tmp_path)] == ["YaFSDP::backward (block)"]


@forked
def test_an_exception_closes_the_range_and_passes(tmp_path: Path) -> None:
    clip = span("clip")
    with cpu_profile() as profiled, clip:
        with pytest.raises(ValueError, match="inside"), clip:
            raise ValueError("inside")
        work()
    outer, inner = ranges(profiled, tmp_path)
    assert outer.name == "YaFSDP::clip"
    assert inner.end < outer.end


@forked
def test_a_profiler_that_comes_or_goes_in_the_middle(tmp_path: Path) -> None:
    forward, profiled = Span("forward"), cpu_profile()
    with forward:
        profiled.start()
        with forward:
            work()
            profiled.stop()
    assert [r.name for r in ranges(profiled, tmp_path)] == ["YaFSDP::forward"]


@forked
def test_bytes_are_in_the_trace(tmp_path: Path) -> None:
    with cpu_profile(record_shapes=True) as profiled, Span("gather", "block", byte_count=4096):
        work()
    (gather,) = ranges(profiled, tmp_path)
    assert gather.event["args"]["bytes"] == 4096


@forked
def test_cheap_while_nobody_looks() -> None:
    gather = Span("gather", "block", byte_count=1)

    def by_handle() -> None:
        gather.end(gather.start())

    assert gather.start() is None
    # Three times what is measured on a quiet machine (docs say 0.1 µs): catches a slip, not a busy neighbour.
    assert min(timeit.repeat(by_handle, number=20_000, repeat=5)) / 20_000 < 1e-6


def test_ranges_are_kinetos_alone_without_nvtx() -> None:
    program = """if True:
        import sys
        sys.modules["nvtx"] = None  # what is not installed
        import torch, yafsdp_cc.api
        from yafsdp_cc import profiling
        profiling.mark_optimizer_steps()
        with torch.profiler.profile() as profiled, profiling.span("clip", "here"):
            torch.ones(1)
        assert not profiling.NVTX_LISTENS
        assert "YaFSDP::clip (here)" in {event.name for event in profiled.events()}
    """
    subprocess.run([sys.executable, "-c", program], check=True)


NVTX_HEADERS = next((p for p in Path("/usr/local").glob("cuda*/include") if (p / "nvtx3").is_dir()), None)


@pytest.mark.skipif(
    NVTX_HEADERS is None or shutil.which("g++") is None, reason="needs g++ and the CUDA toolkit's NVTX headers"
)
def test_a_listening_tool_sees_domain_category_and_payload(tmp_path: Path) -> None:
    library, log = tmp_path / "listener.so", tmp_path / "log"
    source = Path(__file__).with_name("nvtx_listener.cpp")
    subprocess.run(["g++", "-shared", "-fPIC", f"-I{NVTX_HEADERS}", source, "-o", library], check=True)
    program = """if True:
        import torch
        from yafsdp_cc.profiling import Span, mark_optimizer_steps
        gather, reduce = Span("gather", "a", byte_count=7), Span("reduce", "b", byte_count=9)
        first = gather.start()
        second = reduce.start()
        gather.end(first)
        reduce.end(second)
        Span("forward", "never ended").start()
        mark_optimizer_steps()
        mark_optimizer_steps()
        torch.optim.SGD([torch.nn.Parameter(torch.ones(4))]).step()
    """
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(library), "NVTX_LISTENER_LOG": str(log)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    lines = log.read_text().splitlines()
    assert lines[0] == "domain yafsdp_cc"
    categories = dict(line.split()[1:] for line in lines if line.startswith("category"))
    assert [line for line in lines if line.startswith(("start", "end"))] == [
        f"start 1 category {categories['gather']} payload 7 YaFSDP::gather (a)",
        f"start 2 category {categories['reduce']} payload 9 YaFSDP::reduce (b)",
        "end 1",
        "end 2",
        f"start 3 category {categories['forward']} payload 0 YaFSDP::forward (never ended)",
        f"start 4 category {categories['step']} payload 0 YaFSDP::step",
        "end 4",
    ]
