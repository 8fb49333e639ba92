"""What is exact goes over slow links in messages of its own: the same numbers, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from yafsdp_cc.wire import link
from yafsdp_cc.wire.exchange import Gather, Reduce

from tests.netlab.labs import lab_of
from tests.ranks import on_ranks, ranks

CPU = torch.device("cpu")
CHUNK = 1 << 17
"""Elements: enough for messages of their own, in any dtype and for any number of ranks."""


def exchanged(dtype: torch.dtype) -> list[Tensor]:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    draws = torch.Generator().manual_seed(rank)
    whole, shard = (torch.randn(n, generator=draws).to(dtype) for n in (world * CHUNK, CHUNK))
    gather, reduce = Gather(group, CPU), Reduce(group, CPU)
    reduce.reserve(whole.numel(), dtype)
    gathered = torch.empty_like(whole)
    for work in (*reduce.send(whole, asynchronous=True), *gather.send(gathered, shard, asynchronous=True)):
        work.wait()
    return [torch.cat([part.clone() for _, part in reduce.totals(whole)]), gathered]


@pytest.mark.parametrize("world", [2, 3, 4])
@ranks("world")
def test_sums_and_gathers_are_those_over_fast_links(world):
    group = dist.group.WORLD
    assert group is not None
    for dtype in (torch.float32, torch.bfloat16):
        link._slow[group] = False
        truth = exchanged(dtype)
        link._slow[group] = True
        assert all(one.equal(other) for one, other in zip(exchanged(dtype), truth, strict=True))


def tried_out() -> bool:
    group, other = dist.group.WORLD, dist.new_group([0, 1])
    assert group is not None
    link.try_out(group, other)
    assert link.is_slow(other) == link.is_slow(group)
    return link.is_slow(group)


def test_a_slow_link_is_found_slow():
    with lab_of(ranks=2, bandwidth="100mbit") as lab:
        assert lab.run(tried_out) == [True, True]


def alone() -> bool:
    group = dist.group.WORLD
    assert group is not None
    link.try_out(group)
    return link.is_slow(group)


def test_one_rank_has_no_slow_link():
    assert on_ranks(1, alone) == [False]
