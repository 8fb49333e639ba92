"""Parameters that tensor parallelism has divided already: each rank cuts what it holds across the other dimension.

    whole [4, 6], Shard(1) over tp      a a a | b b b      a rank of tp = 1 holds [4, 3],
                                        a a a | b b b      of which it keeps its range among dp
                                        ...   | ...

A module's forward is shown what ``parallelize_module`` gave it, a DTensor across the tensor-parallel ranks; users see
one across both dimensions, of the whole shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from yafsdp_cc.engine.ranks import send_first

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.tensor.placement_types import Placement

    from yafsdp_cc.plan import OwnedParameter


@lru_cache(maxsize=64)
def joint(mesh: DeviceMesh, parallel: DeviceMesh) -> DeviceMesh:
    """The dimensions of one mesh, and those of another of the same ranks."""
    return DeviceMesh._concatenate([mesh, parallel])


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """What a rank holds of a tensor divided by tensor parallelism: a box of it.

    Args:
        mesh: the tensor-parallel ranks, in one dimension or several.
        placements: ``Shard(dim)`` or ``Replicate()`` for each of them.
        shape: of the whole tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @classmethod
    def of(cls, name: str, tensor: DTensor, mesh: DeviceMesh) -> TensorParallel:
        """How parameter ``name`` is divided, which is to be cut across ``mesh``.

        Raises:
            ValueError: it is divided in another way, or across ranks of ``mesh``.
        """
        theirs = tensor.device_mesh
        try:
            joint(mesh, theirs)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ValueError(
                f"'{name}' is already a DTensor, across {theirs}, and is to be cut across {mesh}. If it is tensor "
                "parallel, take both from one mesh with names: mesh = init_device_mesh(..., mesh_dim_names=('dp', "
                "'tp')), parallelize_module(..., mesh['tp']), then shard across mesh['dp']. If it was sharded before, "
                "shard it once (torch's fully_shard counts), or pass it in ignored_params"
            ) from error
        for placement in tensor.placements:
            if type(placement) is not Shard and type(placement) is not Replicate:
                raise ValueError(
                    f"'{name}' is a DTensor placed as {placement}: parameters that are Shard(dim) or Replicate() "
                    "across the tensor-parallel ranks can be cut further, no others"
                )
        return cls(theirs, tuple(tensor.placements), tensor.shape)

    @cached_property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of what this rank holds."""
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return tuple(offsets), tuple(sizes)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return torch.empty(self.shape, device="meta").stride()

    def around(self, part: Tensor) -> DTensor:
        """The DTensor of which this rank holds ``part``; autograd goes through."""
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self._strides
        )

    def part_of(self, whole: Tensor) -> Tensor:
        """The box that this rank holds of a whole tensor."""
        offsets, sizes = self.box
        return whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]

    def holds(self, tensor: DTensor) -> bool:
        """Whether the local part of ``tensor`` is this box."""
        return (tensor.device_mesh, tuple(tensor.placements), tensor.shape) == (self.mesh, self.placements, self.shape)

    def matches(self, other: TensorParallel | None) -> bool:
        """Whether both are boxes at one place of tensors of one shape."""
        return other is not None and (self.mesh, self.placements, self.shape) == (
            other.mesh,
            other.placements,
            other.shape,
        )

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """A step over each of these in turn reaches every box."""
        return self._groups(Shard)

    def _groups(self, kind: type[Placement]) -> tuple[dist.ProcessGroup, ...]:
        dims = [dim for dim, placement in enumerate(self.placements) if type(placement) is kind]
        return tuple(self.mesh.get_group(dim) for dim in dims if self.mesh.size(dim) > 1)

    def of_first(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with that of the first rank that holds the same box."""
        send_first(self._groups(Replicate), tensor, self.mesh)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the mesh."""
        return all(self.mesh.get_local_rank(dim) == 0 for dim in range(self.mesh.ndim))


def check_divided(owned: Iterable[OwnedParameter], mesh: DeviceMesh) -> None:
    """See that what is divided already can be cut across ``mesh``.

    Raises:
        ValueError: as ``TensorParallel.of``.
    """
    for each in owned:
        if isinstance(each.parameter, DTensor):
            TensorParallel.of(each.name, each.parameter, mesh)


def held(tensor: Tensor) -> Tensor:
    """The elements that this rank holds of a tensor, which tensor parallelism may have divided; out of autograd."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()
