"""Ranks run the next test of a file, but not after one that has left anything behind (``tests.ranks``)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models import Mlp
from tests.ranks import RankError, on_ranks
from tests.twins import inputs, square, trains_on, twins
from yafsdp_cc.engine import cuda_streams, streams


def leaves_nothing() -> None:
    os.environ["LEFT_BY_A_TEST"] = "1"
    model, plain = twins(Mlp, units=["blocks.*"])
    trains_on(model, plain, square, [inputs()])


def leaves_a_function() -> None:
    pytest.MonkeyPatch().setattr(cuda_streams, "comm_stream", None)  # nothing undoes this change


def leaves_a_method() -> None:
    pytest.MonkeyPatch().setattr(streams.CommHandle, "wait", None)


def leaves_another_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def leaves_a_filter() -> None:
    logging.getLogger("yafsdp_cc").addFilter(lambda _: True)


def fails() -> None:
    raise ValueError


def process() -> int:
    assert "LEFT_BY_A_TEST" not in os.environ
    return os.getpid()


def test_ranks_that_a_test_leaves_as_they_were_run_the_next_one() -> None:
    before = on_ranks(2, process)
    on_ranks(2, leaves_nothing)
    assert on_ranks(2, process) == before
    assert set(on_ranks(2, process, fresh=True)).isdisjoint(before)
    assert on_ranks(2, process) == before


served: list[list[int]] = []


@pytest.mark.parametrize("turn", [1, 2])
def test_ranks_run_the_next_test(turn: int) -> None:
    served.append(on_ranks(3, process))
    assert served[0] == served[-1]


@pytest.mark.parametrize("body", [leaves_a_function, leaves_a_method, leaves_another_dtype, leaves_a_filter])
def test_others_run_it_elsewhere(body: Callable[[], Any]) -> None:
    before = on_ranks(2, process)
    on_ranks(2, body)
    assert set(on_ranks(2, process)).isdisjoint(before)


def test_ranks_are_not_kept_after_one_of_them_failed() -> None:
    before = on_ranks(2, process)
    with pytest.raises(RankError, match="ValueError"):
        on_ranks(2, fails)
    assert set(on_ranks(2, process)).isdisjoint(before)


def test_a_patch_of_this_process_reaches_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = on_ranks(1, process)
    monkeypatch.setattr(cuda_streams, "comm_stream", process)
    assert on_ranks(1, patched) != before


def patched() -> int:
    assert cuda_streams.comm_stream is process
    return os.getpid()
