"""Messages between pipeline stages: encodes a tensor of one micro-batch in bytes, and decodes it.

The size of a message follows from the shape and dtype of the tensor, so that the receiver can post its receive before
any message arrives.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from yafsdp_cc.compression.codec import Codec, Noise, Scaled, codec_of, hashed
from yafsdp_cc.compression.error_feedback import Residual, decode, encode
from yafsdp_cc.engine.layout import align


class SenderState:
    """State that the sender of one tensor keeps from message to message."""

    def __init__(self, error_feedback: bool) -> None:
        self.error_feedback = error_feedback
        self.residual: Residual | None = None
        """Error feedback's residual, [rows, n] fp32, with as many rows as the longest message had; None at first."""
        self.right: Tensor | None = None
        """Orthonormal right factor of the last message of ``LowRank``, [columns, rank] fp32; None at first."""

    def residual_of(self, rows: int, n: int, block: int, device: torch.device) -> Residual | None:
        """Return a view of the residual's first ``rows``, with ``n`` elements each; None without error feedback."""
        if not self.error_feedback:
            return None
        before = self.residual
        if before is None or before.values.shape[0] < rows:
            self.residual = Residual.zeros(rows, n, torch.float32, block, device)
            if before is not None:
                self.residual.values[: before.values.shape[0]] = before.values
        assert self.residual is not None
        return self.residual.span(0, rows, n)

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``residual`` and ``right`` by name, each only if it is not None."""
        residual = None if self.residual is None else self.residual.values
        return {name: kept for name, kept in (("residual", residual), ("right", self.right)) if kept is not None}

    def load_state_dict(self, state: dict[str, Tensor], block: int, device: torch.device) -> None:
        """Load what ``state_dict`` returned."""
        self.residual = self.right = None
        if "residual" in state:
            values = state["residual"].to(device)
            self.residual = Residual(values, values.new_zeros(len(values), 0), block)
        if "right" in state:
            self.right = state["right"].to(device)


class Encoding(ABC):
    """A format of messages for tensors."""

    @abstractmethod
    def message_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the size in bytes of a message for a tensor of this shape and dtype."""

    @abstractmethod
    def encode(self, values: Tensor, message: Tensor, state: SenderState, seed: int) -> None:
        """Write ``values``, of any shape, into ``message`` [bytes] uint8.

        Args:
            values: a tensor without a graph.
            message: ``message_bytes`` long.
            state: state of the sender, whose residual error feedback adds to ``values`` and sets to the message's loss.
            seed: 32 bits for stochastic rounding, different for every message.
        """

    @abstractmethod
    def decode(self, message: Tensor, values: Tensor) -> None:
        """Decode ``message`` [bytes] uint8 into ``values``, contiguous and without a graph."""


class Exact(Encoding):
    """Messages that hold the bytes of the tensor as they are."""

    def message_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize

    def encode(self, values: Tensor, message: Tensor, state: SenderState, seed: int) -> None:
        message.copy_(values.contiguous().view(-1).view(torch.uint8))

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.view(-1).view(torch.uint8).copy_(message)


Rounding: TypeAlias = Literal["stochastic", "scaled", "nearest"]
"""Ways to round the message x̂ of a block x:

"stochastic": at random, so that x̂ is x on average; codecs that cannot round so round to nearest
"scaled": to nearest, and then with the scale by which ⟨x, x̂⟩ = ‖x‖²: the error x̂ − x is at right angles to x. After a
    random rotation, x̂ is x on average (Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean
    Estimation for Federated Learning", 2022); the rotation of ``rotate`` is fixed. Only for ``Scaled`` codecs, whose
    numbers are codes times the scale of their block; others round to nearest
"nearest": to nearest, so that the message loses the least
"""


class Encoded(Encoding):
    """The messages of a codec, for the whole tensor or, with ``by_sample``, for each sample separately.

    With error feedback an ``Encoded`` rounds to nearest, and needs ``by_sample`` where the number of samples changes
    from message to message.

    Args:
        hadamard: rotate every block before it is encoded and back afterwards: outliers are spread over the block,
            whose scale is then smaller (``rotate``).
        rounding: rounding without error feedback.
        by_sample: each sample [d1, ...] of a tensor [samples, d1, ...] has a row of the message of its own.
    """

    def __init__(
        self, codec: Codec, *, hadamard: bool = False, rounding: Rounding = "stochastic", by_sample: bool = False
    ) -> None:
        self._codec = codec
        self._rounding = rounding
        self._hadamard = hadamard
        self._by_sample = by_sample

    def message_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        rows, n = self._rows(shape)
        return rows * self._codec.message_bytes(n)

    def encode(self, values: Tensor, message: Tensor, state: SenderState, seed: int) -> None:
        rows, n = self._rows(values.shape)
        if not values.numel():
            return
        padded = functional.pad(flat := values.reshape(rows, -1), (0, n - flat.shape[1]))
        if self._hadamard:
            padded = rotate(padded.to(torch.float32), self._codec.block)
        residual = state.residual_of(rows, n, self._codec.block, values.device)
        rounding = self._rounding if residual is None else "nearest"
        noise = Noise(seed) if rounding == "stochastic" and self._codec.rounds_randomly else None
        counts = None
        if n != flat.shape[1] and not self._hadamard:  # padding has no part in the scale of a block
            blocks = n // self._codec.block
            counts = torch.full((rows, blocks), self._codec.block, dtype=torch.int32, device=values.device)
            counts[:, -1] -= n - flat.shape[1]
        encode(self._codec, padded, message.view(rows, -1), counts=counts, residual=residual, noise=noise)
        if rounding == "scaled" and isinstance(self._codec, Scaled):
            self._set_scales(self._codec, padded, message.view(rows, -1))

    def decode(self, message: Tensor, values: Tensor) -> None:
        rows, n = self._rows(values.shape)
        if not values.numel():
            return
        flat = values.view(rows, -1)
        whole = n == flat.shape[1] and not self._hadamard
        decoded = flat if whole else torch.empty(rows, n, dtype=torch.float32, device=values.device)
        decode(self._codec, message.view(rows, -1), decoded)
        if self._hadamard:
            decoded = rotate(decoded, self._codec.block, back=True)
        if not whole:
            flat.copy_(decoded[:, : flat.shape[1]])

    @staticmethod
    def _set_scales(codec: Scaled, values: Tensor, message: Tensor) -> None:
        """Set the scales in ``message`` [rows, bytes], made of ``values`` [rows, n], to those of "scaled" rounding."""
        decoded = torch.empty_like(values, dtype=torch.float32)
        decode(codec, message, decoded)
        scales, _ = codec.parts(message, values.shape[1])
        # Divide by the scale, so that no square overflows. A zero or non-finite block is NaN here and keeps its scale.
        steps, codes = (codec.blocks(each) / scales.unsqueeze(-1) for each in (values, decoded))
        along = (steps * codes).sum(-1)
        scales.mul_(torch.where(along > 0, steps.square().sum(-1) / along, 1.0))

    def _rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the number of rows of a message, and the number of elements in each row, padded to whole blocks."""
        rows = shape[0] if self._by_sample and shape else 1
        each = math.prod(shape[1:]) if self._by_sample else math.prod(shape)
        return rows, align(each, self._codec.block)


class LowRank(Encoding):
    """Messages of two factors of a tensor as a matrix [other dimensions, last one], by one step of a power iteration.

    With M = values + residual [m, n] and the Q of the last message (at first of random numbers):

        P = orthonormal(M·Q)     Q = Mᵀ·P     message = P, Q in bf16     decoded = P·Qᵀ

    Only the sender has a state, so a lost or skipped message does not make the two sides differ.

    Source: Vogels et al., "PowerSGD", 2019, algorithm 1; sent between pipeline stages by Song et al., "Optimus-CC",
    2023.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def message_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        rows, columns, rank = self._sizes(shape)
        return (rows + columns) * rank * torch.bfloat16.itemsize

    def encode(self, values: Tensor, message: Tensor, state: SenderState, seed: int) -> None:
        rows, columns, rank = self._sizes(values.shape)
        if not values.numel():
            return
        whole = values.reshape(rows, columns).to(torch.float32)
        residual = state.residual_of(rows, columns, 1, values.device)
        if residual is not None:
            whole = whole + residual.values
        if state.right is None or state.right.shape != (columns, rank):
            draws = torch.Generator("cpu").manual_seed(0)
            drawn = torch.randn(columns, rank, generator=draws, dtype=torch.float32, device="cpu")
            state.right = torch.linalg.qr(drawn).Q.to(values.device)
        left, right = _factors(message, rows, rank)
        left.copy_(torch.linalg.qr(whole @ state.right).Q)
        right.copy_(whole.t() @ left.to(torch.float32))
        # keep the last right factor unless the new one is finite: none after a non-finite one would be finite again
        fresh, finite = right.to(torch.float32), right.isfinite().all() & left.isfinite().all()
        state.right = torch.where(finite, torch.linalg.qr(torch.where(finite, fresh, state.right)).Q, state.right)
        right.masked_fill_(~finite, float("nan"))
        if residual is not None:
            lost = whole - left.to(torch.float32) @ fresh.t()
            residual.values.copy_(torch.where(finite, lost, residual.values))

    def decode(self, message: Tensor, values: Tensor) -> None:
        rows, columns, rank = self._sizes(values.shape)
        if not values.numel():
            return
        left, right = _factors(message, rows, rank)
        values.view(rows, columns).copy_(left.to(torch.float32) @ right.to(torch.float32).t())

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return the numbers of rows and columns of a tensor as a matrix, and of columns of the matrix's factors."""
        columns = shape[-1] if shape else 1
        rows = math.prod(shape) // max(columns, 1)
        return rows, columns, min(self._rank, rows, columns)


def _factors(message: Tensor, rows: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return views of the factors P [rows, rank] and Q [columns, rank] bf16 in a message of ``LowRank``."""
    numbers = message.view(torch.bfloat16)
    return numbers[: rows * rank].view(rows, rank), numbers[rows * rank :].view(-1, rank)


@cache
@torch.no_grad()
def relative_error(codec: str, block: int, rounding: Rounding) -> float:
    """Return ‖x − Q(x)‖ / ‖x‖ of codec Q on Gaussian x: with int4, 0.18 by stochastic rounding and 0.13 to nearest."""
    made = codec_of(codec, block)
    noise = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(1, 65_536, generator=noise, dtype=torch.float32, device="cpu")
    message = torch.empty(made.message_bytes(values.shape[1]), dtype=torch.uint8, device="cpu")
    encoding = Encoded(made, rounding=rounding)
    encoding.encode(values, message, SenderState(error_feedback=False), seed=0)
    decoded = torch.empty_like(values)
    encoding.decode(message, decoded)
    return float((values - decoded).norm() / values.norm())


def rotate(values: Tensor, block: int, *, back: bool = False) -> Tensor:
    """Multiply every block of ``values`` [rows, n] fp32 by H·D, or with ``back`` by its inverse D·H.

    H is the orthonormal Hadamard matrix of ``block`` rows and D a diagonal of fixed signs, without which a block of
    equal numbers would become one outlier. TAH-Quant (He et al., 2025) quantises tiles after such a rotation. H of r·c
    rows is the Kronecker product of H of r and H of c rows, so a block is multiplied as a matrix [r, c].
    """
    rows = 2 ** (block.bit_length() // 2)
    left, right = (_hadamard(size, values.device) for size in (rows, block // rows))
    signs, blocks = _signs(block, values.device), values.view(values.shape[0], -1, block)
    given = blocks if back else blocks * signs
    turned: Tensor = (left @ given.unflatten(2, (rows, -1)) @ right).flatten(2)
    return (turned * signs if back else turned).flatten(1)


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return the Hadamard matrix [size, size] fp32, orthonormal and symmetric."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div_(size**0.5).to(device)


@cache
def _signs(block: int, device: torch.device) -> Tensor:
    """Return the fixed signs ±1 [block] fp32 of a block's elements before ``rotate`` mixes them: the diagonal of D."""
    return (1 - 2 * (hashed(torch.arange(block, device="cpu")) & 1)).to(device, torch.float32)
