"""Whatever exchanges a buffer, the sum or the gathered whole is right within what its codec can say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from yafsdp_cc.bench import suites
from yafsdp_cc.bench.contestants import EXCHANGES
from yafsdp_cc.bench.exchanges import Buffers, exchange_of

WITHIN = {None: 1e-6, "int8": 0.01, "int4": 0.13, "onebit": 0.55}
"""Of the length of a vector of normal numbers, the part that a codec gets wrong, and a little more."""


def errors() -> dict[str, float]:
    """On one rank: by contestant, the error against sums and concatenations in fp64."""
    found = {}
    for name, contestant in EXCHANGES.items():
        buffers = Buffers.of(1 << 16, torch.device("cpu"))
        wholes = [torch.empty_like(buffers.whole) for _ in range(dist.get_world_size())]
        dist.all_gather(wholes, buffers.whole)
        chunks = torch.stack(wholes).double().unflatten(1, (len(wholes), -1))
        exchange_of(name, buffers)()
        if contestant.beside == "torch all-gather":
            got, wanted = buffers.gathered, torch.cat([chunks[rank, rank] for rank in range(len(wholes))])
        else:
            got, wanted = buffers.chunk, chunks[:, dist.get_rank()].sum(0)
        found[name] = float((got - wanted).norm() / wanted.norm())
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_are_right(ranks: int) -> None:
    for found in on_ranks(ranks, errors):
        for name, error in found.items():
            assert error < WITHIN[EXCHANGES[name].told.get("codec")], name


def test_every_contestant_has_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = suites.exchanges(list(EXCHANGES), ranks=(2,), rounds=1, sizes=(1 << 16,))["gloo"]["2"][str(1 << 16)]
    assert list(figures) == list(EXCHANGES)
    assert all(each["processor_ms"] > 0 and each["wall_ms"] > 0 for each in figures.values())
    assert figures["torch all-gather"]["processor_ms_ratio"] == figures["torch reduce-scatter"]["wall_ms_ratio"] == 1
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 110
    assert "64 KiB" in printed
