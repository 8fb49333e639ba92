"""Sharded parameters as users see them: a DTensor whose local tensor is this rank's flat range of the whole tensor.

    whole, [4, 4] row-major           0 1 2 3 4 5 6 7 8 9 a b c d e f
    ShardSpec.bounds (0, 5, 14, 16)   | rank 0  |     rank 1      |r 2|

A parameter, its gradient and its optimizer state share one ``ShardSpec``, so an element-wise operation is the same
operation on the local tensors: torch's optimizers, ``clip_grad_norm_``, ``GradScaler`` and checkpoints work unchanged.
An operand with other bounds, as of another model, is moved to the bounds of the first by a collective. DTensor's own
sharding propagation is not used: it knows only slices along a dimension, and would take that operand as it is. A small
parameter is not sharded (``bounds`` is None): every rank holds the whole tensor, in its own shape.

A loss may read sharded parameters outside of the modules' forwards (penalties, ``full_tensor()``). The gradients that
autograd then brings to a parameter are averaged over the data-parallel ranks, like the engine's: a term that all ranks
compute alike counts once.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._prims_common import make_contiguous_strides_for
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from yafsdp_cc.engine.layout import TensorParallel
from yafsdp_cc.engine.param import owner_of
from yafsdp_cc.engine.state import engine_of
from yafsdp_cc.forms.subclasses import PLAIN, as_plain, check_plain, tensors_of
from yafsdp_cc.ranks.mesh import all_groups, all_reduce_over, shard_group, to_mesh_device
from yafsdp_cc.tensor import reductions
from yafsdp_cc.tensor.chunks import SavedInChunks
from yafsdp_cc.tensor.gradients import own_part, plain_grad, reduced, reduction_of
from yafsdp_cc.tensor.reductions import Across, LazyReduction, Reduction, Summand
from yafsdp_cc.tensor.refusals import (
    CALL_FULL,
    LOSES_STEPS,
    STATE_OF_TORCH,
    instead_of_writing,
    instead_while_whole,
    refusal,
    refusal_of,
    warn_of_rounding,
)
from yafsdp_cc.tensor.rows import (
    RowShardSpec,
    are_rows,
    flat_range_of,
    gathered,
    is_by_rows,
    is_flat_range,
    moved,
    rows_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from yafsdp_cc.engine.layout import ShardSpec
    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.state import FSDPState
    from yafsdp_cc.tensor.gradients import GradReduction

aten = torch.ops.aten
increment_version = torch._C._increment_version
"""Function that raises the version counters of tensors written without torch's notice. Call it also for a shard of
which this rank holds no element: all ranks must gather the shard anew."""


_SAVE = (
    "a shard is no use without the other ranks; save with yafsdp_cc.save or torch.distributed.checkpoint. "
    "save_pretrained, safetensors and torch.save take whole tensors: full = yafsdp_cc.full_state_dict(model) on every "
    "rank, then model.save_pretrained(folder, state_dict=full) on the first"
)


class FlatShard(Shard):
    """Placement of a flat range: equal to ``Shard(0)`` where code compares placements, but refuses to compute a slice.

    A flat range is no slice along a dimension. torch's state dict functions copy slices of whole tensors into
    ``to_local()``, and would not notice a slice of the right size with other elements.
    """

    spec: ShardSpec | str = "a parameter"  # unknown after a copy or in a pickle

    def _local_shard_size_and_offset(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"a slice along a dimension was asked of {self.spec}, which is sharded by flat ranges: write to it with "
            ".copy_(), which takes full tensors and DTensors of any placements, and read it with .full_tensor()"
        )


def _dtensor_spec(spec: ShardSpec, dtype: torch.dtype) -> DTensorSpec:
    """Make DTensor's spec of a tensor sharded by ``spec``: the global shape, contiguous, placed as ``Shard(0)`` or
    ``Replicate()`` along the shard dimension, then as tensor parallelism places it."""
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

    # ``shard_spec`` is in ``__dict__``: if this class had ``__slots__``, asynchronous checkpoints would not find
    # DTensor's slots and would write uninitialised memory.
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
        return _read(self, reduction_of(self.shard_spec, grad_placements), False)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor, a new one, on every rank of the mesh.

        The call and its backward are collectives unless the tensor is replicated: make the call on all ranks.

        Args:
            grad_placements: how the data-parallel ranks' gradients are combined. None: by their mean, which is right
                for a term that all ranks compute alike and for one of each rank's own batch. ``[Partial()]``: by their
                sum. ``[Replicate()]``: they are equal, and nothing is communicated.
        """
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._full()
        return _read(self, reduction_of(self.shard_spec, grad_placements), True)

    @torch.no_grad()
    def _full(self) -> torch.Tensor:
        spec, local = self.shard_spec, self._local_tensor
        reductions.check_not_refused(
            "full_tensor()", () if spec.bounds is None else (shard_group(spec.mesh),), spec.mesh
        )
        _follow_reduces()
        whole = local.clone() if spec.bounds is None else gathered(local, spec)
        if spec.tensor_parallel is not None:
            whole = spec.tensor_parallel.wrap_unsharded(to_mesh_device(whole, spec.mesh)).full_tensor()
        return whole.to(self.device)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Return a plain DTensor with ``placements``, as torch's ``redistribute`` does. A collective.

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
        return wrap(self._local_tensor, self.shard_spec, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatDTensor:
        # torch's deepcopy would copy the mesh, and the whole flat buffer of which the local tensor is a view.
        if id(self) in memo:
            return cast("FlatDTensor", memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(f"deepcopy of {self.shard_spec}: only leaf tensors can be copied, detach it first")
        copied = memo[id(self)] = wrap(self._local_tensor.clone(), self.shard_spec, self.requires_grad)
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

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: NumPy and Python would get a part of the elements, or memory that holds none."""
        raise NotImplementedError(f".numpy(), .tolist() or DLPack of {self.shard_spec}: {CALL_FULL}")

    tolist = __dlpack__ = numpy

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self.shard_spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], flatten_spec: tuple[ShardSpec, bool], outer_size: Any, outer_stride: Any
    ) -> FlatDTensor:
        return wrap(inner_tensors["_local_tensor"], *flatten_spec)


engines: weakref.WeakSet[FSDPState] = weakref.WeakSet()
"""All engines of the process; their reduces add to gradients on streams of their own."""


def _follow_reduces() -> None:
    """Make the caller's stream wait for reduces in flight outside of a backward.

    A backward that raised leaves reduces in flight. It has no end at which the engine could wait, so every operation on
    a sharded tensor waits.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    for engine in engines:
        context = engine.context
        # on a CPU a reduce adds to gradients in the thread that waits for it, so none adds meanwhile
        if context.last_reduce is not None and context.reduce_stream.is_ordered:
            context.last_reduce.wait()
            if context.replicas is not None:
                context.replicas.wait()
            engine.wait_for_transfers()


def wrap(local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> FlatDTensor:
    """Make a ``FlatDTensor`` without the checks of ``flat_dtensor`` and DTensor's slow ``__init__``."""
    # ``DTensor.__new__`` copies the local tensor's storage offset but not its storage, and torch then computes a wrong
    # address: pass it a tensor with offset 0.
    shown = local if local.storage_offset() == 0 else local.new_empty(0)
    known = spec.dtensor_specs.get(local.dtype) or _dtensor_spec(spec, local.dtype)
    flat: Any = DTensor.__new__(FlatDTensor, shown, known, requires_grad=requires_grad)
    flat._local_tensor, flat.shard_spec = local, spec
    return cast("FlatDTensor", flat)


def flat_dtensor(local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> FlatDTensor:
    """Return the tensor sharded by ``spec`` whose elements on this rank are ``local``.

    Args:
        local: this rank's elements, any dtype: contiguous and 1-D with as many elements as the rank holds (possibly
            none), or of the whole shape when replicated. It is not copied: later changes of either, or of the buffer
            that it is a view of, show in both.
        spec: the ``ShardSpec`` that a parameter shares with its gradient and optimizer state.

    Raises:
        ValueError: ``local`` has another shape than ``spec`` gives this rank, or takes part in autograd.
    """
    if local.shape != spec.local_shape or not local.is_contiguous():
        raise ValueError(f"{spec} wants a contiguous {list(spec.local_shape)}, got {list(local.shape)}")
    if local.requires_grad or isinstance(local, DTensor):
        raise ValueError(f"{spec} wants a plain local tensor outside of autograd")
    return wrap(local, spec, requires_grad)


# Gradients that autograd brings to a parameter outside of the engine --------------------------------------------


class _Read(torch.autograd.Function):
    """Returns the local tensor or, if ``whole``, the whole one; its backward combines the gradients of ranks that have
    read the same elements, and returns this rank's part."""

    @staticmethod
    def forward(ctx: Any, flat: FlatDTensor, reduction: GradReduction, whole: bool) -> torch.Tensor:
        ctx.spec, ctx.reduction, ctx.whole = flat.shard_spec, reduction, whole
        return flat._full() if whole else flat._local_tensor.view_as(flat._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[FlatDTensor, None, None]:
        spec, holders = ctx.spec, all_groups(ctx.spec.mesh)[0 if ctx.spec.bounds is None else 1 :]
        if ctx.whole:
            return wrap(own_part(spec, grad, ctx.reduction), spec), None, None
        return wrap(reduced(spec, as_plain(grad), holders, ctx.reduction), spec), None, None


_read: Callable[[FlatDTensor, GradReduction, bool], torch.Tensor] = _Read.apply


def take_grads_of_autograd(parameter: torch.Tensor) -> None:
    """Add a hook to ``parameter`` that waits for reduces, and shards the gradients that autograd brings to it."""
    if not parameter.is_floating_point():
        return
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)  # torch registers hooks only on tensors that require a gradient
    DTensor.register_hook(parameter, functools.partial(_take_grad, cast("FlatDTensor", parameter).shard_spec))
    parameter.requires_grad_(requires_grad)


def _take_grad(spec: ShardSpec, grad: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None:  # autograd has None for zeros, as of a 0-norm
        return None
    owner = owner_of(spec)
    if owner is not None and (engine := engine_of(owner)) is not None:
        engine.context.wait_for_reduces()  # reduces in flight add to the same .grad on a stream of their own
        # assigning another .grad would drop the sum that ``ShardedGrad`` withholds until it knows who used the
        # parameter
        if owner.is_withheld:
            owner.parameter.grad, owner.is_withheld = owner.grad, False
    if isinstance(grad, FlatDTensor):
        local = _local_alike(spec, grad)
        return grad if local is None or local is grad._local_tensor else wrap(local, spec)
    grad = grad.value() if isinstance(grad, LazyReduction) else grad
    return wrap(plain_grad(spec, grad).expand(spec.local_shape).clone(memory_format=torch.contiguous_format), spec)


# Operations: their handlers(func, args, kwargs) run below autograd, where torch does not raise version counters, so a
# handler that changes a local tensor increments the tensor's version.


def refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise the error that refuses ``func``, unless the call is the derivative of a product with a 0-d parameter."""
    specs = specs_in((args, kwargs))
    if _is_derivative(func) and all(x.bounds is None and not x.shape for x in specs):
        # a 0-d parameter, such as a temperature, was multiplied by a plain loss: ``func`` is the product's derivative
        args, kwargs = tree_map_only(FlatDTensor, lambda number: number._local_tensor, (args, kwargs))
        return func(*args, **kwargs)
    spec = specs[0]
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise refusal(func, spec, instead="initialise before sharding, or under whole_parameters()")
    raise refusal(func, spec)


def specs_in(arguments: Any) -> list[ShardSpec]:
    """Return the ``ShardSpec`` of each ``FlatDTensor`` among ``arguments`` and in lists among them."""
    return [each.shard_spec for each in tree_leaves(arguments) if isinstance(each, FlatDTensor)]


def _local_alike(spec: ShardSpec, flat: FlatDTensor) -> torch.Tensor | None:
    """Return this rank's elements of ``flat`` by the bounds of ``spec``; None if its spec differs in more than bounds.

    The call is a collective where bounds differ, as those of one parameter do in two models with different units or
    different frozen parameters.
    """
    theirs, local = flat.shard_spec, flat._local_tensor
    if theirs is spec or theirs.matches(spec):
        return local
    fits = (theirs.shape, theirs.mesh, theirs.tensor_parallel) == (spec.shape, spec.mesh, spec.tensor_parallel)
    if not fits or RowShardSpec in (type(spec), type(theirs)):
        return None
    reductions.check_not_refused(
        f"moving the elements of '{theirs.name}' to where '{spec.name}' has them,", (shard_group(spec.mesh),), spec.mesh
    )
    return moved(local, theirs, spec)


def _refused_into(func: Any, spec: ShardSpec, target: torch.Tensor) -> NotImplementedError:
    """Return the error for an operation that reads a tensor sharded by ``spec`` and writes to ``target``, which is
    plain."""
    return refusal(func, spec, f" into a {_kind_of(target)}", instead_of_writing(spec, target))


def _kind_of(value: torch.Tensor) -> str:
    kind = f"DTensor placed as {value.placements}" if isinstance(value, DTensor) else "plain tensor"
    return f"{kind} of shape {list(value.shape)}"


def operand(func: Any, spec: ShardSpec | None, value: Any, first: Any = None, *, is_written: bool = False) -> Any:
    """Return the operand that replaces ``value`` in an operation on local tensors of ``spec`` (None: on plain tensors):
    a local tensor of the same elements, or one number. Operations in ``_TAKE_WHOLE`` take a part of whole tensors.

    Args:
        first: the first operand, which the operation writes to if ``spec`` is None.
        is_written: whether the operation writes to ``value``, which has to be the local tensor itself then.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FlatDTensor):
        if spec is None:
            raise _refused_into(func, value.shard_spec, first)
        if value.shard_spec is spec or value.shard_spec.matches(spec):
            return value._local_tensor
        if not is_written and (local := _local_alike(spec, value)) is not None:
            return local
        if value.shard_spec.bounds is not None or value.shard_spec.numel != 1:
            raise refusal(func, spec, f" with {value.shard_spec}")
        value = value._local_tensor
    elif isinstance(value, LazyReduction):
        value = value.value()
    if spec is None:
        return value
    if _is_derivative(func) and value.is_floating_point() and value.shape in ((), spec.global_shape):
        # a gradient of the full shape, from an operation on whole tensors: take this rank's range of the ranks' mean
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
        is_whole = value.shape == spec.global_shape
        instead = instead_while_whole(spec) if is_whole else ""
        also = STATE_OF_TORCH if not instead and (is_whole or isinstance(value, DTensor)) else ""
        if is_whole and not written_arguments(func):
            instead += "make copies after shard(), by p.detach().clone(): they are sharded alike. Or "
        raise refusal(func, spec, f" with a {_kind_of(value)}", instead and instead + CALL_FULL, also)
    return value


_TAKE_WHOLE = {aten.copy_.default, aten._foreach_copy_.default, aten.add_.Tensor}
"""Operations that accept whole tensors, for ``load_state_dict`` and for LBFGS, whose step vectors are whole."""


@functools.cache
def written_arguments(func: Any) -> dict[int, str]:
    """Return the names, by position, of the arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return {i: each.name for i, each in arguments if each.alias_info is not None and each.alias_info.is_write}


def _is_derivative(func: Any) -> bool:
    """Return whether ``func`` computes a gradient in a backward, and is no in-place write of a step in a hook."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled() and not written_arguments(func)


def _spec_of_result(operands: Iterable[Any]) -> ShardSpec | None:
    """Return the ``ShardSpec`` of an operation's result, that of the largest operand: the first may be a number."""
    specs = [x.shard_spec for x in operands if type(x) is FlatDTensor]
    return specs[0] if len(specs) == 1 else max(specs, key=lambda spec: (spec.numel, len(spec.shape)), default=None)


def _on_locals(func: Any, spec: ShardSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on the local tensors of its operands, moved to the bounds of ``spec``, and on numbers."""
    written = written_arguments(func)
    locals_ = [
        x._local_tensor
        if type(x) is FlatDTensor and x.shard_spec is spec
        else operand(func, spec, x, is_written=place in written)
        for place, x in enumerate(args)
    ]
    # a flat range has only one memory format: drop the argument
    named = kwargs and {
        name: operand(func, spec, x, is_written=name in written.values())
        for name, x in kwargs.items()
        if name != "memory_format"
    }
    return func._op(*locals_, **named)


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an element-wise operation, whether it works in place, writes to ``out`` or returns new tensors."""
    outs = tuple(args[i] if i < len(args) else kwargs[name] for i, name in written_arguments(func).items())
    if outs:
        if (plain := next((x for x in outs if type(x) is not FlatDTensor), None)) is not None:
            raise _refused_into(func, specs_in((args, kwargs))[0], plain)
        _on_locals(func, outs[0].shard_spec, args, kwargs)
        increment_version([x._local_tensor for x in outs])
        return outs[0] if len(outs) == 1 else outs
    spec = _spec_of_result((*args, *kwargs.values()))
    assert spec is not None
    is_number = not spec.shape and spec.bounds is None and not any(map(_is_grad, args))
    if is_number and _is_derivative(func) and any(type(x) is torch.Tensor for x in args):
        return refused(func, args, kwargs)  # a plain operand differs by rank: its mean is still to be taken
    result = _on_locals(func, spec, args, kwargs)
    return wrap(result, spec) if isinstance(result, torch.Tensor) else tuple(wrap(x, spec) for x in result)


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an element-wise operation on lists of tensors, as foreach and fused optimizers call it."""
    written = written_arguments(func)
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

    fewest = [-1 if spec is None else len(spec.shape) for spec in specs]

    def local(value: Any, name: str) -> Any:
        if _is_tensor_list(value):
            is_written = name in written.values()
            return [
                x._local_tensor
                if type(x) is FlatDTensor and x.shard_spec is spec
                else operand(func, spec, x, first, is_written=is_written)
                for x, spec, first in zip(value, specs, columns[0], strict=True)
            ]
        # "scalars" is a tensor that holds one number for each position in the lists of tensors.
        if not isinstance(value, torch.Tensor) or name == "scalars" or (type(value) is torch.Tensor and not value.ndim):
            return value
        return operand(func, specs[fewest.index(min(fewest))], value)

    locals_ = [local(value, each.name) for each, value in zip(func._schema.arguments, args, strict=False)]
    named = {name: local(value, name) for name, value in kwargs.items()}
    result = func._op(*locals_, **named)
    for i, name in written.items():
        increment_version(locals_[i] if i < len(args) else named[name])
    return result and [x if spec is None else wrap(x, spec) for x, spec in zip(result, specs, strict=True)]


def _places_by_class(columns: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Group the positions in lists of tensors by the tensor subclass of their local tensors, plain ones together."""
    places: dict[type, list[int]] = {}
    for place, row in enumerate(zip(*columns, strict=True)):
        kinds = (type(x._local_tensor) for x in row if type(x) is FlatDTensor)
        places.setdefault(next((kind for kind in kinds if kind not in PLAIN), torch.Tensor), []).append(place)
    return list(places.values())


def _foreach_at(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[int], count: int) -> Any:
    """Run ``_foreach`` at ``places`` of lists of ``count`` tensors: a tensor subclass with several inner tensors runs
    an operation on a list once for each inner tensor, on the whole list."""

    def at_places(value: Any, name: str) -> Any:
        if name == "scalars" and isinstance(value, torch.Tensor):
            return value[list(places)]
        is_list = isinstance(value, (list, tuple)) and len(value) == count
        return [value[place] for place in places] if is_list else value

    chosen = [at_places(value, each.name) for each, value in zip(func._schema.arguments, args, strict=False)]
    return _foreach(func, tuple(chosen), {name: at_places(value, name) for name, value in kwargs.items()})


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def summand_of(flat: FlatDTensor, dtype: torch.dtype) -> Summand:
    """Return ``flat`` as the ``Summand`` of a reduction over all its elements."""
    spec = flat.shard_spec
    counts = spec.bounds is not None or spec.rank == 0  # the first rank alone counts a replicated tensor
    return Summand(flat._local_tensor, counts, Across(spec.global_mesh, spec.groups), dtype)


def check_is_real(func: Any, flat: FlatDTensor) -> None:
    """Refuse a reduction of complex numbers: partials are float64, which has no imaginary part."""
    if flat.is_complex():
        instead = f"ranks add and compare parts of it in float64, which cannot hold the result: {CALL_FULL}"
        raise refusal(func, flat.shard_spec, f" of {flat.dtype}", instead)


def arguments_of_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a reduction by name; refuse a reduction over some dimensions, or with ``out``."""
    given = reductions.arguments_over_all(func, args, kwargs)
    if given is None:
        raise refusal(
            func, specs_in((args, kwargs))[0], " with out=" if "out" in kwargs else " over some of its dimensions"
        )
    return given


def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle norms, extremes, ``any`` and ``all`` of a tensor or of each in a list, by lazy reductions."""
    tensors = args[0] if _is_tensor_list(args[0]) else args[:1]
    given = arguments_of_whole(func, args, kwargs)
    if func in _EXTREMES:
        of_one, kind, dtype = _EXTREMES[func]
        of_locals = functools.partial(_local_extremes, of_one)
        for each in tensors if dtype is None else ():
            if type(each) is FlatDTensor:
                check_is_real(func, each)
    else:
        order, dtype = given["order"], given.get("dtype")
        of_one, kind = functools.partial(torch.linalg.vector_norm, ord=order, dtype=dtype), Reduction(order)
        of_locals = functools.partial(reductions.local_norms, order)
    summands = [summand_of(x, dtype or x.dtype.to_real()) for x in tensors if type(x) is FlatDTensor]
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
    aten.amax.default: (aten.max.default, reductions.MAX, None),
    aten.min.default: (aten.min.default, reductions.MIN, None),
    aten.amin.default: (aten.min.default, reductions.MIN, None),
    aten.any.default: (aten.any.default, Reduction(math.inf), torch.bool),
    aten.all.default: (aten.all.default, Reduction(-math.inf), torch.bool),
}
"""For each maximum or minimum: operation on one tensor, reduction over ranks, dtype of the result (None: its own)."""


HANDLERS: dict[str, Callable[..., Any]] = dict.fromkeys(reductions.NORMS, _reduce)
"""Handlers of operations that are not element-wise, by name; ``tensor/operations.py`` adds more."""
_ELEMENTWISE = {
    *("clone", "copy", "_to_copy", "zero", "fill", "masked_fill", "copysign", "leaky_relu"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
    *("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"),
}
"""Operations that are element-wise though torch does not tag every overload as such."""
_OVERLOADS_DIFFER = {"max", "min", "where"}
"""Operations with overloads that are not element-wise, though torch tags others of their overloads as such."""


def _is_grad(operand: object) -> bool:
    """Return whether ``operand`` is a parameter's ``.grad``, as in a hook that scales gradients behind the reduce."""
    owner = owner_of(operand.shard_spec) if type(operand) is FlatDTensor else None
    return owner is not None and operand is owner.parameter.grad


@functools.cache
def _handler_of(func: Any) -> Callable[..., Any]:
    """Return the handler of an operation: ``refused`` for all that may need elements of other ranks."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten":
        return refused
    if func in _EXTREMES:
        return _reduce
    if func is aten.view.dtype:  # ``view(dtype)`` reinterprets elements
        return refused
    if name in HANDLERS:
        return HANDLERS[name]
    base = name.removeprefix("_foreach_").removesuffix("_").removesuffix("_backward")
    packet = None if base in _OVERLOADS_DIFFER else getattr(aten, base, None)
    forms = [func, *(getattr(packet, overload) for overload in packet.overloads())] if packet is not None else [func]
    is_elementwise = base in _ELEMENTWISE or any(torch.Tag.pointwise in form.tags for form in forms)
    if not is_elementwise or torch.Tag.nondeterministic_seeded in func.tags:
        return refused
    return _foreach if name.startswith(("_foreach_", "_fused_")) else _elementwise


# Optimizers ----------------------------------------------------------------------------------------------------------


@functools.cache
def follow_optimizers() -> None:
    """Register hooks around the steps of every optimizer of this process.

    Before a step, optimizers are refused that cannot train shards (``tensor.refusals``), and state that was loaded as
    rows or whole is sharded like its parameter. After a step, every shard that the optimizer may have written to gets a
    new version, however it wrote.
    """
    seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    begun: weakref.WeakKeyDictionary[Optimizer, dict[FlatParam, int]] = weakref.WeakKeyDictionary()
    """Versions of all shards before the ``step()`` calls under way, by optimizer."""

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        kind: Any = type(optimizer)
        name, (refused, dims) = kind.__name__, refusal_of(kind)
        is_ours = any(base.__module__.startswith("yafsdp_cc.") for base in kind.__mro__)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for mark in LOSES_STEPS.keys() & parameter.__dict__.keys():
                    raise RuntimeError(f"this {name} {LOSES_STEPS[mark].format(parameter.__dict__[mark].name)}")
                if not isinstance(parameter, FlatDTensor):
                    continue
                spec, local = parameter.shard_spec, parameter._local_tensor
                if refused and parameter.dim() >= dims:
                    raise NotImplementedError(refused.format(spec))
                if is_ours:
                    check_plain(spec, local, name, "its steps have to be its class's own operations, as of torch.optim")
        if optimizer not in seen:
            seen.add(optimizer)
            warn_of_rounding(optimizer)
        first = next((each for each in optimizer.state if isinstance(each, FlatDTensor)), None)
        if first is not None and _sharded_otherwise(optimizer, first):
            _shard_alike(optimizer)
        flats = [flat for engine in engines for flat in engine.flats]
        begun[optimizer] = {flat: flat.version for flat in flats}
        return _with_mean_loss(optimizer, args, kwargs) if isinstance(optimizer, torch.optim.LBFGS) else None

    def after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        versions, written = begun.pop(optimizer, {}), _written_by(optimizer)
        for engine in set(written.values()):
            engine.steps += 1
        for flat in written:
            # kernels that take pointers write to a shard without raising torch's version counter
            if flat.version == versions.get(flat):
                increment_version((flat.sharded,))
        for flat, version in versions.items():
            if flat.all_gather.builds_on_held and flat.version != version:
                flat.all_gather.stepped(version, flat.version)

    register_optimizer_step_pre_hook(_uncompiled(before))
    register_optimizer_step_post_hook(_uncompiled(after))


def _with_mean_loss(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a step with a closure that returns the mean of the ranks' losses.

    The gradients are those of the mean loss. By the loss of its own batch each rank would find another length of step,
    and perhaps call the closure, which communicates, another number of times.
    """
    specs = specs_in([group["params"] for group in optimizer.param_groups])
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not specs or closure is None:
        return args, kwargs
    mesh = max((spec.mesh for spec in specs), key=lambda mesh: mesh.size())

    @functools.wraps(closure)
    def mean() -> Any:
        loss = closure()
        total = torch.as_tensor(loss, dtype=torch.float64, device="cpu").detach().clone()
        all_reduce_over(all_groups(mesh), total, dist.ReduceOp.SUM, mesh)
        average = total.item() / mesh.size()
        return torch.full_like(loss.detach(), average) if type(loss) is torch.Tensor else average

    if "closure" in kwargs:
        return args, kwargs | {"closure": mean}
    return (args[0], mean, *args[2:]), kwargs


def _uncompiled(hook: Callable[[Optimizer, Any, Any], Any]) -> Callable[[Optimizer, Any, Any], Any]:
    """Return ``hook`` kept out of compiled optimizer steps; it refuses compiled steps of sharded parameters."""
    disabled: Callable[[Optimizer, Any, Any], Any] = torch.compiler.disable(hook)

    def call(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if get_eval_frame_callback() is None:
            return hook(optimizer, args, kwargs)
        every = (parameter for group in optimizer.param_groups for parameter in group["params"])
        sharded = next((parameter for parameter in every if isinstance(parameter, FlatDTensor)), None)
        if sharded is not None:
            raise NotImplementedError(
                f"torch.compile of the steps of this {type(optimizer).__name__}, over {sharded.shard_spec}: torch "
                "compiles no operations on flat ranges. Leave the step uncompiled: foreach=True and fused=True take "
                "few kernels"
            )
        return disabled(optimizer, args, kwargs)

    return cast("Callable[[Optimizer, Any, Any], Any]", torch._dynamo.decorators.skip(call))


def _written_by(optimizer: Optimizer) -> dict[FlatParam, FSDPState]:
    """Return each ``FlatParam`` that a step of the optimizer may have written to, with its engine; alike on all ranks.

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
    return {flat: state for flat in written if (state := engine_of(flat.params[0])) is not None}


_NUMBERS = ("step", "mu_product", "eta", "mu")
"""Names of those states of torch's optimizers that are one number, whatever the shape of the parameter."""


def _sharded_otherwise(optimizer: Optimizer, parameter: torch.Tensor) -> list[str]:
    """Return the names of the state of ``parameter`` that ``load_state_dict`` has brought as rows or as whole tensors.

    Whole tensors, of the optimizer of a plain model, are known as such only where the steps are torch's own and
    element-wise: other optimizers may keep whole tensors.
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
