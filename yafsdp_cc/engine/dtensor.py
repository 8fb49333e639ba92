"""Sharded parameters as users see them: a DTensor whose local tensor is this rank's flat range of the whole tensor.

    whole, [4, 4] row-major           0 1 2 3 4 5 6 7 8 9 a b c d e f
    ShardSpec.bounds (0, 5, 14, 16)   | rank 0  |     rank 1      |r 2|

A parameter, its gradient and its optimizer state share one ``ShardSpec``, so an operation on each element by itself is
that operation on the local tensors: torch's optimizers, ``clip_grad_norm_``, ``GradScaler`` and checkpoints work
unchanged. DTensor's own propagation is not asked: it knows slices along a dimension, and would let tensors with other
bounds pass. A small parameter is not sharded (``bounds`` is None): every rank holds the whole tensor, in its own shape.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import weakref
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils
import torch.distributed.checkpoint.state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from yafsdp_cc.engine import norms
from yafsdp_cc.engine.mesh import (
    all_groups,
    all_reduce_over,
    broadcast_from_first,
    shard_group,
    shard_rank,
    to_mesh_device,
)
from yafsdp_cc.engine.norms import LazyNorm, Reduction, Summand
from yafsdp_cc.engine.tensor_parallel import joint_mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from yafsdp_cc.engine.tensor_parallel import TensorParallel

aten = torch.ops.aten
increment_version = torch._C._increment_version
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since 2.13, and before


def chunk_metadata(shape: Sequence[int], start: int, stop: int) -> list[ChunkStorageMetadata]:
    """Return the row-major range ``start:stop`` of a tensor as chunks, the form in which checkpoints address parts.

    Elements 5 to 14 of a ``[4, 4]`` tensor are three chunks::

        . . . .
        . a a a      a  offsets (1, 1), sizes (1, 3)
        b b b b      b  offsets (2, 0), sizes (1, 4)
        c c . .      c  offsets (3, 0), sizes (1, 2)

    Returns:
        At most ``2 * len(shape) - 1`` chunks, whose elements are consecutive and in order; none for an empty range.

    Raises:
        ValueError: the range does not lie within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start}:{stop} do not lie within a tensor of shape {list(shape)}")
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    chunks = []
    while start < stop:
        offsets = [start // stride % size for size, stride in zip(shape, strides, strict=True)]
        sizes = list(shape)
        for dim, stride in enumerate(strides):
            if start % stride == 0 and start + stride <= stop:  # whole rows of this dimension: as many as fit
                sizes[dim] = min((stop - start) // stride, shape[dim] - offsets[dim])
                break
            sizes[dim] = 1
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        start += math.prod(sizes)
    return chunks


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """How one parameter is sharded across the ranks of a mesh (shard), or (replicate, shard).

    Args:
        name: the parameter's full name, for errors.
        shape: the shape of what is sharded: the parameter's, or its local one where ``tensor_parallel``.
        mesh: the mesh it is sharded across, along its last dimension.
        bounds: ``world + 1`` offsets: rank r of that dimension holds the row-major elements
            ``bounds[r]:bounds[r + 1]``. None: every rank holds the whole tensor.
        tensor_parallel: how tensor parallelism has divided the parameter before; None where it has not.
        owner: what the engine keeps the parameter in; None outside of it.

    Raises:
        ValueError: the mesh has more than two dimensions, or the bounds are not those of one range per rank.
    """

    name: str
    shape: torch.Size
    mesh: DeviceMesh
    bounds: tuple[int, ...] | None
    tensor_parallel: TensorParallel | None = None
    owner: weakref.ref[Any] | None = field(default=None, repr=False)
    _dtensor_specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict, init=False, repr=False)

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
    def _rank(self) -> int:
        return shard_rank(self.mesh)

    def local_range(self, rank: int | None = None) -> tuple[int, int]:
        """Return the half-open row-major range that ``rank`` of the shard dimension holds; None: this rank."""
        if self.bounds is None:
            return 0, self.numel
        rank = self._rank if rank is None else rank
        return self.bounds[rank], self.bounds[rank + 1]

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's local tensor: one flat range, or the whole tensor's own shape when replicated."""
        start, stop = self.local_range()
        return torch.Size(self.shape if self.bounds is None else (stop - start,))

    @cached_property
    def global_shape(self) -> torch.Size:
        """The parameter's shape, as users see it."""
        return self.shape if self.tensor_parallel is None else self.tensor_parallel.shape

    @cached_property
    def global_mesh(self) -> DeviceMesh:
        """All ranks among which the parameter is divided."""
        return self.mesh if self.tensor_parallel is None else joint_mesh(self.mesh, self.tensor_parallel.mesh)

    @cached_property
    def across(self) -> norms.Across:
        """The ranks that a reduction over all elements includes."""
        theirs = () if self.tensor_parallel is None else self.tensor_parallel.groups
        return norms.Across(self.global_mesh, (shard_group(self.mesh), *theirs))

    @cached_property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """This rank's elements as chunks of the whole tensor. A tensor without elements is one empty chunk."""
        if self.bounds is None or math.prod(self.global_shape) == 0:
            chunks = [ChunkStorageMetadata(torch.Size((0,) * len(self.shape)), self.shape)]
        else:
            chunks = chunk_metadata(self.shape, *self.local_range())
        if self.tensor_parallel is None:
            return chunks
        first = self.tensor_parallel.offsets
        return [ChunkStorageMetadata(torch.Size(map(operator.add, first, c.offsets)), c.sizes) for c in chunks]

    def local_of(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements, in the local shape, of a tensor of ``shape``."""
        start, stop = self.local_range()
        return unsharded.reshape(-1)[start:stop].view(self.local_shape)

    def local_of_full(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements, in the local shape, of a tensor of ``global_shape``."""
        return self.local_of(full if self.tensor_parallel is None else self.tensor_parallel.local_of(full))

    def dtensor_spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Return what DTensor knows of such a tensor: the global shape, contiguous, and placements: ``Shard(0)`` or
        ``Replicate()`` along the shard dimension, then those of tensor parallelism."""
        if dtype not in self._dtensor_specs:
            placement: Placement = Replicate() if self.bounds is None else FlatShard(0)
            if isinstance(placement, FlatShard):
                placement.spec = self
            theirs = () if self.tensor_parallel is None else self.tensor_parallel.placements
            placements = (*(Replicate(),) * (self.mesh.ndim - 1), placement, *theirs)
            shape = self.global_shape
            strides = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
            meta = TensorMeta(shape, strides, dtype)
            self._dtensor_specs[dtype] = DTensorSpec(self.global_mesh, placements, tensor_meta=meta)
        return self._dtensor_specs[dtype]

    def matches(self, other: ShardSpec) -> bool:
        """Return whether local tensors of both hold the same elements of tensors of one shape."""
        divided = operator.attrgetter("shape", "bounds", "mesh", "tensor_parallel")
        return self is other or divided(self) == divided(other)

    def rename(self, name: str) -> None:
        """Change the name: ``fully_shard`` on a part of a model does not know the parameter's full name yet."""
        object.__setattr__(self, "name", name)

    def set_owner(self, owner: object) -> None:
        """Refer to ``owner``, without keeping it alive."""
        object.__setattr__(self, "owner", weakref.ref(owner))

    def __str__(self) -> str:
        if self.bounds is None and self.tensor_parallel is None:
            return f"'{self.name}' (replicated {list(self.shape)})"
        held, whole = math.prod(self.local_shape), math.prod(self.global_shape)
        return f"'{self.name}' (sharded {list(self.global_shape)}, this rank holds {held} of {whole} elements)"

    def __deepcopy__(self, memo: object) -> ShardSpec:
        return self  # Immutable, and a mesh has no second copy.


class FlatShard(Shard):
    """``Shard(0)``, and equal to it, for what reads placements; to compute a slice from it is an error.

    A flat range is no slice along a dimension. torch's state dict functions copy such slices into ``to_local()``: one
    of the right size, but of other elements, would go unnoticed.
    """

    spec: ShardSpec | str = "a parameter"  # of a copy or from a pickle

    def _local_shard_size_and_offset(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"a slice along a dimension was asked of {self.spec}, which is sharded by flat ranges. To set a full state "
            "dict with torch.distributed.checkpoint.state_dict, call yafsdp_cc.patch_torch() once before"
        )


class _EqualsDTensor(type(DTensor)):  # type: ignore[misc]
    """A class that equals ``DTensor``: optimizers and ``clip_grad_norm_`` choose their foreach and fused forms by
    ``type(p) in [..., DTensor]``, and would otherwise loop over the parameters."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is DTensor

    __hash__ = type.__hash__


class FlatDTensor(DTensor, metaclass=_EqualsDTensor):
    """A tensor sharded by a ``ShardSpec``; made by ``flat_dtensor``. ``shape`` is global, ``to_local()`` a flat range.

    Element-wise, foreach and fused operations act on the local tensor, in place where torch's do; its version counter
    grows with every such change. Norms are lazy (``norms.LazyNorm``). Every other operation raises
    ``NotImplementedError`` with the parameter's full name.
    """

    # In the __dict__: with __slots__ of our own, asynchronous checkpoints would look for DTensor's slots in vain and
    # write what happened to be in memory.
    shard_spec: ShardSpec

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _handler_of(func)(func, args, kwargs or {})

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's elements, 1-D (or the whole tensor in its own shape when replicated): the very tensor that
        holds them, outside of autograd, so writing to it writes to the parameter."""
        return self._local_tensor

    @torch.no_grad()
    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor, a new one, on every rank of the mesh; outside of autograd. A collective unless
        replicated: call it on all ranks."""
        unsharded, parallel = self._all_gather(), self.shard_spec.tensor_parallel
        if parallel is not None:
            unsharded = parallel.wrap_unsharded(to_mesh_device(unsharded, self.shard_spec.mesh)).full_tensor()
        return unsharded.to(self.device)

    @torch.no_grad()
    def unsharded(self) -> torch.Tensor:
        """Return the tensor as it was before it was sharded, a new one: whole, or the DTensor of tensor parallelism;
        outside of autograd. A collective of the ranks that it is sharded across, unless it is replicated."""
        unsharded, parallel = self._all_gather().to(self.device), self.shard_spec.tensor_parallel
        return unsharded if parallel is None else parallel.wrap_unsharded(unsharded)

    def _all_gather(self) -> torch.Tensor:
        """A new tensor of ``shard_spec.shape``; on the mesh's device, unless this rank holds all of it."""
        spec, local = self.shard_spec, self._local_tensor
        if spec.bounds is None:
            return local.clone()
        widths = [stop - start for start, stop in zip(spec.bounds, spec.bounds[1:], strict=False)]
        widest = max(widths)
        if widest == 0:
            return local.new_empty(spec.shape)
        # gloo gathers tensors of one size only, and not every dtype: padded to the widest, as bytes.
        padded = local.view(torch.uint8)
        if local.numel() < widest:
            padded = torch.nn.functional.pad(padded, (0, (widest - local.numel()) * local.itemsize))
        padded = to_mesh_device(padded, spec.mesh)
        gathered = padded.new_empty((len(widths), padded.numel()))
        all_gather_single(gathered.view(-1), padded, group=shard_group(spec.mesh))
        rows = gathered.view(local.dtype)
        if min(widths) == widest:
            return rows.view(spec.shape)
        return torch.cat([row[:width] for row, width in zip(rows, widths, strict=True)]).view(spec.shape)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As torch's, but outside of autograd and of the whole tensor: a plain DTensor. A collective."""
        replicated = [Replicate()] * self.device_mesh.ndim
        return DTensor.from_local(self.full_tensor(), self.device_mesh, replicated, run_check=False).redistribute(
            *args, **kwargs
        )

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> NoReturn:
        """Refused, because it would never run: gradients reach a sharded parameter by the engine, not by autograd."""
        raise NotImplementedError(
            f"register_hook on {self.shard_spec}: the hook would never run. register_post_accumulate_grad_hook does, "
            "once the gradient is reduced"
        )

    @property
    def data(self) -> torch.Tensor:
        """This tensor outside of autograd, sharing its elements."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        # torch would swap the outer tensor and keep the local one, without an error.
        raise NotImplementedError(f"assigning .data of {self.shard_spec}: write into it, with .copy_() under no_grad")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec, parallel = self.shard_spec, self.shard_spec.tensor_parallel
        start, stop = spec.local_range()
        held = "replicated" if spec.bounds is None else f"holds {start}:{stop} of {spec.numel}"
        if parallel is not None:
            held += f" in {list(spec.shape)} at {list(parallel.offsets)}"
        return f"FlatDTensor('{spec.name}', {list(self.shape)}, {self.dtype}, {self.device}, {held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatDTensor:
        # torch's would copy the whole buffer that the local tensor is a view of, and the mesh.
        if id(self) in memo:
            return cast("FlatDTensor", memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(f"deepcopy of {self.shard_spec}: only leaf tensors can be copied, detach it first")
        copied = memo[id(self)] = _wrap(self._local_tensor.clone(), self.shard_spec, self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, proto: object) -> NoReturn:
        raise TypeError(
            f"pickling {self.shard_spec}: a shard is no use without the other ranks; save with yafsdp_cc.save or "
            "torch.distributed.checkpoint, or the .full_tensor()"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self.shard_spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], flatten_spec: tuple[ShardSpec, bool], outer_size: Any, outer_stride: Any
    ) -> FlatDTensor:
        return _wrap(inner_tensors["_local_tensor"], *flatten_spec)

    # What torch.distributed.checkpoint asks of a tensor: the chunks this rank saves, those it wants, each as a view.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.shard_spec.chunks

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self._local_tensor), self.shard_spec.global_shape
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for chunk in self.shard_spec.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        first = 0
        for chunk in self.shard_spec.chunks:
            numel = math.prod(chunk.sizes)
            if index.offset == chunk.offsets:
                return self._local_tensor.view(-1)[first : first + numel].view(chunk.sizes)
            first += numel
        raise ValueError(f"no chunk at {index.offset} on this rank: {self.shard_spec}")


_dtensor_new = DTensor.__new__


def _wrap(local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> FlatDTensor:
    """``flat_dtensor`` where ``local`` is known to fit: unchecked, and past DTensor's slow ``__init__``."""
    # DTensor takes over the local tensor's place in its storage but not the storage, and torch then believes it to be
    # memory at that address: it is shown a tensor that begins where it should.
    shown = local if local.storage_offset() == 0 else local.new_empty(0)
    flat: Any = _dtensor_new(FlatDTensor, shown, spec.dtensor_spec(local.dtype), requires_grad=requires_grad)
    flat._local_tensor, flat.shard_spec = local, spec
    return cast("FlatDTensor", flat)


def flat_dtensor(local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> FlatDTensor:
    """Return the tensor, sharded by ``spec``, of which this rank holds ``local``.

    Args:
        local: this rank's elements, any dtype: contiguous and 1-D with as many elements as the rank holds (possibly
            none), or of the whole shape when replicated. Not copied: changes in place reach it, and the buffer that it
            is a view of.
        spec: shared with the gradient and the optimizer state of one parameter.

    Raises:
        ValueError: ``local`` is not what this rank holds, or takes part in autograd itself.
    """
    if local.shape != spec.local_shape or not local.is_contiguous():
        raise ValueError(f"{spec} wants a contiguous {list(spec.local_shape)}, got {list(local.shape)}")
    if local.requires_grad or isinstance(local, DTensor):
        raise ValueError(f"{spec} wants a plain local tensor outside of autograd")
    return _wrap(local, spec, requires_grad)


# Operations: handler(func, args, kwargs). They run below autograd, where torch no longer counts versions, so what
# changes a local tensor increments its version here.

_INSTEAD = (
    "call .full_tensor() for the whole tensor. In a forward that reads it outside of the module that owns it, make the "
    "model itself a unit too: shard(model, units=[..., model])"
)
_STATE_OF_TORCH = (
    "call .full_tensor() for the whole tensor. Optimizer state that torch has made of a full state dict is sharded "
    "otherwise: call yafsdp_cc.patch_torch() before set_optimizer_state_dict"
)


def _refuse(func: Any, spec: ShardSpec, what: str = "", instead: str = _INSTEAD) -> NoReturn:
    raise NotImplementedError(f"{func._schema.name.replace('::', '.')}{what} on {spec}: {instead}")


def _refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    spec = next(_specs_in((*args, *kwargs.values())))
    if torch.Tag.nondeterministic_seeded in func.tags:
        _refuse(func, spec, instead="initialise before sharding, or under whole_parameters()")
    _refuse(func, spec)


def _specs_in(values: Iterable[Any]) -> Iterator[ShardSpec]:
    """The specs of all FlatDTensors among arguments, also in lists."""
    for value in values:
        if isinstance(value, FlatDTensor):
            yield value.shard_spec
        elif isinstance(value, (list, tuple)):
            yield from _specs_in(value)


def _largest(specs: Iterable[ShardSpec]) -> ShardSpec | None:
    """The spec of an operation's result: a number that is itself a (replicated) parameter may come first."""
    return max(specs, key=lambda spec: (spec.numel, len(spec.shape)), default=None)


@functools.cache
def _written(func: Any) -> tuple[int, ...]:
    """The places of the arguments that an operation changes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)


def _operand(func: Any, spec: ShardSpec | None, value: Any) -> Any:
    """What stands for ``value`` in an operation on local tensors sharded by ``spec`` (None: on plain tensors): a local
    tensor of the same elements, or one number."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FlatDTensor):
        if spec is None:
            _refuse(func, value.shard_spec, " into a tensor that is not sharded alike", _STATE_OF_TORCH)
        if value.shard_spec.matches(spec):
            return value._local_tensor
        if value.shard_spec.bounds is not None or value.shard_spec.numel != 1:
            _refuse(func, spec, f" with {value.shard_spec}")
        value = value._local_tensor
    elif isinstance(value, LazyNorm):
        value = value.value()
    # A number may have dimensions of size 1, as long as they would not show in the result.
    if spec is not None and (value.numel() != 1 or value.dim() > min(len(spec.shape), len(spec.local_shape))):
        kind = f"DTensor placed as {value.placements}" if isinstance(value, DTensor) else "plain tensor"
        _refuse(func, spec, f" with a {kind} of shape {list(value.shape)}", _STATE_OF_TORCH)
    return value


def _on_locals(func: Any, spec: ShardSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    locals_ = [
        x._local_tensor if type(x) is FlatDTensor and x.shard_spec is spec else _operand(func, spec, x) for x in args
    ]
    return func._op(*locals_, **(kwargs and {name: _operand(func, spec, x) for name, x in kwargs.items()}))


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each element by itself, on local tensors."""
    target = args[0]
    if type(target) is not FlatDTensor:
        _operand(func, None, next(x for x in (*args, *kwargs.values()) if type(x) is FlatDTensor))
    _on_locals(func, target.shard_spec, args, kwargs)
    increment_version((target._local_tensor,))
    return target


def _out_of_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each element by itself, into new local tensors or those of ``out``."""
    sharded = [x for x in (*args, *kwargs.values()) if type(x) is FlatDTensor]
    outs = tuple(kwargs[func._schema.arguments[i].name] for i in _written(func)) if kwargs else ()
    if any(type(out) is not FlatDTensor for out in outs):
        _operand(func, None, sharded[0])
    spec: Any = sharded[0].shard_spec if len(sharded) == 1 else _largest(x.shard_spec for x in sharded)
    result = _on_locals(func, spec, args, kwargs)
    if outs:
        increment_version([out._local_tensor for out in outs])
        return outs[0] if len(outs) == 1 else outs
    return type(result)(_wrap(x, spec) for x in result) if isinstance(result, (list, tuple)) else _wrap(result, spec)


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each element by itself, at each place of lists of tensors, as foreach and fused optimizers have them."""
    written = _written(func)
    columns = [x for x in args if _is_tensor_list(x)]
    specs = [x.shard_spec if type(x) is FlatDTensor else None for x in columns[0]]
    if not written and len(columns) > 1:
        rows = zip(*columns, strict=True)
        specs = [_largest(x.shard_spec for x in row if type(x) is FlatDTensor) for row in rows]

    def local(name: str, value: Any) -> Any:
        if _is_tensor_list(value):
            return [
                x._local_tensor if type(x) is FlatDTensor and x.shard_spec is spec else _operand(func, spec, x)
                for x, spec in zip(value, specs, strict=True)
            ]
        # "scalars" is a tensor that holds one number for each place of the lists.
        if not isinstance(value, torch.Tensor) or name == "scalars" or (type(value) is torch.Tensor and not value.ndim):
            return value
        return _operand(func, min(specs, key=lambda spec: -1 if spec is None else len(spec.shape)), value)

    locals_ = [local(argument.name, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
    result = func._op(*locals_, **{name: local(name, value) for name, value in kwargs.items()})
    for i in written:
        increment_version(locals_[i])
    return result and [x if spec is None else _wrap(x, spec) for x, spec in zip(result, specs, strict=True)]


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
    """``clone``, ``to`` and ``*_like``. Random ones draw each rank's numbers from its own generator."""
    flat = args[0]
    local = func(flat._local_tensor, *args[1:], **{key: x for key, x in kwargs.items() if key != "memory_format"})
    if torch.Tag.nondeterministic_seeded in func.tags:
        _same_where_replicated(local, flat.shard_spec)
    return _wrap(local, flat.shard_spec)


def _of_own_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
    """``detach`` and views that change nothing, and ``new_zeros`` with its family, of the tensor's own shape."""
    flat, size, *rest = (*args, None)[: max(len(args), 2)]
    local, spec = flat._local_tensor, flat.shard_spec
    if size is not None and tuple(size) != tuple(spec.global_shape):
        _refuse(func, spec, f" of shape {list(size)}")
    if func._schema.name.startswith("aten::new_"):
        if func is aten.new_empty_strided.default:
            rest = [local.stride()]
        local = func(local, local.shape, *rest, **kwargs)
    return _wrap(local, spec)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
    """``normal_`` and its like: every rank draws the whole tensor and keeps its part, so that ranks of one seed have
    what the plain tensor would get."""
    flat, *rest = args
    spec, local = flat.shard_spec, flat._local_tensor
    local.copy_(spec.local_of_full(func(local.new_empty(spec.global_shape), *rest, **kwargs)))
    _same_where_replicated(local, spec)
    increment_version((local,))
    return cast("FlatDTensor", flat)


def _same_where_replicated(local: torch.Tensor, spec: ShardSpec) -> None:
    """Give ranks that hold the same elements what the first of them has drawn: their seeds may differ."""
    broadcast_from_first(local, spec.mesh, replicas_only=spec.bounds is not None)
    if spec.tensor_parallel is not None:
        spec.tensor_parallel.broadcast_first(local)


def _source(func: Any, target: torch.Tensor, value: torch.Tensor) -> Any:
    """What to copy into the local tensor of ``target``: this rank's elements of ``value``, which is sharded alike,
    divided by tensor parallelism alike, or whole; or one number."""
    if type(target) is not FlatDTensor:
        return _operand(func, None, value)
    spec = target.shard_spec
    if isinstance(value, (FlatDTensor, LazyNorm)):
        return _operand(func, spec, value)
    if isinstance(value, DTensor):
        if spec.tensor_parallel is not None and spec.tensor_parallel.holds(value):
            return spec.local_of(value._local_tensor)
        value = value.full_tensor()  # set_model_state_dict makes DTensors of full state dicts; all ranks load the same
    return spec.local_of_full(value) if value.shape == spec.global_shape else _operand(func, spec, value)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, value, *rest = args
    source = _source(func, target, value)
    func(target._local_tensor, source, *rest, **kwargs)
    increment_version((target._local_tensor,))
    return target


def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    targets, values, *rest = args
    sources = [_source(func, target, value) for target, value in zip(targets, values, strict=True)]
    locals_ = [target._local_tensor if type(target) is FlatDTensor else target for target in targets]
    func(locals_, sources, *rest, **kwargs)
    increment_version(locals_)


def _assign_where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
    """``x[mask] = number`` with a mask of x's shape, as Rprop has it."""
    target, indices, value, *_ = args
    mask = indices[0] if len(indices) == 1 else None
    if type(target) is not FlatDTensor or type(mask) is not FlatDTensor or mask.dtype != torch.bool:
        _refuse(func, next(_specs_in(args)))
    value = _operand(func, target.shard_spec, value)
    target.masked_fill_(mask, value.to(target.device).reshape(()))
    return target


def _summand(flat: FlatDTensor, dtype: torch.dtype | None = None) -> Summand:
    spec = flat.shard_spec
    counts = spec.bounds is not None or spec._rank == 0  # a replicated tensor counts once
    return Summand(flat._local_tensor, counts, spec.across, dtype or flat.dtype)


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyNorm:
    found = norms.norm_arguments(func, args, kwargs)
    if found is None:
        _refuse(func, args[0].shard_spec, " over some of its dimensions")
    order, dtype = found
    return norms.norms_of([_summand(args[0], dtype)], order)[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    given = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    tensors, order, dtype = given["self"], float(given.get("ord", 2)), given.get("dtype")
    lazy = iter(norms.norms_of([_summand(x, dtype) for x in tensors if type(x) is FlatDTensor], order))
    return [next(lazy) if type(x) is FlatDTensor else torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors]


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``max``, ``min``, ``any`` and ``all`` of whole tensors, also of lists of them."""
    one, kind, dtype = _EXTREMES[func]
    tensors = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
    summands = [_summand(x, dtype) for x in tensors if type(x) is FlatDTensor]
    lazy = iter(norms.reduce_lazily(summands, kind, lambda locals_: [one(x).double() for x in locals_]))
    found = [next(lazy) if type(x) is FlatDTensor else one(x) for x in tensors]
    return found if tensors is args[0] else found[0]


_EXTREMES: dict[Any, tuple[Any, Reduction, torch.dtype | None]] = {
    aten.max.default: (aten.max.default, norms.MAX, None),
    aten._foreach_max.default: (aten.max.default, norms.MAX, None),
    aten.min.default: (aten.min.default, norms.MIN, None),
    aten.any.default: (aten.any.default, Reduction(math.inf), torch.bool),
    aten.all.default: (aten.all.default, Reduction(-math.inf), torch.bool),
}
"""What to do with one tensor, how to reduce over ranks, and the dtype of the result."""


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``equal`` and ``allclose`` of tensors sharded alike, the same answer on every rank: one all-reduce."""
    first, second, *rest = args
    spec = next(_specs_in(args))
    if func is aten.equal.default and first.shape != second.shape:
        return False
    ours = func(_operand(func, spec, first), _operand(func, spec, second), *rest, **kwargs)
    differs = torch.tensor(float(not ours), device=first.device)
    all_reduce_over(spec.across.groups, differs, dist.ReduceOp.MAX, spec.mesh)
    return not differs.item()


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].shard_spec.bounds is not None:
        _refuse(func, args[0].shard_spec)
    return func(args[0]._local_tensor)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's check: an infinity on one rank is found on all, so that all skip the step."""
    tensors, found_inf, inverse_scale = args
    locals_ = [x._local_tensor if type(x) is FlatDTensor else x for x in tensors]
    specs = list(_specs_in(tensors))
    for kind in {spec.mesh.device_type for spec in specs} - {found_inf.device.type}:
        # Gradients are in host memory, to which GradScaler has sent its two numbers without waiting for them.
        torch.get_device_module(kind).synchronize()
    func(locals_, found_inf, inverse_scale)
    increment_version(locals_)
    # Over replicas as well: gradients are their own where they make steps by themselves.
    across = dict.fromkeys(group for spec in specs for group in (*spec.across.groups, *all_groups(spec.mesh)))
    all_reduce_over(across, found_inf, dist.ReduceOp.MAX, specs[0].mesh)


_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like"), _like),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _like),
    **dict.fromkeys(("detach", "alias", "view", "_unsafe_view", "expand"), _of_own_shape),
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"), _of_own_shape),
    **dict.fromkeys(("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_"), _draw),
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), _foreach),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys(("equal", "allclose"), _equal),
    "copy_": _copy,
    "_foreach_copy_": _foreach_copy,
    "index_put_": _assign_where,
    "_foreach_norm": _foreach_norm,
    "_local_scalar_dense": _item,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
_UNTAGGED, _OVERLOADS_DIFFER = {"zero", "fill", "masked_fill", "copysign"}, {"max", "min", "where"}
"""Operations that are element-wise though torch has not tagged every form so; names with forms that are not."""


@functools.cache
def _handler_of(func: Any) -> Callable[..., Any]:
    """Return what handles an operation: ``_refused`` for all that could look beyond the elements of a rank."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten":
        return _refused
    if func in _EXTREMES:
        return _extreme
    if name in _HANDLERS:
        return _HANDLERS[name]
    base = name.removeprefix("_foreach_").removesuffix("_")
    packet = None if base in _OVERLOADS_DIFFER else getattr(aten, base, None)
    forms = [func, *(getattr(packet, overload) for overload in packet.overloads())] if packet is not None else [func]
    if torch.Tag.nondeterministic_seeded in func.tags or not (
        base in _UNTAGGED or any(torch.Tag.pointwise in form.tags for form in forms)
    ):
        return _refused
    if name.startswith("_foreach_"):
        return _foreach
    return _in_place if _written(func)[:1] == (0,) else _out_of_place


# Parameters that were replaced by sharded ones ---------------------------------------------------------------------

_SHARDED_AS = "_yafsdp_cc_sharded_as"
"""Attribute of such a parameter: the ``ShardSpec`` of the sharded one."""


def mark_replaced(parameter: torch.nn.Parameter, spec: ShardSpec) -> None:
    """Note on ``parameter``, which has no elements any more, that it is sharded as ``spec``."""
    parameter.__dict__[_SHARDED_AS] = spec


def sharded_as(parameter: torch.nn.Parameter) -> ShardSpec | None:
    """Return how a parameter that was replaced by a sharded one is sharded; it has no elements any more."""
    spec: ShardSpec | None = parameter.__dict__.get(_SHARDED_AS)
    return spec


@cache
def refuse_stale_optimizers() -> None:
    """Let every optimizer of this process be refused whose parameters were replaced by sharded ones since it was made.

    Its steps would change nothing, without a word.
    """

    def check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (spec := parameter.__dict__.get(_SHARDED_AS)) is not None:
                    raise RuntimeError(
                        f"this {type(optimizer).__name__} was made before '{spec.name}' was sharded and holds the "
                        "whole parameter, which is gone: make the optimizer after shard(), from model.parameters()"
                    )

    register_optimizer_step_pre_hook(check)


@functools.cache
def patch_torch() -> None:
    """Let torch's state dict functions fill sharded parameters from full state dicts. Repeated calls do nothing more.

    Needed for ``set_optimizer_state_dict`` with ``full_state_dict=True``, and for ``set_model_state_dict`` with
    ``broadcast_from_rank0=True``: of each whole tensor, they take the slice along a dimension that a placement names.
    A flat range is no such slice, and torch has no hook there that a tensor could implement. Replaced are

    * ``torch.distributed._state_dict_utils._distribute_tensors``: what rank 0 has broadcast;
    * ``torch.distributed.checkpoint.state_dict._broadcast_state_dict``: the same for tensors without dimensions;
    * ``torch.distributed.checkpoint.state_dict._distribute_state_dict``: what every rank has.

    Each fills a ``FlatDTensor`` by ``copy_``, which knows its range; all other tensors go the way they always went.
    """
    utils: Any = torch.distributed._state_dict_utils
    state_dict: Any = torch.distributed.checkpoint.state_dict
    scatter = utils._distribute_tensors
    broadcast, distribute = state_dict._broadcast_state_dict, state_dict._distribute_state_dict

    @functools.wraps(scatter)
    def distribute_tensors(local: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            pair = local.get(key)
            if isinstance(pair, tuple) and type(pair[0]) is FlatDTensor:
                local[key] = pair[0].copy_(pair[1])
        scatter(local, keys, *args, **kwargs)

    @functools.wraps(broadcast)
    def broadcast_state_dict(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        scalars = {key: x for key, x in local.items() if type(x) is FlatDTensor and x.dim() == 0}
        broadcast(full, local, *args, **kwargs)
        for key, scalar in scalars.items():
            if isinstance(local.get(key), torch.Tensor):  # replaced by a plain one
                local[key] = scalar.copy_(local[key])

    @functools.wraps(distribute)
    def distribute_state_dict(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # In the order of ``full``, the same on every rank: to copy from a DTensor is a collective.
        filled = [key for key, x in full.items() if type(local.get(key)) is FlatDTensor and isinstance(x, torch.Tensor)]
        for key in filled:
            local[key].copy_(full[key])
        distribute({key: x for key, x in full.items() if key not in filled}, local, *args, **kwargs)

    utils._distribute_tensors = distribute_tensors
    state_dict._broadcast_state_dict = broadcast_state_dict
    state_dict._distribute_state_dict = distribute_state_dict
