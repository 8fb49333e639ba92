"""``yafsdp-cc estimate``: the memory, traffic and time of a training job, before it runs."""

from __future__ import annotations

import argparse
import csv
import gc
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from yafsdp_cc.config import CONFIG, RUN, Settings, read, to_environment
from yafsdp_cc.plan.report import Plan, PlannedCommunication, human
from yafsdp_cc.table import table
from yafsdp_cc.tools.cli.demo import positive
from yafsdp_cc.tools.netlab.links import BITS, quantity
from yafsdp_cc.tools.step_time import Link, StepTime, events_of, step_time

if TYPE_CHECKING:
    from yafsdp_cc.tools.estimate import Activations, Probe

ABOUT = """\
Tells what one rank holds and sends, and how long a step takes, from the model's plan and one forward and backward on
tensors that have no memory: nothing is downloaded, and no weights are made. docs/estimate.md explains every figure."""

BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
FLOPS = {"gflops": 1e9, "tflops": 1e12, "pflops": 1e15}
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
COUNTS = {"M": 10**6, "B": 10**9, "T": 10**12}
BATCH, SEQUENCE, RANKS, NODE = 1, 2048, 8, 8
REACHED = 0.4
"""Share of a GPU's peak that a step reaches by default: 0.54 and 0.31 fit two tables of bench/results."""
HIDDEN = 0.05
"""Largest share of a step that exposed communication may take and still count as hidden."""
CODECS = (("fp32", None), ("int8", None), ("int8", "int8"), ("int4", "int8"), ("onebit", "int8"))
"""Codecs of gradients and of weights to try, pair by pair, for hiding communication: the most accurate pair first."""
FROM_FLAGS = {
    "precision": ("precision.param", "precision.reduce"),
    "compression": ("compression.gradients",),
    "weights": ("compression.weights",),
    "zero_stage": ("shard.zero_stage",),
    "replicas": ("shard.replicate",),
}
"""Settings of a run file by the flag of ``yafsdp-cc estimate`` that stands for them."""


class Row(NamedTuple):
    """The estimate for one number of ranks."""

    plan: Plan
    optimizer: int
    """Bytes of the optimizer's state that the device of a rank holds."""
    in_host: dict[str, int]
    """Bytes that a rank holds in host memory, by what they hold."""
    activations: int | None
    """Bytes of activations at the peak of a step; None if the model came without a loss."""
    checkpointed: int
    headroom: dict[str, int]
    """Bytes of the device's memory to leave free, by what needs them."""
    assumed: dict[str, str]
    answers: dict[str, str | float]
    """Further figures of the job by their names in the table, such as "MFU, %"."""
    seconds: StepTime | None = None

    @property
    def ranks(self) -> int:
        return self.plan.world * self.plan.replicas

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that a rank's device holds at the peak of a step, by what they hold."""
        held = {**self.plan.memory, "optimizer state": self.optimizer}
        return held if self.activations is None else {**held, "activations": self.activations}

    def as_dict(self) -> dict[str, Any]:
        """Return all figures of the row in plain types, for JSON."""
        seconds = None if self.seconds is None else {**self.seconds._asdict(), "total": self.seconds.total}
        held = sum(self.memory.values())
        return {
            "assumed": self.assumed,
            "ranks": self.ranks,
            "memory": self.memory,
            "host_memory": self.in_host,
            "peak_bytes": held,
            "headroom": self.headroom,
            "peak_bytes_with_headroom": held + sum(self.headroom.values()),
            "checkpointed_blocks": self.checkpointed,
            "seconds": seconds,
            "answers": self.answers,
            "plan": self.plan.as_dict(),
        }


def gpus() -> dict[str, dict[str, str]]:
    """Return the rows of ``tools/gpus.csv`` by the name of the GPU; the names of the columns tell the units."""
    text = (files("yafsdp_cc.tools") / "gpus.csv").read_text(encoding="utf-8")
    return {row["name"]: row for row in csv.DictReader(text.splitlines())}


def main(argv: list[str]) -> int:
    """Estimate the training job and print its figures; return the exit status."""
    flags = parser()
    asked = flags.parse_args(argv)
    _check(flags, asked)
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that module:factory is found in the working folder, as by python -m
    gc.disable()  # the garbage collector would scan hundreds of thousands of new objects, few of which are freed
    try:
        settings = _settings(flags, asked)
        # ``shard`` reads settings from the environment variable ``RUN``, which ``yafsdp-cc launch`` sets in a real run
        with mock.patch.dict(os.environ, {RUN: to_environment(settings)}):
            rows = _rows(flags, asked, settings)
    except ValueError as error:
        flags.exit(2, f"{flags.prog}: {error}\n")
    print(_text(rows))
    if asked.json is not None:
        asked.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags of ``yafsdp-cc estimate``."""
    flags = argparse.ArgumentParser(prog="yafsdp-cc estimate", description=ABOUT, allow_abbrev=False)
    model = "a folder or file with a Hugging Face config, a Hugging Face model type, module:factory, or demo"
    flags.add_argument("model", metavar="MODEL", help=model)
    flags.add_argument("-c", "--config", metavar="FILE", help="a run file, as of yafsdp-cc launch; flags overrule it")
    flags.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="as of yafsdp-cc launch")
    flags.add_argument("--ranks", type=_counts, metavar="N", help=f"of all nodes, one or more: 8,64 ({RANKS})")
    flags.add_argument("--replicas", type=positive, metavar="N", help="how often the shards are there (1)")
    flags.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of ranks (%(default)s)")
    flags.add_argument("--batch", type=positive, metavar="N", help=f"sequences of a rank ({BATCH})")
    flags.add_argument("--sequence", type=positive, metavar="N", help=f"tokens of each ({SEQUENCE})")
    precision = "of weights and reduces (bf16; with --config the file's, or that of the parameters)"
    flags.add_argument("--precision", choices=["bf16", "fp32"], help=precision)
    flags.add_argument("--compression", metavar="CODEC", help="of gradients: int8, int4, onebit, ...")
    flags.add_argument("--weights", metavar="CODEC", help="of weights: int8, ...")
    flags.add_argument("--zero-stage", type=int, choices=[1, 2, 3], help="what is sharded (3)")
    flags.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help="whose state (%(default)s)")
    flags.add_argument("--checkpoint", type=_checkpoint, default=0, metavar="N", help="blocks to recompute, all or fit")
    flags.add_argument("--gpu", choices=sorted(gpus()), help="its memory, peak and links")
    flags.add_argument("--memory", type=_quantity(BYTES), metavar="SIZE", help="of a rank, headroom included: 80GiB")
    time = flags.add_argument_group("a step's time")
    rate = f"what a rank achieves: 170tflops ({REACHED:.0%}% of --gpu's peak)"
    time.add_argument("--rate", type=_quantity(FLOPS), metavar="RATE", help=rate)
    time.add_argument("--link", type=_quantity(BITS), metavar="RATE", help="of each rank to other nodes: 400gbit")
    within = "of each rank within its node: 3.6tbit (--gpu's)"
    time.add_argument("--within", type=_quantity(BITS), metavar="RATE", help=within)
    node = f"ranks of a node ({NODE} with --gpu or --within, otherwise 1)"
    time.add_argument("--node", type=positive, metavar="N", help=node)
    time.add_argument("--latency", type=_quantity(SECONDS), default=0.0, metavar="TIME", help="of a collective: 20us")
    time.add_argument("--hop", type=_quantity(SECONDS), default=0.0, metavar="TIME", help="more for each rank: 5us")
    days = "of the training, to be told its days: 300B"
    time.add_argument("--tokens", type=_quantity(COUNTS), metavar="N", help=days)
    flags.add_argument("--json", type=Path, metavar="FILE", help="where to write everything")
    return flags


def _check(flags: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """Complete the flags by the figures of the GPU that ``--gpu`` names; refuse flags that do not go together."""
    asked.node = asked.node or (NODE if asked.gpu or asked.within else 1)
    asked.peak = asked.memory_rate = None
    if asked.gpu:
        row = gpus()[asked.gpu]
        asked.peak, asked.memory_rate = float(row["bf16_tflops"]) * 1e12, float(row["memory_gb_per_s"]) * 1e9
        asked.memory = asked.memory or int(row["memory_mib"]) << 20
        asked.within = asked.within or float(row["within_gb_per_s"]) * 8e9
        asked.rate = asked.rate or REACHED * asked.peak
    if asked.checkpoint == "fit" and asked.memory is None:
        flags.error("--checkpoint fit needs --memory, such as 80GiB, or --gpu")
    if (asked.link is None and asked.within is None) != (asked.rate is None):
        flags.error("a step's time takes both --rate and --link, or --gpu")
    if asked.tokens and asked.rate is None:
        flags.error("--tokens needs a step's time: name --gpu, or --rate and --link")
    if ":" in asked.model and (asked.batch or asked.sequence):
        flags.error(f"the loss of {asked.model} has a batch of its own: leave --batch and --sequence out")
    if asked.json is not None and (asked.json.is_dir() or not asked.json.absolute().parent.is_dir()):
        flags.error(f"--json {asked.json}: name a file in a folder that is there")
    asked.batch, asked.sequence = asked.batch or BATCH, asked.sequence or SEQUENCE


def _settings(flags: argparse.ArgumentParser, asked: argparse.Namespace) -> Settings:
    """Read the run file, which flags overrule; take the number of ranks from it if ``--ranks`` is missing."""
    given = {name: getattr(asked, flag) for flag, names in FROM_FLAGS.items() for name in names}
    chosen = [*(f"{name}={value}" for name, value in given.items() if value), *asked.set]
    settings = read(asked.config, chosen)
    if "precision.param" not in settings and asked.config is None and not os.environ.get(CONFIG):
        settings = read(None, ["precision.param=bf16", *chosen])
    value_of = {name: one.value for name, one in settings.items()}
    launched = {name: str(value_of[name]) for name in ("launch.nnodes", "launch.nproc_per_node") if name in value_of}
    launched = {name: re.sub(r"^(\d+):\1$", r"\1", text) for name, text in launched.items()}  # 2:2 means 2
    for name, text in () if asked.ranks else launched.items():
        if not text.isdecimal():
            flags.error(f"{name}: {text} leaves the number of ranks open: name --ranks")
    asked.ranks = asked.ranks or ([math.prod(map(int, launched.values()))] if launched else [RANKS])
    asked.replicas = value_of.get("shard.replicate", 1)
    for ranks in asked.ranks:
        if ranks % asked.replicas:
            flags.error(f"--ranks {ranks} is not a multiple of --replicas {asked.replicas}")
        if asked.rate and asked.link is None and ranks > asked.node:
            flags.error(f"--ranks {ranks} fill several nodes of {asked.node}: name --link to other nodes, as 400gbit")
    return {name: one for name, one in settings.items() if not name.startswith("launch.")}


def _rows(flags: argparse.ArgumentParser, asked: argparse.Namespace, settings: Settings) -> list[Row]:
    # torch is imported only after the flags are checked, as that takes seconds
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.tools.estimate import probe, subject_of

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64, None: None}
    values = {name: one.value for name, one in settings.items()}
    policy = MixedPrecisionPolicy(dtypes[values.get("precision.param")])
    subject = subject_of(asked.model, asked.batch, asked.sequence)
    found = None if subject.loss is None else probe(subject, policy, values.get("shard.units", "auto"))
    if found is None and (asked.checkpoint or asked.rate):
        flags.error(f"{asked.model} returns no loss: --checkpoint and --rate need one; see docs/estimate.md")
    doubled = None
    if asked.memory and ":" not in asked.model:
        doubled = probe(subject_of(asked.model, 2 * asked.batch, asked.sequence), policy).activations
    separate = values.get("shard.separate_reduce_group", False)
    return [_row(subject.build, ranks, asked, separate, found, doubled) for ranks in asked.ranks]


def _row(
    build: Callable[[], Any],
    ranks: int,
    asked: argparse.Namespace,
    separate: bool,
    found: Probe | None,
    doubled: Activations | None,
) -> Row:
    from yafsdp_cc.tools.estimate import headroom_of, plan_over, room_in

    shards = ranks // asked.replicas
    mesh = (asked.replicas, shards) if asked.replicas > 1 else (shards,)
    plan = plan_over(build, mesh, asked.device)
    has_state = asked.optimizer == "adamw"
    in_host = {} if plan.host is None else {**plan.host.memory, "optimizer state": has_state * plan.host.adamw}
    optimizer = has_state * plan.adamw_bytes - in_host.get("optimizer state", 0)
    held = plan.owned_bytes + optimizer
    communicators = (1 + (asked.replicas > 1) + separate) if asked.device == "cuda" else 0
    if found is None:
        assumed = _assumed(asked, plan, 0, 0)
        return Row(plan, optimizer, in_host, None, 0, headroom_of(held, communicators), assumed, {})
    blocks = len(found.blocks)
    checkpointed = {"all": blocks, "fit": 0}.get(asked.checkpoint, asked.checkpoint)
    if checkpointed > blocks:
        raise ValueError(f"--checkpoint {checkpointed}: this model has {blocks} blocks")
    room = room_in(asked.memory, communicators) - held if asked.memory else 0
    if asked.checkpoint == "fit":
        fewest = found.activations.fewest_checkpointed(room)
        if fewest is None:
            least = held + found.activations.peak(blocks)
            least += sum(headroom_of(least, communicators).values())
            told = f"{human(least)} each, headroom included"
            raise ValueError(f"{ranks} ranks with all {blocks} blocks checkpointed take {told}: name more ranks")
        checkpointed = fewest
    activations = found.activations.peak(checkpointed)
    headroom, assumed = headroom_of(held + activations, communicators), _assumed(asked, plan, checkpointed, blocks)
    answers: dict[str, str | float] = {}
    if doubled is not None:
        most = blocks if asked.checkpoint == "fit" else checkpointed
        largest = found.activations.largest_batch(doubled, asked.batch, room, most)
        answers[f"largest batch, {most} blocks recomputed"] = largest
    row = Row(plan, optimizer, in_host, activations, checkpointed, headroom, assumed, answers)
    if asked.rate is None:
        return row
    return _timed(row, found, asked, lambda codec: plan_over(build, mesh, asked.device, compression=codec))


def _timed(row: Row, found: Probe, asked: argparse.Namespace, replan: Callable[..., Plan]) -> Row:
    """Return the row with the times of a step, and the ``answers`` that follow from these times."""
    from yafsdp_cc.compression import Compression

    moved = 2 * (row.plan.parameter_shard_bytes + row.optimizer) + row.plan.gradient_shard_bytes
    updating = moved / asked.memory_rate if asked.memory_rate else 0.0

    def seconds_of(plan: Plan) -> StepTime:
        speeds = 8 / asked.link if asked.link else 0.0, asked.latency, asked.hop
        direct = bool(plan.choices) or asked.device == "cpu"
        link = Link(*speeds, 8 / asked.within if asked.within else 0.0, asked.node, direct)
        events = events_of(plan, found.work_with(row.checkpointed))
        return step_time(events, asked.rate, link)._replace(optimizer=updating)

    seconds, answers = seconds_of(row.plan), dict(row.answers)
    if ":" not in asked.model:  # the batch of a user's module:factory is unknown
        tokens = asked.batch * asked.sequence * row.ranks / seconds.total
        answers |= {"tokens / s of the job": tokens, "tokens / s and rank": tokens / row.ranks}
        if asked.tokens:
            answers[f"days for {asked.tokens / 1e9:,.6g} billion tokens"] = asked.tokens / tokens / 86400
    if asked.peak and seconds.total:
        forward = sum(each.forward for each in found.work.values())
        answers["MFU, %"] = 100 * 3 * forward / (seconds.total * asked.peak)
    exposed: dict[str, float] = {}
    for gradients, weights in CODECS:
        name = "exact" if gradients == "fp32" else f"{gradients} / {weights or 'exact'}"
        plan = replan(Compression(gradients, weights) if gradients != "fp32" else None)
        exposed[name] = seconds_of(plan).exposed
        if exposed[name] <= HIDDEN:
            break
    best = min(exposed, key=lambda name: exposed[name])
    hides = exposed[best] <= HIDDEN
    answers["codec that hides communication"] = best if hides else f"none; {best}: {exposed[best]:.0%} exposed"
    return row._replace(seconds=seconds, answers=answers)


def _assumed(asked: argparse.Namespace, plan: Plan, checkpointed: int, blocks: int) -> dict[str, str]:
    """Return what the estimate assumes, in words."""
    dtypes = plan.dtypes[0] if plan.dtypes else None
    assumed = {"batch": "the factory's own"}
    if ":" not in asked.model:
        assumed["batch"] = f"{asked.batch} x {asked.sequence:,} tokens on each rank"
    assumed["optimizer"] = {"adamw": "AdamW, two numbers for each parameter", "sgd": "SGD, no state"}[asked.optimizer]
    if dtypes is not None:
        told = f"parameters {dtypes.parameters}, forward {dtypes.forward}"
        assumed["precisions"] = f"{told}, gathered {dtypes.gathered}, reduced {dtypes.reduced}"
    recomputed = {"fit": "as many blocks as must be", "all": "all blocks"}
    assumed["recomputed"] = recomputed.get(asked.checkpoint, f"{checkpointed} of {blocks} blocks")
    if asked.memory:
        assumed["memory"] = f"{asked.memory / (1 << 30):.1f} GiB, headroom included"
    if asked.rate:
        share = f", {asked.rate / asked.peak:.0%} of {asked.gpu}'s peak" if asked.peak else ""
        assumed["rate"] = f"{asked.rate / 1e12:,.4g} TFLOP/s of a rank{share}"
        links = [f"{asked.link / 8e9:,.4g} GB/s between nodes" if asked.link else ""]
        links += [f"{asked.within / 8e9:,.4g} GB/s within nodes of {asked.node}" if asked.within else ""]
        assumed["links"] = "of a rank, " + ", ".join(filter(None, links))
        if plan.host is not None:
            assumed["left out"] = "seconds of copies from and to host memory, and of the optimizer there"
    return assumed


def _text(rows: list[Row]) -> str:
    plan, empty = rows[0].plan, [""] * len(rows)
    lines = [f"{plan.elements:,} parameters in {plan.parameters:,} tensors and {len(plan.units)} units", "", "assumed"]
    lines += [f"  {name:<12}{told}" for name, told in rows[0].assumed.items()]

    def cells(values: list[dict[str, int]]) -> list[tuple[str, ...]]:
        names = dict.fromkeys(name for each in values for name in each)
        return [(f"  {name}", *(human(each.get(name, 0)) for each in values)) for name in names]

    held = [sum(row.memory.values()) for row in rows]
    totals = [human(size + sum(row.headroom.values())) for size, row in zip(held, rows, strict=True)]
    shown = [("ranks", *(f"{row.ranks:,}" for row in rows)), ("held by a rank", *empty)]
    shown += [*cells([row.memory for row in rows]), ("  total", *map(human, held))]
    if rows[0].in_host:
        shown += [("in host memory", *empty), *cells([row.in_host for row in rows])]
    shown += [("headroom", *empty), *cells([row.headroom for row in rows]), ("total with headroom", *totals)]
    shown += [("sent by a rank in a step", *empty), *cells([_sent(row.plan.communication) for row in rows])]
    shown += [("blocks recomputed", *(str(row.checkpointed) for row in rows))]
    times = [row.seconds for row in rows if row.seconds is not None]
    if times:
        shown += [("seconds of a step", *(f"{each.total:.4g}" for each in times))]
        for name in times[0]._fields:
            shown += [(f"  {name.replace('_', ' ')}", *(f"{getattr(each, name):.4g}" for each in times))]
    for name in dict.fromkeys(name for row in rows for name in row.answers):
        shown += [(name, *(_answer(row.answers.get(name)) for row in rows))]
    return "\n".join([*lines, "", table(*shown)])


def _answer(value: str | float | None) -> str:
    return f"{value:,.{0 if value >= 100 else 2}f}" if isinstance(value, float) else str(value)


def _sent(communication: PlannedCommunication) -> dict[str, int]:
    sizes = {**communication.sent, "total": communication.total}
    return {name: size for name, size in sizes.items() if size}


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


def _quantity(units: Mapping[str, float]) -> Callable[[str], float]:
    """Return a parser of positive numbers that end in one of ``units``; of ``SECONDS`` it also takes 0."""

    def read(text: str) -> float:
        value = quantity(text, units)
        if value or (units is SECONDS and text in {f"0{unit}" for unit in units}):
            return value
        raise argparse.ArgumentTypeError(f"{text!r}: write a number and a unit of {', '.join(units)}")

    return read
