"""Checkpoints of replicas that are synchronized otherwise than in every backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import yafsdp_cc
from tests.models import Mlp
from tests.ranks import on_ranks, ranks
from tests.replicas.test_overlap import ADAMW, sharded, train
from tests.twins import seeded, whole
from yafsdp_cc.replicas import Gossip, Outer, Overlap, ReplicaSync

SYNCS: dict[str, Callable[[], ReplicaSync]] = {
    "overlap": Overlap,
    "overlap-int4": lambda: Overlap("int4"),
    "half-batches": lambda: Overlap(half_batches=True),
    "gossip-late": lambda: Gossip(overlap=1),
    "gossip-int4": lambda: Gossip(codec="int4"),
    "outer": lambda: Outer(every=2, fragments=2, delay=1, codec="int4"),
    "outer-start": lambda: Outer(every=2, sync_steps=4),
}


@pytest.mark.parametrize("sync", SYNCS)
def test_resumed_training_is_that_which_went_on(tmp_path: Path, sync: str) -> None:
    _check_resumed(path=tmp_path / "checkpoint", sync=sync)


@ranks(4)
def _check_resumed(path: Path, sync: str) -> None:
    model = sharded(2, 2, SYNCS[sync]())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, range(3))
    yafsdp_cc.save(path, model, optimizer, rank=dist.get_rank())
    train(model, optimizer, range(3, 6))
    yafsdp_cc.synchronize_replicas(model)

    resumed = sharded(2, 2, SYNCS[sync]())
    its = torch.optim.AdamW(resumed.parameters(), **ADAMW)
    train(resumed, its, range(1))  # what is on its way then is dropped
    assert yafsdp_cc.load(path, resumed, its) == {"rank": dist.get_rank()}
    train(resumed, its, range(3, 6))
    yafsdp_cc.synchronize_replicas(resumed)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(resumed.get_parameter(name).detach()), whole(parameter.detach())), name

    alone = yafsdp_cc.shard(seeded(Mlp))  # over four ranks, without replicas
    theirs = torch.optim.AdamW(alone.parameters(), **ADAMW)
    yafsdp_cc.load(path, alone, theirs)
    train(alone, theirs, range(3, 4))


def test_a_checkpoint_of_replicas_is_one_of_a_plain_model(tmp_path: Path) -> None:
    expected = on_ranks(2, _saved, tmp_path / "checkpoint")[0]
    plain = seeded(Mlp, seed=1)
    yafsdp_cc.load(tmp_path / "checkpoint", plain)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.detach(), expected[name]), name


def _saved(path: Path) -> dict[str, torch.Tensor]:
    model = sharded(2, 1, "overlap")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, range(2))
    yafsdp_cc.save(path, model, optimizer)
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
