"""Training of adapters on frozen quantised weights, whichever library has quantised them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.twins import numbers, square, whole

WIDTH = 128


class LowRank(nn.Module):
    """A frozen layer with an adapter.

    Args:
        base: [WIDTH] to [WIDTH], without a bias.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def train_as_in_one_process(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Hold adapters to those of one process on 2 ranks, and that frozen weights are gathered in the first step alone.

    Args:
        build: makes a sequence of ``LowRank``s, the same in every call.

    Returns:
        The sharded model, and the one of one process.
    """
    model, plain = yafsdp_cc.shard(build(), units=[LowRank], reshard_after_forward=False), build()
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=1.0) for each in (model, plain)]
    sent = [0]
    for step in range(3):
        batches = [numbers(8, WIDTH, seed=10 * step + rank) for rank in range(2)]
        square(model, batches[dist.get_rank()]).backward()
        torch.stack([square(plain, each) for each in batches]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        sent.append(yafsdp_cc.counters_of(model).gathered_bytes)
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(whole(model.get_parameter(name).detach()), parameter, rtol=1e-6, atol=1e-7)
    alone: nn.Module = build()
    ignored = {module.base.weight for module in alone.modules() if isinstance(module, LowRank)}
    yafsdp_cc.shard(alone, units=[LowRank], ignored_params=ignored, reshard_after_forward=False)
    square(alone, numbers(8, WIDTH)).backward()
    adapters = yafsdp_cc.counters_of(alone).gathered_bytes
    assert sent[3] - sent[2] == sent[2] - sent[1] == adapters < sent[1]
    return model, plain
