"""What ``compression="auto"`` chooses over links of many speeds, and what that costs beside fixed choices.

    python bench/auto.py                                             # about ten minutes
    python bench/auto.py --bandwidths 1gbit --rounds 5 --steps 4

The demo's model (ten million parameters) with AdamW in bf16 on two ranks, each in a network namespace of its own; 256
tokens a rank and step; weights are kept after the forward, so that a backward sends gradients alone. Measured as by
``python -m bench --suite train``. *Theory* is how many units have to be encoded at least, found by trying every choice
on what ``auto`` has measured.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import train
from bench.common import about, names, save
from bench.contestants import trains
from yafsdp_cc.compression.autotune import TOLERANCE, CodecAutotuner, backward_seconds
from yafsdp_cc.fsdp2.module import require_state
from yafsdp_cc.table import table
from yafsdp_cc.tools.netlab import Lab, Unavailable

if TYPE_CHECKING:
    from bench.trainers import Trainer

SEQUENCES = 2


def choice_of(trainer: Trainer) -> dict[str, Any] | None:
    """Return what was chosen, and the least number of units that have to be encoded."""
    state = require_state(trainer.model)
    tuner = CodecAutotuner.of(state)
    if tuner is None or tuner.last is None:
        return None
    costs = tuner.last.costs
    seconds = {
        picks: backward_seconds(costs, picks)
        for picks in itertools.product(*[range(len(group.codecs)) for group in costs])
    }
    limit = min(seconds.values()) + TOLERANCE * tuner.last.step
    theory = min(sum(map(bool, picks)) for picks, taken in seconds.items() if taken <= limit)
    return {"chosen": dict(state.context.counters.chosen), "why": state.context.counters.why, "theory": theory}


def show(bandwidth: str, figures: dict[str, Any]) -> None:
    choice, exact = figures["auto"]["inspected"], figures["exact"]
    best = min((each for name, each in figures.items() if name != "auto"), key=lambda each: each["seconds"])
    encoded = [f"{name} {codec}" for name, codec in choice["chosen"].items() if codec != "fp32"]
    print(f"\n{bandwidth}: {len(encoded)} of {len(choice['chosen'])} units encoded, theory {choice['theory']}")
    print(f"  {', '.join(encoded)}\n  {choice['why']}")
    rows = (
        (
            name,
            f"{1e3 * each['seconds']:.1f}",
            f"{each['seconds'] / best['seconds']:.3f}",
            f"{each['processor_ms']:.1f}",
            f"{each['processor_ms'] / exact['processor_ms']:.3f}",
        )
        for name, each in figures.items()
    )
    print(table(("", "ms per step", "of the best fixed", "processor ms", "of exact"), *rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bandwidths", type=names, default=["unshaped", "2gbit", "1gbit", "500mbit", "100mbit"])
    parser.add_argument("--stage", type=int, default=2, help="zero_stage of all contestants")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of each turn")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    contestants = {"exact": trains("ours", zero_stage=options.stage)}
    for gradients in ("int8", "int4", "auto"):
        contestants[gradients] = trains("ours", zero_stage=options.stage, gradients=gradients)
    results: dict[str, Any] = {"about": about(["python", "bench/auto.py", *sys.argv[1:]])}
    try:
        for bandwidth in options.bandwidths:
            with Lab(options.ranks, bandwidth=bandwidth) as lab:
                args = (lab, contestants, [bandwidth], options.rounds, options.steps, SEQUENCES, choice_of)
                results |= train.measure(*args)
            show(bandwidth, results[bandwidth])
            save(options.json, results)
    except Unavailable as reason:
        print(f"skipped, {reason}")


if __name__ == "__main__":
    main()
