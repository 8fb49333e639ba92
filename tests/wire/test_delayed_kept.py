"""Sums that land one backward late, with optimizers that lead the wire, in checkpoints, in the plan and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import yafsdp_cc
from tests.optim.slopes import SETTINGS, SHAPES, Slope, Slopes, drawn, trained
from tests.ranks import on_ranks
from tests.wire.delays import ALL, Account, alike, backward, found, late
from tests.wire.ledger import sharded, unsaid
from yafsdp_cc import Compression
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.optim import OneBitAdam, ZeroOneAdam
from yafsdp_cc.wire.codec import codec_of

# With an optimizer that leads the wire -------------------------------------------------------------------------------


def led(form: str = "momentum", micro: bool = False, **more: Any) -> tuple[Any, Any]:
    compression = Compression("onebit", residual="fp32", block=64, **more)
    model: Any = yafsdp_cc.shard(Slopes(), units=[Slope], compression=compression)
    settings: dict[str, Any] = SETTINGS | {"warmup_steps": 3, "form": form, "refreshes": 1, "max_grad_norm": 20.0}
    return model, OneBitAdam(model.parameters(), **settings)


def momentum(form: str, micro: bool) -> None:
    models = [led(form, delayed=ALL), led(form)]
    before: dict[str, Tensor | None] = {}
    for step in range(12):
        landed = []
        for model, optimizer in models:
            model.set_requires_gradient_sync(not micro)
            if micro:
                model(drawn(100 + step, dist.get_rank())).backward()
                model.set_requires_gradient_sync(True)
            model(drawn(step, dist.get_rank())).backward()
            landed.append(found(model))
            optimizer.step()
            optimizer.zero_grad()
        if step < 3:
            assert alike(*landed)
        elif step == 3:
            assert all(each is None for each in landed[0].values())
        elif micro:  # own gradients are added up in another order
            assert all(torch.allclose(landed[0][name], before[name], atol=1e-5) for name in before)
        else:
            assert alike(landed[0], before), step
        before = landed[1]


@pytest.mark.parametrize("form", ["momentum", "gradient"])
def test_momentum_is_that_of_the_step_before_to_the_bit(form):
    on_ranks(2, momentum, form, False)


def test_so_it_is_of_micro_batches():
    on_ranks(2, momentum, "momentum", True)


def made_later() -> None:
    model: Any = yafsdp_cc.shard(Slopes(), units=[Slope], compression=late("onebit", block=64))
    trained(model, torch.optim.SGD(model.parameters(), lr=0.0), range(2))
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=1)
    assert all(not each.any() for each in unsaid(model).values())
    model(drawn(2, dist.get_rank())).backward()
    exact = torch.stack([drawn(2, rank)[0] for rank in range(dist.get_world_size())]).mean(0)
    assert torch.allclose(model.parts[0].weight.grad.full_tensor(), exact, atol=1e-6)
    optimizer.step()


def test_an_optimizer_that_is_made_later_starts_from_nothing():
    on_ranks(2, made_later)


def twice_without_zero_grad() -> None:
    model, optimizer = led(delayed=ALL)
    trained(model, optimizer, range(6))
    model(drawn(6, 0)).backward()
    with pytest.raises(RuntimeError, match=r"has a .grad already, .* call optimizer.zero_grad\(\)"):
        model(drawn(7, 0)).backward()
    optimizer.zero_grad()
    trained(model, optimizer, range(8, 10))


def test_a_second_sum_in_a_step_of_momentum_is_refused():
    on_ranks(2, twice_without_zero_grad)


def back_to_the_warm_up(form: str) -> None:
    model: Any = yafsdp_cc.shard(Slopes(), units=[Slope], compression=late("onebit", block=64))
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=3, form=form)
    trained(model, optimizer, range(2))
    early = copy.deepcopy(optimizer.state_dict())
    trained(model, optimizer, range(2, 6))
    optimizer.load_state_dict(early)
    assert not root_of(model).is_warm
    weight = model.parts[0].weight
    before = optimizer.state[weight]["exp_avg"].full_tensor().clone()
    ranks, under_way = dist.get_world_size(), unsaid(model)["parts.0.weight"]
    model(drawn(6, dist.get_rank())).backward()
    brought = (under_way - unsaid(model)["parts.0.weight"]).float()
    assert brought.norm() > 0.1
    exact = sum(drawn(6, each)[0] for each in range(ranks)) / ranks
    gradient, after = weight.grad.full_tensor(), optimizer.state[weight]["exp_avg"].full_tensor()
    if form == "gradient":
        assert torch.allclose(gradient, exact + brought, atol=1e-5)
    else:
        assert torch.allclose(gradient, exact, atol=1e-6)
        assert torch.allclose(after, before + 0.2 / 0.8 * brought, atol=1e-5)


@pytest.mark.parametrize("form", ["momentum", "gradient"])
def test_what_is_under_way_when_sums_are_exact_again_is_not_lost(form):
    on_ranks(2, back_to_the_warm_up, form)


# In checkpoints ------------------------------------------------------------------------------------------------------


def saved(folder: Any, codec: str) -> None:
    model, twin = sharded(late(codec)), sharded(late(codec))
    for step in range(4):
        backward(model, step)
        backward(twin, step)
    yafsdp_cc.save(folder / "step", model)
    left, landed = unsaid(model), [backward(model, step) for step in (4, 5)]
    assert all(alike(each, backward(twin, step)) for step, each in zip((4, 5), landed, strict=True))
    if dist.get_rank() == 0:
        torch.save((left, landed), folder / "truth.pt")


def resumed(folder: Any, codec: str) -> None:
    left, landed = torch.load(folder / "truth.pt")
    model = sharded(late(codec))
    backward(model, 100)  # forgotten
    yafsdp_cc.load(folder / "step", model)
    if dist.get_world_size() == 2:
        assert all(alike(each, backward(model, step)) for step, each in zip((4, 5), landed, strict=True))
        return
    now = unsaid(model)
    assert all(torch.allclose(now[name], left[name], rtol=1e-5, atol=1e-9) for name in left)
    account = Account(model)
    account.due = dict(left)
    for step in range(3):
        account.step(step)
    account.check()


@pytest.mark.parametrize(("readers", "codec"), [(2, "onebit"), (4, "onebit"), (1, "onebit"), (2, "powersgd")])
def test_what_is_under_way_is_resumed_by_any_number_of_ranks(readers, codec, tmp_path):
    """Bit for bit by as many as before; and who saves goes on as who does not."""
    on_ranks(2, saved, tmp_path, codec)
    on_ranks(readers, resumed, tmp_path, codec)


def into_a_prompt_one(folder: Any) -> None:
    model, prompt = sharded(late()), sharded("int8")
    backward(model, 0)
    yafsdp_cc.save(folder / "step", model)
    yafsdp_cc.load(folder / "step", prompt)
    held, now = unsaid(model), unsaid(prompt)
    assert all(held[name].norm() > 0 and torch.allclose(now[name], held[name], rtol=1e-5) for name in held)


def test_what_is_under_way_is_owed_where_nothing_is_delayed(tmp_path):
    on_ranks(2, into_a_prompt_one, tmp_path)


def all_to_come(model: Any, optimizer: Any) -> list[Tensor]:
    """The sum of all first moments from now on, where gradients are zero."""
    sums = [torch.zeros(shape) for shape in SHAPES]
    for _ in range(60):
        model([torch.zeros(shape) for shape in SHAPES]).backward()
        for total, part in zip(sums, model.parts, strict=True):
            total += 0 if part.weight.grad is None else part.weight.grad.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
    return sums


def led_on(folder: Any, saves: bool) -> None:
    model: Any = yafsdp_cc.shard(Slopes(), units=[Slope], compression=late("bf16"))
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=2, refreshes=0)
    if saves:
        trained(model, optimizer, range(6))
        yafsdp_cc.save(folder / "step", model, optimizer)
        torch.save(all_to_come(model, optimizer), folder / f"truth{dist.get_rank()}.pt")
        return
    yafsdp_cc.load(folder / "step", model, optimizer)
    for one, other in zip(all_to_come(model, optimizer), torch.load(folder / "truth0.pt"), strict=True):
        assert (one - other).norm() < (0.0 if dist.get_world_size() == 2 else 0.01) * other.norm() + 1e-12


@pytest.mark.parametrize("readers", [2, 4])
def test_nothing_of_a_momentum_under_way_is_lost(readers, tmp_path):
    on_ranks(2, led_on, tmp_path, True)
    on_ranks(readers, led_on, tmp_path, False)


# What it takes, and what it does not go with -------------------------------------------------------------------------


def memory() -> None:
    ranks = dist.get_world_size()
    model, prompt = sharded(late()), sharded(Compression("int8", residual="fp32"))
    plan, before = yafsdp_cc.plan_of(model), yafsdp_cc.plan_of(prompt)
    chunks = [flat.layout.chunk for unit in root_of(model).units for flat in unit.flats]
    messages = [codec_of("int8").message_bytes(chunk) for chunk in chunks]
    assert plan.late_bytes == sum(
        4 * chunk + 2 * (ranks - 1) * size for chunk, size in zip(chunks, messages, strict=True)
    )
    assert plan.memory["sums that land late"] == plan.late_bytes
    assert before.receive_bytes - plan.receive_bytes == 2 * (ranks - 1) * max(messages)
    assert plan.wire == before.wire
    for step in range(3):
        backward(model, step)
        assert yafsdp_cc.counters_of(model).owned_bytes == plan.owned_bytes
    unsaid(model)  # sees sums through, which takes room until they land
    assert yafsdp_cc.counters_of(model).owned_bytes == plan.owned_bytes + 4 * sum(chunks)
    backward(model, 3)
    assert yafsdp_cc.counters_of(model).owned_bytes == plan.owned_bytes


@pytest.mark.parametrize("world", [2, 4])
def test_memory_is_as_planned(world):
    on_ranks(world, memory)


def test_what_says_nothing_is_refused():
    for match, settings in {
        "with 'auto': that encodes only sums that show": {"gradients": "auto"},
        "with gradients='fp32': exact sums never land late": {"gradients": "fp32"},
        r"delayed='\*': write several in parentheses, and one as \('\*',\)": {"delayed": "*"},
    }.items():
        with pytest.raises(ValueError, match=match):
            Compression(**{"delayed": ALL, **settings})


def refused() -> None:
    def said(match: str, compression: Compression) -> None:
        with pytest.raises(ValueError, match=match):
            sharded(compression)

    said(r"delayed=\('3.*', ...\) fits no parameter .* such as '0.weight'", late(delayed=("3.*",)))
    said(r"delayed=\('0.*', ...\) fits '0.weight', whose", late(delayed=("0.*",), overrides={"0.*": "fp32"}))
    with pytest.raises(ValueError, match=r"compress\(\) with delayed: FSDP2 takes"):
        yafsdp_cc.compress(fully_shard(nn.Linear(4, 4)), late())
    with pytest.raises(ValueError, match="GradientWire with delayed: DDP"):
        yafsdp_cc.GradientWire(late())
    with pytest.raises(ValueError, match=r"learns its second moment from exact sums, and .* leave delayed out"):
        ZeroOneAdam(sharded(late()).parameters())


def test_what_cannot_land_late_is_refused_by_name():
    on_ranks(2, refused)


def over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for scope in ("auto", "shard"):
        with pytest.raises(ValueError, match="and the mesh has replicas: sums over these come after those"):
            sharded(late(scope=scope), mesh=mesh)


def test_sums_before_those_over_replicas_are_not_late():
    on_ranks(4, over_replicas)
