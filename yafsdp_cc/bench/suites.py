"""The suites as they are asked for: measured, printed as tables as far as they have come, and returned as figures."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from yafsdp_cc.bench import loopback, report, training
from yafsdp_cc.bench import slow as slow_runs
from yafsdp_cc.bench.picture import draw
from yafsdp_cc.netlab import Lab
from yafsdp_cc.netlab.rate import UNSHAPED, Rate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def train(
    names: Sequence[str],
    ranks: Sequence[int] = (2,),
    bandwidths: Sequence[str] = ("100mbit",),
    rounds: int = 3,
    steps: int = 2,
    delay_ms: float = 0.0,
) -> dict[str, Any]:
    """Training over slow networks: figures by ranks, bandwidth and contestant.

    Raises:
        ValueError: there is no such network; nothing has been started.
        Unavailable: this machine cannot have a network of its own.
    """
    found = {}
    for count, lab in _labs(ranks, bandwidths, delay_ms).items():
        with lab:
            figures = training.measure(lab, names, bandwidths, rounds, steps)
        for bandwidth, each in figures.items():
            print(report.training_table(f"{count} ranks at {bandwidth}", each), flush=True)
        found[str(count)] = figures
    return found


def slow(
    names: Sequence[str],
    ranks: Sequence[int] = (2, 4),
    bandwidths: Sequence[str] = ("100mbit", "500mbit", "1gbit", UNSHAPED),
    rounds: int = 3,
    steps: int = 300,
    delay_ms: float = 0.0,
    picture: Path | None = None,
    learnt: Path | None = None,
) -> dict[str, Any]:
    """Loss against wall-clock over slow networks: figures by ranks, and a picture for each number of them.

    Losses in the figures of an earlier run, the file ``learnt``, are taken from there.

    Raises:
        ValueError: there is no such network, or the file is no such file; nothing has been started.
        ModuleNotFoundError: there is to be a picture, and no matplotlib; nothing has been started.
        Unavailable: this machine cannot have a network of its own.
    """
    if picture is not None and find_spec("matplotlib") is None:
        raise ModuleNotFoundError("a picture is drawn by matplotlib: pip install matplotlib")
    labs = _labs(ranks, bandwidths, delay_ms)
    before = {} if learnt is None else _learnt_in(learnt)
    found = {}
    for count, lab in labs.items():
        with lab:
            figures = slow_runs.measure(lab, names, bandwidths, rounds, steps, before.get(str(count), {}))
        found[str(count)] = figures
        for bandwidth, runs in figures["runs"].items():
            print(report.slow_table(f"{count} ranks at {bandwidth}, {steps} steps", runs), flush=True)
        if picture is not None:
            path = picture if len(labs) == 1 else picture.with_stem(f"{picture.stem}-{count}-ranks")
            draw(path, f"{count} ranks, {steps} steps of 1,024 tokens per rank", figures["runs"])
            print(f"drawn in {path}", flush=True)
    return found


def _learnt_in(path: Path) -> dict[str, Any]:
    """What contestants have learnt in a run whose figures these are, by ranks."""
    try:
        return {count: figures["learnt"] for count, figures in json.loads(path.read_text())["slow"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what `yafsdp-cc bench --suite slow --json {path}` writes: {error!r}") from None


def _labs(ranks: Sequence[int], bandwidths: Sequence[str], delay_ms: float) -> dict[int, Lab]:
    """Those of so many ranks, by their number, once it is known that there are such networks."""
    for bandwidth in bandwidths:
        Rate.parse(bandwidth)
    if min(ranks) < 2:
        raise ValueError(f"ranks={min(ranks)}: nothing crosses a network among fewer than 2")
    return {count: Lab(count, delay_ms=delay_ms) for count in ranks}


def exchanges(
    names: Sequence[str], ranks: Sequence[int] = (2, 4), rounds: int = 7, sizes: Sequence[int] = loopback.SIZES
) -> dict[str, Any]:
    """Sums and gathers by themselves: figures by backend, ranks, bytes of the buffer and contestant.

    Raises:
        ValueError: a buffer cannot be divided among so many; nothing has been started.
    """
    for count in ranks:
        if count not in loopback.RANKS:
            raise ValueError(f"ranks={count}: buffers are divided among {', '.join(map(str, loopback.RANKS))}")
    found: dict[str, Any] = {}
    for backend in ("gloo", "nccl"):
        for count in ranks:
            if backend == "nccl" and (reason := loopback.why_no_nccl(count)):
                print(f"\n{reason}", flush=True)
                continue
            figures = loopback.measure(names, count, rounds, sizes, backend)
            print(report.exchanges_table(f"{count} ranks, {backend}", figures), flush=True)
            found.setdefault(backend, {})[str(count)] = figures
    return found
