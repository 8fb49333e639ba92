"""Error feedback: what a message could not say is remembered, and said by the next ones.

    h = g + η·E        what this message should say
    m = C(h)           what it says
    E = E + g − a·D(m) what is left

Summed over messages, a·ΣD(m) = Σg + E₀ − E_T whatever the codec: nothing is lost, only late. η = a = 1 is the classic
form (Seide et al., 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, algorithm 2); η < 1 is LoCo (Xie et
al., 2024, equation 4) with E in place of its e / (1 − β); a = 1 − β makes E the momentum as well.

E is in the units of one rank's gradient of its own mean loss: no loss scale, no world size. A block that a message
could not say, because something in it was not finite, keeps the E that it had.

This file is the definition, in plain torch. ``wire.kernels`` does the same in one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from yafsdp_cc.wire.codec import largest_of, step_of

if TYPE_CHECKING:
    from yafsdp_cc.wire.codec import Codec, Noise

RESIDUAL_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


class Recursion(NamedTuple):
    """The two numbers of the recursion."""

    carry: float = 1.0
    """η, of the residual that a message should say."""
    taken: float = 1.0
    """a, of a message that the residual is relieved of."""


CLASSIC = Recursion()


class Residual:
    """What [messages, n] elements have still to say: fp32, bf16, or int8 with an fp32 scale for each block.

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
        """One whose values are ``values`` [messages, n], fp32 or bf16; what is stored there is stored here."""
        residual = cls.__new__(cls)
        residual.block, residual.values = block, values
        residual.scales = torch.zeros(values.shape[0], 0, dtype=torch.float32, device=values.device)
        return residual

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def rows(self, first: int, last: int) -> Residual:
        """Those of messages ``first`` to ``last``; what is stored there is stored here."""
        part = Residual.__new__(Residual)
        part.block, part.values, part.scales = self.block, self.values[first:last], self.scales[first:last]
        return part

    def columns(self, first: int, last: int) -> Residual:
        """Elements ``first`` to ``last`` of each message, whole blocks; what is stored there is stored here."""
        part, blocks = Residual.__new__(Residual), slice(first // self.block, last // self.block)
        part.block, part.values, part.scales = self.block, self.values[:, first:last], self.scales[:, blocks]
        return part

    def load(self) -> Tensor:
        """All of it, fp32, a copy."""
        if self.values.dtype != torch.int8:
            return self.values.to(torch.float32, copy=True)
        loaded: Tensor = (self._blocks().to(torch.float32) * self.scales.unsqueeze(-1)).flatten(1)
        return loaded

    def store(self, fresh: Tensor, where: Tensor | None = None) -> None:
        """Take ``fresh`` [messages, n] fp32; with ``where`` [messages, blocks], of those blocks alone."""
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
        """Nothing is left to say."""
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
    """Say ``gradients`` in ``message``, and remember in ``residual`` what was not said.

    Args:
        codec: of the messages.
        gradients: [messages, n], floating-point; zero where there is no element.
        message: [messages, bytes] uint8, overwritten.
        counts: [messages, blocks] int32, how many elements each block has; None: all.
        residual: None: what is not said is lost.
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
    said = torch.empty_like(g)
    codec.decode(message, said)
    left = due - (said if recursion.taken == 1 else recursion.taken * said)
    if counts is not None:
        blocks = left.unflatten(1, (-1, residual.block))
        blocks.masked_fill_(torch.arange(residual.block, device=left.device) >= counts.unsqueeze(-1), 0.0)
    residual.store(left, codec.is_said(message, g.shape[1]))


def accumulate(gradients: Tensor, residual: Residual, *, scale: float = 1.0) -> None:
    """Add gradients [messages, n] to what a later message has to say; blocks that are not finite are left out."""
    due = residual.load() + gradients.to(torch.float32) * scale
    residual.store(due, largest_of(due.unflatten(1, (-1, residual.block))).isfinite())


def decode_sum(codec: Codec, messages: Tensor, own: Tensor | None, place: int, total: Tensor) -> None:
    """The sum of messages in order, and of ``own`` at ``place`` among them, into ``total`` [n] fp32.

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
