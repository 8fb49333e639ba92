"""Parameters of many shapes, whole, and sharded as a group shards them, or otherwise."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from yafsdp_cc.engine.layout import Layout, ShardSpec
from yafsdp_cc.tensor.dtensor import flat_dtensor

SHAPES = [(12, 9), (3, 5, 2), (), (7,), (8,), (1,), (64, 3), (0, 4), ()]
REPLICATED = {4, 8}
EMPTY_GRADIENT = SHAPES.index((0, 4))


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def specs_of(mesh):
    """Laid out as a unit lays them out (some ranks hold none of a parameter), some of them replicated."""
    layout = Layout.of(SHAPES, mesh.size())
    return [
        ShardSpec(f"layers.{i}.w", torch.Size(shape), mesh, None if i in REPLICATED else layout.bounds(extent))
        for i, (shape, extent) in enumerate(zip(SHAPES, layout.extents, strict=True))
    ]


def uneven_specs_of(mesh):
    """Ranges that follow no alignment: whole tensors on the last rank, and ragged ones."""
    world = mesh.size()
    specs = []
    for i, shape in enumerate(SHAPES):
        numel = math.prod(shape)
        starts = [numel * (r * r) // (world * world) if i % 2 == 0 else 0 for r in range(world)]
        specs.append(ShardSpec(f"ragged.{i}", torch.Size(shape), mesh, (*starts, numel)))
    return specs


def part_of(whole, spec):
    """This rank's part of a whole tensor, in memory of its own."""
    start, stop = spec.local_range()
    return flat_dtensor(whole.clone() if spec.bounds is None else whole.reshape(-1)[start:stop].clone(), spec)


def wholes(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def twins(mesh, specs=specs_of, **kwargs):
    """Whole parameters with gradients, and the same sharded."""
    ours, theirs = [], []
    for whole, grad, spec in zip(wholes(0, **kwargs), wholes(1, **kwargs), specs(mesh), strict=True):
        theirs.append(nn.Parameter(whole.clone()))
        theirs[-1].grad = grad.clone()
        ours.append(nn.Parameter(part_of(whole, spec)))
        ours[-1].grad = part_of(grad, spec)
    return ours, theirs


def one_sharded(name="layers.0.w", shape=(4, 4), bounds=None):
    """A parameter of 16 elements over the first elements of a buffer of 64, on this rank."""
    mesh = mesh_of_all()
    numel = math.prod(shape)
    spec = ShardSpec(name, torch.Size(shape), mesh, bounds or (0,) + (numel,) * mesh.size())
    buffer = torch.arange(64.0)
    return flat_dtensor(buffer[: spec.local_shape.numel()], spec), buffer
