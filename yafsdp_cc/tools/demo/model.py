"""A byte-level GPT in plain torch, without any sharding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # a token is a byte


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with earlier ones."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with position, so that products of two positions tell the distance."""
    half = x.shape[-1] // 2
    speeds = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def shift(x: Tensor) -> Tensor:
    """Take half of the features from the position before, so that attention need not learn to find the neighbour."""
    here, before = x.chunk(2, dim=-1)
    return torch.cat([here, F.pad(before, (0, 0, 1, -1))], dim=-1)


class Block(nn.Module):
    """Attention, then an MLP; both normalise their input and add their output to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of attention and MLP to the residual stream."""
        x = x + self.attention(shift(self.norm_1(x)))
        out: Tensor = x + self.mlp(shift(self.norm_2(x)))
        return out


class GPT(nn.Module):
    """A GPT of about ten million parameters."""

    def __init__(self, width: int = 384, depth: int = 6, heads: int = 6, context: int = 128) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_stream = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if into_stream else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the byte after each position."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
