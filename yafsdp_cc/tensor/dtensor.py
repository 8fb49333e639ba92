"""Sharded parameters as users see them: a DTensor whose local tensor is this rank's flat range of the whole tensor.

    whole, [4, 4] row-major           0 1 2 3 4 5 6 7 8 9 a b c d e f
    ShardSpec.bounds (0, 5, 14, 16)   | rank 0  |     rank 1      |r 2|

A parameter, its gradient and its optimizer state share one ``ShardSpec``, so an element-wise operation is the same
operation on the local tensors: torch's optimizers, ``clip_grad_norm_``, ``GradScaler`` and checkpoints work unchanged.
DTensor's own sharding propagation is not used: it knows only slices along a dimension, and would accept tensors with
other bounds. A small parameter is not sharded (``bounds`` is None): every rank holds the whole tensor, in its own
shape.

A loss may read sharded parameters outside of the modules' forwards (penalties, ``full_tensor()``). The gradients that
autograd then brings to a parameter are averaged over the data-parallel ranks, like the engine's: a term that all ranks
compute alike counts once.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import traceback
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._library import simple_registry
from torch._prims_common import infer_size, make_contiguous_strides_for
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from yafsdp_cc.engine.layout import RowShardSpec, TensorParallel
from yafsdp_cc.engine.param import owner_of
from yafsdp_cc.engine.state import engine_of
from yafsdp_cc.forms.subclasses import PLAIN, as_plain, check_plain, tensors_of
from yafsdp_cc.ranks.mesh import (
    all_gather_single,
    all_groups,
    all_reduce_over,
    broadcast_from_first,
    shard_group,
    to_mesh_device,
)
from yafsdp_cc.tensor import reductions
from yafsdp_cc.tensor.chunks import SavedInChunks
from yafsdp_cc.tensor.gradients import own_part, plain_grad, reduced, reduction_of
from yafsdp_cc.tensor.reductions import Across, LazyReduction, Reduction, Summand
from yafsdp_cc.tensor.rows import are_rows, first_rows, flat_range_of, is_by_rows, is_flat_range, rows_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from yafsdp_cc.engine.layout import ShardSpec
    from yafsdp_cc.engine.param import FlatParam, FSDPParam
    from yafsdp_cc.engine.state import FSDPState
    from yafsdp_cc.tensor.gradients import GradReduction

aten = torch.ops.aten
increment_version = torch._C._increment_version


_SAVE = (
    "a shard is no use without the other ranks; save with yafsdp_cc.save or torch.distributed.checkpoint. "
    "save_pretrained, safetensors and torch.save take whole tensors: full = yafsdp_cc.full_state_dict(model) on every "
    "rank, then model.save_pretrained(folder, state_dict=full) on the first"
)


class FlatShard(Shard):
    """Equal to ``Shard(0)`` for code that compares placements; to compute a slice from it is an error.

    A flat range is no slice along a dimension. torch's state dict functions copy such slices into ``to_local()``: a
    slice of the right size with other elements would go unnoticed.
    """

    spec: ShardSpec | str = "a parameter"  # specs are unknown after a copy or in a pickle

    def _local_shard_size_and_offset(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"a slice along a dimension was asked of {self.spec}, which is sharded by flat ranges: write to it with "
            ".copy_(), which takes full tensors and DTensors of any placements, and read it with .full_tensor()"
        )


def _dtensor_spec(spec: ShardSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return DTensor's spec of a tensor sharded by ``spec``: the global shape, contiguous, placed as ``Shard(0)`` or
    ``Replicate()`` along the shard dimension, then as tensor parallelism places it."""
    known = spec.dtensor_specs.get(dtype)
    if known is not None:
        return known
    placement: Replicate | Shard = Replicate()
    if isinstance(spec, RowShardSpec):
        placement = Shard(0)
    elif spec.bounds is not None:
        placement = FlatShard(0)
        placement.spec = spec
    theirs = () if spec.tensor_parallel is None else spec.tensor_parallel.placements
    placements = (*(Replicate(),) * (spec.mesh.ndim - 1), placement, *theirs)
    meta = TensorMeta(spec.global_shape, make_contiguous_strides_for(spec.global_shape), dtype)
    return spec.dtensor_specs.setdefault(dtype, DTensorSpec(spec.global_mesh, placements, tensor_meta=meta))


class _EqualsDTensor(type(DTensor)):  # type: ignore[misc]
    """A class that equals ``DTensor``: optimizers and ``clip_grad_norm_`` choose foreach and fused forms only if
    ``type(p) in [..., DTensor]``, and would otherwise loop over the parameters."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is DTensor

    __hash__ = type.__hash__


class FlatDTensor(SavedInChunks, DTensor, metaclass=_EqualsDTensor):
    """A tensor sharded by a ``ShardSpec``; made by ``flat_dtensor``. ``shape`` is global, ``to_local()`` a flat range.

    With a ``RowShardSpec``, ``to_local()`` is rows, perhaps of a tensor subclass, whose own operations then run.

    Element-wise, foreach and fused operations act on the local tensor, in place where torch's do; its version counter
    grows with every such change. Norms, sums, means and extremes are lazy (``reductions.LazyReduction``). Every other
    operation raises ``NotImplementedError`` with the parameter's full name.
    """

    # An attribute in ``__dict__``: if this class had ``__slots__``, asynchronous checkpoints would not find DTensor's
    # slots and would write uninitialised memory.
    shard_spec: ShardSpec

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _follow_reduces()
        return _handler_of(func)(func, args, kwargs or {})

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's elements, 1-D (or the whole tensor in its own shape when replicated).

        The result shares memory with this tensor: under ``torch.no_grad()``, writing to it writes to the parameter.

        Args:
            grad_placements: as of ``full_tensor``; they matter where several ranks hold the same elements.
        """
        _follow_reduces()
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._local_tensor
        return _to_local(self, reduction_of(self.shard_spec, grad_placements))

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor, a new one, on every rank of the mesh.

        A collective unless replicated, and one in the backward: call it on all ranks.

        Args:
            grad_placements: how the data-parallel ranks' gradients are combined. None: by their mean, which is right
                for a term that all ranks compute alike and for one of each rank's own batch. ``[Partial()]``: by their
                sum. ``[Replicate()]``: they are equal, and nothing is communicated.
        """
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._full()
        return _full_tensor(self, reduction_of(self.shard_spec, grad_placements))

    @torch.no_grad()
    def _full(self) -> torch.Tensor:
        spec, local = self.shard_spec, self._local_tensor
        reductions.check_not_refused(
            "full_tensor()", () if spec.bounds is None else (shard_group(spec.mesh),), spec.mesh
        )
        _follow_reduces()
        if spec.bounds is None:
            whole = local.clone()
        elif type(local) in PLAIN:
            widths = [stop - start for start, stop in pairwise(spec.bounds)]
            whole = _all_gather_ranges(local, widths, spec.shape, spec.mesh)
        else:
            whole = _all_gather_class(local, spec)
        if spec.tensor_parallel is not None:
            whole = spec.tensor_parallel.wrap_unsharded(to_mesh_device(whole, spec.mesh)).full_tensor()
        return whole.to(self.device)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Return a plain DTensor of these placements, as torch's ``redistribute`` does. A collective.

        ``[Shard(0)]`` under ``torch.no_grad()`` needs no whole tensor on any rank; other placements, and gradients, do.
        Copy the result back with ``copy_``.
        """
        spec = self.shard_spec
        is_plain = device_mesh in (None, spec.mesh) and spec.tensor_parallel is None and not options
        is_read = not (self.requires_grad and torch.is_grad_enabled())
        if is_plain and is_read and spec.bounds is not None and spec.shape and placements and are_rows(placements):
            _follow_reduces()
            return rows_of(self._local_tensor, spec)
        replicated = [Replicate()] * self.device_mesh.ndim
        whole = DTensor.from_local(self.full_tensor(), self.device_mesh, replicated, run_check=False)
        return whole.redistribute(device_mesh, placements, **options)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> NoReturn:
        """Refuse: the hook would never run, as the engine writes gradients of forwards past autograd."""
        raise NotImplementedError(
            f"register_hook on {self.shard_spec}: the hook would never run. register_post_accumulate_grad_hook does, "
            "once the gradient is reduced"
        )

    @property
    def data(self) -> torch.Tensor:
        """A view of this tensor's elements outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        # torch's setter would exchange the wrapper's data and keep the old local tensor, without an error.
        raise NotImplementedError(f"assigning .data of {self.shard_spec}: write into it, with .copy_() under no_grad")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec, parallel = self.shard_spec, self.shard_spec.tensor_parallel
        start, stop = spec.local_range()
        held = "replicated" if spec.bounds is None else f"holds {start}:{stop} of {spec.numel}"
        if parallel is not None:
            held += f" in {list(spec.shape)} at {list(parallel.offsets)}"
        return f"FlatDTensor('{spec.name}', {list(self.shape)}, {self.dtype}, {self.device}, {held})"

    def __copy__(self) -> FlatDTensor:
        return _wrap(self._local_tensor, self.shard_spec, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatDTensor:
        # torch's deepcopy would copy the mesh, and the whole flat buffer of which the local tensor is a view.
        if id(self) in memo:
            return cast("FlatDTensor", memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(f"deepcopy of {self.shard_spec}: only leaf tensors can be copied, detach it first")
        copied = memo[id(self)] = _wrap(self._local_tensor.clone(), self.shard_spec, self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
            take_grads_of_autograd(copied)
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, proto: object) -> NoReturn:
        raise TypeError(f"pickling {self.shard_spec}: {_SAVE}")

    def storage(self) -> NoReturn:
        """Refuse: ``save_pretrained`` and safetensors ask for the storage, and would write a shard as if it were
        whole."""
        raise TypeError(f"the storage of {self.shard_spec}: {_SAVE}")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self.shard_spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], flatten_spec: tuple[ShardSpec, bool], outer_size: Any, outer_stride: Any
    ) -> FlatDTensor:
        return _wrap(inner_tensors["_local_tensor"], *flatten_spec)


def _all_gather_ranges(
    local: torch.Tensor, widths: Sequence[int], shape: Sequence[int], mesh: DeviceMesh
) -> torch.Tensor:
    """Return a new tensor of ``shape`` on the device of ``mesh``; ranks send ``widths`` elements each."""
    widest = max(widths)
    if widest == 0:
        return local.new_empty(shape)
    # gloo gathers only equal sizes and some dtypes: send bytes, padded to the widest
    padding = (widest - local.numel()) * local.itemsize
    padded = to_mesh_device(torch.nn.functional.pad(local.view(-1).view(torch.uint8), (0, padding)), mesh)
    gathered = padded.new_empty((len(widths), padded.numel()))
    all_gather_single(gathered.view(-1), padded, group=shard_group(mesh))
    rows = gathered.view(local.dtype)
    whole = rows.new_empty(shape)
    torch.cat([row[:width] for row, width in zip(rows, widths, strict=True)], out=whole.view(-1))
    return whole  # users could not write to a view returned by an autograd function


def _all_gather_class(local: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return the whole tensor, of the class of ``local``, given this rank's rows."""
    first = first_rows(spec.shape[0], len(spec.bounds or ()) - 1)
    whole = local.new_zeros(spec.shape)
    for part, own in zip(tensors_of(whole), tensors_of(local), strict=True):
        widths = [(stop - start) * math.prod(part.shape[1:]) for start, stop in pairwise(first)]
        part.copy_(_all_gather_ranges(own.contiguous(), widths, part.shape, spec.mesh))
    return whole


engines: weakref.WeakSet[FSDPState] = weakref.WeakSet()
"""All engines of the process, whose reduces add to gradients on streams of their own."""


def _follow_reduces() -> None:
    """Make the caller's stream wait for reduces in flight outside of a backward.

    A backward that raised leaves them behind. It has no end at which the engine could wait, so every operation on a
    sharded tensor does.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    for engine in engines:
        context = engine.context
        # on a CPU nothing is added behind the caller's back: the thread that waits adds to the gradients
        if context.last_reduce is not None and context.reduce_stream.is_ordered:
            context.last_reduce.wait()
            if context.replicas is not None:
                context.replicas.wait()
            engine.wait_for_transfers()


def _call_dispatch_of_subclasses() -> None:
    """Make torch before 2.12 call ``__torch_dispatch__`` of FlatDTensor and LazyReduction, which it never does.

    It treats both as DTensor itself, whose operations are in C++ (pytorch/pytorch#177716), but first looks for a rule
    that the operator registered for the tensor's class.
    """
    holder: Any = simple_registry.GenericTorchDispatchRuleHolder
    known = holder.find

    def find(self: Any, kind: Any) -> Any:
        is_ours = kind is FlatDTensor or kind is LazyReduction
        return kind.__torch_dispatch__.__func__ if is_ours else known(self, kind)

    holder.find = find


if torch.__version__ < "2.12":
    _call_dispatch_of_subclasses()


def _wrap(local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> FlatDTensor:
    """Make a ``FlatDTensor`` without the checks of ``flat_dtensor`` and DTensor's slow ``__init__``."""
    # ``DTensor.__new__`` copies the local tensor's storage offset but not its storage, and torch then computes a wrong
    # address: pass it a tensor with offset 0.
    shown = local if local.storage_offset() == 0 else local.new_empty(0)
    flat: Any = DTensor.__new__(FlatDTensor, shown, _dtensor_spec(spec, local.dtype), requires_grad=requires_grad)
    flat._local_tensor, flat.shard_spec = local, spec
    return cast("FlatDTensor", flat)


def flat_dtensor(local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> FlatDTensor:
    """Return the tensor sharded by ``spec`` whose elements on this rank are ``local``.

    Args:
        local: this rank's elements, any dtype: contiguous and 1-D with as many elements as the rank holds (possibly
            none), or of the whole shape when replicated. It is not copied: later changes of either, or of the buffer
            that it is a view of, show in both.
        spec: a parameter shares it with its gradient and optimizer state.

    Raises:
        ValueError: ``local`` has another shape than ``spec`` gives this rank, or takes part in autograd.
    """
    if local.shape != spec.local_shape or not local.is_contiguous():
        raise ValueError(f"{spec} wants a contiguous {list(spec.local_shape)}, got {list(local.shape)}")
    if local.requires_grad or isinstance(local, DTensor):
        raise ValueError(f"{spec} wants a plain local tensor outside of autograd")
    return _wrap(local, spec, requires_grad)


def _from_local(
    torch_s: Callable[..., DTensor],
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **options: Any,
) -> DTensor:
    """Do as torch's ``DTensor.from_local``, but make a ``FlatDTensor`` of a flat range with its parameter's placements.

    Averages of weights keep local tensors and make DTensors of them this way; torch would read the range as rows.

    Raises:
        ValueError: a flat range has the placements of rows.
    """
    spec: Any = next((each.spec for each in placements or () if isinstance(each, FlatShard)), None)
    shape = options.get("shape")
    is_range = spec is not None and not isinstance(spec, str) and local_tensor.shape == spec.local_shape
    if is_range and shape in (None, spec.global_shape):
        return flat_dtensor(local_tensor, spec)
    if shape is not None and len(shape) != local_tensor.ndim and not local_tensor.is_meta:
        raise ValueError(
            f"DTensor.from_local was given {list(local_tensor.shape)} as a part of {list(shape)}: no slice along a "
            "dimension, perhaps a flat range, to_local() of a sharded parameter p or as long as that. Pass "
            "p.placements, which know the range, or copy p itself, p.detach().clone()"
        )
    return torch_s(local_tensor, device_mesh, placements, **options)


DTensor.from_local = staticmethod(functools.partial(_from_local, DTensor.from_local))  # type: ignore[method-assign]


# Gradients that autograd brings to a parameter outside of the engine --------------------------------------------


class _ToLocal(torch.autograd.Function):
    """Returns the local tensor; its backward combines the gradients of ranks that hold the same elements."""

    @staticmethod
    def forward(ctx: Any, flat: FlatDTensor, reduction: GradReduction) -> torch.Tensor:
        ctx.spec, ctx.reduction = flat.shard_spec, reduction
        return flat._local_tensor.view_as(flat._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[FlatDTensor, None]:
        spec = ctx.spec
        holders = all_groups(spec.mesh)[0 if spec.bounds is None else 1 :]
        return _wrap(reduced(spec, as_plain(grad), holders, ctx.reduction), spec), None


class _FullTensor(torch.autograd.Function):
    """Returns the whole tensor; its backward combines the ranks' gradients and returns this rank's part."""

    @staticmethod
    def forward(ctx: Any, flat: FlatDTensor, reduction: GradReduction) -> torch.Tensor:
        ctx.spec, ctx.reduction = flat.shard_spec, reduction
        return flat._full()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[FlatDTensor, None]:
        return _wrap(own_part(ctx.spec, grad, ctx.reduction), ctx.spec), None


_to_local: Callable[[FlatDTensor, GradReduction], torch.Tensor] = _ToLocal.apply
_full_tensor: Callable[[FlatDTensor, GradReduction], torch.Tensor] = _FullTensor.apply


def take_grads_of_autograd(parameter: torch.Tensor) -> None:
    """Shard gradients that autograd brings to ``parameter``, to be added to ``.grad`` after the engine's reduces."""
    if not parameter.is_floating_point():
        return
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)  # torch registers a hook only while the parameter requires a gradient
    DTensor.register_hook(parameter, functools.partial(_take_grad, cast("FlatDTensor", parameter).shard_spec))
    parameter.requires_grad_(requires_grad)


def _take_grad(spec: ShardSpec, grad: torch.Tensor) -> torch.Tensor:
    owner = owner_of(spec)
    if owner is not None and (engine := engine_of(owner)) is not None:
        engine.context.wait_for_reduces()  # reduces in flight add to the same .grad on a stream of their own
        # assigning another .grad would drop the sum that ``ShardedGrad`` withholds until it knows who used the
        # parameter
        if owner.is_withheld:
            owner.parameter.grad, owner.is_withheld = owner.grad, False
    if isinstance(grad, FlatDTensor):
        return grad
    grad = grad.value() if isinstance(grad, LazyReduction) else grad
    return _wrap(plain_grad(spec, grad).expand(spec.local_shape).clone(), spec)


# Operations: handler(func, args, kwargs). They run below autograd, where torch does not raise version counters, so a
# handler that changes a local tensor increments its version.

_FULL = "call .full_tensor() for the whole tensor, on every rank"
_STATE_OF_TORCH = (
    ". Optimizer state that was put in place by hand is sharded otherwise: pass it to optimizer.load_state_dict, whose "
    "next step converts it"
)


def _instead(spec: ShardSpec) -> str:
    """Return what to type instead of a refused operation, depending on what is under way when the parameter is read."""
    owner = owner_of(spec)
    engine = None if owner is None else engine_of(owner)
    if owner is None or engine is None:
        return _FULL
    group = None if owner.flat is None or owner.flat.group.role == "root" else owner.flat.group
    if not engine.context.in_forward:
        unit = "model" if group is None else f"model.get_submodule('{group.name}')"
        if torch._C._current_graph_task_id() != -1:
            return (
                f"a backward runs a part of {unit} again, as activation checkpointing does, and has not come to an "
                "output of it: a loss is made of an activation that its forward keeps aside. Return that activation "
                f"from the forward of {unit} along with its output, or keep it from a part that is not checkpointed"
            )
        if group is not None and (called := _called_alone(owner)):
            return (
                f"'{called}' was called outside of unit '{group.name}', in whose forward alone it has weights: call "
                f"{unit}, make '{called}' a unit of its own, or call {unit}.unshard() before"
            )
        return (
            "outside of a forward, only operations on each element and reductions take it. For a method that reads it, "
            f"call yafsdp_cc.register_forward_method({unit}, name); for edits, "
            "yafsdp_cc.whole_parameters(model, write=True); resize or tie it before shard; of optimizers, take one "
            "that works element by element, such as AdamW; pass state_dict=yafsdp_cc.full_state_dict(model) to "
            "save_pretrained, and a Trainer of Transformers to "
            f"yafsdp_cc.integrations.transformers.accept_sharded_model. Otherwise {_FULL}"
        )
    if group is None or group.registered:
        return (
            "this forward has it from parameters() or from before. Read it as an attribute of its module, which is "
            f"whole there, or {_FULL}"
        )
    around = "make the model itself a unit too: shard(model, units=[..., model])"
    if group.role != "edge":
        around = "name a unit that contains both: shard(model, units=...)"
    return f"it is whole in the forward of unit '{group.name}' and was read outside. Either {around}, or {_FULL}"


def _called_alone(owner: FSDPParam) -> str:
    """Return the name of the module that holds the parameter if a call of that module is on the stack; else ""."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            module = frame.f_locals.get("self")
            if any(module is holder for holder, _ in owner.sites):
                return str(owner.spec.name.rpartition(".")[0])
    return ""


def _refuse(func: Any, spec: ShardSpec, what: str = "", instead: str = "", also: str = "") -> NoReturn:
    name = func._schema.name.replace("::", ".")
    raise NotImplementedError(f"{name}{what} on {spec}: {instead or _instead(spec)}{also}")


def _refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    specs = _specs_in((args, kwargs))
    if _is_derivative(func) and all(x.bounds is None and not x.shape for x in specs):
        # a model's number, such as a temperature, was multiplied by a plain loss: this is the derivative of the product
        args, kwargs = tree_map_only(FlatDTensor, lambda number: number._local_tensor, (args, kwargs))
        return func(*args, **kwargs)
    spec = specs[0]
    if torch.Tag.nondeterministic_seeded in func.tags:
        _refuse(func, spec, instead="initialise before sharding, or under whole_parameters()")
    _refuse(func, spec)


def _specs_in(arguments: Any) -> list[ShardSpec]:
    """Return the specs of all FlatDTensors among arguments, in lists, too."""
    return [each.shard_spec for each in tree_leaves(arguments) if isinstance(each, FlatDTensor)]


def _operand(func: Any, spec: ShardSpec | None, value: Any) -> Any:
    """Return the operand that replaces ``value`` in an operation on local tensors of ``spec`` (None: on plain tensors):
    a local tensor of the same elements, or one number. For ``_TAKE_WHOLE`` it is this rank's part of a whole tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FlatDTensor):
        if spec is None:
            _refuse(func, value.shard_spec, " into a tensor that is not sharded alike", also=_STATE_OF_TORCH)
        if value.shard_spec is spec or value.shard_spec.matches(spec):
            return value._local_tensor
        if value.shard_spec.bounds is not None or value.shard_spec.numel != 1:
            _refuse(func, spec, f" with {value.shard_spec}")
        value = value._local_tensor
    elif isinstance(value, LazyReduction):
        value = value.value()
    if spec is None:
        return value
    if _is_derivative(func) and value.is_floating_point() and value.shape in ((), spec.global_shape):
        # a gradient of the full shape, from an operation on whole tensors, gives this rank's range of the ranks' mean
        return plain_grad(spec, value)
    if func in _TAKE_WHOLE:
        if isinstance(value, DTensor):
            if spec.tensor_parallel is not None and TensorParallel.of(value) == spec.tensor_parallel:
                return spec.local_of(value._local_tensor)
            if is_flat_range(value, spec):
                return value._local_tensor
            if spec.bounds is not None and value.shape == spec.shape and is_by_rows(value, spec.mesh):
                return flat_range_of(value, spec)
            # set_model_state_dict makes DTensors of full state dicts; all ranks load alike. Detached: torch 2.11 fails
            # to gather, below autograd, a tensor that requires a gradient.
            value = cast("DTensor", value.detach()).full_tensor()
        if value.shape == spec.global_shape:
            return spec.local_of_full(value)
    # A tensor of one element counts as a number if broadcasting it adds no dimension to the result.
    if value.numel() != 1 or value.dim() > min(len(spec.shape), len(spec.local_shape)):
        kind = f"DTensor placed as {value.placements}" if isinstance(value, DTensor) else "plain tensor"
        also = _STATE_OF_TORCH if isinstance(value, DTensor) or value.shape == spec.global_shape else ""
        instead = ""
        if value.shape == spec.global_shape and not _written(func):
            instead = f"make copies after shard(), by p.detach().clone(): they are sharded alike. Or {_FULL}"
        _refuse(func, spec, f" with a {kind} of shape {list(value.shape)}", instead, also)
    return value


_TAKE_WHOLE = {aten.copy_.default, aten._foreach_copy_.default, aten.add_.Tensor}
"""Operations that accept whole tensors: ``load_state_dict``, and steps of LBFGS, whose vectors are whole."""


@functools.cache
def _written(func: Any) -> dict[int, str]:
    """Return the arguments that an operation changes: their names by position."""
    arguments = enumerate(func._schema.arguments)
    return {i: each.name for i, each in arguments if each.alias_info is not None and each.alias_info.is_write}


def _is_derivative(func: Any) -> bool:
    """Return whether a backward runs ``func`` for a gradient; optimizer steps in its hooks write in place."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled() and not _written(func)


def _spec_of_result(operands: Iterable[Any]) -> ShardSpec | None:
    """Return the spec of an operation's result: of the largest operand, as one number may come first."""
    specs = [x.shard_spec for x in operands if type(x) is FlatDTensor]
    return specs[0] if len(specs) == 1 else max(specs, key=lambda spec: (spec.numel, len(spec.shape)), default=None)


def _on_locals(func: Any, spec: ShardSpec | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation on local tensors, all of them sharded by ``spec``, and numbers."""
    locals_ = [
        x._local_tensor if type(x) is FlatDTensor and x.shard_spec is spec else _operand(func, spec, x) for x in args
    ]
    # a flat range has only one memory format: drop the argument
    named = kwargs and {name: _operand(func, spec, x) for name, x in kwargs.items() if name != "memory_format"}
    return func._op(*locals_, **named)


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an element-wise operation that works in place, writes to ``out`` or returns new tensors."""
    outs = tuple(args[i] if i < len(args) else kwargs[name] for i, name in _written(func).items())
    if outs:
        _on_locals(func, outs[0].shard_spec if all(type(x) is FlatDTensor for x in outs) else None, args, kwargs)
        increment_version([x._local_tensor for x in outs])
        return outs[0] if len(outs) == 1 else outs
    spec = _spec_of_result((*args, *kwargs.values()))
    assert spec is not None
    result = _on_locals(func, spec, args, kwargs)
    return _wrap(result, spec) if isinstance(result, torch.Tensor) else tuple(_wrap(x, spec) for x in result)


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an element-wise operation on lists of tensors, as foreach and fused optimizers call it."""
    written = _written(func)
    columns = [x for x in args if _is_tensor_list(x)]
    if written or len(columns) == 1:
        specs = [x.shard_spec if type(x) is FlatDTensor else None for x in columns[0]]
    else:
        specs = [_spec_of_result(row) for row in zip(*columns, strict=True)]
    if RowShardSpec in map(type, specs) and len(kinds := _places_by_class(columns)) > 1:
        results: dict[int, Any] = {}
        for places in kinds:
            results.update(zip(places, _foreach_at(func, args, kwargs, places, len(specs)) or (), strict=False))
        return [results[place] for place in sorted(results)] or None

    def local(value: Any, name: str) -> Any:
        if _is_tensor_list(value):
            return [
                x._local_tensor if type(x) is FlatDTensor and x.shard_spec is spec else _operand(func, spec, x)
                for x, spec in zip(value, specs, strict=True)
            ]
        # "scalars" is a tensor that holds one number for each place of the lists.
        if not isinstance(value, torch.Tensor) or name == "scalars" or (type(value) is torch.Tensor and not value.ndim):
            return value
        return _operand(func, min(specs, key=lambda spec: -1 if spec is None else len(spec.shape)), value)

    locals_ = [local(value, each.name) for each, value in zip(func._schema.arguments, args, strict=False)]
    named = {name: local(value, name) for name, value in kwargs.items()}
    result = func._op(*locals_, **named)
    for i, name in written.items():
        increment_version(locals_[i] if i < len(args) else named[name])
    return result and [x if spec is None else _wrap(x, spec) for x, spec in zip(result, specs, strict=True)]


def _places_by_class(columns: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Group the positions in lists of tensors by the tensor subclass of their local tensors, plain ones together."""
    places: dict[type, list[int]] = {}
    for place, row in enumerate(zip(*columns, strict=True)):
        kinds = (type(x._local_tensor) for x in row if type(x) is FlatDTensor)
        places.setdefault(next((kind for kind in kinds if kind not in PLAIN), torch.Tensor), []).append(place)
    return list(places.values())


def _foreach_at(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[int], count: int) -> Any:
    """Run ``_foreach`` at some positions of lists of ``count``: a tensor subclass with several inner tensors runs an
    operation on a list once for each of them, on the whole list."""

    def at_places(value: Any, name: str) -> Any:
        if name == "scalars" and isinstance(value, torch.Tensor):
            return value[list(places)]
        is_list = isinstance(value, (list, tuple)) and len(value) == count
        return [value[place] for place in places] if is_list else value

    chosen = [at_places(value, each.name) for each, value in zip(func._schema.arguments, args, strict=False)]
    return _foreach(func, tuple(chosen), {name: at_places(value, name) for name, value in kwargs.items()})


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
    """Handle ``normal_``, ``randn_like`` and the like: every rank draws the whole tensor and keeps its part, so that
    ranks with one seed have the values of the plain tensor."""
    flat: FlatDTensor = args[0]
    spec, local = flat.shard_spec, flat._local_tensor
    drawn = spec.local_of_full(func(local.new_empty(spec.global_shape), *args[1:], **kwargs))
    if _written(func):
        local.copy_(drawn)
        increment_version((local,))
    else:
        flat = _wrap(drawn.clone(), spec)
    # all ranks that hold the same elements take those of the first such rank: their seeds may differ
    for part in tensors_of(flat._local_tensor):
        broadcast_from_first(part, spec.mesh, replicas_only=spec.bounds is not None)
    if spec.tensor_parallel is not None:
        spec.tensor_parallel.broadcast_first(flat._local_tensor)
    return flat


def _of_own_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
    """Handle ``detach``, views of another shape, and ``new_zeros`` and the like of the tensor's own shape."""
    flat, size, *rest = (*args, None)[: max(len(args), 2)]
    local, spec = flat._local_tensor, flat.shard_spec
    if size is not None and tuple(size) != tuple(spec.global_shape):
        if spec.tensor_parallel is not None or func._schema.name not in ("aten::view", "aten::_unsafe_view"):
            _refuse(func, spec, f" of shape {list(size)}")
        spec = replace(spec, shape=torch.Size(infer_size(size, spec.numel)))  # the bounds remain
        return _wrap(local.view(spec.local_shape), spec)
    if func._schema.name.startswith("aten::new_"):
        if func is aten.new_empty_strided.default:
            rest = [local.stride()]
        local = func(local, local.shape, *rest, **kwargs)
    return _wrap(local, spec)


def _assign_where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
    """Handle ``x[mask] = number`` with a mask of x's shape, which Rprop uses."""
    target, indices, value, *_ = args
    mask = indices[0] if len(indices) == 1 else None
    if type(target) is not FlatDTensor or type(mask) is not FlatDTensor or mask.dtype != torch.bool:
        _refuse(func, _specs_in(args)[0])
    value = _operand(func, target.shard_spec, value)
    target.masked_fill_(mask, value.to(target.device).reshape(()))
    return target


def _concatenate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Handle ``parameters_to_vector``: gather whole tensors and concatenate them."""
    if any(x.dim() != 1 for x in args[0]):
        _refuse(func, _specs_in(args)[0])
    result: torch.Tensor = func([x._full() if isinstance(x, FlatDTensor) else x for x in args[0]], *args[1:], **kwargs)
    return result


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyReduction:
    """Handle the sum or mean of all elements; communicated at first use."""
    flat: FlatDTensor = args[0]
    given = reductions.arguments_of(func, args, kwargs)
    if not reductions.covers_all(given):
        _refuse(func, flat.shard_spec, " over some of its dimensions")
    count = flat.numel() if func._schema.name == "aten::mean" else 1
    dtype = given.get("dtype") or (flat.dtype if flat.is_floating_point() else torch.int64)

    def of_locals(locals_: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [local.sum(dtype=torch.float64) / count for local in locals_]

    return reductions.reduce_lazily([summand_of(flat, dtype)], reductions.SUM, of_locals)[0]


def summand_of(flat: FlatDTensor, dtype: torch.dtype) -> Summand:
    """Return the input of a reduction over all elements of ``flat``."""
    spec = flat.shard_spec
    counts = spec.bounds is not None or spec.rank == 0  # a replicated tensor counts on one rank alone
    return Summand(flat._local_tensor, counts, Across(spec.global_mesh, spec.groups), dtype)


def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``mse_loss`` and the like, element by element and then reduced, and their derivatives."""
    given = {each.name: each.default_value for each in func._schema.arguments}
    given |= reductions.arguments_of(func, args, kwargs)
    reduction, given["reduction"] = given["reduction"], 0  # 0 is reduction="none"
    elements = given["self"]
    if "grad_output" not in given:
        lost = _elementwise(func, tuple(given.values()), {})
        return lost if reduction == 0 else lost.mean() if reduction == 1 else lost.sum()
    if reduction == 1:
        given["grad_output"] = given["grad_output"] / elements.numel()
    return _elementwise(func, tuple(given.values()), {})


def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle norms, extremes, ``any`` and ``all`` of a tensor, or of each in a list; communicated at first use."""
    tensors = args[0] if _is_tensor_list(args[0]) else args[:1]
    if func in _EXTREMES:
        of_one, kind, dtype = _EXTREMES[func]
        of_locals = functools.partial(_local_extremes, of_one)
    else:
        found = reductions.norm_arguments(func, args, kwargs)
        if found is None:
            _refuse(func, args[0].shard_spec, " over some of its dimensions")
        order, dtype = found
        of_one, kind = functools.partial(torch.linalg.vector_norm, ord=order, dtype=dtype), Reduction(order)
        of_locals = functools.partial(reductions.local_norms, order)
    summands = [summand_of(x, dtype or x.dtype) for x in tensors if type(x) is FlatDTensor]
    lazy = iter(reductions.reduce_lazily(summands, kind, of_locals))
    results = [next(lazy) if type(x) is FlatDTensor else of_one(x) for x in tensors]
    return results if tensors is args[0] else results[0]


def _local_extremes(
    of_one: Callable[[torch.Tensor], torch.Tensor], locals_: list[torch.Tensor]
) -> Sequence[torch.Tensor]:
    return [of_one(local).double() for local in locals_]


_EXTREMES: dict[Any, tuple[Any, Reduction, torch.dtype | None]] = {
    aten.max.default: (aten.max.default, reductions.MAX, None),
    aten._foreach_max.default: (aten.max.default, reductions.MAX, None),
    aten.min.default: (aten.min.default, reductions.MIN, None),
    aten.any.default: (aten.any.default, Reduction(math.inf), torch.bool),
    aten.all.default: (aten.all.default, Reduction(-math.inf), torch.bool),
}
"""For each operation the form for one tensor, the reduction over ranks, and the dtype of the result."""


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Handle ``equal`` and ``allclose`` of tensors sharded alike; all ranks get the same answer by one all-reduce."""
    first, second, *rest = args
    spec = _specs_in(args)[0]
    if func is aten.equal.default and first.shape != second.shape:
        return False
    ours = func(_operand(func, spec, first), _operand(func, spec, second), *rest, **kwargs)
    differs = torch.tensor(float(not ours), device=first.device)
    all_reduce_over(spec.groups, differs, dist.ReduceOp.MAX, spec.mesh)
    return not differs.item()


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].shard_spec.bounds is not None:
        _refuse(func, args[0].shard_spec)
    return func(args[0]._local_tensor)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle GradScaler's check: an infinity on one rank is found on all ranks, so that all skip the step."""
    tensors, found_inf, inverse_scale = args
    locals_ = [x._local_tensor if type(x) is FlatDTensor else x for x in tensors]
    specs = _specs_in(tensors)
    for kind in {spec.mesh.device_type for spec in specs} - {found_inf.device.type}:
        # gradients are in host memory: wait for the copies of GradScaler's two numbers there
        torch.get_device_module(kind).synchronize()
    func(locals_, found_inf, inverse_scale)
    increment_version(locals_)
    # Replicas that take steps by themselves have gradients of their own: reduce over replicas, too.
    across = dict.fromkeys(group for spec in specs for group in (*spec.groups, *all_groups(spec.mesh)))
    all_reduce_over(across, found_inf, dist.ReduceOp.MAX, specs[0].mesh)


_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("detach", "alias", "view", "_unsafe_view", "expand"), _of_own_shape),
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"), _of_own_shape),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _draw),
    **dict.fromkeys(("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_"), _draw),
    **dict.fromkeys(("linalg_vector_norm", "norm", "_foreach_norm"), _reduce),
    **dict.fromkeys(("equal", "allclose"), _equal),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(
        (f"{name}_loss{end}" for name in ("mse", "huber", "smooth_l1") for end in ("", "_backward")), _loss
    ),
    "cat": _concatenate,
    "index_put_": _assign_where,
    "_local_scalar_dense": _item,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
_ELEMENTWISE = {
    *("clone", "copy", "_to_copy", "zero", "fill", "masked_fill", "copysign"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
    *("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"),
}
"""Operations that are element-wise though torch does not tag every overload as such."""
_OVERLOADS_DIFFER = {"max", "min", "where"}
"""Names with overloads that are not element-wise, though torch tags others as such."""


@functools.cache
def _handler_of(func: Any) -> Callable[..., Any]:
    """Return the handler of an operation: ``_refused`` for all that may need elements of other ranks."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten":
        return _refused
    if func in _EXTREMES:
        return _reduce
    if func is aten.view.dtype:  # ``view(dtype)`` reinterprets elements
        return _refused
    if name in _HANDLERS:
        return _HANDLERS[name]
    base = name.removeprefix("_foreach_").removesuffix("_")
    packet = None if base in _OVERLOADS_DIFFER else getattr(aten, base, None)
    forms = [func, *(getattr(packet, overload) for overload in packet.overloads())] if packet is not None else [func]
    is_elementwise = base in _ELEMENTWISE or any(torch.Tag.pointwise in form.tags for form in forms)
    if not is_elementwise or torch.Tag.nondeterministic_seeded in func.tags:
        return _refused
    return _foreach if name.startswith(("_foreach_", "_fused_")) else _elementwise


# Parameters that were replaced by sharded ones ---------------------------------------------------------------------

_SHARDED_AS = "_yafsdp_cc_sharded_as"
"""Attribute of a parameter that was replaced by a sharded one: the sharded one's ``ShardSpec``."""


class ReplacedParameter(torch.nn.Parameter):
    """A parameter that was replaced by a sharded one, as lists of ``parameters()`` from before still have it.

    It has no elements and gets no gradient: its norm, for clipping, or a penalty of it would be 0. Any use is refused.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        spec = next(each.__dict__[_SHARDED_AS] for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise RuntimeError(
            f"'{spec.name}' was taken from the model before it was sharded, and has neither elements nor gradients any "
            "more: take it from model.parameters() after shard(), or in a forward as an attribute of its module"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReplacedParameter({self.__dict__[_SHARDED_AS]})"


def mark_replaced(parameter: torch.nn.Parameter, spec: ShardSpec) -> None:
    """Mark ``parameter``, which has no elements any more, as replaced by the one that ``spec`` describes."""
    parameter.__dict__[_SHARDED_AS] = spec
    if type(parameter) is torch.nn.Parameter:  # a DTensor or another tensor subclass remains one
        parameter.__class__ = ReplacedParameter


_UNSHARDED_OF = "_yafsdp_cc_unsharded_of"
"""Attribute of unsharded weights that modules see outside of forwards: the ``ShardSpec`` of the sharded parameter."""


class UnshardedWeight(torch.Tensor):
    """An unsharded weight that modules show outside of forwards. Writes to it are lost: they are counted or refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """The weight outside of autograd; unlike those to torch's ``.data``, writes to it are counted."""
        return self.detach()

    @data.setter
    def data(self, _: torch.Tensor) -> None:
        """Refuse: what is assigned would be lost with the gathered weight."""
        spec: ShardSpec = self.__dict__[_UNSHARDED_OF]
        raise RuntimeError(
            f"'{spec.name}' shows its gathered weights until the backward or reshard(): what is assigned to its .data "
            "would be lost with them. Call reshard() of the module before, or write under "
            "yafsdp_cc.whole_parameters(model, write=True)"
        )


def mark_unsharded(weight: torch.Tensor, spec: ShardSpec) -> None:
    """Mark ``weight`` as the unsharded form of the parameter of ``spec``, which no optimizer may be made from."""
    weight.__dict__[_UNSHARDED_OF] = spec
    if type(weight) is torch.Tensor:  # a DTensor of tensor parallelism remains one
        weight.__class__ = UnshardedWeight


def is_unsharded(weight: torch.Tensor) -> bool:
    """Return whether ``mark_unsharded`` marked ``weight``."""
    return _UNSHARDED_OF in weight.__dict__


def sharded_as(parameter: torch.nn.Parameter) -> ShardSpec | None:
    """Return the spec of the sharded parameter that replaced ``parameter``; None if none did."""
    spec: ShardSpec | None = parameter.__dict__.get(_SHARDED_AS)
    return spec


_READS_ROWS = (
    " takes means over rows and columns, and here is {}: yafsdp_cc.optim.Adafactor has the arguments of "
    "torch.optim.Adafactor, and the same steps"
)
_REFUSED_OPTIMIZERS = {
    "torch.Muon": "torch.optim.Muon multiplies whole matrices, and here is {}: pass ownership='matrix' to shard(), or "
    "to fully_shard() of each block, and take yafsdp_cc.optim.Muon, which has them whole",
    "torch.Adafactor": f"torch.optim.Adafactor{_READS_ROWS}",
    "transformers.Adafactor": f"transformers.Adafactor{_READS_ROWS}, with d for clip_threshold and beta2_decay for "
    "decay_rate",
    "yafsdp_cc.Adafactor": "",
}
"""Message for optimizers that read more than a rank's elements, by package and class."""

_QUANTISES_STATE = (
    "{optimizer} quantises blocks of its state, which needs plain tensors, and here is {}: give it the shards "
    "themselves, nn.Parameter(p.to_local()), as in docs/quantised.md, 'Optimizers with quantised state'"
)
_QUANTISE_STATE = ("torchao", "bitsandbytes")
"""Packages whose optimizers read the memory of parameters, or compile their steps for plain tensors."""


def _refusal_of(optimizer: Optimizer) -> tuple[str, int]:
    """Return the message that refuses the optimizer ("": none), and the least dimensions that it applies to."""
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] in _QUANTISE_STATE:
        return _QUANTISES_STATE.replace("{optimizer}", f"{kind.__module__}.{kind.__name__}"), 0
    names = (f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__)
    return next((_REFUSED_OPTIMIZERS[name] for name in names if name in _REFUSED_OPTIMIZERS), ""), 2


@functools.cache
def follow_optimizers() -> None:
    """Register hooks around the steps of every optimizer of this process.

    After a step, every shard that the optimizer may have written to gets a new version, however it wrote.

    Before a step, an optimizer is refused whose parameters were replaced by sharded ones since it was made: its steps
    would change nothing, silently. Refused are also torch's Muon, and Adafactor of torch or Transformers, on sharded
    matrices, and optimizers of libraries that quantise blocks of state. State that was loaded as DTensors of rows, or
    whole, is sharded like its parameter. Adam on half-precision parameters gets a warning.
    """

    seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    begun: weakref.WeakKeyDictionary[Optimizer, dict[FlatParam, int]] = weakref.WeakKeyDictionary()
    """Versions of all shards before the steps under way, by optimizer."""

    def before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        refusal, dims = _refusal_of(optimizer)
        name = type(optimizer).__name__
        is_ours = any(base.__module__.startswith("yafsdp_cc.") for base in type(optimizer).__mro__)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if refusal and isinstance(parameter, FlatDTensor) and parameter.dim() >= dims:
                    raise NotImplementedError(refusal.format(parameter.shard_spec))
                if is_ours and isinstance(parameter, FlatDTensor):
                    spec, local = parameter.shard_spec, parameter._local_tensor
                    check_plain(spec, local, name, "its steps have to be its class's own operations, as of torch.optim")
                if isinstance(parameter, FlatDTensor) and _is_left_over(parameter.shard_spec):
                    raise RuntimeError(
                        f"this {name} holds the shard of '{parameter.shard_spec.name}', whose model is plain again, by "
                        "unshard_model(), or gone: make the optimizer anew, from model.parameters()"
                    )
                if (spec := parameter.__dict__.get(_SHARDED_AS)) is not None:
                    raise RuntimeError(
                        f"this {name} was made before '{spec.name}' was sharded and holds the "
                        "whole parameter, which is gone: make the optimizer after shard(), from model.parameters()"
                    )
                if (spec := parameter.__dict__.get(_UNSHARDED_OF)) is not None:
                    raise RuntimeError(
                        f"this {type(optimizer).__name__} was made while parameters() showed '{spec.name}' unsharded, "
                        "after unshard() or a forward: call model.reshard() before it is made, or make it before"
                    )
        if optimizer not in seen:
            seen.add(optimizer)
            _warn_of_rounding(optimizer)
        first = next((each for each in optimizer.state if isinstance(each, FlatDTensor)), None)
        if first is not None and _sharded_otherwise(optimizer, first):
            _shard_alike(optimizer)
        begun[optimizer] = {flat: flat.version for engine in engines for flat in engine.flats}

    def after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        versions, written = begun.pop(optimizer, {}), _written_by(optimizer)
        for engine in {engine_of(flat.params[0]) for flat in written}:
            assert engine is not None
            engine.steps += 1
        for flat in written:
            # kernels that take pointers write without raising torch's version counter
            if flat.version == versions.get(flat):
                increment_version((flat.sharded,))
        for flat, version in versions.items():
            if flat.version != version:
                flat.all_gather.stepped(version, flat.version)

    register_optimizer_step_pre_hook(_uncompiled(before))
    register_optimizer_step_post_hook(_uncompiled(after))


def _uncompiled(hook: Callable[[Optimizer, Any, Any], None]) -> Callable[[Optimizer, Any, Any], None]:
    """Return a hook on steps that stays out of compiled steps, and refuses those of sharded parameters."""
    disabled: Callable[[Optimizer, Any, Any], None] = torch.compiler.disable(hook)

    def call(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if get_eval_frame_callback() is None:
            hook(optimizer, args, kwargs)
            return
        every = (parameter for group in optimizer.param_groups for parameter in group["params"])
        sharded = next((parameter for parameter in every if isinstance(parameter, FlatDTensor)), None)
        if sharded is not None:
            raise NotImplementedError(
                f"torch.compile of the steps of this {type(optimizer).__name__}, over {sharded.shard_spec}: torch "
                "compiles no operations on flat ranges. Leave the step uncompiled: foreach=True and fused=True take "
                "few kernels"
            )
        disabled(optimizer, args, kwargs)

    return cast("Callable[[Optimizer, Any, Any], None]", torch._dynamo.decorators.skip(call))


def _is_left_over(spec: ShardSpec) -> bool:
    """Return whether the model of a sharded parameter has become plain since, or is gone."""
    owner = owner_of(spec)
    if owner is None:
        return spec.owner is not None
    engine = engine_of(owner)
    return (engine is None or engine.retired) and not owner.is_held


def _written_by(optimizer: Optimizer) -> set[FlatParam]:
    """Return each ``FlatParam`` that a step of the optimizer may have written to; the same ones on all ranks.

    Only parameters with a gradient count. A rank may own no elements of a parameter and give its optimizer no tensor of
    it: if the optimizer has memory of any shard of a model, all trained shards of the model count as written.
    """
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    parameters = [parameter for parameter in every if parameter.grad is not None]
    specs = [parameter.shard_spec for parameter in parameters if isinstance(parameter, FlatDTensor)]
    owners = [owner_of(spec) for spec in specs]
    written = {owner.flat for owner in owners if owner is not None and owner.flat is not None and owner.flat.trainable}
    plain = (torch.nn.Parameter, torch.Tensor)
    places = sorted(each.data_ptr() for each in parameters if type(each) in plain and each.layout == torch.strided)
    for engine in engines if any(places) else ():
        trained = [flat for flat in engine.flats if flat.trainable]
        parts = [part for flat in (*trained, *engine.replicated.flats) for part in tensors_of(flat.sharded)]
        ends = ((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
        if any(bisect_left(places, start) < bisect_left(places, end) for start, end in ends):
            written.update(trained)
    return {flat for flat in written if engine_of(flat.params[0]) is not None}


def _warn_of_rounding(optimizer: Optimizer) -> None:
    """Warn if Adam updates parameters of a dtype that rounds most of its steps away."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)):
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter, FlatDTensor) and parameter.dtype in (torch.bfloat16, torch.float16):
            if parameter.shard_spec.mesh.get_rank() == 0:
                logging.getLogger("yafsdp_cc").warning(
                    "%s updates %s, which is %s: steps below about %s of a weight are lost. Shard the model in fp32, "
                    "and compute in %s by mp_policy=MixedPrecisionPolicy(param_dtype=...)",
                    type(optimizer).__name__,
                    parameter.shard_spec,
                    parameter.dtype,
                    "1/256" if parameter.dtype == torch.bfloat16 else "1/2048",
                    parameter.dtype,
                )
            return


_NUMBERS = ("step", "mu_product", "eta", "mu")
"""Names of the state of torch's optimizers that is one number, whatever the shape of the parameter."""


def _sharded_otherwise(optimizer: Optimizer, parameter: torch.Tensor) -> list[str]:
    """Return the names of the state of ``parameter`` that ``load_state_dict`` has brought as rows or as whole tensors.

    Whole tensors, of the optimizer of a plain model, are known as such only where the steps are torch's own and
    element-wise: others may keep whole tensors.
    """
    kind = type(optimizer)
    takes_whole = kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS
    return [
        name
        for name, value in optimizer.state[parameter].items()
        if (type(value) is DTensor or (takes_whole and type(value) is torch.Tensor and name not in _NUMBERS))
        and value.shape == parameter.shape
    ]


def _shard_alike(optimizer: Optimizer) -> None:
    """Shard optimizer state like its parameter where it was loaded as rows or as whole tensors.

    Rows are those that ``distribute_tensor(full, p.device_mesh, p.placements)`` makes.
    """
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, FlatDTensor):
            for name in _sharded_otherwise(optimizer, parameter):
                state[name] = torch.empty_like(parameter, dtype=state[name].dtype).copy_(state[name])
