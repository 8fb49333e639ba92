"""Small models whose sums land late, and an account of what has landed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.wire.ledger import loss_of, sharded, unsaid
from yafsdp_cc import Compression

ALL = ("*",)


def late(codec: str = "int8", **more: Any) -> Compression:
    return Compression(codec, **{"residual": "fp32", "delayed": ALL, **more})


def found(model: Any) -> dict[str, Tensor | None]:
    """Of each encoded parameter, its gradient."""
    return {
        name: None if each.grad is None else each.grad.full_tensor().clone()
        for name, each in model.named_parameters()
        if name.endswith("weight")
    }


def backward(model: Any, step: int) -> dict[str, Tensor | None]:
    """What there is after one of them."""
    loss_of(model, step).backward()
    gradients = found(model)
    model.zero_grad()
    return gradients


def alike(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    return all(
        (a is None) is (b is None) and (a is None or b is None or a.equal(b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


class Account:
    """Gradients that have landed, against what exact sums bring."""

    def __init__(self, model: Any) -> None:
        self.model, self.exact = model, sharded(None)
        self.landed: dict[str, Any] = dict.fromkeys(found(model), 0.0)
        self.due: dict[str, Any] = dict(self.landed)

    def step(self, step: int, micro: int = 1, held: bool = True) -> None:
        for model, total in ((self.model, self.landed), (self.exact, self.due)):
            for number in range(micro):
                model.set_requires_gradient_sync(number == micro - 1 or not held)
                loss_of(model, 10 * step + number).backward()
            for name, gradient in found(model).items():
                if gradient is not None:
                    total[name] = total[name] + gradient.double()
            model.zero_grad()

    def check(self) -> None:
        """Σ landed + what is still to be said or under way = Σ gradients."""
        left = unsaid(self.model)
        for name, due in self.due.items():
            assert (self.landed[name] + left[name] - due).norm() <= 3e-6 * due.norm(), name
