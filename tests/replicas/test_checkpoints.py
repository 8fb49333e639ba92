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
from torch import nn
from torch.distributed.fsdp import fully_shard

import yafsdp_cc
from tests.models import WIDTH, Mlp
from tests.ranks import RankError, on_ranks, ranks
from tests.replicas.test_overlap import ADAMW, batch, mesh_of, sharded, train
from tests.soak import SOAK, also
from tests.twins import seeded, square, whole
from yafsdp_cc.replicas import Gossip, Membership, Outer, Overlap, ReplicaSync

SYNCS: dict[str, Callable[[], ReplicaSync]] = {
    "overlap-int4": lambda: Overlap("int4"),
    "gossip-late-int8": lambda: Gossip(overlap=1, codec="int8"),
    "outer-late-int4": lambda: Outer(every=2, fragments=2, delay=1, codec="int4"),
    "outer-start": lambda: Outer(every=2, sync_steps=4),
}
if SOAK:
    SYNCS |= {
        "overlap": Overlap,
        "half-batches": lambda: Overlap(half_batches=True),
        "gossip": Gossip,
        "gossip-int4": lambda: Gossip(codec="int4"),
        "gossip-late": lambda: Gossip(overlap=1),
        "outer": lambda: Outer(every=2),
        "outer-sparse": lambda: Outer(every=2, lr=1, momentum=0, codec="topk2bit"),
    }
KILLED_IN = next(iter(SYNCS))
SAVED, KILLED, STEPS = 3, 4, 5
"""Training saves after three steps; one rank is killed in the middle of the fifth, which is the last."""


@pytest.mark.parametrize("is_killed", [False, also(True)])
def test_resumed_training_is_that_which_went_on(tmp_path: Path, is_killed: bool) -> None:
    """From what has been saved on the way, by a run that goes on or by one that is killed afterwards."""
    undisturbed, folder = on_ranks(4, _trained, tmp_path / "undisturbed"), tmp_path / "undisturbed"
    if is_killed:
        folder = tmp_path / "killed"
        with pytest.raises(RankError):  # and the other ranks are killed then
            on_ranks(4, _trained, folder, True)
    for expected, found in zip(undisturbed, on_ranks(4, _resumed, folder), strict=True):
        assert expected.keys() == SYNCS.keys()
        for sync, weights in expected.items():
            assert torch.equal(found[sync], weights), sync


def _trained(folder: Path, is_killed: bool = False) -> dict[str, torch.Tensor]:
    """Train with all methods by turns: so a kill finds all of them in the same step."""
    made = {sync: _made(sync) for sync in SYNCS}
    for step in range(STEPS):
        for sync, (model, optimizer) in made.items():
            square(model, batch(step, dist.get_rank())).backward()
            if is_killed and step == KILLED and sync == KILLED_IN and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == SAVED:
                yafsdp_cc.save(folder / sync, model, optimizer, rank=dist.get_rank(), step=step + 1)
    return {sync: _weights(model) for sync, (model, _) in made.items()}


def _resumed(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for sync in SYNCS:
        model, optimizer = _made(sync)
        for _ in range(2):  # what is on its way when the second load comes is dropped
            assert yafsdp_cc.load(folder / sync, model, optimizer) == {"rank": dist.get_rank(), "step": SAVED}
            train(model, optimizer, range(SAVED, STEPS))
        found[sync] = _weights(model)
        if sync in ("overlap-int4", "outer-late-int4"):  # the others have less beside the model
            alone = yafsdp_cc.shard(seeded(Mlp))  # over four ranks, without replicas
            theirs = torch.optim.AdamW(alone.parameters(), **ADAMW)
            yafsdp_cc.load(folder / sync, alone, theirs)
            train(alone, theirs, range(1))
    return found


def _made(sync: str) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(2, 2, SYNCS[sync]())
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def _weights(model: Any) -> torch.Tensor:
    yafsdp_cc.synchronize_replicas(model)
    return torch.cat([whole(parameter.detach()).flatten() for parameter in model.parameters()])


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


@ranks(4)
def test_a_rank_that_owns_nothing_sends_nothing(tmp_path: Path) -> None:
    """FSDP2 gives the second rank no row of a weight that has one, and that rank saves, too."""
    mesh = mesh_of(2, 2)
    for number, sync in enumerate((Overlap("int8"), Gossip(codec="int8"), Outer(every=2, lr=1, codec="topk2bit"))):
        model: Any = seeded(lambda: nn.Linear(WIDTH, 1, bias=False))
        fully_shard(model, mesh=mesh["shard"])
        yafsdp_cc.join_replicas(model, mesh["replicate"], sync)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        train(model, optimizer, range(3))
        yafsdp_cc.save(tmp_path / str(number), model, optimizer)
        saved = whole(model.weight.detach())
        train(model, optimizer, range(1))
        yafsdp_cc.load(tmp_path / str(number), model, optimizer)
        assert torch.equal(whole(model.weight.detach()), saved)
        train(model, optimizer, range(3, 5))
        yafsdp_cc.synchronize_replicas(model)
        assert not torch.equal(whole(model.weight.detach()), saved)


@pytest.mark.parametrize("sync", [Overlap(), Gossip(), Outer(every=4)])
@ranks(2)
def test_another_optimizer_may_go_on_behind_a_load(sync: ReplicaSync, tmp_path: Path) -> None:
    model = sharded(2, 1, sync)
    yafsdp_cc.save(tmp_path / "checkpoint", model)
    for _ in range(2):
        train(model, torch.optim.AdamW(model.parameters(), **ADAMW), range(2))
        yafsdp_cc.load(tmp_path / "checkpoint", model)


@pytest.mark.parametrize("kind", ["torch", "inside a plain module", "membership"])
def test_a_replica_of_other_sharded_modules_is_one_checkpoint(tmp_path: Path, kind: str) -> None:
    expected = on_ranks(2 if kind == "membership" else 4, _saved_otherwise, tmp_path, kind)[0]
    plain = seeded(Mlp, seed=1)
    yafsdp_cc.load(tmp_path / "checkpoint", plain)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.detach(), expected[name]), name


def _saved_otherwise(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    model: Any = seeded(Mlp)
    mesh = mesh_of(dist.get_world_size() // 2, 2)
    if kind == "inside a plain module":
        for layer in (model.enter, *model.blocks, model.leave):
            yafsdp_cc.fully_shard(layer, mesh=mesh["shard"])
    else:
        fully_shard(model, mesh=mesh["shard"])
    if kind == "membership":
        store = dist.FileStore(str(folder / "store"))
        yafsdp_cc.join_replicas(model, None, Outer(every=2, membership=Membership(store, "a")))
    else:
        yafsdp_cc.join_replicas(model, mesh["replicate"], Overlap())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, range(2))
    yafsdp_cc.save(folder / "checkpoint", model, optimizer)
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
