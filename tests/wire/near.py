"""A model whose weights near ranks keep between them, its twin that every rank keeps whole, and what forwards see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import yafsdp_cc
from yafsdp_cc import Compression


class Watched(nn.Linear):
    """Remembers the weight that its last forward has seen."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.detach().clone()
        return super().forward(x)


class Rerun(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def net(rerun: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Watched(*sizes) for sizes in ((40, 60), (60, 60), (60, 50), (50, 61), (61, 30))]
    return nn.Sequential(*(Rerun(layer) if rerun else layer for layer in layers))


def near(codec: str | None = "int4", count: int = 2, model: nn.Module | None = None, **more: Any) -> Any:
    compression = Compression(gradients="fp32", weights=codec)
    more = {"reshard_after_forward": count, "units": [Watched], "compression": compression, **more}
    return yafsdp_cc.shard(model or net(), **more)


def whole(codec: str | None = "int4", **more: Any) -> Any:
    return near(codec, reshard_after_forward=None, zero_stage=2, **more)


def seen(model: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.weight": each.seen for name, each in model.named_modules() if isinstance(each, Watched)}


def look(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        model(torch.ones(1, 40))
    return seen(model)


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(each.equal(others[name]) for name, each in some.items())
