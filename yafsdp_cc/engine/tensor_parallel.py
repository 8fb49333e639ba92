"""Parameters that tensor parallelism has divided already: each rank shards what it holds across the other dimension.

    whole [4, 6], Shard(1) over tp      a a a | b b b      a rank of tp = 1 holds [4, 3],
                                        a a a | b b b      of which it keeps its range among dp
                                        ...   | ...

A module's forward sees what ``parallelize_module`` gave it, a DTensor on the tensor-parallel mesh; users see one on
both dimensions, of the whole shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from yafsdp_cc.engine.mesh import broadcast_over

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.tensor.placement_types import Placement

    from yafsdp_cc.plan import OwnedParameter


@lru_cache(maxsize=64)
def joint_mesh(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the dimensions of ``mesh``, then those of ``other``; both are slices of one mesh."""
    return DeviceMesh._concatenate([mesh, other])


@dataclass(frozen=True)
class TensorParallel:
    """How tensor parallelism has divided a parameter; equal where the local tensors hold the same elements.

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
        """Return how parameter ``name``, which is to be sharded across ``mesh``, is divided.

        Raises:
            ValueError: ``mesh`` and the parameter's mesh overlap or are not slices of one mesh, or a placement is
                neither ``Shard(dim)`` nor ``Replicate()``.
        """
        try:
            joint_mesh(mesh, tensor.device_mesh)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ValueError(
                f"'{name}' is already a DTensor, across {tensor.device_mesh}, and is to be sharded across {mesh}. If "
                "it is tensor parallel, take both from one mesh with names: mesh = init_device_mesh(..., "
                "mesh_dim_names=('dp', 'tp')), parallelize_module(..., mesh['tp']), then shard across mesh['dp']. If "
                "it was sharded before, shard it once (torch's fully_shard counts), or pass it in ignored_params"
            ) from error
        for placement in tensor.placements:
            if type(placement) is not Shard and type(placement) is not Replicate:
                raise ValueError(
                    f"'{name}' is a DTensor placed as {placement}: parameters that are Shard(dim) or Replicate() "
                    "across the tensor-parallel ranks can be sharded further, no others"
                )
        return cls._of(tensor)

    @classmethod
    def _of(cls, tensor: DTensor) -> TensorParallel:
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where in the whole tensor this rank's local tensor begins."""
        return self._sizes_and_offsets[1]

    @cached_property
    def _sizes_and_offsets(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return tuple(sizes), tuple(offsets)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return torch.empty(self.shape, device="meta").stride()

    def wrap_unsharded(self, view: Tensor) -> DTensor:
        """Return the DTensor on the tensor-parallel mesh whose local tensor is ``view``; differentiable."""
        return DTensor.from_local(
            view, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self._strides
        )

    def local_of(self, full: Tensor) -> Tensor:
        """Return the elements that this rank holds of a whole tensor, as a view of it."""
        return full[tuple(slice(start, start + size) for size, start in zip(*self._sizes_and_offsets, strict=True))]

    def holds(self, tensor: DTensor) -> bool:
        """Return whether ``tensor`` is divided in this way."""
        return TensorParallel._of(tensor) == self

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of ranks that hold different elements: a reduction over each in turn reaches all of them."""
        return self._groups(Shard)

    def _groups(self, kind: type[Placement]) -> tuple[dist.ProcessGroup, ...]:
        dims = [dim for dim, placement in enumerate(self.placements) if type(placement) is kind]
        return tuple(self.mesh.get_group(dim) for dim in dims if self.mesh.size(dim) > 1)

    def broadcast_first(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with that of the first rank that holds the same elements."""
        broadcast_over(self._groups(Replicate), tensor, self.mesh)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the tensor-parallel mesh."""
        return all(self.mesh.get_local_rank(dim) == 0 for dim in range(self.mesh.ndim))


def check_tensor_parallel(owned: Iterable[OwnedParameter], mesh: DeviceMesh) -> None:
    """Check that each parameter that is a DTensor already can be sharded across ``mesh``.

    Raises:
        ValueError: as ``TensorParallel.of``.
    """
    for each in owned:
        if isinstance(each.parameter, DTensor):
            TensorParallel.of(each.name, each.parameter, mesh)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, which may be a DTensor; outside of autograd."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()
