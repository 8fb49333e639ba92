"""The example of sparse attention: its sharded model gives what a plain one with a dense mask does."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.examples import on_example, same, whole


def test_the_example_equals_dense_attention_in_one_process() -> None:
    on_example("sparse_attention", _check)


def _check(ran: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, dense = ran["Net"](), ran["dense"]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(4):
        tokens = torch.cat(
            [
                torch.randint(128, (2, ran["LENGTH"]), generator=torch.Generator().manual_seed(2 * step + rank))
                for rank in range(2)
            ]
        )
        logits = plain(tokens, dense)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, truth = whole(ran["model"]), dict(plain.named_parameters())
    for name in [name for name in truth if name.endswith("qkv.bias")]:
        # A bias of keys changes no softmax: its gradient is rounding alone, of which Adam makes steps of any size.
        for each in (found, truth):
            query, _, value = each.pop(name).chunk(3)
            each[name] = torch.cat([query, value])
    same(found, truth)
    assert ran["difference"] < 1e-5
    # Of 8 × 8 blocks the first column, the diagonal and the one below it are computed: 8 + 7 + 6.
    assert ran["sparse"].sparsity() == 100 * (1 - (8 + 7 + 6) / 64)
