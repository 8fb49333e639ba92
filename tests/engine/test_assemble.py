"""What becomes of an engine that is put together anew."""

from __future__ import annotations

import gc
import logging
import weakref

import torch
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
    assert sum("keeps whole gradients" in each for each in heard.said) == (torch.distributed.get_rank() == 0)
