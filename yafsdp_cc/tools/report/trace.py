"""One table of activities, from a trace of Kineto (``torch.profiler``) or an export of Nsight Systems.

An activity is a kernel or copy of a GPU. In a trace without a GPU, it is an outermost operator of a thread, or an
operation of a gloo thread. It belongs to the ranges that were open on the launching thread: ``YaFSDP::gather
(blocks.3)`` and so on, of FSDP2 ``FSDP::all_gather (blocks.3)``.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["compute", "optimizer", "encode", "decode", "all-gather", "reduce", "other communication", "copy"]
COMMUNICATION: tuple[Kind, ...] = ("all-gather", "reduce", "other communication")


class UnreadableError(ValueError):
    """A file is not a run or trace that can be read; the message names the file and says why."""


class Activity(NamedTuple):
    """A kernel, copy or operator; times are in microseconds."""

    start: float
    end: float
    name: str
    lane: str
    """Name of the stream or thread."""
    kind: Kind
    group: str
    """Name of the unit in whose range the activity was launched; "" outside of all units."""
    shape: str
    """Grid and block of a kernel, or shapes of an operator's inputs: work of equal name and shape is equal."""


class Trace(NamedTuple):
    """The activities of one process from ``start`` to ``end`` in microseconds, in ``steps`` training steps."""

    title: str
    activities: list[Activity]
    start: float
    end: float
    steps: int


class _Launch(NamedTuple):
    """An activity that is not labelled yet, with the thread and the time of its launch."""

    start: float
    end: float
    name: str
    lane: str
    shape: str
    thread: Hashable
    time: float


class _Range(NamedTuple):
    start: float
    end: float
    name: str
    thread: Hashable


def read(path: Path) -> Trace:
    """Read a trace.

    Args:
        path: file of ``export_chrome_trace`` (``.json``, ``.json.gz``) or ``nsys export --type sqlite`` (``.sqlite``).

    Raises:
        UnreadableError: the file is of none of these kinds, or holds no activity.
    """
    try:
        return _read(path)
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror or error}") from error
    except _DAMAGED as error:
        what = f"not a whole trace ({type(error).__name__}: {error}); was the program ended while it was written?"
        raise UnreadableError(f"{path}: {what}") from error


_CUT_OFF = (EOFError, UnicodeDecodeError, json.JSONDecodeError, zlib.error, sqlite3.DatabaseError)
_DAMAGED = (*_CUT_OFF, AttributeError, KeyError, TypeError)  # last three: a value is missing or of another type


def _read(path: Path) -> Trace:
    launches, ranges = _read_nsys(path) if path.suffix == ".sqlite" else _read_kineto(path)
    if not launches:
        raise UnreadableError(f"{path}: no kernel, copy or operator in this trace; record it with yafsdp-cc profile")
    steps = [each for each in ranges if re.match(r"ProfilerStep#|YaFSDP::iteration", each.name)]
    start = min(each.start for each in steps or launches)
    # the end of activities counts, too: a GPU ends its part of a step later than the host
    end = max(each.end for some in (steps, launches) for each in some)
    if not 0 < end - start < inf:
        raise UnreadableError(f"{path}: its events take {end - start} us in all: record it with yafsdp-cc profile")
    found = sorted(each for each in _labelled(launches, ranges) if each.end > start)
    updates = [each.name for each in ranges if each.name.startswith(_UPDATES)]
    # Count steps by their ranges and by updates of one optimizer, and take the smaller number: a step that the script's
    # end has cut off has a range and no update.
    counts = len({each.name for each in steps}), sum(name == updates[0] for name in updates)
    return Trace(str(path), found, start, end, min(filter(None, counts), default=1))


# Where a trace comes from --------------------------------------------------------------------------------------------


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace of Kineto, as its file has them."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        found = json.load(file)
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise UnreadableError(f'{path}: no "traceEvents" in it: not a trace that torch.profiler has exported')
    return events


def _read_kineto(path: Path) -> tuple[list[_Launch], list[_Range]]:
    events = [each for each in read_events(path) if each.get("ph") == "X" and "dur" in each]
    on_host = [each for each in events if each.get("cat") in ("cpu_op", "user_annotation")]
    on_gpu = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ranges = [_Range(each["ts"], each["ts"] + each["dur"], each["name"], each["tid"]) for each in on_host]
    if not on_gpu:
        return _operators(on_host), ranges
    calls = {
        each["args"]["correlation"]: each
        for each in events
        if each.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in each.get("args", {})
    }
    launches = []
    for each in on_gpu:
        arguments = each.get("args", {})
        call = calls.get(arguments.get("correlation"), {"tid": None, "ts": each["ts"]})
        lane = _stream(arguments.get("device", 0), arguments.get("stream", each["tid"]))
        shape = f"{arguments.get('grid')} {arguments.get('block')} {arguments.get('bytes', '')}"
        launches.append(
            _Launch(each["ts"], each["ts"] + each["dur"], each["name"], lane, shape, call["tid"], call["ts"])
        )
    return launches, ranges


def _operators(events: list[dict[str, Any]]) -> list[_Launch]:
    """Return the outermost operators of each thread, and the operations of gloo's threads."""
    launches: list[_Launch] = []
    lanes: dict[Any, str] = {}
    ends: dict[Any, float] = {}
    gloo: dict[str, list[dict[str, Any]]] = defaultdict(list)
    calls: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        name, thread = each["name"], each["tid"]
        if name.startswith("gloo:"):
            gloo[_collective(name)].append(each)
        elif name.startswith("c10d::"):
            calls[_collective(name)].append(each)
        elif name.startswith(("aten::", "yafsdp_cc::")) and each["ts"] >= ends.get(thread, 0.0):
            ends[thread] = each["ts"] + each["dur"]
            lane = lanes.setdefault(thread, f"thread {len(lanes) + 1}")
            shape = str(each.get("args", {}).get("Input Dims", ""))
            launches.append(_Launch(each["ts"], ends[thread], name, lane, shape, thread, each["ts"]))
    for kind, works in gloo.items():
        # gloo's threads run operations in order: the third all-to-all to run is the third one called
        issued = calls[kind] if len(calls[kind]) == len(works) else [{"tid": None, "ts": 0.0}] * len(works)
        for work, call in zip(works, issued, strict=True):
            end = work["ts"] + work["dur"]
            launches.append(_Launch(work["ts"], end, work["name"], "gloo", "", call["tid"], call["ts"]))
    return launches


def _collective(name: str) -> str:
    """Return a name that a gloo operation shares with the c10d operator that calls it.

    ``gloo:all_to_all`` and ``c10d::alltoall_base_`` are both "alltoall". A reduce-scatter is "allreduce", which gloo
    runs in its place.
    """
    return name.rpartition(":")[2].replace("_base", "").replace("_", "").replace("reducescatter", "allreduce")


def _read_nsys(path: Path) -> tuple[list[_Launch], list[_Range]]:
    """Read an export of Nsight Systems (source: NVIDIA, SQLite Export Schema Reference)."""
    launches: list[_Launch] = []
    ranges: list[_Range] = []
    with closing(sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if not {"StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"} <= tables:
            raise UnreadableError(f"{path}: no CUDA kernels in it: record with nsys profile --trace=cuda,nvtx")
        strings = dict(database.execute("SELECT id, value FROM StringIds"))
        # the lower 24 bits of a globalTid are the thread; a correlation id is unique within its process
        calls = {
            (thread >> 24, correlation): (thread, start)
            for thread, correlation, start in database.execute(
                "SELECT globalTid, correlationId, start / 1e3 FROM CUPTI_ACTIVITY_KIND_RUNTIME"
            )
        }
        size = " || ' ' || ".join(f"{part}{axis}" for part in ("grid", "block") for axis in "XYZ")
        wanted = {
            "KERNEL": f"demangledName, {size}",
            "MEMCPY": "'Memcpy', copyKind || ' ' || bytes",
            "MEMSET": "'Memset', bytes",
        }
        processes = set()
        # nsys counts nanoseconds
        common = "start / 1e3, end / 1e3, deviceId, streamId, globalPid, correlationId"
        for table, columns in wanted.items():
            if f"CUPTI_ACTIVITY_KIND_{table}" not in tables:
                continue
            rows = database.execute(f"SELECT {common}, {columns} FROM CUPTI_ACTIVITY_KIND_{table}")
            for start, end, device, stream, process, correlation, name, shape in rows:
                processes.add(process)
                call = calls.get((process >> 24, correlation), (None, start))
                told = strings.get(name, str(name)), _stream(device, stream), str(shape)
                launches.append(_Launch(start, end, *told, *call))
        if "NVTX_EVENTS" in tables:
            columns = "start / 1e3, end / 1e3, text, textId, globalTid"
            rows = database.execute(f"SELECT {columns} FROM NVTX_EVENTS WHERE end > start")
            for start, end, text, name, thread in rows:
                ranges.append(_Range(start, end, text or strings.get(name, ""), thread))
    if len(processes) > 1:
        raise UnreadableError(
            f"{path}: {len(processes)} processes in one report: run nsys in each rank, not around all"
        )
    return launches, ranges


def _stream(device: object, stream: object) -> str:
    return f"GPU {device}, stream {stream}"


# What an activity is -------------------------------------------------------------------------------------------------


_COMMUNICATES = re.compile(r"nccl|gloo:|modelled_transfer", re.IGNORECASE)  # modelled_transfer: bench/paced.py's kernel
_CODEC = re.compile(r"yafsdp_cc::(encode|decode)")
_UNIT = re.compile(r"(?:Ya)?FSDP::(\w+)(?: \((.*)\))?$")
_SENDS: dict[str, Kind] = {
    "gather": "all-gather",
    "all_gather": "all-gather",
    "reduce": "reduce",
    "replicated": "reduce",
    "post_backward_reduce": "reduce",
}
"""Kind of communication by the word after ``YaFSDP::`` or ``FSDP::`` in the name of a range."""
_UPDATES = ("Optimizer.step#", "YaFSDP::step")
"""Beginnings of the names of optimizers' ranges: torch's for Kineto, this package's for NVTX."""
_NAMED: tuple[tuple[str, Kind], ...] = (("allgather", "all-gather"), ("reduce", "reduce"))


def _labelled(launches: Iterable[_Launch], ranges: Iterable[_Range]) -> Iterable[Activity]:
    """Yield an activity for each launch, with its kind and unit by the ranges open at the time of the launch."""
    by_thread: dict[Hashable, list[_Range]] = defaultdict(list)
    for each in ranges:
        if each.name.startswith(_UPDATES) or _UNIT.match(each.name):
            by_thread[each.thread].append(each)
    for waiting in by_thread.values():
        waiting.sort(reverse=True)
    opened: dict[Hashable, list[_Range]] = defaultdict(list)
    for launch in sorted(launches, key=lambda launch: launch.time):
        waiting, inside = by_thread[launch.thread], opened[launch.thread]
        while waiting and waiting[-1].start <= launch.time:
            inside.append(waiting.pop())
        inside[:] = [each for each in inside if each.end >= launch.time]
        kind, group = _label(launch.name, [each.name for each in reversed(inside)])
        yield Activity(*launch[:4], kind, group, launch.shape)


def _label(name: str, inside: list[str]) -> tuple[Kind, str]:
    """Return the kind of an activity, and its unit, by its name and the ranges around its launch, inner first."""
    around = [(match[1], match[2] or match[1]) for match in map(_UNIT.match, inside) if match]
    sends = next(((_SENDS[kind], unit) for kind, unit in around if kind in _SENDS), None)
    if _COMMUNICATES.search(name):
        plain = name.replace("_", "").lower()
        return sends or (next((kind for part, kind in _NAMED if part in plain), "other communication"), "")
    unit = next((unit for kind, unit in around if kind in (*_SENDS, "forward", "backward")), "")
    if name.startswith(("Memcpy", "Memset")):
        return "copy", unit
    if codec := _CODEC.search(name):
        return ("encode" if codec[1] == "encode" else "decode"), unit
    if any(each.startswith(_UPDATES) for each in inside):
        return "optimizer", ""
    return "compute", unit
