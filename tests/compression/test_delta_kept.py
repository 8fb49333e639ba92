"""Which weights are told of changes and which cannot be, and what a checkpoint keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.compression.deltas import (
    BF16,
    changed_bytes,
    following,
    gathered,
    is_exact,
    look,
    masters,
    told,
    train,
)
from tests.compression.ledger import loss_of, net, sharded
from tests.internals import exact_gather_bytes, kept_weights_of
from tests.ranks import on_ranks
from yafsdp_cc import Compression

# What keeps its weights, and what does not


class Rooted(nn.Sequential):
    """Weights of its own, beside its blocks'."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*net())
        self.own = nn.Parameter(torch.randn(40, 40) / 40**0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x @ self.own)
        return out


def some_only() -> None:
    compression = Compression(gradients="fp32", weights="int8")
    model = yafsdp_cc.shard(Rooted(), units=[nn.Linear], compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = look(model)
    assert seen["own"].equal(masters(model)["own"])
    assert not seen["2.weight"].equal(masters(model)["2.weight"])  # dropped, so rounded
    train(model, optimizer, 0)
    now, after = masters(model), look(model)
    assert after["own"].equal(told("int8", now["own"], seen["own"]))
    assert yafsdp_cc.plan_of(model).owned_bytes == yafsdp_cc.counters_of(model).owned_bytes
    model[2].set_reshard_after_forward(False)
    seen = look(model)
    assert seen["2.weight"].equal(masters(model)["2.weight"])
    train(model, optimizer, 1)
    now, after = masters(model), look(model)
    assert after["2.weight"].equal(told("int8", now["2.weight"], seen["2.weight"]))
    assert yafsdp_cc.plan_of(model).owned_bytes == yafsdp_cc.counters_of(model).owned_bytes


def test_some_units_may_keep_their_weights_and_others_not():
    on_ranks(2, some_only)


def rooted(folder: Path) -> None:
    def build() -> tuple[Any, torch.optim.Optimizer]:
        model = yafsdp_cc.shard(
            Rooted(), units=[nn.Linear], zero_stage=2, compression=Compression("fp32", weights="int4")
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step_of_two(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for micro in range(2):
            loss_of(model, 10 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    for step in range(6):
        if step == 3:
            yafsdp_cc.save(folder / "step", model, optimizer)
        step_of_two(model, optimizer, step)
    ends = masters(model)
    evaluated, optimizer = build()
    for step in range(6):
        step_of_two(evaluated, optimizer, step)
        first, again = look(evaluated), look(evaluated)
        assert all(each.equal(first[name]) for name, each in again.items())
    written, _ = build()
    step_of_two(written, torch.optim.SGD(written.parameters(), lr=0.1), 0)
    look(written)
    for parameter in written.parameters():
        parameter.to_local().data.mul_(3.0)  # torch does not count this
    for module in (written, written[0], written[2], written[4]):
        module.reshard()
    assert is_exact(written, look(written))
    resumed, optimizer = build()
    yafsdp_cc.load(folder / "step", resumed, optimizer)
    for step in range(3, 6):
        step_of_two(resumed, optimizer, step)
    for model in (evaluated, resumed):
        assert all(each.equal(ends[name]) for name, each in masters(model).items())


def test_evaluations_and_micro_batches_behind_a_checkpoint_change_no_weights_of_the_root(tmp_path: Path) -> None:
    on_ranks(2, rooted, tmp_path)


def refusals() -> None:
    why = r"weights='int4', which encodes how .* unit '0' are resharded after each forward .* or weights='int8', which"
    for reshard in (None, 2, dist.get_world_size()):
        with pytest.raises(ValueError, match=why):
            following(zero_stage=3, reshard_after_forward=reshard)
    one = net()
    yafsdp_cc.shard(one, units=[one], compression=Compression("fp32", weights="int4"))  # a root keeps its own
    assert is_exact(one, look(one))
    model = following(zero_stage=3, reshard_after_forward=False)
    seen = look(model)
    model[2].set_reshard_after_forward(True)
    with pytest.raises(ValueError, match=r"weights='int4'.* unit '2' are resharded"):
        look(model)
    model[2].set_reshard_after_forward(False)
    assert all(view.equal(seen[name]) for name, view in look(model).items())


def test_weights_that_are_dropped_have_no_changes_to_be_told():
    on_ranks(4, refusals)


def rounded_and_divided(policy: Any) -> None:
    model, twin = (following("int8", zero_stage=3, mp_policy=policy, reshard_after_forward=each) for each in (2, True))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    planned = yafsdp_cc.plan_of(model).communication
    assert 0 < planned.secondary == planned.gather_backward
    for step in range(3):
        before = gathered(model)
        losses = [train(each, optimizer, step) for each, optimizer in zip((model, twin), optimizers, strict=True)]
        assert losses[0] == losses[1]
        assert gathered(model) - before == planned.gather_forward + planned.gather_backward
        truth = masters(twin)
        assert all(one.equal(truth[name]) for name, one in masters(model).items())
    assert not is_exact(model, look(model))
    assert yafsdp_cc.plan_of(model).owned_bytes == yafsdp_cc.counters_of(model).owned_bytes


@pytest.mark.parametrize("policy", [None, BF16])
def test_rounded_weights_may_be_divided_among_a_few_ranks(policy):
    """What the few give each other is what all have decoded."""
    on_ranks(4, rounded_and_divided, policy)


# In checkpoints


def saved(folder: Any, policy: Any) -> None:
    for moment in ("stepped", "seen"):
        model = following("onebit", mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            train(model, optimizer, step)
        if moment == "seen":
            look(model)
        yafsdp_cc.save(folder / moment, model, optimizer, note=1)
        held = kept_weights_of(model)
        losses = [train(model, optimizer, step) for step in range(4, 8)]
        ends = masters(model)
        if dist.get_rank() == 0:
            torch.save((held, losses, ends), folder / f"{moment}.pt")


def resumed(folder: Any, policy: Any) -> None:
    for moment in ("stepped", "seen"):
        held, losses, ends = torch.load(folder / f"{moment}.pt")
        model = following("onebit", mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if moment == "stepped":  # the other one is loaded before any step
            train(model, optimizer, 100)
        assert yafsdp_cc.load(folder / moment, model, optimizer) == {"note": 1}
        assert all(view.equal(held[name]) for name, view in kept_weights_of(model).items())
        before, now = gathered(model), masters(model)
        seen = look(model)
        resumed_bytes, deltas = exact_gather_bytes(model), changed_bytes(model) if moment == "stepped" else 0
        assert gathered(model) - before == resumed_bytes + deltas
        expected = held
        if moment == "stepped":
            expected = {name: told("onebit", now[name], whole) for name, whole in held.items()}
        assert all(seen[name].equal(whole) for name, whole in expected.items())
        again = look(model)
        assert all(each.equal(seen[name]) for name, each in again.items())  # until the next step
        if dist.get_world_size() != 2:
            continue
        made = [train(model, optimizer, step) for step in range(4, 8)]
        assert (made == losses) or dist.get_rank() > 0  # losses of rank 0
        assert all(each.equal(ends[name]) for name, each in masters(model).items())


@pytest.mark.parametrize("policy", [None, BF16])
@pytest.mark.parametrize("readers", [2, 3])
def test_a_resumed_run_goes_on_bit_for_bit_and_any_number_of_ranks_from_the_same_weights(readers, policy, tmp_path):
    on_ranks(2, saved, tmp_path, policy)
    on_ranks(readers, resumed, tmp_path, policy)


def from_elsewhere(folder: Any) -> None:
    plain, model = sharded(None, zero_stage=2), following("int4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0)
    look(model)
    train(model, optimizer, 1)
    yafsdp_cc.save(folder / "plain", plain)
    yafsdp_cc.save(folder / "following", model)
    yafsdp_cc.load(folder / "following", plain)  # what it has no use for is left
    assert is_exact(plain, look(plain))
    yafsdp_cc.load(folder / "plain", model)  # as one of an earlier version
    assert is_exact(model, look(model))
    other = following("int8", mp_policy=BF16)  # another codec and dtype
    yafsdp_cc.load(folder / "following", other)
    held = kept_weights_of(other)
    now, seen = masters(other), look(other)
    assert all(seen[name].equal(told("int8", now[name], whole)) for name, whole in held.items())
    with torch.no_grad():
        other[0].weight.mul_(2.0)
    assert look(other)["0.weight"].equal(masters(other)["0.weight"].bfloat16())


def test_checkpoints_with_and_without_kept_weights_are_exchanged(tmp_path):
    on_ranks(2, from_elsewhere, tmp_path)


def warmed_up(folder: Any) -> None:
    found = []
    for turn in range(2):
        model = sharded(Compression(gradients="fp32", weights="int4", warmup_steps=2), zero_stage=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(6):
            if step in (1, 2, 3) and not turn:
                yafsdp_cc.save(folder / str(step), model, optimizer)
            train(model, optimizer, step)
        if not turn:
            found.append(masters(model))
    for start in (1, 2, 3):
        model = sharded(Compression(gradients="fp32", weights="int4", warmup_steps=2), zero_stage=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        yafsdp_cc.load(folder / str(start), model, optimizer)
        for step in range(start, 6):
            train(model, optimizer, step)
        assert all(each.equal(found[0][name]) for name, each in masters(model).items()), start


def test_a_run_is_resumed_in_its_warm_up_and_just_after_it(tmp_path):
    on_ranks(2, warmed_up, tmp_path)
