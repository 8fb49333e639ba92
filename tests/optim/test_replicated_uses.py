"""ReplicatedOneBitAdam as torch's optimizers are used: state, scalers, closures, groups, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compression.ledger import net
from tests.optim.lossless import loss_of, sharded
from tests.ranks import on_ranks, ranks
from yafsdp_cc.optim import ReplicatedOneBitAdam


def made(codec: str = "onebit", **more: Any) -> tuple[nn.Module, ReplicatedOneBitAdam]:
    model = net()
    return model, ReplicatedOneBitAdam(model.named_parameters(), 0.01, warmup_steps=3, codec=codec, **more)


def step(model: nn.Module, optimizer: Any, number: int, rank: int | None = None) -> None:
    optimizer.zero_grad()
    loss_of(model, number, dist.get_rank() if rank is None else rank).backward()
    optimizer.step()


def alike(model: nn.Module) -> bool:
    """Whether ranks have the same weights, to the bit."""
    for parameter in model.parameters():
        everybody = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, parameter.detach())
        if not all(each.equal(everybody[0]) for each in everybody):
            return False
    return True


# With a codec that loses nothing, and in the warm-up


@ranks(2)
def test_exact_means_make_the_steps_of_adamw() -> None:
    """AdamW's steps in the warm-up, with groups; then, with a codec that loses nothing, those of its own rule."""
    model, twin = net(), net()
    groups = [
        [
            {"params": [each.weight for each in of[::2]], "weight_decay": 0.3},
            {"params": [each.bias for each in of[::2]], "lr": 0.02},
        ]
        for of in (model, twin)
    ]
    ours = ReplicatedOneBitAdam(groups[0], 0.01, warmup_steps=4)
    theirs = torch.optim.AdamW(groups[1], 0.01)
    for number in range(4):
        step(model, ours, number)
        twin.zero_grad()
        loss_of(twin, number, dist.get_rank()).backward()
        for parameter in twin.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        theirs.step()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(mine, other, rtol=0, atol=1e-6)
    model, ours = made("lossless")
    alone, furthest = net().double(), 0.1 / 0.001**0.5
    plain = torch.optim.AdamW(alone.parameters(), 0.01)
    for number in range(8):
        step(model, ours, number)
        alone.zero_grad()
        for rank in range(dist.get_world_size()):
            (loss_of(alone, number, rank) / dist.get_world_size()).backward()
        if number < 3:
            plain.step()
            continue
        for parameter in alone.parameters():  # with a second moment that stays, and counts for what it has seen
            state = plain.state[parameter]
            root = (state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8
            update = state["exp_avg"].lerp_(parameter.grad, 0.1) / (1 - 0.9 ** (number + 1)) / root
            parameter.data.mul_(1 - 0.01 * 1e-2).sub_(update.clamp(-furthest, furthest), alpha=0.01)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine.double() - other).norm() <= 1e-5 * other.norm()
    assert alike(model)


# State


def saved(folder: Any) -> None:
    model, optimizer = made()
    for number in range(7):
        step(model, optimizer, number)
    with pytest.raises(RuntimeError, match=r"call optimizer.settle\(\) on all of them before"):
        optimizer.state_dict()
    left = optimizer.mean.unsent()
    optimizer.settle()
    assert torch.allclose(optimizer.mean.unsent(), left, atol=1e-9)
    if dist.get_rank() == 0:  # alone: it is no collective
        torch.save((model.state_dict(), optimizer.state_dict()), folder / "state.pt")
    for number in range(7, 11):
        step(model, optimizer, number, rank=0)
    assert alike(model)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "later.pt")


def loaded(folder: Any) -> None:
    weights, state = torch.load(folder / "state.pt")
    model, optimizer = made()
    step(model, optimizer, 20)  # all forgotten
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert optimizer.steps == 7
    for number, each in enumerate(state["state"].values()):
        mine = optimizer.state[list(model.parameters())[number]]
        assert all(mine[name].equal(each[name]) for name in ("exp_avg", "exp_avg_sq", "unsaid"))
    optimizer.settle()
    resaved = optimizer.state_dict()
    for one, other in zip(resaved["state"].values(), state["state"].values(), strict=True):
        assert torch.allclose(one["unsaid"], other["unsaid"], atol=1e-9)
        assert other["unsaid"].norm() > 0
    later = torch.load(folder / "later.pt")
    for number in range(7, 11):
        step(model, optimizer, number, rank=0)
    assert alike(model)
    if dist.get_world_size() == 2:
        assert all(each.equal(later[name]) for name, each in model.state_dict().items())
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(state)
    plain.step()


def test_a_run_goes_on_at_any_number_of_ranks(tmp_path):
    on_ranks(2, saved, tmp_path)
    for world in (1, 2, 4):
        on_ranks(world, loaded, tmp_path)


# Under a scaler, in bf16, with what is not there


@ranks(2)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    model, optimizer = made()
    twin, plain = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    for number in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number, dist.get_rank())).backward()
        if number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        step(twin, plain, number)
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.equal(other)
    assert scaler.get_scale() > 2.0**8
    left, before = optimizer.mean.unsent(), [each.clone() for each in model.parameters()]
    optimizer.zero_grad()
    (scaler.scale(loss_of(model, 8, 0)) * (torch.inf if dist.get_rank() == 1 else 1.0)).backward()
    scaler.step(optimizer)  # on both ranks, or on none
    scaler.update()
    assert optimizer.steps == 8
    assert optimizer.mean.unsent().equal(left)
    assert all(now.equal(then) for now, then in zip(model.parameters(), before, strict=True))


@ranks(2)
def test_it_takes_closures_bf16_and_gradients_that_are_not_there() -> None:
    torch.manual_seed(0)
    model = net().to(torch.bfloat16)
    optimizer = ReplicatedOneBitAdam(model.parameters(), 0.01, warmup_steps=2, codec="int4")
    sent = optimizer.mean.sent_bytes
    assert 0 < sent < 2 * 2 * sum(each.numel() for each in model.parameters())
    losses = []
    for number in range(12):

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, 0, 0)
            loss.backward()
            return float(loss.detach())

        model[4].bias.requires_grad_(number % 2 == 0)  # no gradient in some steps: counts as zeros
        losses.append(optimizer.step(closure))
    assert losses[-1] < 0.9 * losses[0]
    assert alike(model)
    optimizer.settle()
    again = ReplicatedOneBitAdam(model.parameters(), 0.01, warmup_steps=2, codec="int4")
    again.load_state_dict(optimizer.state_dict())
    for parameter, kept in optimizer.state.items():  # in fp32, whatever the parameters are
        for name in ("exp_avg", "exp_avg_sq", "unsaid"):
            assert kept[name].dtype == torch.float32
            assert again.state[parameter][name].equal(kept[name])


@ranks(2)
def test_what_cannot_work_is_said() -> None:
    model, optimizer = made()
    with pytest.raises(RuntimeError, match="make a new one for other parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    optimizer.zero_grad()
    loss_of(model, 0, 0).backward()
    if dist.get_rank() == 1:
        model[2].weight.grad[3, 3] = torch.nan
    words = "a gradient is not finite: '2.weight'" if dist.get_rank() == 1 else "not finite: on another rank"
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert optimizer.steps == 0
    make: Any = ReplicatedOneBitAdam
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], "betas": (0.8, 0.9)}]
    with torch.no_grad():
        other = net()
        other[2].weight[0, 0] += dist.get_rank()
    for given, more, words in (
        (groups, {}, "the same betas in all groups"),
        (sharded("onebit").named_parameters(), {}, "'0.weight' is sharded: take yafsdp_cc.optim.OneBitAdam"),
        (net().double().parameters(), {}, "parameter 0 of group 0, .* is torch.float64 on cpu: all .* fp32, bf16"),
        (other.named_parameters(), {}, "'2.weight' differs between ranks: build the module from the same seed"),
        (model.parameters(), {"warmup_steps": 0}, "warmup_steps=0: at least 1"),
        (model.parameters(), {"codec": "threebit"}, "there is no codec 'threebit'"),
        (model.parameters(), {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        (model.parameters(), {"lr": -1.0}, "lr=-1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            make(given, **{"warmup_steps": 1, **more})
