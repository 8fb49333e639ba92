"""Factors of low rank against products in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yafsdp_cc.compression.config import Compression
from yafsdp_cc.compression.error_feedback import CompressionError, Feedback, PlainBuffer, Recursion, Residual
from yafsdp_cc.compression.powersgd import LowRank, Matrix, SharedFactors, _orthonormal, fold, matrices_of
from yafsdp_cc.engine.layout import Extent, Layout
from yafsdp_cc.engine.param import Divisor

CPU = torch.device("cpu")
RANK, BLOCK = 2, 64
PLACES = [(0, (30, 20)), (640, (50,)), (704, (10, 4, 6))]
NUMEL = 960
MATRICES = [Matrix(0, 30, 20), Matrix(704, 10, 24)]


def low_rank(first: int = 0, last: int = NUMEL) -> LowRank:
    return LowRank(*matrices_of(PLACES, RANK, first, last), RANK, "unit", CPU)


def drawn(seed: int) -> Tensor:
    """A buffer that is zero where there is no element."""
    whole = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    for first, last in ((600, 640), (690, 704), (944, 960)):
        whole[first:last] = 0.0
    return whole


def messages_of(lowrank: LowRank, dues: list[Tensor]) -> list[Tensor]:
    """Messages of ranks that hold the same factors, whose message is then subtracted."""
    messages = []
    for due in dues:
        message = torch.empty(lowrank.message_numels[lowrank.sends_right])
        is_finite = torch.empty(NUMEL // BLOCK, dtype=torch.bool)
        lowrank.encode(due, message)
        lowrank.subtract(due, message, 1.0, is_finite, BLOCK)
        assert is_finite.all()
        messages.append(message)
    return messages


def decoded(lowrank: LowRank, message: Tensor, first: int = 0, last: int = NUMEL) -> Tensor:
    total = torch.zeros(last - first)
    lowrank.add(message, total, first)
    return total


def factor(lowrank: LowRank, matrix: int, is_right: bool) -> Tensor:
    return lowrank._pairs[matrix][is_right].double()


# Which matrices


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), (1, 1)),
        ((7,), (1, 7)),
        ((3, 5), (3, 5)),
        ((64, 3, 7, 7), (192, 49)),
        ((8, 256, 64), (2048, 64)),
        ((8, 16, 512), (128, 512)),
        ((0, 5), (0, 5)),
    ],
)
def test_a_tensor_is_folded_where_its_sides_are_most_alike(shape, matrix):
    rows, columns = fold(shape)
    assert rows * columns == torch.Size(shape).numel()
    assert rows + columns <= sum(matrix)


def test_what_factors_would_hardly_shrink_is_finite_as_it_is():
    matrices, rest = matrices_of(PLACES, RANK, 0, NUMEL)
    assert matrices == tuple(MATRICES)
    assert rest == ((640, 690),)
    assert matrices_of(PLACES, 100, 0, NUMEL) == ((), ((0, 600), (640, 690), (704, 944)))
    # A range that begins and ends within rows: 7 of row 1, rows 2 to 27, 13 of row 28.
    assert matrices_of(PLACES, RANK, 33, 573) == ((Matrix(7, 26, 20),), ((0, 7), (527, 540)))
    assert matrices_of(PLACES, RANK, 41, 55) == ((), ((0, 14),))
    assert matrices_of(PLACES, RANK, 610, 630) == ((), ())


# What is sent


def test_messages_are_projections_as_defined():
    """Three ranks, five messages: each is the projection on the factor held, and the sum is decoded in any range."""
    lowrank = low_rank()
    dues = [drawn(seed) for seed in range(3)]
    for turn in range(5):
        held = [factor(lowrank, matrix, not lowrank.sends_right) for matrix in range(2)]
        assert all(torch.allclose(each.t() @ each, torch.eye(RANK).double(), atol=1e-6) for each in held)
        truth = torch.stack(dues).double()
        for matrix, basis in zip(MATRICES, held, strict=True):
            whole = truth[:, matrix.offset : matrix.end].view(3, matrix.rows, matrix.columns)
            projected = basis @ basis.t() @ whole if lowrank.sends_right else whole @ basis @ basis.t()
            truth[:, matrix.offset : matrix.end] = projected.flatten(1)
        before = torch.stack(dues).double()
        messages = messages_of(lowrank, dues)
        assert torch.allclose(torch.stack(dues).double(), before - truth, atol=1e-5)
        total = sum(messages)
        for first, last in ((0, NUMEL), (33, 573), (41, 55), (40, 60), (41, 60), (40, 47), (610, 630), (650, 960)):
            found = decoded(lowrank, total, first, last)
            assert torch.allclose(found.double(), truth.sum(0)[first:last], atol=1e-5), (turn, first, last)
        lowrank.advance(total)
        dues = [due + drawn(10 * turn + number) for number, due in enumerate(dues)]


def test_a_matrix_of_low_rank_is_soon_sent_whole():
    lowrank = low_rank()
    left, right = torch.randn(30, RANK), torch.randn(20, RANK)
    whole = torch.zeros(NUMEL)
    whole[:600] = (left @ right.t()).flatten()
    due = whole.clone()
    for _ in range(3):
        due.copy_(whole)
        (message,) = messages_of(lowrank, [due])
        lowrank.advance(message)
    assert due[:600].norm() < 1e-5 * whole.norm()


def test_the_residual_stays_bounded():
    lowrank, due, gradient = low_rank(), torch.zeros(NUMEL), drawn(0)
    for _ in range(60):
        due += gradient
        lowrank.advance(messages_of(lowrank, [due])[0])
    assert due.norm() < 20 * gradient.norm()


@pytest.mark.parametrize("used", [slice(4), slice(12), slice(1, None, 3)])
@pytest.mark.parametrize(("rank", "independent"), [(3, 0), (3, 1), (3, 2), (3, 3), (4, 1), (8, 1)])
def test_factors_hardly_depend_on_rounding(rank, independent, used):
    """Ranks with other numbers of threads round otherwise: a change in the last bits of fp64 stands for that.

    ``independent`` is the rank of the sums, at most that of a factor; rows of zeros are those of unused tokens.
    """
    columns = torch.zeros(90, independent, dtype=torch.float64)
    columns[used] = torch.randint(-9, 9, columns[used].shape).double()
    sums = columns @ torch.randint(-9, 9, (independent, rank)).double()
    rows = int(sums.any(dim=1).sum()) or 90
    found = _orthonormal(sums)
    assert torch.allclose((found.t() @ found).diagonal()[:rows], torch.ones(min(rank, rows)).double(), atol=1e-6)
    assert torch.allclose(found @ found.t() @ sums, sums, atol=1e-5 * (1 + sums.norm()))
    assert torch.allclose(_orthonormal(sums * (1 + 1e-15 * torch.randn(90, rank))), found, atol=1e-5)


def test_rows_without_a_gradient_get_none():
    """One row has a gradient, that of the one token in an embedding's batches: fewer rows than factors have columns."""
    lowrank, due = LowRank([Matrix(0, 30, 20)], [], 3, "unit", CPU), torch.zeros(600)
    for step in range(8):
        due[100:120] += drawn(step)[:20]
        (message,) = messages_of(lowrank, [due])
        total = torch.zeros(600)
        lowrank.add(message, total, 0)
        assert total[:100].count_nonzero() == total[120:].count_nonzero() == 0
        lowrank.advance(message)
    assert due.norm() < 1e-5 * total.norm()


def test_factors_start_alike_and_anew():
    one, other = low_rank(), low_rank()
    assert one.factors.equal(other.factors)
    lowrank = LowRank(*matrices_of(PLACES, RANK, 0, NUMEL), RANK, "another", CPU)
    assert not one.factors.equal(lowrank.factors)
    (message,) = messages_of(one, [drawn(0)])
    one.advance(message)
    assert one.sends_right
    assert not one.factors.equal(other.factors)
    one.restart()
    assert not one.sends_right
    assert one.factors.equal(other.factors)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("turns", [0, 1])
def test_what_is_not_finite_sends_nan_for_its_matrix_alone(wrong, turns):
    lowrank = low_rank()
    for turn in range(turns):
        lowrank.advance(messages_of(lowrank, [drawn(turn)])[0])
    factors = lowrank.factors.clone()
    due = drawn(5)
    due[750] = wrong
    message = torch.empty(lowrank.message_numels[lowrank.sends_right])
    is_finite = torch.empty(NUMEL // BLOCK, dtype=torch.bool)
    lowrank.encode(due, message)
    lowrank.subtract(due, message, 1.0, is_finite, BLOCK)
    assert is_finite.tolist() == [True] * 11 + [False] * 4
    total = decoded(lowrank, message)
    assert total[:704].isfinite().all()
    assert total[704:944].isnan().all()
    lowrank.advance(message)
    changed = (factors != lowrank.factors).nonzero()
    assert len(changed)
    assert changed.max() < RANK * (30 + 20)
    assert lowrank.factors.isfinite().all()


# ``CompressionError`` measures the share of gradients that messages of factors lose.


@pytest.mark.parametrize("recursion", [Recursion(), Recursion(taken=0.1), Recursion(carry=0.5)], ids=str)
def test_what_factors_lose_is_measured(recursion):
    layout = Layout((Extent((32, 32), 0, 1024),), (1024,))
    buffer = PlainBuffer("unit", layout, 0, CPU, Divisor(1, CPU))
    encoder = SharedFactors(buffer, Compression("powersgd", block=BLOCK))
    residual, error = Residual.zeros(1, 1024, torch.float32, BLOCK, CPU), CompressionError(CPU, 0.5, recursion)
    torch.manual_seed(0)
    residual.values.normal_()
    gradients, message = torch.randn(1024), torch.empty(encoder.low_rank.message_numels[0])
    due = gradients.double() + recursion.carry * residual.values[0].double()
    encoder._encode(gradients.clone(), message, Feedback(residual, recursion, None, error))
    found = decoded(encoder.low_rank, message, 0, 1024).double()
    truth = torch.stack([each.square().sum() for each in (due - found, due, found)])
    torch.testing.assert_close(error.sums, truth, rtol=1e-4, atol=0.0)
