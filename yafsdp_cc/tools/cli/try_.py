"""``yafsdp-cc try``: a user's script under several settings for some steps, in one table, with a recommendation.

Each run is a ``yafsdp-cc launch`` of its own, whose ranks ``yafsdp_cc.tools.trial`` watches and ends. Settings take
turns, so that a machine that slows down slows all of them; a time is the median of the steps of all turns.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from yafsdp_cc.tools.bench.common import table
from yafsdp_cc.tools.cli.demo import positive
from yafsdp_cc.tools.cli.profile import own_flags
from yafsdp_cc.tools.report.overlap import measure
from yafsdp_cc.tools.report.trace import UnreadableError, read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NO_CODEC = {"compression.gradients": "fp32"}
ONE_BIT = {"compression.gradients": "onebit", "compression.weights": "ternary", "compression.residual": "int8"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "exact": NO_CODEC,
    "bf16": {**NO_CODEC, "precision.param": "bf16"},
    "int8": {"compression.gradients": "int8", "compression.weights": "int8"},
    "OneBitAdam": {**ONE_BIT, "shard.reshard_after_forward": False},
}
"""Settings of each row of the table, the simpler one first; ``fsdp2`` is by torch's own ``fully_shard``."""
FIRST_ROUND = 0.6
"""Share of the time that the first round may take, whose steps are for the loss, too."""
SHORT = 2
"""Number of steps before those that are timed, in later rounds."""
ABOUT = """\
Runs a training script under several settings, each in processes of its own, ends it after some optimizer steps and
prints one table: fsdp2 (torch's own fully_shard, where the script calls fully_shard, ours or torch's), exact, bf16,
int8, OneBitAdam (where its optimizer is Adam or AdamW). The script is not changed; it writes what it writes in its
first steps. The recommended setting is the fastest whose loss is near that of exact. Settings take turns."""


@dataclass
class Row:
    """What is known of a setting."""

    name: str
    reason: str = ""
    """Why there are no figures, or no more of them."""
    losses: list[float | None] = field(default_factory=list)
    """Losses of the first turn's steps, means over the ranks."""
    repeated: list[float | None] = field(default_factory=list)
    """Losses of the second turn's steps."""
    turns: list[list[float]] = field(default_factory=list)
    """Seconds of the timed steps of each turn."""
    exposed: list[float] = field(default_factory=list)
    """Share of the recorded step of each turn in which rank 0 communicates and does not compute."""
    sent: int = 0
    planned: int = 0
    peak: int = 0

    @property
    def seconds(self) -> float:
        return median(each for turn in self.turns for each in turn)

    @property
    def spread(self) -> tuple[float, float]:
        """The fastest and the slowest turn's median seconds."""
        middles = [median(turn) for turn in self.turns]
        return min(middles), max(middles)


def main(argv: list[str]) -> int:
    """Try the settings and print the table; return 0, or 1 if there is no setting to recommend."""
    parser = argparse.ArgumentParser(
        prog="yafsdp-cc try",
        usage="%(prog)s [flags below] [flags of yafsdp-cc launch] script.py ...",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--settings", default=",".join(SETTINGS), metavar="NAMES", help="some of them (%(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="optimizer steps for the loss (%(default)s)")
    parser.add_argument("--timed", type=positive, default=8, help="steps that are timed in a turn (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each setting, at most (%(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="in which it ends, about (%(default)s)")
    near = "by which the loss may be above that of exact (%(default)s)"
    parser.add_argument("--within", type=float, default=0.5, metavar="PERCENT", help=near)
    rate = "of the links between ranks, such as 100mbit; steps for the loss are not slowed down"
    parser.add_argument("--bandwidth", metavar="RATE", help=rate)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/try"), help="folder for logs and figures (%(default)s)"
    )
    asked, rest = own_flags(parser, argv)
    names = asked.settings.split(",")
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"no setting {unknown[0]!r}: there are {', '.join(SETTINGS)}")
    if not asked.minutes > 0 or asked.within < 0:
        parser.error("--minutes must be more than 0 and --within at least 0")
    # exact goes first: other settings need to know what the script calls
    order = ["exact", *(name for name in names if name != "exact")]
    rows = _Trials(asked, rest).all_rounds(order)
    shown = [rows[name] for name in SETTINGS if name in rows]
    compared = Comparison(shown, asked.within)
    _show(shown, compared)
    status = _recommend(compared, shlex.join(rest))
    chosen, _ = compared.best()
    figures = {"rows": [vars(row) for row in shown], "recommended": chosen and chosen.name}
    (asked.output / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    return status


class _Trials:
    """Runs settings in turns, until the time is over."""

    def __init__(self, asked: argparse.Namespace, rest: Sequence[str]) -> None:
        self._asked, self._rest = asked, rest
        self._began = time.time()
        self._ends = self._began + 60 * asked.minutes
        self._steps, self._timed = asked.steps, max(2, asked.timed)
        self._known: dict[str, Any] = {}
        """Figures of rank 0 in the first run, which is exact."""
        self._hopeless = ""
        """Why no setting makes sense."""

    def all_rounds(self, names: Sequence[str]) -> dict[str, Row]:
        rows = {name: Row(name) for name in names}
        print(
            f"yafsdp-cc try: {', '.join(names)} in turns; {self._steps} steps for the loss, then up to {self._timed} "
            f"timed ones; about {self._asked.minutes:g} minutes; output of the ranks in {self._asked.output}",
            flush=True,
        )
        took = 0.0
        for turn in range(self._asked.rounds):
            left = [name for name in names if not rows[name].reason]
            start, now = turn % max(1, len(left)), time.time()
            if turn and now + took > self._ends:
                print(f"no time for round {turn + 1}: --minutes has it", flush=True)
                break
            ends = self._ends if turn else now + FIRST_ROUND * 60 * self._asked.minutes
            order = [*left[start:], *left[:start]]
            for place, name in enumerate(order):
                if not rows[name].reason and not self._left_out(rows[name]):
                    self._run(rows[name], turn, max(5.0, (ends - time.time()) / (len(order) - place)))
            took = (time.time() - now) * (0.7 if turn == 0 else 1.0)  # later rounds have fewer steps for the loss
        return rows

    def _left_out(self, row: Row) -> bool:
        """Say in the row why a setting makes no sense for this script, if so."""
        known = self._known
        row.reason = self._hopeless
        if row.name == "fsdp2" and known and known["called"] != ["fully_shard"]:
            row.reason = "left out: the script calls shard, and torch has fully_shard only"
        if row.name == "bf16" and known.get("dtypes") == ["bfloat16"]:
            row.reason = "left out: exact computes in bf16 already, as the script asks for"
        elif row.name == "bf16" and known.get("emulates_bf16"):
            row.reason = "left out: this processor has no instructions for bf16, and emulates it many times slower"
        return bool(row.reason)

    def _run(self, row: Row, turn: int, seconds: float) -> None:
        """Add one run to a row, or the reason why there is none."""
        folder = self._asked.output / f"{row.name}-{turn + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        for stale in [*folder.glob("figures-*"), *folder.glob("last*"), *folder.glob("rank0.*")]:
            stale.unlink()
        print(f"round {turn + 1}, {row.name:<10} (up to {seconds:.0f} s) ", end="", flush=True)
        began = time.time()
        wanted = {
            "folder": str(folder.absolute()),
            "began": began,
            "seconds": seconds,
            "steps": min(self._steps, SHORT) if turn else self._steps,
            "timed": self._timed,
            "settings": SETTINGS[row.name],
            "by_torch": row.name == "fsdp2",
            "one_bit": row.name == "OneBitAdam",
            "clip": self._known.get("clip"),
            "bandwidth": self._asked.bandwidth,
        }
        flags = [f"--log-dir={folder}"] + ([f"--bandwidth={self._asked.bandwidth}"] if self._asked.bandwidth else [])
        command = [sys.executable, "-m", "yafsdp_cc", "launch", *flags, *self._rest]
        environment = {**os.environ, "YAFSDP_CC_TRY": json.dumps(wanted)}
        limit = 1.3 * seconds + 10
        with (folder / "launch.log").open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                process.kill()  # ranks end with their launcher
                process.wait()
        figures = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("figures-*.json"))}
        reason = self._reason(figures, status, limit, folder)
        if not reason:
            self._add(row, list(figures.values()), folder)
        elif not turn:  # a later turn that fails takes nothing from the first
            row.reason = reason
        shown = f"{median(row.turns[-1]):.3f} s a step" if row.turns else "no step was timed"
        print(reason or f"{time.time() - began:.0f} s, {shown}", flush=True)

    def _reason(self, figures: Mapping[str, Any], status: int | None, limit: float, folder: Path) -> str:
        """Return why a run has no figures; empty if it has."""
        failed = sorted((each["time"], each["error"]) for each in figures.values() if each["error"])
        if failed:
            return " ".join(failed[0][1].splitlines()[-1].split())
        first = figures.get("figures-0")
        if status is None and first is None:
            return f"ended after {limit:.0f} s, before its last step: give it --minutes, or fewer --steps"
        if first is None or status:
            lines = [line for line in (folder / "launch.log").read_text().splitlines() if line.strip()]
            return lines[-1] if lines else f"exit status {status}, see {folder}"
        if first["ranks"] == 1:
            self._hopeless = "one rank, which sends nothing: start several, --nproc-per-node=2"
        elif not first["called"]:
            self._hopeless = "the script has called neither shard nor fully_shard"
        elif first["ended"] and first["steps"] < 5:
            self._hopeless = f"the script has made {first['steps']} optimizer steps, and at least 5 are needed"
        return self._hopeless

    def _add(self, row: Row, figures: Sequence[dict[str, Any]], folder: Path) -> None:
        first = figures[0]
        losses = [_mean_of(each) for each in zip(*(each["losses"] for each in figures), strict=False)]
        if not row.losses:
            row.losses = losses
        elif not row.repeated:
            row.repeated = losses
        if first["ended"] and len(first["timed"]) < 2:  # a script of few steps: later runs time more of them
            self._steps = min(self._steps, max(1, first["steps"] // 2))
            self._timed = max(2, first["steps"] - self._steps - 1)
        if first["timed"]:
            row.turns.append(first["timed"])
        row.planned, row.sent = first["planned"], first["sent"]
        row.peak = max(row.peak, *(each["peak"] for each in figures))
        trace = folder / "rank0.json.gz"
        if trace.exists():
            try:
                found = measure(read(trace))
            except UnreadableError:
                return
            row.exposed.append(found.communication.exposed / (found.trace.end - found.trace.start))
            if row.name == "fsdp2":
                row.sent = sent_in(trace, first["ranks"])
        self._known = self._known or first


def _mean_of(losses: Sequence[float | None]) -> float | None:
    known = [each for each in losses if each is not None]
    return mean(known) if known else None


def sent_in(trace: Path, ranks: int) -> int:
    """Return the bytes that a rank of torch's FSDP2 sends in a recorded step, by the shapes of its collectives."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    # gloo sums for a reduce-scatter by an all-reduce, which sends twice as much
    times = {"c10d::_allgather_base_": 1, "c10d::_reduce_scatter_base_": 1}
    if any(each.get("name") == "gloo:all_reduce" for each in events):
        times["c10d::_reduce_scatter_base_"] = 2
    sent = 0
    for each in events:
        if each.get("name") in times:
            (first, *_), (second, *_) = each["args"]["Input Dims"][:2]
            width = WIDTHS.get(each["args"]["Input type"][0], 4)
            sent += times[each["name"]] * min(first, second) * (ranks - 1) * width
    return sent


WIDTHS = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8}
"""Bytes of an element by the names of dtypes in traces."""


# What it tells --------------------------------------------------------------------------------------------------------


class Comparison:
    """Rows with figures beside exact.

    Args:
        rows: all rows, the simpler setting first.
        within: percent by which a loss may be above that of exact.
    """

    def __init__(self, rows: Sequence[Row], within: float) -> None:
        self.rows = [row for row in rows if row.turns and not row.reason]
        self.base = next((row for row in self.rows if row.name == "exact"), None)
        self.steps = min((len(row.losses) for row in self.rows), default=0)
        self._averaged = max(1, min(5, self.steps // 2))
        self.noise = self._noise()
        self.margin = max(within, self.noise)

    def loss(self, row: Row) -> float | None:
        """Return the mean loss of the last steps that all rows have."""
        return _mean_of(row.losses[self.steps - self._averaged : self.steps])

    def above(self, row: Row) -> float | None:
        """Return by how many percent a row's loss is above that of exact, if both are known."""
        base, loss = (None if self.base is None else self.loss(self.base)), self.loss(row)
        return None if base is None or loss is None else 100 * (loss - base) / (abs(base) or 1.0)

    def _noise(self) -> float:
        """Return by how many percent the losses of exact's first two turns differ in the last step of both."""
        if self.base is None or not self.base.repeated:
            return 0.0
        first, again = ([each for each in some if each is not None] for some in (self.base.losses, self.base.repeated))
        last = min(len(first), len(again)) - 1
        return 100 * abs(again[last] - first[last]) / (abs(first[last]) or 1.0) if last >= 0 else 0.0

    def told(self) -> str:
        """Return the losses that are compared, in words."""
        return f"mean loss of steps {self.steps - self._averaged + 1} to {self.steps}"

    def best(self) -> tuple[Row | None, list[Row]]:
        """Return the row to recommend, and those that are no slower or faster than their turns are apart.

        The fastest is looked for among rows whose loss is near that of exact, or all if that is unknown.
        """
        near = [row for row in self.rows if (above := self.above(row)) is None or above <= self.margin]
        if not near:
            return None, []
        fastest = min(near, key=lambda row: row.seconds)
        alike = [row for row in near if row.spread[0] <= fastest.spread[1]]
        return alike[0], alike


def _show(rows: Sequence[Row], compared: Comparison) -> None:
    head = ("", "s/step", "turns", "exposed", "MB sent", "MiB planned", "MiB peak", "loss", "above exact")
    lines = [head]
    for row in compared.rows:
        loss, above = compared.loss(row), compared.above(row)
        lines.append(
            (
                row.name,
                f"{row.seconds:.3f}",
                "-".join(f"{each:.3f}" for each in row.spread),
                f"{median(row.exposed):.0%}" if row.exposed else "?",
                f"{row.sent / 1e6:.2f}",
                f"{row.planned / 2**20:.1f}" if row.planned else "",
                f"{row.peak / 2**20:.0f}",
                "?" if loss is None else f"{loss:.4f}",
                "?" if above is None else f"{above:+.2f} %",
            )
        )
    print(f"\n{table(*lines)}\n")
    print(f"Loss: {compared.told()}. MB that a rank sends in a step. Exposed: of a step, communicating, not computing.")
    for row in rows:
        if row.reason:
            print(f"{row.name}: {row.reason}")


def _recommend(compared: Comparison, command: str) -> int:
    """Print the recommendation; return 0, or 1 if there is none."""
    chosen, alike = compared.best()
    if chosen is None:
        print("Nothing is recommended: no setting has both a time and a loss near that of exact.")
        return 1
    others = [row for row in compared.rows if row is not chosen]
    why = f"{chosen.seconds:.3f} s a step, the fastest" + (f" of {len(compared.rows)}" if others else "")
    if len(alike) > 1:
        apart = ", ".join(f"{row.name} {row.spread[0]:.3f}-{row.spread[1]:.3f}" for row in alike)
        why = f"the simplest of {len(alike)} that differ by less than their turns do ({apart} s a step)"
    elif compared.base is not None and chosen is not compared.base:
        why += f", {compared.base.seconds / chosen.seconds:.2f} times as fast as exact"
    above = compared.above(chosen)
    loss = "its loss is unknown" if above is None else f"its loss is {above:+.2f} % from that of exact"
    print(f"\nRecommended: {chosen.name}: {why}; {loss}.")
    if compared.noise:
        print(f"The losses of two runs of exact differ by {compared.noise:.2f} %: does the script seed what it draws?")
    for row in compared.rows:
        if row.seconds < chosen.spread[0] and (above := compared.above(row)) is not None and above > compared.margin:
            print(
                f"{row.name} is {chosen.seconds / row.seconds:.2f} times as fast, but its loss is {above:+.2f} % above."
            )
            if row.name == "OneBitAdam":
                print("Half of these steps were its warm-up, which a real run has longer: --steps 200 tells more.")
    sets = "".join(f" --set {name}={str(value).lower()}" for name, value in SETTINGS[chosen.name].items())
    if chosen.name == "fsdp2":
        print("Use it: leave torch's fully_shard as it is.")
    elif chosen.name == "OneBitAdam":
        print(
            f"Use it: yafsdp_cc.optim.OneBitAdam (docs/one-bit.md) for the optimizer, yafsdp-cc launch{sets} {command}"
        )
    else:
        print(f"Use it: yafsdp-cc launch{sets} {command}")
    return 0
