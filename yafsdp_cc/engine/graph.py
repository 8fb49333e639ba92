"""The two autograd functions that say when a unit's backward is over, and where its gradients go.

    root gate ──► unit gate ──┬─► inputs ────► the unit's own ops ─► outputs      (forward)
                              └─► Narrow w ─►

A ``Narrow`` gives the forward a view of one parameter in the weight slot, and its backward writes that parameter's
gradient into the gradient slot. All ``Narrow`` nodes of a unit, and all consumers of its inputs, precede the unit's
gate in the backward; so autograd itself runs the gate's backward exactly when the unit's last gradient is written,
also when some gradients never come. Unit gates in turn precede the root gate, which is the last node of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from yafsdp_cc.engine.flat import Piece


class Gated(Protocol):
    """What a gate reports to."""

    def after_backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Everything behind the gate has run; of the gated tensors' ``gradients``, those that shall flow on."""


class GateGradFlow(torch.autograd.Function):
    """Identity on an anchor and any number of tensors; its backward reports that everything behind it is over."""

    @staticmethod
    def forward(ctx: Any, gated: Gated, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gated = gated
        return (anchor, *tensors)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.gated.after_backward(gradients))


class Narrow(torch.autograd.Function):
    """One parameter as a view of the weight slot; its backward deposits the gradient and stops the flow."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, piece: Piece, view: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.piece = piece
        return view.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None]:
        if gradient is not None:
            ctx.piece.deposit(gradient)
        return None, None, None


# Function.apply first looks for functorch's dead wrappers in its arguments; there are none here, and a step makes as
# many calls as the model has parameters.
gate: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, GateGradFlow).apply
"""``gate(gated, anchor, *tensors)``: the anchor and the tensors behind a gate."""
narrow: Callable[[Tensor, Piece, Tensor], Tensor] = super(torch.autograd.Function, Narrow).apply
"""``narrow(anchor, piece, view)``: the view, with the gradient going to the piece."""
