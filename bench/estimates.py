"""What ``yafsdp-cc estimate`` says, held against what was measured.

    MKL_DISABLE_FAST_MM=1 python bench/estimates.py memory    # gloo ranks of this machine: peak memory, bytes of a step
    python bench/estimates.py times                           # step times that others and we have published

``memory`` trains each model on 1, 2 and 4 ranks with each codec. Measured are the bytes that malloc has handed out at
the peak (``bench/memory.py``), and the engine's count of what a rank sends in a step. By default MKL keeps its
workspaces of some 20 MiB for the next call.

``times`` takes every row of a table out in turn, fits a compute rate and a link's bandwidth to the others, and predicts
it: for YaFSDP's table, torchtitan's (the rate alone), and those of the network lab in bench/results/estimates.md (there
the bandwidth is a share of the nominal one).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from math import log
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from bench.memory import measure_memory
from tests.ranks import on_ranks
from yafsdp_cc.compression import Compression
from yafsdp_cc.table import table
from yafsdp_cc.tools.estimate import Subject, headroom_of, plan_over, probe, subject_of
from yafsdp_cc.tools.step_time import Link, events_of, step_time

if TYPE_CHECKING:
    from yafsdp_cc.plan import Plan
    from yafsdp_cc.tools.step_time import Event

MIB = 1 << 20

# Memory -------------------------------------------------------------------------------------------------------------

GPT2 = {"n_embd": 384, "n_layer": 6, "n_head": 6, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def llama(width: int, hidden: int, blocks: int, heads: int, narrow: int, vocabulary: int) -> dict[str, Any]:
    """Return the config of a Llama; ``narrow`` are its heads of keys and values."""
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": blocks, "vocab_size": vocabulary}
    head_counts = {"num_attention_heads": heads, "num_key_value_heads": narrow}
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **head_counts}


def subject_with(config: dict[str, Any], batch: int, tokens: int) -> Subject:
    """Return what the command makes of a config in a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        return subject_of(file.name, batch, tokens)


MODELS: dict[str, dict[str, Any]] = {
    "demo": {},
    "llama": llama(384, 1024, 6, 6, 2, 4096),
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 4096, **GPT2},
}
CODECS = ("exact", "int8", "fp8", "int4", "ternary", "onebit", "topk", "powersgd")
BATCH, LENGTH = 8, 128
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


class Training:
    """A sharded model with AdamW."""

    def __init__(self, subject: Subject, policy: MixedPrecisionPolicy, compression: str | None) -> None:
        assert subject.loss is not None
        self.loss = subject.loss
        self.model = yafsdp_cc.shard(subject.build(), mp_policy=policy, compression=compression)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bytes_owned(self) -> dict[str, int]:
        before = self._sent()
        self.step()
        self.step()  # PowerSGD sends one factor in one step and the other in the next
        return {"sent": (self._sent() - before) // 2}

    def _sent(self) -> int:
        counters = yafsdp_cc.counters_of(self.model)
        return counters.gathered_bytes + counters.reduced_bytes


def _measure(subject: Subject, policy: MixedPrecisionPolicy, compression: str | None) -> dict[str, int]:
    warnings.simplefilter("ignore")
    # What libraries allocate once, for kernels that they compile and modules that they import late, is not the model's.
    Training(subject, policy, compression).step()
    gc.collect()
    return measure_memory(lambda: Training(subject, policy, compression), 2)


def memory(models: list[str], ranks: list[int], codecs: list[str], precision: str) -> None:
    head = (
        "model, ranks, codec",
        "estimated MiB",
        "measured",
        "off",
        "off with headroom",
        "bytes of a step",
        "counted",
    )
    rows = [head]
    policy = POLICIES[precision]
    for name in models:
        subject = subject_with(MODELS[name], BATCH, LENGTH) if MODELS[name] else subject_of(name, BATCH, LENGTH)
        found = probe(subject, policy)
        for world in ranks:
            for codec in codecs:
                compression = None if codec == "exact" else codec
                per_rank = on_ranks(world, _measure, subject, policy, compression, timeout=300.0)
                real = {key: max(rank[key] for rank in per_rank) for key in per_rank[0]}
                plan = plan_over(subject.build, (world,), "cpu", mp_policy=policy, compression=compression)
                estimated = plan.owned_bytes + plan.adamw_bytes + found.activations.peak()
                off = estimated / real["peak_live"] - 1
                spared = (estimated + sum(headroom_of(estimated, 0).values())) / real["peak_live"] - 1
                cells = f"{estimated / MIB:.1f}", f"{real['peak_live'] / MIB:.1f}", f"{off:+.1%}", f"{spared:+.1%}"
                rows.append((f"{name}, {world}, {codec}", *cells, f"{plan.communication.total:,}", f"{real['sent']:,}"))
                print(*rows[-1], flush=True)
    print(table(*rows))


# Step times -----------------------------------------------------------------------------------------------------------


LLAMAS = {
    "2-7B": llama(4096, 11008, 32, 32, 32, 32000),
    "2-13B": llama(5120, 13824, 40, 40, 40, 32000),
    "34B": llama(8192, 22016, 48, 64, 8, 32000),
    "2-70B": llama(8192, 28672, 80, 64, 8, 32000),
    "3-8B": llama(4096, 14336, 32, 32, 8, 128256),
    "3-70B": llama(8192, 28672, 80, 64, 8, 128256),
}


class Published(NamedTuple):
    """A row of a table: seconds of a step of a Llama, bf16, one sequence on each rank unless ``batch`` says more."""

    model: str
    ranks: int
    tokens: int
    seconds: float
    checkpointed: int = 0
    batch: int = 1


YAFSDP = [
    Published(*row)
    for row in (
        ("2-7B", 64, 2048, 0.81),
        ("2-7B", 64, 4096, 1.16),
        ("2-7B", 64, 8192, 2.23),
        ("2-7B", 128, 2048, 0.87),
        ("2-7B", 128, 4096, 1.19),
        ("2-7B", 128, 8192, 2.25),
        ("2-13B", 128, 2048, 1.55),
        ("2-13B", 128, 4096, 2.06),
        ("34B", 128, 2048, 3.39),
        ("34B", 256, 2048, 3.51),
        ("34B", 256, 4096, 5.33, 5),
        ("2-70B", 256, 2048, 6.97, 10),
        ("2-70B", 256, 4096, 11.07, 50),
        ("3-8B", 64, 2048, 0.97),
        ("3-8B", 64, 4096, 1.36),
        ("3-70B", 256, 2048, 7.17, 20),
    )
]
"""Of YaFSDP's README, A100 of 80 GB, 8 in a machine."""
TITAN = [Published("3-8B", ranks, 8192, 2 * 8192 / rate, batch=2) for ranks, rate in ((8, 5762), (128, 5605))]
"""Of torchtitan (2024-12), H100, eager, its default length of sequences assumed."""


FP32_REDUCE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""What both reduce in by default."""
HOP = (7 * 3.4e-6 + 14e-6) / 8
"""Seconds of a ring's hop: of 8, one is between machines.

Source: NCCL's cost model (``src/graph/tuning.cc``), latency of rings and the Simple protocol: NVLink, network.
"""


@cache
def plan_of_llama(model: str, ranks: int) -> Plan:
    return plan_over(subject_with(LLAMAS[model], 1, 1).build, (ranks,), mp_policy=FP32_REDUCE)


def events_of_row(row: Published) -> list[Event]:
    """Return a step of a published row."""
    found = probe(subject_with(LLAMAS[row.model], row.batch, row.tokens), FP32_REDUCE)
    return events_of(plan_of_llama(row.model, row.ranks), found.work_with(row.checkpointed))


class InLab(NamedTuple):
    """A row of our tables of the network lab: the demo's model, 1,024 tokens on each rank, bf16, two processors."""

    table: str
    gradients: str
    weights: str | None
    ranks: int
    mbit: float
    """The nominal rate of links; 7,900 where there was no limit."""
    seconds: float
    zero_stage: int = 3

    @property
    def link_mbit(self) -> float:
        """The rate, halved where the table is of a version whose exact collectives were gloo's all-to-all.

        That sends in one direction after the other between two ranks.
        """
        return self.mbit / 2 if self.weights is None and self.table == EARLIER else self.mbit


EARLIER = "500 Mbit/s and more"
LAB = [
    InLab("2026-11-22", "fp32", None, 2, 7900, 0.393),
    InLab("2026-11-22", "fp32", None, 2, 100, 2.66),
    InLab("2026-11-22", "int8", "int8", 2, 100, 1.38),
    InLab("2026-11-22", "fp32", None, 4, 7900, 0.844),
    InLab("2026-11-22", "fp32", None, 4, 100, 4.60),
    InLab("2026-11-22", "int8", "int8", 4, 100, 2.40),
    InLab("2026-11-22", "fp32", None, 2, 100, 2.68),
    InLab("2026-11-22", "int8", "int8", 2, 100, 1.34),
    InLab("2026-11-22", "onebit", "int8", 2, 100, 1.03),
    InLab("2026-11-22", "onebit", "int8", 2, 100, 0.82, 2),
    InLab(EARLIER, "fp32", None, 2, 500, 1.032),
    InLab(EARLIER, "int8", "int8", 2, 500, 0.828),
    InLab(EARLIER, "onebit", "int8", 2, 500, 0.799),
    InLab(EARLIER, "onebit", "int8", 2, 500, 0.726, 2),
    InLab(EARLIER, "fp32", None, 2, 1000, 0.768),
    InLab(EARLIER, "int8", "int8", 2, 1000, 0.727),
    InLab(EARLIER, "onebit", "int8", 2, 1000, 0.716),
    InLab(EARLIER, "onebit", "int8", 2, 1000, 0.698, 2),
]


def published() -> None:
    """Print every row of the published tables as predicted from the others."""
    rates = [1e12 * 140 * 1.01**step for step in range(36)]
    links = [1e9 * 50 * 1.02**step for step in range(36)]
    steps = {row: events_of_row(row) for row in YAFSDP}
    places = [(rate, link) for rate in rates for link in links]
    leave_one_out(
        {
            row: [step_time(step, rate, Link(1 / link, hop=HOP)).total for rate, link in places]
            for row, step in steps.items()
        },
        [f"{rate / 1e12:.0f} TFLOP/s, {link / 1e9:.0f} GB/s" for rate, link in places],
    )
    rates = [1e12 * 100 * 1.02**step for step in range(100)]
    titan = {row: events_of_row(row) for row in TITAN}
    leave_one_out(
        {
            row: [step_time(step, rate, Link(8 / (400e9 if row.ranks > 8 else 3.6e12))).total for rate in rates]
            for row, step in titan.items()
        },
        [f"{rate / 1e12:.0f} TFLOP/s" for rate in rates],
    )


def in_lab() -> None:
    """Print every row of the network lab as predicted from the others of its table."""
    subject = subject_of("demo", BATCH, LENGTH)
    work = probe(subject, POLICIES["bf16"]).work
    rates = [1e9 * 50 * 1.04**step for step in range(50)]
    shares = [0.7 + 0.02 * step for step in range(16)]
    places = [(rate, share) for rate in rates for share in shares]
    by_table: dict[str, dict[Any, list[float]]] = {}
    for row in LAB:
        compression = None if row.weights is None else Compression(row.gradients, row.weights)
        settings: dict[str, Any] = {"mp_policy": POLICIES["bf16"], "zero_stage": row.zero_stage}
        step = events_of(plan_over(subject.build, (row.ranks,), "cpu", compression=compression, **settings), work)

        def seconds(rate: float, share: float, row: InLab = row, step: list[Event] = step) -> float:
            link = Link(8 / (1e6 * share * row.link_mbit))
            return step_time(step, rate * 2 / row.ranks, link).total  # ranks share the processors

        by_table.setdefault(row.table, {})[row] = [seconds(*place) for place in places]
    for predicted in by_table.values():
        leave_one_out(predicted, [f"{rate / 1e9:.0f} GFLOP/s, {share:.0%} of the link" for rate, share in places])


def leave_one_out(predicted: Mapping[Any, Sequence[float]], choices: Sequence[str]) -> None:
    """Print each row as predicted with the constants that fit the other rows best.

    Args:
        predicted: seconds of each row with each choice of constants.
        choices: what the constants are.
    """
    rows, errors = [("", "measured s", "predicted", "off", "fitted to the others")], []
    for row, seconds in predicted.items():
        others = [other for other in predicted if other != row]
        squares = [
            sum(log(predicted[other][place] / other.seconds) ** 2 for other in others) for place in range(len(choices))
        ]
        best = squares.index(min(squares))
        errors.append(abs(seconds[best] / row.seconds - 1))
        name = ", ".join(str(each) for each in row if each != row.seconds)
        rows.append(
            (
                name,
                f"{row.seconds:.3f}",
                f"{seconds[best]:.3f}",
                f"{seconds[best] / row.seconds - 1:+.1%}",
                choices[best],
            )
        )
    print(table(*rows), f"mean error {mean(errors):.1%}\n", sep="\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", choices=["memory", "times"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--precision", choices=POLICIES, default="fp32")
    options = parser.parse_args()
    if options.suite == "memory":
        memory(options.models, options.ranks, options.codecs, options.precision)
    else:
        in_lab()
        published()
    return 0


if __name__ == "__main__":
    sys.exit(main())
