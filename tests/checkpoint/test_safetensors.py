"""Weights to safetensors that ``transformers`` loads, and back into a sharded model; with and without the model."""

import json
import resource
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import yafsdp_cc
import yafsdp_cc.checkpoint.full
import yafsdp_cc.checkpoint.ranks
import yafsdp_cc.tools.cli as cli
from tests.checkpoint.jobs import job, same, whole
from tests.models import Transformer
from tests.ranks import on_ranks, ranks
from yafsdp_cc.checkpoint.full import convert

transformers = pytest.importorskip("transformers")

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32),
}


def made(kind, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(8).view(1, 8)).logits


def to_transformers(kind, folder):
    model = yafsdp_cc.shard(made(kind))
    expected = logits(model)
    yafsdp_cc.save_safetensors(folder / "fp32", model)
    yafsdp_cc.save_safetensors(folder / "bf16", model, dtype=torch.bfloat16)
    assert logits(model).equal(expected)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        assert plain.dtype == dtype
        assert json.loads((folder / name / "config.json").read_text())["architectures"] == [type(plain).__name__]
        same(plain.state_dict(), {name: value.to(dtype) for name, value in made(kind).state_dict().items()})
    fresh = yafsdp_cc.shard(made(kind, seed=1))
    yafsdp_cc.load_safetensors(folder / "fp32", fresh)
    assert logits(fresh).equal(expected)
    yafsdp_cc.load_safetensors(folder / "bf16", fresh)
    assert whole(next(fresh.parameters())).equal(next(made(kind).parameters()).bfloat16().float())


def from_transformers(kind, folder):
    """What ``save_pretrained`` wrote, into a model that no rank ever held whole."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    yafsdp_cc.shard(model)
    yafsdp_cc.load_safetensors(folder / "theirs", model)
    assert logits(model).equal(logits(made(kind)))


@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_load_them_and_the_reverse(kind, tmp_path):
    on_ranks(1, lambda: made(kind).save_pretrained(tmp_path / "theirs"))
    on_ranks(2, to_transformers, kind, tmp_path)
    on_ranks(2, from_transformers, kind, tmp_path)


class Noted(Transformer):
    """A model with state that is no tensor."""

    def get_extra_state(self):
        return {"note": 1}

    def set_extra_state(self, state):
        raise AssertionError("there is none in the files")


def several_files(folder):
    yafsdp_cc.checkpoint.full._FILE_BYTES = 20_000
    model, _ = job("ours", tied=True)
    model.register_buffer("kept", torch.arange(3))
    yafsdp_cc.save_safetensors(folder / "step", model)
    names = sorted(file.name for file in (folder / "step").glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert all(sum(t.nbytes for t in load_file(folder / "step" / name).values()) <= 20_000 for name in names)
    index = json.loads((folder / "step" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in Transformer(2, tied=True).parameters()) + 24
    stored = {name: value for file in names for name, value in load_file(folder / "step" / file).items()}
    assert index["weight_map"].keys() == stored.keys() == model.state_dict().keys() - {"head.weight"}
    for form in ("ours", "fsdp2"):
        other, _ = job(form, seed=1, tied=True)
        other.register_buffer("kept", torch.zeros(3, dtype=torch.long))
        yafsdp_cc.load_safetensors(folder / "step", other)
        same(*({name: whole(value) for name, value in each.state_dict().items()} for each in (model, other)))
    plain = Noted(2, tied=True)
    plain.register_buffer("kept", torch.zeros(3, dtype=torch.long))
    yafsdp_cc.load_safetensors(folder / "step", plain)
    del (state := plain.state_dict())["_extra_state"]
    same(state, {name: whole(value) for name, value in model.state_dict().items()})


def test_several_files(tmp_path):
    on_ranks(2, several_files, tmp_path)
    on_ranks(3, several_files, tmp_path / "three")


@ranks(2)
def test_what_does_not_fit(tmp_path):
    model, _ = job("ours")
    if dist.get_rank() == 0:
        state = {name: value.clone() for name, value in Transformer(2).state_dict().items()}
        state["old.bias"] = torch.ones(2)
        del state["norm.bias"]
        state["head.weight"] = torch.ones(3, 3)
        save_file(state, tmp_path / "other.safetensors")
        (tmp_path / "empty").mkdir()
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "notes.txt").touch()
    dist.barrier()
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        yafsdp_cc.load_safetensors(tmp_path / "other.safetensors", model)
    for line in (
        "checkpoint has 'head.weight' [3, 3], model has [96, 32]",
        "checkpoint lacks 'norm.bias' [32]",
        "checkpoint has 'old.bias' [2], model has no such name",
    ):
        assert line in str(caught.value)
    with pytest.raises(FileNotFoundError, match="there are no safetensors at"):
        yafsdp_cc.load_safetensors(tmp_path / "empty", model)
    with pytest.raises(ValueError, match=r"full holds 'notes.txt', which would be lost: choose another path"):
        yafsdp_cc.save_safetensors(tmp_path / "full", model)
    with pytest.raises(ValueError, match="not sharded"):
        yafsdp_cc.save_safetensors(tmp_path / "plain", nn.Linear(2, 2))
    for call in (yafsdp_cc.save_safetensors, yafsdp_cc.load_safetensors):
        with pytest.raises(TypeError, match=rf"{call.__name__}\(path, model\) takes .*given \(FSDPTransformer, "):
            call(model, tmp_path / "full")


def saved(form, folder):
    model, optimizer = job(form, steps=1)
    yafsdp_cc.save(folder, model, optimizer)
    if form == "ours":
        yafsdp_cc.save_safetensors(folder.with_name("direct"), model)


def converted(folder):
    convert(folder / "ours", folder / "a")
    convert(folder / "fsdp2", folder / "b", dtype=torch.bfloat16)
    direct, ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("direct", "a", "b"))
    same(direct, ours)
    same({name: value.bfloat16() for name, value in direct.items()}, theirs)


def test_no_config_goes_beside_weights_with_the_names_of_adapters(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": nn.Linear(2, 2)})})
    yafsdp_cc.save(tmp_path / "checkpoint", model)
    with pytest.raises(ValueError, match=r"'base_model.model.weight' from_pretrained\(\) does not know"):
        convert(tmp_path / "checkpoint", tmp_path / "out", config=tmp_path / "config.json")
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "checkpoint", tmp_path / "out")
    same(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict())


@ranks(2)
def test_plain_models_on_the_meta_device(tmp_path):
    model = yafsdp_cc.shard(nn.Linear(4, 4), sync_module_states=True)
    yafsdp_cc.save_safetensors(tmp_path / "weights", model)
    yafsdp_cc.save(tmp_path / "checkpoint", model)
    for load, saved in ((yafsdp_cc.load_safetensors, "weights"), (yafsdp_cc.load, "checkpoint")):
        with torch.device("meta"):
            other = nn.Linear(4, 4)
        with pytest.raises(ValueError, match=rf"{load.__name__}: 'weight' is on the meta device.*shard\(model\), or"):
            load(tmp_path / saved, other)
        load(tmp_path / saved, other.to_empty(device="cpu"))
        assert other.weight.equal(whole(model.weight))


@ranks(2, patience=2, fresh=True)
def test_a_disk_may_take_longer_than_the_time_out(tmp_path, monkeypatch):
    monkeypatch.setattr(yafsdp_cc.checkpoint.ranks, "TICK", 0.5)
    model = nn.Linear(2, 2)
    save_file(model.state_dict(), tmp_path / f"{dist.get_rank()}.safetensors")
    fill, times = yafsdp_cc.checkpoint.full._fill, iter([3 * dist.get_rank()])
    monkeypatch.setattr(yafsdp_cc.checkpoint.full, "_fill", lambda *args: (time.sleep(next(times, 0)), fill(*args)))
    yafsdp_cc.load_safetensors(tmp_path / f"{dist.get_rank()}.safetensors", model)


@ranks(2, patience=5)
def test_what_one_rank_cannot_fill_is_refused_by_all(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    save_file(model.state_dict(), tmp_path / f"{dist.get_rank()}.safetensors")

    def fails(*_):
        raise RuntimeError("out of memory")

    if dist.get_rank() == 1:
        monkeypatch.setattr(yafsdp_cc.checkpoint.full, "_fill", fails)
    with pytest.raises((RuntimeError, ValueError)[dist.get_rank() == 0], match="out of memory"):
        yafsdp_cc.load_safetensors(tmp_path / f"{dist.get_rank()}.safetensors", model)


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    def body():
        model, _ = job("ours")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(OSError, match=f"{tmp_path} could not be written to: .*File too large"):
            yafsdp_cc.save_safetensors(tmp_path / "weights", model)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    on_ranks(1, body, fresh=True)
    assert list(tmp_path.iterdir()) == []


def test_conversion_without_the_model(tmp_path, monkeypatch, capsys):
    for form in ("ours", "fsdp2"):
        on_ranks(2, saved, form, tmp_path / form)
    on_ranks(1, converted, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    command = ["convert", "ours", "out", "--dtype=float16", "--config=config.json"]
    assert cli.main(command) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(command) == 1
    error = capsys.readouterr().err
    assert error.startswith("yafsdp-cc convert: ")
    assert "out holds 'config.json', which would be lost" in error
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}


@ranks(2)
def test_a_dtype_that_safetensors_lack(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    yafsdp_cc.shard(model)
    with pytest.raises(ValueError, match=r"'phases' is torch.complex128, which safetensors cannot hold: save it with"):
        yafsdp_cc.save_safetensors(tmp_path / "weights", model)
    assert not (tmp_path / "weights").exists()
