"""Programs of FSDP2's API, run with torch's ``fully_shard`` and with ours: equal losses, gradients and weights."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import yafsdp_cc
from tests.fully_shard.programs import IN_BF16, PROGRAMS
from tests.fully_shard.run import Api, Run, differences
from tests.models import Mlp
from tests.ranks import ranks
from tests.soak import also
from tests.twins import inputs, mine, seeded, square, whole

NEWER = {"reduces_by_other_means": "set_separate_reduce_scatter_group", "recovers": "reset_iter_state"}
"""What FSDP2 of an older torch lacks, by the program that calls it."""
MESHES = re.compile("replicas|another_mesh")
"""In the names of programs that mean something else on four ranks than on two."""
RUNS = [
    (pytest.param if world == (4 if MESHES.search(program.__name__) else 2) else also)(program, world)
    for program in PROGRAMS
    if hasattr(FSDPModule, NEWER.get(program.__name__, "unshard"))
    for world in (2, 4)
]


@pytest.mark.parametrize(("program", "world"), RUNS, ids=lambda value: getattr(value, "__name__", value))
@ranks("world")
def test_runs_as_with_fsdp2(program: Callable[[Api], Run], world: int) -> None:
    truth, found = (program(api).done() for api in (torch_fsdp, yafsdp_cc))
    assert not (off := differences(truth, found, 2e-2 if program in IN_BF16 else None)), off


@ranks(2)
def test_replicate_leaves_out_blocks_that_are_sharded() -> None:
    model, plain = seeded(Mlp), seeded(Mlp)
    for block in model.blocks:
        yafsdp_cc.fully_shard(block)
    replicate(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for step in range(3):
        batches = inputs(step=step)
        square(model, mine(batches)).backward()
        torch.stack([square(plain, each) for each in batches]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, truth in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(ours) if isinstance(ours, DTensor) else ours, truth)
