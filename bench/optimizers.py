"""Steps of the 1-bit family beside those of ``torch.optim.AdamW(fused=True)`` on the same parameters.

    python bench/optimizers.py                       # about a minute
    python bench/optimizers.py --threads 1 --rounds 31 --layers 8
    python bench/optimizers.py --device cuda --layers 16 --width 2048      # as bench/gpu does

One rank, a stack of transformer blocks in fp32, encoded by onebit. *Update* is what is done to the elements alone,
natively or by the definition in plain torch; *step* is the whole ``optimizer.step()`` of a sharded model after the
warm-up, with everything that it does besides: its schedule, and the all-gathers that it starts. All take turns round by
round.
Milliseconds are medians over rounds, and so is the ratio of a round's time to that of AdamW in that round. With one
thread they are its processor time, with more they are wall time. On a GPU updates alone are measured, by CUDA events;
*per byte* is the time for each byte that an update has to read and write, over AdamW's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn

import yafsdp_cc
from bench.common import about, save
from bench.kernels import milliseconds
from yafsdp_cc.compression.error_feedback import ops_for
from yafsdp_cc.optim import OneBitAdam, OneBitLamb, OneBitSGD, ZeroOneAdam
from yafsdp_cc.optim.lamb import LambRow, LambRule, lamb_settings, update_lamb
from yafsdp_cc.optim.update import Row, Rule, adam_settings, sgd_settings, update
from yafsdp_cc.table import table

GROUP = {"lr": 1e-3, "weight_decay": 0.01, "momentum": 0.9, "betas": (0.9, 0.999), "eps": 1e-8}
FAMILY: dict[str, Callable[..., Any]] = {
    "OneBitAdam, momentum": partial(OneBitAdam, warmup_steps=1, refreshes=0),
    "OneBitAdam, gradient": partial(OneBitAdam, warmup_steps=1, refreshes=0, form="gradient"),
    "OneBitSGD, momentum": partial(OneBitSGD, weight_decay=0.01),
    "OneBitSGD, gradient": partial(OneBitSGD, weight_decay=0.01, form="gradient"),
    "ZeroOneAdam": partial(ZeroOneAdam, refreshes=1),
    "OneBitLamb, momentum": partial(OneBitLamb, warmup_steps=1, refreshes=0),
}
ADAMW = "AdamW(fused=True)"


def stack(layers: int, width: int) -> nn.Sequential:
    """Blocks of a transformer: matrices, biases and norms."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers))
    )


def torch_step(parameters: list[nn.Parameter]) -> Callable[[], object]:
    """Return a step of AdamW on parameters that have gradients."""
    optimizer = torch.optim.AdamW(parameters, fused=True)
    return optimizer.step


def updates(shapes: list[torch.Size], device: torch.device) -> dict[str, Callable[[], object]]:
    """Return updates of plain tensors of such shapes, by name, and that of AdamW."""
    found: dict[str, Callable[[], object]] = {}
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for each in parameters:
        each.grad = torch.randn_like(each)
    found[ADAMW] = torch_step(parameters)
    weights = [each.detach() for each in parameters]
    gradients = [torch.randn_like(each) for each in weights]
    moments, squares = [torch.zeros_like(each) for each in weights], [torch.rand_like(each) for each in weights]
    for rule in Rule:
        settings = adam_settings(GROUP, 9, 9) if rule.is_adam else sgd_settings(GROUP)
        rows = [
            Row(weight, gradient, None if rule is Rule.ADAM_MOMENTUM else moment, square, settings)
            for weight, gradient, moment, square in zip(weights, gradients, moments, squares, strict=True)
        ]
        found[f"{rule.name.lower()}, native"] = partial(update, rule, rows)
        found[f"{rule.name.lower()}, plain"] = partial(plainly, "update", update, rule, rows)
    fresh = [torch.rand_like(each) for each in weights]
    for of_lamb in LambRule:
        lamb_rows = [
            LambRow(*row, None if of_lamb is LambRule.EXACT else last, lamb_settings(GROUP, 1.0, 9, 9))
            for *row, last in zip(weights, gradients, moments, squares, fresh, strict=True)
        ]
        name = f"lamb_{of_lamb.name.lower()}"
        found[f"{name}, native"] = partial(update_lamb, of_lamb, lamb_rows)
        found[f"{name}, plain"] = partial(plainly, "lamb", update_lamb, of_lamb, lamb_rows)
    return found


def plainly(module: str, run: Callable[..., object], *arguments: Any) -> None:
    with mock.patch(f"yafsdp_cc.optim.{module}.ops_for", return_value=None):
        run(*arguments)


def sharded_step(layers: int, width: int, make: Callable[..., Any] | None) -> Callable[[], object]:
    """Return a step of a sharded model after two backwards, the second one of encoded gradients."""
    given = {} if make is None else {"compression": yafsdp_cc.Compression("onebit", residual="int8")}
    model: Any = yafsdp_cc.shard(stack(layers, width), **given)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if make is None else make(model.parameters())
    inputs = torch.randn(2, 4, width)
    for _ in range(2):
        model.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def step() -> None:
        optimizer.step()
        model.parameters()  # the model lives as long as the optimizer is timed

    return step


MOVED = {
    ADAMW: 28,
    "sgd_gradient": 20,
    "sgd_momentum": 20,
    "adam_gradient": 24,
    "adam_momentum": 16,
    "lamb_exact": 24,
    "lamb_gradient": 36,
    "lamb_momentum": 36,
}
"""Bytes that an update reads and writes for each element: four for each tensor of ``Rule`` and ``LambRule`` that it
reads, and for each that it writes."""


def race_on_gpu(compared: dict[str, Callable[[], object]], rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds of each native update, and its ratio to AdamW's of the same round for as many bytes."""
    device = torch.device("cuda")
    compared = {name.removesuffix(", native"): run for name, run in compared.items() if not name.endswith("plain")}
    times: dict[str, list[float]] = {name: [] for name in compared}
    for turn in range(rounds + 2):
        for name, run in compared.items():
            taken = milliseconds(run, device)
            if turn >= 2:
                times[name].append(taken)
    return [
        {
            "what": name,
            "ms": median(taken),
            "of_adamw": (ratio := median(own / other for own, other in zip(taken, times[ADAMW], strict=True))),
            "per_byte": ratio * MOVED[ADAMW] / MOVED[name],
        }
        for name, taken in times.items()
    ]


def race(compared: dict[str, Callable[[], object]], rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds of each, and its ratio to AdamW's of the same round."""
    times: dict[str, list[float]] = {name: [] for name in compared}
    for turn in range(rounds + 2):
        for name, run in compared.items():
            # Of one thread its processor time, which other processes of the machine do not lengthen.
            clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
            start = clock()
            run()
            taken = 1e3 * (clock() - start)
            if turn >= 2:
                times[name].append(taken)
    return [
        {
            "what": name,
            "ms": median(taken),
            "of_adamw": median(own / other for own, other in zip(taken, times[ADAMW], strict=True)),
        }
        for name, taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    device = torch.device(options.device)
    if ops_for(device) is None:
        parser.error(f"the native kernels for {device} are not built")
    shapes = [each.shape for each in stack(options.layers, options.width).parameters()]
    elements = sum(shape.numel() for shape in shapes)
    print(f"{len(shapes)} parameters, {elements / 1e6:.1f} million elements, medians of {options.rounds} rounds")
    results: dict[str, Any] = {"about": about(["python", "bench/optimizers.py", *sys.argv[1:]]), "elements": elements}
    if device.type == "cuda":
        results["figures"] = race_on_gpu(updates(shapes, device), options.rounds)
        keys = ("ms", "of_adamw", "per_byte")
        cells = [[each["what"], *(f"{each[key]:.2f}" for key in keys)] for each in results["figures"]]
        print(table(["update", "ms", "of AdamW", "per byte"], *cells))
        save(options.json, results)
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    contests = {
        "update": updates(shapes, device),
        "step": {
            name: sharded_step(options.layers, options.width, make) for name, make in {ADAMW: None, **FAMILY}.items()
        },
    }
    results["figures"] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for kind, compared in contests.items():
            figures = [{"threads": threads, "kind": kind, **each} for each in race(compared, options.rounds)]
            results["figures"] += figures
            cells = [[str(each["what"]), f"{each['ms']:.2f}", f"{each['of_adamw']:.2f}"] for each in figures]
            head = [f"{kind}, {threads} thread{'s' * (threads > 1)}", "ms", "of AdamW"]
            print(table(head, *cells), "\n", flush=True)
    save(options.json, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
