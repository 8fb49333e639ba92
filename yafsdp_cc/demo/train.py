"""The demo's training job: ``yafsdp-cc demo``, or ``yafsdp-cc launch --nproc-per-node=2 -m yafsdp_cc.demo.train``.

One page: what a training loop around ``yafsdp_cc.shard`` looks like, and nothing else.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import yafsdp_cc
from yafsdp_cc.cli.demo import parser
from yafsdp_cc.demo import data
from yafsdp_cc.demo.model import GPT

BATCH = 2  # windows per rank and step: few, so that there are many steps
LEARNING_RATE, WARM_UP, CLIP = 1e-3, 20, 1.0
REPORT_EVERY, VALIDATE_EVERY, VALIDATION_WINDOWS = 10, 100, 32
PROMPT, SAMPLE_LENGTH, TEMPERATURE = b"def ", 160, 0.8


def main() -> None:
    """Train, reporting on the way; then hold the plan against what was measured, and write some text."""
    asked = parser().parse_args()
    memory_before = peak_memory()
    torch.manual_seed(asked.seed)
    model = GPT()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    yafsdp_cc.shard(model, mp_policy=bf16 if asked.precision == "bf16" else None)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    rank, ranks, device = dist.get_rank(), dist.get_world_size(), next(model.parameters()).device
    plan, counters = yafsdp_cc.plan_of(model), yafsdp_cc.counters_of(model)
    text = data.read(asked.text)
    if min(map(len, text)) <= model.context:
        sys.exit(f"too little text: {len(text.train)} bytes to train on, {len(text.held_out)} held out")
    drawn = torch.Generator().manual_seed(asked.seed * ranks + rank)  # every rank draws windows of its own
    held_out = data.spread_windows(text.held_out, VALIDATION_WINDOWS, model.context, rank, ranks).to(device)

    log = Log(Path("runs") / asked.name / "metrics.jsonl", is_first=rank == 0)
    summary = f"{plan}\n\n{len(text.train):,} bytes of text to train on, {len(text.held_out):,} held out\n"
    flags = {name: str(value) for name, value in vars(asked).items()}
    log(summary, event="start", **flags | {"ranks": ranks, "plan": str(plan)})
    begin = since = time.perf_counter()
    steps, gathered, reduced = 0, counters.gathered_bytes, counters.reduced_bytes
    for step in range(1, asked.steps + 1):
        starts = torch.randint(len(text.train) - model.context, (BATCH,), generator=drawn)
        loss = loss_of(model, data.windows(text.train, starts, model.context).to(device))
        loss.backward()
        with yafsdp_cc.profiling.span("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, asked.steps)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1

        validate = step == asked.steps or step % VALIDATE_EVERY == 0
        if not (validate or step == 1 or step % REPORT_EVERY == 0):
            continue
        report = {
            "loss": mean_over_ranks(loss.detach()),
            "tokens_per_s": round(steps * ranks * BATCH * model.context / (time.perf_counter() - since)),
            "gathered_bytes_per_step": (counters.gathered_bytes - gathered) // steps,
            "reduced_bytes_per_step": (counters.reduced_bytes - reduced) // steps,
        }
        if validate:
            with torch.no_grad():
                report["val_loss"] = mean_over_ranks(loss_of(model, held_out))
        validation = f"   val {report['val_loss']:.3f}" if validate else ""
        log(
            f"step {step:4}/{asked.steps}   loss {report['loss']:.3f}   {report['tokens_per_s']:6,} tokens/s   "
            f"gathered {report['gathered_bytes_per_step'] / 1e6:.1f} MB, "
            f"reduced {report['reduced_bytes_per_step'] / 1e6:.1f} MB a step{validation}",
            event="step",
            step=step,
            **report,
        )
        since = time.perf_counter()
        steps, gathered, reduced = 0, counters.gathered_bytes, counters.reduced_bytes

    seconds, owned, peak = time.perf_counter() - begin, yafsdp_cc.counters_of(model).owned_bytes, peak_memory()
    written = sample(model, asked.seed, device)
    log(
        f"\n{seconds:.0f} s. On each rank the plan was to own {plan.owned_bytes:,} bytes; the engine owns {owned:,}.\n"
        f"The process held {peak >> 20:,} MiB at most, {memory_before >> 20:,} MiB of it before there was a model.\n\n"
        f"It writes:\n\n{written}\n\nEverything is in {log.path}",
        event="end",
        seconds=round(seconds, 1),
        planned_bytes=plan.owned_bytes,
        owned_bytes=owned,
        peak_memory_bytes=peak,
        memory_before_bytes=memory_before,
        overflow_buffers=counters.overflow_buffers,
        sample=written,
    )


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss in nats per byte of tokens [windows, length + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def learning_rate(step: int, steps: int) -> float:
    """Return the rate: a warm-up, then half a cosine down to a tenth."""
    cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
    return LEARNING_RATE * min(step / WARM_UP, cosine)


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean over ranks of a scalar, which is overwritten."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def sample(model: GPT, seed: int, device: torch.device) -> str:
    """Return text from the model. Sharded weights are gathered in every forward, so all ranks run the same ones."""
    chance = torch.Generator(device).manual_seed(seed)
    written = torch.tensor([list(PROMPT)], device=device)
    for _ in range(SAMPLE_LENGTH):
        logits = model(written[:, -model.context :])[0, -1].float()
        following = torch.multinomial(F.softmax(logits / TEMPERATURE, dim=-1), 1, generator=chance)
        written = torch.cat([written, following[None]], dim=1)
    return bytes(written[0].tolist()).decode(errors="replace")


def peak_memory() -> int:
    """Return the most bytes this process has held in memory at a time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Log:
    """The terminal and a file of JSON lines; only the first rank writes."""

    def __init__(self, path: Path, is_first: bool) -> None:
        self.path, self.is_first = path, is_first
        if is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("w", buffering=1)  # by the line: what was written stays, however the run ends

    def __call__(self, text: str, /, **values: Any) -> None:
        """Print the text, and write the values to the file."""
        if self.is_first:
            print(text, flush=True)
            self.file.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
