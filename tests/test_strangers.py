"""Parameters that come into a model after it was sharded are named, whenever they come and however it was sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import yafsdp_cc
from tests.ranks import ranks

WIDTH = 32


def by_shard() -> Any:
    return yafsdp_cc.shard(plain(), units=[nn.Sequential])


def by_fully_shard() -> Any:
    model = plain()
    for block in model[:2]:
        yafsdp_cc.fully_shard(block)
    yafsdp_cc.fully_shard(model)
    return model


def plain() -> Any:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH, bias=False))


def appended(model: Any) -> None:
    model.append(nn.Linear(WIDTH, WIDTH))


def replaced(model: Any) -> None:
    model[2] = nn.Linear(WIDTH, WIDTH)


def wrapped(model: Any) -> None:
    model[1][1] = nn.Sequential(model[1][1], nn.Linear(WIDTH, WIDTH))


def inserted(model: Any) -> None:
    model.insert(1, nn.Linear(WIDTH, WIDTH))


def registered(model: Any) -> None:
    model[0].scale = nn.Parameter(torch.ones(WIDTH))


def filled(model: Any) -> None:
    model[2].bias = nn.Parameter(torch.ones(WIDTH))


def unfrozen(model: Any) -> None:
    model[0].scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    run(model)  # nothing to train, nothing to synchronise
    model[0].scale.requires_grad_(True)


NAMES: dict[Callable[[Any], None], str] = {
    appended: r"'3.weight' \(and 1 more\)",
    replaced: r"'2.weight' \(and 1 more\)",
    wrapped: r"'1.1.1.weight' \(and 1 more\)",
    inserted: r"'1.weight' \(and 1 more\)",
    registered: "'0.scale'",
    filled: "'2.bias'",
    unfrozen: "'0.scale'",
}


def run(model: Any) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()


def nothing(model: Any) -> None:
    pass


def assembled_anew(model: Any) -> None:
    run(model)
    model.set_reshard_after_forward(False)


OTHERS = nothing, assembled_anew


@pytest.mark.parametrize("shard", [by_shard, by_fully_shard])
@ranks(2)
def test_they_are_named(shard: Callable[[], Any]) -> None:
    afterwards = [(add, run) for add in NAMES] + [(add, before) for add in (replaced, registered) for before in OTHERS]
    for add, before in afterwards:
        model = shard()
        before(model)
        add(model)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{NAMES[add]} was added after sharding.*first, then call shard"):
                run(model)


@pytest.mark.parametrize("before", OTHERS)
@pytest.mark.parametrize("shard", [by_shard, by_fully_shard])
@ranks(2)
def test_a_write_of_a_shard_into_them_names_them(shard: Callable[[], Any], before: Callable[[Any], None]) -> None:
    """PEFT's ``add_adapter`` makes them, and TRL's trainers fill them with the weights of the trained adapter."""
    model = shard()
    before(model)
    registered(model)
    added, weight, bias = model[0].scale.data, model[0][0].weight.data, model[0][0].bias.data
    for write in (lambda: added.copy_(bias), lambda: torch._foreach_copy_([weight, added], [weight, bias])):
        with pytest.raises(
            NotImplementedError, match=r"into a plain tensor .*bias'.* is '0.scale', .*first, then call"
        ):
            write()
    with pytest.raises(NotImplementedError, match=r"of another model.*average of weights, shard that model, too"):
        plain()[0][0].weight.data.mul_(0.5).add_(weight, alpha=0.5)


@ranks(2)
def test_between_two_calls_and_what_may_stay() -> None:
    model = plain()
    yafsdp_cc.fully_shard(model[0])
    registered(model)
    yafsdp_cc.fully_shard(model)
    with pytest.raises(ValueError, match=r"'0.scale' was added after sharding"):
        run(model)

    model = plain()
    ignored = model[0][0].weight
    yafsdp_cc.fully_shard(model[0], ignored_params={ignored})
    yafsdp_cc.fully_shard(model)
    run(model)
    with pytest.raises(NotImplementedError, match=r"'1.0.weight'.*if that is of another model.*else call .full_tensor"):
        ignored.data.copy_(model[1][0].weight.data)
    model[2] = nn.Identity()  # what is gone leaves nothing to be trained
    model[1][1] = nn.Tanh()
    run(model)
    model.set_reshard_after_forward(False)
    run(model)
    assert model[0][0].weight is ignored
    assert ignored.grad is not None
    model[0][0].weight = nn.Parameter(ignored.detach().clone())
    with pytest.raises(ValueError, match=r"'0.0.weight' was added"):
        run(model)
