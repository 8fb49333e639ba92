"""One self-contained page of HTML about runs and traces, and the same figures as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from math import nan
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from yafsdp_cc.tools.report import charts
from yafsdp_cc.tools.report.overlap import Overlap, Shared, Slowed, joined
from yafsdp_cc.tools.report.trace import COMMUNICATION, Kind, UnreadableError

Rows = list[list[str]]
"""A table; the first row is its head, the first column has names."""


Count: TypeAlias = Annotated[int, Field(ge=0, le=1 << 53)]
Figure: TypeAlias = Annotated[float, Field(ge=-1e300, le=1e300)] | None
"""A figure of a table; None is a number that was not finite."""


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Start(_Line):
    """The ``start`` line of a run, or of a run that resumes it: the fields that a report uses."""

    event: Literal["start"]
    first_step: Count = 0
    ranks: Count = 1
    plan: str = ""
    device: str = ""
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


_LINE: TypeAdapter[Start | Record] = TypeAdapter(Annotated[Start | Record, Field(discriminator="event")])


class Run(NamedTuple):
    """The records that ``yafsdp_cc.Metrics`` has written of a run."""

    name: str
    start: Start
    records: list[Record]
    """Records in order; steps that were made again after a restart occur once."""
    cut_off: list[int]
    """Numbers of lines that are left out, because the run was killed while it wrote them."""

    def curve(self, key: str, against: str = "step", scale: float = 1.0) -> list[tuple[float, float]]:
        """Return the values of a key, each with its step or another key's value."""
        found = [(getattr(each, against), getattr(each, key)) for each in self.records]
        return [(x / scale, y) for x, y in found if y is not None]

    def usual(self, key: str) -> float | None:
        """Return the median of a key over all reports but the first, whose steps make buffers."""
        values = [y for _, y in self.curve(key)]
        return median(values[1:] or values) if values else None

    def parts(self) -> dict[str, float]:
        """Return the usual seconds of the parts of a step that are known, by name."""
        return {each: self.usual(f"{each}_s") or 0.0 for each in ("forward", "backward", "optimizer")}

    def last(self, key: str) -> Any:
        """Return the last value of a key, NaN if it was not finite; None if there is none."""
        for each in (*reversed(self.records), self.start):
            if key in each.model_fields_set:
                value = getattr(each, key)
                return nan if value is None else value
        return None


def read_run(path: Path) -> Run:
    """Read a ``metrics.jsonl``.

    A killed run leaves half a line, which is skipped: at the end, or before the start of the resumed run.

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
    """Return the figures of runs, a row for each."""
    megabytes = ["MB sent/step", "MB owned", "MB planned", "MB at most"]
    head = ["run", "ranks", "steps", "loss", "val loss", "tokens/s", "ms/step", *megabytes]

    def row(run: Run) -> list[str]:
        step, sent = run.usual("s_per_step"), [run.usual(f"{each}_bytes_per_step") for each in ("gathered", "reduced")]
        losses = run.last("loss"), run.last("val_loss")
        held = map(run.last, ("owned_bytes", "planned_bytes", "peak_memory_bytes"))
        return [
            run.name,
            _cell(run.last("ranks")),
            _cell(run.last("step")),
            *(_cell(loss, ".4f" if loss is None or abs(loss) < 1e6 else ".4g") for loss in losses),
            _cell(run.usual("tokens_per_s"), ",.0f"),
            _cell(step and 1e3 * step, ",.1f"),
            _cell(None if None in sent else sum(each or 0 for each in sent) / 1e6, ",.2f"),
            *(_cell(value and value / 1e6, ",.1f") for value in held),
        ]

    return [head, *map(row, runs)]


def run_verdict(runs: Sequence[Run]) -> list[str]:
    """Return what differs between runs, the largest ratio first; of one run, what takes most of its step."""
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


def run_section(runs: Sequence[Run]) -> str:
    """Draw runs side by side."""

    def curves(key: str, **how: Any) -> dict[str, list[tuple[float, float]]]:
        return {run.name: run.curve(key, **how) for run in runs}  # runs without points, too, keep their colour

    def times(run: Run) -> dict[str, float]:
        parts = run.parts()
        parts["other"] = max(0.0, (run.usual("s_per_step") or 0.0) - sum(parts.values()))
        return {name: 1e3 * seconds for name, seconds in parts.items()}

    def sent(run: Run) -> dict[str, float]:
        sizes = {"weights": run.usual("gathered_bytes_per_step"), "gradients": run.usual("reduced_bytes_per_step")}
        return {name: (size or 0) / 1e6 for name, size in sizes.items()}

    held = {"planned": "planned_bytes", "owned": "owned_bytes", "in use at most": "peak_memory_bytes"}
    memory = {
        f"{run.name}, {name}": {name: run.last(key) / 1e6}
        for run in runs
        for name, key in held.items()
        # a process's memory on a CPU is mostly not the model's
        if run.last(key) and (key != "peak_memory_bytes" or run.start.device == "cuda")
    }
    seconds = {"against": "seconds", "scale": 60.0}
    pictures = (
        charts.lines("Loss against steps", "steps", "loss", curves("loss")),
        charts.lines("Loss against wall-clock", "minutes", "loss", curves("loss", **seconds)),
        charts.lines("Validation loss against wall-clock", "minutes", "loss", curves("val_loss", **seconds)),
        charts.lines("Speed", "steps", "tokens/s", curves("tokens_per_s"), from_zero=True),
        charts.bars("Time of a step (median)", "milliseconds", {run.name: times(run) for run in runs}),
        charts.bars("Sent by a rank in a step (median)", "MB", {run.name: sent(run) for run in runs}),
        charts.bars("Memory of a rank against the plan", "MB", memory),
    )
    plans = "".join(
        f"<details><summary>Plan of {escape(run.name)}</summary><pre>{escape(run.start.plan)}</pre></details>"
        for run in runs
        if run.start.plan
    )
    shown = f"{table_html(run_table(runs))}<div class=charts>{''.join(pictures)}</div>{plans}"
    return f"<section><h2>Runs</h2>{shown}</section>"


# Traces --------------------------------------------------------------------------------------------------------------


def trace_tables(found: Overlap) -> dict[str, Rows]:
    """Return the figures of a trace as tables by title; times are milliseconds of a step."""
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


def trace_section(found: Overlap) -> str:
    """Draw a trace: tables, the parts of a step, and the first step as a timeline of the streams."""
    trace, parts = found.trace, {name: time / 1e3 / found.trace.steps for name, time in found.parts.items()}
    step = (trace.end - trace.start) / trace.steps
    lanes: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in sorted(trace.activities, key=lambda each: each.lane):
        begin, end = max(each.start - trace.start, 0.0), min(each.end - trace.start, step)
        if begin < step:
            lanes.setdefault(each.lane, {}).setdefault(each.kind, []).append((begin / 1e3, end / 1e3))
    gap = step / 1e3 / 2000  # ms: a picture cannot show smaller gaps between spans
    drawn = {name: {kind: joined(spans, gap) for kind, spans in lane.items()} for name, lane in lanes.items()}
    shown = (f"<div><h3>{escape(title)}</h3>{table_html(rows)}</div>" for title, rows in trace_tables(found).items())
    tables = f"<div class=pair>{''.join(shown)}</div>"
    pictures = charts.timeline("The first step", step / 1e3, COLOURS, drawn) + charts.bars(
        "Where a step's time goes, each moment counted once", "milliseconds", {"step": parts}, COLOURS
    )
    steps = f"{trace.steps} step{'s' * (trace.steps > 1)} of {step / 1e3:,.2f} ms"
    return f"<section><h2>{escape(trace.title)}</h2><p>{steps}</p><div class=charts>{pictures}</div>{tables}</section>"


COLOURS = {kind: place for place, kind in enumerate(get_args(Kind))}
COLOURS |= {"codec": COLOURS["encode"], "exposed communication": COLOURS["all-gather"], "idle": len(COLOURS)}


def _plain(kernel: str) -> str:
    """Return a kernel's name without template arguments and return type."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0][:60]


# The page ------------------------------------------------------------------------------------------------------------


STYLE = (files("yafsdp_cc.tools.report") / "style.css").read_text(encoding="utf-8")


def page(sections: Iterable[str], source: str = "", verdict: Sequence[str] = ()) -> str:
    """Return the whole page, which begins with its ``source``, the date and command, and the verdict."""
    colours = "".join(
        f"rect.c{i}, path.c{i}, circle.c{i}, .band.c{i} {{ fill: var(--c{i}); }} "
        f".line.c{i}, .band.c{i} {{ stroke: var(--c{i}); }} i.c{i} {{ background: var(--c{i}); }}\n"
        for i in range(9)
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    told = "".join(f"<p>{escape(line)}</p>" for line in verdict)
    top = f"<h1>Report</h1><p class=source>{escape(source)}</p>" + (f"<div class=verdict>{told}</div>" if told else "")
    style = f"<title>yafsdp-cc report</title><style>{STYLE}{colours}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}{style}</head><body>{top}{"".join(sections)}</body></html>\n'


def table_html(rows: Rows) -> str:
    """Return a table that scrolls horizontally if the page is too narrow."""
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    hint = "<p class=hint>swipe the table to see all columns →</p>" if len(head) > 3 else ""
    return f"{hint}<div class=scroll><table><tr>{cells}</tr>{lines}</table></div>"


def _cell(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)
