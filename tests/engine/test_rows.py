"""From flat ranges to rows and back, held against torch's ``distribute_tensor``."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.engine.flats import mesh_of_all, part_of, specs_of, uneven_specs_of, wholes
from tests.ranks import on_ranks
from yafsdp_cc.tensor.dtensor import flat_dtensor


def both_ways():
    meshes = [mesh_of_all()]
    if dist.get_world_size() == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        flat_mesh = mesh if mesh.ndim == 1 else mesh["shard"]
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        for specs in (specs_of, uneven_specs_of):
            for dtype in (torch.float32, torch.bfloat16):
                for whole, spec in zip(wholes(dtype=dtype), specs(flat_mesh), strict=True):
                    spec.mesh = mesh
                    if not whole.dim():
                        continue
                    flat = part_of(whole, spec)
                    rows, truth = flat.redistribute(placements=placements), distribute_tensor(whole, mesh, placements)
                    assert (rows.shape, rows.placements) == (truth.shape, truth.placements)
                    assert rows.to_local().shape == truth.to_local().shape
                    assert rows.to_local().equal(truth.to_local()), spec
                    empty = flat_dtensor(torch.zeros(spec.local_shape, dtype=dtype), spec)
                    assert empty.copy_(rows).to_local().equal(flat.to_local()), spec


@pytest.mark.parametrize("world", [3, 4])
def test_flat_ranges_to_rows_and_back(world):
    on_ranks(world, both_ways)
