"""What one process would compute: the truth the engine is held against. Nothing here knows about ranks or shards.

Every function takes the batches of all ranks and runs the plain model on them one after the other, so any rank can
compute the truth without talking to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Batch = TypeVar("Batch")
Loss = Callable[[nn.Module, Batch], Tensor]
Gradients = dict[str, Tensor | None]


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[float, Gradients]:
    """The loss and the whole gradients of one backward, leaving ``model``'s own ``.grad`` empty."""
    model.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return value.item(), found


def mean_in_rank_order(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum over ranks 0, 1, ... in fp32, times 1/N. A rank without a gradient counts as zero, unless all are."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return None
    total = torch.zeros_like(given[0], dtype=torch.float32)
    for gradient in given:
        total += gradient.float()
    return total.mul_(1 / len(gradients)).to(given[0].dtype)


def mean_gradients(model: nn.Module, loss: Loss[Batch], batches: Sequence[Batch]) -> tuple[float, Gradients]:
    """The mean loss and gradients over ranks, each rank's computed apart: the engine must equal this bit for bit."""
    losses, by_rank = zip(*(gradients(model, lambda b=batch: loss(model, b)) for batch in batches), strict=True)
    means = {name: mean_in_rank_order([found[name] for found in by_rank]) for name in by_rank[0]}
    return sum(losses) / len(losses), means


def gate(model: nn.Module, kind: str) -> None:
    """Pass every input of the modules of class ``kind`` through an identity.

    An input that several blocks read, such as an encoder's output, then gets its gradient summed block by block, as a
    sharded model sums it. In the plain model the sum runs over all readers at once: the same but for the last bit.
    """

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), (args, kwargs))

    for module in model.modules():
        if type(module).__name__ == kind:
            module.register_forward_pre_hook(enter, with_kwargs=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients_of: Callable[[int], tuple[float, Gradients]],
    steps: int,
    clip: float,
) -> list[float]:
    """Losses of ``steps`` steps; ``gradients_of(step)`` says what the gradients are."""
    losses = []
    for step in range(steps):
        loss, found = gradients_of(step)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss)
    return losses


def far_apart(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth; 0 where both are zero."""
    difference = torch.linalg.vector_norm(found.double() - truth.double()).item()
    return difference / max(torch.linalg.vector_norm(truth.double()).item(), 1e-30) if difference else 0.0
