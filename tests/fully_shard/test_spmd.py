"""Parameters on one mesh of data- and tensor-parallel ranks (``dp_mesh_dims``): the numbers of FSDP2."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import yafsdp_cc
from tests.ranks import ranks
from tests.twins import seeded, whole
from tests.versions import needs_torch

Dims: Any = getattr(torch_fsdp, "DataParallelMeshDims", None)
pytestmark = needs_torch("2.13", "has no DataParallelMeshDims")
WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


def on_all_ranks(mesh: DeviceMesh) -> nn.Sequential:
    """Blocks whose parameters are divided across the last dimension of ``mesh``, and the same across the others."""
    model = nn.Sequential(*(seeded(Block) for _ in range(2)))
    for block in model:
        for module, weight, bias in ((block.up, Shard(0), Shard(0)), (block.down, Shard(1), Replicate())):
            for name, placement in (("weight", weight), ("bias", bias)):
                places = [*[Replicate()] * (mesh.ndim - 1), placement]
                value = distribute_tensor(getattr(module, name).detach(), mesh, places)
                module.register_parameter(name, nn.Parameter(value))
    return model


def train(api: Any, mesh: DeviceMesh, dims: Any, steps: int) -> dict[str, Tensor]:
    model = on_all_ranks(mesh)
    for module in (*model, model):
        api.fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    figures: dict[str, Tensor] = {}
    for step in range(steps):
        torch.manual_seed(step)
        inputs = distribute_tensor(torch.randn(8, WIDTH), mesh, [*[Shard(0)] * (mesh.ndim - 1), Replicate()])
        model(inputs).square().mean().backward()
        figures |= {f"{step} {name}": whole(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return figures | {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


@ranks(4)
def test_trains_as_fsdp2() -> None:
    for shape, names, dims, steps in (
        ((2, 2), ("dp", "tp"), {"shard": "dp"}, 2),
        ((2, 1, 2), ("replicate", "dp", "tp"), {"shard": "dp", "replicate": "replicate"}, 1),
        ((1, 2, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}, 1),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        found, truth = (train(api, mesh, Dims(**dims), steps) for api in (yafsdp_cc, torch_fsdp))
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-7), (names, name)


MISTAKES: list[tuple[Any, type[Exception], str]] = [
    ("dp", TypeError, "dp_mesh_dims takes torch.distributed.fsdp.DataParallelMeshDims"),
    ({"shard": "fsdp"}, ValueError, "dp_mesh_dims names 'fsdp', and the dimensions of the mesh are ['dp', 'tp']"),
    ({"replicate": "dp"}, ValueError, "without shard shards nothing"),
    ({"shard": "tp"}, ValueError, "'up.weight' is placed as S(0) on the data-parallel dimension 'tp'"),
    ({"shard": ("dp", "tp")}, ValueError, "the mesh has no dimensions beside ['dp', 'tp']: leave dp_mesh_dims out"),
    ({"shard": "dp"}, ValueError, "'weight' is a plain tensor, and with dp_mesh_dims every parameter is a DTensor on"),
]


@ranks(2)
def test_mistakes_are_named() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    same = nn.Linear(8, 8, bias=False)
    same.weight = nn.Parameter(distribute_tensor(same.weight.detach(), mesh, [Replicate()] * 2))
    for dims, kind, says in MISTAKES:
        module = on_all_ranks(mesh)[0] if "up." in says else nn.Linear(8, 8) if "plain tensor" in says else same
        with pytest.raises(kind, match=re.escape(says)):
            yafsdp_cc.fully_shard(module, mesh=mesh, dp_mesh_dims=Dims(**dims) if isinstance(dims, dict) else dims)
