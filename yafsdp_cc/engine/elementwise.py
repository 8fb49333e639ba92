"""Operations that act on each element by itself, on ranges: alone, in place, and on lists of tensors.

Handlers run below autograd, where torch no longer counts versions: what changes a local tensor says so itself
(``grown``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from yafsdp_cc.engine.norms import LazyNorm
from yafsdp_cc.engine.tensor import Cut, FlatDTensor, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]
    """Does an operation: of ``(args, kwargs)``, among them a FlatDTensor."""

aten = torch.ops.aten
grown = torch._C._increment_version


_INSTEAD = (
    "call .full_tensor() for the whole tensor. In a forward that reads it outside of the module that owns it, make the "
    "model itself a unit too: shard(model, units=[..., model])"
)


def refuse(func: Any, cut: Cut, instead: str = _INSTEAD, what: str = "") -> NoReturn:
    raise NotImplementedError(f"{func._schema.name.replace('::', '.')}{what} on {cut}: {instead}")


def first_cut(values: Iterable[Any]) -> Cut:
    """The cut of the first FlatDTensor among arguments, also in lists."""
    for value in values:
        if isinstance(value, FlatDTensor):
            return value._cut
        if isinstance(value, (list, tuple)) and any(isinstance(x, FlatDTensor) for x in value):
            return first_cut(value)
    raise AssertionError("dispatched without a FlatDTensor among the arguments")


_ELEMENTWISE_UNTAGGED = {"zero", "fill", "masked_fill", "copysign"}
"""Element-wise operations that torch has not tagged as such, or not in every form."""

_OVERLOADS_DIFFER = {"max", "min", "where"}
"""Names under which only some forms are element-wise."""


def is_elementwise(name: str, func: Any) -> bool:
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


def admit(func: Any, cut: Cut, value: Any) -> Any:
    """What stands for ``value`` in an operation on ranges cut by ``cut``: ranges cut alike, or one number."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FlatDTensor):
        if value._cut.matches(cut):
            return value._local_tensor
        if value._cut.bounds is not None or value._cut.numel != 1:
            refuse(func, cut, what=f" with {value._cut}")
        value = value._local_tensor
    if isinstance(value, LazyNorm):
        value = value.value()
    # A number may have dimensions of size 1, as long as they would not show in the result.
    if value.numel() != 1 or value.dim() > min(len(cut.shape), len(cut.local_shape)):
        refuse(func, cut, what=f" with a plain tensor of shape {list(value.shape)}")
    return value


def _wrapped(result: Any, cut: Cut) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(wrap(x, cut) for x in result)
    return wrap(result, cut)


def elementwise(func: Any) -> Handler:
    written = [argument.name for argument in func._schema.arguments if _is_written(argument)]
    if written and written[0] == func._schema.arguments[0].name:
        return _elementwise_in_place(func)
    op = func._op

    def out_of_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cuts = [x._cut for x in (*args, *kwargs.values()) if type(x) is FlatDTensor]
        # The largest, for a number that is itself a (replicated) parameter may come first.
        cut = cuts[0] if len(cuts) == 1 else max(cuts, key=_extent)
        outs = tuple(kwargs[name] for name in written)
        if any(type(out) is not FlatDTensor for out in outs):
            refuse(func, cut, what=" into a plain tensor")
        locals_ = [x._local_tensor if type(x) is FlatDTensor and x._cut is cut else admit(func, cut, x) for x in args]
        result = op(*locals_, **(kwargs and {key: admit(func, cut, x) for key, x in kwargs.items()}))
        if not outs:
            return _wrapped(result, cut)
        grown([out._local_tensor for out in outs])
        return outs[0] if len(outs) == 1 else outs

    return out_of_place


def _elementwise_in_place(func: Any) -> Handler:
    op = func._op

    def in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if type(target) is not FlatDTensor:
            refuse(func, first_cut((*args, *kwargs.values())), what=" into a plain tensor")
        cut, local = target._cut, target._local_tensor
        locals_ = [x._local_tensor if type(x) is FlatDTensor and x._cut is cut else admit(func, cut, x) for x in args]
        op(*locals_, **(kwargs and {key: admit(func, cut, x) for key, x in kwargs.items()}))
        grown((local,))
        return target

    return in_place


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _extent(cut: Cut) -> tuple[int, int]:
    return cut.numel, len(cut.shape)


# Lists of tensors, as foreach and fused optimizers use them


def lists(func: Any) -> Handler:
    """Element by element, at each place of the lists by itself."""
    arguments = func._schema.arguments
    written = [i for i, argument in enumerate(arguments) if _is_written(argument)]
    op = func._op

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        columns = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor)]
        cuts = _cuts_of(columns, bool(written))

        def local(name: str, value: Any) -> Any:
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                return [
                    x._local_tensor if type(x) is FlatDTensor and x._cut is cut else admit_at(func, cut, x)
                    for x, cut in zip(value, cuts, strict=True)
                ]
            # "scalars" is a tensor that holds one number for each place of the lists.
            if (
                not isinstance(value, torch.Tensor)
                or name == "scalars"
                or (type(value) is torch.Tensor and not value.ndim)
            ):
                return value
            narrowest = min(cuts, key=lambda cut: -1 if cut is None else len(cut.shape))
            return admit_at(func, narrowest, value)

        locals_ = [local(argument.name, value) for argument, value in zip(arguments, args, strict=False)]
        result = op(*locals_, **{name: local(name, value) for name, value in kwargs.items()})
        for i in written:
            grown(locals_[i])
        if not result:
            return result
        return [x if cut is None else wrap(x, cut) for x, cut in zip(result, cuts, strict=True)]

    return handle


def admit_at(func: Any, cut: Cut | None, value: Any) -> Any:
    """As ``admit``, at a place of the lists where there may be plain tensors alone."""
    if cut is not None:
        return admit(func, cut, value)
    if isinstance(value, FlatDTensor):
        refuse(func, value._cut, what=" into a plain tensor")
    return value.value() if isinstance(value, LazyNorm) else value


def _cuts_of(columns: list[Any], in_place: bool) -> list[Cut | None]:
    """The cut at each place of parallel lists: the target's, or the largest there is; None where all are plain."""
    cuts = [x._cut if type(x) is FlatDTensor else None for x in columns[0]]
    if in_place or len(columns) == 1:
        return cuts
    for i, row in enumerate(zip(*columns, strict=True)):
        found = [x._cut for x in row if type(x) is FlatDTensor]
        cuts[i] = max(found, key=_extent, default=None)
    return cuts
