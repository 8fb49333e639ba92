"""``DTensor.from_local`` of flat ranges: a sharded tensor, or an error that says what to pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import yafsdp_cc
from tests.ranks import ranks
from tests.twins import refusal, seeded, whole


@ranks(2)
def test_an_average_of_flat_ranges_is_that_of_the_weights(tmp_path: Any) -> None:
    """Of shapes that do not divide, through a checkpoint of torch's, and back into the parameters."""
    plain = seeded(lambda: nn.Sequential(nn.Linear(37, 53), nn.Linear(53, 29)))
    model = yafsdp_cc.shard(seeded(lambda: nn.Sequential(nn.Linear(37, 53), nn.Linear(53, 29))), units=[nn.Linear])
    average = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    truth = {name: p.detach().clone() for name, p in plain.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(1.5)
            average[name].lerp_(p.to_local(), 0.25)
            truth[name].lerp_(truth[name] * 1.5, 0.25)
    for name, p in model.named_parameters():
        for more in ({}, {"shape": p.shape, "stride": p.stride(), "run_check": False}):
            made = DTensor.from_local(average[name], p.device_mesh, p.placements, **more)
            assert made.shape == p.shape
            torch.testing.assert_close(whole(made), truth[name])
        with torch.no_grad():
            p.copy_(made)
        torch.testing.assert_close(whole(p.detach()), truth[name])
    state = {n: DTensor.from_local(average[n], p.device_mesh, p.placements) for n, p in model.named_parameters()}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "average")
    found = {name: torch.zeros_like(each) for name, each in state.items()}
    torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path / "average")
    assert all(whole(found[name]).equal(whole(each)) for name, each in state.items())
    weight: Any = model[0].weight
    size = {"shape": weight.shape, "stride": weight.stride()}
    said = refusal(lambda: DTensor.from_local(average["0.weight"], weight.device_mesh, [Shard(0)], **size))
    assert "Pass p.placements" in said
