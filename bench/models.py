"""The models the engines are compared on: one GPT in three shapes, and a toy for tests.

block    ~10 M parameters: 6 blocks of width 320, as a small real training job
launch   < 1 M parameters in 88 tensors: 14 blocks of width 64, so that what is timed is the host's work
deep     > 100 M parameters: 24 equal blocks of width 576 and few tokens, for peak memory
tiny     a few thousand parameters, to see the bench itself run
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Spec:
    """A model's shape, one rank's batch, and how long to measure it."""

    name: str
    blocks: int
    width: int
    heads: int
    vocabulary: int
    sequences: int
    length: int
    rounds: int
    """Interleaved rounds; 0 where only memory is measured."""
    steps: int
    """Timed steps of each contestant in each round."""
    memory: bool = False
    """Whether peak memory is measured, each contestant in ranks of its own."""

    @property
    def tokens(self) -> int:
        """Tokens of one rank in one step."""
        return self.sequences * self.length

    def build(self, dtype: torch.dtype = torch.float32) -> GPT:
        """The model, with the same weights on every rank and for every contestant."""
        torch.manual_seed(20)
        return GPT(self).to(dtype)

    def batch(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of ``rank``."""
        generator = torch.Generator().manual_seed(1000 + rank)
        text = torch.randint(self.vocabulary, (self.sequences, self.length + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


SPECS = {
    spec.name: spec
    for spec in (
        Spec("block", 6, 320, 5, 4096, sequences=8, length=128, rounds=6, steps=2),
        Spec("launch", 14, 64, 2, 256, sequences=2, length=16, rounds=10, steps=8),
        Spec("deep", 24, 576, 8, 8192, sequences=2, length=32, rounds=0, steps=3, memory=True),
        Spec("tiny", 2, 32, 2, 64, sequences=2, length=8, rounds=2, steps=1, memory=True),
    )
}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm: six tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        y: torch.Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + y

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = self.attention_in(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(n, length, width))
        return out


class GPT(nn.Module):
    """A decoder that returns its loss. Embedding and head are two tensors, not tied."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocabulary, spec.width)
        self.position = nn.Embedding(spec.length, spec.width)
        self.blocks = nn.ModuleList(Block(spec.width, spec.heads) for _ in range(spec.blocks))
        self.norm = nn.LayerNorm(spec.width, bias=False)
        self.head = nn.Linear(spec.width, spec.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
