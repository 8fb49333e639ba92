"""``yafsdp-cc estimate``: the memory, traffic and time of a training job, before it runs."""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from yafsdp_cc.tools.cli.demo import positive

if TYPE_CHECKING:
    from collections.abc import Callable

    from yafsdp_cc.plan import Plan
    from yafsdp_cc.tools.estimate import Probe
    from yafsdp_cc.tools.step_time import StepTime

ABOUT = """\
Tells what one rank holds and sends, and how long a step takes, from the model's plan and one forward and backward on
tensors that have no memory: nothing is downloaded, and no weights are made. docs/estimate.md explains every figure."""

BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
FLOPS = {"gflops": 1e9, "tflops": 1e12, "pflops": 1e15}
BATCH, SEQUENCE = 1, 2048
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Row(NamedTuple):
    """The estimate for one number of ranks."""

    plan: Plan
    optimizer: int
    activations: int | None
    """Bytes of activations at the peak; None if the model came without a loss."""
    checkpointed: int
    """Number of blocks that are recomputed."""
    seconds: StepTime | None

    @property
    def memory(self) -> dict[str, int]:
        """Bytes a rank holds at the peak of a step, by name."""
        held = {**self.plan.memory, "optimizer state": self.optimizer}
        return held if self.activations is None else {**held, "activations": self.activations}

    def as_dict(self) -> dict[str, Any]:
        """Return everything in plain types, for JSON."""
        seconds = None if self.seconds is None else {**self.seconds._asdict(), "total": self.seconds.total}
        return {
            "ranks": self.plan.world * self.plan.replicas,
            "memory": self.memory,
            "peak_bytes": sum(self.memory.values()),
            "checkpointed_blocks": self.checkpointed,
            "seconds": seconds,
            "plan": self.plan.as_dict(),
        }


def main(argv: list[str]) -> int:
    """Estimate and print; return the exit status."""
    flags = parser()
    asked = flags.parse_args(argv)
    for ranks in asked.ranks:
        if ranks % asked.replicas:
            flags.error(f"--ranks {ranks} is not a multiple of --replicas {asked.replicas}")
    if asked.checkpoint == "fit" and asked.memory is None:
        flags.error("--checkpoint fit needs --memory, such as 80GiB")
    if (asked.link is None) != (asked.rate is None):
        flags.error("a step's time takes both --rate and --link")
    if asked.memory is not None and asked.checkpoint != "fit":
        flags.error("--memory is what --checkpoint fit has blocks recomputed for: name both")
    if ":" in asked.model and (asked.batch or asked.sequence):
        flags.error(f"the loss of {asked.model} has a batch of its own: leave --batch and --sequence out")

    if "" not in sys.path:
        sys.path.insert(0, "")  # so that module:factory is found in the working folder, as by python -m
    gc.disable()  # the garbage collector would scan hundreds of thousands of new objects, few of which are freed
    # only after the flags are checked: importing torch takes seconds
    from yafsdp_cc.tools.estimate import probe, subject_of

    try:
        subject = subject_of(asked.model, asked.batch or BATCH, asked.sequence or SEQUENCE)
        settings = _settings(asked)
        found = None if subject.loss is None else probe(subject, settings["mp_policy"])
        if found is None and (asked.checkpoint or asked.rate):
            flags.error(f"{asked.model} returns no loss: --checkpoint and --rate need one; see docs/estimate.md")
        rows = [_row(subject.build, ranks, asked, settings, found) for ranks in asked.ranks]
    except ValueError as error:
        flags.exit(2, f"{flags.prog}: {error}\n")
    print(_text(rows, found, asked))
    if asked.json is not None:
        asked.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    flags = argparse.ArgumentParser(prog="yafsdp-cc estimate", description=ABOUT, allow_abbrev=False)
    flags.add_argument(
        "model",
        metavar="MODEL",
        help="a folder or file with a Hugging Face config, a Hugging Face model type, module:factory, or demo",
    )
    flags.add_argument("--ranks", type=_counts, default=[8], metavar="N", help="of all machines, one or more: 8,64 (8)")
    flags.add_argument("--replicas", type=positive, default=1, metavar="N", help="how often the shards are there (1)")
    flags.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of ranks (%(default)s)")
    flags.add_argument("--batch", type=positive, metavar="N", help=f"sequences of a rank ({BATCH})")
    flags.add_argument("--sequence", type=positive, metavar="N", help=f"tokens of each ({SEQUENCE})")
    flags.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="of weights and reduces (bf16)")
    flags.add_argument("--compression", default=None, metavar="CODEC", help="of gradients: int8, int4, onebit, ...")
    flags.add_argument("--weights", default=None, metavar="CODEC", help="of weights: int8, ...")
    flags.add_argument("--zero-stage", type=int, choices=[1, 2, 3], default=3, help="what is sharded (%(default)s)")
    flags.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help="whose state (%(default)s)")
    flags.add_argument("--checkpoint", type=_checkpoint, default=0, metavar="N", help="blocks to recompute, all or fit")
    flags.add_argument("--memory", type=_quantity(BYTES), metavar="SIZE", help="of a rank, for fit: 80GiB")
    time = flags.add_argument_group("a step's time")
    time.add_argument("--rate", type=_quantity(FLOPS), metavar="RATE", help="what a rank achieves: 170tflops")
    time.add_argument("--link", type=_quantity(BITS), metavar="RATE", help="of each rank to the others: 400gbit")
    time.add_argument("--latency", type=_quantity(SECONDS), default=0.0, metavar="TIME", help="of a collective: 20us")
    time.add_argument("--hop", type=_quantity(SECONDS), default=0.0, metavar="TIME", help="more for each rank: 5us")
    out = flags.add_argument_group("files")
    out.add_argument("--json", type=Path, metavar="FILE", help="where to write everything")
    return flags


def _row(build: Callable[[], Any], ranks: int, asked: argparse.Namespace, settings: Any, found: Probe | None) -> Row:
    from yafsdp_cc.plan.report import human
    from yafsdp_cc.tools.estimate import plan_over
    from yafsdp_cc.tools.step_time import Link, events_of, step_time

    shards = ranks // asked.replicas
    plan = plan_over(build, (asked.replicas, shards) if asked.replicas > 1 else (shards,), asked.device, **settings)
    optimizer = plan.adamw_bytes if asked.optimizer == "adamw" else 0
    if found is None:
        return Row(plan, optimizer, None, 0, None)
    blocks = len(found.blocks)
    checkpointed = {"all": blocks, "fit": 0}.get(asked.checkpoint, asked.checkpoint)
    if checkpointed > blocks:
        raise ValueError(f"--checkpoint {checkpointed}: this model has {blocks} blocks")
    if asked.checkpoint == "fit":
        room = asked.memory - plan.owned_bytes - optimizer
        fewest = found.activations.fewest_checkpointed(room)
        if fewest is None:
            least = human(round(asked.memory - room) + found.activations.peak(blocks))
            raise ValueError(f"{ranks} ranks with all {blocks} blocks checkpointed take {least} each: name more ranks")
        checkpointed = fewest
    seconds = None
    if asked.rate:
        link = Link(8 / asked.link, asked.latency, asked.hop)
        seconds = step_time(events_of(plan, found.work_with(checkpointed)), shards, asked.rate, link)
    return Row(plan, optimizer, found.activations.peak(checkpointed), checkpointed, seconds)


def _settings(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``shard``."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.compression import Compression

    dtype = torch.bfloat16 if asked.precision == "bf16" else None
    compression = None
    if asked.compression or asked.weights:
        compression = Compression(asked.compression or "fp32", asked.weights)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    return {"mp_policy": policy, "compression": compression, "zero_stage": asked.zero_stage}


def _text(rows: list[Row], found: Probe | None, asked: argparse.Namespace) -> str:
    from yafsdp_cc.plan.report import human
    from yafsdp_cc.tools.table import table

    ranks = [f"{row.plan.world * row.plan.replicas:,}" for row in rows]
    plan = rows[0].plan
    names = dict.fromkeys(name for row in rows for name in row.memory)
    memory = [(f"  {name}", *(human(row.memory.get(name, 0)) for row in rows)) for name in names]
    sent = [(f"  {name}", *cells) for name, cells in _sent(rows).items()]
    lines = [f"{plan.elements:,} parameters in {plan.parameters:,} tensors and {len(plan.units)} units", ""]
    shown = [("ranks", *ranks), ("held by a rank", *[""] * len(rows)), *memory]
    shown += [("  total", *(human(sum(row.memory.values())) for row in rows))]
    shown += [("sent by a rank in a step", *[""] * len(rows)), *sent]
    if found is not None:
        blocks = len(found.blocks)
        shown += [(f"blocks of {blocks} recomputed", *(str(row.checkpointed) for row in rows))]
    if rows[0].seconds is not None:
        times = [row.seconds for row in rows if row.seconds is not None]
        shown += [("seconds of a step", *(f"{each.total:.4g}" for each in times))]
        shown += [
            (f"  {name.replace('_', ' ')}", *(f"{each._asdict()[name]:.4g}" for each in times))
            for name in times[0]._fields
        ]
        if ":" not in asked.model:  # the batch of a user's module:factory is unknown
            tokens = (asked.batch or BATCH) * (asked.sequence or SEQUENCE)
            shown += [("  tokens / s and rank", *(f"{tokens / each.total:,.0f}" for each in times))]
    lines.append(table(*shown))
    if found is not None and found.blocks:
        block = found.activations.blocks[0]
        none, every = (human(found.activations.peak(count)) for count in (0, len(found.blocks)))
        lines += [
            "",
            f"A block keeps {human(block.kept)} from its forward to its backward, {human(block.recomputed)} where it "
            f"is recomputed. Activations are {none} with no block recomputed, {every} with all.",
        ]
    return "\n".join(lines)


def _sent(rows: list[Row]) -> dict[str, list[str]]:
    from yafsdp_cc.plan.report import human

    sent = [row.plan.communication for row in rows]
    fields = ["gather_forward", "gather_backward", "reduce", "replicated", "replicas", "total"]
    cells = {name.replace("_", ", "): [getattr(each, name) for each in sent] for name in fields}
    return {name: [human(size) for size in sizes] for name, sizes in cells.items() if any(sizes)}


def _counts(text: str) -> list[int]:
    if not all(number.isdecimal() and int(number) for number in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers of ranks, such as 8 or 8,64")
    return [int(number) for number in text.split(",")]


def _checkpoint(text: str) -> str | int:
    if text in ("all", "fit"):
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: write a number of blocks, all, or fit")


def _quantity(units: dict[str, float] | dict[str, int]) -> Callable[[str], float]:
    """Return a parser of positive numbers with one of these units."""

    def read(text: str) -> float:
        matched = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
        if matched is None or not float(matched[1]):
            raise argparse.ArgumentTypeError(f"{text!r}: write a number and a unit of {', '.join(units)}")
        return float(matched[1]) * units[matched[2]]

    return read
