"""What becomes of an engine that is put together anew."""

from __future__ import annotations

import gc
import logging
import weakref

import torch
import torch.distributed as dist
from torch import nn

import yafsdp_cc
from tests.internals import buffers_of, state_of
from tests.ranks import ranks


class Listener(logging.Handler):
    """Takes down what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@ranks(2)
def test_groups_that_were_made_end_with_the_world() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    yafsdp_cc.shard(model, separate_reduce_group=True)(torch.ones(2, 32)).sum().backward()
    world = dist.group.WORLD  # is held, as torch.distributed.nn does if it is imported only now
    made = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map if group is not world]
    assert made
    del model
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert [group() for group in made] == [None] * len(made)


@ranks(2)
def test_what_an_assembly_leaves_behind() -> None:
    heard = Listener()
    logging.getLogger("yafsdp_cc").addHandler(heard)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 32))
    for block in model:
        yafsdp_cc.fully_shard(block)
    sharded = yafsdp_cc.fully_shard(model)
    gc.collect()
    gc.disable()  # buffers are to go by themselves
    before: list[weakref.ref[object]] = []
    for keeps in (False, True, False):
        sharded.set_reshard_after_forward(not keeps)
        for last in (False, True):
            sharded.set_requires_gradient_sync(last)
            model(torch.ones(2, 32)).sum().backward()
        assert [reference() for reference in before] == [None] * len(before), "buffers of an earlier assembly"
        before = [weakref.ref(each) for each in (state_of(model), *buffers_of(model))]
    assert sum("keeps unsharded gradients" in each for each in heard.said) == (dist.get_rank() == 0)
