"""Programs of FSDP2's API, run with torch's ``fully_shard`` and with ours: equal losses, gradients and weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

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
TOGETHER = 8
"""Programs that the same ranks run: DTensor works out once for each process how each operation is sharded, which takes
longer than the programs themselves."""


def _runs() -> Iterator[Any]:
    """Each program on the ranks that show most; on the others, too, in ``make soak``."""
    there = [each for each in PROGRAMS if hasattr(FSDPModule, NEWER.get(each.__name__, "unshard"))]
    for param, worlds in ((pytest.param, (2, 4)), (also, (4, 2))):
        for world, on_replicas in zip(worlds, (False, True), strict=True):
            chosen = [each for each in there if bool(MESHES.search(each.__name__)) == on_replicas]
            for start in range(0, len(chosen), TOGETHER):
                yield param(chosen[start : start + TOGETHER], world)


def _id(value: Any) -> str:
    return f"{value[0].__name__} to {value[-1].__name__}" if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("programs", "world"), list(_runs()), ids=_id)
@ranks("world")
def test_runs_as_with_fsdp2(programs: list[Callable[[Api], Run]], world: int) -> None:
    wrong = {}
    for program in programs:
        truth, found = (program(api).done() for api in (torch_fsdp, yafsdp_cc))
        if off := differences(truth, found, 2e-2 if program in IN_BF16 else None):
            wrong[program.__name__] = off
    assert not wrong, wrong


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
