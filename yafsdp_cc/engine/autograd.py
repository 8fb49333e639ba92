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
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from yafsdp_cc.engine.param import FSDPParam


class Gated(Protocol):
    """Object whose ``post_backward`` a gate calls in its backward (``GateGradFlow``)."""

    def post_backward(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Handle the end of the backward of everything behind the gate; return the ``grads`` to pass on."""


class GateGradFlow(torch.autograd.Function):
    """Identity on an anchor and any number of tensors; its backward tells ``gated`` that all nodes behind have run."""

    @staticmethod
    def forward(ctx: Any, gated: Gated, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gated = gated
        return (anchor, *tensors)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.gated.post_backward(grads))


class Narrow(torch.autograd.Function):
    """Identity on a view of the weight buffer, by ``narrow``; its backward writes the gradient and passes none on.

    Autograd first casts the gradient of the view to the view's dtype, so where weights are in fp8
    (``forms.extensions``) the view is a placeholder in the forward's dtype.
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


class Alias(torch.autograd.Function):
    """Identity on a tensor, with a node of its own. To autograd the output is no view, so ``detach_()`` works on it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# ``Function.apply`` first searches its arguments for functorch's dead wrappers. No argument of a gate is one, and a
# step makes as many calls as the model has parameters: call the base class's ``apply``.
gate: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, GateGradFlow).apply
"""``gate(gated, anchor, *tensors)`` returns the anchor and the tensors as outputs of a new ``GateGradFlow`` node."""
narrow: Callable[[Tensor, FSDPParam, Tensor], Tensor] = super(torch.autograd.Function, Narrow).apply
"""``narrow(anchor, param, view)`` returns ``view`` behind a ``Narrow`` node that takes the gradient of ``param``."""
alias: Callable[[Tensor], Tensor] = super(torch.autograd.Function, Alias).apply
"""``alias(tensor)`` returns the tensor as the output of a new ``Alias`` node."""


_ATOMS = (type(None), bool, int, float, str)
_next_node = torch._C._autograd._get_sequence_nr
"""Function that returns the number which autograd gives the next node that this thread makes."""


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor], within: tuple[Any, ...] = ()) -> Any:
    """Return ``tree`` with every tensor replaced by ``change(tensor)``; the same object where nothing changed.

    Looks into tuples, lists, dicts, dataclasses and whatever is registered with ``torch.utils._pytree``, such as the
    output classes of Hugging Face models. Objects of any other type are returned unchanged, with the tensors in
    them, and so are the dataclasses ``within``, which contain ``tree``, such as the parent of a tree's node.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    kind = type(tree)
    if kind in _ATOMS or (kind is dict and not tree):  # ``kwargs`` of most calls are empty
        return tree
    if kind is tuple or kind is list:
        changed = [map_tensors(item, change, within) for item in tree]
        if all(new is old for new, old in zip(changed, tree, strict=True)):
            return tree
        return kind(changed)
    node = pytree.SUPPORTED_NODES.get(cast("Any", namedtuple) if pytree.is_namedtuple(tree) else kind)
    if node is not None:
        # ``tree_flatten`` with ``is_leaf`` recurses through a reference cycle, which would keep the tree alive.
        leaves, spec = node.flatten_fn(tree)
        changed = [map_tensors(leaf, change, within) for leaf in leaves]
        if kind is PackedSequence:
            changed[1] = leaves[1]  # batch sizes, which ``PackedSequence`` requires on the CPU
        if all(new is old for new, old in zip(changed, leaves, strict=True)):
            return tree
        return node.unflatten_fn(changed, spec)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and all(tree is not each for each in within):
        return _map_dataclass(tree, change, (*within, tree))
    return tree


def _map_dataclass(tree: Any, change: Callable[[Tensor], Tensor], within: tuple[Any, ...]) -> Any:
    fresh = None
    for field in dataclasses.fields(tree):
        old = getattr(tree, field.name, None)  # a dataclass field may have no value
        new = map_tensors(old, change, within)
        if new is not old:
            fresh = copy.copy(tree) if fresh is None else fresh
            object.__setattr__(fresh, field.name, new)
    return tree if fresh is None else fresh


def convert_tensors(tree: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Return ``tree`` with tensors on ``device`` and floating-point ones in ``dtype``; None leaves either as it is."""
    return tree if dtype is None and device is None else map_tensors(tree, lambda each: convert(each, dtype, device))


def convert(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None = None) -> Tensor:
    """Return ``tensor`` on ``device``, and in ``dtype`` if it is floating-point; None leaves either as it is."""
    if device is not None and tensor.device != device:
        tensor = tensor.to(device, non_blocking=True)
    return tensor if dtype in (None, tensor.dtype) or not tensor.is_floating_point() else tensor.to(dtype)


def gate_tensors(
    through: Callable[[list[Tensor]], list[Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments with each tensor that requires a gradient replaced by what ``through`` returns."""
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:  # a fast path: most calls have one tensor
        gated = through([args[0]] if _takes_gate(args[0]) else [])
        return (tuple(gated) or args), kwargs
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if _takes_gate(tensor):
            tensors.append(tensor)
        return tensor

    map_tensors((args, kwargs), collect)
    gated = through(tensors)
    if not tensors:
        return args, kwargs
    rest = iter(gated)
    fresh = map_tensors((args, kwargs), lambda tensor: next(rest) if _takes_gate(tensor) else tensor)
    return fresh[0], fresh[1]


def _takes_gate(tensor: Tensor) -> bool:
    """Return whether ``tensor`` may pass a gate: it requires a gradient and has views, which sparse tensors lack."""
    return tensor.requires_grad and tensor.layout in (torch.strided, torch.jagged)


def hook_outputs(
    output: Any,
    dtype: torch.dtype | None,
    hook: Callable[[Tensor], None] | None,
    first_node: int,
    address: int | None = None,
) -> Any:
    """Return ``output`` of a module in ``dtype``, with ``hook`` on each tensor that a node of autograd has made.

    A write in place to a view (``x = block(x).flatten(1)``, ``x += y``) takes the view's node, and the hooks on the
    node, out of the graph. So the base of a view gets ``hook``, too, if the forward has made that base.

    [Note: outputs are newest] The backward runs newer nodes first. Nodes of a loss that the module has put aside
    (``self.loss = head(y)``, then ``return y``) would read weights before ``hook`` has them gathered. So an output
    with an older node is returned as an ``Alias``, whose node is the newest.

    Args:
        first_node: number that autograd has given the first node of the root's forward.
        address: address of a weight buffer, which will be refilled: outputs that are views of it are copied.
    """
    if dtype is None and hook is None and address is None:
        return output
    newest = _next_node() - 1

    def finish(tensor: Tensor) -> Tensor:
        local = tensor if type(tensor) is Tensor else getattr(tensor, "_local_tensor", None)
        if address is not None and type(local) is Tensor and local.layout is torch.strided:
            tensor = tensor.clone() if local.untyped_storage().data_ptr() == address else tensor
        tensor = tensor if dtype is None else convert(tensor, dtype)
        if hook is not None and tensor.grad_fn is not None:  # hook no leaf: leaves outlive forwards and collect hooks
            if tensor.grad_fn._sequence_nr() < newest and not tensor.is_nested:  # ``Alias`` takes no nested tensor
                tensor = alias(tensor)
            tensor.register_hook(hook)
            viewed = tensor._base
            if viewed is not None and viewed.grad_fn is not None and viewed.grad_fn._sequence_nr() >= first_node:
                viewed.register_hook(hook)
        return tensor

    return map_tensors(output, finish)
