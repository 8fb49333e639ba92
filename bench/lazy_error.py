"""How wrong a step's gradients of a stage are whose neighbour encodes, with and without lazy error propagation.

A model of four blocks, as trained by the suite ``pipeline``, is cut in two. Gradients of the activations between its
halves are encoded for each micro-batch, as ``CompressedStage`` does, and go on through the first half. Printed is the
relative error of the gradients of its matrices and of its vectors (biases and norms) over some steps:

    python bench/lazy_error.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from bench import pipeline
from yafsdp_cc.compression import codecs  # noqa: F401 (codecs registers them)
from yafsdp_cc.compression.codec import codec_of
from yafsdp_cc.pipelining.messages import Encoded, Encoding, LowRank, SenderState
from yafsdp_cc.table import table
from yafsdp_cc.tools.demo import data

if TYPE_CHECKING:
    from torch import Tensor

ENCODINGS: dict[str, Callable[[], Encoding]] = {
    f"powersgd, rank {rank}": partial(LowRank, rank) for rank in (16, 32, 64)
} | {
    name: partial(Encoded, codec_of(name), rounding="nearest", by_sample=True)
    for name in ("int4", "int3", "int2", "topk")
}
MICRO_BATCHES = 4


def gradients(halves: list[pipeline.Part], steps: int, encoding: Encoding | None, lazy: bool) -> list[Tensor]:
    """Return the gradients of the first half's parameters, those of all steps but the first."""
    windows = data.spread_windows(
        data.read(Path(nn.__file__).parent).train, steps * pipeline.BATCH, pipeline.LENGTH, 0, 1
    )
    state, found = SenderState(error_feedback=lazy), []
    for step, batch in enumerate(windows.split(pipeline.BATCH)):
        halves[0].zero_grad()
        for number, part in enumerate(batch.chunk(MICRO_BATCHES)):
            out = halves[0](part[:, :-1])
            received = out.detach().requires_grad_()
            (pipeline.loss_of(halves[1](received), part[:, 1:]) / MICRO_BATCHES).backward()
            gradient = received.grad
            if encoding is not None:
                message = torch.empty(encoding.message_bytes(gradient.shape, gradient.dtype), dtype=torch.uint8)
                encoding.encode(gradient, message, state, seed=step * MICRO_BATCHES + number)
                encoding.decode(message, gradient)
            out.backward(gradient)
        found += [parameter.grad.clone() for parameter in halves[0].parameters()] if step else []
    return found


def error(found: list[Tensor], exact: list[Tensor], dims: int) -> float:
    """Return the relative error of all gradients of so many dimensions."""
    pairs = [(ours, truth) for ours, truth in zip(found, exact, strict=True) if truth.dim() == dims]
    lost = sum(float((ours - truth).square().sum()) for ours, truth in pairs)
    return (lost / sum(float(truth.square().sum()) for _, truth in pairs)) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, metavar="N")
    steps = parser.parse_args().steps
    model = pipeline.pretrained(seed=0)
    halves = [pipeline.Part(model, stage, 2) for stage in range(2)]
    exact = gradients(halves, steps, None, lazy=False)
    rows = []
    for name, make in ENCODINGS.items():
        naive, lazy = (gradients(halves, steps, make(), lazy) for lazy in (False, True))
        figures = [error(each, exact, dims) for dims in (2, 1) for each in (naive, lazy)]
        rows.append((name, *(f"{each:.3f}" for each in figures)))
    print(table(("", "matrices, naive", "lazy", "vectors, naive", "lazy"), *rows))


if __name__ == "__main__":
    main()
