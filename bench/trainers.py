"""The demo's model (ten million parameters) with an optimizer, wrapped as each contestant does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from yafsdp_cc.api import counters_of, shard
from yafsdp_cc.compression.config import Compression
from yafsdp_cc.compression.fsdp2 import compress
from yafsdp_cc.optim import OneBitAdam
from yafsdp_cc.tools.demo.model import GPT
from yafsdp_cc.tools.demo.train import CLIP, loss_of

if TYPE_CHECKING:
    from bench.contestants import Contestant

ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Trainer:
    """A model and its optimizer.

    Args:
        model: the wrapped model, from tokens [sequences, length] to logits.
        sent_bytes: function that returns the bytes that this rank has sent so far, by the contestant's own count; None
            without one.
        optimizer: AdamW if None.
    """

    def __init__(
        self,
        model: nn.Module,
        sent_bytes: Callable[[], int] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model = model
        self.sent_bytes = sent_bytes
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), **ADAM)

    def step(self, tokens: Tensor, clip: float | None = None) -> None:
        """Train on ``tokens`` [sequences, length + 1], with gradients clipped to a norm of ``clip``."""
        loss_of(self.model, tokens).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make(contestant: Contestant, steps: int = 0) -> Trainer:
    """Make the trainer of a contestant in its state after the warm-up, or with ``steps`` for a run of that length."""
    if steps and contestant.maker == "one_bit_adam":
        return one_bit_adam(warmup_steps=max(1, steps // 20), refreshes=4)
    trainer: Trainer = globals()[contestant.maker](**contestant.settings)
    return trainer


def shard_by_fsdp2(model: Any, policy: MixedPrecisionPolicy, **settings: Any) -> nn.Module:
    """Apply torch's FSDP2 to each of ``model.blocks`` and then to the root, which always keeps its weights."""
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **settings)
    settings.pop("reshard_after_forward", None)
    sharded: nn.Module = fully_shard(model, mp_policy=policy, **settings)
    return sharded


def fsdp2(*, bf16: bool = False, **compression: Any) -> Trainer:
    """Use torch's FSDP2; with ``compression``, by this package's ``compress``."""
    model = shard_by_fsdp2(GPT(), BF16 if bf16 else MixedPrecisionPolicy())
    if not compression:
        return Trainer(model)
    compressed = compress(model, Compression(**compression))
    return Trainer(model, lambda: compressed.sent_bytes)


def ddp(*, fp16_hook: bool = False) -> Trainer:
    """Use torch's DDP, with gradients cast by torch's own hook if asked."""
    model = DistributedDataParallel(GPT())
    if fp16_hook:
        model.register_comm_hook(None, fp16_compress_hook)
    return Trainer(model)


def ddp_powersgd() -> Trainer:
    """Use DDP with torch's own PowerSGD."""
    model = GPT()
    # One bucket only: the hook starts its second and third sum from the thread on which the one before has ended. With
    # two buckets ranks may start them in different orders, sums of different sizes meet, and gloo ends the process.
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    wrapped = DistributedDataParallel(model, bucket_cap_mb=-(-nbytes // (1 << 20)))
    wrapped.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook)
    return Trainer(wrapped)


class Zero3(Trainer):
    """DeepSpeed's ZeRO-3 in bf16, whose engine has the optimizer."""

    def __init__(self) -> None:
        import deepspeed

        # would be compiled at the first start for ranks of one machine, and those of a lab count as machines of their
        # own
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        model = GPT()
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), **ADAM),
            config={
                "train_micro_batch_size_per_gpu": 8,
                "zero_optimization": {"stage": 3},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": True},
            },
        )
        super().__init__(self._engine, optimizer=self._engine.optimizer)

    def step(self, tokens: Tensor, clip: float | None = None) -> None:
        self._engine.backward(loss_of(self.model, tokens))
        self._engine.step()


def ours(*, zero_stage: Literal[1, 2, 3] = 3, **compression: Any) -> Trainer:
    """Use this package's engine in bf16, exact without a ``compression``."""
    config = Compression(**compression) if compression else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no warning of large residuals: the model is small
        model = shard(GPT(), mp_policy=BF16, compression=config, zero_stage=zero_stage)
    counters = counters_of(model)
    return Trainer(model, lambda: counters.gathered_bytes + counters.reduced_bytes)


def one_bit_adam(
    *, phase: str = "encoded", weights: str = "ternary", warmup_steps: int = 1, refreshes: int = 0
) -> Trainer:
    """This package's engine in bf16 with 1-bit Adam: momentum in one bit, weights kept and sent as deltas.

    Args:
        phase: phase of every step but the first: "encoded"; "exact", as in the warm-up; or "both", as where the second
            moment is refreshed.
        weights: codec of the weights' deltas.
        warmup_steps, refreshes: as of ``OneBitAdam``, for the phase "encoded".
    """
    if phase != "encoded":
        warmup_steps, refreshes = (1 << 30, 0) if phase == "exact" else (1, 1 << 30)
    trainer = ours(zero_stage=2, gradients="onebit", weights=weights, residual="int8")
    trainer.optimizer = OneBitAdam(
        trainer.model.parameters(), **ADAM, warmup_steps=warmup_steps, refreshes=refreshes, max_grad_norm=CLIP
    )
    return trainer
