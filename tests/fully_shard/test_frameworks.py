"""What programs of frameworks do with FSDP2, run with torch's ``fully_shard`` and with ours; and the table of them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import yafsdp_cc
from tests.fully_shard.framework_programs import FRAMEWORKS, autocasts
from tests.fully_shard.programs import PROGRAMS
from tests.fully_shard.run import differences
from tests.models import Transformer
from tests.ranks import ranks
from tests.twins import seeded
from tests.versions import needs_torch

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "bench/results/framework-programs.md").read_text(encoding="utf-8")
REFUSALS = (ROOT / "docs/fsdp2.md").read_text(encoding="utf-8").partition("These are refused")[2]
WORLDS = {"four ranks": 4}
BF16 = (autocasts,)
MESH_OF_ITS_OWN = "a placement on a mesh of its own"


@pytest.mark.parametrize(("group", "world"), [(group, WORLDS.get(group, 2)) for group in FRAMEWORKS])
@ranks("world")
def test_runs_as_with_fsdp2(group: str, world: int) -> None:
    wrong = {}
    for program in FRAMEWORKS[group]:
        truth, found = (program(api).done() for api in (torch_fsdp, yafsdp_cc))
        if off := differences(truth, found, 2e-2 if program in BF16 else None):
            wrong[program.__name__] = off
    assert not wrong, wrong


# -- what is refused --------------------------------------------------------------------------------------------------


def sharded() -> Any:
    model: Any = seeded(Transformer)
    for block in model.blocks:
        yafsdp_cc.fully_shard(block)
    return yafsdp_cc.fully_shard(model)


def used() -> Any:
    model = sharded()
    model(torch.zeros(1, 2, dtype=torch.long))
    return model


def put_in_place(model: Any) -> Any:
    model.head.weight = nn.Parameter(model.head.weight.full_tensor())
    return model


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def on_a_mesh_of_its_own(_: nn.Parameter) -> Any:
    info = _fsdp_common.FSDPMeshInfo(mesh=init_device_mesh("cpu", (2,)), shard_mesh_dim=0)
    return _fsdp_common.ShardPlacementResult(placement=Shard(0), mesh_info=info)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rows into `to_local()`": (
        lambda: sharded().head.weight.to_local().detach().copy_(rows_of(seeded(Transformer).head.weight.detach())),
        RuntimeError,
        "size|shape",
    ),
    "a file of each rank's `state_dict()`": (
        lambda: torch.save(sharded().state_dict(), io.BytesIO()),
        TypeError,
        "save with yafsdp_cc.save",
    ),
    "another dtype, after a forward": (lambda: used().to(torch.bfloat16), RuntimeError, "before the first forward"),
    "a parameter put in another's place, after `fully_shard`": (
        lambda: put_in_place(sharded())(torch.zeros(1, 2, dtype=torch.long)),
        RuntimeError,
        "'head.weight' was replaced .* change their values in place",
    ),
    "transforms of `torch.func`": (
        lambda: torch.func.jvp(sharded().head, (torch.zeros(1, 32),), (torch.zeros(1, 32),)),
        NotImplementedError,
        "Use torch.autograd, or an unsharded model",
    ),
    "another device": (lambda: sharded().to("meta"), RuntimeError, "cannot be converted or moved"),
    "offsets of shards": (
        lambda: [
            compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements) for p in sharded().parameters()
        ],
        NotImplementedError,
        "sharded by flat ranges: write to it with",
    ),
    "products of sharded matrices": (
        lambda: sharded().head.weight @ sharded().embed.weight.T,
        NotImplementedError,
        r"call .full_tensor\(\)",
    ),
    "`_get_fsdp_state()`": (lambda: sharded()._get_fsdp_state(), NotImplementedError, "not what lies behind them"),
    "`set_all_reduce_hook`": (
        lambda: sharded().set_all_reduce_hook(lambda _: None),
        NotImplementedError,
        r"replicate, shard",
    ),
    MESH_OF_ITS_OWN: (
        lambda: yafsdp_cc.fully_shard(seeded(Transformer), shard_placement_fn=on_a_mesh_of_its_own),
        NotImplementedError,
        r"fully_shard\(module, mesh=...\) on what holds them",
    ),
}


def is_refused(attempt: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        attempt()


@ranks(2)
def test_refused() -> None:
    for what, row in REFUSED.items():
        if what != MESH_OF_ITS_OWN:
            is_refused(*row)


@needs_torch("2.13", "has no ShardPlacementResult")
@ranks(2)
def test_a_placement_on_a_mesh_of_its_own_is_refused() -> None:
    is_refused(*REFUSED[MESH_OF_ITS_OWN])


# -- the table --------------------------------------------------------------------------------------------------------


def test_each_row_of_the_table_has_a_test() -> None:
    named = re.findall(r"^\| .* \| `(\w+)` \|$", TABLE, re.MULTILINE)
    _, *refused = re.findall(r"^\| (.*) \| .* \| .* \|$", REFUSALS, re.MULTILINE)
    assert len(named) == TABLE.count("\n| ") - 1  # but for the head
    ours = {program.__name__ for programs in FRAMEWORKS.values() for program in programs}
    assert len(set(named)) == len(named) >= 40
    assert ours <= set(named) <= ours | {program.__name__ for program in PROGRAMS}
    assert refused == list(REFUSED)
