"""Ranks with different numbers of batches, held against one process over the batches that there were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import on_ranks, ranks
from tests.twins import inputs, seeded, square, whole

COUNTS = {2: [3, 1], 3: [0, 2, 4], 4: [1, 3, 0, 2]}


def _batches(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _trains(world: int, options: dict[str, Any], accumulates: bool) -> int:
    counts = COUNTS[world]
    rank = dist.get_rank()
    if options.pop("replicas", False):
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = yafsdp_cc.shard(seeded(Mlp), **options), seeded(Mlp)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    steps = 0
    with yafsdp_cc.uneven(model) as batches:
        for batch in batches(_batches(rank, step) for step in range(counts[rank])):
            there = [each for each in range(world) if steps < counts[each]]
            assert batches.weight == (world / len(there) if rank in there else 0)
            is_last = not accumulates or steps % 2 == 1 or steps + 1 == max(counts)
            model.set_requires_gradient_sync(is_last)
            square(model, batch).backward()
            (sum(square(plain, _batches(each, steps)) for each in there) / len(there)).backward()  # type: ignore[union-attr]
            steps += 1
            if not is_last:
                continue
            if "compression" not in options:
                for name, parameter in model.named_parameters():
                    torch.testing.assert_close(whole(parameter.grad), plain.get_parameter(name).grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert steps == max(counts)
    assert batches.weight == 1
    for name, parameter in model.named_parameters():
        found, truth = whole(parameter.detach()), plain.get_parameter(name).detach()
        assert (found - truth).abs().max() <= (5e-2 if "compression" in options else 1e-5), name
    return steps


@pytest.mark.parametrize(
    ("world", "options", "accumulates"),
    [(2, {}, False), (3, {}, True), (4, {"replicas": True}, True), (2, {"compression": "int8"}, False)],
    ids=["two", "accumulating", "replicas", "int8"],
)
def test_means_are_over_the_ranks_with_data(world: int, options: dict[str, Any], accumulates: bool) -> None:
    assert on_ranks(world, _trains, world, options, accumulates) == [max(COUNTS[world])] * world


class Hidden:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hides(Mlp):
    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


@ranks(2)
def test_refused() -> None:
    with pytest.raises(ValueError, match="Mlp is not sharded"), yafsdp_cc.uneven(Mlp()):
        pass
    model: Any = yafsdp_cc.shard(seeded(Mlp), units=["blocks.*"])
    with pytest.raises(ValueError, match="is a part of one"), yafsdp_cc.uneven(model.blocks[0]):
        pass
    hides: Any = yafsdp_cc.shard(seeded(Hides))
    with yafsdp_cc.uneven(hides) as batches:
        loop = batches(inputs()[:1] if dist.get_rank() else [])
        batch = next(loop)
        with pytest.raises(RuntimeError, match="what FSDPHides returns, a Hidden"):
            hides(batch)
