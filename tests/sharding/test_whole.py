"""Whole parameters, and state dicts of a sharded model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import yafsdp_cc
from tests.models import CASES, Transformer, next_token
from tests.ranks import ranks
from tests.twins import mine, same_weights, seeded, trains_on, twins, whole


@pytest.mark.parametrize("write", [False, True])
@ranks(2)
def test_whole_parameters(write: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = twins(lambda: Transformer(tied=True))
    original = seeded(lambda: Transformer(tied=True))
    batches = CASES["transformer"].batches(2)
    trains_on(model, plain, next_token, [batches])
    original.load_state_dict(plain.state_dict())
    with yafsdp_cc.whole_parameters(model, write=write), torch.no_grad():
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in plain.named_parameters()]
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name)), name
            parameter.mul_(0.5)
            plain.get_parameter(name).mul_(0.5)
    dropped = f"was written to ({len(names)} in all), and the change is dropped: pass write=True to keep it"
    assert (dropped in caplog.text) is (not write and dist.get_rank() == 0), caplog.text
    same_weights(model, plain if write else original)
    trains_on(model, plain if write else original, next_token, [batches])
    with pytest.raises(ZeroDivisionError), yafsdp_cc.whole_parameters(model, write=write):
        _ = 1 / 0
    trains_on(model, plain if write else original, next_token, [batches])


@ranks(2)
def test_a_parameter_assigned_in_whole_parameters_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """A warning without ``write``, and an error with it, tell what cannot be kept; the model trains on behind both."""
    model, plain = twins(lambda: Transformer(tied=True))
    batches = CASES["transformer"].batches(2)
    for write in (False, True):
        with yafsdp_cc.whole_parameters(model, write=write):
            for each in (model, plain) if write else (model,):
                each.embed.weight = each.head.weight = nn.Parameter(torch.sin(each.embed.weight.detach()))
                each.norm.bias = nn.Parameter(torch.ones_like(each.norm.bias), requires_grad=False)
        assert ("'embed.weight' was written to (2 in all)" in caplog.text) is (dist.get_rank() == 0)
        trains_on(model, plain, next_token, [batches])
    for replaced in (None, nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones_like(plain.embed.weight))):
        with (
            pytest.raises(RuntimeError, match=r"'embed.weight' \(1 in all\) was replaced inside whole_parameters"),
            yafsdp_cc.whole_parameters(model, write=True),
        ):
            model.embed.weight = replaced  # and not that of the head, which is tied
        trains_on(model, plain, next_token, [batches])


@ranks(2)
def test_what_is_frozen_in_whole_parameters_stays_frozen() -> None:
    model, plain = twins(Transformer)
    for on in (False, True):
        with yafsdp_cc.whole_parameters(model):
            model.blocks[0].requires_grad_(on)
        plain.get_submodule("blocks.0").requires_grad_(on)
        trains_on(model, plain, next_token, [CASES["transformer"].batches(2)])


@ranks(2)
def test_whole_parameters_are_not_made_of_whole_parameters() -> None:
    """The inner block's changes would be lost; in inference mode its copies would have no versions."""
    model, plain = twins(Transformer)
    told = r"inside whole_parameters, or after 'blocks\.0\.qkv\.weight' was replaced"
    with torch.inference_mode(), yafsdp_cc.whole_parameters(model, write=True):
        for made in (yafsdp_cc.whole_parameters(model).__enter__, lambda: yafsdp_cc.unshard_model(model)):
            with pytest.raises(RuntimeError, match=told):
                made()
        model.embed.weight.mul_(0.5)
        plain.embed.weight.mul_(0.5)
    trains_on(model, plain, next_token, [CASES["transformer"].batches(2)])
    with torch.inference_mode():
        yafsdp_cc.unshard_model(model)
    next_token(model, mine(CASES["transformer"].batches(2))).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name


@ranks(2)
def test_no_shard_is_converted_where_modules_show_whole_weights() -> None:
    """``model.to(dtype)`` inside ``whole_parameters`` or a forward would find no sharded parameter in a module."""
    model, plain = twins(Transformer)
    batches = CASES["transformer"].batches(2)
    trains_on(model, plain, next_token, [batches])
    refused = pytest.raises(RuntimeError, match=r"'blocks\.0\.\S+' is sharded on cpu .* convert what full_state_dict")
    for write in (False, True):
        with yafsdp_cc.whole_parameters(model, write=write), refused:
            model.to(torch.bfloat16)
    hook = model.blocks[0].register_forward_hook(lambda *_: model.to(torch.bfloat16))
    with refused:
        next_token(model, mine(batches))
    hook.remove()
    same_weights(model, plain)
    trains_on(model, plain, next_token, [batches])


@ranks(2)
def test_an_optimizer_made_in_whole_parameters_is_refused() -> None:
    model = seeded(Transformer)
    yafsdp_cc.shard(model)
    with yafsdp_cc.whole_parameters(model, write=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
    next_token(model, mine(CASES["transformer"].batches(2))).backward()
    with pytest.raises(
        RuntimeError, match=r"was made inside whole_parameters and holds a copy of 'embed.weight': make"
    ):
        optimizer.step()


@ranks(2)
def test_state_dict_round_trip() -> None:
    model, plain = twins(lambda: Transformer(tied=True))
    trains_on(model, plain, next_token, [CASES["transformer"].batches(2)])
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert torch.equal(whole(value), plain.state_dict()[name]), name
    other = yafsdp_cc.shard(seeded(lambda: Transformer(tied=True), seed=1))
    with torch.no_grad():
        other(mine(CASES["transformer"].batches(2))["tokens"])
    other.load_state_dict({name: value.clone() for name, value in state.items()})
    same_weights(other, plain)
    assert other.head.weight is other.embed.weight
    trains_on(other, plain, next_token, [CASES["transformer"].batches(2, 1)])


@ranks(2)
def test_full_state_dict_through_torch() -> None:
    model, plain = twins(Transformer)
    options = StateDictOptions(full_state_dict=True)
    found = get_model_state_dict(model, options=options)
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name
    other = seeded(Transformer, seed=1)
    set_model_state_dict(model, other.state_dict(), options=options)
    same_weights(model, other)
