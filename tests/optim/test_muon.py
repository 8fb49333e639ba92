"""Muon on whole matrices against one process that has ``torch.optim.Muon`` and ``torch.optim.AdamW``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

import yafsdp_cc
from tests.models import VOCABULARY, WIDTH, Attention
from tests.ranks import on_ranks, ranks
from tests.reference import far_apart, mean_in_rank_order
from yafsdp_cc.optim.muon import newton_schulz

STEPS = 20
CLIP = 0.5
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.05}


class Block(nn.Module):
    """With a matrix that is never used, and one that only the first rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(WIDTH)
        self.never, self.sometimes = nn.Linear(24, 16), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        x = self.inner(x)
        return x + self.sometimes(x) if is_first else x


class Model(nn.Module):
    """A language model with a tied head and a frozen matrix."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].inner.up.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, is_first: bool) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, is_first)
        out: Tensor = self.head(x)
        return out


def batch(step: int, micro: int, rank: int) -> Tensor:
    draws = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(VOCABULARY, (2, 9), generator=draws)


def loss_of(model: Any, step: int, micro: int, rank: int) -> Tensor:
    tokens = batch(step, micro, rank)
    logits = model(tokens[:, :-1], rank == 0)
    loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return loss


def is_matrix(name: str, parameter: Tensor) -> bool:
    return name.startswith("blocks.") and parameter.ndim == 2


def torchs(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers of one process, AdamW in the form whose bits the engine's has."""
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if is_matrix(name, each)]
    others = [each for name, each in named.items() if not is_matrix(name, each)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, fused=True, **ADAMW)]


class Pair:
    """The sharded model, and what one process makes of the batches of all ranks.

    Newton-Schulz iterations in bf16 turn the last bit of a gradient into differences of 1e-4, so gradients have to be
    equal to the bit. Clipping multiplies both by the same number, which is compared itself.
    """

    def __init__(self, **sharding: Any) -> None:
        self.plain, self.model = Model(), Model()
        yafsdp_cc.shard(self.model, ownership="matrix", **sharding)
        self.optimizers = torchs(self.plain)
        self.optimizer = yafsdp_cc.optim.Muon(self.model.parameters(), lr=0.02, adamw=ADAMW)

    def train(self, steps: range, micros: int = 1, clips: bool = False) -> None:
        for step in steps:
            for micro in range(micros):
                self.model.set_requires_gradient_sync(micro == micros - 1)
                loss_of(self.model, step, micro, dist.get_rank()).backward()
            self._set_mean_gradients(step, micros)
            if clips:
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).full_tensor()
                truth = nn.utils.get_total_norm([p.grad for p in self.plain.parameters() if p.grad is not None])
                assert far_apart(norm, truth) < 1e-6
                assert norm > CLIP
                nn.utils.clip_grads_with_norm_(self.plain.parameters(), CLIP, norm)
            for optimizer in (*self.optimizers, self.optimizer):
                optimizer.step()
            self.model.zero_grad()

    def _set_mean_gradients(self, step: int, micros: int) -> None:
        by_rank = []
        for rank in range(dist.get_world_size()):
            self.plain.zero_grad()
            for micro in range(micros):
                loss_of(self.plain, step, micro, rank).backward()
            by_rank.append({name: each.grad for name, each in self.plain.named_parameters()})
        for name, parameter in self.plain.named_parameters():
            parameter.grad = mean_in_rank_order([found[name] for found in by_rank])

    def check(self, within: float = 1e-6) -> None:
        """Compare all weights."""
        with yafsdp_cc.whole_parameters(self.model):
            found = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        for name, each in self.plain.named_parameters():
            assert far_apart(found[name], each.detach()) <= within, name


def parity() -> None:
    for zero_stage, micros, clips in ((3, 1, False), (2, 1, True), (1, 2, False)):
        pair = Pair(zero_stage=zero_stage)
        pair.train(range(STEPS), micros, clips)
        pair.check()


@pytest.mark.parametrize("world", [2, 4])
def test_weights_are_those_of_one_process(world: int) -> None:
    """Tied, frozen, unused, used by one rank; accumulated, clipped; at every stage."""
    on_ranks(world, parity)
