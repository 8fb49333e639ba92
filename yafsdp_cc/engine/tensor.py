"""Parameters as users see them: a DTensor whose local tensor is this rank's flat range of the whole tensor.

    whole, [4, 4] row-major     0 1 2 3 4 5 6 7 8 9 a b c d e f
    Cut.bounds (0, 5, 14, 16)   | rank 0  |     rank 1      |r 2|

A parameter, its gradient and its optimizer state share one ``Cut``, so whatever acts element by element acts on the
ranges alone: torch's optimizers, ``clip_grad_norm_``, ``GradScaler`` and checkpoints work unchanged (``dispatch``
says which operations may run, ``norms`` how a norm of ranges becomes the norm of the whole). A small parameter is
not cut at all (``bounds`` is None): every rank then holds the whole tensor, in its own shape.
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import _foreach_supported_types as _for_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _for_clipping

from yafsdp_cc.engine.boxes import Box, boxes
from yafsdp_cc.engine.ranks import on_mesh, shard_group, shard_rank
from yafsdp_cc.engine.scatter import teach_state_dicts
from yafsdp_cc.engine.tensor_parallel import joint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from yafsdp_cc.engine.tensor_parallel import TensorParallel


@dataclass(frozen=True, eq=False)
class Cut:
    """How one parameter is cut across the ranks of a mesh (shard), or (replicate, shard).

    Args:
        name: the parameter's full name, for errors.
        shape: the shape of what is cut: the parameter's own, or that of this rank's box where ``parallel``.
        mesh: the mesh it is cut across, along its last dimension.
        bounds: ``world + 1`` offsets: rank r of that dimension owns the row-major elements
            ``bounds[r]:bounds[r + 1]``. None: every rank holds the whole tensor.
        parallel: how tensor parallelism has divided the parameter before; None where it has not.

    Raises:
        ValueError: the mesh has more than two dimensions, or the bounds do not cut the tensor into one range per rank.
    """

    name: str
    shape: torch.Size
    mesh: DeviceMesh
    bounds: tuple[int, ...] | None
    parallel: TensorParallel | None = None
    _specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict, init=False, repr=False)

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
                f"'{self.name}': bounds {self.bounds} do not cut {self.numel} elements into {world} ranges"
            )

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def owned(self) -> tuple[int, int]:
        """The half-open row-major range that this rank holds."""
        if self.bounds is None:
            return 0, self.numel
        rank = shard_rank(self.mesh)
        return self.bounds[rank], self.bounds[rank + 1]

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's local tensor: one flat range, or the whole tensor's own shape when replicated."""
        start, stop = self.owned
        return torch.Size(self.shape if self.bounds is None else (stop - start,))

    @cached_property
    def global_shape(self) -> torch.Size:
        """The parameter's shape, as users see it."""
        return self.shape if self.parallel is None else self.parallel.shape

    @cached_property
    def global_mesh(self) -> DeviceMesh:
        """All ranks among which the parameter is divided."""
        return self.mesh if self.parallel is None else joint(self.mesh, self.parallel.mesh)

    @cached_property
    def counts(self) -> bool:
        """Whether a reduction over the groups counts this rank's elements: a replicated tensor counts once."""
        return self.bounds is not None or shard_rank(self.mesh) == 0

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """A step over each of these in turn reaches every element once."""
        return (shard_group(self.mesh), *(() if self.parallel is None else self.parallel.groups))

    @cached_property
    def boxes(self) -> list[Box]:
        """This rank's range as boxes of the whole tensor. A tensor without elements is one empty box: it exists too."""
        if self.bounds is None or math.prod(self.global_shape) == 0:
            found = [Box((0,) * len(self.shape), tuple(self.shape))]
        else:
            found = boxes(self.shape, *self.owned)
        if self.parallel is None:
            return found
        offsets, _ = self.parallel.box
        return [Box(tuple(map(operator.add, offsets, box.offsets)), box.sizes) for box in found]

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements that this rank holds of a whole tensor, in the local shape."""
        box = whole if self.parallel is None else self.parallel.part_of(whole)
        return self.range_of(box)

    def range_of(self, box: torch.Tensor) -> torch.Tensor:
        """The elements that this rank keeps of what is cut, in the local shape."""
        start, stop = self.owned
        return box.reshape(-1)[start:stop].view(self.local_shape)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """What DTensor says of such a tensor: ``Shard(0)`` or ``Replicate()``, of the global shape, contiguous.

        ``Replicate()`` also along a dimension of replicas.
        """
        if (known := self._specs.get(dtype)) is not None:
            return known
        placement: Placement = Replicate() if self.bounds is None else Shard(0)
        shape = self.global_shape
        strides = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
        placements = (*(Replicate(),) * (self.mesh.ndim - 1), placement)
        if self.parallel is not None:
            placements += self.parallel.placements
        spec = DTensorSpec(self.global_mesh, placements, tensor_meta=TensorMeta(shape, strides, dtype))
        return self._specs.setdefault(dtype, spec)

    @property
    def replicated(self) -> tuple[Placement, ...]:
        """The placements of a whole tensor on the global mesh."""
        return (Replicate(),) * self.global_mesh.ndim

    def matches(self, other: Cut) -> bool:
        """Whether local tensors of both hold the same elements of tensors of one shape."""
        if self is other:
            return True
        divided = other.parallel is None if self.parallel is None else self.parallel.matches(other.parallel)
        return divided and (self.shape, self.bounds, self.mesh) == (other.shape, other.bounds, other.mesh)

    def rename(self, name: str) -> None:
        """Call the parameter ``name`` from now on: what shards a part of a model does not know its full name."""
        object.__setattr__(self, "name", name)

    def __str__(self) -> str:
        if self.bounds is None and self.parallel is None:
            return f"'{self.name}' (replicated {list(self.shape)})"
        held, whole = self.owned[1] - self.owned[0], math.prod(self.global_shape)
        return f"'{self.name}' (sharded {list(self.global_shape)}, this rank holds {held} of {whole} elements)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Cut:
        return self  # Immutable, and a mesh has no second copy.


class FlatDTensor(DTensor):
    """A tensor cut by a ``Cut``; made by ``flat_dtensor``. ``shape`` is global, ``to_local()`` is this rank's range.

    Element-wise, foreach and fused operations act on the local tensor, in place where torch's do; its version counter
    grows with every such change. Norms are lazy (``norms.LazyNorm``). Every other operation raises
    ``NotImplementedError`` with the parameter's full name.
    """

    # In the __dict__: with __slots__ of our own, asynchronous checkpoints would look for DTensor's slots in vain and
    # write what happened to be in memory.
    _cut: Cut

    _handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = cls._handlers.get(func)
        if handler is None:
            # Met for the first time. Imported here because the handlers are about this class.
            from yafsdp_cc.engine.dispatch import handler_of

            handler = cls._handlers[func] = handler_of(func)
        return handler(args, kwargs or {})

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's elements, 1-D (or the whole tensor in its own shape when replicated): the very tensor that
        holds them, outside of autograd, so writing to it writes to the parameter."""
        return self._local_tensor

    @torch.no_grad()
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, a new one, on every rank of the mesh; outside of autograd. A collective unless replicated:
        call it on all ranks."""
        whole, parallel = self._gathered(), self._cut.parallel
        if parallel is not None:
            whole = parallel.around(on_mesh(whole, self._cut.mesh)).full_tensor()
        return whole.to(self.device)

    @torch.no_grad()
    def uncut(self) -> torch.Tensor:
        """The tensor as it was before it was cut, a new one: whole, or the DTensor of tensor parallelism; outside of
        autograd. A collective of the ranks that it is cut across, unless they all hold it whole."""
        whole, parallel = self._gathered().to(self.device), self._cut.parallel
        return whole if parallel is None else parallel.around(whole)

    def _gathered(self) -> torch.Tensor:
        """What is cut, put together; where the mesh is, unless this rank holds all of it."""
        cut, local = self._cut, self._local_tensor
        if cut.bounds is None:
            return local.clone()
        widths = [stop - start for start, stop in zip(cut.bounds, cut.bounds[1:], strict=False)]
        widest = max(widths)
        if widest == 0:
            return local.new_empty(cut.shape)
        # gloo gathers equal pieces only, and not every dtype: pieces padded to the widest, as bytes.
        piece = local.contiguous()
        if local.numel() < widest:
            piece = local.new_zeros(widest)
            piece[: local.numel()].copy_(local)
        piece = on_mesh(piece, cut.mesh)
        gathered = piece.new_empty(widest * len(widths))
        _all_gather(gathered.view(torch.uint8), piece.view(torch.uint8), group=shard_group(cut.mesh))
        if min(widths) < widest:
            gathered = torch.cat(
                [part[:width] for part, width in zip(gathered.view(len(widths), widest), widths, strict=True)]
            )
        return gathered.view(cut.shape)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """As torch's, to ``Replicate()`` on the same mesh: a plain DTensor, outside of autograd. A collective.

        Raises:
            NotImplementedError: other placements; go through ``Replicate()``.
        """
        if placements is None or tuple(placements) != self._cut.replicated:
            raise NotImplementedError(
                f"redistribute to {placements} on {self._cut}: call .redistribute(placements="
                f"{list(self._cut.replicated)}) first"
            )
        whole = self.full_tensor()
        if forward_dtype is not None:
            whole = whole.to(forward_dtype)
        return DTensor.from_local(whole, self._cut.global_mesh, placements, run_check=False)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> NoReturn:
        """Refused, because it would never run: gradients reach a sharded parameter by the engine, not by autograd."""
        raise NotImplementedError(
            f"register_hook on {self._cut}: the hook would never run. register_post_accumulate_grad_hook does, once "
            "the gradient is reduced"
        )

    @property
    def data(self) -> torch.Tensor:
        """This tensor outside of autograd, sharing its elements."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        # torch would swap the outer shell and leave the elements behind without a word.
        raise NotImplementedError(f"assigning .data of {self._cut}: write into it, with .copy_() under no_grad")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = self._cut.owned
        held = "replicated" if self._cut.bounds is None else f"holds {start}:{stop} of {self._cut.numel}"
        if self._cut.parallel is not None:
            held += f" in {list(self._cut.shape)} at {list(self._cut.parallel.box[0])}"
        return f"FlatDTensor('{self._cut.name}', {list(self.shape)}, {self.dtype}, {self.device}, {held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatDTensor:
        # torch's would copy the whole buffer that the local tensor is a view of, and the mesh.
        if id(self) in memo:
            copied: FlatDTensor = memo[id(self)]
            return copied
        if not self.is_leaf:
            raise RuntimeError(f"deepcopy of {self._cut}: only leaf tensors can be copied, detach it first")
        copied = memo[id(self)] = wrap(self._local_tensor.clone(), self._cut)
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, proto: object) -> NoReturn:
        raise TypeError(
            f"pickling {self._cut}: a part is no use without the other ranks; save with yafsdp_cc.save or "
            "torch.distributed.checkpoint, or the .full_tensor()"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self._cut, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], flatten_spec: tuple[Cut, bool], outer_size: Any, outer_stride: Any
    ) -> FlatDTensor:
        cut, requires_grad = flatten_spec
        return wrap(inner_tensors["_local_tensor"], cut, requires_grad)

    # What torch.distributed.checkpoint asks of a tensor: the boxes this rank saves, those it wants, and each as a view.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._cut.boxes]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._cut.global_shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        first = 0
        for box in self._cut.boxes:
            if index.offset == torch.Size(box.offsets):
                return self._local_tensor.view(-1)[first : first + box.numel].view(box.sizes)
            first += box.numel
        raise ValueError(f"no part at {index.offset} on this rank: {self._cut}")


_shell = DTensor.__new__
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # The name since 2.13, and before.


def wrap(local: torch.Tensor, cut: Cut, requires_grad: bool = False) -> FlatDTensor:
    """``flat_dtensor`` for those who know that ``local`` fits: unchecked, and past DTensor's slow ``__init__``."""
    # DTensor takes over the local tensor's place in its storage but not the storage, and torch then believes it to be
    # memory at that address: it is shown a tensor that begins where it should.
    shown = local if local.storage_offset() == 0 else local.new_empty(0)
    flat = cast("FlatDTensor", _shell(FlatDTensor, shown, cut.spec(local.dtype), requires_grad=requires_grad))
    flat._local_tensor = local
    flat._cut = cut
    return flat


def flat_dtensor(local: torch.Tensor, cut: Cut, requires_grad: bool = False) -> FlatDTensor:
    """A tensor of which this rank holds ``local``, cut by ``cut``.

    Args:
        local: this rank's elements, any dtype: contiguous and 1-D with as many elements as the rank owns (possibly
            none), or of the whole shape when replicated. Not copied: changes in place reach it, and the buffer that it
            is a view of.
        cut: shared with the gradient and the optimizer state of one parameter.

    Raises:
        ValueError: ``local`` is not what this rank owns, or takes part in autograd itself.
    """
    if local.shape != cut.local_shape or not local.is_contiguous():
        raise ValueError(f"{cut} wants a contiguous {list(cut.local_shape)}, got {list(local.shape)}")
    if local.requires_grad or isinstance(local, DTensor):
        raise ValueError(f"{cut} wants a plain local tensor outside of autograd")
    return wrap(local, cut, requires_grad)


# Optimizers and gradient clipping choose their foreach and fused forms by exact type, and torch lists DTensor there
# (torch/distributed/tensor/__init__.py); a subclass has to be listed by itself or it would train with the for-loop.
for _listed in (_for_optimizers, _for_clipping):
    if FlatDTensor not in _listed:
        _listed.append(FlatDTensor)

teach_state_dicts(FlatDTensor)
