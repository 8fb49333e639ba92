"""Launches per step are within their bounds, whatever the number of ranks, and what exceeds a bound is found."""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import redirect_stdout
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bench import kernel_counts, launches
from bench.launches import SHAPES, WAYS, Counts, Row, excesses, row_of
from tests.ranks import on_ranks
from tests.soak import SOAK, also

OF_MORE_RANKS = ("exact", "hpz", "int8")
"""Ways whose code is not that of another, or of torch, but for what the number of ranks does not change."""


def printed(*flags: str) -> str:
    """Run the bench, which makes process groups of its own, in this rank."""
    dist.destroy_process_group()
    with mock.patch.object(sys, "argv", ["launches.py", *flags]), redirect_stdout(io.StringIO()) as out:
        assert launches.main() == 0, out.getvalue()
    return out.getvalue()


def rows_of(world: int) -> list[Row]:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    return [row_of(way, SHAPES["tiny"], world) for way in (WAYS if SOAK else OF_MORE_RANKS)]


@pytest.mark.parametrize("others", [(16,), also((64, 1024))])
def test_launches_are_within_their_bounds_whatever_the_number_of_ranks(others: tuple[int, ...]) -> None:
    table = on_ranks(1, printed, "--shapes", "tiny", "--worlds", "8")[0]
    # But for the check, the last column, which takes in as many messages as there are up to a bound.
    lines = {words[2]: [int(word) for word in words[3:-1]] for words in map(str.split, table.splitlines()[1:]) if words}
    assert lines.keys() == WAYS.keys()
    first = [lines[way] for way in (WAYS if SOAK else OF_MORE_RANKS)]
    for world in others:  # shards as small as these have padding to be zeroed: one kernel
        for row, before in zip(on_ranks(1, rows_of, world)[0], first, strict=True):
            counts = [*row.block, *row.rest]
            assert all(0 <= count - least <= 1 for count, least in zip(counts, before, strict=True)), (row, before)


def test_what_exceeds_its_bound_is_named() -> None:
    row = Row(Counts(10, 3, 0), Counts(10, 3, 0), 0)
    rows = dict.fromkeys(WAYS, row)
    assert excesses(rows, 1, 1) == []
    slow = row._replace(block=Counts(11, 4, 1))
    assert excesses(rows | {"exact": slow}, 1, 1) == [
        "exact: kernels 11, 10 are allowed",
        "exact: collect. 4, 3 are allowed",
        "exact: waits 1, 0 are allowed",
    ]
    assert excesses(rows | {"int8": row._replace(check=100)}, 1, 1) == ["int8: check 100, 40 are allowed"]


BLOCK = 65536  # elements


@pytest.mark.parametrize(
    ("sizes", "cuda_12", "cuda_13"),
    [
        ([BLOCK, 0, 1], 1, 1),
        ([320 * BLOCK], 1, 1),
        ([320 * BLOCK + 1], 2, 1),
        ([321 * BLOCK, 319 * BLOCK], 2, 1),  # the second kernel has the end of one and all of the other
        ([2240 * BLOCK, 1], 8, 2),
        (64 * [1], 1, 1),
        (65 * [1], 2, 1),
        ([320 * BLOCK + 1, *63 * [1]], 2, 1),  # a tensor that goes on is one of the next kernel's 64, too
        ([320 * BLOCK + 1, *64 * [1]], 3, 1),
    ],
)
def test_lists_of_tensors_take_the_kernels_that_torch_gives_them(
    sizes: list[int], cuda_12: int, cuda_13: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by hand after ``multi_tensor_apply``: blocks and tensors per kernel in two lists are 320 and 64, or 2,240
    and 448."""
    to, of = ([torch.empty(size, dtype=dtype, device="meta") for size in sizes] for dtype in (torch.half, torch.float))
    for version, kernels in ((12, cuda_12), (13, cuda_13)):
        monkeypatch.setattr(kernel_counts, "cuda_version", version)
        assert kernel_counts.foreach_kernels([to, of], may_cast=True) == kernels
        assert kernel_counts.foreach_kernels([to, of], may_cast=False) == len(sizes)


def test_lists_of_tensors_of_other_strides_or_dtypes_take_a_kernel_each() -> None:
    square, turned, wide = torch.empty(4, 4), torch.empty(4, 4).t(), torch.empty(4, 8)[:, :4]
    for odd in (turned, wide, square.half()):
        assert kernel_counts.foreach_kernels([3 * [square], [square, square, odd]], may_cast=True) == 3
    assert kernel_counts.foreach_kernels([3 * [wide]] * 2, may_cast=True) == 3
    assert kernel_counts.foreach_kernels([3 * [turned]] * 2, may_cast=True) == 1
