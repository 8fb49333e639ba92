"""What is saved, when, and what is refused: in the background, beside the model, and where it does not fit."""

import gc
import os
import random
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import yafsdp_cc
from tests.checkpoint.jobs import contents, grouped, job, same, train
from tests.internals import kept_weights_of, mean_residuals_of
from tests.models import Transformer
from tests.ranks import on_ranks, ranks
from tests.soak import also
from tests.twins import refusal
from yafsdp_cc import Compression
from yafsdp_cc.checkpoint import files
from yafsdp_cc.checkpoint import load as load_module
from yafsdp_cc.checkpoint import ranks as ranks_module
from yafsdp_cc.checkpoint import reader as reader_module
from yafsdp_cc.checkpoint import save as save_module
from yafsdp_cc.checkpoint.ranks import ranks_of

# In the background


@ranks(2)
def test_in_the_background(tmp_path):
    model, optimizer = job("ours", steps=1)
    saves, expected = [], []
    for step in range(3):
        held = {"step": step, "list": [torch.full((3,), step)]}
        saves.append(yafsdp_cc.save(tmp_path / str(step), model, optimizer, asynchronous=True, **held))
        held["list"][0].fill_(-1)
        expected.append(contents(model, optimizer))
        train(model, optimizer, step)  # collectives of the training, while the writing goes on
    yafsdp_cc.save(tmp_path / "last", model, optimizer)
    assert all(save.done() for save in saves)  # a later save waits for the earlier ones
    for step, before in enumerate(expected):
        extra = yafsdp_cc.load(tmp_path / str(step), model, optimizer)
        assert extra["step"] == step
        assert extra["list"][0].tolist() == [step] * 3
        same(contents(model, optimizer), before)
    assert sum("yafsdp_cc.save" in thread.name for thread in threading.enumerate()) == 1


class Counting(nn.Linear):
    """Has a ``Counter`` as its extra state, which counts on in place."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen = Counter(steps=1, tokens=torch.tensor(8))

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


@ranks(2)
def test_a_counter_is_saved_as_it_is_at_the_call(tmp_path):
    model = yafsdp_cc.shard(Counting())
    saving, full = yafsdp_cc.save(tmp_path / "step", model, asynchronous=True), yafsdp_cc.full_state_dict(model)
    model.seen["steps"] += 1
    model.seen["tokens"] += 8
    saving.result()
    yafsdp_cc.load(tmp_path / "step", model)
    for found in (model.seen, full["_extra_state"] if full else model.seen):
        assert type(found) is Counter
        assert found == Counter(steps=1, tokens=8)
    assert bool(full) is (dist.get_rank() == 0)


class NormedSGD(torch.optim.SGD):
    """Keeps the norm of the last gradient, which nobody reads."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["norm"] = parameter.grad.norm()
        return super().step(closure)


@ranks(2)
def test_a_norm_that_nobody_has_read_is_reduced_before_an_asynchronous_save_goes_on(tmp_path, monkeypatch):
    """In the background the all-reduce would come among those of training."""
    all_reduce, threads = dist.all_reduce, set()
    monkeypatch.setattr(
        dist, "all_reduce", lambda *a, **b: (threads.add(threading.current_thread()), all_reduce(*a, **b))[1]
    )
    model = yafsdp_cc.shard(nn.Linear(64, 64, bias=False))
    optimizer = NormedSGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    norm = model.weight.grad.full_tensor().norm()
    saving = yafsdp_cc.save(tmp_path / "step", model, optimizer, asynchronous=True)
    saving.result()
    assert threads == {threading.main_thread()}
    yafsdp_cc.load(tmp_path / "step", model, optimizer)
    assert torch.allclose(optimizer.state[model.weight]["norm"], norm)


# Process groups


@ranks(2)
def test_process_groups_end_with_the_world(tmp_path):
    model, optimizer = job("ours", steps=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    yafsdp_cc.save(tmp_path / "step", model, optimizer)
    yafsdp_cc.load(tmp_path / "step", model, optimizer)
    groups = [weakref.ref(group) for (group,) in ranks_of(model)]
    assert [group() for group in groups] == [group for (group,) in ranks_of(model)]  # made once
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert [group() for group in groups] == [None, None]  # though the model lives
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), world), rank=rank, world_size=world)
    yafsdp_cc.save(tmp_path / "next", nn.Linear(2, 2))


@pytest.mark.parametrize("is_made_again", [False, True])
@ranks(2, fresh=True)
def test_a_save_whose_process_group_is_destroyed_meanwhile_replaces_nothing(is_made_again, tmp_path, monkeypatch):
    model, optimizer = job("ours", steps=1)
    rank, world, destroyed = dist.get_rank(), dist.get_world_size(), threading.Event()
    yafsdp_cc.save(tmp_path / "step", model, optimizer, step=1)
    before, table = contents(model, optimizer), (tmp_path / "step" / ".metadata").read_bytes()
    train(model, optimizer, 1)

    class Late(save_module.CheckpointWriter):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            destroyed.wait()  # torch's exchange of plans comes next, and takes a program without groups for one process

    monkeypatch.setattr(save_module, "CheckpointWriter", Late)
    saving = yafsdp_cc.save(tmp_path / "step", model, optimizer, asynchronous=True, step=2)
    dist.barrier()
    dist.destroy_process_group()
    make_again = partial(dist.init_process_group, "gloo", rank=rank, world_size=world)
    if is_made_again:
        make_again(store=dist.FileStore(str(tmp_path / "store"), world))
    destroyed.set()
    with pytest.raises(RuntimeError, match=r"saving .*step: destroy_process_group\(\) was called meanwhile. Wait for"):
        saving.result()
    if not is_made_again:
        make_again(store=dist.FileStore(str(tmp_path / "store"), world))
    dist.barrier()
    assert (tmp_path / "step" / ".metadata").read_bytes() == table
    assert sorted(each.name for each in tmp_path.glob("step*")) == ["step"]
    again, other = job("ours", steps=0)
    assert yafsdp_cc.load(tmp_path / "step", again, other) == {"step": 1}
    same(contents(again, other), before)


@ranks(1, fresh=True)
def test_a_single_rank_saves_on_though_its_process_group_is_made_again(tmp_path, monkeypatch):
    model, made_again = nn.Linear(2, 2), threading.Event()
    commit = files.Replacement.commit
    monkeypatch.setattr(files.Replacement, "commit", lambda self: (commit(self), made_again.wait()))
    saving = yafsdp_cc.save(tmp_path / "step", model, asynchronous=True, step=3)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made_again.set()
    saving.result()
    assert yafsdp_cc.load(tmp_path / "step", model) == {"step": 3}


@ranks(2)
def test_within_inference_mode(tmp_path):
    model, optimizer = job("ours", steps=1)
    before = contents(model, optimizer)
    with torch.inference_mode():
        yafsdp_cc.save(tmp_path / "step", model, optimizer)
    train(model, optimizer, 1)
    with torch.inference_mode():
        yafsdp_cc.load(tmp_path / "step", model, optimizer)
    same(contents(model, optimizer), before)
    train(model, optimizer, 1)


def test_a_save_at_the_exit_of_the_interpreter(tmp_path):
    program = f"""
import atexit, torch, yafsdp_cc
atexit.register(lambda: yafsdp_cc.save({str(tmp_path / "last")!r}, torch.nn.Linear(2, 2), step=2))
yafsdp_cc.save({str(tmp_path / "first")!r}, torch.nn.Linear(2, 2), asynchronous=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(yafsdp_cc.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert yafsdp_cc.load(tmp_path / "last", nn.Linear(2, 2)) == {"step": 2}


# Where the path leads


@ranks(2)
def test_links_are_followed(tmp_path):
    model, optimizer = job("ours", steps=1)
    disk = tmp_path / "disk"
    if dist.get_rank() == 0:
        disk.mkdir()
        (tmp_path / "latest").symlink_to(disk / "step", target_is_directory=True)
    dist.barrier()
    for step in range(3):
        expected = contents(model, optimizer)
        yafsdp_cc.save(tmp_path / "latest", model, optimizer, step=step)
        train(model, optimizer, step)
        assert yafsdp_cc.load(tmp_path / "latest", model, optimizer) == {"step": step}
        same(contents(model, optimizer), expected)
        assert (tmp_path / "latest").is_symlink()
        assert [each.name for each in disk.iterdir()] == ["step"]
    yafsdp_cc.save_safetensors(tmp_path / "none" / ".." / "weights", model)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "latest", "weights"]


def test_folders_that_a_user_has_named_stay(tmp_path):
    model, names = nn.Linear(2, 2), {"step", "step.previous", "step.saving", "step.saving-old", "steps.saving-1f3a90c2"}
    for name in names - {"step"}:
        yafsdp_cc.save(tmp_path / name, model)
    with pytest.raises(FileNotFoundError):
        yafsdp_cc.load(tmp_path / "step", model)
    (tmp_path / "step.saving-1f3a90c2").mkdir()  # of a save that was killed
    for _ in range(2):
        yafsdp_cc.save(tmp_path / "step", model)
    assert {each.name for each in tmp_path.iterdir()} == names
    assert all((tmp_path / name / ".metadata").exists() for name in names)


# Whose values are saved


@ranks(2)
def test_what_ranks_have_of_their_own_is_saved_from_the_first(tmp_path):
    """Running means and variances, an ignored layer and its optimizer's state: none of them is another rank's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16))
    ignored = list(model[2].parameters())
    yafsdp_cc.shard(model, ignored_params=ignored)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    own = [*model.buffers(), *ignored, *(value for each in ignored for value in optimizer.state[each].values())]
    for each in own:
        each.data.fill_(dist.get_rank() + 1)
    yafsdp_cc.save(tmp_path / "step", model, optimizer)
    yafsdp_cc.load(tmp_path / "step", model, optimizer)
    own = [*model.buffers(), *ignored, *(value for each in ignored for value in optimizer.state[each].values())]
    assert {float(value) for each in own for value in each.unique()} == {1.0}


# What goes wrong


class OfOneRank(nn.Linear):
    """Has an extra state that the second rank cannot take in, and later not give."""

    is_broken = False

    def get_extra_state(self):
        if self.is_broken and dist.get_rank() == 1:
            raise OSError("no such state")
        return 1

    def set_extra_state(self, state):
        if dist.get_rank() == 1:
            raise OSError("no such state")


@ranks(2, patience=20)
def test_what_one_rank_s_extra_state_raises_is_raised_on_all(tmp_path):
    model = yafsdp_cc.shard(OfOneRank(64, 4), sync_module_states=True)
    yafsdp_cc.save(tmp_path / "step", model)
    yafsdp_cc.save_safetensors(tmp_path / "weights", model)
    calls = [
        lambda: yafsdp_cc.load(tmp_path / "step", model),
        lambda: yafsdp_cc.load_safetensors(tmp_path / "weights", model),
        lambda: yafsdp_cc.full_state_dict(model),
    ]
    for call in calls:
        model.is_broken = call is calls[-1]
        with pytest.raises((OSError, RuntimeError, ValueError), match="no such state"):
            call()


def test_a_folder_that_a_process_works_in_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} is the working directory, .*: name a folder in it"):
        yafsdp_cc.save(".", nn.Linear(2, 2))
    yafsdp_cc.save("step", nn.Linear(2, 2))
    assert os.listdir(tmp_path) == ["step"]


@ranks(2)
def test_a_full_disk_of_one_rank(tmp_path):
    folder, largest = tmp_path / "step", 2**20
    model = yafsdp_cc.shard(nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters())
    yafsdp_cc.save(folder, model, optimizer, step=1)
    if dist.get_rank() == 1:
        # A disk that is full, for this rank alone: nothing larger can be written. A store's file is smaller, whose
        # group's threads may write to it at any time.
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    for asynchronous in (False, True):
        with pytest.raises(RuntimeError, match=r"saving .*: rank 1: .*File too large"):
            yafsdp_cc.save(folder, model, optimizer, asynchronous=asynchronous, step=2).result()
    dist.barrier()  # rank 0 clears away what was written, after all have been told
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]
    assert yafsdp_cc.load(folder, model, optimizer) == {"step": 1}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError(), KeyError("weight")], ids=repr)
@ranks(2)
def test_what_ends_the_writing_of_one_rank_is_told_to_the_others_at_once(error, tmp_path, monkeypatch):
    def fails(*_):
        raise error

    kind, told = RuntimeError, rf"saving .*: rank 1: {type(error).__name__}"
    if dist.get_rank() == 1:
        monkeypatch.setattr(save_module.CheckpointWriter, "resolve_data", fails)
        kind, told = (kind, told) if isinstance(error, Exception) else (type(error), "")
    with pytest.raises(kind, match=told):
        yafsdp_cc.save(tmp_path / "step", job("ours", steps=0)[0])
    dist.barrier()
    assert not [*tmp_path.iterdir()]


@ranks(2)
def test_saving_changes_nothing(tmp_path):
    """Saving before the first step, and an optimizer that knows some parameters only."""
    model, optimizer = job("ours")
    yafsdp_cc.save(tmp_path / "0", model, optimizer)
    assert not optimizer.state
    train(model, optimizer, 0)
    after = contents(model, optimizer)
    yafsdp_cc.load(tmp_path / "0", model, optimizer)
    assert not optimizer.state
    train(model, optimizer, 0)
    same(contents(model, optimizer), after)
    half = torch.optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9)
    half.param_groups[0]["lr"] = torch.tensor(0.5)
    train(model, half, 0)
    yafsdp_cc.save(tmp_path / "half", model, half)
    again = torch.optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9)
    yafsdp_cc.load(tmp_path / "half", model, again)
    same(contents(model, again), contents(model, half))


# Several optimizers


def two(model):
    """Optimizers of two kinds: of matrices, in two groups, and of vectors."""
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is large] for large in (True, False))
    groups = [{"params": matrices[:2], "lr": 0.02}, {"params": matrices[2:]}]
    return torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)


def trained(form, seed, steps):
    model, _ = job(form, seed)
    optimizers = two(model)
    for step in range(steps):
        for optimizer in optimizers:
            train(model, optimizer, step)
    return model, optimizers


def of_both(model, optimizers):
    return {f"{index}/{name}": each for index, o in enumerate(optimizers) for name, each in contents(model, o).items()}


@ranks(2)
def test_several_optimizers(tmp_path):
    model, optimizers = trained("ours", 0, 2)
    yafsdp_cc.save(tmp_path / "ours", model, optimizers, step=2)
    expected = of_both(model, optimizers)
    other, several = trained("fsdp2", 0, 2)  # as FSDP2's users do
    state = dict(zip(("model", "optimizer"), get_state_dict(other, several), strict=True))
    dcp.save(state, checkpoint_id=tmp_path / "fsdp2")
    for path, saved, order in [("ours", expected, 1), ("fsdp2", of_both(other, several), 1), ("ours", expected, -1)]:
        model, optimizers = trained("ours", 1, 1)
        yafsdp_cc.load(tmp_path / path, model, list(optimizers)[::order])  # the order is free: parameters have names
        same(of_both(model, optimizers), saved)

    train(model, optimizers[0], 3)
    before = of_both(model, optimizers)
    plain, half = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    for given, message in [
        (optimizers[0], r"does not fit this AdamW:\n  checkpoint's optimizer has '\S+', this one lacks it"),
        (plain, r"checkpoint's optimizer has '\S+' in group \d, this one in group 0"),
        ([plain, half], r"optimizers 0 and 1 both have 'blocks.0.norm1.weight', and a checkpoint keeps one state of"),
        (optimizers if dist.get_rank() else None, r"optimizers differs between ranks; every rank must call load\(\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            yafsdp_cc.load(tmp_path / "ours", model, given)
        same(of_both(model, optimizers), before)
    with pytest.raises(ValueError, match=r"optimizers 0 and 1 both have 'blocks.0.norm1.weight'"):
        yafsdp_cc.save(tmp_path / "both", model, [plain, half])


@ranks(1)
def test_groups_without_parameters_have_settings_of_their_own(tmp_path):
    def made(*rates):
        model = nn.Linear(4, 4)
        groups = [{"params": list(model.parameters())}, *({"params": [], "lr": rate} for rate in rates)]
        return model, torch.optim.AdamW(groups, lr=0.1)

    yafsdp_cc.save(tmp_path / "step", *made(0.5, 0.25))
    model, optimizer = made(1.0, 2.0, 3.0)
    yafsdp_cc.load(tmp_path / "step", model, optimizer)
    assert [each["lr"] for each in optimizer.param_groups] == [0.1, 0.5, 0.25, 3.0]  # the last one is new


@ranks(2)
def test_ranks_that_save_different_things(tmp_path):
    model, optimizer = job("ours", steps=1)
    if rank := dist.get_rank():
        optimizer.state.clear()
    with pytest.raises(ValueError, match=r"ranks \[0\] alone have 'optimizer.state.\S+' and \d+ more to save"):
        yafsdp_cc.save(tmp_path / "step", model, optimizer)
    with pytest.raises(ValueError, match=r"optimizers differs between ranks; every rank must call save\(\) alike"):
        yafsdp_cc.save(tmp_path / "step", model, *[optimizer][rank:])
    mine = {"left": 1, "both": 2} if rank else {"right": 1, "both": 2}  # what travels beside the model may differ
    yafsdp_cc.save(tmp_path / "step", model, **mine)
    assert yafsdp_cc.load(tmp_path / "step", model) == mine


def waits(folder, first):
    model, optimizer = job("ours")
    if not first:
        yafsdp_cc.save(folder, model, optimizer)
    if dist.get_rank() == 0:
        said = r"(?s)save\(\) is a collective, and not all ranks have called it.*no answer from rank 1, which has ended"
        with pytest.raises(RuntimeError, match=said):
            yafsdp_cc.save(folder, model, optimizer)


def waits_for_weights(folder, first):
    model, _ = job("ours")
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"full_state_dict\(\) is a collective, .* not under `if rank == 0`"):
            yafsdp_cc.full_state_dict(model)


@pytest.mark.parametrize("first", [False, also(True)])
def test_a_rank_that_does_not_save_is_waited_for_as_long_as_the_group_waits(first, tmp_path):
    for body in (waits, waits_for_weights):
        on_ranks(2, body, tmp_path / "step", first, patience=2, timeout=20)


@pytest.mark.parametrize("way", [also("saves"), "saves in the background", "loads"])
@ranks(2, patience=2, timeout=40, fresh=True)
def test_a_rank_that_stops_while_files_are_written_or_read_is_waited_for_as_long_as_the_group_waits(
    way, tmp_path, monkeypatch
):
    model, optimizer = job("ours")
    yafsdp_cc.save(tmp_path / "step", model, optimizer)
    store = dist.distributed_c10d._get_default_store()

    def stops(*_, **__):
        store.wait(["seen"])
        raise KeyboardInterrupt

    def body():
        if way == "loads":
            yafsdp_cc.load(tmp_path / "step", model, optimizer)
        else:
            yafsdp_cc.save(tmp_path / "step", model, optimizer, asynchronous="background" in way).result()

    if dist.get_rank() == 1:
        monkeypatch.setattr(save_module, "CheckpointWriter", stops)
        monkeypatch.setattr(load_module, "read_into", stops)
        with pytest.raises(KeyboardInterrupt):
            body()
    else:
        with pytest.raises(RuntimeError, match="no answer from rank 1, which has ended"):
            body()
        store.set("seen", "")


@ranks(2, patience=2, timeout=60, fresh=True)
def test_a_disk_may_take_longer_than_the_time_out(tmp_path, monkeypatch):
    """The first rank waits with its own data and with the table of contents, the second one with its part, and with
    what it reads."""
    monkeypatch.setattr(ranks_module, "TICK", 0.5)

    def wait_before(owner, name, times):
        goes_on, times = getattr(owner, name), iter([3] * times)
        monkeypatch.setattr(owner, name, lambda *args: (time.sleep(next(times, 0)), goes_on(*args))[1])

    model, optimizer = job("ours", steps=1)
    before = contents(model, optimizer)
    wait_before(files, "write", 2 - 2 * dist.get_rank())
    wait_before(save_module.CheckpointWriter, "resolve_data", dist.get_rank())
    for module in (reader_module, files):  # of tensors, and of extra files
        wait_before(module, "check_entry", dist.get_rank())
    wait_before(load_module, "CheckpointReader", dist.get_rank())
    yafsdp_cc.save(tmp_path / "step", model, optimizer, asynchronous=True).result()
    train(model, optimizer, 1)
    yafsdp_cc.load(tmp_path / "step", model, optimizer)
    same(contents(model, optimizer), before)


@ranks(2)
def test_a_rank_that_can_make_no_thread_saves_and_loads(tmp_path, monkeypatch):
    """Python 3.12 makes no thread in ``atexit`` handlers."""

    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

    model, optimizer = job("ours", steps=1)
    before = contents(model, optimizer)
    if dist.get_rank() == 1:
        monkeypatch.setattr(ranks_module, "Thread", Refused)
    yafsdp_cc.save(tmp_path / "step", model, optimizer)
    train(model, optimizer, 1)
    yafsdp_cc.load(tmp_path / "step", model, optimizer)
    same(contents(model, optimizer), before)


# Beside the model


def extras(folder):
    rank = dist.get_rank()
    model, _ = job("ours")
    kept = {
        "step": 3,
        "nested": {"a": [1, 2.5, None, True, "x", b"y", (1, 2)], 5: {"b": torch.arange(3)}},
        "random": {"torch": torch.get_rng_state(), "python": random.getstate()},
        "rank": rank,
        "parameter": nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "best": {"loss": float("nan"), "losses": torch.tensor([1.0, float("nan")])},
        "flag": True if rank else 1,  # equal to each other, as the next two are where they are broadcast or cast
        "lengths": torch.ones(1 + 2 * rank),
        "widths": torch.ones(2, dtype=(torch.float32, torch.float64)[rank]),
    }
    yafsdp_cc.save(folder, model, **kept)
    found = yafsdp_cc.load(folder, model)
    assert found.keys() == kept.keys()
    assert found["nested"]["a"] == kept["nested"]["a"]
    assert found["nested"][5]["b"].equal(torch.arange(3))
    assert found["random"]["python"] == random.getstate()
    random.setstate(found["random"]["python"])
    torch.set_rng_state(found["random"]["torch"])
    assert found["rank"] == rank


def elsewhere(folder):
    model, _ = job("ours")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = yafsdp_cc.load(folder, model)
    assert found["step"] == 3
    assert "rank" not in found
    assert found["sparse"].to_dense().equal(torch.eye(3))
    assert "best" in found  # not a number is alike on all ranks
    [message] = [str(each.message) for each in caught if "left out" in str(each.message)]
    assert "was saved by 2 ranks and is loaded by 3: flag, lengths, random, rank, widths differed between" in message


def test_each_rank_has_its_own_and_other_numbers_of_ranks_what_is_common(tmp_path):
    on_ranks(2, extras, tmp_path / "step")
    on_ranks(3, elsewhere, tmp_path / "step")


def test_random_states_of_one_rank_are_not_for_two(tmp_path):
    drawn = torch.Generator().get_state()
    all_of_them = {"torch": drawn, "python": random.getstate()}
    yafsdp_cc.save(tmp_path / "step", nn.Linear(2, 2), step=3, drawn=drawn, states=all_of_them, run={"drawn": drawn})

    def body():
        with pytest.warns(UserWarning, match="saved by 1 ranks and is loaded by 2: drawn, states is to differ between"):
            assert yafsdp_cc.load(tmp_path / "step", nn.Linear(2, 2)).keys() == {"step", "run"}

    on_ranks(2, body)
    assert yafsdp_cc.load(tmp_path / "step", nn.Linear(2, 2))["drawn"].equal(drawn)


def test_a_scheduler_s_milestones_come_back_as_they_were(tmp_path):
    def rates(saved):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5])
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5), steps], [2]
        )
        found = []
        for step in range(12):
            if saved and step == 4:
                yafsdp_cc.save(tmp_path / "step", model, optimizer, scheduler=scheduler.state_dict())
                scheduler.load_state_dict(yafsdp_cc.load(tmp_path / "step", model, optimizer)["scheduler"])
                assert type(steps.milestones) is Counter
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    assert rates(True) == rates(False)
    assert len(set(rates(True))) == 4


class Parts(nn.Module):
    """A module that is not sharded around two networks: one is sharded, and of the other the blocks are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(32, 300), nn.Linear(300, 32)) for _ in range(2)]
        compression = Compression("int4", weights="int8")
        self.one = yafsdp_cc.shard(nets[0], units=[nn.Linear], compression=compression, zero_stage=2)
        self.other = nets[1]
        for block in self.other:
            yafsdp_cc.fully_shard(block, compression="int8")

    def forward(self, x):
        return self.other(self.one(x))

    def compression(self):
        """Return what is still to be sent, and what deltas build on, by part and name."""
        parts = {"one": self.one, "other.0": self.other[0], "other.1": self.other[1]}
        found = {(name, part): each for name, model in parts.items() for part, each in mean_residuals_of(model).items()}
        return found, kept_weights_of(self.one)


def parts_trained(model, optimizer, steps):
    for step in steps:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parts_saved(folder):
    model = Parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts_trained(model, optimizer, range(3))
    yafsdp_cc.save(folder / "step", model, optimizer)
    compression = model.compression()
    parts_trained(model, optimizer, range(3, 5))
    weights = contents(model, optimizer)
    if dist.get_rank() == 0:
        torch.save((compression, weights), folder / "truth.pt")


def parts_resumed(folder):
    (residuals, kept), weights = torch.load(folder / "truth.pt")
    model = Parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    assert yafsdp_cc.load(folder / "step", model, optimizer) == {}
    for found, saved in zip(model.compression(), (residuals, kept), strict=True):
        assert len(found) == len(saved) > 0
        assert all(found[name].allclose(each, rtol=1e-5, atol=1e-9) for name, each in saved.items())
    assert all(each.any() for name, each in residuals.items() if name[1].endswith("weight"))
    if dist.get_world_size() == 2:
        parts_trained(model, optimizer, range(3, 5))
        same(contents(model, optimizer), weights)


def test_parts_of_a_module_that_is_not_sharded_have_their_compression(tmp_path):
    on_ranks(2, parts_saved, tmp_path)
    for world in (2, 3):
        on_ranks(world, parts_resumed, tmp_path)


@ranks(2)
def test_a_load_into_whole_parameters_of_a_part_is_refused(tmp_path):
    model = nn.ModuleList([yafsdp_cc.shard(nn.Linear(4, 4))])
    yafsdp_cc.save(tmp_path / "step", model)
    with yafsdp_cc.whole_parameters(model[0]):
        assert "load inside whole_parameters" in refusal(lambda: yafsdp_cc.load(tmp_path / "step", model))


class Loader:
    def state_dict(self):
        return {}


@ranks(2)
def test_what_cannot_be_saved_is_named(tmp_path):
    folder = tmp_path / "runs" / "step"
    numpy = pytest.importorskip("numpy")
    model, optimizer = job("ours")
    for extra, message in [
        ({"f": print}, r"extra\['f'\] is a builtin_function_or_method, .* running code from the file: save plain data"),
        ({"a": {"b": [1, {2}]}}, r"extra\['a'\]\['b'\]\[1\] is a set"),
        (
            {"loader": Loader()},
            r"extra\['loader'\] is a tests.checkpoint.test_save.Loader, .*: save its .state_dict\(\)",
        ),
        ({"g": torch.Generator()}, r"extra\['g'\] is a torch._C.Generator, .*: save its .get_state\(\)"),
        ({"n": numpy.ones(2)}, r"extra\['n'\] is a numpy.ndarray, .*: save torch.from_numpy"),
        ({"w": model.head.weight}, r"extra\['w'\] is a .*FlatDTensor, .* go into the checkpoint"),
        ({"d": {(1, 2): 3}}, r"extra\['d'\] has a key \(1, 2\), a tuple"),
    ]:
        with pytest.raises(TypeError, match=message):
            yafsdp_cc.save(folder, model, optimizer, **extra)
    with pytest.raises((TypeError, ValueError), match="set"):  # of one rank
        yafsdp_cc.save(folder, model, optimizer, a={1} if dist.get_rank() == 1 else 1)
    for schedule, kind in ((print, "builtin_function"), (Counter(a=1), "collections.Counter")):
        optimizer.param_groups[0]["schedule"] = schedule
        with pytest.raises(TypeError, match=rf"optimizer\['param_groups'\]\[0\]\['schedule'\] is a {kind}"):
            yafsdp_cc.save(folder, model, optimizer)
    with pytest.raises(ValueError, match=r"path differs between ranks; every rank must call save\(\) alike"):
        yafsdp_cc.save(folder / str(dist.get_rank()), model)
    folder.parent.mkdir(exist_ok=True)
    (folder.parent / "notes").mkdir(exist_ok=True)
    (folder.parent / "notes" / "todo.txt").touch()
    with pytest.raises(ValueError, match=r"notes holds 'todo.txt', which would be lost: choose another path"):
        yafsdp_cc.save(folder.parent / "notes", model)
    with pytest.raises(ValueError, match=r"todo.txt is a file: choose another path"):
        yafsdp_cc.save(folder.parent / "notes" / "todo.txt", model)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer's group 0, \[2, 2\], is none of the model's"):
        yafsdp_cc.save(folder, model, other)


@ranks(2)
def test_buffers_that_are_not_dense_are_named(tmp_path):
    def made(odd, persistent=True):
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_buffer("odd", odd, persistent=persistent)
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some kinds experimental, and others old
        kinds = [
            torch.eye(3).to_sparse(),
            torch.eye(3).to_sparse_csr(),
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        ]
        kinds += [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)]
    for odd in kinds:
        named = r"takes dense tensors, and '0.odd' is sparse, nested or quantised \(torch\.\w+\): register a dense"
        with pytest.raises(ValueError, match="sync_module_states " + named):
            yafsdp_cc.shard(made(odd), sync_module_states=True)
        torch.manual_seed(0)
        model = yafsdp_cc.shard(made(odd))
        with pytest.raises(ValueError, match="a checkpoint " + named):
            yafsdp_cc.save(tmp_path / "step", model)
        with pytest.raises(ValueError, match="save_safetensors " + named):
            yafsdp_cc.save_safetensors(tmp_path / "weights", model)
    torch.manual_seed(0)
    model = yafsdp_cc.shard(made(kinds[0], persistent=False))
    yafsdp_cc.save(tmp_path / "step", model)


class Local(torch.optim.Optimizer):
    """Steps local tensors; its momentum is made by ``make`` from the parameter."""

    def __init__(self, params, make):
        super().__init__(params, {"lr": 0.01})
        self.make = make

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["m"] = state["m"] if state else self.make(parameter)
            own = state["m"].to_local() if isinstance(state["m"], DTensor) else state["m"]
            parameter.to_local().sub_(own.mul_(0.9).add_(parameter.grad.to_local()), alpha=0.01)


@ranks(2)
def test_a_plain_tensor_of_one_rank_s_part_is_refused(tmp_path):
    for form in ("ours", "fsdp2"):
        model, _ = job(form)
        optimizer = Local(model.parameters(), lambda parameter: torch.zeros_like(parameter.to_local()))
        train(model, optimizer, 0)
        with pytest.raises(ValueError, match=r"has 'm' of 'embed.weight' \[96, 32\] as a plain tensor of"):
            yafsdp_cc.save(tmp_path / form, model, optimizer)
        model, _ = job(form)
        optimizer = Local(model.parameters(), torch.zeros_like)
        train(model, optimizer, 0)
        yafsdp_cc.save(tmp_path / form, model, optimizer)
        truth = contents(model, optimizer)
        train(model, optimizer, 1)
        yafsdp_cc.load(tmp_path / form, model, optimizer)
        same(contents(model, optimizer), truth)


@ranks(2)
def test_a_plain_number_beside_as_many_elements_as_ranks_is_saved(tmp_path):
    model = nn.Linear(8, 2)
    fully_shard(model)  # a rank has one element of the bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["count"] = torch.ones(1)
    yafsdp_cc.save(tmp_path / "step", model, optimizer)


def with_views(values):
    """A layer with buffers that nothing can be written to: a view of fewer elements, and one of inference mode."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.register_buffer("mask", values.expand(3, 4))
    with torch.inference_mode():
        model.register_buffer("scale", values + 1)
    return model


@ranks(2)
def test_buffers_that_cannot_be_written_to_are_filled(tmp_path):
    truth = torch.arange(4.0)
    saved = yafsdp_cc.shard(with_views(truth))
    yafsdp_cc.save(tmp_path / "step", saved)
    yafsdp_cc.save_safetensors(tmp_path / "weights", saved)
    for load, name in ((yafsdp_cc.load, "step"), (yafsdp_cc.load_safetensors, "weights")):
        for model in (with_views(-truth), yafsdp_cc.shard(with_views(-truth))):
            load(tmp_path / name, model)
            assert model.mask.equal(truth.expand(3, 4))
            assert model.scale.equal(truth + 1)
    model = yafsdp_cc.shard(with_views(-truth if dist.get_rank() else truth), sync_module_states=True)
    assert model.mask.equal(truth.expand(3, 4))
    assert model.scale.equal(truth + 1)


# What does not fit


@ranks(2)
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path):
    model, optimizer = job("ours", steps=1)
    yafsdp_cc.save(tmp_path / "both", model, optimizer)
    yafsdp_cc.save(tmp_path / "alone", model)
    flattened = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save(dict(zip(("model", "optimizer"), flattened, strict=True)), checkpoint_id=tmp_path / "flattened")
    dcp.save(
        dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=tmp_path / "optim"
    )

    other = Transformer(3)
    other.head = nn.Linear(32, 64, bias=True)
    other.embed = nn.Embedding(96, 32)
    yafsdp_cc.shard(other)
    before = contents(other, torch.optim.SGD(other.parameters()))
    with pytest.raises(ValueError, match="does not fit") as caught:
        yafsdp_cc.load(tmp_path / "both", other)
    for line in (
        "checkpoint has 'head.weight' [96, 32], model has [64, 32]",
        "checkpoint lacks 'blocks.2.norm1.weight' [32]",
        "and 5 more",
    ):
        assert line in str(caught.value), str(caught.value)
    same(contents(other, torch.optim.SGD(other.parameters())), before)
    smaller = yafsdp_cc.shard(Transformer(1), units="Attention")
    with pytest.raises(ValueError, match=r"checkpoint has 'blocks.1.norm1.weight' \[32\], model has no such name"):
        yafsdp_cc.load(tmp_path / "both", smaller)

    before = contents(model, optimizer)
    plain = torch.optim.AdamW(model.parameters())
    renamed = torch.optim.AdamW(model.blocks.parameters())
    sgd = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)
    sgd.add_param_group({"params": optimizer.param_groups[1]["params"]})
    matrices, vectors = (group["params"] for group in optimizer.param_groups)
    divided = torch.optim.AdamW([{"params": some} for some in (matrices[:1], matrices[1:], vectors)])
    for path, which, message in [
        ("alone", optimizer, r"alone was saved without an optimizer: load\(path, model\) reads the model alone"),
        ("both", plain, r"checkpoint's optimizer has 'blocks.0.norm1.weight' in group 1, this one in group 0"),
        ("both", divided, "checkpoint's optimizer has 2 groups of parameters, this one 3"),
        ("both", renamed, r"does not fit this AdamW:\n  checkpoint's optimizer has 'embed.weight', this one lacks it"),
        ("both", sgd, r"the state of another optimizer than SGD: it has amsgrad, betas, .*, and lacks dampening, mom"),
        ("optim", optimizer, r"optim has no 'optimizer': it holds 'optim', which load does not read"),
        ("flattened", optimizer, r"holds its optimizer flattened, as 'optimizer.state\.\S+': save it without"),
    ]:
        with pytest.raises(ValueError, match=message):
            yafsdp_cc.load(tmp_path / path, model, which)
        same(contents(model, optimizer), before)
    yafsdp_cc.load(tmp_path / "both", model, grouped(model))
