"""Suite ``replicas``: bytes between replicas are those of the plan, whatever crosses within one."""

from __future__ import annotations

import functools

import pytest

from bench import replicas, train
from bench.contestants import REPLICAS
from tests.netlab.labs import lab_of
from yafsdp_cc.tools.demo.model import GPT

NAMES = ("synchronous", "overlap", "gossip", "sparseloco")


def test_turns_count_what_crosses_between_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "GPT", functools.partial(GPT, depth=2))
    monkeypatch.setattr(train, "SEQUENCES", 1)
    elements = sum(each.numel() for each in GPT(48, 2).parameters())
    with lab_of(ranks=4, ranks_per_machine=2) as lab:
        chosen = {name: REPLICAS[name] for name in NAMES}
        seldom = chosen["sparseloco"]
        chosen["sparseloco"] = seldom._replace(settings=seldom.settings | {"every": 6})
        setup = replicas.Setup(shards=2, width=48, slowdown=1.5, downlink=2.0)
        per_rank = lab.run(replicas._on_rank, lab, chosen, ("unshaped", "matched"), 1, 2, setup)
    assert len({rates["matched"] for rates, _ in per_rank}) == 1
    found = {name: replicas._summary([turns["unshaped", name] for _, turns in per_rank], 4) for name in NAMES}
    sums = 4 * elements  # of all shards of a replica; half of it each way, twice
    assert sums < found["synchronous"]["sent_bytes"] < 1.3 * sums
    for name in ("overlap", "gossip"):  # some of the last step's may cross later, and some of the one before
        assert 0.5 * sums < found[name]["sent_bytes"] < 1.5 * sums
    assert found["sparseloco"]["sent_bytes"] < 0.1 * sums
    *_, last = replicas.replicas_table(
        {name: {**each, "of_unshaped": 0.5} for name, each in found.items()}
    ).splitlines()
    assert last.split()[0] == "sparseloco"
    assert last.split()[3] == "0.50"


def test_replicas_need_ranks() -> None:
    with pytest.raises(ValueError, match="ranks=2, shards=2: two replicas or more"):
        replicas.run(["overlap"], shards=2)
    with pytest.raises(ValueError, match="bandwidth 'fast'"):
        replicas.run(["overlap"], bandwidths=["fast"])
    with pytest.raises(
        ValueError, match="shards=1, width=384, device_time=-1, slowdown=1, downlink=1: device_time is 0 or more"
    ):
        replicas.run(["overlap"], device_time=-1)
