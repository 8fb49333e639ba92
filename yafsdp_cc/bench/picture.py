"""The picture of suite ``slow``: held-out loss against wall-clock, a panel for each bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_FIRST = 0.1
"""Of a run that nothing is drawn of: where losses fall from those of chance."""


def draw(path: Path, title: str, runs: dict[str, dict[str, Any]]) -> None:
    """Write the curves of ``runs``, by bandwidth and contestant, as an image of the kind that the name ends with.

    Raises:
        ModuleNotFoundError: there is no matplotlib.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    rcParams["svg.hashsalt"] = title  # the same picture from the same figures
    figure = Figure(figsize=(4 * len(runs), 3.6), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for panel, (bandwidth, curves) in zip(panels, runs.items(), strict=True):
        for name, run in curves.items():
            points = run["curve"][int(_FIRST * len(run["curve"])) :]
            minutes, losses = zip(*((seconds / 60, loss) for seconds, loss in points), strict=True)
            width = 2.4 if name.startswith("ours") else 1.2
            panel.plot(minutes, losses, label=name, linewidth=width)
        panel.set_title(bandwidth)
        panel.set_xlabel("minutes")
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats per byte")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
