"""Files that want code to be run, files that are not whole, and folders that hold something else."""

import os
import pickle
import pickletools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata

import yafsdp_cc
from tests.checkpoint.jobs import in_a_process, job
from tests.ranks import on_ranks
from yafsdp_cc.checkpoint.full import convert
from yafsdp_cc.checkpoint.reader import CheckpointReader


@dataclass
class Attack:
    """Unpickled, it makes a file."""

    evidence: Path

    def __reduce__(self):
        return os.system, (f"touch {self.evidence}",)


ENCODING = metadata._MEM_FORMAT_ENCODING.__qualname__


def save(path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    yafsdp_cc.save(path, model, optimizer, step=1)


@pytest.fixture
def saved(tmp_path):
    assert in_a_process(save, tmp_path / "good") == 0
    return tmp_path / "good"


def load(path):
    model = nn.Linear(4, 4)
    before = [p.clone() for p in model.parameters()]
    try:
        return yafsdp_cc.load(path, model, torch.optim.AdamW(model.parameters()))
    except Exception:
        assert all(map(torch.equal, before, model.parameters()))
        raise


def test_a_good_one_is_read(saved):
    assert load(saved) == {"step": 1}


def rewritten(saved, change):
    table = saved / ".metadata"
    contents = pickle.loads(table.read_bytes())
    table.write_bytes(pickle.dumps(change(contents)))


@pytest.mark.parametrize("place", ["itself", "planner_data", "storage_meta", "a key"])
def test_a_table_of_contents_that_wants_code_to_be_run(saved, tmp_path, place):
    attack = Attack(tmp_path / "evidence")
    changes = {
        "itself": lambda contents: attack,
        "planner_data": lambda contents: replace(contents, planner_data={**contents.planner_data, "x": attack}),
        "storage_meta": lambda contents: replace(contents, storage_meta=metadata.StorageMeta(modules=[attack])),
        "a key": lambda contents: replace(contents, storage_data={**contents.storage_data, "x": [attack]}),
    }
    rewritten(saved, changes[place])
    for read in (load, lambda path: convert(path, tmp_path / "out")):
        with pytest.raises(pickle.UnpicklingError, match=r"\.metadata names posix\.system, which no checkpoint needs"):
            read(saved)
    assert not (tmp_path / "evidence").exists()
    pickle.loads((saved / ".metadata").read_bytes())  # plain pickle, as torch's own reader uses it
    assert (tmp_path / "evidence").exists()


@pytest.mark.parametrize("name", ["builtins eval", "torch load", "torch.serialization load"])
def test_other_names(saved, name):
    module, name = name.split()
    (saved / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(pickle.UnpicklingError, match=rf"names {module}\.{name}"):
        load(saved)


@pytest.mark.parametrize("wanted", ["ctorch\nSize\nV__reduce__\n", f"c{metadata.__name__}\n{ENCODING}\nVmro\n"])
def test_attributes(saved, wanted):
    (saved / ".metadata").write_bytes(f"cbuiltins\ngetattr\n({wanted}tR.".encode())
    with pytest.raises(pickle.UnpicklingError, match=r"names builtins\.getattr of <"):
        load(saved)


def test_an_enumeration_as_early_patches_of_python_3_11_write_it(saved):
    """By ``getattr`` of the class and the member's name."""
    table = (saved / ".metadata").read_bytes()

    class Pickler(pickle._Pickler):
        def save(self, value, save_persistent_id=True):
            if isinstance(value, metadata._MEM_FORMAT_ENCODING):
                return self.save_reduce(getattr, (type(value), value.name), obj=value)
            return super().save(value, save_persistent_id)

    with (saved / ".metadata").open("wb") as file:
        Pickler(file, 4).dump(pickle.loads(table))
    assert b"getattr" in (saved / ".metadata").read_bytes()
    load(saved)


def test_a_table_of_contents_that_changes_a_class(saved):
    before = dict(vars(metadata.Metadata))
    # Metadata, then BUILD with (None, {"version": "x", "__eq__": "y"}): setattr on the class itself.
    state = pickle.dumps((None, {"version": "x", "fresh": "y"}), protocol=0)[:-1]
    (saved / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.metadata\nMetadata\n" + state + b"b.")
    with pytest.raises(pickle.UnpicklingError, match="changes the class Metadata"):
        load(saved)
    assert dict(vars(metadata.Metadata)) == before


def test_a_table_of_contents_that_is_damaged(saved):
    table = saved / ".metadata"
    whole = table.read_bytes()
    for content in (whole[:-20], whole[: len(whole) // 2], b"", b"\x80\x04N.", b"{}"):
        table.write_bytes(content)
        with pytest.raises(ValueError, match=r"\.metadata (is damaged|holds a NoneType)"):
            load(saved)


def test_a_file_outside_of_the_folder(saved):
    def outside(contents):
        storage = {key: replace(place, relative_path="../other.distcp") for key, place in contents.storage_data.items()}
        return replace(contents, storage_data=storage)

    rewritten(saved, outside)
    with pytest.raises(ValueError, match=r"refers to '\.\./other\.distcp', which is not a file of this folder"):
        load(saved)


def with_entries(saved, content, wanted):
    """The data file with other ``content`` in place of the entries whose names contain ``wanted``."""
    contents = pickle.loads((saved / ".metadata").read_bytes())
    [name] = {place.relative_path for place in contents.storage_data.values()}
    content += b"\0" * 2000  # no shorter than what it takes the place of
    with (saved / name).open("r+b") as file:
        for key, place in contents.storage_data.items():
            if wanted in key.fqn:
                contents.storage_data[key] = replace(place, offset=file.seek(0, os.SEEK_END), length=len(content))
                file.write(content)
    (saved / ".metadata").write_bytes(pickle.dumps(contents))


@pytest.mark.parametrize("wanted", ["model.weight", "optimizer.param_groups.0.lr", "exp_avg"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_data_file_that_wants_code_to_be_run(saved, tmp_path, wanted, form):
    attack = Attack(tmp_path / "evidence")
    torch.save(attack, tmp_path / "attack")
    content = pickle.dumps(attack) if form == "pickle" else (tmp_path / "attack").read_bytes()
    with_entries(saved, content, wanted)
    model = nn.Linear(4, 4)
    with pytest.raises(pickle.UnpicklingError, match=r"(?s)loading .*good: rank 0: .*Weights only load failed"):
        yafsdp_cc.load(saved, model, torch.optim.AdamW(model.parameters()))
    assert not (tmp_path / "evidence").exists()


def test_an_extra_file_that_wants_code_to_be_run(saved, tmp_path):
    torch.save({"step": Attack(tmp_path / "evidence")}, saved / "extra_0_of_1.pt")
    with pytest.raises(ValueError, match=r"extra_0_of_1\.pt is damaged \(its CRC-32 is"):
        load(saved)
    rewritten(saved, lambda contents: replace(contents, storage_meta=None))
    with pytest.raises(pickle.UnpicklingError, match=r"extra_0_of_1\.pt: Weights only load failed"):
        load(saved)
    assert not (tmp_path / "evidence").exists()


def test_files_that_are_not_whole(saved):
    [data] = saved.glob("*.distcp")
    size = data.stat().st_size
    os.truncate(data, size - 10)
    with pytest.raises(ValueError, match=rf"__0_0\.distcp has {size - 10:,} bytes of {size:,}: .* damaged"):
        load(saved)
    data.unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing: the checkpoint is damaged"):
        load(saved)
    (saved / ".metadata").unlink()
    data.touch()
    with pytest.raises(ValueError, match=r"good is a save that never finished \(it has no \.metadata\)"):
        load(saved)


def flipped(file, after):
    """One bit is another one in ``file``, behind ``after``."""
    content = bytearray(file.read_bytes())
    content[content.index(after) + len(after) + 1] ^= 0x40
    file.write_bytes(content)


def test_a_bit_that_has_changed(saved):
    [data] = saved.glob("*.distcp")
    sound = data.read_bytes()
    weight = nn.Linear(4, 4)
    yafsdp_cc.load(saved, weight)
    flipped(data, weight.weight.detach().numpy().tobytes()[:32])
    with pytest.raises(ValueError, match=r"loading .*: rank 0: .*\.distcp, from byte .* is damaged \(its CRC-32 is"):
        yafsdp_cc.load(saved, nn.Linear(4, 4))
    data.write_bytes(sound)
    flipped(saved / "extra_0_of_1.pt", b"step")
    with pytest.raises(ValueError, match=r"extra_0_of_1\.pt is damaged"):
        load(saved)


def test_files_without_sums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        yafsdp_cc.save(tmp_path / "good", nn.Linear(4, 4), step=1)
    finally:
        torch.serialization.set_crc32_options(True)
    assert yafsdp_cc.load(tmp_path / "good", nn.Linear(4, 4)) == {"step": 1}


def test_what_is_no_checkpoint(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "step-20")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*step-30; checkpoints in .*: good, step-20"):
        load(tmp_path / "step-30")
    (tmp_path / "model.pt").touch()
    with pytest.raises(ValueError, match=r"model\.pt is a file; a checkpoint is a folder that yafsdp_cc\.save"):
        load(tmp_path / "model.pt")
    (tmp_path / "hf").mkdir()
    with pytest.raises(ValueError, match=r"hf is not a checkpoint: it has no \.metadata, but nothing"):
        load(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"hf holds safetensors: yafsdp_cc\.load_safetensors\(path, model\) reads"):
        load(tmp_path / "hf")


def test_a_checkpoint_of_another_form(tmp_path):
    for name, state in {"bare": nn.Linear(4, 4).state_dict(), "app": {"app": {"model": {"w": torch.ones(2)}}}}.items():
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    with pytest.raises(ValueError, match=r"of another form: it holds 'bias', 'weight', and no 'model'"):
        load(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"of another form: it holds 'app', and no 'model'"):
        load(tmp_path / "app")


def test_the_tables_of_today_are_read(saved, tmp_path):
    """A new name in a new torch shall be seen here."""
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "torch", no_dist=True)
    for folder, name in ((saved, "_get_layout"), (tmp_path / "torch", "PosixPath")):
        opcodes = pickletools.genops((folder / ".metadata").read_bytes())
        assert name in [argument for opcode, argument, _ in opcodes if "UNICODE" in opcode.name]
        CheckpointReader(folder)


def attacked_together(folder):
    model, optimizer = job("ours")
    yafsdp_cc.save(folder, model, optimizer)
    if dist.get_rank() == 0:
        (folder / ".metadata").write_bytes(b"cos\nsystem\n.")
    dist.barrier()
    path = folder if dist.get_rank() == 0 else folder.with_name("missing")
    with pytest.raises(pickle.UnpicklingError, match=r"rank 0: .*\.metadata names os\.system") as caught:
        yafsdp_cc.load(path, model, optimizer)
    return type(caught.value).__name__


def test_ranks_refuse_together(tmp_path):
    assert on_ranks(2, attacked_together, tmp_path / "step") == ["UnpicklingError", "UnpicklingError"]
