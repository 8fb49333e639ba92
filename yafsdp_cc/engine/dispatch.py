"""Which operations may act on a ``FlatDTensor``, and how. Everything else is refused: a matrix product of ranges of
matrices would be wrong without a word.

``handler_of(func)`` is asked once per operation; the handler it returns is kept and called with ``(args, kwargs)``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from yafsdp_cc.engine.elementwise import admit, admit_at, elementwise, first_cut, grown, is_elementwise, lists, refuse
from yafsdp_cc.engine.norms import MAX, MIN, NORMS, Kind, LazyNorm, norm_call, norms_of, reduced
from yafsdp_cc.engine.ranks import of_first, reduce_over
from yafsdp_cc.engine.tensor import Cut, FlatDTensor, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from yafsdp_cc.engine.elementwise import Handler

aten = torch.ops.aten


def handler_of(func: Any) -> Handler:
    """The handler of an operator overload; one that raises if there is none."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "aten":
        for table in (_SPECIAL, _BY_NAME):
            if (make := table.get(func if table is _SPECIAL else name)) is not None:
                return make(func)
        if name.startswith("_foreach_") and is_elementwise(name.removeprefix("_foreach_"), None):
            return lists(func)
        if is_elementwise(name, func):
            return elementwise(func)
    return _refusal(func)


def _refusal(func: Any) -> Handler:
    random = torch.Tag.nondeterministic_seeded in func.tags

    def refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        cut = first_cut((*args, *kwargs.values()))
        if random:
            refuse(func, cut, "initialise before sharding, or under whole_parameters()")
        refuse(func, cut)

    return refused


# Copies and views of the same extent


def _same_elements(func: Any) -> Handler:
    return lambda args, kwargs: wrap(args[0]._local_tensor, args[0]._cut)


def _same_shape(func: Any) -> Handler:
    """A view that changes nothing."""

    def view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        flat, size = args[0], args[1]
        if tuple(size) != tuple(flat._cut.global_shape):
            refuse(func, flat._cut)
        return wrap(flat._local_tensor, flat._cut)

    return view


def _like(func: Any) -> Handler:
    """``clone``, ``to`` and ``*_like``: a new tensor cut alike. Random ones draw each rank's numbers from its own
    generator; a replicated one has rank 0's."""
    random = torch.Tag.nondeterministic_seeded in func.tags

    def like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        flat = args[0]
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        local = func(flat._local_tensor, *args[1:], **kwargs)
        if random:
            _same_where_held_twice(local, flat._cut)
        return wrap(local, flat._cut)

    return like


def _same_where_held_twice(local: torch.Tensor, cut: Cut) -> None:
    """Give ranks that hold the same elements what the first of them has drawn."""
    of_first(local, cut.mesh, replicas_only=cut.bounds is not None)
    if cut.parallel is not None:
        cut.parallel.of_first(local)


def _draw(func: Any) -> Handler:
    """``normal_`` and its like: every rank draws the whole tensor and keeps its part, so that ranks of one seed have
    what the plain tensor would get. Where seeds differ, what is held twice is still the same."""

    def draw(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        flat, *rest = args
        cut, local = flat._cut, flat._local_tensor
        local.copy_(cut.part_of(func(local.new_empty(cut.global_shape), *rest, **kwargs)))
        _same_where_held_twice(local, cut)
        grown((local,))
        return cast("FlatDTensor", flat)

    return draw


def _new(func: Any) -> Handler:
    """``new_zeros`` and its family, of the tensor's own shape."""

    def new(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        flat, size, *rest = args
        if tuple(size) != tuple(flat._cut.global_shape):
            refuse(func, flat._cut, what=f" of shape {list(size)}")
        if func is aten.new_empty_strided.default:
            rest = [flat._local_tensor.stride()]
        return wrap(func(flat._local_tensor, flat._local_tensor.shape, *rest, **kwargs), flat._cut)

    return new


def _source(func: Any, cut: Cut, value: torch.Tensor) -> torch.Tensor:
    """What to copy into a local tensor: ranges cut alike, this rank's range of a whole tensor, or one number."""
    if isinstance(value, DTensor) and not isinstance(value, (FlatDTensor, LazyNorm)):
        if cut.parallel is not None and cut.parallel.holds(value):
            return cut.range_of(value._local_tensor)
        # As torch.distributed.checkpoint hands out parts of a full state dict. All ranks load the same.
        value = value.full_tensor()
    if not isinstance(value, DTensor) and value.shape == cut.global_shape:
        return cut.part_of(value)
    source: torch.Tensor = admit(func, cut, value)
    return source


def _copy(func: Any) -> Handler:
    def copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        target, value, *rest = args
        if type(target) is not FlatDTensor:
            refuse(func, first_cut(args), what=" into a plain tensor")
        local = target._local_tensor
        func(local, _source(func, target._cut, value), *rest, **kwargs)
        grown((local,))
        return target

    return copy


def _copy_lists(func: Any) -> Handler:
    def copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        targets, values, *rest = args
        locals_, sources = [], []
        for target, value in zip(targets, values, strict=True):
            if type(target) is FlatDTensor:
                locals_.append(target._local_tensor)
                sources.append(_source(func, target._cut, value))
            else:
                locals_.append(target)
                sources.append(admit_at(func, None, value))
        func(locals_, sources, *rest, **kwargs)
        grown(locals_)

    return copy


def _assign_where(func: Any) -> Handler:
    """``x[mask] = number`` with a mask of x's shape, as Rprop has it."""

    def assign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        target, indices, value, *_ = args
        cut = first_cut(args)
        mask = indices[0] if len(indices) == 1 else None
        if type(target) is not FlatDTensor or type(mask) is not FlatDTensor or mask.dtype != torch.bool:
            refuse(func, cut)
        local, value = target._local_tensor, admit(func, cut, value)
        if isinstance(value, torch.Tensor) and value.shape == local.shape and value.numel() != 1:
            refuse(func, cut)
        local.masked_fill_(admit(func, cut, mask), value)
        grown((local,))
        return target

    return assign


# Numbers of whole tensors


def _norm(func: Any) -> Handler:
    def norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyNorm:
        call = norm_call(func, args, kwargs) if func in NORMS else None
        if call is None:
            refuse(func, args[0]._cut, what=" over some of its dimensions")
        return norms_of([call.tensor], call.order, call.dtype)[0]

    return norm


def _norms(func: Any) -> Handler:
    def norms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        tensors, *rest = args
        order = float(rest[0]) if rest else float(kwargs.get("ord", 2))
        dtype = rest[1] if len(rest) > 1 else kwargs.get("dtype")
        lazy = iter(norms_of([x for x in tensors if type(x) is FlatDTensor], order, dtype))
        return [
            next(lazy) if type(x) is FlatDTensor else torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors
        ]

    return norms


def _extreme(kind: Kind, whole: torch.dtype | None = None) -> Callable[[Any], Handler]:
    """``max``, ``min``, ``any`` and ``all`` of whole tensors, also of lists of them."""

    def make(func: Any) -> Handler:
        def extreme(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            one = aten.max.default if func is aten._foreach_max.default else func
            flats = [x for x in tensors if type(x) is FlatDTensor]
            lazy = iter(
                reduced(flats, kind, lambda xs: [one(x).double() for x in xs], [whole or x.dtype for x in flats])
            )
            found = [next(lazy) if type(x) is FlatDTensor else one(x) for x in tensors]
            return found[0] if tensors is not args[0] else found

        return extreme

    return make


def _equal(func: Any) -> Handler:
    """``equal`` and ``allclose`` of tensors cut alike, the same answer on every rank: one all-reduce."""

    def equal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        one, other, *rest = args
        cut = first_cut(args)
        if func is aten.equal.default and one.shape != other.shape:
            return False
        ours = func(admit(func, cut, one), admit(func, cut, other), *rest, **kwargs)
        differs = torch.tensor(float(not ours), device=one.device)
        reduce_over(cut.groups, differs, dist.ReduceOp.MAX, cut.mesh)
        return not differs.item()

    return equal


def _number(func: Any) -> Handler:
    def number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat = args[0]
        if flat._cut.bounds is not None:
            refuse(func, flat._cut)
        return func(flat._local_tensor)

    return number


def _unscale(func: Any) -> Handler:
    """GradScaler's check: an infinity on one rank is found on all, so that all skip the step."""

    def unscale(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors, found_inf, inverse_scale = args
        locals_ = [x._local_tensor if type(x) is FlatDTensor else x for x in tensors]
        cuts = [x._cut for x in tensors if type(x) is FlatDTensor]
        for kind in {cut.mesh.device_type for cut in cuts} - {found_inf.device.type}:
            # Gradients are in host memory, where GradScaler has sent its two numbers without waiting for them.
            torch.get_device_module(kind).synchronize()
        func(locals_, found_inf, inverse_scale)
        grown(locals_)
        across = dict.fromkeys(group for cut in cuts for group in cut.groups)
        reduce_over(across, found_inf, dist.ReduceOp.MAX, cuts[0].mesh)

    return unscale


_SPECIAL: dict[Any, Callable[[Any], Handler]] = {
    aten.max.default: _extreme(MAX),
    aten.min.default: _extreme(MIN),
    aten.any.default: _extreme(Kind(math.inf), torch.bool),
    aten.all.default: _extreme(Kind(-math.inf), torch.bool),
}

_BY_NAME: dict[str, Callable[[Any], Handler]] = {
    **dict.fromkeys(("detach", "alias"), _same_elements),
    **dict.fromkeys(("view", "_unsafe_view", "expand"), _same_shape),
    **dict.fromkeys(("clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like"), _like),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _like),
    **dict.fromkeys(("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_"), _draw),
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"), _new),
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), lists),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    "copy_": _copy,
    "_foreach_copy_": _copy_lists,
    "index_put_": _assign_where,
    "_foreach_norm": _norms,
    "_foreach_max": _extreme(MAX),
    **dict.fromkeys(("equal", "allclose"), _equal),
    "_local_scalar_dense": _number,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
