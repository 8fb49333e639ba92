"""``yafsdp-cc try``: a user's script under several settings for some steps, in one table, with a recommendation.

Each run is a ``yafsdp-cc launch`` of its own, whose ranks ``tools/trial.py`` watches and ends. Settings take
turns, so that a machine that slows down slows all of them; the time of a setting is the median over its timed steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import nan, prod
from pathlib import Path
from statistics import mean, median
from typing import Any

from yafsdp_cc.table import table
from yafsdp_cc.tools.cli.demo import positive
from yafsdp_cc.tools.cli.profile import flags_and_script, make_output, own_flags
from yafsdp_cc.tools.report.overlap import measure
from yafsdp_cc.tools.report.trace import read, read_events

SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "exact": {"compression.gradients": "fp32"},
    "bf16": {"compression.gradients": "fp32", "precision.param": "bf16"},
    "int8": {"compression.gradients": "int8", "compression.weights": "int8"},
    "OneBitAdam": {
        "compression.gradients": "onebit",
        "compression.weights": "ternary",
        "compression.residual": "int8",
        "shard.reshard_after_forward": False,
    },
}
"""Settings of the engine by row of the table, the simplest first; the row ``fsdp2`` runs torch's own engine."""
FIRST_ROUND = 0.75
"""Share of the time for all rounds that the first round may take: it makes more steps to show how the loss falls."""
SHORT, TIMED = 2, 8
"""Most steps before the timed ones, in rounds after the first; most timed steps of a run, unless scripts are short."""
PATIENCE = 30.0
"""Seconds that a run may exceed its own time before it is ended by force; half of the time left is always allowed."""
WIDTHS = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8}
"""Bytes of an element by the names of dtypes in traces."""
ABOUT = """\
Runs a training script under several settings, each in processes of its own, ends it after some optimizer steps, and
prints a table: fsdp2 (torch's own fully_shard, where the script calls fully_shard, torch's or ours), exact, bf16, int8,
OneBitAdam (in place of Adam or AdamW). The script is not changed; what it writes in its first steps, it writes.
Recommended is the fastest setting whose loss is near that of exact. Settings take turns."""


@dataclass
class Row:
    """Figures of one setting, as far as its runs have given them."""

    name: str
    reason: str = ""
    """Why the setting has no figures; "" if it has."""
    losses: list[list[float]] = field(default_factory=list)
    """Losses of each turn's steps, means over the ranks."""
    turns: list[list[float]] = field(default_factory=list)
    """Seconds of each timed step, a list for each turn of this setting."""
    exposed: list[float] = field(default_factory=list)
    """Share of each turn's recorded step in which rank 0 communicates and does not compute."""
    sent: int = 0
    """Bytes that a rank sends in a step."""
    replaced: list[str] = field(default_factory=list)
    """Sections of the user's settings, and arguments of the script (``mp_policy=``), that this setting has replaced."""
    planned: int = 0
    peak: int = 0
    """Bytes of the engine's buffers by its plan, ``planned``, and of all memory in use at the ``peak``."""

    @property
    def seconds(self) -> float:
        return median(each for turn in self.turns for each in turn)

    @property
    def spread(self) -> tuple[float, float]:
        """The median seconds of the fastest and of the slowest turn; with one turn, the median of its steps minus and
        plus twice their median deviation, which a step that other programs have held up does not widen."""
        if len(self.turns) > 1:
            middles = [median(turn) for turn in self.turns]
            return min(middles), max(middles)
        margin = 2 * median(abs(each - self.seconds) for each in self.turns[0])
        return max(0.0, self.seconds - margin), self.seconds + margin


def main(argv: list[str]) -> int:
    """Try the settings and print the table; return 0, or 1 if there is no setting to recommend."""
    parser = argparse.ArgumentParser(
        prog="yafsdp-cc try",
        usage="%(prog)s [flags below] [flags of yafsdp-cc launch] script.py ...",
        description=ABOUT,
        allow_abbrev=False,
    )
    parser.add_argument("--settings", default=",".join(SETTINGS), metavar="NAMES", help="some of them (%(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="optimizer steps for the loss (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each setting, at most (%(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="in which it ends, about (%(default)s)")
    near = "by which a loss may be above that of exact (%(default)s)"
    parser.add_argument("--within", type=float, default=0.5, metavar="PERCENT", help=near)
    rate = "of the links between ranks, such as 100mbit; steps for the loss are not slowed down"
    parser.add_argument("--bandwidth", metavar="RATE", help=rate)
    logs = "folder for logs and figures.json (%(default)s)"
    parser.add_argument("--output", type=Path, default=Path("runs/try"), metavar="FOLDER", help=logs)
    asked, script = own_flags(parser, argv)
    names = asked.settings.split(",")
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"no setting {unknown[0]!r}: there are {', '.join(SETTINGS)}")
    if not asked.minutes > 0 or not asked.within >= 0:
        parser.error("--minutes must be more than 0, and --within at least 0")
    make_output(parser, asked.output)
    trials = _Trials(asked, script)
    # the run of ``exact`` comes first: it tells which functions the script calls
    rows = trials.all_rounds(["exact", *(name for name in names if name != "exact")])
    compared = Comparison([rows[name] for name in SETTINGS if name in rows], asked.within)
    chosen, _ = compared.best()
    figures = {"rows": [asdict(row) for row in rows.values()], "recommended": chosen and chosen.name}
    (asked.output / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    _show(compared)
    return _recommend(compared, script, trials.known.get("called", ()))


class _Trials:
    """Runs the script under each setting in turns, until the time is over."""

    def __init__(self, asked: argparse.Namespace, script: Sequence[str]) -> None:
        self._asked, self._script = asked, script
        self._ends = time.time() + 60 * asked.minutes
        self._steps, self._timed = asked.steps, TIMED
        self.known: dict[str, Any] = {}
        """Figures of rank 0 in the first run, of the setting ``exact``."""
        self._hopeless = ""
        """Why no setting can have figures for this script; "" if some may."""

    def all_rounds(self, names: Sequence[str]) -> dict[str, Row]:
        rows = {name: Row(name) for name in names}
        print(
            f"yafsdp-cc try: {', '.join(names)} take turns, {self._steps} steps for the loss and then up to {TIMED} "
            f"timed ones; about {self._asked.minutes:g} minutes; logs are in {self._asked.output}",
            flush=True,
        )
        took = 0.0
        for turn in range(self._asked.rounds):
            began = time.time()
            left = [name for name in names if not rows[name].reason]
            if not left or (turn and began + took > self._ends):
                break
            ends = self._ends - (0 if turn else (1 - FIRST_ROUND) * 60 * self._asked.minutes)
            start = turn % len(left)
            order = [*left[start:], *left[:start]]
            for place, name in enumerate(order):
                rows[name].reason = self._left_out(name)
                if time.time() > self._ends:
                    rows[name].reason = rows[name].reason or ("" if turn else "no time was left for it: --minutes")
                elif not rows[name].reason:
                    self._run(rows[name], turn, max(5.0, (ends - time.time()) / (len(order) - place)))
            took = time.time() - began
        return rows

    def _left_out(self, name: str) -> str:
        """Return why a setting makes no sense for this script; "" if it may make sense."""
        if name == "fsdp2" and self.known and "fully_shard" not in self.known["called"]:
            return "left out: the script calls shard, and torch has only fully_shard"
        if name == "bf16" and self.known.get("dtypes") == ["bfloat16"]:
            return "left out: exact computes in bf16 already, as the script asks for"
        if name == "bf16" and self.known.get("emulates_bf16"):
            return "left out: this processor has no instructions for bf16 and emulates it, many times slower"
        return self._hopeless

    def _run(self, row: Row, turn: int, seconds: float) -> None:
        """Run the script once under a setting, and add the figures to its row, or the reason why there are none."""
        folder = self._asked.output / f"{row.name}-{turn + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        for stale in [*folder.glob("figures-*"), *folder.glob("last*"), *folder.glob("rank0.*")]:
            stale.unlink()
        print(f"round {turn + 1}, {row.name:<10} (up to {seconds:.0f} s) ", end="", flush=True)
        began = time.time()
        wanted = {
            "folder": str(folder.absolute()),
            "ends": began + seconds,
            "steps": min(self._steps, SHORT) if turn else self._steps,
            "timed": self._timed,
            "settings": SETTINGS[row.name],
            "row": row.name,
            "clip": self.known.get("clip"),
            "bandwidth": self._asked.bandwidth,
        }
        flags = [f"--log-dir={folder}"] + ([f"--bandwidth={self._asked.bandwidth}"] if self._asked.bandwidth else [])
        command = [sys.executable, "-m", "yafsdp_cc", "launch", *flags, *self._script]
        environment = {**os.environ, "YAFSDP_CC_TRY": json.dumps(wanted)}
        limit = max(seconds + PATIENCE, (self._ends - began) / 2)
        with (folder / "launch.log").open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
                process.terminate()  # the launcher then removes what it has made
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            finally:
                process.kill()  # ranks are ended when their launcher ends
                process.wait()
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("figures-*.json"))]
        if reason := self._reason(ranks, status, limit, folder):
            row.reason = "" if turn else reason  # a row keeps its figures if a later turn fails
        else:
            self._add(row, ranks, folder)
            reason = f"{time.time() - began:.0f} s"
            reason += f", {median(row.turns[-1]):.3f} s a step" if row.turns else ", no step was timed"
        print(reason, flush=True)

    def _reason(self, ranks: Sequence[dict[str, Any]], status: int | None, limit: float, folder: Path) -> str:
        """Return why a run has no figures; "" if it has."""
        if failed := sorted((each["time"], each["error"]) for each in ranks if each["error"]):
            return " ".join(failed[0][1].splitlines()[-1].split())
        if status is None:
            reason = f"ended by force after {limit:.0f} s, its time limit: give it --minutes"
            self._hopeless = self._hopeless if self.known else reason
            return reason
        if status or not ranks:
            printed = (folder / "launch.log").read_text(encoding="utf-8", errors="replace")
            return [f"exit status {status}", *(line.strip() for line in printed.split("\n") if line.strip())][-1]
        first = ranks[0]
        if first["ranks"] == 1:
            self._hopeless = "one rank sends nothing: start several, --nproc-per-node=2"
        elif not first["called"]:
            self._hopeless = "the script has called neither shard nor fully_shard"
        elif first["ended"] and len(first["losses"]) < 5:
            self._hopeless = f"the script has made {len(first['losses'])} optimizer steps, and it takes at least 5"
        return self._hopeless

    def _add(self, row: Row, ranks: Sequence[dict[str, Any]], folder: Path) -> None:
        first = ranks[0]
        if not self.known:
            self.known = first
            # losses are compared with those of ``exact``: if that run had time for fewer steps, others need no more
            self._steps = max(2, min(self._steps, len(first["losses"]) - len(first["timed"]) - 1))
        if first["ended"] and len(first["timed"]) < 2:  # the script has few steps: time more of them in other runs
            self._steps = min(self._steps, len(first["losses"]) // 2)
            self._timed = max(2, len(first["losses"]) - self._steps - 1)
        row.losses.append([mean(each) for each in zip(*(each["losses"] for each in ranks), strict=False)])
        row.turns += [first["timed"]] if first["timed"] else []
        row.planned, row.sent, row.replaced = first["planned"], first["sent"], first["replaced"]
        row.peak = max(row.peak, *(each["peak"] for each in ranks))
        trace = folder / "rank0.json.gz"
        if trace.exists():
            found = measure(read(trace))
            row.exposed.append(found.communication.exposed / (found.trace.end - found.trace.start))
            row.sent = sent_in(trace, first["ranks"]) if row.name == "fsdp2" else row.sent


def sent_in(trace: Path, ranks: int) -> int:
    """Return the bytes that a rank of torch's FSDP2 sends in a recorded step, by the shapes of its collectives."""
    events = read_events(trace)
    # gloo carries out a reduce-scatter as an all-reduce, which sends twice as much
    by_gloo = any(each.get("name") == "gloo:all_reduce" for each in events)
    times = {"c10d::_allgather_base_": 1, "c10d::_reduce_scatter_base_": 2 if by_gloo else 1}
    sent, replicas, width = 0.0, ranks, 4
    for each in events:
        if each.get("name") in times:
            one, whole = sorted(size for size, *_ in each["args"]["Input Dims"][:2])
            replicas, width = ranks * one // whole, WIDTHS[each["args"]["Input type"][0]]
            sent += times[each["name"]] * (whole - one) * width
        elif each.get("name") == "c10d::allreduce_":  # sums the last reduce-scatter's output over replicas
            sent += 2 * sum(map(prod, each["args"]["Input Dims"][0])) * (replicas - 1) / replicas * width
    return round(sent)


# The comparison and the recommendation --------------------------------------------------------------------------------


class Comparison:
    """Compares the rows that have figures with the row ``exact``."""

    def __init__(self, rows: Sequence[Row], within: float) -> None:
        self.left_out = [row for row in rows if row.reason or not row.turns]
        self.rows = [row for row in rows if row not in self.left_out]
        self.base = next((row for row in self.rows if row.name == "exact"), None)
        self.last = min((len(row.losses[0]) for row in self.rows), default=0)
        self.first = self.last - max(1, min(5, self.last // 2))
        """Index of the first step whose loss is compared; ``last`` is the index after the last such step."""
        self.noise = 0.0
        """Percent by which the losses of the first two turns of ``exact`` differ in the last step of both."""
        if self.base is not None and len(self.base.losses) > 1:
            *_, (once, again) = [(1.0, 1.0), *zip(*self.base.losses[:2], strict=False)]
            self.noise = 100 * abs(again - once) / (abs(once) or 1.0)
        self.margin = max(within, self.noise)

    def loss(self, row: Row) -> float:
        """Return the mean loss of a row over the last steps that all rows have made; NaN if it has no losses."""
        return mean(row.losses[0][self.first : self.last] or [nan])

    def above(self, row: Row) -> float:
        """Return by how many percent a row's loss is above that of the row ``exact``; NaN if that is unknown."""
        base = nan if self.base is None else self.loss(self.base)
        return 100 * (self.loss(row) - base) / (abs(base) or 1.0)

    def best(self) -> tuple[Row | None, list[Row]]:
        """Return the row to recommend, and all rows whose ``spread`` of seconds overlaps that of the fastest row.

        Rows whose loss is not near that of the row ``exact`` are left out, and rows that take twice the time of the
        fastest: evaluations, for instance, may widen spreads. Of the remaining rows the first is recommended.
        """
        near = [row for row in self.rows if self.above(row) <= self.margin]
        if not near:
            return None, []
        fastest = min(near, key=lambda row: row.seconds)
        alike = [row for row in near if row.spread[0] <= fastest.spread[1] and row.seconds < 2 * fastest.seconds]
        return alike[0], alike


def _show(compared: Comparison) -> None:
    lines = [("", "s/step", "turns", "exposed", "MB sent", "MiB planned", "MiB peak", "loss", "above exact")]
    for row in compared.rows:
        times = f"{row.seconds:.3f}", "-".join(f"{each:.3f}" for each in row.spread)
        exposed = f"{median(row.exposed):.0%}" if row.exposed else "?"
        memory = f"{row.planned / 2**20:.1f}" if row.planned else "-", f"{row.peak / 2**20:.0f}"
        losses = f"{compared.loss(row):.4f}", f"{compared.above(row):+.2f} %"
        lines.append((row.name, *times, exposed, f"{row.sent / 1e6:.2f}", *memory, *losses))
    print(f"\n{table(*lines)}\n")
    print(
        f"Loss: mean of steps {compared.first + 1} to {compared.last}. MB sent: by a rank in a step. Exposed: share of "
        "a step in which rank 0 communicates and does not compute."
    )
    for row in compared.left_out:
        print(f"{row.name}: {row.reason or 'no step was timed'}")


def _recommend(compared: Comparison, argv: list[str], called: Sequence[str]) -> int:
    """Print the recommendation; return 0, or 1 if there is none."""
    chosen, alike = compared.best()
    if chosen is None:
        print("\nNothing is recommended: no setting has both a time and a loss near that of exact.")
        return 1
    why = f"the fastest with {chosen.seconds:.3f} s a step"
    if len(alike) > 1:
        turns = ", ".join(f"{row.name} {row.spread[0]:.3f}-{row.spread[1]:.3f} s" for row in alike)
        why = f"the simplest of those whose times differ no more than turns do ({turns})"
    if compared.base is not None and chosen is not compared.base:
        faster = f"{compared.base.seconds / chosen.seconds:.2f} times as fast as exact"
        why += f"; {faster}, its loss {compared.above(chosen):+.2f} % above"
    print(f"\nRecommended: {chosen.name}: {why}.")
    if compared.noise > 0.01:
        print(f"Losses of two runs of exact differ by {compared.noise:.2f} %: the script draws without a seed.")
    for row in compared.rows:
        if row.seconds < chosen.spread[0] and compared.above(row) > compared.margin:
            faster = f"{chosen.seconds / row.seconds:.2f} times as fast"
            warm = "; half of these steps were its warm-up: --steps 200 tells more" if row.name == "OneBitAdam" else ""
            print(f"{row.name} is {faster}, but its loss is {compared.above(row):.2f} % above{warm}.")
    sets = [f"{each}=null" for each in chosen.replaced if not each.endswith("=")]
    if chosen is not compared.base:
        sets += [f"{name}={str(value).lower()}" for name, value in SETTINGS[chosen.name].items()]
    imports = "from yafsdp_cc import fully_shard, " if "torch" in called else ""
    changes = "torch's fully_shard, " if chosen.name == "fsdp2" else imports
    if chosen.name == "OneBitAdam":
        changes += "yafsdp_cc.optim.OneBitAdam for the optimizer (docs/one-bit.md), "
    changes += "".join(f"no {each} in the script, " for each in chosen.replaced if each.endswith("="))
    flags, script = flags_and_script(argv)
    flags += [word for each in sets for word in ("--set", each)]  # after the user's: the last --set holds
    print(f"Use {changes}yafsdp-cc launch {shlex.join([*flags, *script])}")
    return 0
