"""Low rank: the gradient of a matrix as a product of two thin factors, of which each message is one.

    M = G + E                     [n, m], what is to be said
    message 0, 2, …    P = M·Q    [n, r], Q orthonormal, made of the message before
    message 1, 3, …    Q = Mᵀ·P   [m, r], P orthonormal, made of the message before
    E = M − P·Qᵀ                  what is left

All ranks share the factor that is not sent, so the sum of their messages is the message of their sum: one all-reduce.
This is PowerSGD (Vogels et al., 2019, algorithm 1) with the halves of its power iteration taken in turns (ACP-SGD,
Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", 2023), and each rank
relieved of what it has said itself, not of the mean.

    message    P or Q of every matrix, row by row | elements that are in no matrix         fp32

A matrix with something in it that is not finite is said as NaN, and keeps the E that it had. Nothing here communicates.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Matrix(NamedTuple):
    """``rows`` × ``columns`` elements that lie in a buffer one row after another, from ``offset``."""

    offset: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.offset + self.rows * self.columns

    def thin(self, is_right: bool, rank: int) -> int:
        """Elements of one of its factors."""
        return rank * (self.columns if is_right else self.rows)

    def within(self, first: int, last: int) -> tuple[int, int]:
        """The range of its elements that lie in ``first`` to ``last`` of the buffer; empty ones are equal."""
        start = min(max(self.offset, first), self.end) - self.offset
        return start, max(min(self.end, last) - self.offset, start)


def fold(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: its first dimensions and its last, where they are most alike."""
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(len(shape) + 1)]
    return min(cuts, key=sum)


def matrices_of(
    extents: Iterable[tuple[int, Sequence[int]]], rank: int, first: int, last: int
) -> tuple[tuple[Matrix, ...], tuple[tuple[int, int], ...]]:
    """What of a buffer is said by factors of ``rank``, and which ranges of it are said as they are.

    Args:
        extents: where each tensor begins, and its shape.
        rank: r; a matrix whose factors are more than half of it is said as it is.
        first, last: of the buffer, what counts; of a matrix that sticks out, those rows that do not.
    """
    matrices, rest = [], []
    for offset, shape in extents:
        rows, columns = fold(shape)
        start, end = Matrix(offset, rows, columns).within(first, last)
        if start == end:
            continue
        top, bottom = -(-start // columns), end // columns
        inner = Matrix(offset - first + top * columns, bottom - top, columns)
        if 2 * rank * (inner.rows + columns) > inner.rows * columns:
            rest.append((offset - first + start, offset - first + end))
            continue
        matrices.append(inner)
        edges = ((offset - first + start, inner.offset), (inner.end, offset - first + end))
        rest += [edge for edge in edges if edge[0] < edge[1]]
    return tuple(matrices), tuple(rest)


def numel_of(matrices: Iterable[Matrix], rest: Iterable[tuple[int, int]], rank: int, is_right: bool) -> int:
    """Elements of a message of P, or of Q."""
    thin = sum(matrix.thin(is_right, rank) for matrix in matrices)
    return thin + sum(last - first for first, last in rest)


class LowRank:
    """The factors of one buffer, which all ranks hold alike, and whose turn it is.

    Args:
        matrices, rest: of ``matrices_of``.
        rank: r.
        name: of the buffer, for the random factors of the first message.
        device: of the buffer.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        rest: Sequence[tuple[int, int]],
        rank: int,
        name: str,
        device: torch.device,
    ) -> None:
        self.matrices = tuple(matrices)
        self.rest = tuple(rest)
        self.rank = rank
        self._name = name
        sizes = [size for matrix in self.matrices for size in (matrix.thin(False, rank), matrix.thin(True, rank))]
        self.factors = torch.empty(sum(sizes), device=device)
        """P and Q of one matrix after another, orthonormal, fp32."""
        parts = [part.view(-1, rank) for part in self.factors.split(sizes)]
        self._pairs = list(zip(parts[::2], parts[1::2], strict=True))
        self.sends_right = False
        """Whether the next message is Q."""
        self.restart()

    def restart(self) -> None:
        """Take the factors that there were at first."""
        draws = torch.Generator().manual_seed(zlib.crc32(self._name.encode()))
        for pair in self._pairs:
            for factor in pair:
                drawn = torch.randn(factor.shape, generator=draws)
                factor.copy_(torch.linalg.qr(drawn).Q)
        self.sends_right = False

    def numel(self, is_right: bool) -> int:
        """Elements of a message of P, or of Q."""
        return numel_of(self.matrices, self.rest, self.rank, is_right)

    def say(self, due: Tensor, message: Tensor) -> None:
        """Write the next message of ``due``, the whole buffer in fp32."""
        for matrix, said, held in self._parts(message):
            whole = due[matrix.offset : matrix.end].view(matrix.rows, matrix.columns)
            torch.mm(whole.t() if self.sends_right else whole, held, out=said)
            said.masked_fill_(said.isfinite().all().logical_not_(), float("nan"))
        for said, (first, last) in self._tail(message):
            said.copy_(due[first:last])

    def relieve(self, due: Tensor, message: Tensor, taken: float, is_said: Tensor, block: int) -> None:
        """Take what ``message`` says off ``due``, ``taken`` times, and note in ``is_said`` which blocks it covers."""
        is_said.fill_(True)
        for matrix, said, held in self._parts(message):
            left, right = (held, said) if self.sends_right else (said, held)
            whole = due[matrix.offset : matrix.end].view(matrix.rows, matrix.columns)
            whole.addmm_(left, right.t(), alpha=-taken)
            is_said[matrix.offset // block : -(-matrix.end // block)] &= said[0, 0].isfinite()
        for said, (first, last) in self._tail(message):
            due[first:last].sub_(said, alpha=taken)
            is_said[first // block : -(-last // block)] &= said.isfinite().all()

    def add(self, message: Tensor, total: Tensor, first: int) -> None:
        """Add to ``total`` what ``message`` says of as many elements of the buffer, from ``first``."""
        last = first + total.numel()
        for matrix, said, held in self._parts(message):
            start, end = matrix.within(first, last)
            if start < end:
                left, right = (held, said) if self.sends_right else (said, held)
                into = total.narrow(0, matrix.offset + start - first, end - start)
                _add_product(left, right, start, end, into)
        for said, (start, end) in self._tail(message):
            low, high = max(start, first), min(end, last)
            if low < high:
                total[low - first : high - first].add_(said[low - start : high - start])

    def turn(self, total: Tensor) -> None:
        """Make the next message's other factor of the sum of all messages; one that is not finite changes nothing."""
        for (_, said, _), pair in zip(self._parts(total), self._pairs, strict=True):
            factor = pair[self.sends_right]
            finite = said[0, 0].isfinite()
            fresh = torch.linalg.qr(torch.where(finite, said, 0.0)).Q
            factor.copy_(torch.where(finite, fresh, factor))
        self.sends_right = not self.sends_right

    def _parts(self, message: Tensor) -> list[tuple[Matrix, Tensor, Tensor]]:
        """Of every matrix, the factor that a message says, and the one that is held."""
        sizes = [matrix.thin(self.sends_right, self.rank) for matrix in self.matrices]
        said = [part.view(-1, self.rank) for part in message[: sum(sizes)].split(sizes)]
        held = [pair[not self.sends_right] for pair in self._pairs]
        return list(zip(self.matrices, said, held, strict=True))

    def _tail(self, message: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
        """What a message says as it is, and where that lies."""
        place = sum(matrix.thin(self.sends_right, self.rank) for matrix in self.matrices)
        parts = message[place:].split([last - first for first, last in self.rest])
        return list(zip(parts, self.rest, strict=True))


def _add_product(left: Tensor, right: Tensor, start: int, end: int, into: Tensor) -> None:
    """Add elements ``start`` to ``end`` of ``left · rightᵀ``: the end of a row, whole rows, and the start of one."""
    columns = right.shape[0]
    top, bottom = -(-start // columns), end // columns
    if top > bottom:  # within one row
        into.addmv_(right[start % columns : end - bottom * columns], left[bottom])
        return
    if head := top * columns - start:
        into[:head].addmv_(right[columns - head :], left[top - 1])
    if top < bottom:
        body = into.narrow(0, head, (bottom - top) * columns)
        body.view(-1, columns).addmm_(left[top:bottom], right.t())
    if tail := end - bottom * columns:
        into[into.numel() - tail :].addmv_(right[:tail], left[bottom])
