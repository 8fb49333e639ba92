"""The demo's model (ten million parameters) with an optimizer, wrapped in every way that is compared."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from yafsdp_cc.api import counters_of, shard
from yafsdp_cc.bench.contestants import TRAINING
from yafsdp_cc.compression import Compression
from yafsdp_cc.compression.fsdp2 import compress
from yafsdp_cc.demo.model import GPT
from yafsdp_cc.demo.train import CLIP
from yafsdp_cc.optim import OneBitAdam

if TYPE_CHECKING:
    from collections.abc import Callable

LEARNING: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Trainee:
    """A model, its optimizer, and the bytes that it counts itself as sent so far, if it counts any.

    ``optimizer`` is AdamW unless it is given.
    """

    def __init__(
        self,
        model: nn.Module,
        counted: Callable[[], int] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model = model
        self.counted = counted
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), **LEARNING)

    def step(self, tokens: Tensor, clip: float | None = None) -> None:
        """Learn from [sequences, length + 1] tokens, with gradients clipped to a norm of ``clip``."""
        self.loss(tokens).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, tokens: Tensor) -> Tensor:
        """Nats per token, the mean."""
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def trainee_of(name: str, steps: int = 0) -> Trainee:
    """The contestant of this name: as it is once it has settled, or as it trains for so many ``steps``."""
    maker, told, _ = TRAINING[name]
    if steps and maker == "one_bit_adam":
        return one_bit_adam(warmup_steps=max(1, steps // 20), refreshes=4)
    return _MAKERS[maker](**told)


def fsdp2(*, bf16: bool = False, **compression: Any) -> Trainee:
    """torch's FSDP2, on each block and then on the root; with ``compression``, what it sends encoded."""
    policy = BF16 if bf16 else MixedPrecisionPolicy()
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if not compression:
        return Trainee(model)
    compressed = compress(model, Compression(**compression))
    return Trainee(model, lambda: compressed.sent_bytes)


def ddp(*, fp16_hook: bool = False) -> Trainee:
    """torch's DDP, its gradients cast by torch's own hook if that is wanted."""
    model = DistributedDataParallel(GPT())
    if fp16_hook:
        model.register_comm_hook(None, fp16_compress_hook)
    return Trainee(model)


def ddp_powersgd() -> Trainee:
    """DDP with torch's own PowerSGD."""
    model = GPT()
    # In one bucket. The hook starts its second and third sum from the threads on which the one before has ended: those
    # of two buckets start in another order on another rank, sums of different sizes meet, and gloo ends the process.
    whole = sum(parameter.nbytes for parameter in model.parameters())
    wrapped = DistributedDataParallel(model, bucket_cap_mb=-(-whole // (1 << 20)))
    wrapped.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook)
    return Trainee(wrapped)


class _Zero3(Trainee):
    """DeepSpeed's ZeRO-3 in bf16, whose engine has the optimizer."""

    def __init__(self) -> None:
        import deepspeed

        # Would be compiled at the first start, for ranks of one machine; those of a lab are machines of their own.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        model = GPT()
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), **LEARNING),
            config={
                "train_micro_batch_size_per_gpu": 8,
                "zero_optimization": {"stage": 3},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": True},
            },
        )
        self.model, self.counted, self.optimizer = self._engine, None, self._engine.optimizer

    def step(self, tokens: Tensor, clip: float | None = None) -> None:
        self._engine.backward(self.loss(tokens))
        self._engine.step()


def ours(*, zero_stage: Literal[1, 2, 3] = 3, **compression: Any) -> Trainee:
    """This package's engine in bf16; without a ``compression``, what it sends is exact."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large residuals: the model is small
        model = shard(
            GPT(),
            mp_policy=BF16,
            compression=Compression(**compression) if compression else None,
            zero_stage=zero_stage,
        )
    return _ours(model)


def _ours(model: nn.Module) -> Trainee:
    def counted() -> int:
        counters = counters_of(model)
        return counters.gathered_bytes + counters.reduced_bytes

    return Trainee(model, counted)


def one_bit_adam(
    *, phase: str = "encoded", weights: str = "ternary", warmup_steps: int = 1, refreshes: int = 0
) -> Trainee:
    """This package's engine in bf16 with 1-bit Adam, whose every step is of one ``phase`` after the first.

    Momentum crosses in one bit, from residuals in int8; weights stay whole, and their changes cross encoded.

    Args:
        phase: "encoded"; "exact", as in the warm-up; or "both", as where the second moment is refreshed.
        weights: the codec of their changes.
        warmup_steps, refreshes: instead of those of the phase "encoded".
    """
    if phase != "encoded":
        warmup_steps, refreshes = (1 << 30, 0) if phase == "exact" else (1, 1 << 30)
    compression = Compression("onebit", weights=weights, residual="int8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large residuals: the model is small
        trainee = _ours(shard(GPT(), mp_policy=BF16, compression=compression, zero_stage=2))
    parameters = trainee.model.parameters()
    trainee.optimizer = OneBitAdam(
        parameters, **LEARNING, warmup_steps=warmup_steps, refreshes=refreshes, max_grad_norm=CLIP
    )
    return trainee


_MAKERS: dict[str, Callable[..., Trainee]] = {
    "fsdp2": fsdp2,
    "ddp": ddp,
    "ddp_powersgd": ddp_powersgd,
    "ours": ours,
    "one_bit_adam": one_bit_adam,
    "zero_3": _Zero3,
}
