"""Weights that stay whole and are told how they change: by the rule, alike on all ranks, exactly where need be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

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
    writes,
)
from tests.compression.ledger import loss_of, sharded
from tests.internals import exact_gather_bytes, set_delta_part, unsharded_params
from tests.ranks import on_ranks, ranks
from tests.soak import SOAK, also
from yafsdp_cc import Compression

CODECS = ("int8", "fp8", "int4", "ternary", "onebit")


# The rule


def as_the_rule_says(mesh_of: tuple[int, ...]) -> None:
    for codec in CODECS:
        for policy in (None, BF16):
            mesh = init_device_mesh("cpu", mesh_of) if mesh_of else None
            model = following(codec, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            truth = look(model)
            assert is_exact(model, truth)
            for step in range(5 if SOAK else 3):
                train(model, optimizer, step)
                now, seen = masters(model), look(model)
                truth = {name: told(codec, now[name], whole) for name, whole in truth.items()}
                assert all(seen[name].equal(whole) for name, whole in truth.items()), (codec, policy, step)
            assert not is_exact(model, truth)
            for whole in truth.values():
                parts = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, whole)
                assert all(part.equal(whole) for part in parts)


@pytest.mark.parametrize(("world", "mesh"), [also(2, ()), also(4, ()), (4, (2, 2)), (3, ())])
def test_weights_follow_by_the_rule_and_are_equal_on_all_ranks(world, mesh):
    """In the truth, each parameter is one row: how it is cut, among whom and where, makes no difference."""
    on_ranks(world, as_the_rule_says, mesh)


@ranks(2)
def test_a_chunk_is_said_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_delta_part(monkeypatch, 1280)
    as_the_rule_says(())


@pytest.mark.parametrize("codec", ["int4", also("int8")])
@ranks(2)
def test_weights_track_their_shards_whatever_the_rate(codec: str) -> None:
    for policy in (None, BF16):
        for rate in (1e-7, 1e-4, 1e-1) if SOAK or policy is None else (1e-4,):
            model = following(codec, mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            draws = torch.Generator().manual_seed(dist.get_rank())
            loss_of(model, 0).backward()
            for step in range(120):
                for parameter in model.parameters():
                    local = parameter.grad.to_local()
                    local.copy_(torch.randn(local.shape, generator=draws))
                if step == 100:
                    optimizer.param_groups[0]["lr"] = 0.0  # still steps, that change nothing
                optimizer.step()
                seen = look(model)
                if step % 20 == 0 or step > 100:
                    for name, true in masters(model).items():
                        if name in seen:
                            off, size = (true - seen[name].float()).abs(), true.abs().max()
                            rounding = 0.0 if policy is None else size.item() * 2**-8
                            assert off.pow(2).mean().sqrt() <= 4 * rate + rounding, (name, rate, step)
            for name, true in masters(model).items():
                if name in seen:  # all was said, but for what rounds to nothing
                    least = 0.0 if policy is None else true.abs().max().item() * 2**-8
                    assert (true - seen[name].float()).abs().max() <= least + 1e-3 * rate + 1e-8, (name, rate)


@ranks(2)
def test_training_ends_where_exact_weights_end() -> None:
    ends = {}
    for codec in (None, "int4", "ternary", "onebit") if SOAK else (None, "int4", "onebit"):
        model = following(codec) if codec else sharded(None, zero_stage=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = [train(model, optimizer, 5 * step) for step in range(120)]
        ends[codec] = sum(losses[-20:]) / 20
    start, exact = losses[0], ends[None]
    assert exact < 0.1 * start
    assert abs(ends["int4"] - exact) < 0.05 * exact
    assert ends.get("ternary", exact) < 1.3 * exact
    assert ends["onebit"] < 2 * exact


# When it holds, and when weights are gathered exactly


@ranks(2)
def test_what_no_optimizer_has_changed_is_gathered_exactly() -> None:
    model = following(mp_policy=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writers = writes(model)

    def own_step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)

    def write_between() -> None:
        optimizer.step()
        writers[1]()
        optimizer.step()

    for change in (*writers, own_step, write_between):
        for _ in range(2):  # changes, so that something lies there that is not exact
            loss_of(model, 0).backward()
            optimizer.step()
        assert not is_exact(model, look(model))
        change()
        seen = look(model)
        assert seen["2.weight"].equal(masters(model)["2.weight"].bfloat16()), change


@ranks(2)
def test_a_change_is_sent_once_for_any_number_of_steps_and_forwards() -> None:
    model = following()
    assert changed_bytes(model) < exact_gather_bytes(model) / 6
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = gathered(model)

    def sent() -> int:
        nonlocal before
        now = gathered(model)
        before, total = now, now - before
        return total

    look(model)
    assert sent() == exact_gather_bytes(model)
    for step in range(3):
        train(model, optimizer, step)
        sent()
        look(model)
        look(model)
        assert sent() == changed_bytes(model)
        model.eval()
        look(model)
        model.train()
        assert sent() == 0
    for step in range(3):
        loss_of(model, step).backward()
    assert sent() == 0
    for _ in range(3):
        optimizer.step()  # without a forward
    look(model)
    assert sent() == changed_bytes(model)
    optimizer.step(lambda: loss_of(model, 0))  # a forward within a step, of weights that have not changed yet
    assert sent() == 0
    look(model)
    assert sent() == changed_bytes(model)
    model[0].unshard()
    model[0].reshard()
    assert sent() == 0
    optimizer.step()
    model[0].unshard()
    assert sent() < changed_bytes(model)
    assert model[0].weight.equal(unsharded_params(model)["0.weight"])
    optimizer.step()  # the weights that are held are of before
    assert not is_exact(model, look(model))
    model[0].reshard()
    plan = yafsdp_cc.plan_of(model)
    assert plan.owned_bytes == yafsdp_cc.counters_of(model).owned_bytes
    assert plan.memory["weights kept whole"] == 3 * plan.buffers[0].weight_buffer_bytes
    assert plan.memory["weight buffers"] == 0
    assert "weights kept whole" in str(plan)


@ranks(2)
def test_optimizers_may_share_a_model() -> None:
    model = following("int8")
    one, other = nn.ModuleList(model[:2]).parameters(), nn.ModuleList(model[2:]).parameters()
    optimizers = [torch.optim.SGD(one, lr=0.1), torch.optim.AdamW(other, lr=1e-2)]
    look(model)
    for step in range(3):
        loss_of(model, step).backward()
        truth = unsharded_params(model)
        before = gathered(model)
        for optimizer in optimizers:
            optimizer.step()
        now, seen = masters(model), look(model)
        assert gathered(model) - before == changed_bytes(model)
        assert all(seen[name].equal(told("int8", now[name], whole)) for name, whole in truth.items())
    loss_of(model, 9).backward()
    optimizers[1].step()  # the first unit's weights stay as they are
    before = gathered(model)
    look(model)
    assert 0 < gathered(model) - before < changed_bytes(model)


@ranks(2)
def test_optimizers_may_share_a_flat_buffer() -> None:
    torch.manual_seed(0)
    model = yafsdp_cc.shard(
        nn.Sequential(nn.Sequential(nn.Linear(40, 60, bias=False), nn.Linear(60, 50, bias=False))),
        units=[nn.Sequential],
        zero_stage=2,
        compression=Compression(gradients="fp32", weights="onebit"),
    )
    first, second = model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD([second], lr=0.01)]
    truth = look(model)
    for turn in ((0, 1), (1,), (0,), (1, 0)):
        loss_of(model, 0).backward()
        before = gathered(model)
        for index in turn:
            optimizers[index].step()
        now, seen = masters(model), look(model)
        truth = {name: told("onebit", now[name], whole) for name, whole in truth.items()}
        assert gathered(model) - before == changed_bytes(model)
        assert all(seen[name].equal(whole) for name, whole in truth.items())


@ranks(2)
def test_frozen_weights_stay_exact_until_they_are_trained() -> None:
    for policy in (None, BF16):
        model = following("onebit", mp_policy=policy)
        model[2].requires_grad_(False)
        optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.1)
        for step in range(4):
            train(model, optimizer, step)
        seen, now = look(model), masters(model)
        assert seen["2.weight"].equal(now["2.weight"].to(seen["2.weight"].dtype))
        assert not is_exact(model, seen)
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        train(model, optimizer, 5)
        now, after = masters(model), look(model)
        assert after["2.weight"].equal(told("onebit", now["2.weight"], seen["2.weight"]))


@ranks(2)
def test_weights_are_exact_until_the_warm_up_is_over() -> None:
    model = sharded(Compression(gradients="fp32", weights="ternary", warmup_steps=3), zero_stage=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exact = []
    for step in range(5):
        exact.append(is_exact(model, look(model)))
        train(model, optimizer, step)
    assert exact == [True, True, True, False, False]  # the third step is told as a change


@ranks(2)
def test_shards_may_be_in_host_memory() -> None:
    model = following("int4", offload_policy=CPUOffloadPolicy(), mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    truth = look(model)
    for step in range(3):
        train(model, optimizer, step)
        now, seen = masters(model), look(model)
        truth = {name: told("int4", now[name], whole) for name, whole in truth.items()}
        assert all(seen[name].equal(whole) for name, whole in truth.items())
