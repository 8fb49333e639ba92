"""Tensors inside a module's arguments and outputs, however deep they are nested."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable

_ATOMS = (type(None), bool, int, float, str)


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``tree`` with every tensor replaced by ``change(tensor)``; the same object where nothing changed.

    Looks into tuples, lists, dicts, dataclasses and whatever is registered with ``torch.utils._pytree``, such as the
    output classes of Hugging Face models. Anything else is passed through unseen.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind is tuple or kind is list:
        changed = [map_tensors(item, change) for item in tree]
        if all(new is old for new, old in zip(changed, tree, strict=True)):
            return tree
        return kind(changed)
    if kind is dict:
        fresh = {key: map_tensors(value, change) for key, value in tree.items()}
        return tree if all(fresh[key] is tree[key] for key in fresh) else fresh
    if kind in pytree.SUPPORTED_NODES or pytree.is_namedtuple(tree):
        leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
        changed = [map_tensors(leaf, change) for leaf in leaves]
        if all(new is old for new, old in zip(changed, leaves, strict=True)):
            return tree
        return pytree.tree_unflatten(changed, spec)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(tree, change)
    return tree


def _map_dataclass(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    fresh = None
    for field in dataclasses.fields(tree):
        old = getattr(tree, field.name)
        new = map_tensors(old, change)
        if new is not old:
            fresh = copy.copy(tree) if fresh is None else fresh
            object.__setattr__(fresh, field.name, new)
    return tree if fresh is None else fresh


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype`` if it is a floating-point one."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def gate_tensors(
    gate: Callable[[list[Tensor]], list[Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` with every tensor that requires a gradient replaced by what ``gate`` makes of it."""
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:  # as most modules are called
        gated = gate([args[0]] if args[0].requires_grad else [])
        return (tuple(gated) or args), kwargs
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensors.append(tensor)
        return tensor

    map_tensors((args, kwargs), collect)
    gated = gate(tensors)
    if not tensors:
        return args, kwargs
    rest = iter(gated)
    fresh = map_tensors((args, kwargs), lambda tensor: next(rest) if tensor.requires_grad else tensor)
    return fresh[0], fresh[1]
