"""Draw what a GPU computes and what it communicates in one step.

    python bench/timeline.py bench/out/worlds.json --case 0 --picture docs/pictures/timeline.svg

From what ``bench/worlds.py --json`` has written: two bars for each contestant, on the same scale. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from yafsdp_cc.report.overlap import joined, without

COLOURS = {"computed": "#4c72b0", "communicated": "#dd8452", "exposed": "#c44e52"}
GAP = 0.0005
"""Of a step: what is closer together is drawn as one."""


def draw(path: Path, title: str, contestants: dict[str, dict[str, Any]]) -> None:
    """Write the picture, of the kind that the name ends with."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rcParams["svg.hashsalt"] = title
    figure = Figure(figsize=(12, 0.9 + 0.8 * len(contestants)), layout="constrained")
    panel = figure.subplots()
    for row, each in enumerate(contestants.values()):
        communicated, computed = ([(*span,) for span in each[key]] for key in ("communicated_us", "computed_us"))
        start = min(span[0] for span in (*communicated, *computed))
        length = max(span[1] for span in (*communicated, *computed)) - start
        bars = {
            "computed": (computed, 0.05),
            "communicated": (communicated, 0.45),
            "exposed": (without(communicated, computed), 0.45),
        }
        for kind, (spans, offset) in bars.items():
            drawn = [((begin - start) / 1e3, (end - begin) / 1e3) for begin, end in joined(spans, GAP * length)]
            panel.broken_barh(drawn, (row + offset, 0.4), color=COLOURS[kind], linewidth=0)
    panel.set_yticks([row + 0.45 for row in range(len(contestants))], list(contestants))
    panel.invert_yaxis()
    panel.set(xlabel="milliseconds", title=title)
    panel.legend(handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()], loc="upper right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figures", type=Path, help="of bench/worlds.py --json")
    parser.add_argument("--case", type=int, default=0, help="its number among them")
    parser.add_argument("--contestants", default="fsdp2,ours")
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    title, found = list(json.loads(options.figures.read_text())["cases"].items())[options.case]
    if isinstance(found, str):
        parser.error(f"{title}: {found}")
    names = options.contestants.split(",")
    if missing := [name for name in names if not found.get(name, {}).get("computed_us")]:
        parser.error(f"{title}: no trace of a GPU for {missing[0]!r}; there are {', '.join(found)}")
    draw(options.picture, title, {name: found[name] for name in names})


if __name__ == "__main__":
    main()
