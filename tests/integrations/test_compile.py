"""Blocks compiled for themselves and then sharded run as one graph, and train as one process does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from tests import reference
from tests.integrations.examples import on_example, same, whole


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def test_the_example_equals_one_process_without_a_graph_break() -> None:
    on_example("compiled_blocks", _check)


def _check(ran: dict[str, Any]) -> None:
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1  # one for all blocks and all steps
    plain, tokens = ran["make_model"](), ran["tokens"]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def gradients(step: int) -> tuple[float, reference.Gradients]:
        return reference.mean_gradients(plain, _loss, [tokens[2 * step], tokens[2 * step + 1]])

    losses = torch.tensor(reference.train(plain, optimizer, gradients, steps=4, clip=0.5))
    mine = torch.tensor(ran["losses"])
    dist.all_reduce(mine)
    torch.testing.assert_close(mine / 2, losses)
    same(whole(ran["model"]), plain)
