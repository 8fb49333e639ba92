"""The example of a mesh (dp, tp) learns what one process does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests import reference
from tests.integrations.examples import on_example, same, whole


def _loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), inputs.flip(-1))


def test_the_example_equals_one_process() -> None:
    on_example("tensor_parallel", _check, world=4)


def _check(ran: dict[str, Any]) -> None:
    plain = ran["make_model"]()
    draws = [torch.Generator().manual_seed(1 + replica) for replica in range(2)]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    losses = reference.train(
        plain,
        optimizer,
        lambda _: reference.mean_gradients(plain, _loss, [torch.randn(8, 16, generator=draw) for draw in draws]),
        4,
        clip=1.0,
    )
    found = torch.tensor(ran["losses"])
    torch.distributed.all_reduce(found, group=ran["mesh"]["dp"].get_group())
    torch.testing.assert_close(found / 2, torch.tensor(losses))
    same(whole(ran["model"]), plain, within=1e-4)
