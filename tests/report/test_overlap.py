"""What a report says of a trace is what was put into it: made by hand, and recorded of two ranks."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import yafsdp_cc
from tests.ranks import on_ranks
from tests.report.traces import GEMM, OTHER_PROCESS, TRUTH, write_kineto, write_nsys
from yafsdp_cc.tools.report.overlap import Shared, joined, length, measure, without
from yafsdp_cc.tools.report.trace import UnreadableError, read


def test_arithmetic_is_that_of_sets_of_microseconds() -> None:
    """Against a set of whole numbers, in which every microsecond stands for itself."""

    def points(spans: list[tuple[float, float]]) -> set[int]:
        return {point for begin, end in spans for point in range(int(begin), int(end))}

    draw = random.Random(0)
    for _ in range(300):
        some, others = (
            [(begin, begin + draw.randrange(9)) for begin in (draw.randrange(60) for _ in range(draw.randrange(12)))]
            for _ in range(2)
        )
        covers = joined(others)
        left = without(joined(some), covers)
        assert points(left) == points(some) - points(others)
        assert length(left) == len(points(left))
        assert all(first[1] < second[0] for first, second in pairwise(covers))


def test_a_modelled_wire_communicates(tmp_path: Path) -> None:
    """As kernels of NCCL do (bench/modelled.py)."""
    trace = write_kineto(tmp_path / "trace.json")
    trace.write_text(re.sub(r"ncclDevKernel_\w+\(\w+\)", "modelled_transfer", trace.read_text()))
    assert "ncclDev" not in trace.read_text()
    assert measure(read(trace)).communication == TRUTH["communication"]


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_kineto, "trace.json"), (write_kineto, "trace.json.gz"), (write_nsys, "trace.sqlite")],
)
def test_a_step_made_by_hand(tmp_path: Path, write: Callable[[Path], Path], name: str) -> None:
    trace = read(write(tmp_path / name))
    found = measure(trace)
    assert (trace.steps, trace.end - trace.start) == (1, TRUTH["window"])
    assert {kind: found.kinds[kind] for kind in ("all-gather", "reduce", "copy")} == {
        kind: Shared(*TRUTH[kind]) for kind in ("all-gather", "reduce", "copy")
    }
    assert found.communication == TRUTH["communication"]
    assert found.groups == {unit: TRUTH[unit] for unit in ("a", "b")}
    assert found.parts == TRUTH["parts"]
    assert found.kinds["encode"] == (40, 40)
    assert found.kinds["decode"] == (20, 20)
    assert found.slowdown == TRUTH["slowdown"]
    ((slowest, beside, alone_us, beside_us),) = found.slowed
    assert (slowest, beside, alone_us, beside_us) == (GEMM, 1, 80, 100)
    assert sum(found.on_communication_lanes.values()) == TRUTH["on communication lanes"]
    groups = {each.name: each.group for each in trace.activities}
    assert groups[GEMM] == groups["backward_kernel"] == "a"
    assert [each.group for each in trace.activities if each.lane == "GPU 0, stream 13"] == [""], "no unit is a number"
    assert {each.lane for each in trace.activities} == {"GPU 0, stream 7", "GPU 0, stream 13", "GPU 0, stream 20"}


def train(folder: Path, by_fsdp2: bool) -> None:
    """Two steps of a sharded model under the profiler."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)))
    if by_fsdp2:
        for unit in (*model, model):
            fully_shard(unit)
    else:
        yafsdp_cc.shard(model, units=list(model), sync_module_states=True, compression="int8")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(64, 256)).sum().backward()
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        for _ in range(2):
            step()
    profiled.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json"))


@pytest.mark.parametrize("by_fsdp2", [False, True], ids=["ours", "fsdp2"])
def test_a_trace_of_two_ranks(tmp_path: Path, by_fsdp2: bool) -> None:
    on_ranks(2, train, tmp_path, by_fsdp2)
    for rank in range(2):
        path = tmp_path / f"rank{rank}.json"
        found = measure(read(path))
        assert found.trace.steps == 2
        events = json.loads(path.read_text())["traceEvents"]
        assert set(found.groups) >= {"0", "1", "2"}, "every unit's gathers and reduces are found"
        for unit in ("0", "1", "2"):
            assert {"all-gather", "reduce"} <= set(found.groups[unit])
        assert {"compute", "optimizer"} <= set(found.kinds)
        assert by_fsdp2 or {"encode", "decode"} <= set(found.kinds)
        # By torch's own sum of what gloo did, and by the length of the whole.
        gloo = joined((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name", "").startswith("gloo:"))
        assert found.communication.total == pytest.approx(length(gloo), abs=0.1)
        assert 0 <= found.communication.exposed <= found.communication.total
        assert sum(found.parts.values()) == pytest.approx(found.trace.end - found.trace.start, abs=0.1)
        codec = [e["dur"] for e in events if e.get("name", "").startswith("yafsdp_cc::encode")]
        assert found.kinds.get("encode", Shared(0, 0)).total == pytest.approx(sum(codec), abs=0.1)


def test_what_is_no_trace_is_told_by_name(tmp_path: Path) -> None:
    half = write_kineto(tmp_path / "half.json")
    half.write_text(half.read_text()[:-100])
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    (tmp_path / "text.sqlite").write_text("no database, but text that is long enough to be looked at" * 20)
    (tmp_path / "no_cuda.sqlite").write_bytes(b"")
    (tmp_path / "cut.json.gz").write_bytes(write_kineto(tmp_path / "whole.json.gz").read_bytes()[:99])
    damaged = bytearray((tmp_path / "whole.json.gz").read_bytes())
    damaged[40:60] = bytes(20)
    (tmp_path / "damaged.json.gz").write_bytes(damaged)
    (tmp_path / "no_start.json").write_text(write_kineto(tmp_path / "whole.json").read_text().replace('"ts"', '"at"'))
    event = '{"traceEvents": [{"ph": "X", "ts": 5, "dur": %s, "name": "aten::add", "tid": 1, "cat": "cpu_op"}]}'
    for name, duration in (("no_time.json", "0"), ("for_ever.json", "1e999")):
        (tmp_path / name).write_text(event % duration)
    several = write_nsys(tmp_path / "several.sqlite")
    with closing(sqlite3.connect(several)) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = ? WHERE streamId = 7", (OTHER_PROCESS,))
        database.commit()
    for name, message in (
        ("several.sqlite", "2 processes in one report"),
        ("half.json", "not a whole trace"),
        ("list.json", 'no "traceEvents"'),
        ("empty.json", "no kernel, copy or operator"),
        ("no_time.json", "its events take 0 us in all"),
        ("for_ever.json", "its events take inf us in all"),
        ("text.sqlite", "not a whole trace"),
        ("no_cuda.sqlite", "--trace=cuda,nvtx"),
        ("cut.json.gz", "not a whole trace"),
        ("damaged.json.gz", "not a whole trace"),
        ("no_start.json", "not a whole trace"),
        ("missing.json", "No such file"),
    ):
        with pytest.raises(UnreadableError, match=f"{name}.*{message}"):
            read(tmp_path / name)
