"""Sharded parameters in torch's checkpoints and state dicts."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from tests.engine.flats import mesh_of_all, part_of, specs_of, uneven_specs_of, wholes
from tests.ranks import on_ranks
from yafsdp_cc.engine.layout import Layout, ShardSpec
from yafsdp_cc.tensor.dtensor import FlatDTensor, flat_dtensor


def named(tensors):
    return {f"w{i}": tensor for i, tensor in enumerate(tensors)}


def saved(folder, specs):
    state = named(nn.Parameter(part_of(w, spec)) for w, spec in zip(wholes(), specs(mesh_of_all()), strict=True))
    dcp.save(state, checkpoint_id=folder)


def loaded(folder, specs):
    """From a checkpoint of anything into flat tensors."""
    state = named(part_of(torch.full_like(w, -1), spec) for w, spec in zip(wholes(), specs(mesh_of_all()), strict=True))
    dcp.load(state, checkpoint_id=folder)
    for flat, whole in zip(state.values(), wholes(), strict=True):
        assert flat.full_tensor().equal(whole)


def saved_plain(folder):
    dcp.save(named(wholes()), checkpoint_id=folder)


def loaded_plain(folder):
    state = named(torch.full_like(whole, -1) for whole in wholes())
    dcp.load(state, checkpoint_id=folder)
    assert all(x.equal(whole) for x, whole in zip(state.values(), wholes(), strict=True))


def fsdp2():
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), mesh=mesh_of_all())


def saved_fsdp2(folder):
    dcp.save(fsdp2().state_dict(), checkpoint_id=folder)


def flat_of_fsdp2():
    full = get_model_state_dict(fsdp2(), options=StateDictOptions(full_state_dict=True))
    world = dist.get_world_size()
    return full, {
        name: ShardSpec(
            name,
            whole.shape,
            mesh_of_all(),
            Layout.of([whole.shape], world).bounds(Layout.of([whole.shape], world).extents[0]),
        )
        for name, whole in full.items()
    }


def loaded_from_fsdp2(folder):
    full, specs = flat_of_fsdp2()
    state = {name: part_of(torch.zeros_like(whole), specs[name]) for name, whole in full.items()}
    dcp.load(state, checkpoint_id=folder)
    assert all(state[name].full_tensor().equal(whole) for name, whole in full.items())


def saved_for_fsdp2(folder):
    full, specs = flat_of_fsdp2()
    dcp.save({name: part_of(whole + 1, specs[name]) for name, whole in full.items()}, checkpoint_id=folder)


def loaded_into_fsdp2(folder):
    model = fsdp2()
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    dcp.load(state := model.state_dict(), checkpoint_id=folder)
    assert all(state[name].full_tensor().equal(whole + 1) for name, whole in before.items())


def saved_in_the_background(folder):
    mesh = mesh_of_all()
    buffer = torch.cat([torch.randn(5), wholes()[0].reshape(-1)])
    state = {"w0": flat_dtensor(buffer[5:], ShardSpec("w0", torch.Size([12, 9]), mesh, (0, 108)))}
    dcp.async_save(state, checkpoint_id=folder).result()
    state["w0"].zero_()
    dcp.load(state, checkpoint_id=folder)
    assert state["w0"].full_tensor().equal(wholes()[0])


def test_a_checkpoint_saved_in_the_background(tmp_path):
    on_ranks(1, saved_in_the_background, tmp_path)


def norms_saved_and_loaded(folder):
    """An optimizer may keep norms in its state, as NovoGrad does."""
    [weight, *_] = [part_of(w, spec) for w, spec in zip(wholes(), specs_of(mesh_of_all()), strict=True)]
    state = {"unread": weight.norm(), "kept": weight.norm() * 0.5}
    expected = [norm.item() for norm in (weight.norm(), weight.norm() * 0.5)]
    dcp.save(state, checkpoint_id=folder)
    state = {"unread": weight.mul(2).norm(), "kept": weight.mul(3).norm() + 1}
    dcp.load(state, checkpoint_id=folder)
    assert [norm.item() for norm in state.values()] == pytest.approx(expected)


def test_norms_in_a_checkpoint(tmp_path):
    on_ranks(2, norms_saved_and_loaded, tmp_path)


def test_checkpoints_travel_between_worlds_and_bounds(tmp_path):
    on_ranks(2, saved, tmp_path / "flat", uneven_specs_of)
    on_ranks(1, loaded, tmp_path / "flat", specs_of)
    on_ranks(3, loaded, tmp_path / "flat", specs_of)
    on_ranks(1, loaded_plain, tmp_path / "flat")
    on_ranks(1, saved_plain, tmp_path / "plain")
    on_ranks(2, loaded, tmp_path / "plain", uneven_specs_of)


def test_checkpoints_travel_to_fsdp2_and_back(tmp_path):
    on_ranks(2, saved_fsdp2, tmp_path / "theirs")
    on_ranks(2, loaded_from_fsdp2, tmp_path / "theirs")
    on_ranks(3, saved_for_fsdp2, tmp_path / "ours")
    on_ranks(2, loaded_into_fsdp2, tmp_path / "ours")


def state_dicts():
    mesh = mesh_of_all()
    model = nn.Linear(6, 5)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in list(model.named_parameters()):
        numel = parameter.numel()
        spec = ShardSpec(name, parameter.shape, mesh, (0, numel // 3, numel))
        setattr(model, name, nn.Parameter(part_of(parameter.detach(), spec)))
        getattr(model, name).grad = part_of(torch.ones_like(parameter.detach()), spec)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(full[name].equal(p.full_tensor()) for name, p in model.named_parameters())
    moments = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert moments["state"]["weight"]["exp_avg"].shape == (5, 6)
    set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    assert all(p.full_tensor().equal(whole[name]) for name, p in model.named_parameters())
    sharded = get_model_state_dict(model)
    assert type(sharded["weight"]) is FlatDTensor
    offloaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return sorted(offloaded)


def test_model_and_optimizer_state_dicts():
    assert on_ranks(2, state_dicts) == [["bias", "weight"], []]
