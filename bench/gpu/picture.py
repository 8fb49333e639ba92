"""The one picture of what a flight has found: what a GPU computes and what it communicates in a step, and a table.

    python bench/gpu/picture.py bench/results/flight1.json bench/results/flight2.json --picture picture.svg
    python bench/gpu/picture.py bench/out/worlds.json --picture timeline.png          # of bench/worlds.py --json

Two lanes for each contestant, on the same scale, with what is communicated while nothing is computed in red. The table
is Markdown, on standard output; each row says whether it was *measured* or hangs on the *modelled wire*: a kernel on 16
multiprocessors that copies at a link's rate, the same for all. What no flight has found is a dash. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from yafsdp_cc.tools.report.overlap import joined, without

CONTESTANTS = {
    "fsdp2": "FSDP2",
    "ours": "this engine",
    "ours apart": "this engine, two communicators",
    "ours int8": "this engine, int8 gradients",
    "ours int8 weights": "this engine, int8 gradients and weights",
}
DRAWN = ("fsdp2", "ours", "ours int8", "ours int8 weights")
COLOURS = {"computed": "#4c72b0", "communicated": "#dd8452", "exposed": "#c44e52"}
GAP = 0.0005
"""Of a step: what is closer together is drawn as one."""
MEASURED, MODELLED = "*measured*", "*modelled wire*"

Figures = dict[str, Any]


def draw(path: Path, title: str, contestants: dict[str, Figures]) -> None:
    """Write the picture, of the kind that the name ends with."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with rc_context({"svg.hashsalt": title, "font.size": 14}):  # to be read on a phone, 400 pixels wide
        figure = Figure(figsize=(6, 2 + 0.9 * len(contestants)), layout="constrained")
        panel = figure.subplots()
        for row, (name, each) in enumerate(contestants.items()):
            communicated, computed = ([(*span,) for span in each[key]] for key in ("communicated_us", "computed_us"))
            start = min(span[0] for span in (*communicated, *computed))
            length = max(span[1] for span in (*communicated, *computed)) - start
            bars = {
                "computed": (computed, 0.4),
                "communicated": (communicated, 0.65),
                "exposed": (without(communicated, computed), 0.65),
            }
            for kind, (spans, offset) in bars.items():
                drawn = [((begin - start) / 1e3, (end - begin) / 1e3) for begin, end in joined(spans, GAP * length)]
                panel.broken_barh(drawn, (row + offset, 0.23), color=COLOURS[kind], linewidth=0)
            panel.text(0, row + 0.36, f"{CONTESTANTS.get(name, name)}: {length / 1e3:.0f} ms")
        panel.set_yticks([])
        panel.set_ylim(len(contestants), -0.1)
        panel.set_xlim(left=0)
        for side in ("top", "left", "right"):
            panel.spines[side].set_visible(False)
        panel.set(xlabel="milliseconds")
        figure.suptitle(textwrap.fill(title, 36))
        handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=12)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def row(what: str, how: str, contestants: dict[str, Figures], cell: Callable[[Figures], str]) -> list[str]:
    return [f"{what} {how}", *(cell(contestants[name]) if name in contestants else "-" for name in CONTESTANTS)]


def compared(contestants: dict[str, Figures], pairs: list[Figures], host: dict[str, Figures]) -> str:
    """Return the table."""
    alone = contestants.get("alone", {}).get("step_ms", 0.0)

    def step(each: Figures) -> str:
        bound = max(alone, each["links_ms"]) / each["step_ms"]
        return f"{each['step_ms']:.1f}" + f" · {bound:.2f}" * bool(alone)

    lines = [
        row("step, ms · of the bound", MODELLED, contestants, step),
        row("exposed wire, ms", MODELLED, contestants, lambda each: f"{each['exposed_ms']:.1f}"),
        row("GB/s that the wire reached", MODELLED, contestants, lambda each: f"{each['gb_per_s']:.1f}"),
        row("GB sent by a rank", "*counted*", contestants, lambda each: f"{each['sent_bytes'] / 1e9:.2f}"),
        row("GiB reserved", MEASURED, contestants, lambda each: f"{each['reserved_bytes'] / 2**30:.2f}"),
        row("blocks taken a step", MEASURED, contestants, lambda each: f"{each['blocks']:.0f}"),
        row("cudaMalloc in all timed steps", MEASURED, contestants, lambda each: str(each["segments"])),
        row("host, ms a step, small model, 1 rank", MEASURED, host, lambda each: f"{each['host_ms']:.1f}"),
        ["losses and weights over NCCL " + MEASURED, "-", equality(pairs), "as left", distance(pairs)],
    ]
    head = ["", *CONTESTANTS.values()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines))


def equality(pairs: list[Figures]) -> str:
    """Return in how many ways of training losses and weights of all ranks are FSDP2's to the bit."""
    same: dict[tuple[Any, ...], bool] = {}
    for each in pairs:
        if each["truth"] == "FSDP2" and each["row"].startswith("ours"):
            way = each["world"], each["policy"], each["row"]
            same[way] = same.get(way, True) and each["same_losses"] and each["same_weights"]
    return f"equal to the bit in {sum(same.values())} of {len(same)}" if same else "-"


def distance(pairs: list[Figures]) -> str:
    """Return how far int8's last loss is from FSDP2's."""
    off = [abs(each["loss"] / each["loss_of_fsdp2"] - 1) for each in pairs if each["row"] == "int8"]
    return f"loss off by {max(off):.1e}" if off else "-"


def figures_of(parts: dict[str, Figures], name: str) -> Figures:
    found: Figures = parts.get(name, {}).get("figures", {})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="flight1.json, flight2.json; or of bench/worlds.py --json")
    parser.add_argument("--case", type=int, default=0, help="its number among those of bench/worlds.py")
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    parts: dict[str, Figures] = {}
    cards = set()
    for path in options.files:
        read = json.loads(path.read_text())
        parts |= read.get("parts", {"picture": {"figures": read}})
        cards |= {read["card"]} if "card" in read else set()
    if len(cards) > 1:
        parser.error(f"of two kinds of card: {', '.join(sorted(cards))}")
    cases = list(figures_of(parts, "picture").get("cases", {}).items())
    if options.case >= len(cases):
        parser.error(f"there are {len(cases)} cases in the part 'picture'")
    title, contestants = cases[options.case]
    drawn = {name: contestants[name] for name in DRAWN if contestants.get(name, {}).get("computed_us")}
    if not drawn:
        parser.error(f"{title}: no trace of a GPU of any of {', '.join(DRAWN)}")
    draw(options.picture, ", ".join([f"One step of {title}", *cards]), drawn)
    pairs = [each | {"world": n} for n in (1, 2) for each in figures_of(parts, f"pair{n}").get("rows", ())]
    host: dict[str, Figures] = next(iter(figures_of(parts, "host").get("cases", {}).values()), {})
    print(compared(contestants, pairs, host))


if __name__ == "__main__":
    main()
