"""The two autograd functions that tell when a group's backward is over and where its gradients go.

    root gate ──► group gate ──┬─► inputs ────► the module's own ops ─► outputs      (forward)
                               └─► Narrow w ─►

[Note: gates] ``Narrow`` gives the forward a view of one parameter in the weight buffer; its backward writes the
gradient into the gradient buffer. All ``Narrow`` nodes of a group, and all consumers of its inputs, come before the
group's gate in the backward. So autograd itself runs the gate's backward exactly when the group's last gradient is
written, also if some gradients never come: no hook counts gradients. Group gates come before the root gate, the last
node of all.

The rest of the file maps functions over the tensors in a module's arguments and outputs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque, namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from yafsdp_cc.engine.param import FSDPParam


class Gated(Protocol):
    """The object that a gate reports its backward to."""

    def post_backward(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Handle the end of the backward of everything behind the gate; return the ``grads`` to pass on."""


class GateGradFlow(torch.autograd.Function):
    """Identity on an anchor and any number of tensors; its backward reports that everything behind it has run."""

    @staticmethod
    def forward(ctx: Any, gated: Gated, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gated = gated
        return (anchor, *tensors)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.gated.post_backward(grads))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(
            "forward-mode differentiation of a sharded model whose graph is recorded: tangents do not go through it. "
            "Compute them under torch.no_grad(), or on an unsharded model"
        )


class Narrow(torch.autograd.Function):
    """Identity on a parameter's view of the weight buffer; its backward writes the gradient and passes nothing on.

    Autograd casts that gradient to the view's dtype first, so where weights are in fp8 (``forms.extensions``) the view
    is a placeholder in the forward's dtype.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, param: FSDPParam, view: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.param = param
        return view.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        if grad is not None:
            ctx.param.accumulate_grad(grad)
        return None, None, None


# ``Function.apply`` first searches its arguments for functorch's dead wrappers. No argument of a gate is one, and a
# step makes as many calls as the model has parameters: call the base class's ``apply``.
gate: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, GateGradFlow).apply
"""``gate(gated, anchor, *tensors)``: the anchor and the tensors behind a gate."""
narrow: Callable[[Tensor, FSDPParam, Tensor], Tensor] = super(torch.autograd.Function, Narrow).apply
"""``narrow(anchor, param, view)``: the view, whose gradient goes to ``param``."""


# Tensors in arguments and outputs ----------------------------------------------------------------------------------

_ATOMS = (type(None), bool, int, float, str)


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor], within: tuple[Any, ...] = ()) -> Any:
    """Return ``tree`` with every tensor replaced by ``change(tensor)``; the same object where nothing changed.

    Looks into tuples, lists, dicts, dataclasses and whatever is registered with ``torch.utils._pytree``, such as the
    output classes of Hugging Face models. Objects of any other type are returned unchanged, tensors in them, too.

    Args:
        within: dataclasses that ``tree`` is a part of; a reference back to one of them, as of a tree's node to its
            parent, is left as it is.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    kind = type(tree)
    if kind in _ATOMS or (kind is dict and not tree):  # most calls have no keyword arguments
        return tree
    if kind is tuple or kind is list:
        changed = [map_tensors(item, change, within) for item in tree]
        if all(new is old for new, old in zip(changed, tree, strict=True)):
            return tree
        return kind(changed)
    node = pytree.SUPPORTED_NODES.get(cast("Any", namedtuple) if pytree.is_namedtuple(tree) else kind)
    if node is not None:
        # ``tree_flatten`` with ``is_leaf`` recurses through a reference cycle, which would keep the tree alive until
        # garbage is collected.
        leaves, spec = node.flatten_fn(tree)
        changed = [map_tensors(leaf, change, within) for leaf in leaves]
        if kind is PackedSequence:
            changed[1] = leaves[1]  # ``PackedSequence`` requires its batch sizes on the CPU
        if all(new is old for new, old in zip(changed, leaves, strict=True)):
            return tree
        return node.unflatten_fn(changed, spec)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and all(tree is not each for each in within):
        return _map_dataclass(tree, change, (*within, tree))
    return tree


def _map_dataclass(tree: Any, change: Callable[[Tensor], Tensor], within: tuple[Any, ...]) -> Any:
    fresh = None
    for name, old in _contents(tree).items():
        new = map_tensors(old, change, within)
        if new is not old:
            fresh = copy.copy(tree) if fresh is None else fresh
            object.__setattr__(fresh, name, new)
    return tree if fresh is None else fresh


def _contents(container: Any) -> dict[Any, Any]:
    """Return what a list, dict or dataclass holds: by index, by key, or by the name of a field that has a value."""
    if isinstance(container, (list, deque)):
        return dict(enumerate(container))
    if isinstance(container, dict):
        return dict(container)
    names = [field.name for field in dataclasses.fields(container)]
    return {name: getattr(container, name) for name in names if hasattr(container, name)}


class CopiedContainer:
    """A list, dict or dataclass in a module's arguments, and the copy with other tensors that its forward gets.

    Args:
        given: the container that the caller has passed.
        passed: the copy that ``map_tensors`` has made.
    """

    def __init__(self, given: Any, passed: Any) -> None:
        self.given, self.passed = given, passed
        self._before = _contents(passed)

    def written(self) -> dict[Any, Any]:
        """Return what the forward has put into the copy, by index, key or field."""
        kept = {id(each) for each in self._before.values()}
        return {key: each for key, each in _contents(self.passed).items() if id(each) not in kept}

    def write_back(self, written: dict[Any, Any]) -> None:
        """Change the caller's container as the forward has changed the copy: ``skips.append(x)``, ``batch["x"] = x``.

        What the forward has left in the copy remains the caller's own.

        Args:
            written: the values to put in, as of ``written()``.
        """
        before, after, own = self._before, _contents(self.passed), _contents(self.given)
        if after.keys() == before.keys() and all(after[key] is each for key, each in before.items()):
            return
        originals = {id(each): own[key] for key, each in before.items()}
        values = {key: written[key] if key in written else originals[id(each)] for key, each in after.items()}
        if isinstance(self.given, (list, deque)):
            self.given.clear()
            self.given.extend(values.values())
        elif isinstance(self.given, dict):  # output classes of Hugging Face models refuse ``update`` and ``clear``
            for key in own.keys() - values.keys():
                del self.given[key]
            for key, value in values.items():
                self.given[key] = value
        else:
            for name, value in values.items():
                object.__setattr__(self.given, name, value)


def copied_containers(given: Any, passed: Any) -> list[CopiedContainer]:
    """Return the lists, dicts and dataclasses within ``given`` that ``map_tensors`` has copied to make ``passed``."""
    if given is passed or isinstance(given, Tensor):
        return []
    if isinstance(given, tuple):
        found, own, copies = [], dict(enumerate(given)), dict(enumerate(passed))
    elif isinstance(given, (list, deque, dict)) or dataclasses.is_dataclass(given):
        found, own, copies = [CopiedContainer(given, passed)], _contents(given), _contents(passed)
    else:
        return []
    for key, each in own.items():
        found += copied_containers(each, copies[key])
    return found


def convert_tensors(tree: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Return ``tree`` with tensors on ``device`` and floating-point tensors in ``dtype``; None: unchanged."""
    return tree if dtype is None and device is None else map_tensors(tree, lambda each: convert(each, dtype, device))


def convert(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None = None) -> Tensor:
    """Return ``tensor`` on ``device``, and in ``dtype`` if it is floating-point; None leaves it unchanged."""
    if device is not None and tensor.device != device:
        tensor = tensor.to(device, non_blocking=True)
    return tensor if dtype in (None, tensor.dtype) or not tensor.is_floating_point() else tensor.to(dtype)


def gate_tensors(
    through: Callable[[list[Tensor]], list[Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with every tensor that requires a gradient replaced by its output of ``through``."""
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:  # a fast path: most calls have one tensor
        gated = through([args[0]] if args[0].requires_grad else [])
        return (tuple(gated) or args), kwargs
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensors.append(tensor)
        return tensor

    map_tensors((args, kwargs), collect)
    gated = through(tensors)
    if not tensors:
        return args, kwargs
    rest = iter(gated)
    fresh = map_tensors((args, kwargs), lambda tensor: next(rest) if tensor.requires_grad else tensor)
    return fresh[0], fresh[1]
