"""What optimizers of the 1-bit family are tried on: a model with batches, and a codec that loses nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.compression.ledger import net
from tests.internals import Codec, Noise
from yafsdp_cc import Compression


class Lossless(Codec):
    """fp32 as it is: with it, what is encoded is exact, and every formula of the exact optimizer has to come out."""

    name = "lossless"

    def body_bytes(self, n: int) -> int:
        return 4 * n

    def encode(self, values: Tensor, counts: Tensor | None, message: Tensor, noise: Noise | None = None) -> None:
        message[:, : 4 * values.shape[1]].view(torch.float32).copy_(values)

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message[:, : 4 * values.shape[1]].view(torch.float32))

    def is_finite(self, message: Tensor, n: int) -> Tensor:
        return self.blocks(message[:, : 4 * n].view(torch.float32)).isfinite().all(-1)


def sharded(codec: str = "lossless", **more: Any) -> Any:
    compression = Compression(gradients=codec, residual=more.pop("residual", "fp32"))
    return yafsdp_cc.shard(net(), units=[nn.Linear], compression=compression, **more)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of one rank's batch of a step."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 40, generator=draws)
    y = torch.randn(4, 30, generator=draws)
    loss: Tensor = (model(x.to(next(model.parameters()).dtype)) - y).square().mean()
    return loss


def backward(model: nn.Module, step: int) -> None:
    """This rank's backward of a step, from no gradients."""
    model.zero_grad()
    loss_of(model, step, dist.get_rank()).backward()


def backward_of_all(model: nn.Module, step: int, world: int) -> None:
    """The mean gradients of all ranks, by one that has the whole model."""
    model.zero_grad()
    for rank in range(world):
        (loss_of(model, step, rank) / world).backward()


def whole(tensors: Iterable[Any]) -> list[Tensor]:
    """Tensors of which each rank has a part, put together, fp64."""
    return [each.full_tensor().double() for each in tensors]


def assert_close(ours: nn.Module, twin: nn.Module, tolerance: float) -> None:
    """Weights of a sharded model and of a whole one, by norms relative to these."""
    for (name, mine), theirs in zip(ours.named_parameters(), twin.parameters(), strict=True):
        off = (mine.full_tensor().double() - theirs.double()).norm() / theirs.double().norm()
        assert off <= tolerance, (name, float(off))
