"""However a buffer is exchanged, the sum or the gathered whole is right within the error of its codec."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bench import exchanges
from bench.contestants import ALL_REDUCE, EXCHANGES
from bench.exchanges import LINKS, ROUTES, Buffers, make_exchange
from tests.netlab.labs import lab_of
from tests.ranks import on_ranks

WITHIN = {None: 1e-6, "int8": 0.01, "int4": 0.13, "onebit": 0.55}
"""Relative error of a codec on normal noise, and a little more."""


def errors() -> dict[str, float]:
    """On one rank: by contestant, the error against sums and concatenations in fp64."""
    found = {}
    for name, contestant in EXCHANGES.items():
        buffers = Buffers.of(1 << 16, torch.device("cpu"))
        wholes = [torch.empty_like(buffers.whole) for _ in range(dist.get_world_size())]
        dist.all_gather(wholes, buffers.whole)
        chunks = torch.stack(wholes).double().unflatten(1, (len(wholes), -1))
        make_exchange(name, buffers)()
        if contestant.baseline == "torch all-gather":
            got, wanted = buffers.gathered, torch.cat([chunks[rank, rank] for rank in range(len(wholes))])
        elif contestant.baseline == ALL_REDUCE:
            got, wanted = buffers.gathered, chunks.sum(0).flatten()
        else:
            got, wanted = buffers.chunk, chunks[:, dist.get_rank()].sum(0)
        found[name] = float((got - wanted).norm() / wanted.norm())
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_are_right(ranks: int) -> None:
    for found in on_ranks(ranks, errors):
        for name, error in found.items():
            assert error < WITHIN[EXCHANGES[name].settings.get("codec")], name


def test_every_contestant_has_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = exchanges.run(list(EXCHANGES), ranks=(2,), rounds=1, sizes=(1 << 16,))["gloo"]["2"][str(1 << 16)]
    assert list(figures) == list(EXCHANGES)
    assert all(each["processor_ms"] > 0 and each["wall_ms"] > 0 for each in figures.values())
    assert figures["torch all-gather"]["processor_ms_ratio"] == figures["torch reduce-scatter"]["wall_ms_ratio"] == 1
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 110
    assert "64 KiB" in printed


def test_bytes_over_links_are_those_of_the_formula() -> None:
    size = 1 << 18
    with lab_of(ranks=4) as lab:
        figures = exchanges.measure_on_links(lab, list(ROUTES), "200mbit", rounds=1, sizes=(size,))[str(size)]
    for name, each in figures.items():
        assert 1 <= each["sent_bytes"] / (ROUTES[name].sent(4) * size) < 1.08, name
        assert all(each[kind] > 0 for kind in LINKS)
    assert "halving and doubling" in exchanges.links_table(figures, 4, size)
    with pytest.raises(ValueError, match="with --bandwidth, exchanges compares torch all-reduce, ours exact"):
        exchanges.run(["ours int8"], bandwidths=["200mbit"])
