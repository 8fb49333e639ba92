"""Error feedback: what a message loses is remembered, and added to the next one.

    h = g + η·E        what this message should hold
    m = C(h)           what it holds
    E = E + g − a·D(m) the residual: what is left

Summed over messages, a·ΣD(m) = Σg + E₀ − E_T whatever the codec: nothing is lost, only late. η = a = 1 is the classic
form (Seide et al., 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, algorithm 2); η < 1 is LoCo (Xie et
al., 2024, equation 4) with E in place of its e / (1 − β); a = 1 − β makes E the momentum as well
(``compressed_sum``).

E is in the units of one rank's gradient of its own mean loss: no loss scale, no world size. A block that a message
could not hold, because something in it was not finite, keeps the E that it had.

This file is the definition, in plain torch. ``kernels`` does the same in one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from yafsdp_cc.compression.codec import largest_of, step_of

if TYPE_CHECKING:
    from yafsdp_cc.compression.codec import Codec, Noise

RESIDUAL_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


class Recursion(NamedTuple):
    """The two numbers of the recursion."""

    carry: float = 1.0
    """η, how much of the residual a message should hold."""
    taken: float = 1.0
    """a, how much of a message is taken off the residual."""


CLASSIC = Recursion()


class Residual:
    """What messages have lost so far, [messages, n] in fp32, bf16, or int8 with an fp32 scale for each block.

    Args:
        messages: how many messages are sent at a time.
        n: elements of each, a multiple of ``block``.
        dtype: what it is stored as.
        block: elements that share a scale.
        device: of the values.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, messages: int, n: int, dtype: torch.dtype, block: int, device: torch.device) -> None:
        if dtype not in RESIDUAL_DTYPES:
            kinds = ", ".join(str(each).removeprefix("torch.") for each in RESIDUAL_DTYPES)
            raise ValueError(f"a residual is stored as {kinds}, not as {dtype}")
        self.block = block
        self.values = torch.zeros(messages, n, dtype=dtype, device=device)
        blocks = n // block if dtype == torch.int8 else 0
        self.scales = torch.zeros(messages, blocks, dtype=torch.float32, device=device)

    @classmethod
    def around(cls, values: Tensor, block: int) -> Residual:
        """Return one that stores to ``values`` [messages, n], fp32 or bf16."""
        residual = cls.__new__(cls)
        residual.block, residual.values = block, values
        residual.scales = torch.zeros(values.shape[0], 0, dtype=torch.float32, device=values.device)
        return residual

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def rows(self, first: int, last: int) -> Residual:
        """Return a view of messages ``first`` to ``last``."""
        part = Residual.__new__(Residual)
        part.block, part.values, part.scales = self.block, self.values[first:last], self.scales[first:last]
        return part

    def columns(self, first: int, last: int) -> Residual:
        """Return a view of elements ``first`` to ``last`` of each message, whole blocks."""
        part, blocks = Residual.__new__(Residual), slice(first // self.block, last // self.block)
        part.block, part.values, part.scales = self.block, self.values[:, first:last], self.scales[:, blocks]
        return part

    def load(self) -> Tensor:
        """Return a copy of it in fp32."""
        if self.values.dtype != torch.int8:
            return self.values.to(torch.float32, copy=True)
        loaded: Tensor = (self._blocks().to(torch.float32) * self.scales.unsqueeze(-1)).flatten(1)
        return loaded

    def store(self, fresh: Tensor, where: Tensor | None = None) -> None:
        """Overwrite it with ``fresh`` [messages, n] fp32; with ``where`` [messages, blocks] bool, in those blocks."""
        blocks = fresh.unflatten(1, (-1, self.block))
        if self.values.dtype == torch.int8:
            scale, inverse = step_of(largest_of(blocks), 127)
            blocks = (blocks * inverse.unsqueeze(-1)).round().clamp_(-127, 127)
            self.scales.copy_(scale if where is None else torch.where(where, scale, self.scales))
        stored = blocks.to(self.values.dtype)
        if where is not None:
            stored = torch.where(where.unsqueeze(-1), stored, self._blocks())
        self.values.copy_(stored.flatten(1))

    def clear(self) -> None:
        """Set it to zero."""
        self.values.zero_()
        self.scales.zero_()

    def multiply(self, factor: float) -> None:
        """Change the unit that it is in; exact for powers of two."""
        (self.scales if self.values.dtype == torch.int8 else self.values).mul_(factor)

    def _blocks(self) -> Tensor:
        blocks: Tensor = self.values.unflatten(1, (-1, self.block))
        return blocks


def encode(
    codec: Codec,
    gradients: Tensor,
    message: Tensor,
    *,
    counts: Tensor | None = None,
    residual: Residual | None = None,
    recursion: Recursion = CLASSIC,
    scale: float = 1.0,
    noise: Noise | None = None,
) -> None:
    """Encode ``gradients`` in ``message``, and keep in ``residual`` what is lost.

    Args:
        codec: of the messages.
        gradients: [messages, n], floating-point; zero where there is no element.
        message: [messages, bytes] uint8, overwritten.
        counts: [messages, blocks] int32, how many elements each block has; None: all.
        residual: None: without error feedback.
        recursion: how the residual is carried.
        scale: what gradients are multiplied by at first, one over the loss scale.
        noise: for stochastic rounding, without a residual.
    """
    g = gradients.to(torch.float32) * scale
    if residual is None:
        codec.encode(g, counts, message, noise)
        return
    before = residual.load()
    due = before + g
    codec.encode(due if recursion.carry == 1 else g + recursion.carry * before, counts, message)
    decoded = torch.empty_like(g)
    codec.decode(message, decoded)
    left = due - (decoded if recursion.taken == 1 else recursion.taken * decoded)
    if counts is not None:
        blocks = left.unflatten(1, (-1, residual.block))
        blocks.masked_fill_(torch.arange(residual.block, device=left.device) >= counts.unsqueeze(-1), 0.0)
    residual.store(left, codec.is_finite(message, g.shape[1]))


def accumulate(gradients: Tensor, residual: Residual, *, scale: float = 1.0) -> None:
    """Add gradients [messages, n] to the residual, for a later message; blocks that are not finite are left out."""
    due = residual.load() + gradients.to(torch.float32) * scale
    residual.store(due, largest_of(due.unflatten(1, (-1, residual.block))).isfinite())


def decode_sum(codec: Codec, messages: Tensor, own: Tensor | None, place: int, total: Tensor) -> None:
    """Sum messages in order, and ``own`` at ``place`` among them, into ``total`` [n] fp32.

    Args:
        codec: of the messages.
        messages: [messages, bytes] uint8.
        own: [n], floating-point: this rank's part, which was not encoded; None: there is none.
        place: before which message ``own`` is added.
        total: overwritten.
    """
    values = total.new_empty(messages.shape[0], total.shape[0])
    codec.decode(messages, values)
    parts = list(values)
    if own is not None:
        parts.insert(place, own.to(torch.float32))
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)


@torch.no_grad()
def lost_share(codec: Codec) -> float:
    """Return the share of the squares of normal noise that a message loses: 0.00005 by int8, 0.016 by int4."""
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(1, 64 * codec.block, generator=draws)
    message = torch.zeros(1, codec.message_bytes(values.shape[1]), dtype=torch.uint8)
    codec.encode(values, None, message)
    decoded = torch.empty_like(values)
    codec.decode(message, decoded)
    return ((values - decoded).square().sum() / values.square().sum()).item()
