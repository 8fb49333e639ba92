"""Checkpoints that are damaged, mixed up or do not agree with themselves, and disks that are full.

Either the same values are loaded, or one error on all ranks names the file, and nothing has changed.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

import yafsdp_cc
from tests.checkpoint.jobs import in_a_process
from tests.ranks import on_ranks, ranks
from tests.soak import also
from yafsdp_cc.ranks.checks import all_gather_objects

SAMPLE = {1: 60, 2: 15}
"""Bits of each file that ``make test`` flips, by the number of ranks."""


class Momentum(torch.optim.Optimizer):
    """Has few settings: each takes a kilobyte."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 7.0})


def small(shards: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of one matrix and one vector, and an optimizer with state, all of it 7."""
    model = nn.Sequential(nn.Linear(17, 17))
    if shards:
        yafsdp_cc.shard(model, units=[nn.Linear])
    optimizer = Momentum(model.parameters())
    reset(model, optimizer)
    return model, optimizer


def reset(model: nn.Module, optimizer: torch.optim.Optimizer, value: float = 7.0) -> None:
    optimizer.param_groups[0]["lr"] = value
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(value + number)
            optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, value + 10 + number)}


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        [byte] = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def saved(folder: Path, by_torch: bool, shards: bool) -> None:
    model, optimizer = small(shards)
    reset(model, optimizer, 3.0)
    if by_torch:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder, no_dist=not shards)
    else:
        yafsdp_cc.save(folder, model, optimizer, step=3)


def own(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What this rank holds of everything."""
    tensors = [each for p in model.parameters() for each in (p.detach(), *optimizer.state[p].values())]
    found = [getattr(each, "_local_tensor", each).clone() for each in tensors]
    return [*found, torch.tensor(optimizer.param_groups[0]["lr"])]


def all_survive(folder: Path, by_torch: bool, every: bool, shards: bool) -> None:
    saved(folder, by_torch, shards)
    group = (dist.group.WORLD,) if shards else ()
    changes = not shards or dist.get_rank() == 0
    model, optimizer = small(shards)
    before, sample, errors = own(model, optimizer), SAMPLE[2 if shards else 1], 0
    extra = yafsdp_cc.load(folder, model, optimizer)
    loaded = own(model, optimizer)
    assert extra == ({} if by_torch else {"step": 3})
    assert all(each.eq(3 + offset).all() for each, offset in zip(loaded, (0, 10, 1, 11, 0), strict=True))
    for file in sorted(folder.iterdir()):
        bits = range(8 * file.stat().st_size)
        for bit in bits if every else random.Random(file.name).sample(bits, sample):
            if changes:
                flip(file, bit)
            reset(model, optimizer)
            all_gather_objects(None, group)
            where = f"bit {bit % 8} of byte {bit // 8} of {file.name}"
            outcome, expected, error = "equal", loaded, None
            try:
                assert yafsdp_cc.load(folder, model, optimizer) == extra, where
            except Exception as refusal:
                outcome, expected, error = type(refusal).__name__, before, refusal
                errors += 1
            if error is not None:
                assert isinstance(error, (ValueError, pickle.UnpicklingError) if by_torch else ValueError), where
                assert str(folder if by_torch else file) in str(error), f"{where}: {error}"
            assert all(map(torch.equal, own(model, optimizer), expected)), f"{where}: {outcome}"
            assert len(set(all_gather_objects(outcome, group))) == 1, f"{where}: {outcome}"
            if changes:
                flip(file, bit)
    assert errors > sample


@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("every", [False, also(True)])
@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_flipped_bit_is_named_or_changes_nothing(world, by_torch, every, tmp_path):
    on_ranks(world, all_survive, tmp_path / "step", by_torch, every, world > 1, timeout=10_000.0)


# Files that are whole, each by itself, and do not belong together


def refused(folder: Path, match: str, shards: bool = False, kind: type[Exception] = ValueError) -> None:
    model, optimizer = small(shards)
    before = own(model, optimizer)
    with pytest.raises(kind, match=match):
        yafsdp_cc.load(folder, model, optimizer)
    assert all(map(torch.equal, own(model, optimizer), before))


@ranks(2)
def test_ranks_that_load_different_saves(tmp_path):
    rank = dist.get_rank()
    for step in (1, 2):
        model, optimizer = small(shards=True)
        reset(model, optimizer, step)
        yafsdp_cc.save(tmp_path / f"step-{step}", model, optimizer, step=step)
    refused(
        tmp_path / f"step-{rank + 1}", r"different checkpoints.*\n  rank 0: .*step-1, .*\n  rank 1: .*step-2, ", True
    )
    disk = tmp_path / f"disk-{rank}" / "latest"  # equal contents at different paths are one checkpoint
    shutil.copytree(tmp_path / "step-1", disk)
    assert yafsdp_cc.load(disk, *small(shards=True)) == {"step": 1}
    if rank == 1:
        flip(disk / "__1_0.distcp", 5000)
    refused(disk, r"rank 1: .*disk-1/latest/__1_0\.distcp, from byte .* is damaged", True)
    if rank == 1:
        shutil.rmtree(disk)
    refused(disk, r"rank 1: there is no checkpoint .*disk-1/latest", True)  # no FileNotFoundError: there is one
    refused(tmp_path / "none", r"there is no checkpoint", True, FileNotFoundError)
    shutil.copytree(tmp_path / "step-1", disk, dirs_exist_ok=True)
    contents = pickle.loads((disk / ".metadata").read_bytes())
    contents.storage_meta = None  # the number of extra files is unknown, as in a checkpoint of torch
    (disk / ".metadata").write_bytes(pickle.dumps(contents))
    for file in disk.glob("extra_*"):
        if rank == 1:
            file.unlink()
    refused(disk, r"different checkpoints.*\n  rank 0: .*, 2 extra files\n  rank 1: .*, 0 extra files", True)
    dist.barrier()
    for file in ("__1_0.distcp", "extra_1_of_2.pt"):
        if rank == 0:
            shutil.copy(tmp_path / "step-2" / file, tmp_path / "step-1" / file)
        dist.barrier()
        refused(tmp_path / "step-1", rf"step-1/{file}.* is damaged \(its CRC-32 is", True)
    if rank == 0:
        for file in (tmp_path / "step-2").glob("extra*"):
            file.unlink()
    dist.barrier()
    refused(tmp_path / "step-2", r"step-2/extra_[01]_of_2\.pt cannot be read \(.*No such file", True)


def changed(contents, how):
    weight, moment = "model.0.weight", "optimizer.state.0.weight.momentum_buffer"
    stored, entries = contents.state_dict_metadata, contents.storage_data
    [chunk] = stored[weight].chunks
    if how == "moved":
        stored[weight].chunks[:] = [replace(chunk, offsets=torch.Size([1, 0]))]
    elif how == "smaller":
        stored[weight].chunks[:] = [replace(chunk, sizes=torch.Size([16, 17]))]
    elif how == "twice":
        stored[weight].chunks.append(chunk)
    elif how == "none":
        del entries[MetadataIndex(weight, [0, 0])]
    elif how == "shared":
        entries[MetadataIndex(weight, [0, 0])] = entries[MetadataIndex(moment, [0, 0])]
    elif how == "swapped":
        one, other = MetadataIndex(weight, [0, 0]), MetadataIndex("model.0.bias", [0])
        entries[one], entries[other] = replace(entries[other], length=entries[one].length), entries[one]
    elif how == "renamed":
        contents.planner_data[weight] = ("model", "0.bias")
    elif how == "larger":
        stored[weight].size = chunk.sizes = torch.Size([17, 2**40])


CHANGES = {
    "moved": "chunks of 'model.0.weight' do not make up its",
    "smaller": "chunks of 'model.0.weight' do not make up its",
    "twice": "chunks of 'model.0.weight' do not make up its",
    "none": "KeyError: ",
    "shared": "two entries share byte",
    "swapped": "",
    "renamed": "lists 'model.0.weight' in one place only",
    "larger": "bytes do not hold",
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_table_of_contents_without_a_sum_agrees_with_itself(tmp_path):
    def body():
        saved(tmp_path / "good", by_torch=True, shards=False)
        table = (tmp_path / "good" / ".metadata").read_bytes()
        for how, message in CHANGES.items():
            contents = pickle.loads(table)
            changed(contents, how)
            (tmp_path / "good" / ".metadata").write_bytes(pickle.dumps(contents))
            refused(tmp_path / "good", rf"good/(\.metadata|__0_0\.distcp).* is damaged \(.*{message}")
        for step, value in enumerate((torch.ones(17, 1), torch.ones(3, 3))):  # a factor that repeats, and nonsense
            model, optimizer = small(shards=False)
            optimizer.state[model[0].weight]["momentum_buffer"] = value
            yafsdp_cc.save(tmp_path / str(step), model, optimizer)
        yafsdp_cc.load(tmp_path / "0", *small(shards=False))
        refused(tmp_path / "1", r"optimizer has \[3, 3\] as 'momentum_buffer' of '0.weight', which is \[17, 17\]")

    assert in_a_process(body) == 0


# A full disk


def full(folder: Path) -> int:
    """Save on a file system of 256 kB, in namespaces of this process's own."""
    uid, gid, libc = os.getuid(), os.getgid(), ctypes.CDLL(None)
    if libc.unshare(0x10000000 | 0x00020000):  # CLONE_NEWUSER, CLONE_NEWNS
        return 77
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=256k"):
        return 77
    yafsdp_cc.save(folder / "step", nn.Linear(17, 17), step=1)
    usage, message = shutil.disk_usage, r"No space left in {}: ([\d,]+) bytes are needed, and ([\d,]+) were free"
    with pytest.raises(RuntimeError, match=message.format(folder)):  # known before anything is written
        yafsdp_cc.save(folder / "step", nn.Linear(300, 300))
    # The disk is really full; only the forecast is taken away, as on file systems that tell no size (total 0), so that
    # the error is what the kernel raises while the file is written.
    shutil.disk_usage = lambda path: usage(path)._replace(total=0)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=message.format(folder)):  # a file system that does not tell
        yafsdp_cc.save(folder / "step", nn.Linear(300, 300))
    with pytest.raises(RuntimeError, match=message.format(folder)):
        yafsdp_cc.save(folder / "step", nn.Linear(17, 17), text="x" * 300_000)
    assert [each.name for each in folder.iterdir()] == ["step"]
    assert yafsdp_cc.load(folder / "step", nn.Linear(17, 17)) == {"step": 1}
    return 0


def test_a_full_disk_says_what_is_free_and_what_is_needed(tmp_path):
    if (status := in_a_process(full, tmp_path)) == 77:
        pytest.skip("no user namespaces here")  # without one, only root could mount a disk small enough to fill
    assert status == 0
