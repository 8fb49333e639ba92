"""The suites as they are asked for: measured, printed as tables as far as they have come, and returned as figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yafsdp_cc.bench import loopback, report, training
from yafsdp_cc.netlab import Lab
from yafsdp_cc.netlab.rate import Rate

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    for bandwidth in bandwidths:
        Rate.parse(bandwidth)
    if min(ranks) < 2:
        raise ValueError(f"ranks={min(ranks)}: nothing crosses a network among fewer than 2")
    labs = {count: Lab(count, delay_ms=delay_ms) for count in ranks}
    found = {}
    for count, lab in labs.items():
        with lab:
            figures = training.measure(lab, names, bandwidths, rounds, steps)
        for bandwidth, each in figures.items():
            print(report.training_table(f"{count} ranks at {bandwidth}", each), flush=True)
        found[str(count)] = figures
    return found


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
