"""Checkpoints of replicas that are synchronized otherwise than in every backward."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import yafsdp_cc
from tests.models import Mlp
from tests.ranks import RankError, on_ranks
from tests.replicas.test_overlap import ADAMW, batch, sharded, train
from tests.twins import seeded, square, whole
from yafsdp_cc.replicas import Gossip, Outer, Overlap, ReplicaSync

SYNCS: dict[str, Callable[[], ReplicaSync]] = {
    "overlap": Overlap,
    "overlap-int4": lambda: Overlap("int4"),
    "half-batches": lambda: Overlap(half_batches=True),
    "gossip": Gossip,
    "gossip-late": lambda: Gossip(overlap=1),
    "gossip-int4": lambda: Gossip(codec="int4"),
    "gossip-late-int8": lambda: Gossip(overlap=1, codec="int8"),
    "outer": lambda: Outer(every=3),
    "outer-late-int4": lambda: Outer(every=2, fragments=2, delay=1, codec="int4"),
    "outer-sparse": lambda: Outer(every=3, lr=1, momentum=0, codec="topk2bit"),
    "outer-start": lambda: Outer(every=2, sync_steps=4),
}
SAVED, KILLED, STEPS = 2, 5, 7
"""Training saves after every second step, one rank is killed in the step that begins with five, all make seven."""


@pytest.mark.parametrize("sync", SYNCS)
def test_killed_and_resumed_training_is_that_which_went_on(tmp_path: Path, sync: str) -> None:
    undisturbed = on_ranks(4, _trained, tmp_path / "undisturbed", sync)
    with pytest.raises(RankError):  # and the other ranks are killed then
        on_ranks(4, _trained, tmp_path / "killed", sync, True)
    for expected, found in zip(undisturbed, on_ranks(4, _resumed, tmp_path / "killed", sync), strict=True):
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


def _trained(path: Path, sync: str, is_killed: bool = False) -> dict[str, torch.Tensor]:
    model = sharded(2, 2, SYNCS[sync]())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    _train(model, optimizer, 0, path, KILLED if is_killed else STEPS)
    return _weights(model)


def _resumed(path: Path, sync: str) -> dict[str, torch.Tensor]:
    model = sharded(2, 2, SYNCS[sync]())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for _ in range(2):  # what is on its way when the second load comes is dropped
        rank, step = dist.get_rank(), KILLED - KILLED % SAVED
        assert yafsdp_cc.load(path, model, optimizer) == {"rank": rank, "step": step}
        _train(model, optimizer, step, path.with_name("resumed"), STEPS)
    found = _weights(model)

    alone = yafsdp_cc.shard(seeded(Mlp))  # over four ranks, without replicas
    theirs = torch.optim.AdamW(alone.parameters(), **ADAMW)
    yafsdp_cc.load(path, alone, theirs)
    train(alone, theirs, range(1))
    return found


def _train(model: Any, optimizer: torch.optim.Optimizer, first: int, path: Path, end: int) -> None:
    for step in range(first, end):
        train(model, optimizer, range(step, step + 1))
        if (step + 1) % SAVED == 0:
            yafsdp_cc.save(path, model, optimizer, rank=dist.get_rank(), step=step + 1)
    if end == KILLED and dist.get_rank() == 1:
        square(model, batch(end, 1)).backward()
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, optimizer, range(end, end + 1))


def _weights(model: Any) -> dict[str, torch.Tensor]:
    yafsdp_cc.synchronize_replicas(model)
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


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
