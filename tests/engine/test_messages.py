"""Over slow links, exact collectives are point-to-point messages: the same numbers, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.netlab.labs import lab_of
from tests.ranks import on_ranks, ranks
from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.ranks import groups
from yafsdp_cc.sharding.links import probe_links

CPU = torch.device("cpu")
CHUNK = 1 << 17
"""Elements: enough for messages of their own, in any dtype and for any number of ranks."""


def set_slow(group: dist.ProcessGroup, is_slow: bool) -> None:
    groups.slow_links[group] = is_slow


def exchanged(dtype: torch.dtype) -> list[Tensor]:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    draws = torch.Generator().manual_seed(rank)
    whole, shard = (torch.randn(n, generator=draws).to(dtype) for n in (world * CHUNK, CHUNK))
    comm, reduce = Communicator(group, CPU), ExactReduceScatter(whole.numel(), dtype)
    reduce.bind(CommContext(comm, ScratchBuffers(CPU), lambda kind, name: None))
    gathered = torch.empty_like(whole)
    own = comm.own_chunk(gathered).copy_(shard)
    for work in (*reduce.start(whole, async_op=True), *comm.all_gather(gathered, own, async_op=True)):
        work.wait()
    return [torch.cat([part.clone() for _, part in reduce.finish(whole)]), gathered]


@pytest.mark.parametrize("world", [2, 3, 4])
@ranks("world")
def test_sums_and_gathers_are_those_over_fast_links(world):
    group = dist.group.WORLD
    assert group is not None
    for dtype in (torch.float32, torch.bfloat16):
        set_slow(group, False)
        truth = exchanged(dtype)
        set_slow(group, True)
        assert all(one.equal(other) for one, other in zip(exchanged(dtype), truth, strict=True))


def tried_out() -> bool:
    group, other = dist.group.WORLD, dist.new_group([0, 1])
    assert group is not None
    probe_links(group, other)
    assert groups.slow_links[other] == groups.slow_links[group]
    return groups.slow_links[group]


def test_a_slow_link_is_found_slow():
    with lab_of(ranks=2, bandwidth="100mbit") as lab:
        assert lab.run(tried_out) == [True, True]


def alone() -> bool:
    group = dist.group.WORLD
    assert group is not None
    probe_links(group, group)
    return groups.slow_links[group]


def test_one_rank_has_no_slow_link():
    assert on_ranks(1, alone) == [False]
