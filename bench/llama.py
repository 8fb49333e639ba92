"""Llama (Touvron et al., "LLaMA", 2023, section 2.2; Ainslie et al., "GQA", 2023) in its published sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Of a model."""

    width: int
    layers: int
    heads: int
    groups: int
    """Heads of keys and values."""
    inner: int
    """Width between the perceptron's layers."""
    vocabulary: int = 128_256

    @property
    def parameters(self) -> int:
        """Elements of all matrices: norms aside."""
        narrow = self.width // self.heads * self.groups
        layer = self.width * (2 * self.width + 2 * narrow + 3 * self.inner)
        return self.layers * layer + 2 * self.vocabulary * self.width

    def flops(self, tokens: int, length: int) -> float:
        """Of a forward and a backward: two and four for each parameter but the embedding's, and causal attention."""
        matrices = self.parameters - self.vocabulary * self.width
        return tokens * (6.0 * matrices + 6.0 * self.layers * length * self.width)


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, vocabulary=256),
    "1b": Shape(2048, 16, 32, 8, 8192),
    "3b": Shape(3072, 28, 24, 8, 8192),
    "8b": Shape(4096, 32, 32, 8, 14336),
    "70b": Shape(8192, 80, 64, 8, 28672),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.groups = shape.heads, shape.groups
        narrow = shape.width // shape.heads * shape.groups
        self.queries = nn.Linear(shape.width, shape.width, bias=False)
        self.keys = nn.Linear(shape.width, narrow, bias=False)
        self.values = nn.Linear(shape.width, narrow, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, heads, -1).transpose(1, 2)
            for layer, heads in ((self.queries, self.heads), (self.keys, self.groups), (self.values, self.groups))
        )
        q, k = _turned(q, turns), _turned(k, turns)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a gated perceptron, each behind a norm; ``recomputes`` says that its activations are not kept."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.recomputes = False
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.inner_norm = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        if not self.recomputes:
            return self.compute(x, turns)
        found: Tensor = checkpoint(self.compute, x, turns, use_reentrant=False)
        return found

    def compute(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        y = self.inner_norm(x)
        inner: Tensor = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + inner


class Llama(nn.Module):
    """Returns its loss. Embedding and head are two matrices."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.half = shape.width // shape.heads // 2
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        turns = self._turns(tokens.shape[1], x)
        for block in self.blocks:
            x = block(x, turns)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def _turns(self, length: int, like: Tensor) -> Tensor:
        """Cosines and sines of rotary positions, [2, length, half of a head]."""
        rates = 500_000.0 ** (-torch.arange(self.half, device=like.device) / self.half)
        angles = torch.arange(length, device=like.device).outer(rates)
        return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    cosines, sines = turns
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cosines - other * sines, one * sines + other * cosines], dim=-1)
