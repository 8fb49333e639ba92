"""Whole again: full state dicts, how much memory they take, and sharded models made plain."""

import copy
import ctypes
import gc
import re
from pathlib import Path
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor

import yafsdp_cc
from tests.checkpoint.jobs import job, same
from tests.fully_shard.programs import with_experts_on_another_mesh
from tests.models import Transformer
from tests.ranks import on_ranks, ranks
from tests.twins import whole


def plain(**kwargs):
    torch.manual_seed(0)
    return Transformer(2, **kwargs)


def mixed():
    """A model with everything in it: tied, frozen, ignored and bf16 parameters, buffers kept and not kept."""
    model = plain(tied=True)
    model.extra = nn.Linear(32, 32, dtype=torch.bfloat16)
    model.blocks[0].down.weight.requires_grad_(False)
    model.register_buffer("kept", torch.arange(3))
    model.register_buffer("dropped", torch.arange(4), persistent=False)
    model.ignored = nn.Parameter(torch.randn(5))
    return model


@pytest.mark.parametrize("world", [1, 2, 3])
@ranks("world")
def test_a_full_state_dict_is_the_unsharded_model_s(world):
    expected = {name: value.clone() for name, value in mixed().state_dict().items()}
    model = mixed()
    yafsdp_cc.shard(model, ignored_params=[model.ignored])
    full = yafsdp_cc.full_state_dict(model)
    if dist.get_rank() > 0:
        assert full == {}
        return
    assert list(full) == list(expected)
    assert {type(value) for value in full.values()} == {torch.Tensor}
    assert [value.dtype for value in full.values()] == [value.dtype for value in expected.values()]
    same(full, expected)
    assert full["head.weight"] is full["embed.weight"]
    full["kept"].zero_()
    assert model.kept.any()
    fresh = mixed()
    fresh.load_state_dict(full)


# Memory

MIB = 2**20
WIDTH, LAYERS = 2048, 8
LAYER = 4 * WIDTH * WIDTH  # 16 MiB


class Peak:
    """The most memory that this process holds while it is open, beyond what it held before; as the kernel counts it."""

    def __enter__(self):
        ctypes.CDLL(None).mallopt(-3, MIB)  # tensors come from the kernel and return to it at once
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._read("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = self._read("VmHWM") - self.before

    @staticmethod
    def _read(field):
        [kib] = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(kib) * 1024


@ranks(2, timeout=60)
def test_of_a_mesh_that_does_not_begin_with_the_lowest_rank(tmp_path):
    model = yafsdp_cc.shard(plain(), mesh=DeviceMesh("cpu", [1, 0]))
    yafsdp_cc.save_safetensors(tmp_path / "weights", model)
    full = yafsdp_cc.full_state_dict(model)
    if dist.get_rank() == 0:
        same(load_file(tmp_path / "weights" / "model.safetensors"), plain().state_dict())
        same(full, plain().state_dict())
    else:
        assert full == {}


@ranks(4)
def test_of_experts_on_another_mesh():
    """Whose small parameters, too, are divided between ranks that are not the first of the root's mesh."""
    model = with_experts_on_another_mesh(yafsdp_cc).model
    truth = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    full = yafsdp_cc.full_state_dict(model)
    assert full.keys() == (truth.keys() if dist.get_rank() == 0 else set())
    assert all(truth[name].equal(value) for name, value in full.items())


@ranks(4)
def test_of_experts_that_were_divided_by_hand(tmp_path):
    """Ranks 0 and 2 have other values under a name than 1 and 3: nothing may keep one of them for all."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64)))
    few = init_device_mesh("cpu", (2, 2), mesh_dim_names=("e", "ep"))
    yafsdp_cc.fully_shard(model[1], mesh=few["e"])
    yafsdp_cc.fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    others = r"\[1, 3\]" if dist.get_rank() in (0, 2) else r"\[0, 2\]"
    said = rf"'1.0.weight' is sharded across .*, and ranks {others} have another tensor of that name"
    for call in (
        lambda: yafsdp_cc.save(tmp_path / "saved", model),
        lambda: yafsdp_cc.save_safetensors(tmp_path / "files", model),
        lambda: yafsdp_cc.full_state_dict(model),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert not list(tmp_path.iterdir())


@ranks(2)
def test_of_replicas_that_round_otherwise(tmp_path):
    """Processors with other instructions round otherwise; and one rank alone may have a part of a tensor."""
    model = nn.Linear(64, 64)
    model.weight.data.mul_(1 + 1e-5 * dist.get_rank())
    yafsdp_cc.save(tmp_path / "plain", model)
    model.alone = nn.Parameter(distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0])), requires_grad=False)
    yafsdp_cc.save(tmp_path / "with a tensor of one rank", model)


@ranks(4)
@pytest.mark.parametrize("shard", [None, yafsdp_cc.shard, fully_shard])
def test_of_stages_of_a_pipeline(tmp_path, shard):
    """Parameters of two stages have one name and other values; a path for each stage tells them apart."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    place = mesh["pipeline"].get_local_rank()
    stages = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))[place::2]  # this rank's stages
    expected = [stage.weight.detach().clone() for stage in stages]
    for stage in stages if shard else ():
        shard(stage, mesh=mesh["data"])
    with pytest.raises(ValueError, match=r"'0\.weight' has other values on rank 2 than on rank 0"):
        yafsdp_cc.save(tmp_path / "saved", stages)
    assert not list(tmp_path.iterdir())
    if shard is yafsdp_cc.shard:
        for path, first in ((tmp_path / str(place), True), (tmp_path / "shared", place == 0)):
            if first:
                yafsdp_cc.save(path, stages[0])
            dist.barrier()
            if not first:
                with pytest.raises(ValueError, match=r"/shared was saved by ranks 0, 1 of this run, and"):
                    yafsdp_cc.save(path, stages[0])
            dist.barrier()
            if first:
                yafsdp_cc.save(path, stages[0])  # the stage's own checkpoint may be replaced
                nn.init.zeros_(stages[0].weight)
                yafsdp_cc.load(path, stages[0])
                assert whole(stages[0].weight.detach()).equal(expected[0])


def measured():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS)])
    yafsdp_cc.shard(model, units=["*"], param_init_fn=lambda module: nn.init.ones_(module.weight))
    assert yafsdp_cc.plan_of(model).owned_bytes > 0
    with Peak() as idle:
        pass
    with Peak() as peak:
        full = yafsdp_cc.full_state_dict(model)
    del full
    with Peak() as by_torch:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return idle.bytes / LAYER, peak.bytes / LAYER, by_torch.bytes / LAYER


def test_no_rank_holds_two_copies():
    (idle, first, torch_first), (_, second, torch_second) = on_ranks(2, measured)
    print(f"\nin layers, of {LAYERS}: full_state_dict {first:.2f} on rank 0, {second:.2f} on rank 1")
    print(f"torch's get_model_state_dict of the same model {torch_first:.2f} and {torch_second:.2f}")
    assert idle < 0.1
    assert LAYERS < first < LAYERS + 1.2
    assert second < 0.2


# Plain again


@ranks(2)
def test_a_sharded_model_becomes_plain():
    expected = mixed()
    model = mixed()
    model.head.weight.note = "kept"
    names = set(model.__dict__), [type(module) for module in model.modules()]
    yafsdp_cc.shard(model, ignored_params=[model.ignored])
    yafsdp_cc.register_forward_method(model.blocks[0], "forward")
    tokens = torch.arange(12).view(1, 12)
    model.blocks[1].requires_grad_(False)
    model(tokens).float().square().mean().backward()
    assert yafsdp_cc.unshard_model(model) is model
    assert (set(model.__dict__), [type(module) for module in model.modules()]) == names
    for module in model.modules():
        assert not isinstance(module, FSDPModule)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._load_state_dict_pre_hooks
        assert "forward" not in vars(module)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.note == "kept"
    assert not model.blocks[0].down.weight.requires_grad
    assert model.blocks[0].up.weight.requires_grad
    assert not model.blocks[1].up.weight.requires_grad
    same(model.state_dict(), expected.state_dict())
    model.load_state_dict(expected.state_dict(), assign=True)
    copy.deepcopy(model)


@ranks(1)
def test_methods_of_an_object_outlive_its_sharding():
    model = nn.Linear(4, 4)
    own = model.score = MethodType(lambda self, x: x @ self.weight.T, model)
    yafsdp_cc.shard(model, units=[model])
    for name in ("score", "score", "extra_repr"):
        yafsdp_cc.register_forward_method(model, name)
    expected = model.score(torch.ones(1, 4))
    assert vars(yafsdp_cc.unshard_model(model))["score"] is own
    assert "extra_repr" not in vars(model)
    assert model.score(torch.ones(1, 4)).equal(expected)


@ranks(2)
def test_sharded_again():
    """Sharded, trained, made plain, sharded anew and trained on: as if never interrupted."""
    results = []
    for interrupted in (False, True):
        model = yafsdp_cc.shard(plain())
        for step in range(4):
            if interrupted and step == 2:
                yafsdp_cc.shard(yafsdp_cc.unshard_model(model))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            tokens = torch.randint(90, (2, 12), generator=torch.Generator().manual_seed(step))
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del optimizer
        results.append(yafsdp_cc.unshard_model(model).state_dict())
    same(*results)
    first, second = (model_of(tokens) for model_of in (model, copy.deepcopy(model)))
    assert first.equal(second)


@ranks(2)
def test_on_one_rank():
    model = yafsdp_cc.shard(plain())
    yafsdp_cc.unshard_model(model, rank0_only=True, device="cpu")
    if dist.get_rank() == 0:
        same(model.state_dict(), plain().state_dict())
    else:
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert [p.shape for p in model.parameters()] == [p.shape for p in plain().parameters()]


@ranks(2)
def test_what_cannot_be_made_plain():
    model, _ = job("ours")
    with pytest.raises(ValueError, match=r"this Attention is a part of a sharded model: unshard the whole"):
        yafsdp_cc.unshard_model(model.blocks[0])
    with pytest.raises(ValueError, match=r"this Transformer is not sharded"):
        yafsdp_cc.unshard_model(plain())
    for what in (yafsdp_cc.unshard_model, yafsdp_cc.full_state_dict):
        handle = model.norm.register_forward_hook(lambda *_, what=what: what(model))
        with pytest.raises(RuntimeError, match="inside a forward or backward"):
            model(torch.zeros(1, 4, dtype=torch.long))
        handle.remove()
    small = nn.Linear(8, 8)
    yafsdp_cc.shard(small, units=[small], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    yafsdp_cc.unshard_model(small)
