"""`Rescue`: training goes on, bit for bit, from the memory of the nodes that are left.

A node is a folder here: ranks that see the same one are on the same node. Ranks that have ended, and new ones with the
same folders, are what a restart is.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import shutil
import threading
import time
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import yafsdp_cc
from tests.internals import mean_residuals_of, set_tuned_codecs, stop_autotuner
from tests.ranks import RankError
from tests.ranks import on_ranks as on_kept_ranks
from tests.soak import also
from tests.twins import refusal
from yafsdp_cc import Compression
from yafsdp_cc.checkpoint import files
from yafsdp_cc.checkpoint.files import METADATA
from yafsdp_cc.checkpoint.save import _under_way, wait_for_saves
from yafsdp_cc.checkpoint.writer import CheckpointWriter
from yafsdp_cc.compression.state import mean_estimates
from yafsdp_cc.fsdp2.module import require_state
from yafsdp_cc.optim import OneBitAdam
from yafsdp_cc.replicas import Overlap
from yafsdp_cc.rescue import nodes
from yafsdp_cc.rescue.memory import MEMORY, RunMemory, folder_of_run, locked_by_rank
from yafsdp_cc.rescue.nodes import Nodes, Transfer, transfer

on_ranks = partial(on_kept_ranks, fresh=True)  # ranks that are started again are new processes
WAYS = ("exact", "int8", "part", "onebit", "fully_shard", "plain")
Settings = dict[str, Any]


class Loader:
    """A loader with a state."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Any:
        while True:
            self.drawn += 1
            yield torch.full((4, 8), float(self.drawn))

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def train(folder: Path, steps: int, way: str = "exact", nodes: int = 1, **settings: Any) -> Settings:
    """Train until so many steps are finished; return where it began, weights and whatever else was random.

    A snapshot that may take one step of three begins every two steps.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ[MEMORY] = str(folder / f"node-{rank * nodes // world}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 133), nn.ReLU(), nn.Linear(133, 71), nn.Dropout())
    if way == "fully_shard":
        fully_shard(model)
    elif way != "plain":
        codec = {"int8": "int8", "part": "int8", "onebit": "onebit"}.get(way)
        yafsdp_cc.shard(model, units=[nn.Linear], compression=codec)
    if way == "part":
        model = nn.Sequential(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    drawn, loader = torch.Generator().manual_seed(rank), Loader()
    rescue = yafsdp_cc.Rescue(model, optimizer, every=3, drawn=drawn, scheduler=scheduler, loader=loader, **settings)
    for each in (random.seed, np.random.seed, torch.manual_seed):
        each(rank)
    began = rescue.restore()
    batches = iter(loader)
    for _ in range(began, steps):
        noise = torch.randn(4, 8, generator=drawn) + random.random() + np.random.rand()
        model(next(batches) + noise).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rescue.step()
    rescue._wait()
    wait_for_saves()
    weights = {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.named_parameters()
    }
    last = (random.random(), float(np.random.rand()), torch.rand(1).item(), scheduler.get_last_lr(), loader.drawn)
    return {"began": began, "weights": {name: each.detach().clone() for name, each in weights.items()}, "last": last}


def assert_same(one: list[Settings], other: list[Settings]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine["last"] == theirs["last"]
        for name, value in mine["weights"].items():
            assert value.equal(theirs["weights"][name]), name


def snapshots(folder: Path, node: int = 0) -> dict[int, Path]:
    found = (folder / f"node-{node}").glob("*/step-*")
    return {int(each.name.removeprefix("step-").partition(".")[0]): each for each in found}


@pytest.mark.parametrize("way", [way if way in ("exact", "int8", "part") else also(way) for way in WAYS])
def test_ranks_that_died_go_on_bit_for_bit(tmp_path: Path, way: str, capfd: pytest.CaptureFixture[str]) -> None:
    world = 1 if way == "plain" else 2
    undisturbed = on_ranks(world, train, tmp_path / "other", 9, way)
    on_ranks(world, train, tmp_path, 7, way)
    (tmp_path / "node-0" / "0" / "steps-7").write_text("99")  # of a rank that is no more
    gone_on = on_ranks(world, train, tmp_path, 9, way)
    assert "behind step 6, from memory; steps 7 to 7 are made again" in capfd.readouterr().err
    assert [each["began"] for each in gone_on] == [6] * world
    assert_same(gone_on, undisturbed)
    assert sorted(snapshots(tmp_path)) == [6, 8]


@pytest.mark.parametrize("lost", [0, also(1)])
def test_a_node_that_lost_its_memory_has_it_from_its_buddy(
    tmp_path: Path, lost: int, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = on_ranks(4, train, tmp_path / "other", 9, "int8", 2)
    on_ranks(4, train, tmp_path, 7, "int8", 2)
    shutil.rmtree(tmp_path / f"node-{lost}")
    capfd.readouterr()
    gone_on = on_ranks(4, train, tmp_path, 9, "int8", 2)
    assert [each["began"] for each in gone_on] == [6] * 4
    assert_same(gone_on, undisturbed)
    # Rank 0's part has what all ranks have alike.
    parts = 2 if lost == 0 else 3
    assert f"going on behind step 6, from memory ({parts} of 4 parts from another node); step" in capfd.readouterr().err


def test_nodes_may_be_lost_one_after_the_other_without_a_snapshot_between(tmp_path: Path) -> None:
    undisturbed = on_ranks(4, train, tmp_path / "other", 9, "exact", 2)
    on_ranks(4, train, tmp_path, 7, "exact", 2)
    for lost in (0, 1, 0):
        shutil.rmtree(tmp_path / f"node-{lost}")
        assert [each["began"] for each in on_ranks(4, train, tmp_path, 7, "exact", 2)] == [6] * 4
    assert_same(on_ranks(4, train, tmp_path, 9, "exact", 2), undisturbed)


def test_any_one_of_three_nodes_may_vanish(tmp_path: Path) -> None:
    on_ranks(3, train, tmp_path, 4, "exact", 3)
    for lost in range(3):
        copy = tmp_path / f"without-{lost}"
        shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("without-*", f"node-{lost}"))
        assert [each["began"] for each in on_ranks(3, train, copy, 4, "exact", 3)] == [4] * 3


def test_where_no_node_has_a_part_and_there_is_no_checkpoint_a_run_begins_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = on_ranks(2, train, tmp_path / "other", 3, "exact", 2)
    on_ranks(2, train, tmp_path, 3, "exact", 2)
    for node in range(2):
        (snapshots(tmp_path, node)[2] / "__1_0.distcp").unlink()
    gone_on = on_ranks(2, train, tmp_path, 3, "exact", 2)
    assert [each["began"] for each in gone_on] == [0, 0]
    assert_same(gone_on, undisturbed)
    told = capfd.readouterr().err
    assert re.search(r"a snapshot cannot be used: .*__1_0.distcp is in no node's memory any more", told)
    assert "going on from the beginning; steps 1 to 3 are made again" in told


def test_where_no_node_has_a_part_the_checkpoint_on_the_disk_is_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = {"path": tmp_path / "disk", "save_every": 3}
    undisturbed = on_ranks(2, lambda: train(tmp_path / "other", 9, nodes=2))
    on_ranks(2, lambda: train(tmp_path, 7, nodes=2, **disk))
    for node in range(2):
        shutil.rmtree(tmp_path / f"node-{node}")
    gone_on = on_ranks(2, lambda: train(tmp_path, 9, nodes=2, **disk))
    assert [each["began"] for each in gone_on] == [6, 6]
    assert_same(gone_on, undisturbed)
    assert f"going on behind step 6, from {tmp_path / 'disk'}\n" in capfd.readouterr().err


def test_where_a_node_has_no_room_for_a_snapshot_the_checkpoint_on_the_disk_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    def again(**disk: Any) -> Settings:
        if dist.get_rank() == 1:
            monkeypatch.setattr(os, "posix_fallocate", full)
        return train(tmp_path, 6, nodes=2, **disk)

    on_ranks(2, lambda: train(tmp_path, 6, nodes=2, path=tmp_path / "disk", save_every=3))
    shutil.rmtree(tmp_path / "node-1")
    told = r"rank 1: .*No space left in .*/node-1: [\d,]+ bytes are needed, and [\d,]+ were free"
    with pytest.raises(RankError, match=f"ValueError: {told}"):
        on_ranks(2, again)
    assert [each["began"] for each in on_ranks(2, lambda: again(path=tmp_path / "disk"))] == [6, 6]
    assert re.search(f"a snapshot cannot be used: {told}", capfd.readouterr().err)


def test_a_checkpoint_that_is_newer_than_what_memory_has_is_taken(tmp_path: Path) -> None:
    disk = {"path": tmp_path / "disk", "save_every": 3}
    on_ranks(2, lambda: train(tmp_path, 3, **disk))
    shutil.copytree(tmp_path / "node-0", tmp_path / "old")
    on_ranks(2, lambda: train(tmp_path, 5, **disk))
    shutil.rmtree(tmp_path / "node-0")
    (tmp_path / "old").rename(tmp_path / "node-0")
    assert [each["began"] for each in on_ranks(2, lambda: train(tmp_path, 5, **disk))] == [3, 3]


@pytest.mark.parametrize(("before", "after"), [(2, 4), also(4, 2), also(4, 1)])
def test_another_number_of_ranks_goes_on(tmp_path: Path, before: int, after: int) -> None:
    saved = on_ranks(before, lambda: train(tmp_path, 4, nodes=2))
    gone_on = on_ranks(after, lambda: train(tmp_path, 4, nodes=min(2, after)))
    assert [each["began"] for each in gone_on] == [4] * after
    for name, value in saved[0]["weights"].items():
        assert gone_on[0]["weights"][name].equal(value), name


def unsent(folder: Path, way: str) -> dict[str, torch.Tensor]:
    """Make four steps, or load the snapshot behind them; return what residuals and momenta hold of their gradients."""
    os.environ[MEMORY] = str(folder / f"node-{dist.get_rank()}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 133), nn.Linear(133, 71))
    codec = {"momentum": "onebit", "ef21": Compression("int4", feedback="ef21", residual="fp32")}.get(way, way)
    yafsdp_cc.shard(model, units=[nn.Linear], compression=codec)
    parameters = list(model.parameters())
    optimizer = OneBitAdam(parameters, warmup_steps=2) if way == "momentum" else torch.optim.AdamW(parameters)
    rescue = yafsdp_cc.Rescue(model, optimizer, every=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* random_states differed between ranks")
        began = rescue.restore()
    if way == "auto" and began == 0:
        stop_autotuner(model)
        set_tuned_codecs(model, ["int4", "int4"])
    for step in range(began, 4):
        draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 8, generator=draws)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rescue.step()
    rescue._wait()
    found = mean_residuals_of(model)
    if way == "ef21":
        return {name: each.full_tensor() for name, each in mean_estimates(require_state(model)).items()}
    if way == "momentum":  # the first moment, and the part of it that is in residuals
        beta = optimizer.param_groups[0]["betas"][0]
        moments = {name: optimizer.state[each]["exp_avg"].full_tensor() for name, each in model.named_parameters()}
        return {name: moments[name] + each * (1 - beta) / beta for name, each in found.items()}
    return found


@pytest.mark.parametrize(
    ("way", "after"), [("auto", 2), ("momentum", 3), also("auto", 3), also("int4", 1), also("ef21", 3)]
)
def test_gradients_that_were_still_to_be_sent_are_sent_by_any_number_of_ranks(
    tmp_path: Path, way: str, after: int
) -> None:
    saved, *_ = on_ranks(2, unsent, tmp_path, way)
    found, *_ = on_ranks(after, unsent, tmp_path, way)
    assert found.keys() == saved.keys() >= {"0.weight", "1.weight"}
    for name, each in saved.items():
        assert each.any()
        assert found[name].allclose(each, rtol=1e-5, atol=1e-8), name


@pytest.mark.parametrize("after", [2, 3])
def test_residuals_of_a_codec_that_was_removed_are_told(tmp_path: Path, after: int) -> None:
    def again() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            unsent(tmp_path, "fp32")
        return [str(each.message) for each in caught if "to be sent" in str(each.message)]

    on_ranks(2, unsent, tmp_path, "int4")
    told = "residuals, gradients that were still to be sent, of 0.weight, 1.weight, which this model does not encode"
    for messages in on_ranks(after, again):
        assert [told in each for each in messages] == [True]


@pytest.mark.parametrize("way", ["int4", "auto"])
def test_no_node_keeps_residuals_of_others_than_its_own_ranks_and_their_buddies(tmp_path: Path, way: str) -> None:
    def kept() -> list[set[str]]:
        return [{each.name for each in snapshots(tmp_path, node)[4].glob("extra*")} for node in range(4)]

    saved, *_ = on_ranks(4, unsent, tmp_path, way)
    before = kept()
    assert all(len(each) == 2 for each in before)
    found, *_ = on_ranks(4, unsent, tmp_path, way)
    assert kept() == before
    for name, each in saved.items():
        assert each.any()
        assert found[name].allclose(each, rtol=1e-5, atol=1e-8), name


def test_a_snapshot_that_is_not_finished_or_damaged_is_not_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = on_ranks(2, train, tmp_path / "other", 6)
    on_ranks(2, train, tmp_path, 6)
    last = snapshots(tmp_path)[6]
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "node-0", damaged / "node-0")
    (last / ".metadata").unlink()
    gone_on = on_ranks(2, train, tmp_path, 6)
    assert [each["began"] for each in gone_on] == [4, 4]
    assert_same(gone_on, undisturbed)
    file = damaged / last.relative_to(tmp_path) / "__1_0.distcp"
    damage(file)
    capfd.readouterr()
    gone_on = on_ranks(2, train, damaged, 6)
    assert [each["began"] for each in gone_on] == [4, 4]
    assert_same(gone_on, undisturbed)
    assert re.search("a snapshot cannot be used: .*__1_0.distcp.*CRC-32", capfd.readouterr().err)


def test_a_table_that_is_damaged_on_one_node_hangs_nobody(tmp_path: Path) -> None:
    on_ranks(2, train, tmp_path, 6, "exact", 2)
    (snapshots(tmp_path, 1)[6] / ".metadata").write_bytes(b"x")
    assert [each["began"] for each in on_ranks(2, train, tmp_path, 6, "exact", 2)] == [4, 4]


def test_a_state_that_one_rank_cannot_load_is_told_and_hangs_nobody(tmp_path: Path) -> None:
    def body() -> None:
        train(tmp_path, 2)

    def again() -> None:
        if dist.get_rank() == 1:
            Loader.load_state_dict = refuse  # type: ignore[method-assign]  # what the test is about
        train(tmp_path, 4)

    def refuse(loader: Loader, state: dict[str, int]) -> None:
        raise ValueError("sample 2 is gone")

    on_ranks(2, body)
    with pytest.raises(RankError, match="sample 2 is gone"):
        on_ranks(2, again)


def test_states_that_a_snapshot_lacks_or_has_besides_are_told(tmp_path: Path) -> None:
    def started(**states: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(tmp_path, 3, **states)
        return [str(each.message) for each in caught if "saved" in str(each.message)]

    assert on_ranks(2, lambda: started(before=torch.Generator(), both=torch.Generator())) == [[], []]
    (told,), others = on_ranks(2, lambda: started(after=torch.Generator(), both=torch.Generator()))
    assert "saved behind step 2 has no state for 'after', a state of 'before' that nothing takes. An object" in told
    assert others == []
    assert on_ranks(2, lambda: started(before=torch.Generator(), both=torch.Generator())) == [[], []]


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def without_files(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def foreign(folder: Path) -> None:
    yafsdp_cc.save(folder, nn.Linear(1, 1))


UNUSABLE: dict[str, Callable[[Path], None]] = {
    r"extra_0_of_1.pt is damaged \(BadZipFile": lambda folder: damage(folder / "extra_0_of_1.pt"),
    r"extra_0_of_1.pt is damaged": lambda folder: os.truncate(folder / "extra_0_of_1.pt", 300),
    "does not tell its step, as Rescue did not save it": lambda folder: (folder / "extra_0_of_1.pt").unlink(),
    "disk does not tell its step, as Rescue": foreign,
    "": without_files,
}


@pytest.mark.parametrize("told", UNUSABLE)
def test_a_checkpoint_that_does_not_tell_its_step_is_named_and_the_snapshot_taken(
    tmp_path: Path, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def again() -> list[int]:
        return [each["began"] for each in on_ranks(1, lambda: train(tmp_path, 5, "plain", path=tmp_path / "disk"))]

    on_ranks(1, lambda: train(tmp_path, 5, "plain", path=tmp_path / "disk", save_every=3))
    on_ranks(1, UNUSABLE[told], tmp_path / "disk")
    capfd.readouterr()
    assert again() == [4]
    assert re.search(
        f"the checkpoint cannot be used: .*{told}" if told else "^yafsdp-cc: going", capfd.readouterr().err
    )
    shutil.rmtree(tmp_path / "node-0")
    if told:
        with pytest.raises(RankError, match=told):
            again()
    else:
        assert again() == [0]


def test_where_one_node_lacks_the_file_system_of_the_checkpoint_all_ranks_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    disk, told = {"path": tmp_path / "disk", "save_every": 3}, "at .*/disk: mount one file system there on all nodes"

    def again() -> Settings:
        if dist.get_rank() == 1:
            monkeypatch.setattr(files, "place", lambda _: tmp_path / "bare")
        return train(tmp_path, 4, path=disk["path"])

    on_ranks(2, lambda: train(tmp_path, 4, **disk))
    assert [each["began"] for each in on_ranks(2, again)] == [4, 4]
    assert re.search(f"the checkpoint cannot be used: .*{told}", capfd.readouterr().err)
    shutil.rmtree(tmp_path / "node-0")
    with pytest.raises(RankError, match=f"ValueError: .*{told}\n.*behind step 3\n.*rank 1: none"):
        on_ranks(2, again, patience=20.0)


@pytest.mark.parametrize(("owner", "name", "ranks"), [(files, "complete", [1]), (os, "listdir", [0, 1])])
def test_a_path_that_cannot_be_read_is_told_and_the_snapshot_taken(
    tmp_path: Path, owner: Any, name: str, ranks: list[int], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    told = f"ESTALE.*{tmp_path}/disk"

    def again() -> Settings:
        def stale(place: Path) -> Any:
            if Path(place) == tmp_path / "disk":
                raise OSError(errno.ESTALE, "ESTALE", str(place))
            return as_before(place)

        as_before = getattr(owner, name)
        if dist.get_rank() in ranks:
            monkeypatch.setattr(owner, name, stale)
        return train(tmp_path, 5, path=tmp_path / "disk")

    on_ranks(2, lambda: train(tmp_path, 5, path=tmp_path / "disk", save_every=3))
    assert [each["began"] for each in on_ranks(2, again)] == [4, 4]
    assert re.search(f"the checkpoint cannot be used: .*{told}", capfd.readouterr().err)
    shutil.rmtree(tmp_path / "node-0")
    with pytest.raises(RankError, match=f"ValueError: .*{told}"):  # and no run begins anew
        on_ranks(2, again)


def test_the_last_snapshot_that_is_damaged_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    on_ranks(2, train, tmp_path, 2)
    (file,) = snapshots(tmp_path)[2].glob("__0_0.distcp")
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(RankError, match=r"__0_0.distcp.* is damaged"):
        on_ranks(2, train, tmp_path, 2)


@pytest.mark.parametrize("compression", ["int8", also(None)])
def test_memory_is_as_planned(tmp_path: Path, compression: str | None) -> None:
    def body() -> None:
        folder = tmp_path / f"node-{dist.get_rank()}"
        os.environ[MEMORY] = str(folder)
        model = nn.Sequential(nn.Linear(500, 501), nn.Linear(501, 502))
        yafsdp_cc.shard(model, units=[nn.Linear], compression=compression)
        optimizer = torch.optim.AdamW(model.parameters())
        rescue = yafsdp_cc.Rescue(model, optimizer, every=1)
        rescue.restore()
        for step in range(3):
            model(torch.ones(1, 500)).sum().backward()
            optimizer.step()
            rescue.step()
            rescue._wait()
            held = sum(each.stat().st_size for each in folder.rglob("*"))
            planned = yafsdp_cc.plan_of(model).snapshot_bytes * 2 * min(2, step + 1)
            assert 0.99 * planned < held < 1.02 * planned, (held, planned)

    on_ranks(2, body)


def test_a_first_start_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert on_ranks(2, train, tmp_path, 1)[0]["began"] == 0
    assert capfd.readouterr().err == ""
    assert on_ranks(2, train, tmp_path, 1)[0]["began"] == 0
    assert capfd.readouterr().err == "yafsdp-cc: going on from the beginning; steps 1 to 1 are made again\n"


def test_a_snapshot_is_written_over_the_one_before_the_last(tmp_path: Path) -> None:
    def body() -> None:
        folder = tmp_path / f"node-{dist.get_rank()}"
        os.environ[MEMORY] = str(folder)
        model = yafsdp_cc.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
        rescue = yafsdp_cc.Rescue(model, every=1)
        rescue.restore()
        found: list[dict[str, int]] = []
        for _ in range(4):
            rescue.step()
            rescue._wait()
            dist.barrier()  # the other node has the table of contents, too
            newest = snapshots(tmp_path, dist.get_rank())[len(found) + 1]
            found.append({each.name: each.stat().st_ino for each in newest.glob("*.distcp")})
        assert found[:2] == found[2:]
        assert len(found[0]) == 2  # its own, and the copy of the other node's

    on_ranks(2, body)


def test_snapshots_of_a_state_that_changes_its_form_have_its_values(tmp_path: Path) -> None:
    """Ranks agree on a plan of what each writes where the form of any tensor has changed, and nowhere else."""
    precise = 1 + 2.0**-40  # float32 rounds it to 1

    def body() -> list[int]:
        rank = dist.get_rank()
        os.environ[MEMORY] = str(tmp_path / f"node-{rank}")
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
        model.register_buffer("kept", torch.ones(5))
        yafsdp_cc.shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        rescue = yafsdp_cc.Rescue(model, optimizer, every=1)
        rescue.restore()
        group, states, first = optimizer.param_groups[0], optimizer.state, model[0].weight

        def keep(*values: float, dtype: torch.dtype = torch.float32) -> None:
            model.kept = torch.tensor(values, dtype=dtype)

        changes: list[Callable[[], object]] = [
            lambda: None,
            lambda: model.kept.add_(1),
            lambda: keep(*[precise] * 5, dtype=torch.float64),
            lambda: keep(1, 2, 3),
            lambda: keep(4, 5, 6),
            lambda: rank and keep(4, 5, 6, dtype=torch.float64),  # the buffer of rank 0 is saved
            lambda: keep(7, 8, 9, dtype=torch.float64),
            lambda: group.update(lr=torch.tensor(0.3)),
            lambda: group["lr"].fill_(0.2),
            lambda: group.update(lr=0.7, betas=(0.5, 0.9)),
            lambda: group.update(lr=0.6),
            lambda: states[first].update(more=torch.ones_like(first)),
            lambda: states[first].update(more=torch.full_like(first, precise, dtype=torch.float64)),
            lambda: states[first].pop("more"),
        ]
        plans = []
        for change in changes:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            change()
            with mock.patch.object(
                CheckpointWriter, "agree", autospec=True, side_effect=CheckpointWriter.agree
            ) as agree:
                rescue.step()
                rescue._wait()
            plans.append(agree.call_count)
            dist.barrier()  # the other node has the table of contents, too
            found: Settings = {}
            folder = snapshots(tmp_path, rank)[rescue._steps]
            _load_state_dict(found, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
            live = {name: each.full_tensor() for name, each in model.named_parameters()}
            values = {name: dict(states[each]) for name, each in model.named_parameters()}
            held = tree_map_only(DTensor, DTensor.full_tensor, values)
            assert files.same(found["optimizer"]["state"], held)
            assert files.same({name: found["model"][name] for name in live}, live)
            assert [found["optimizer"]["param_groups"][0][name] for name in ("lr", "betas")] == [
                group[name] for name in ("lr", "betas")
            ]
            if rank == 0:
                assert files.same(found["model"]["kept"], model.kept)
        return plans

    assert on_ranks(2, body) == [[1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 1, 1]] * 2


def test_snapshots_of_a_model_without_tensors_have_its_state(tmp_path: Path) -> None:
    class Counts(nn.Module):
        counts: dict[str, int] = {}  # noqa: RUF012

        def get_extra_state(self) -> dict[str, int]:
            return self.counts

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.counts = state

    def body() -> None:
        os.environ[MEMORY] = str(tmp_path)
        model = Counts()
        rescue = yafsdp_cc.Rescue(model, every=1)
        rescue.restore()
        for counts in ({"a": 1}, {"a": 2}, {"a": 2, "b": 3}, {"b": 4}, {"b": 4, "c": 5}):
            model.counts = counts
            rescue.step()
            model.counts = {}
            rescue.restore()
            assert model.counts == counts

    on_ranks(2, body)


@pytest.mark.parametrize("goes_on", [1, 2])
def test_a_program_may_make_another_process_group(tmp_path: Path, goes_on: int) -> None:
    def body() -> None:
        rank = dist.get_rank()
        os.environ[MEMORY] = str(tmp_path / f"node-{rank}")
        model = nn.Linear(3, 3)
        nn.init.ones_(model.weight)
        rescue = yafsdp_cc.Rescue(model, every=1)
        rescue.restore()
        rescue.step()
        rescue._wait()
        dist.barrier()
        dist.destroy_process_group()
        if rank < 2 - goes_on:
            return
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=1 - rank, world_size=goes_on)
        assert rescue.restore() == 1
        for step in (2, 3):
            with torch.no_grad():
                model.weight.fill_(step)
            rescue.step()
            rescue._wait()
        with torch.no_grad():
            model.weight.zero_()
        assert rescue.restore() == 3
        assert model.weight.unique().tolist() == [3]

    on_ranks(2, body)


def test_files_that_a_restore_has_fetched_are_in_no_later_snapshot(tmp_path: Path) -> None:
    for steps, began in ((4, 0), (9, 4), (15, 8), (15, 14)):  # rank 2 fetches rank 0's part, of which it has no copy
        assert [each["began"] for each in on_ranks(3, train, tmp_path, steps, "exact", 3)] == [began] * 3


def test_a_learning_rate_in_a_tensor_is_that_of_the_snapshot(tmp_path: Path) -> None:
    changed = threading.Event()

    class SlowRescue(yafsdp_cc.Rescue):
        """Writes a snapshot only once training has changed the learning rate."""

        def _write(self, *given: Any) -> None:
            assert changed.wait(60)
            super()._write(*given)

    def body(rate: float) -> tuple[int, float]:
        os.environ[MEMORY] = str(tmp_path)
        model = yafsdp_cc.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(rate))
        rescue = SlowRescue(model, optimizer, every=2)
        began, found = rescue.restore(), optimizer.param_groups[0]["lr"].item()
        if not began:
            rescue.step()
            optimizer.param_groups[0]["lr"].fill_(0.25)  # as a scheduler does
            changed.set()
            rescue._wait()
        return began, found

    assert on_ranks(2, body, 0.5) == [(0, 0.5)] * 2
    assert on_ranks(2, body, 0.75) == [(1, 0.5)] * 2


class Busy:
    """An engine that communicates without a pause."""

    def is_communicating(self) -> bool:
        return True


class WatchedRescue(yafsdp_cc.Rescue):
    """Tells what would be lost with all ranks at any moment, and which waits training has made; writes slowly."""

    def __init__(self, *given: Any, every: int, slow: Callable[[yafsdp_cc.Rescue], None]) -> None:
        super().__init__(*given, every=every)
        self.slow, self.lost, self.begun, self.waits = slow, list[int](), list[int](), 0

    def _tell_progress(self) -> None:  # what is lost grows here alone
        super()._tell_progress()
        self.lost.append(self._steps - self.newest())

    def newest(self) -> int:
        return max((int(re.split("[-.]", each)[1]) for each in self._whole_snapshots()), default=0)

    def _snapshot(self) -> None:
        super()._snapshot()
        self.begun.append(self._steps)

    def _wait(self) -> None:
        self.waits += self._job is not None and not self._job.done()
        super()._wait()

    def _write(self, *given: Any) -> None:
        self.slow(self)
        super()._write(*given)


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize(("every", "world"), [(1, 2), (5, 2), also(2, 2), also(3, 4), (5, 4), also(10, 4)])
def test_no_more_than_every_steps_are_lost_at_any_moment(
    tmp_path: Path, every: int, world: int, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> tuple[list[int], list[int]]:
        rank = dist.get_rank()
        os.environ[MEMORY] = str(tmp_path / f"node-{rank * 2 // world}")
        chance, write = random.Random(rank), files.write

        def sleep(*_: Any) -> None:
            time.sleep(chance.choice((0, 0, 0.01, 0.1)))

        def write_slowly(*given: Any) -> None:
            sleep()
            write(*given)

        monkeypatch.setattr(files, "write", write_slowly)  # extra files, and tables of contents
        lost: list[int] = []
        for last in (14, 18):
            rescue = WatchedRescue(nn.Linear(9, 9), every=every, slow=sleep)
            vars(rescue)["_engines"] = [Busy()] if is_busy else []
            for step in range(rescue.restore(), last):
                time.sleep(0.02 * chance.random())  # ranks that do not wait for each other find more than those that do
                rescue.step()
                assert every > 1 or rescue.newest() == step + 1
            rescue._wait()
            lost += rescue.lost
        return lost, rescue.begun

    found = on_ranks(world, body)
    assert all(max(lost) <= every for lost, _ in found), found
    assert all(begun == found[0][1] for _, begun in found)


def test_a_snapshot_begins_by_so_much_earlier_that_training_does_not_wait_for_it(tmp_path: Path) -> None:
    def body() -> tuple[list[int], int]:
        os.environ[MEMORY] = str(tmp_path)
        rank = dist.get_rank()

        def two_steps(rescue: yafsdp_cc.Rescue) -> None:
            while rank and rescue._job is not None and rescue._steps < rescue._started + 2:
                time.sleep(0.001)

        rescue = WatchedRescue(nn.Linear(9, 9), every=10, slow=two_steps)
        for _ in range(rescue.restore(), 60):
            # A snapshot becomes whole in the second step of rank 0 behind its begin, and in the third one of rank 1.
            while rescue._job and not rescue._job.done() and rescue._steps == rescue._started + 1 + rank:
                time.sleep(0.001)
            rescue.step()
        return rescue.begun, rescue.waits

    # Nothing is known of their duration at first: they get half of ``every``.
    assert on_ranks(2, body) == [([5, 10, *range(17, 60, 7)], 0)] * 2


def test_a_copy_goes_on_while_training_communicates_if_it_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY, str(tmp_path))
    rescue = yafsdp_cc.Rescue(nn.Linear(1, 1), every=10)
    monkeypatch.setattr(rescue, "_engines", [Busy()])
    rescue._whole, rescue._started, rescue._next, rescue._steps = 30, 36, 46, 38  # it is due behind step 40
    rescue._job = Future()

    found = [rescue._may_send(0.4), rescue._may_send(0.6)]
    rescue._steps = 39
    found += [rescue._may_send(0.7), rescue._may_send(0.8)]
    rescue._job = None  # training waits for it
    assert [*found, rescue._may_send(0.9)] == [True, False, True, False, True]


@pytest.mark.parametrize("way", ["ours", "fsdp2", also("fsdp2 in bf16")])
def test_a_running_program_goes_back_again_and_again(tmp_path: Path, way: str) -> None:
    def stop(grad: torch.Tensor) -> None:
        raise ArithmeticError("a backward that raises")

    def body() -> None:
        os.environ[MEMORY] = str(tmp_path)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        if way == "ours":
            yafsdp_cc.shard(model)
        else:
            half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(model, mp_policy=half if way == "fsdp2 in bf16" else MixedPrecisionPolicy())
        optimizer = torch.optim.AdamW(model.parameters())
        rescue, behind = yafsdp_cc.Rescue(model, optimizer, every=4), dict[int, torch.Tensor]()
        step = rescue.restore()
        for last in (1, 7, 12, 14):  # a snapshot is under way behind some of them
            while step < last:
                model(torch.ones(1, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                rescue.step()
                step += 1
                weight = model[0].weight.full_tensor().detach().clone()
                assert weight.equal(behind.setdefault(step, weight))  # a step that is made again is the same
            if last == 1:
                with pytest.raises(RuntimeError, match="training is behind step 1, and there is nothing to go back to"):
                    rescue.restore()
                continue
            for raises in (False, hasattr(model, "reset_iter_state")):  # torch 2.11 cannot go on behind an exception
                model.set_requires_gradient_sync(False)
                output = model(torch.full((1, 64), 1e3))  # the first micro-batch of a loss spike
                if raises:
                    output.register_hook(stop)
                with pytest.raises(ArithmeticError) if raises else nullcontext():
                    output.square().mean().backward()
                model.set_requires_gradient_sync(True)
                step = rescue.restore()
                assert last - 4 <= step <= last
                assert model[0].weight.full_tensor().equal(behind[step])
        rescue.close()

    on_ranks(2, body)


def test_an_evaluation_in_inference_mode_may_count_a_step_and_go_back(tmp_path: Path) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path)
        model = yafsdp_cc.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), compression="int8")
        optimizer = torch.optim.AdamW(model.parameters())
        rescue = yafsdp_cc.Rescue(model, optimizer, every=1)

        def train() -> torch.Tensor:
            model(torch.ones(1, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return model[0].weight.full_tensor().detach().clone()

        rescue.restore()
        train()
        with torch.inference_mode():
            rescue.step()
        following = train()
        with torch.inference_mode():
            assert rescue.restore() == 1
        assert train().equal(following)

    on_ranks(2, body)


def test_a_path_is_that_of_the_working_directory_in_which_it_was_named(tmp_path: Path) -> None:
    def body() -> None:
        os.environ[MEMORY] = "memory"
        os.chdir(tmp_path)
        rescue = yafsdp_cc.Rescue(nn.Linear(2, 2), every=1, path="last", save_every=1)
        rescue.restore()
        os.chdir("/")
        rescue.step()
        rescue._wait()
        assert [*tmp_path.glob(f"memory/*/step-1.*/{METADATA}")]
        rescue.close()
        wait_for_saves()
        assert yafsdp_cc.load(tmp_path / "last", nn.Linear(2, 2))["steps"] == 1

    on_ranks(1, body)


def test_a_second_one_in_a_program_is_refused_until_the_first_is_closed_or_gone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path / "run")
        first = yafsdp_cc.Rescue(nn.Linear(2, 2), every=1)
        first.restore()
        assert "call close() of that one first" in refusal(yafsdp_cc.Rescue(nn.Linear(2, 2), every=1).restore)
        first.close()
        second = yafsdp_cc.Rescue(nn.Linear(2, 2), every=1)
        assert second.restore() == 0
        second.step()
        second.step()
        second._wait()  # its thread refers to it
        del second
        assert yafsdp_cc.Rescue(nn.Linear(2, 2), every=1).restore() == 2

    on_ranks(2, body)
    assert "behind step 2, from memory; a Rescue that was dropped without close() has made it" in capfd.readouterr().err


def test_two_made_up_front_do_not_disturb_each_other(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()  # the launcher's

    def body() -> None:
        os.environ[MEMORY] = str(tmp_path / "run")
        first, second, third = (yafsdp_cc.Rescue(nn.Linear(2, 2), every=1) for _ in range(3))
        for each in (first, second, first):
            assert each.restore() == 0
            each.step()
            if each is second:
                third.close()  # which was never used
            assert each.restore() == 1
            each.close()
            assert "call Rescue.restore() before the first step" in refusal(each.step)

    on_ranks(2, body)
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "lock"]


def test_each_of_two_in_a_program_goes_on_from_its_own_snapshots(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(folder: Path, steps: int) -> tuple[list[int], torch.Tensor]:
        os.environ[MEMORY] = str(folder)
        torch.manual_seed(0)
        model, began = yafsdp_cc.shard(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))), list[int]()
        for rate, last in ((0.05, 5), (0.01, steps)):
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            rescue = yafsdp_cc.Rescue(model, optimizer, every=2)
            began.append(rescue.restore())
            for step in range(began[-1], last):
                model(torch.full((1, 9), 1.0 + step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                rescue.step()
            if rate == 0.05:
                rescue.close()
        rescue._wait()
        return began, model[0].weight.full_tensor().detach()

    undisturbed = on_ranks(2, body, tmp_path / "other", 5)
    on_ranks(2, body, tmp_path / "run", 3)
    capfd.readouterr()
    gone_on = on_ranks(2, body, tmp_path / "run", 5)
    assert [began for began, _ in gone_on] == [[0, 3]] * 2
    assert all(mine.equal(other) for (_, mine), (_, other) in zip(gone_on, undisturbed, strict=True))
    told = capfd.readouterr().err
    assert "going on from the beginning; a later Rescue of this program has snapshots, which are left to that" in told


def test_two_runs_do_not_take_each_other_s_snapshots(tmp_path: Path) -> None:
    """Torchrun gives all runs without ``--rdzv-id`` one id; a run that has ended leaves its place to the next."""
    place = tmp_path / "run" / "0"
    place.mkdir(parents=True)

    def body(is_refused: bool) -> None:
        os.environ[MEMORY] = str(tmp_path / "run")
        rescue = yafsdp_cc.Rescue(nn.Linear(2, 2), every=1)
        if is_refused:
            assert "another run, which is going on: start each by yafsdp-cc launch" in refusal(rescue.restore)
        else:
            rescue.restore()
            rescue.step()

    with locked_by_rank(place):
        on_ranks(2, body, True)
    for _ in range(2):
        on_ranks(2, body, False)


def test_close_removes_what_a_run_has_in_memory(tmp_path: Path) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path / "run")
        model = nn.Linear(2, 2)
        rescue = yafsdp_cc.Rescue(model, every=1)
        rescue.restore()
        rescue.step()
        rescue.close()

    on_ranks(2, body)
    assert list(tmp_path.iterdir()) == []


def test_close_waits_for_the_checkpoint_at_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path / f"run-{dist.get_rank()}")
        at_close, write = threading.Event(), files.write

        def late(file: Path, content: bytes) -> None:
            if "disk.saving" in str(file):
                at_close.wait()
            write(file, content)

        monkeypatch.setattr(files, "write", late)
        torch.manual_seed(0)
        rescue = yafsdp_cc.Rescue(yafsdp_cc.shard(nn.Linear(4, 4)), every=1, path=tmp_path / "disk", save_every=1)
        rescue.restore()
        rescue.step()
        threading.Timer(0.2, at_close.set).start()
        rescue.close()
        dist.destroy_process_group()

    on_ranks(2, body)
    torch.manual_seed(0)
    expected, model = nn.Linear(4, 4), nn.Linear(4, 4)
    assert yafsdp_cc.load(tmp_path / "disk", model)["steps"] == 1
    assert model.weight.equal(expected.weight)


def test_close_keeps_snapshots_where_the_checkpoint_at_the_path_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write

    def body() -> None:
        os.environ[MEMORY] = str(tmp_path / f"run-{dist.get_rank()}")

        def full(file: Path, content: bytes) -> None:
            if "disk.saving" in str(file) and dist.get_rank() == 1:
                raise OSError("No space left on device")
            write(file, content)

        monkeypatch.setattr(files, "write", full)
        rescue = yafsdp_cc.Rescue(yafsdp_cc.shard(nn.Linear(4, 4)), every=2, path=tmp_path / "disk", save_every=2)
        rescue.restore()
        rescue.step()
        rescue.step()
        with pytest.raises(RuntimeError, match=r"the last checkpoint at .*disk was not written.*No space left"):
            rescue.close()
        assert list((tmp_path / f"run-{dist.get_rank()}" / "0").glob(f"step-*/{METADATA}"))
        rescue.close()
        assert not (tmp_path / f"run-{dist.get_rank()}").exists()

    on_ranks(2, body)


def test_a_rescue_that_is_gone_keeps_no_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY, str(tmp_path))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    rescue = yafsdp_cc.Rescue(model, optimizer)
    optimizer.step()
    freed = weakref.ref(optimizer)
    del rescue, optimizer
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("synchronizes", [True, False])
@pytest.mark.parametrize("turns", [1, 2])
def test_gradients_that_no_optimizer_step_has_taken_are_told(tmp_path: Path, turns: int, synchronizes: bool) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path / f"run-{dist.get_rank()}")
        model = yafsdp_cc.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), units=[nn.Linear])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rescue = yafsdp_cc.Rescue(model, optimizer, every=2)
        rescue.restore()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(1, 6):
                model.set_requires_gradient_sync(synchronizes or step % turns == 0)
                model(torch.ones(2, 64)).sum().backward()
                if step % turns == 0:
                    optimizer.step()  # gradients stay until the next step
                rescue.step()
                if step % turns == 0:
                    optimizer.zero_grad()
        rescue.close()
        places = {each.filename for each in told if "that no optimizer step has taken" in str(each.message)}
        assert places == ({__file__} if turns > 1 else set())

    on_ranks(2, body)


def test_a_snapshot_makes_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY, str(tmp_path / "run"))
    rescue = yafsdp_cc.Rescue(nn.Linear(1, 1), every=1)
    rescue.restore()
    rescue.step()
    rescue._wait()
    shutil.rmtree(tmp_path / "run")
    rescue.step()
    rescue._wait()
    assert [each.parent.name.partition(".")[0] for each in tmp_path.glob(f"run/*/*/{METADATA}")] == ["step-2"]
    assert rescue.restore() == 2
    rescue.close()


def test_one_checkpoint_at_the_path_is_under_way_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, under_way = files.write, []

    def slowly(file: Path, content: bytes) -> None:
        time.sleep(0.05 if "disk.saving" in str(file) else 0)
        write(file, content)

    monkeypatch.setenv(MEMORY, str(tmp_path / "memory"))
    monkeypatch.setattr(files, "write", slowly)
    rescue = yafsdp_cc.Rescue(nn.Linear(1, 1), every=1, path=tmp_path / "disk", save_every=1)
    rescue.restore()
    for _ in range(5):
        rescue.step()
        under_way.append(len(_under_way))
    rescue.close()
    assert max(under_way) <= 1


class Stateless:
    pass


MISTAKES = {
    "every=0, save_every=0: every must be 1 or more, save_every a multiple": {"every": 0},
    "every=2, save_every=3: every must be 1 or more, save_every a multiple": {"every": 2, "save_every": 3},
    r"save_every=20 needs the path of the checkpoints: Rescue\(..., path='last'\)": {"save_every": 20},
    r"loader is a Stateless, which has no state_dict\(\) and load_state_dict\(\)": {"loader": Stateless()},
    r"Rescue gives save\(\) something of its own as 'steps': choose another name": {"steps": torch.Generator()},
    "something of its own as 'asynchronous': choose another name": {"asynchronous": torch.Generator()},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_told_before_training(tmp_path: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY, str(tmp_path))
    with pytest.raises((TypeError, ValueError), match=message):
        yafsdp_cc.Rescue(nn.Linear(1, 1), **MISTAKES[message])


@pytest.mark.parametrize("shard", [yafsdp_cc.shard, fully_shard])
def test_two_sharded_models_are_given_as_one(tmp_path: Path, shard: Callable[[nn.Module], nn.Module]) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path)
        torch.manual_seed(0)
        g, d = (shard(nn.Linear(64, 64)) for _ in range(2))
        opt_g, opt_d = (torch.optim.AdamW(each.parameters()) for each in (g, d))
        given: tuple[dict[str, Any], ...] = {"D": d}, {"od": opt_d}, {"ema": nn.ModuleList([d])}
        for each in given:
            (name, value), said = *each.items(), r"give all models as one, Rescue\(nn.ModuleDict\({'g': G, 'd': D}\), "
            with pytest.raises(TypeError, match=f"{name} is a {type(value).__name__} of sharded parameters.*{said}"):
                yafsdp_cc.Rescue(g, opt_g, **each)
        ends, rescue = [], yafsdp_cc.Rescue(nn.ModuleDict({"g": g, "d": d}), [opt_g, opt_d], every=2)
        for _ in range(2):
            for step in range(rescue.restore(), 4):
                (g(torch.full((2, 64), step + 1.0)) - d(torch.ones(2, 64))).square().mean().backward()
                for optimizer in (opt_g, opt_d):
                    optimizer.step()
                    optimizer.zero_grad()
                rescue.step()
            rescue._wait()
            ends.append([each.full_tensor().detach().clone() for each in (*g.parameters(), *d.parameters())])
        assert all(map(torch.equal, *ends))

    on_ranks(2, body)


def test_other_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY, str(tmp_path))
    with pytest.raises(TypeError, match="takes a module, and was given a str"):
        yafsdp_cc.Rescue("model")  # type: ignore[arg-type]  # which is the mistake
    rescue = yafsdp_cc.Rescue(nn.Linear(1, 1), every=2)
    with pytest.raises(RuntimeError, match=r"call Rescue.restore\(\) before the first step"):
        rescue.step()
    yafsdp_cc.save(tmp_path / "foreign", nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"foreign does not tell its step, as Rescue did not save it: read it by load"):
        yafsdp_cc.Rescue(nn.Linear(1, 1), path=tmp_path / "foreign").restore()
    usage, disk_usage = namedtuple("usage", "total used free")(100, 90, 10), shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    rescue.restore()
    rescue.step()
    with pytest.raises(
        RuntimeError,
        match=r"the snapshot behind step 1 was not written: .*No space left in .* bytes are needed, and 10 were free",
    ):
        rescue.step()
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    rescue.step()  # of a program that goes on
    rescue.step()
    assert [each.parent.name.partition(".")[0] for each in tmp_path.glob("*/step-*/.metadata")] == ["step-3"]
    monkeypatch.setenv(MEMORY, "/proc/nowhere")
    with pytest.raises(ValueError, match=r"/proc/nowhere cannot be made .* needs? a memory that outlives a process"):
        yafsdp_cc.Rescue(nn.Linear(1, 1))


def test_where_memory_is_full_checkpoints_are_saved_and_a_run_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk_usage = tmp_path / "memory", shutil.disk_usage
    full = namedtuple("full", "total used free")(100, 90, 10)
    monkeypatch.setenv(MEMORY, str(memory))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: full if memory in place.parents else disk_usage(place))
    model = nn.Linear(1, 1)
    rescue = yafsdp_cc.Rescue(model, every=2, path=tmp_path / "disk", save_every=2)
    rescue.restore()
    for step in range(1, 5):
        with pytest.raises(RuntimeError, match="No space left in") if step > 1 else nullcontext():
            rescue.step()
        wait_for_saves()
        assert step == 1 or yafsdp_cc.load(tmp_path / "disk", model)["steps"] == step // 2 * 2
    rescue.close()
    following = yafsdp_cc.Rescue(model, every=2, path=tmp_path / "disk")
    assert following.restore() == 4
    following.step()
    following.close()  # with a snapshot under way


def test_ranks_with_other_settings_are_told(tmp_path: Path) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path)
        rescue = yafsdp_cc.Rescue(nn.Linear(1, 1), every=1 + dist.get_rank())
        with pytest.raises(ValueError, match="every"):
            rescue.restore()

    on_ranks(2, body)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_stages_of_a_pipeline_are_refused(tmp_path: Path, is_sharded: bool) -> None:
    """Plain stages may begin with the same values: only training tells these stages apart."""

    def body() -> None:
        os.environ[MEMORY] = str(tmp_path)
        stage = nn.Linear(8, 8)
        if is_sharded:
            yafsdp_cc.shard(stage, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))["data"])
        rescue = yafsdp_cc.Rescue(stage, every=1)
        if is_sharded:
            with pytest.raises(ValueError, match=r"the model is on 1 of 2 ranks, .* save each by save"):
                rescue.restore()
            return
        rescue.restore()
        nn.init.constant_(stage.weight, 1 + dist.get_rank())
        with pytest.raises(ValueError, match="'weight' has other values on rank 1 than on rank 0"):
            rescue.step()

    on_ranks(2, body)


def test_replicas_that_join_behind_a_restore_are_refused(tmp_path: Path) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        rescue = yafsdp_cc.Rescue(model := nn.Linear(8, 8), every=1)
        rescue.restore()
        yafsdp_cc.join_replicas(model, mesh["replicate"], Overlap())
        with pytest.raises(ValueError, match="replicas of Overlap have weights and batches of their own between"):
            rescue.step()

    on_ranks(2, body)


@pytest.mark.parametrize("snapshot", [1, 4])
def test_the_state_of_an_object_that_raises_on_one_rank_hangs_nobody(snapshot: int, tmp_path: Path) -> None:
    class Counter:
        calls = 0

        def state_dict(self) -> dict[str, int]:
            self.calls += 1
            if self.calls == snapshot and dist.get_rank() == 1:
                raise OSError("the file of the counter is gone")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    def body() -> None:
        os.environ[MEMORY] = str(tmp_path)
        rescue = yafsdp_cc.Rescue(nn.Linear(8, 8), every=1, counter=Counter())
        rescue.restore()
        for _ in range(1, snapshot):
            rescue.step()
        rescue._wait()
        whole = {each.parent.name.partition(".")[0] for each in tmp_path.glob(f"*/step-*/{METADATA}")}
        assert whole == ({"step-2", "step-3"} if snapshot > 1 else set())
        dist.barrier()
        with pytest.raises((OSError, RuntimeError, ValueError), match="the file of the counter is gone"):
            rescue.step()
        assert {each.parent.name.partition(".")[0] for each in tmp_path.glob(f"*/step-*/{METADATA}")} == whole

    on_ranks(2, body)


def test_files_go_between_ranks_in_any_pattern(tmp_path: Path) -> None:
    def body() -> None:
        rank, chance = dist.get_rank(), random.Random(5)
        folder = tmp_path / str(rank)
        folder.mkdir()
        sizes = {name: chance.choice([0, 1, 1000, 3_000_000]) for name in "abcdefghij"}
        moved = []
        for name, size in sizes.items():
            source, target = chance.sample(range(3), 2)
            moved.append(Transfer(name, size, source, target))
            if rank == source:
                (folder / name).write_bytes(random.Random(name).randbytes(size))
        group = dist.group.WORLD
        assert group is not None
        transfer(moved, folder, (group,))
        assert {each.name for each in folder.iterdir()} == {each.name for each in moved if rank in each[2:]}
        for each in moved:
            if each.target == rank:
                assert (folder / each.name).read_bytes() == random.Random(each.name).randbytes(each.size)

    on_ranks(3, body)


def test_a_copy_may_take_longer_than_the_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        monkeypatch.setattr(nodes, "TICK", 0.5)
        rank, begin = dist.get_rank(), time.monotonic()
        folder = tmp_path / str(rank)
        folder.mkdir()
        if rank == 0:
            (folder / "a").write_bytes(b"content")
        group = dist.group.WORLD
        assert group is not None
        transfer([Transfer("a", 7, 0, 1)], folder, (group,), lambda _: time.monotonic() - begin > 3)
        assert rank != 1 or (folder / "a").read_bytes() == b"content"

    on_ranks(3, body, patience=2.0)


def test_the_rank_that_does_not_come_to_a_snapshot_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        os.environ[MEMORY] = str(tmp_path)
        rescue = yafsdp_cc.Rescue(nn.Linear(1, 1), every=2)
        rescue.restore()
        is_silent, store = dist.get_rank() == 1, dist.distributed_c10d._get_default_store()
        if is_silent:
            monkeypatch.setattr(rescue, "_write", lambda *_: None)
        rescue.step()
        if is_silent:
            store.wait(["seen"])
        else:
            with pytest.raises(
                RuntimeError, match=r"the snapshot behind step 1 .*: no answer from rank 1, which has ended"
            ):
                rescue._wait()
            store.set("seen", "")

    on_ranks(2, body, patience=2.0)


def test_a_program_that_ends_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training of rank 0 communicates for good, as with a rank that has raised: the part is never sent."""

    def body() -> None:
        rank = dist.get_rank()
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "a").write_bytes(b"content")
        if rank == 1:
            ended = threading.Thread()
            monkeypatch.setattr(threading, "main_thread", lambda: ended)
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(RuntimeError, match="rank 1 ended while files were copied"):
            transfer([Transfer("a", 7, 0, 1)], folder, (group,), lambda _: False)
        transfer([], folder, (group,))  # the last snapshot of a program on one node is finished

    on_ranks(2, body)


def test_buddies_are_on_other_nodes(tmp_path: Path) -> None:
    def body() -> None:
        folder = tmp_path / str((0, 0, 0, 1, 2)[dist.get_rank()])
        folder.mkdir(exist_ok=True)
        group = dist.group.WORLD
        assert group is not None
        nodes = Nodes(folder, (group,))
        assert [nodes.buddy_of(rank) for rank in range(5)] == [3, 3, 3, 4, 0]

    on_ranks(5, body)


def test_what_a_run_has_left_is_removed_by_the_next_of_its_name() -> None:
    name = f"test-{os.getpid()}"
    alive, ended = RunMemory(name, "alive"), RunMemory(name, "ended")
    folders = {run_id: folder_of_run(name, run_id) for run_id in ("alive", "ended", "next")}
    ended.close(1)
    assert folders["ended"].is_dir()  # the launchers of other nodes may have it go on
    following = RunMemory(name, "next")
    assert [folders[each].is_dir() for each in ("alive", "ended", "next")] == [True, False, True]
    following.close(0)
    alive.close(0)
    assert not folders["alive"].parent.exists()


def test_launchers_of_one_process_id_have_folders_of_their_own() -> None:
    """The launcher of each container has the same process id, and containers may share ``/dev/shm``."""
    name = f"test-{os.getpid()}"
    launchers, folders = list[RunMemory](), list[Path]()
    for _ in range(2):
        launchers.append(RunMemory(name, ""))
        folders.append(Path(os.environ[MEMORY]))
    launchers[1].close(0)
    assert [each.is_dir() for each in folders] == [True, False]
    launchers[0].close(0)


def test_the_endpoint_of_a_run_may_have_any_length() -> None:
    name = f"test-{os.getpid()}"
    memory = RunMemory(name, f"17-/shared/{'a' * 269}")
    assert Path(os.environ[MEMORY]).is_dir()
    memory.close(0)
    assert not folder_of_run(name, "any").parent.exists()
