"""Which operations may act on a ``FlatDTensor``, and how. Everything else is refused: a matrix product of ranges of
matrices would be wrong without a word.

``handler_of(func)`` is asked once per operation; the handler it returns is kept and called with ``(args, kwargs)``.
Handlers run below autograd, where torch no longer counts versions: what changes a local tensor says so itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from yafsdp_cc.engine.norms import MAX, MIN, NORMS, Kind, LazyNorm, norm_call, norms_of, reduced
from yafsdp_cc.engine.tensor import Cut, FlatDTensor, wrap

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]

aten = torch.ops.aten
_grown = torch._C._increment_version


def handler_of(func: Any) -> Handler:
    """The handler of an operator overload; one that raises if there is none."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "aten":
        for table in (_SPECIAL, _BY_NAME):
            if (make := table.get(func if table is _SPECIAL else name)) is not None:
                return make(func)
        if name.startswith("_foreach_") and _is_elementwise(name.removeprefix("_foreach_"), None):
            return _lists(func)
        if _is_elementwise(name, func):
            return _elementwise(func)
    return _refusal(func)


# Refusals


def _refuse(func: Any, cut: Cut, instead: str = "call .full_tensor() for the whole tensor", what: str = "") -> NoReturn:
    raise NotImplementedError(f"{func._schema.name.replace('::', '.')}{what} on {cut}: {instead}")


def _first_cut(values: Iterable[Any]) -> Cut:
    """The cut of the first FlatDTensor among arguments, also in lists."""
    for value in values:
        if isinstance(value, FlatDTensor):
            return value._cut
        if isinstance(value, (list, tuple)) and any(isinstance(x, FlatDTensor) for x in value):
            return _first_cut(value)
    raise AssertionError("dispatched without a FlatDTensor among the arguments")


def _refusal(func: Any) -> Handler:
    random = torch.Tag.nondeterministic_seeded in func.tags

    def refuse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        cut = _first_cut((*args, *kwargs.values()))
        if random:
            _refuse(func, cut, "initialise before sharding, or under whole_parameters()")
        _refuse(func, cut)

    return refuse


# Element by element

_ELEMENTWISE_UNTAGGED = {"zero", "fill", "masked_fill", "copysign"}
"""Element-wise operations that torch has not tagged as such, or not in every form."""

_OVERLOADS_DIFFER = {"max", "min", "where"}
"""Names under which only some forms are element-wise."""


def _is_elementwise(name: str, func: Any) -> bool:
    """Whether ``aten.name`` (and its forms with ``out`` or in place) act on each element by itself."""
    base = name.removesuffix("_")
    if func is not None and torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if base in _ELEMENTWISE_UNTAGGED or (func is not None and torch.Tag.pointwise in func.tags):
        return True
    if base in _OVERLOADS_DIFFER:
        return False
    packet = getattr(aten, base, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def _admit(func: Any, cut: Cut, value: Any) -> Any:
    """What stands for ``value`` in an operation on ranges cut by ``cut``: ranges cut alike, or one number."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FlatDTensor):
        if value._cut.matches(cut):
            return value._local_tensor
        if value._cut.bounds is not None or value._cut.numel != 1:
            _refuse(func, cut, what=f" with {value._cut}")
        value = value._local_tensor
    if isinstance(value, LazyNorm):
        value = value.value()
    # A number may have dimensions of size 1, as long as they would not show in the result.
    if value.numel() != 1 or value.dim() > min(len(cut.shape), len(cut.local_shape)):
        _refuse(func, cut, what=f" with a plain tensor of shape {list(value.shape)}")
    return value


def _wrapped(func: Any, result: Any, cut: Cut) -> Any:
    if isinstance(result, torch.Tensor):
        if result.shape != cut.local_shape:
            _refuse(func, cut)
        return wrap(result, cut)
    if isinstance(result, (list, tuple)):
        return type(result)(_wrapped(func, x, cut) for x in result)
    return result


def _elementwise(func: Any) -> Handler:
    arguments = func._schema.arguments
    if arguments[0].alias_info is not None and arguments[0].alias_info.is_write:
        return _elementwise_in_place(func)
    outs = [argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]

    def out_of_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cuts = [x._cut for x in (*args, *kwargs.values()) if type(x) is FlatDTensor]
        # The largest, for a number that is itself a (replicated) parameter may come first.
        cut = cuts[0] if len(cuts) == 1 else max(cuts, key=lambda cut: (cut.numel, len(cut.shape)))
        if any(type(kwargs[name]) is not FlatDTensor for name in outs):
            _refuse(func, cut, what=" into a plain tensor")
        result = func(*[_admit(func, cut, x) for x in args], **{key: _admit(func, cut, x) for key, x in kwargs.items()})
        if not outs:
            return _wrapped(func, result, cut)
        _grown([kwargs[name]._local_tensor for name in outs])
        return kwargs[outs[0]] if len(outs) == 1 else tuple(kwargs[name] for name in outs)

    return out_of_place


def _elementwise_in_place(func: Any) -> Handler:
    def in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if type(target) is not FlatDTensor:
            _refuse(func, _first_cut((*args, *kwargs.values())), what=" into a plain tensor")
        cut, local = target._cut, target._local_tensor
        func(
            local,
            *[x._local_tensor if type(x) is FlatDTensor and x._cut is cut else _admit(func, cut, x) for x in args[1:]],
            **(kwargs and {key: _admit(func, cut, x) for key, x in kwargs.items()}),
        )
        _grown((local,))
        return target

    return in_place


# Lists of tensors, as foreach and fused optimizers use them


def _lists(func: Any) -> Handler:
    """Element by element, at each place of the lists by itself."""
    arguments = func._schema.arguments
    written = [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]
    per_list = {argument.name for argument in arguments if argument.name == "scalars"}
    names = [argument.name for argument in arguments]

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        columns = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor)]
        cuts = _cuts_of(columns, bool(written))

        def local(name: str, value: Any) -> Any:
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                return [
                    x._local_tensor if type(x) is FlatDTensor and x._cut is cut else _admit_at(func, cut, x)
                    for x, cut in zip(value, cuts, strict=True)
                ]
            if (
                not isinstance(value, torch.Tensor)
                or name in per_list
                or (type(value) is torch.Tensor and not value.dim())
            ):
                return value
            cut = min(cuts, key=lambda cut: -1 if cut is None else len(cut.shape))
            return _admit_at(func, cut, value)

        locals_ = [local(name, value) for name, value in zip(names, args, strict=False)]
        result = func(*locals_, **{name: local(name, value) for name, value in kwargs.items()})
        for i in written:
            if i < len(locals_) and locals_[i]:
                _grown(locals_[i])
        if not result:
            return result
        return [x if cut is None else _wrapped(func, x, cut) for x, cut in zip(result, cuts, strict=True)]

    return handle


def _admit_at(func: Any, cut: Cut | None, value: Any) -> Any:
    """As ``_admit``, at a place of the lists where there may be plain tensors alone."""
    if cut is not None:
        return _admit(func, cut, value)
    if isinstance(value, FlatDTensor):
        _refuse(func, value._cut, what=" into a plain tensor")
    return value.value() if isinstance(value, LazyNorm) else value


def _cuts_of(columns: list[Any], in_place: bool) -> list[Cut | None]:
    """The cut at each place of parallel lists: the target's, or the largest there is; None where all are plain."""
    cuts = [x._cut if type(x) is FlatDTensor else None for x in columns[0]]
    if in_place or len(columns) == 1:
        return cuts
    for i, row in enumerate(zip(*columns, strict=True)):
        found = [x._cut for x in row if type(x) is FlatDTensor]
        cuts[i] = max(found, key=lambda cut: (cut.numel, len(cut.shape)), default=None)
    return cuts


# Copies and views of the same extent


def _same_elements(func: Any) -> Handler:
    return lambda args, kwargs: wrap(args[0]._local_tensor, args[0]._cut)


def _same_shape(func: Any) -> Handler:
    """A view that changes nothing."""

    def view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        flat, size = args[0], args[1]
        if tuple(size) != tuple(flat._cut.shape):
            _refuse(func, flat._cut)
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
        if random and flat._cut.bounds is None:
            dist.broadcast(local, group=flat._cut.mesh.get_group(), group_src=0)
        return wrap(local, flat._cut)

    return like


def _new(func: Any) -> Handler:
    """``new_zeros`` and its family, of the tensor's own shape."""

    def new(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        flat, size, *rest = args
        if tuple(size) != tuple(flat._cut.shape):
            _refuse(func, flat._cut, what=f" of shape {list(size)}")
        if func is aten.new_empty_strided.default:
            rest = [flat._local_tensor.stride()]
        return wrap(func(flat._local_tensor, flat._local_tensor.shape, *rest, **kwargs), flat._cut)

    return new


def _source(func: Any, cut: Cut, value: torch.Tensor) -> torch.Tensor:
    """What to copy into a local tensor: ranges cut alike, this rank's range of a whole tensor, or one number."""
    if isinstance(value, DTensor) and not isinstance(value, (FlatDTensor, LazyNorm)):
        # As torch.distributed.checkpoint hands out parts of a full state dict. All ranks load the same.
        value = value.full_tensor()
    if not isinstance(value, DTensor) and value.shape == cut.shape:
        if cut.bounds is None:
            return value
        start, stop = cut.owned
        return value.reshape(-1)[start:stop]
    source: torch.Tensor = _admit(func, cut, value)
    return source


def _copy(func: Any) -> Handler:
    def copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        target, value, *rest = args
        if type(target) is not FlatDTensor:
            _refuse(func, _first_cut(args), what=" into a plain tensor")
        local = target._local_tensor
        func(local, _source(func, target._cut, value), *rest, **kwargs)
        _grown((local,))
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
                sources.append(_admit_at(func, None, value))
        func(locals_, sources, *rest, **kwargs)
        _grown(locals_)

    return copy


def _assign_where(func: Any) -> Handler:
    """``x[mask] = number`` with a mask of x's shape, as Rprop has it."""

    def assign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatDTensor:
        target, indices, value, *_ = args
        cut = _first_cut(args)
        mask = indices[0] if len(indices) == 1 else None
        if type(target) is not FlatDTensor or type(mask) is not FlatDTensor or mask.dtype != torch.bool:
            _refuse(func, cut)
        local, value = target._local_tensor, _admit(func, cut, value)
        if isinstance(value, torch.Tensor) and value.shape == local.shape and value.numel() != 1:
            _refuse(func, cut)
        local.masked_fill_(_admit(func, cut, mask), value)
        _grown((local,))
        return target

    return assign


# Numbers of whole tensors


def _norm(func: Any) -> Handler:
    def norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyNorm:
        call = norm_call(func, args, kwargs) if func in NORMS else None
        if call is None:
            _refuse(func, args[0]._cut, what=" over some of its dimensions")
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
            lazy = iter(reduced(flats, kind, lambda xs: [one(x) for x in xs], [whole or x.dtype for x in flats]))
            found = [next(lazy) if type(x) is FlatDTensor else one(x) for x in tensors]
            return found[0] if tensors is not args[0] else found

        return extreme

    return make


def _equal(func: Any) -> Handler:
    """Whether two tensors cut alike hold the same, on every rank: one all-reduce, unless their shapes say no."""

    def equal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        one, other = args
        cut = _first_cut(args)
        if one.shape != other.shape:
            return False
        ours = func(_admit(func, cut, one), _admit(func, cut, other))
        differs = torch.tensor(float(not ours), device=one.device)
        dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=cut.mesh.get_group())
        return not differs.item()

    return equal


def _number(func: Any) -> Handler:
    def number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat = args[0]
        if flat._cut.bounds is not None:
            _refuse(func, flat._cut)
        return func(flat._local_tensor)

    return number


def _unscale(func: Any) -> Handler:
    """GradScaler's check: an infinity on one rank is found on all, so that all skip the step."""

    def unscale(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors, found_inf, inverse_scale = args
        locals_ = [x._local_tensor if type(x) is FlatDTensor else x for x in tensors]
        func(locals_, found_inf, inverse_scale)
        _grown(locals_)
        for mesh in dict.fromkeys(x._cut.mesh for x in tensors if type(x) is FlatDTensor):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=mesh.get_group())

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
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"), _new),
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), _lists),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    "copy_": _copy,
    "_foreach_copy_": _copy_lists,
    "index_put_": _assign_where,
    "_foreach_norm": _norms,
    "_foreach_max": _extreme(MAX),
    "equal": _equal,
    "_local_scalar_dense": _number,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
