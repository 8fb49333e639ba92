"""Low rank: the gradient of a matrix as a product of two thin factors; each message is one of the factors.

    M = G + E                     [n, m], what a message should hold
    message 0, 2, …    P = M·Q    [n, r], Q orthonormal, made of the message before
    message 1, 3, …    Q = Mᵀ·P   [m, r], P orthonormal, made of the message before
    E = M − P·Qᵀ                  the residual

All ranks share the factor that is not sent, so the sum of their messages is the message of the sum of their M: one
all-reduce. This is PowerSGD (Vogels et al., 2019, algorithm 1) with the two halves of its power iteration in alternate
messages (ACP-SGD, Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning",
2023), and each rank's residual is what its own message has lost, not what the mean of messages has.

    message    P or Q of every matrix, row by row | elements that are in no matrix         fp32

A matrix with a non-finite element is sent as NaN, and its residual E is unchanged.

    gradients + residual ──► P (or Q) of each matrix, and the rest ── all-reduce ──► sum
                                                                                     │
    reduce-scatter, rank 0: own chunk, exact, plus that chunk of the product of (sum − rank 0's message)

Over replicas, whose sums must be equal, this rank's own gradients go through the factors, too.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from yafsdp_cc.compression.error_feedback import RECEIVED, SENT, SUM, Encoder, Feedback, PeerChunks, other_chunks

if TYPE_CHECKING:
    from yafsdp_cc.compression.config import Compression
    from yafsdp_cc.compression.error_feedback import SummedBuffer
    from yafsdp_cc.engine.communicator import CommContext, Works

_GRADIENTS = "fp32 gradients"


class Matrix(NamedTuple):
    """``rows`` × ``columns`` elements that lie in a buffer one row after another, from ``offset``."""

    offset: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.offset + self.rows * self.columns

    def thin(self, is_right: bool, rank: int) -> int:
        """Return the number of elements of one factor: Q if ``is_right``, else P."""
        return rank * (self.columns if is_right else self.rows)

    def within(self, first: int, last: int) -> tuple[int, int]:
        """Return the range, perhaps empty, of the matrix's elements that lie in ``first`` to ``last`` of the buffer."""
        start = min(max(self.offset, first), self.end) - self.offset
        return start, max(min(self.end, last) - self.offset, start)


def fold(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a tensor as the most nearly square matrix: leading dimensions by remaining ones."""
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(len(shape) + 1)]
    return min(cuts, key=sum)


def matrices_of(
    extents: Iterable[tuple[int, Sequence[int]]], rank: int, first: int, last: int
) -> tuple[tuple[Matrix, ...], tuple[tuple[int, int], ...]]:
    """Return the matrices of a buffer that are sent as factors, and the ranges of it that are sent unchanged.

    Args:
        extents: where each tensor begins, and its shape.
        rank: r; a matrix whose factors are more than half of its size is sent unchanged.
        first, last: the range of the buffer to send; a matrix that extends beyond it is cut to the whole rows within.
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


def message_numels(matrices: Sequence[Matrix], rest: Iterable[tuple[int, int]], rank: int) -> tuple[int, int]:
    """Return the number of elements of a message of factors P, and of one of factors Q, unchanged elements included."""
    unchanged = sum(last - first for first, last in rest)
    left, right = (sum(matrix.thin(is_right, rank) for matrix in matrices) for is_right in (False, True))
    return left + unchanged, right + unchanged


class LowRank:
    """Factors P and Q of a buffer's matrices, equal on all ranks, and which of the two is sent next.

    Args:
        matrices, rest: results of ``matrices_of``.
        name: name of the buffer, which seeds the random factors of the first message.
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
        self.message_numels = message_numels(matrices, rest, rank)
        self._name = name
        sizes = [size for matrix in self.matrices for size in (matrix.thin(False, rank), matrix.thin(True, rank))]
        self.factors = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        """Orthonormal factors P and Q of one matrix after another, [elements] fp32."""
        parts = [part.view(-1, rank) for part in self.factors.split(sizes)]
        self._pairs = list(zip(parts[::2], parts[1::2], strict=True))
        self.sends_right = False
        """Whether the next message is the right factor Q; else it is the left factor P."""
        self.restart()

    def restart(self) -> None:
        """Set the factors to the random values from which the first message starts."""
        draws = torch.Generator("cpu").manual_seed(zlib.crc32(self._name.encode()))
        for pair in self._pairs:
            for factor in pair:
                drawn = torch.randn(factor.shape, generator=draws, dtype=torch.float32, device="cpu")
                factor.copy_(_orthonormal(drawn))
        self.sends_right = False

    def encode(self, due: Tensor, message: Tensor) -> None:
        """Encode ``due``, gradients plus residuals of the whole buffer in fp32, into ``message``, the next one."""
        for matrix, sent, held in self._parts(message):
            whole = due[matrix.offset : matrix.end].view(matrix.rows, matrix.columns)
            torch.mm(whole.t() if self.sends_right else whole, held, out=sent)
            sent.masked_fill_(sent.isfinite().all().logical_not_(), float("nan"))
        for sent, (first, last) in self._tail(message):
            sent.copy_(due[first:last])

    def subtract(self, due: Tensor, message: Tensor, taken: float, is_finite: Tensor, block: int) -> None:
        """Subtract ``taken`` times the decoded ``message`` from ``due``.

        Also set ``is_finite`` [blocks] bool: False for blocks of the buffer that ``message`` holds as NaN or infinity.
        """
        is_finite.fill_(True)
        for matrix, sent, held in self._parts(message):
            left, right = (held, sent) if self.sends_right else (sent, held)
            whole = due[matrix.offset : matrix.end].view(matrix.rows, matrix.columns)
            whole.addmm_(left, right.t(), alpha=-taken)
            is_finite[matrix.offset // block : -(-matrix.end // block)] &= sent[0, 0].isfinite()
        for sent, (first, last) in self._tail(message):
            due[first:last].sub_(sent, alpha=taken)
            is_finite[first // block : -(-last // block)] &= sent.isfinite().all()

    def add(self, message: Tensor, total: Tensor, first: int) -> None:
        """Add to ``total`` [n] elements ``first`` to ``first`` + n of the buffer that ``message`` encodes."""
        last = first + total.numel()
        for matrix, sent, held in self._parts(message):
            start, end = matrix.within(first, last)
            if start < end:
                left, right = (held, sent) if self.sends_right else (sent, held)
                into = total.narrow(0, matrix.offset + start - first, end - start)
                _add_product(left, right, start, end, into)
        for sent, (start, end) in self._tail(message):
            low, high = max(start, first), min(end, last)
            if low < high:
                total[low - first : high - first].add_(sent[low - start : high - start])

    def advance(self, total: Tensor) -> None:
        """Orthonormalize the sum of all messages into the factor that is not sent next, if the sum is finite."""
        for (_, sent, _), pair in zip(self._parts(total), self._pairs, strict=True):
            factor = pair[self.sends_right]
            finite = sent.isfinite().all()
            factor.copy_(torch.where(finite, _orthonormal(torch.where(finite, sent, 0.0)), factor))
        self.sends_right = not self.sends_right

    def _parts(self, message: Tensor) -> list[tuple[Matrix, Tensor, Tensor]]:
        """Return every matrix with its factor in the message, and its other factor, which every rank has."""
        sizes = [matrix.thin(self.sends_right, self.rank) for matrix in self.matrices]
        sent = [part.view(-1, self.rank) for part in message[: sum(sizes)].split(sizes)]
        held = [pair[not self.sends_right] for pair in self._pairs]
        return list(zip(self.matrices, sent, held, strict=True))

    def _tail(self, message: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
        """Return the parts of a message that are sent unchanged, each with its range of the buffer."""
        place = sum(matrix.thin(self.sends_right, self.rank) for matrix in self.matrices)
        parts = message[place:].split([last - first for first, last in self.rest])
        return list(zip(parts, self.rest, strict=True))


def _orthonormal(values: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of ``values``, in fp64, with zeros where rows of ``values`` are zero.

    Ranks round differently where they have other processors or numbers of threads, and gradients are lost where their
    factors differ. Rounding would decide the signs of columns and, beyond the rank of ``values``, whole columns. So the
    diagonal of R is made positive, and pseudo-random numbers as small as fp32's rounding errors are added, to fix those
    columns: not in rows of zeros, which are weights without a gradient, such as embeddings of unused tokens. With fewer
    nonzero rows than columns, columns beyond the number of such rows are zero, and the next message sets them anew.
    """
    wide = values.to(torch.float64)
    used = (wide != 0).any(dim=1, keepdim=True)
    used |= used.any().logical_not()
    places = torch.arange(1, 1 + wide.numel(), device=wide.device).view(wide.shape)
    # SplitMix64 (Steele, Lea and Flood, 2014) in wrapping int64: the same numbers on every processor, and, unlike
    # multiples of one number, independent on any few rows
    mixed = places * -7046029254386353131
    mixed = (mixed ^ (mixed >> 32)) * -4658895280553007687
    spread = ((mixed ^ (mixed >> 29)) >> 11).to(torch.float64) / (2**53 * used.sum(dtype=torch.float64).sqrt())
    basis, upper = torch.linalg.qr(wide + (1e-7 * wide.norm(dim=0) + 1e-60) * spread * used)
    return torch.where(upper.diagonal() < 0, -basis, basis) * used


def _add_product(left: Tensor, right: Tensor, start: int, end: int, into: Tensor) -> None:
    """Add elements ``start`` to ``end`` of ``left · rightᵀ`` to ``into``: whole rows, and parts of rows at the ends."""
    columns = right.shape[0]
    top, bottom = -(-start // columns), end // columns
    if top > bottom:  # the range lies within one row of the product
        into.addmv_(right[start % columns : end - bottom * columns], left[bottom])
        return
    if head := top * columns - start:
        into[:head].addmv_(right[columns - head :], left[top - 1])
    if top < bottom:
        body = into.narrow(0, head, (bottom - top) * columns)
        body.view(-1, columns).addmm_(left[top:bottom], right.t())
    if tail := end - bottom * columns:
        into[into.numel() - tail :].addmv_(right[:tail], left[bottom])


class FactorEncoder(Encoder):
    """Encodes elements ``first`` to ``last`` of a buffer as the factors of the matrices among them.

    Args:
        first, last: the range that is summed.
        name: seed of the random factors of the first message.
    """

    def __init__(self, flat: SummedBuffer, config: Compression, first: int, last: int, name: str) -> None:
        matrices, rest = matrices_of(flat.layout.places, config.matrix_rank, first, last)
        self.low_rank = LowRank(matrices, rest, config.matrix_rank, name, flat.device)
        self._layout = flat.layout
        self._rank = flat.rank
        self._numel = last - first
        self._block = config.block
        self._is_finite = torch.empty(self._numel // config.block, dtype=torch.bool, device=flat.device)
        self.step = flat.layout.chunks[flat.rank]
        self.nbytes = self.low_rank.factors.nbytes + self._is_finite.nbytes

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        context.scratch.reserve(SENT, 4 * max(self.low_rank.message_numels))

    @property
    def kept(self) -> float:
        return self._message_numel / self._numel

    def sent_bytes(self) -> int:
        return self.context.comm.all_reduce_bytes(4 * self._message_numel)

    def planned_bytes(self) -> int:
        return sum(self.context.comm.all_reduce_bytes(4 * numel) for numel in self.low_rank.message_numels) // 2

    @property
    def _message_numel(self) -> int:
        return self.low_rank.message_numels[self.low_rank.sends_right]

    def _message(self, buffer: str) -> Tensor:
        return self.context.scratch.take(buffer, self._message_numel, torch.float32)

    @abstractmethod
    def _rows(self, buffer: Tensor) -> list[PeerChunks]:
        """Return the parts of a whole buffer that have a residual."""

    def _encode(self, due: Tensor, message: Tensor, feedback: Feedback) -> None:
        """Encode gradients ``due`` fp32, overwritten, and the residual into ``message``; update the residual."""
        residual, recursion = feedback.residual, feedback.recursion
        assert residual is not None
        parts = [(residual.of(chunks), chunks.values) for chunks in self._rows(due)]
        for kept, rows in parts:
            rows.add_(kept.load(), alpha=recursion.carry)
        self.low_rank.encode(due, message)
        if recursion.carry != 1:
            for kept, rows in parts:
                rows.add_(kept.load(), alpha=1 - recursion.carry)
        before = None if feedback.error is None else due.clone()
        self.low_rank.subtract(due, message, recursion.taken, self._is_finite, self._block)
        if feedback.error is not None and before is not None:
            for (kept, left), (_, was, _) in zip(parts, self._rows(before), strict=True):
                # E is ``kept``, ``was`` is g + E, and ``left`` g + E − a·D(m): ``add`` takes h − D(m), h and D(m)
                decoded = (was - left) / recursion.taken
                was.sub_(kept.load(), alpha=1 - recursion.carry)
                feedback.error.add(was - decoded, was, decoded)
        for (kept, rows), finite in zip(parts, self._rows(self._is_finite), strict=True):
            kept.store(rows, finite.values)


class ChunkFactors(FactorEncoder):
    """Encodes the gradients of a reduce-scatter: each rank decodes its own chunk of the product of summed factors."""

    def __init__(self, flat: SummedBuffer, config: Compression) -> None:
        super().__init__(flat, config, 0, flat.layout.numel, flat.name)

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        context.scratch.reserve(RECEIVED, 4 * max(self.low_rank.message_numels))
        context.scratch.reserve(_GRADIENTS, 4 * self._numel)
        context.scratch.reserve(SUM, 4 * self.step)

    def start(self, values: Tensor, feedback: Feedback, async_op: bool) -> Works:
        due = self.context.scratch.take(_GRADIENTS, self._numel, torch.float32).copy_(values)
        message = self._message(SENT)
        self._encode(due, message, feedback)
        return self.context.comm.all_reduce(self._message(RECEIVED).copy_(message), async_op)

    def decode(self, own: Tensor | None, start: int, total: Tensor) -> None:
        assert own is not None
        summed = self._message(RECEIVED)
        others = self._message(SENT).neg_().add_(summed)
        total.copy_(own)
        self.low_rank.add(others, total, self._layout.starts[self._rank] + start)
        self.low_rank.advance(summed)

    def _rows(self, buffer: Tensor) -> list[PeerChunks]:
        return other_chunks(buffer, self._layout, self._rank)


class SharedFactors(FactorEncoder):
    """Encodes the partial sums of an all-reduce: every rank decodes the same product of the same summed factors."""

    def __init__(self, flat: SummedBuffer, config: Compression) -> None:
        first, last = flat.layout.starts[flat.rank : flat.rank + 2]
        super().__init__(flat, config, first, last, f"{flat.name}/{flat.rank}")

    @property
    def kept(self) -> float:
        """The share that all ranks' messages together keep, some perhaps empty: ranks must judge messages alike."""
        rank, ranges = self.low_rank.rank, pairwise(self._layout.starts)
        numels = [message_numels(*matrices_of(self._layout.places, rank, *each), rank) for each in ranges]
        return sum(each[self.low_rank.sends_right] for each in numels) / self._layout.numel

    def start(self, values: Tensor, feedback: Feedback, async_op: bool) -> Works:
        message = self._message(SENT)
        # ``_encode`` overwrites ``values`` itself where it is fp32: nobody reads the gradients afterwards
        self._encode(values.to(torch.float32), message, feedback)
        return self.context.comm.all_reduce(message, async_op)

    def decode(self, own: Tensor | None, start: int, total: Tensor) -> None:
        message = self._message(SENT)
        self.low_rank.add(message, total.zero_(), 0)
        self.low_rank.advance(message)

    def _rows(self, buffer: Tensor) -> list[PeerChunks]:
        return [PeerChunks(range(1), buffer.view(1, -1), 0)]
