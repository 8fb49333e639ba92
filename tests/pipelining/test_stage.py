"""Compressed stages under torch's schedules, against torch's own stages."""

from __future__ import annotations

from typing import Any

import torch

from tests.pipelining.worlds import ALL, V_SHAPED, Pipeline, batches
from tests.ranks import ranks


@ranks(2)
def test_exact_messages_give_the_bits_of_torchs_stage() -> None:
    data = batches(2)
    for kind in ALL:
        for settings in ({}, {"forward": "fp32", "backward": "fp32"}):
            torchs, ours = Pipeline(kind, None), Pipeline(kind, settings)
            for batch in data:
                assert torchs.run(batch) == ours.run(batch), kind
            if kind not in V_SHAPED:  # torch cannot evaluate under these
                assert torchs.run(data[0], trains=False) == ours.run(data[0], trains=False), kind
            for expected, found in zip(torchs.parameters, ours.parameters, strict=True):
                assert torch.equal(expected, found), kind


@ranks(2)
def test_caches_of_both_sides_are_equal() -> None:
    data = batches(1, samples=22)[0]
    epochs = [torch.randperm(22, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(3)]
    for kind in ALL:
        ours = Pipeline(kind, DELTA)
        for epoch in epochs:
            for batch in (epoch[:8], epoch[8:16], [*epoch[16:], epoch[16]]):  # the last one uneven, one sample twice
                ours.run(data[batch], batch)
            if kind not in V_SHAPED:
                ours.run(data[:8], trains=False)
        check_caches(ours, samples=22)


DELTA = {"forward": "int4", "backward": "int8", "forward_delta": True, "cache_samples": 22}


def check_caches(pipeline: Pipeline, samples: int) -> None:
    """What stages on different ranks keep of each sample is the same to the bit, and of all samples."""
    own = {stage.stage_index: stage.state_dict()["caches"] for stage in pipeline.stages}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    everywhere = {index: caches for each in gathered for index, caches in each.items()}
    compared = 0
    for index, caches in everywhere.items():
        if index + 1 in everywhere and "input" in everywhere[index + 1]:
            sent, received = caches["output"], everywhere[index + 1]["input"]
            assert sent["ids"] == received["ids"]
            assert sorted(sent["ids"]) == list(range(samples))
            if sent["values"]:  # none between stages on one rank
                assert torch.equal(sent["values"][0], received["values"][0])
                assert sent["values"][0].abs().sum() > 0
                compared += 1
    assert compared
