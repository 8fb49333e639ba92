"""How parameters are divided among ranks: where a group's parameters lie in one flat buffer, and which elements of each
a rank holds.

    parameters   | w1        |·| w2               |·| w3     |····|      · padding
    chunks       | rank 0          | rank 1          | rank 2     |      world * chunk elements

Every parameter and every chunk starts at a multiple of ``ALIGNMENT`` elements, so views are aligned for vector loads in
any dtype, and a block of a codec lies in one chunk and in one parameter. A parameter may straddle chunks, so a rank
holds a flat range of it (``ShardSpec``), possibly an empty one. Where each matrix must lie whole on one rank
(``sharding.ownership``), chunks end at borders of matrices, and differ in length; a chunk may be empty. A stack of
matrices may lie in several chunks:

    chunks       | rank 0              | rank 1          | rank 3 |      rank 2 owns nothing of this group

Where tensor parallelism has divided a parameter before (``TensorParallel``), each rank's local tensor is sharded:

    whole [4, 6], Shard(1) over tp      a a a | b b b      a rank of tp = 1 holds [4, 3],
                                        a a a | b b b      of which it keeps its range among dp
"""

from __future__ import annotations

import math
import operator
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from yafsdp_cc.ranks.mesh import shard_group, shard_rank

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement


ALIGNMENT = 256
"""Number of elements in a codec's block. Parameters begin at multiples: no block has elements of two parameters."""

VECTOR = 32
"""Number of elements at multiples of which unencoded parameters begin: 128 bytes in fp32, 64 bytes in bf16."""


def align(numel: int, multiple: int = ALIGNMENT) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``numel``."""
    return -(-numel // multiple) * multiple


class Extent(NamedTuple):
    """A parameter's place in the flat buffer, in elements."""

    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """Places of parameters in a flat buffer, which consists of one chunk for each rank."""

    extents: tuple[Extent, ...]
    chunks: tuple[int, ...]
    """Number of elements of each rank's chunk, in the order of the chunks in the buffer."""

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        world: int,
        alignment: int = ALIGNMENT,
        owners: Sequence[Sequence[int]] = (),
    ) -> Layout:
        """Lay out parameters of ``shapes`` in the order given, for ``world`` ranks.

        Args:
            shapes: shapes of the parameters.
            world: number of chunks.
            alignment: number of elements at multiples of which parameters and chunks begin.
            owners: for each parameter, the ranks in whose chunks its equal parts lie, in ascending order over all
                parameters. Empty: chunks are equal.
        """
        extents: list[Extent] = []
        offset = 0
        for shape in shapes:
            extent = Extent(tuple(shape), offset, math.prod(shape))
            extents.append(extent)
            offset = align(extent.end, alignment)
        if not owners:
            return cls(tuple(extents), (align(-(-offset // world), alignment),) * world)
        chunks = [0] * world
        for extent, ranks in zip(extents, owners, strict=True):
            for rank in ranks:
                chunks[rank] += extent.numel // len(ranks)
            chunks[ranks[-1]] += -extent.numel % alignment
        # secondary shards (hpZ) are equal parts of the buffer: ``world`` must divide the length of the buffer
        chunks[-1] += -offset % (alignment * world)
        return cls(tuple(extents), tuple(chunks))

    @cached_property
    def world(self) -> int:
        return len(self.chunks)

    @cached_property
    def uneven_chunks(self) -> tuple[int, ...]:
        """``chunks``, or () where all chunks are equally long."""
        return () if len(set(self.chunks)) == 1 else self.chunks

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Offset of each chunk in the buffer, and the end of the last chunk."""
        return tuple(accumulate(self.chunks, initial=0))

    def runs(self, without: int = -1) -> Sequence[range]:
        """Return runs of adjacent ranks whose chunks are equally long and not empty, so that one kernel can serve each
        run; the rank ``without`` is left out, and ends a run."""
        if without not in self.known_runs:
            ranks = [rank for rank, chunk in enumerate(self.chunks) if chunk and rank != without]
            alike = groupby(enumerate(ranks), lambda each: (self.chunks[each[1]], each[1] - each[0]))
            members = [[rank for _, rank in run] for _, run in alike]
            self.known_runs[without] = [range(run[0], run[-1] + 1) for run in members]
        return self.known_runs[without]

    @cached_property
    def known_runs(self) -> dict[int, list[range]]:
        """Results of ``runs`` so far, by its argument: each step calls ``runs``, perhaps for thousands of ranks."""
        return {}

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole flat buffer, padding included."""
        return self.starts[-1]

    @property
    def places(self) -> list[tuple[int, tuple[int, ...]]]:
        """Offset and shape of each parameter in the flat buffer."""
        return [(extent.offset, extent.shape) for extent in self.extents]

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the flat buffer that belong to no parameter: the padding."""
        starts = [*(extent.offset for extent in self.extents), self.numel]
        ends = [0, *(extent.end for extent in self.extents)]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    def bounds(self, extent: Extent) -> tuple[int, ...]:
        """Return ``world + 1`` offsets into the parameter: rank r owns ``bounds[r]`` to ``bounds[r + 1]``."""
        first, last = bisect_left(self.starts, extent.offset), bisect_right(self.starts, extent.end)
        inside = [start - extent.offset for start in self.starts[first:last]]
        return (*(0,) * first, *inside, *(extent.numel,) * (len(self.starts) - last))

    def owned(self, extent: Extent, rank: int) -> tuple[int, int]:
        """Return the half-open range of ``rank``'s chunk that holds elements of the parameter, perhaps none."""
        first, last = self.starts[rank : rank + 2]
        start = min(max(extent.offset, first), last)
        return start - first, max(min(extent.end, last), start) - first


# Parameters that tensor parallelism has divided before ---------------------------------------------------------------


DIVIDED_AS = "_yafsdp_cc_divided_as"
"""Name of a DTensor's attribute: its ``TensorParallel``, if placements do not tell the division (``forms/spmd.py``)."""


@lru_cache(maxsize=64)
def joint_mesh(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the dimensions of ``mesh``, then those of ``other``; both must be slices of one mesh."""
    return DeviceMesh._concatenate([mesh, other])


@dataclass(frozen=True)
class TensorParallel:
    """Division of a parameter by tensor parallelism; equal for parameters whose local tensors hold the same elements.

    A module's forward sees a DTensor on the tensor-parallel mesh, as ``parallelize_module`` made it; users see one of
    the whole shape on the data-parallel and the tensor-parallel mesh.

    Args:
        mesh: mesh of the tensor-parallel ranks, of one dimension or several.
        placements: ``Shard(dim)`` or ``Replicate()`` for each dimension of the mesh.
        shape: shape of the whole tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @classmethod
    def of(cls, tensor: DTensor) -> TensorParallel:
        """Return how tensor parallelism has divided ``tensor``."""
        known: TensorParallel | None = getattr(tensor, DIVIDED_AS, None)
        return known or cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape)

    @cached_property
    def _sizes_and_offsets(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return tuple(sizes), tuple(offsets)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Index in the whole tensor at which this rank's local tensor begins."""
        return self._sizes_and_offsets[1]

    @cached_property
    def divides_matrices(self) -> bool:
        """Whether rows or columns of matrices are divided; expert parallelism divides only stacks of matrices."""
        ndim = len(self.shape)
        return any(isinstance(placement, Shard) and placement.dim % ndim >= ndim - 2 for placement in self.placements)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return make_contiguous_strides_for(self.shape)

    # grad mode is off in a backward, where activation checkpointing reruns forwards that differentiate the DTensor
    @torch.enable_grad()
    def wrap_unsharded(self, view: Tensor) -> DTensor:
        """Return the DTensor on the tensor-parallel mesh whose local tensor is ``view``; differentiable."""
        return DTensor.from_local(
            view, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self._strides
        )

    def local_of(self, full: Tensor) -> Tensor:
        """Return this rank's elements of ``full``, the whole tensor, as a view."""
        return full[tuple(slice(start, start + size) for size, start in zip(*self._sizes_and_offsets, strict=True))]

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups of ranks with different elements: a reduction over each in turn covers the parameter."""
        return self.groups_of(Shard)

    def groups_of(self, kind: type[Placement]) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups, each of several ranks, along the mesh dimensions whose placement is a ``kind``."""
        dims = [dim for dim, placement in enumerate(self.placements) if type(placement) is kind]
        return tuple(self.mesh.get_group(dim) for dim in dims if self.mesh.size(dim) > 1)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a tensor, perhaps a DTensor, detached from autograd's graph."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(eq=False)
class ShardSpec:
    """Sharding of one parameter across the ranks of a mesh (shard), or (replicate, shard).

    Args:
        name: the parameter's full name, for errors. ``fully_shard`` on a part of a model does not know that yet.
        shape: shape of the parameter, or of its local tensor where ``tensor_parallel`` is given.
        mesh: the mesh whose last dimension the parameter is sharded across.
        bounds: ``world + 1`` offsets: rank r of that dimension holds the row-major elements
            ``bounds[r]:bounds[r + 1]``. None: every rank holds the whole tensor.
        tensor_parallel: how tensor parallelism has divided the parameter before; None if it has not.
        owners: ranks that update a matrix or stack of matrices, one for each of its equal parts (whole matrices), in
            ascending order. Empty: an optimizer of matrices (Muon) does not update this parameter by its matrix rule.

    Raises:
        ValueError: the mesh has more than two dimensions, or the bounds do not divide the elements into one range per
            rank.
    """

    name: str
    shape: torch.Size
    mesh: DeviceMesh
    bounds: tuple[int, ...] | None
    tensor_parallel: TensorParallel | None = None
    owner: weakref.ref[object] | None = field(default=None, repr=False)
    """Weak reference to the ``FSDPParam`` that this spec shards (``param.owner_of``); None outside of an engine."""
    owners: tuple[int, ...] = ()
    dtensor_specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict, init=False, repr=False)
    """Torch's ``DTensorSpec``, by dtype, of tensors that are sharded by this ``ShardSpec`` (``tensor/dtensor.py``)."""

    def __post_init__(self) -> None:
        if self.mesh.ndim > 2:
            raise ValueError(
                f"'{self.name}': a mesh is (shard) or (replicate, shard), this one has {self.mesh.ndim} dimensions"
            )
        if self.bounds is None:
            return
        world = self.mesh.size(self.mesh.ndim - 1)
        ends_fit = len(self.bounds) == world + 1 and (self.bounds[0], self.bounds[-1]) == (0, self.numel)
        if not ends_fit or list(self.bounds) != sorted(self.bounds):
            raise ValueError(
                f"'{self.name}': bounds {self.bounds} do not divide {self.numel} elements into {world} ranges"
            )

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def rank(self) -> int:
        """Index of this rank along the shard dimension of the mesh."""
        return shard_rank(self.mesh)

    @cached_property
    def update_bounds(self) -> tuple[int, ...] | None:
        """Bounds of the elements of a matrix or stack that each rank updates; None: every rank updates all of them."""
        if self.bounds is None:
            return None
        of_each = self.numel // len(self.owners)
        return tuple(of_each * bisect_left(self.owners, rank) for rank in range(len(self.bounds)))

    @property
    def updated_shape(self) -> torch.Size:
        """Shape of the tensor whose matrices the optimizer updates: this rank's part of a stack that tensor parallelism
        has divided between matrices, else the whole tensor."""
        parallel = self.tensor_parallel
        return self.shape if parallel is None or not parallel.divides_matrices else parallel.shape

    @property
    def is_assembled(self) -> bool:
        """Whether a matrix or stack must be moved to the ranks that update it."""
        return bool(self.owners) and self.bounds != self.update_bounds

    def local_range(self) -> tuple[int, int]:
        """Return the half-open range of the parameter's row-major elements that this rank holds."""
        return (0, self.numel) if self.bounds is None else (self.bounds[self.rank], self.bounds[self.rank + 1])

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's local tensor: one flat range, or the whole shape where replicated."""
        start, stop = self.local_range()
        return torch.Size(self.shape if self.bounds is None else (stop - start,))

    @cached_property
    def global_shape(self) -> torch.Size:
        """Shape of the parameter as users see it."""
        return self.shape if self.tensor_parallel is None else self.tensor_parallel.shape

    @cached_property
    def global_mesh(self) -> DeviceMesh:
        """Mesh of all ranks among which the parameter is divided."""
        return self.mesh if self.tensor_parallel is None else joint_mesh(self.mesh, self.tensor_parallel.mesh)

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups of ranks with different elements: a reduction over each in turn covers the parameter."""
        return (shard_group(self.mesh), *(() if self.tensor_parallel is None else self.tensor_parallel.groups))

    def local_of(self, unsharded: Tensor) -> Tensor:
        """Return this rank's elements, in ``local_shape``, of a tensor of ``self.shape``: a view or a copy."""
        start, stop = self.local_range()
        return unsharded.reshape(-1)[start:stop].view(self.local_shape)

    def local_of_full(self, full: Tensor) -> Tensor:
        """Return this rank's elements, in ``local_shape``, of a tensor of ``self.global_shape``: a view or a copy."""
        return self.local_of(full if self.tensor_parallel is None else self.tensor_parallel.local_of(full))

    def matches(self, other: ShardSpec) -> bool:
        """Return whether tensors of this spec and ``other`` have one shape, and local tensors the same elements."""
        divided = operator.attrgetter("shape", "bounds", "mesh", "tensor_parallel", "local_shape")
        return divided(self) == divided(other)

    def __str__(self) -> str:
        if self.bounds is None and self.tensor_parallel is None:
            return f"'{self.name}' (replicated {list(self.shape)})"
        held, whole = math.prod(self.local_shape), math.prod(self.global_shape)
        return f"'{self.name}' (sharded {list(self.global_shape)}, this rank holds {held} of {whole} elements)"

    def __deepcopy__(self, memo: object) -> ShardSpec:
        return self  # a parameter, its gradient and its optimizer state share a ``ShardSpec``; a mesh cannot be copied
