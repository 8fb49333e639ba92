"""Converts between two ways to divide a tensor, by flat ranges, as ``ShardSpec`` does, and by rows, as FSDP2's
``Shard(0)``, and gathers both to whole tensors.

    whole, [3, 4] row-major     0 1 2 3 4 5 6 7 8 9 a b
    by rows, 2 ranks            |     rank 0    | rank 1|     ceil(3 / 2) rows each, the last ranks fewer or none
    by flat ranges              |  rank 0   |  rank 1   |

Consecutive rows are a flat range, too. So each rank sends the others only the elements that they will hold, and no rank
ever has the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.tensor import DTensor, Replicate, Shard

from yafsdp_cc.engine.layout import ShardSpec
from yafsdp_cc.forms.subclasses import PLAIN, tensors_of
from yafsdp_cc.ranks.mesh import all_gather_single, shard_group, shard_rank, to_mesh_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class RowShardSpec(ShardSpec):
    """The spec of a parameter whose local tensors are whole rows, with as many dimensions as the parameter.

    The bounds are those of ``Shard(0)``. The local tensor of the parameter, and of optimizer state, may be of a tensor
    subclass, whose operations take rows and not flat ranges of them.
    """

    @cached_property
    def local_shape(self) -> torch.Size:
        start, stop = self.local_range()
        return torch.Size(((stop - start) // max(math.prod(self.shape[1:]), 1), *self.shape[1:]))

    def local_of(self, unsharded: torch.Tensor) -> torch.Tensor:
        start, _ = self.local_range()
        return unsharded.narrow(0, start // max(math.prod(self.shape[1:]), 1), self.local_shape[0])


def first_rows(rows: int, world: int) -> list[int]:
    """Return ``world + 1`` row numbers ``first``: rank r of ``Shard(0)`` holds the rows ``first[r]:first[r + 1]``."""
    most = -(-rows // world)
    return [min(rank * most, rows) for rank in range(world + 1)]


def row_bounds(shape: Sequence[int], world: int) -> list[int]:
    """Return bounds of the ranks' rows by ``Shard(0)``, as row-major offsets of elements."""
    return [first * math.prod(shape[1:]) for first in first_rows(shape[0], world)]


def are_rows(placements: Sequence[Placement]) -> bool:
    """Return whether ``placements`` divide a tensor by rows along only the last dimension of a mesh."""
    *replicas, shard = placements
    return shard == Shard(0) and all(each == Replicate() for each in replicas)


def is_by_rows(tensor: DTensor, mesh: DeviceMesh) -> bool:
    """Return whether ``tensor`` is divided by rows across the last dimension of ``mesh``."""
    return tensor.device_mesh == mesh and are_rows(tensor.placements)


def is_flat_range(tensor: DTensor, spec: ShardSpec) -> bool:
    """Return whether the local tensor of ``tensor`` is a flat range of ``spec``, as from
    ``DTensor.from_local(p.to_local())``.

    Rows have as many dimensions as the whole tensor. (The rows of a vector look like a flat range, and count as rows.)
    """
    local = tensor._local_tensor
    is_known = isinstance(spec, RowShardSpec) or (spec.bounds is not None and len(spec.shape) > 1)
    return is_known and tensor.device_mesh == spec.mesh and local.shape == spec.local_shape


def rows_of(local: torch.Tensor, spec: ShardSpec) -> DTensor:
    """Return the tensor divided by rows, given this rank's flat range by a ``spec`` with bounds. A collective."""
    assert spec.bounds is not None
    rows, world = local, len(spec.bounds) - 1
    if not isinstance(spec, RowShardSpec):
        first = first_rows(spec.shape[0], world)
        [part] = redivided([local], [spec.bounds], [row_bounds(spec.shape, world)], spec.mesh)
        rows = part.view(first[spec.rank + 1] - first[spec.rank], *spec.shape[1:])
    placements = [*[Replicate()] * (spec.mesh.ndim - 1), Shard(0)]
    return DTensor.from_local(
        rows,
        spec.mesh,
        placements,
        run_check=False,
        shape=spec.shape,
        stride=make_contiguous_strides_for(spec.shape),
    )


def flat_range_of(tensor: DTensor, spec: ShardSpec) -> torch.Tensor:
    """Return this rank's flat range, by a ``spec`` with bounds, of a tensor that ``is_by_rows``. A collective.

    Args:
        tensor: a DTensor on ``spec.mesh``, of ``spec.shape``; the same on all replicas.
    """
    assert spec.bounds is not None
    rows, bounds = tensor._local_tensor.detach().contiguous().view(-1), row_bounds(spec.shape, len(spec.bounds) - 1)
    [found] = redivided([rows], [bounds], [spec.bounds], spec.mesh)
    return found


def redivided(
    tensors: Sequence[torch.Tensor], held: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], mesh: DeviceMesh
) -> list[torch.Tensor]:
    """Return this rank's flat range of each of ``tensors`` by its bounds in ``wanted``. A collective.

    Args:
        tensors: this rank's flat range of each tensor by its bounds in ``held``.
    """
    group, rank = shard_group(mesh), shard_rank(mesh)
    found = [each.new_empty(bounds[rank + 1] - bounds[rank]) for each, bounds in zip(tensors, wanted, strict=True)]
    # the message to each rank holds its parts of all tensors, as bytes: backends do not support every dtype
    sent = list(zip(*(_parts_for(*each, rank) for each in zip(tensors, held, wanted, strict=True)), strict=True))
    received = list(zip(*(_parts_for(*each, rank) for each in zip(found, wanted, held, strict=True)), strict=True))
    ours, theirs = ([sum(part.nbytes for part in parts) for parts in of_peers] for of_peers in (sent, received))
    if len(tensors) == 1:  # the parts of a single tensor are adjacent: send it without a copy
        message = tensors[0].view(torch.uint8)
    else:
        message = torch.cat([part for parts in sent for part in parts])
    message = to_mesh_device(message, mesh)
    arrived = message.new_empty(sum(theirs))
    dist.all_to_all_single(arrived, message, theirs, ours, group=group)
    places = [part for parts in received for part in parts]
    for place, part in zip(places, arrived.split([len(each) for each in places]), strict=True):
        place.copy_(part)
    return found


def _parts_for(tensor: torch.Tensor, bounds: Sequence[int], others: Sequence[int], rank: int) -> Sequence[torch.Tensor]:
    """Return views of ``tensor``, the range of ``rank`` by ``bounds``: the bytes of its elements in each range of
    ``others``."""
    first, last = bounds[rank], bounds[rank + 1]
    sizes = [max(min(last, end) - max(first, start), 0) for start, end in pairwise(others)]
    parts: Sequence[torch.Tensor] = tensor.view(torch.uint8).split([size * tensor.itemsize for size in sizes])
    return parts


def moved(local: torch.Tensor, held: ShardSpec, wanted: ShardSpec) -> torch.Tensor:
    """Return this rank's part by ``wanted`` of a tensor of which it holds ``local`` by ``held``. A collective.

    Args:
        local: a plain tensor.
        held: a spec of the shape and mesh of ``wanted``, with other bounds.
    """
    if held.bounds is None:
        return wanted.local_of(local)
    if wanted.bounds is None:
        return gathered(local, held).to(local.device)
    [found] = redivided([local], [held.bounds], [wanted.bounds], wanted.mesh)
    return found


# Whole tensors -------------------------------------------------------------------------------------------------------


def gathered(local: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return the whole tensor, of the class of ``local``, given this rank's part by a ``spec`` with bounds. A
    collective."""
    assert spec.bounds is not None
    if type(local) in PLAIN:
        return _gathered(local, spec.bounds, spec.shape, spec.mesh)
    whole = local.new_zeros(spec.shape)
    for part, own in zip(tensors_of(whole), tensors_of(local), strict=True):
        bounds = row_bounds(part.shape, len(spec.bounds) - 1)
        part.copy_(_gathered(own.contiguous(), bounds, part.shape, spec.mesh))
    return whole


def _gathered(local: torch.Tensor, bounds: Sequence[int], shape: Sequence[int], mesh: DeviceMesh) -> torch.Tensor:
    """Return a new tensor of ``shape`` on the device of ``mesh``, gathered from all ranks' ranges of ``bounds``."""
    widths = [stop - start for start, stop in pairwise(bounds)]
    widest = max(widths)
    if widest == 0:
        return local.new_empty(shape)
    # gloo gathers only equal sizes and some dtypes: send bytes, padded to the widest
    padding = (widest - local.numel()) * local.itemsize
    padded = to_mesh_device(torch.nn.functional.pad(local.view(-1).view(torch.uint8), (0, padding)), mesh)
    received = padded.new_empty((len(widths), padded.numel()))
    all_gather_single(received.view(-1), padded, group=shard_group(mesh))
    rows = received.view(local.dtype)
    whole = rows.new_empty(shape)
    torch.cat([row[:width] for row, width in zip(rows, widths, strict=True)], out=whole.view(-1))
    return whole  # users could not write to a view returned by an autograd function
