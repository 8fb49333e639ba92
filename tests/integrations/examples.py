"""The programs of ``docs/examples``, each run on ranks; a test then looks at what it has left in its variables."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.ranks import on_ranks

if TYPE_CHECKING:
    from torch import nn

    from tests.reference import Gradients

EXAMPLES = Path(__file__).parent.parent.parent / "docs" / "examples"


def on_example(name: str, check: Callable[[dict[str, Any]], Any], world: int = 2) -> list[Any]:
    """Run the example on ``world`` ranks, and ``check`` of its variables after it, on every rank."""
    return on_ranks(world, _run, name, check, timeout=280.0)


def as_launched() -> None:
    """Give this rank the environment that a launcher would."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # the group is there: nobody dials


def _run(name: str, check: Callable[[dict[str, Any]], Any]) -> Any:
    as_launched()
    return check(runpy.run_path(str(EXAMPLES / f"{name}.py")))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters of a sharded model."""
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor] | nn.Module, within: float = 1e-5) -> None:
    """Every tensor of ``truth`` is in ``found``, and close."""
    expected = truth if isinstance(truth, dict) else dict(truth.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor.detach(), rtol=within, atol=within, msg=lambda m, n=name: f"{n}: {m}"
        )


def accumulated(parts: list[tuple[float, Gradients]]) -> tuple[float, Gradients]:
    """The mean of losses and gradients over micro-batches."""
    losses, gradients = zip(*parts, strict=True)
    names = gradients[0]
    means = {name: torch.stack([g[name] for g in gradients]).mean(0) for name in names}
    return sum(losses) / len(losses), means
