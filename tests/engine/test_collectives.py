"""The local sum of an exact reduce-scatter, for many ranks, against additions one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.host import idle_ranks
from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers

CPU = torch.device("cpu")


def chunk_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return elements whose sum over ranks is another one in any other order."""
    draws = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=draws) * 10.0 ** torch.randint(-4, 4, (numel,), generator=draws)
    values[:2] = torch.tensor([-0.0, float("inf") if rank == 1 else 1.0])
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("world", "numel"), [(3, 5003), (37, 5003), (300, 4001)])
def test_arrivals_are_added_in_rank_order(world, numel, dtype):
    chunks = [chunk_of(rank, numel, dtype) for rank in range(world)]  # 16 bits and 300 ranks: more than one part
    expected = chunks[0].to(torch.promote_types(dtype, torch.float32))
    for chunk in chunks[1:]:
        expected = expected + chunk.to(expected.dtype)
    with idle_ranks(world, "cpu") as (mesh, _):
        comm = Communicator(mesh.get_group(), CPU)
        reduce, scratch = ExactReduceScatter(world * numel, dtype), ScratchBuffers(CPU)
        reduce.bind(CommContext(comm, scratch, lambda kind, name: None))
        grads = torch.cat([chunks[comm.rank]] * world)
        reduce.start(grads, async_op=False)
        scratch.take("received chunks", world * numel, dtype).copy_(torch.cat(chunks))
        parts = [(start, part.clone()) for start, part in reduce.finish(grads)]
    total = torch.cat([part for _, part in parts])
    assert [start for start, _ in parts][1:] == torch.cumsum(torch.tensor([len(p) for _, p in parts]), 0).tolist()[:-1]
    assert total.equal(expected)
    assert total.dtype == expected.dtype
    assert total.signbit().equal(expected.signbit())
