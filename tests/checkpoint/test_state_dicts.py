"""torch's own ``get_*_state_dict`` and ``set_*_state_dict`` in every option, held against FSDP2's."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import yafsdp_cc
from tests.checkpoint.jobs import contents, job, same, train, whole
from tests.ranks import on_ranks
from yafsdp_cc.tensor.dtensor import FlatDTensor


def flat(state, name=""):
    """Leaves of a nested state dict by their paths."""
    if isinstance(state, (dict, list)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {path: leaf for key, value in items for path, leaf in flat(value, f"{name}/{key}").items()}
    return {name: state}


def alike(ours, theirs):
    ours, theirs = flat(ours), flat(theirs)
    for name in ours.keys() & theirs.keys():
        assert isinstance(ours[name], DTensor) == isinstance(theirs[name], DTensor) or not ours[name].dim(), name
    same(
        *({name: whole(x) if isinstance(x, torch.Tensor) else x for name, x in each.items()} for each in (ours, theirs))
    )


def frozen(form):
    """One step in, with a block that is not trained any more."""
    model, optimizer = job(form, steps=1)
    model.blocks[0].requires_grad_(False)
    return model, optimizer


def gets():
    ours, theirs = frozen("ours"), frozen("fsdp2")
    for full, offload, ignore, flatten in itertools.product((False, True), repeat=4):
        options = StateDictOptions(
            full_state_dict=full, cpu_offload=offload, ignore_frozen_params=ignore, flatten_optimizer_state_dict=flatten
        )
        alike(*(get_model_state_dict(model, options=options) for model, _ in (ours, theirs)))
        # Both need groups in which nothing is frozen for a flattened state; so every one has state.
        alike(*(get_optimizer_state_dict(*each, options=options) for each in (ours, theirs)))
    for keep in (False, True):
        options = StateDictOptions(keep_submodule_prefixes=keep)
        parts = [get_model_state_dict(m, submodules={m.blocks[1]}, options=options) for m, _ in (ours, theirs)]
        alike(*parts)


def test_getting():
    on_ranks(2, gets)


def sets():
    source = job("fsdp2", steps=2)
    expected = contents(*source)
    for full, broadcast, flatten in [
        (False, False, False),
        (False, False, True),
        (True, False, False),
        (True, True, False),
    ]:
        given = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flatten)
        options = StateDictOptions(
            full_state_dict=full, broadcast_from_rank0=broadcast, flatten_optimizer_state_dict=flatten
        )
        model, optimizer = job("ours", seed=1)
        origin = source if full else job("ours", steps=2)
        weights = get_model_state_dict(origin[0], options=given)
        moments = copy.deepcopy(get_optimizer_state_dict(*origin, options=given))  # "step" is the optimizer's own
        if broadcast and dist.get_rank() > 0:
            weights, moments = {}, {}
        set_model_state_dict(model, weights, options=options)
        set_optimizer_state_dict(model, optimizer, moments, options=options)
        same(contents(model, optimizer), contents(*origin))
        if not full:
            continue
        same(contents(model, optimizer), expected)
        assert {type(v) for s in optimizer.state.values() for k, v in s.items() if k != "step"} == {FlatDTensor}
        train(model, optimizer, 2)


def patched_once():
    def patched():
        states = torch.distributed.checkpoint.state_dict
        utils = torch.distributed._state_dict_utils
        return [utils._distribute_tensors, states._broadcast_state_dict, states._distribute_state_dict]

    before = patched()
    assert all(one.__module__ == "torch.distributed._state_dict_utils" for one in before)
    assert not any(hasattr(one, "__wrapped__") for one in before)
    job("ours")
    after = patched()
    assert [one.__wrapped__ for one in after] == before
    yafsdp_cc.patch_torch()
    assert patched() == after


def test_torch_is_patched_when_a_model_is_sharded_and_once():
    on_ranks(1, patched_once)


def sliced():
    model, _ = job("ours")
    weight = model.head.weight
    with pytest.raises(NotImplementedError, match=r"'head.weight'.*sharded by flat ranges: write to it with .copy_"):
        compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)


def test_a_flat_range_is_no_slice():
    on_ranks(2, sliced)


def torch_cannot():
    """Setting what is flattened and whole: so it is with FSDP2 too."""
    for form, broadcast in itertools.product(("fsdp2", "ours"), (False, True)):
        options = StateDictOptions(
            full_state_dict=True, flatten_optimizer_state_dict=True, broadcast_from_rank0=broadcast
        )
        each = job(form, steps=1)
        moments = get_optimizer_state_dict(*each, options=options)
        if broadcast and dist.get_rank() > 0:
            moments = {}
        with pytest.raises(KeyError):
            set_optimizer_state_dict(*each, moments, options=options)


def test_setting():
    on_ranks(2, torch_cannot)
    on_ranks(2, sets)
    on_ranks(3, sets)


class Scalar(nn.Module):
    """With a parameter without dimensions, which FSDP2 refuses."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(())), nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x) * self.scale


def scalars():
    torch.manual_seed(0)
    model = Scalar()
    yafsdp_cc.shard(model, units=[model.linear])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(1, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = contents(model, optimizer)
    full = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=full)
    moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=full))  # "step" is the optimizer's own
    step()
    after = contents(model, optimizer)
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        empty = broadcast and dist.get_rank() > 0
        set_model_state_dict(model, {} if empty else dict(weights), options=options)
        set_optimizer_state_dict(model, optimizer, {} if empty else copy.deepcopy(moments), options=options)
        same(contents(model, optimizer), before)
        step()
        same(contents(model, optimizer), after)


def test_parameters_without_dimensions():
    on_ranks(2, scalars)


def strictly():
    model, _ = job("ours")
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    del weights["norm.weight"]
    weights["head.weight"] = torch.zeros_like(weights["head.weight"])
    for broadcast in (False, True):
        options = {"full_state_dict": True, "broadcast_from_rank0": broadcast}
        given = {} if broadcast and dist.get_rank() > 0 else weights
        if not broadcast:  # torch itself fills up what every rank lacks
            with pytest.raises(RuntimeError, match=r"Missing key.*norm\.weight"):
                model.load_state_dict(given, strict=True)
        set_model_state_dict(model, dict(given), options=StateDictOptions(strict=False, **options))
        assert not whole(model.head.weight).any()


def test_strict():
    on_ranks(2, strictly)


def shards_for_a_broadcast():
    model, _ = job("ours")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(ValueError, match=r"whole tensors, and '.*' is sharded: pass what get_model_state_dict\(model"):
        set_model_state_dict(model, model.state_dict(), options=options)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    given = model.state_dict() if dist.get_rank() > 0 else full  # torch looks at rank 0's alone
    set_model_state_dict(model, given, options=options)


def test_shards_are_not_broadcast():
    on_ranks(2, shards_for_a_broadcast)


class Layouts(nn.Module):
    """A model whose weights need not lie in memory in the order of their rows."""

    def __init__(self, channels_last=False, transposed=False):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(8, 64, 3), nn.Linear(32, 64)
        if channels_last:
            self.to(memory_format=torch.channels_last)
        if transposed:
            self.linear.weight = nn.Parameter(self.linear.weight.detach().t().contiguous().t())

    def forward(self, x):
        return self.linear(self.conv(x).mean((2, 3)).view(-1, 32))


def layouts():
    torch.manual_seed(0)
    plain = Layouts(channels_last=True, transposed=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(torch.randn(2, 8, 5, 5)).square().mean().backward()
    optimizer.step()
    weights, moments = copy.deepcopy((plain.state_dict(), get_optimizer_state_dict(plain, optimizer)))
    assert not weights["conv.weight"].is_contiguous()
    assert not moments["state"]["linear.weight"]["exp_avg"].is_contiguous()
    model = yafsdp_cc.shard(Layouts(), sync_module_states=True)
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = ({}, {}) if dist.get_rank() else (weights, moments)
    set_model_state_dict(model, given[0], options=options)
    set_optimizer_state_dict(model, ours, given[1], options=options)
    same(contents(model, ours), contents(plain, optimizer))


def test_rank_0_s_order_in_memory_is_not_broadcast():
    on_ranks(2, layouts)
