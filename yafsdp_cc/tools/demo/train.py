"""The demo's training job: ``yafsdp-cc demo``, or ``yafsdp-cc launch -m yafsdp_cc.tools.demo.train``.

A minimal training loop around ``yafsdp_cc.shard``.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import yafsdp_cc
from yafsdp_cc.tools.cli.demo import parser
from yafsdp_cc.tools.demo import data
from yafsdp_cc.tools.demo.model import GPT
from yafsdp_cc.tools.metrics import peak_memory

BATCH = 2  # windows per rank and step: few, so that there are many steps
LEARNING_RATE, WARM_UP, CLIP = 1e-3, 20, 1.0
REPORT_EVERY, VALIDATE_EVERY, VALIDATION_WINDOWS = 10, 100, 32
PROMPT, SAMPLE_LENGTH, TEMPERATURE = b"def ", 160, 0.8


def main() -> None:
    """Train the model with reports; then compare its plan with measurements, and print some text that it writes."""
    asked = parser().parse_args()
    memory_before = peak_memory()
    torch.manual_seed(asked.seed)
    model = GPT()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    yafsdp_cc.shard(model, mp_policy=bf16 if asked.precision == "bf16" else None)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    rank, ranks, device = dist.get_rank(), dist.get_world_size(), next(model.parameters()).device
    plan = yafsdp_cc.plan_of(model)
    text = data.read(asked.text)
    if min(map(len, text)) <= model.context:
        sys.exit(f"too little text: {len(text.train)} bytes to train on, {len(text.held_out)} held out")
    drawn = torch.Generator("cpu").manual_seed(asked.seed * ranks + rank)  # every rank draws its own windows
    held_out = data.spread_windows(text.held_out, VALIDATION_WINDOWS, model.context, rank, ranks).to(device)

    flags = {name: str(value) for name, value in vars(asked).items()}
    folder = Path("runs") / asked.name
    metrics = yafsdp_cc.Metrics(model, folder, total_steps=asked.steps, every=REPORT_EVERY, settings=flags)
    if metrics.is_first:
        print(f"{plan}\n\n{len(text.train):,} bytes of text to train on, {len(text.held_out):,} held out\n")
    for step in range(1, asked.steps + 1):
        starts = torch.randint(len(text.train) - model.context, (BATCH,), generator=drawn, device="cpu")
        loss = loss_of(model, data.windows(text.train, starts, model.context).to(device))
        loss.backward()
        with yafsdp_cc.profiling.span("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, asked.steps)
        optimizer.step()
        optimizer.zero_grad()
        metrics.step(loss, tokens=ranks * BATCH * model.context)
        if step == asked.steps or step % VALIDATE_EVERY == 0:
            with torch.no_grad():
                metrics.record(val_loss=loss_of(model, held_out))

    owned, peak = yafsdp_cc.counters_of(model).owned_bytes, peak_memory()
    written = sample(model, asked.seed, device)
    metrics.close(memory_before_bytes=memory_before, sample=written)
    if metrics.is_first:
        print(
            f"\nOn each rank the plan was to own {plan.owned_bytes:,} bytes; the engine owns {owned:,}.\n"
            f"{peak >> 20:,} MiB were in use at most, {memory_before >> 20:,} MiB before there was a model.\n\n"
            f"It writes:\n\n{written}\n\nEverything is in {metrics.path}"
        )


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss in nats per byte of tokens [windows, length + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate: a warm-up, then half a cosine down to a tenth."""
    cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
    return LEARNING_RATE * min(step / WARM_UP, cosine)


@torch.no_grad()
def sample(model: GPT, seed: int, device: torch.device) -> str:
    """Return text from the model. Every forward gathers sharded weights, so all ranks run equally many forwards."""
    chance = torch.Generator(device).manual_seed(seed)
    written = torch.tensor([list(PROMPT)], device=device)
    for _ in range(SAMPLE_LENGTH):
        logits = model(written[:, -model.context :])[0, -1].float()
        following = torch.multinomial(F.softmax(logits / TEMPERATURE, dim=-1), 1, generator=chance)
        written = torch.cat([written, following[None]], dim=1)
    return bytes(written[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    main()
