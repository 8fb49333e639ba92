"""Suite ``slow``: loss against wall-clock for every contestant at every bandwidth.

The loss after a number of steps does not depend on the network, and the time of a step does not depend on the loss. So
each contestant trains once, on an unshaped network, for its loss by steps; and steps of each are timed at each
bandwidth by the suite ``train``. (For ``auto`` the loss of int4 is taken, an upper bound, as its codecs depend on the
network.) A contestant whose steps have several phases is timed in each of them, and its whole run is composed of as
many steps of each phase as its optimizer makes.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench import train
from bench.common import times
from bench.contestants import LEARNS_AS, PHASES, TRAINING
from bench.trainers import make
from yafsdp_cc.optim.one_bit import OneBitOptimizer
from yafsdp_cc.table import table
from yafsdp_cc.tools.demo import data
from yafsdp_cc.tools.demo.train import CLIP, LEARNING_RATE, VALIDATION_WINDOWS, learning_rate, loss_of
from yafsdp_cc.tools.netlab.links import UNSHAPED

if TYPE_CHECKING:
    from pathlib import Path

    from bench.trainers import Trainer
    from yafsdp_cc.tools.netlab import Lab

POINTS = 20
"""Number of points of each curve."""


def run(
    names: Sequence[str],
    ranks: Sequence[int] = (2, 4),
    bandwidths: Sequence[str] = ("100mbit", "500mbit", "1gbit", UNSHAPED),
    rounds: int = 3,
    steps: int = 300,
    delay_ms: float = 0.0,
    picture: Path | None = None,
    learnt: Path | None = None,
) -> dict[str, Any]:
    """Measure, print, and draw a picture for each number of ranks; return figures by ranks.

    Args:
        learnt: file of an earlier run, from which losses of the same number of steps are taken.

    Raises:
        ValueError: no such network is possible, or ``learnt`` is no such file; nothing was started.
        ModuleNotFoundError: a picture needs matplotlib; nothing was started.
        Unavailable: this machine cannot have a network of its own.
    """
    if picture is not None and find_spec("matplotlib") is None:
        raise ModuleNotFoundError("a picture is drawn by matplotlib: pip install matplotlib")
    labs = train.make_labs(ranks, bandwidths, delay_ms)
    earlier = {} if learnt is None else _losses_in(learnt)
    found = {}
    for count, lab in labs.items():
        with lab:
            figures = measure(lab, names, bandwidths, rounds, steps, earlier.get(str(count), {}))
        found[str(count)] = figures
        for bandwidth, runs in figures["runs"].items():
            print(f"\n{count} ranks at {bandwidth}, {steps} steps; ratios are to fsdp2 bf16, MB are of the whole run")
            print(slow_table(runs), flush=True)
        if picture is not None:
            path = picture if len(labs) == 1 else picture.with_stem(f"{picture.stem}-{count}-ranks")
            draw(path, f"{count} ranks, {steps} steps of 1,024 tokens per rank", figures["runs"])
            print(f"drawn in {path}", flush=True)
    return found


def _losses_in(path: Path) -> dict[str, Any]:
    try:
        return {count: figures["learnt"] for count, figures in json.loads(path.read_text())["slow"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what `python -m bench --suite slow --json {path}` writes: {error!r}") from None


def measure(
    lab: Lab,
    names: Sequence[str],
    bandwidths: Sequence[str],
    rounds: int,
    steps: int,
    earlier: Mapping[str, Any],
) -> dict[str, Any]:
    """Return losses of every contestant, its step times and its whole runs, of a started network."""
    learnt = {}
    for name in names:
        if name in earlier and len(earlier[name]["phases"]) == steps:
            learnt[name] = earlier[name]
            continue
        (learnt[name], *_) = lab.run(_learn, LEARNS_AS.get(name, name), steps, timeout=train.TIMEOUT)
        last = list(learnt[name]["losses"].values())[-1]
        print(f"{name}: loss {last:.4f} after {steps} steps", file=sys.stderr)
    timed = dict.fromkeys(phase for name in names for phase in (name, *PHASES.get(name, {}).values()))
    figures = train.measure(lab, {name: TRAINING[name] for name in timed}, bandwidths, rounds, 1)
    return {
        "learnt": learnt,
        "timed": figures,
        "runs": {
            bandwidth: {name: _run(learnt[name], name, each) for name in names} for bandwidth, each in figures.items()
        },
    }


def _learn(name: str, steps: int) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)  # torch warns of names that its other users import
    torch.manual_seed(0)
    return learn(make(TRAINING[name], steps=steps), steps, train.SEQUENCES, -(-steps // POINTS))


def learn(trainer: Trainer, steps: int, sequences: int, validate_every: int, seed: int = 0) -> dict[str, Any]:
    """Train on the demo's text with the demo's learning-rate schedule, scaled to the optimizer's own rate. A
    collective.

    Args:
        sequences: number of sequences, of ``train.LENGTH`` tokens, in the batch of a rank.
        validate_every: number of steps between validations.
        seed: seed of the batches.

    Returns:
        Losses on held-out text in nats per byte by step, the phase of each step, and the seconds that all took.
    """
    rank, ranks, length = dist.get_rank(), dist.get_world_size(), train.LENGTH
    text, draws = data.read(None), torch.Generator("cpu").manual_seed(seed * ranks + rank)
    held_out = data.spread_windows(text.held_out, VALIDATION_WINDOWS, length, rank, ranks)
    losses: dict[int, float] = {}
    phases = []
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    start = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(text.train) - length, (sequences,), generator=draws, device="cpu")
        optimizer = trainer.optimizer
        phases.append(optimizer.phase.value if isinstance(optimizer, OneBitOptimizer) else "")
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = learning_rate(step, steps) / LEARNING_RATE * rate
        trainer.step(data.windows(text.train, starts, length), clip=CLIP)
        if step == steps or step % validate_every == 0:
            with torch.no_grad():
                loss = loss_of(trainer.model, held_out)
            dist.all_reduce(loss)
            losses[step] = loss.item() / dist.get_world_size()
    return {"losses": losses, "phases": phases, "seconds": time.perf_counter() - start}


def _run(learnt: dict[str, Any], name: str, timed: dict[str, Any]) -> dict[str, Any]:
    """Return seconds and loss at each point of a whole run, and the time and bytes of the run."""
    as_timed = [PHASES.get(name, {}).get(phase, name) for phase in learnt["phases"]]
    seconds = [timed[each]["seconds"] for each in as_timed]
    curve = [(sum(seconds[: int(step)]), loss) for step, loss in learnt["losses"].items()]
    baseline = timed.get(TRAINING[name].baseline)
    return {
        "curve": curve,
        "seconds": sum(seconds),
        "times_as_fast": baseline and len(seconds) * baseline["seconds"] / sum(seconds),
        "sent_bytes": sum(timed[each]["sent_bytes"] for each in as_timed),
        "loss": curve[-1][1],
        "steady_seconds": timed[name]["seconds"],
    }


def slow_table(runs: Mapping[str, Any]) -> str:
    """Return a row for each contestant at one bandwidth."""
    return table(
        ("", "held-out loss", "minutes", "faster", "MB sent", "s/step, settled"),
        *(
            (
                name,
                f"{each['loss']:.4f}",
                f"{each['seconds'] / 60:.2f}",
                times(each["times_as_fast"]),
                f"{each['sent_bytes'] / 1e6:.1f}",
                f"{each['steady_seconds']:.3f}",
            )
            for name, each in runs.items()
        ),
    )


def draw(path: Path, title: str, runs: dict[str, dict[str, Any]]) -> None:
    """Draw held-out loss against minutes, a panel for each bandwidth; the file's suffix gives the format."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    rcParams["svg.hashsalt"] = title  # fixed, so that the same figures give the same picture
    figure = Figure(figsize=(4 * len(runs), 3.6), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for panel, (bandwidth, curves) in zip(panels, runs.items(), strict=True):
        for name, each in curves.items():
            points = each["curve"][len(each["curve"]) // 10 :]  # the axis leaves out the fall from the loss of chance
            minutes, losses = zip(*((seconds / 60, loss) for seconds, loss in points), strict=True)
            panel.plot(minutes, losses, label=name, linewidth=2.4 if name.startswith("ours") else 1.2)
        panel.set(title=bandwidth, xlabel="minutes", xscale="log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats per byte")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
