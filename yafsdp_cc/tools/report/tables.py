"""The figures of runs and traces as tables, and what to conclude from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from yafsdp_cc.tools.report.overlap import Overlap, Shared, Slowed
from yafsdp_cc.tools.report.trace import COMMUNICATION, UnreadableError

Rows = list[list[str]]
"""A table: its first row is the head, its first column has names."""


Count: TypeAlias = Annotated[int, Field(ge=0, le=1 << 53)]
Figure: TypeAlias = Annotated[float, Field(ge=-1e300, le=1e300)] | None
"""A number in a line of ``metrics.jsonl``; None stands for one that was not finite."""


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Start(_Line):
    """The ``start`` line of a run, which a run that resumes writes again: the fields that a report uses."""

    event: Literal["start"]
    first_step: Count = 0
    ranks: Count = 1
    planned_bytes: Figure = None


class Record(_Line):
    """A ``step``, ``eval`` or ``end`` line of a run: the fields that a report uses."""

    event: Literal["step", "eval", "end"]
    step: Count
    seconds: Annotated[float, Field(ge=0, le=1e300)]
    loss: Figure = None
    val_loss: Figure = None
    tokens_per_s: Figure = None
    s_per_step: Figure = None
    forward_s: Figure = None
    backward_s: Figure = None
    optimizer_s: Figure = None
    gathered_bytes_per_step: Figure = None
    reduced_bytes_per_step: Figure = None
    owned_bytes: Figure = None
    peak_memory_bytes: Figure = None


PARTS = ("forward", "backward", "optimizer")
"""Parts of a step whose seconds a run may have measured."""
_LINE: TypeAdapter[Start | Record] = TypeAdapter(Annotated[Start | Record, Field(discriminator="event")])


class Run(NamedTuple):
    """A run, by the records that ``yafsdp_cc.Metrics`` has written of it."""

    name: str
    start: Start
    records: list[Record]
    """Records in order; steps that were made again after a restart occur once."""
    cut_off: list[int]
    """Numbers of the file's lines that are left out, because the run was killed while it wrote them."""

    def curve(self, key: str) -> list[tuple[int, float]]:
        """Return the step and the value of ``key`` of each record in which it has a value."""
        return [(each.step, value) for each in self.records if (value := getattr(each, key)) is not None]

    def usual(self, key: str) -> float | None:
        """Return the median of the values of ``key`` in all reports but the first, whose steps allocate buffers."""
        values = [value for _, value in self.curve(key)]
        return median(values[1:] or values) if values else None

    def parts(self) -> dict[str, float]:
        """Return the usual seconds of each part of a step, by name; 0 for a part that was not measured."""
        return {each: self.usual(f"{each}_s") or 0.0 for each in PARTS}

    def last(self, key: str) -> Any:
        """Return the last value of ``key``, NaN if it was not finite; None if there is none."""
        for each in (*reversed(self.records), self.start):
            if key in each.model_fields_set:
                value = getattr(each, key)
                return nan if value is None else value
        return None


def read_run(path: Path) -> Run:
    """Read a ``metrics.jsonl``.

    The half line of a killed run is skipped: at the end, or before the ``start`` line of the run that resumed it.

    Raises:
        UnreadableError: ``path`` is no ``metrics.jsonl``; the message names the line.
    """
    start: Start | None = None
    records: list[Record] = []
    began = 0.0
    cut_off = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error
    for count, line in enumerate(lines, start=1):
        after = lines[count] if count < len(lines) else None
        try:
            found = _LINE.validate_json(line)
        except ValidationError as error:
            (first, *_) = error.errors()
            if first["type"] == "json_invalid" and (after is None or after.startswith('{"event": "start"')):
                cut_off += [count] if line else []
                continue
            what = 'not a JSON object with an "event" of start, step, eval or end'
            what = f"{first['loc'][-1]}: {first['msg']}" if first["loc"] else what
            raise UnreadableError(f"{path}, line {count}: {what}; is it a file of yafsdp_cc.Metrics?") from error
        if isinstance(found, Start):
            start = found
            records = [each for each in records if each.step <= found.first_step and each.event != "end"]
            began = records[-1].seconds if records else 0.0
        else:
            found.seconds += began
            records.append(found)
    if start is None or not any(each.event == "step" for each in records):
        raise UnreadableError(f"{path}: no step in it: the run has not reported yet")
    folder = path.parent if path.parent.name else path.parent.resolve()
    return Run(str(folder if path.name == "metrics.jsonl" else folder / path.name), start, records, cut_off)


# Runs ----------------------------------------------------------------------------------------------------------------


def run_table(runs: Sequence[Run]) -> Rows:
    """Return a table of the figures of runs, with a row for each run."""
    times = ["ms/step", *(f"ms {part}" for part in PARTS)]
    megabytes = ["MB sent/step", "MB owned", "MB planned", "MB at most"]
    head = ["run", "ranks", "steps", "loss", "val loss", "tokens/s", *times, *megabytes]

    def row(run: Run) -> list[str]:
        seconds = map(run.usual, ("s_per_step", *(f"{part}_s" for part in PARTS)))
        sent = [run.usual(f"{each}_bytes_per_step") for each in ("gathered", "reduced")]
        losses = run.last("loss"), run.last("val_loss")
        held = map(run.last, ("owned_bytes", "planned_bytes", "peak_memory_bytes"))
        return [
            run.name,
            _cell(run.last("ranks")),
            _cell(run.last("step")),
            *(_cell(loss, ".4f" if loss is None or abs(loss) < 1e6 else ".4g") for loss in losses),
            _cell(run.usual("tokens_per_s"), ",.0f"),
            *(_cell(each and 1e3 * each, ",.1f") for each in seconds),
            _cell(None if None in sent else sum(each or 0 for each in sent) / 1e6, ",.2f"),
            *(_cell(value and value / 1e6, ",.1f") for value in held),
        ]

    return [head, *map(row, runs)]


def run_verdict(runs: Sequence[Run]) -> list[str]:
    """Return what differs between runs, the largest ratio first; of a single run, what takes most of its step."""
    if len(runs) == 1:
        run, step, parts = runs[0], runs[0].usual("s_per_step"), runs[0].parts()
        if not step or not any(parts.values()):
            return []
        most = max(parts, key=lambda name: parts[name])
        return [f"{run.name}: {parts[most] / step:.0%} of a step of {1e3 * step:,.1f} ms is {most}: begin there."]
    (head, first, *others), told = run_table(runs), []
    for other in others:
        pairs = zip(head[3:], first[3:], other[3:], strict=True)
        figures = {name: [float(cell.replace(",", "")) for cell in cells] for name, *cells in pairs if "-" not in cells}
        ratios = [(after / before, name) for name, (before, after) in figures.items() if before > 0 and after > 0]
        ratios = sorted((pair for pair in ratios if pair[0] != 1), key=lambda pair: -max(pair[0], 1 / pair[0]))
        differs = ", ".join(f"{name} x {ratio:.2f}" for ratio, name in ratios[:5]) or "nothing that the table shows"
        told.append(f"{other[0]} against {first[0]}: {differs}.")
    return told


def trace_verdict(found: Overlap) -> list[str]:
    """Return what to change first in a traced step, and the share of the step that it would save at most."""
    whole = found.trace.end - found.trace.start
    lost = max(0.0, sum(each.lost_us for each in found.slowed))
    savings = {
        "send less, or hide it (compression, a larger batch)": found.communication.exposed,
        "keep the device busy (input pipeline, host work, small kernels)": found.parts["idle"],
        "encode less (a cheaper codec)": found.parts["codec"],
        "let kernels beside communication run undisturbed (fewer NCCL channels)": lost,
    }
    first = max(savings, key=lambda name: savings[name])
    share = savings[first] / whole
    if share < 0.03:
        return [f"Computation takes the step: nothing else costs 3 % of it (largest: {first}, {share:.1%})."]
    return [f"First: {first}. It costs {share:.0%} of a step, {savings[first] / found.trace.steps / 1e3:,.2f} ms."]


# Traces --------------------------------------------------------------------------------------------------------------


def trace_tables(found: Overlap) -> dict[str, Rows]:
    """Return the figures of a trace as tables by title; times are milliseconds in a step."""
    steps, whole = 1e3 * found.trace.steps, (found.trace.end - found.trace.start) / 100

    def row(name: str, shared: Shared) -> list[str]:
        return [name, f"{shared.total / steps:,.3f}", f"{shared.exposed / steps:,.3f}", f"{shared.exposed / whole:.1f}"]

    kinds = [row(kind, found.kinds[kind]) for kind in sorted(found.kinds, key=lambda kind: -found.kinds[kind].total)]
    kinds += [
        row("all communication", found.communication),
        row("idle", Shared(found.parts["idle"], found.parts["idle"])),
        ["the whole step", f"{100 * whole / steps:,.3f}", "", ""],
    ]
    units = [["unit", *(f"{kind} ms{suffix}" for kind in COMMUNICATION[:2] for suffix in ("", ", exposed"))]]
    for group, shared in found.groups.items():
        both = [shared.get(kind, Shared(0.0, 0.0)) for kind in COMMUNICATION[:2]]
        units.append([group or "(no unit)", *(f"{time / steps:,.3f}" for each in both for time in each)])
    tables = {
        "Time": [["kind", "ms/step", "exposed ms/step", "exposed, % of step"], *kinds],
        "Each moment counted once": [
            ["part", "ms/step", "% of step"],
            *([part, f"{time / steps:,.3f}", f"{time / whole:.1f}"] for part, time in found.parts.items()),
        ],
        "Communication by unit": units,
    }

    def lost(*kernels: Slowed) -> str:
        return f"{sum(each.lost_us for each in kernels) / steps:,.3f}"

    if found.slowdown is not None:
        rows = [["kernel", "beside", "µs alone", "µs beside", "ms lost/step"]]
        for each in found.slowed[:8]:
            times = f"{each.alone_us:,.1f}", f"{each.beside_us:,.1f}"
            rows.append([_plain(each.name), str(each.beside), *times, lost(each)])
        if others := found.slowed[8:]:
            rows.append([f"{len(others)} other kernels", "", "", "", lost(*others)])
        rows.append(["all of them", "", "", "", lost(*found.slowed)])
        tables[f"All kernels that ran both ways: {found.slowdown:.2f} times as long beside communication"] = rows
    if found.on_communication_lanes:
        rows = [[_plain(name), f"{time / steps:,.3f}"] for name, time in list(found.on_communication_lanes.items())[:8]]
        tables["On the streams that communicate, beside it"] = [["kernel", "ms/step"], *rows]
    return tables


def _plain(kernel: str) -> str:
    """Return a kernel's name without template arguments and return type."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0][:60]


def _cell(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)
