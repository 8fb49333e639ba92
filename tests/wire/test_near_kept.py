"""When near ranks are told exactly, what cannot be told at all, and what a checkpoint has of what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import yafsdp_cc
from tests.ranks import on_ranks
from tests.soak import also
from tests.wire.changes import BF16, is_exact, masters, told, train, writes
from tests.wire.near import look, near, same, seen, whole
from yafsdp_cc import Compression
from yafsdp_cc.engine.module import root_of

# When it holds, and when weights are gathered exactly


def changed_otherwise() -> None:
    model = near(mp_policy=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writers = writes(model)

    assert is_exact(model, look(model))
    for change in writers:
        for step in range(2):
            train(model, optimizer, step)
        assert not is_exact(model, look(model))
        true = masters(model)["2.weight"]
        with yafsdp_cc.whole_parameters(model):
            assert model[2].weight.equal(true)
        change()
        assert look(model)["2.weight"].equal(masters(model)["2.weight"].bfloat16()), change
    train(model, optimizer, 3)
    held = look(model)
    for unit in root_of(model).units[:1]:  # as the guard has it
        unit.flats[0].always_exact = True
    train(model, optimizer, 4)
    now, after = masters(model), look(model)
    assert after["0.weight"].equal(now["0.weight"].bfloat16())
    assert after["1.weight"].equal(told("int4", now["1.weight"], held["1.weight"]))


def test_what_no_optimizer_has_changed_is_told_exactly():
    on_ranks(4, changed_otherwise)


def warming() -> None:
    model = near(compression=Compression("fp32", weights="ternary", warmup_steps=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exact = []
    for step in range(5):
        exact.append(is_exact(model, look(model)))
        train(model, optimizer, step)
    assert exact == [True, True, True, False, False]


def test_weights_are_exact_until_the_warm_up_is_over():
    on_ranks(4, warming)


def at_the_edges() -> None:
    one = near(count=1)  # every rank keeps all
    assert "weights kept whole" in yafsdp_cc.plan_of(one).memory
    with pytest.raises(ValueError, match=r"unit '0' are dropped after each forward .* the number of\s+all ranks"):
        near(count=4)
    with pytest.raises(ValueError, match="should be a factor of 4"):
        near(count=3)
    rounds = near("int8", count=4)
    assert not is_exact(rounds, look(rounds))  # dropped, so rounded
    model = near()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        train(model, optimizer, step)
    model[2].set_reshard_after_forward(True)
    with pytest.raises(ValueError, match=r"weights='int4'.* unit '2' are dropped"):
        look(model)
    model[2].set_reshard_after_forward(False)  # now every rank keeps all of it
    assert is_exact(model, look(model))
    held = seen(model)
    train(model, optimizer, 2)
    now, after = masters(model), look(model)
    assert all(after[name].equal(told("int4", now[name], weight)) for name, weight in held.items())
    plan = yafsdp_cc.plan_of(model)
    assert plan.memory["weights kept whole"] == plan.rings[0].weight_slot_bytes
    assert plan.owned_bytes == yafsdp_cc.counters_of(model).owned_bytes


def test_one_rank_all_ranks_and_changes_of_mind():
    on_ranks(4, at_the_edges)


# In checkpoints


def saved(folder: Any, policy: Any) -> None:
    for moment in ("stepped", "seen"):
        model = near("onebit", mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            train(model, optimizer, step)
        held = {name: each.clone() for name, each in seen(model).items()}
        now = masters(model)
        if moment == "seen":
            held = look(model)
        yafsdp_cc.save(folder / moment, model, optimizer)
        losses = [train(model, optimizer, step) for step in range(4, 7)]
        ends = masters(model)
        if dist.get_rank() == 0:
            torch.save((held, now, losses, ends), folder / f"{moment}.pt")


def resumed(folder: Any, policy: Any) -> None:
    for make in (near, whole) if dist.get_world_size() == 4 else (whole,):
        for moment in ("stepped", "seen"):
            held, now, losses, ends = torch.load(folder / f"{moment}.pt")
            model = make("onebit", mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            train(model, optimizer, 100)
            yafsdp_cc.load(folder / moment, model, optimizer)
            assert same(masters(model), now)
            expected = {name: told("onebit", now[name], each) for name, each in held.items()}
            assert same(look(model), held if moment == "seen" else expected)
            if dist.get_world_size() == 4:
                again = [train(model, optimizer, step) for step in range(4, 7)]
                assert again == losses or dist.get_rank() > 0  # losses of rank 0
                assert same(masters(model), ends)


@pytest.mark.parametrize("policy", [None, also(BF16)])
def test_a_resumed_run_goes_on_bit_for_bit_and_any_number_of_ranks_from_the_same_weights(policy, tmp_path):
    """Where every rank keeps all, too: a checkpoint says what is kept, and not by whom."""
    on_ranks(4, saved, tmp_path, policy)
    on_ranks(4, resumed, tmp_path, policy)
    on_ranks(2, resumed, tmp_path, policy)
