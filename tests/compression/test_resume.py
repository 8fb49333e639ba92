"""Residuals in checkpoints: what was to be said is said after a restart, once and in the right unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.compression.ledger import Ledger, gradients, loss_of, sharded, unsent
from tests.optim import slopes
from tests.ranks import on_ranks, ranks
from yafsdp_cc import Compression
from yafsdp_cc.compression.state import (
    carry_over_residuals,
    local_residuals,
    mean_estimates,
    mean_residuals,
    means_of_ranks,
)
from yafsdp_cc.fsdp2.module import require_state
from yafsdp_cc.optim import OneBitSGD
from yafsdp_cc.ranks.checks import all_gather_objects
from yafsdp_cc.ranks.mesh import all_groups


def saved(folder: Any, codec: str) -> None:
    model = sharded(Compression(gradients=codec, residual="fp32"))
    for step in range(5):
        loss_of(model, step).backward()
        model.zero_grad()
    yafsdp_cc.save(folder / "step", model, note=dist.get_rank())
    residuals = unsent(model)
    loss_of(model, 5).backward()
    found = gradients(model)
    if dist.get_rank() == 0:
        torch.save((residuals, found), folder / "truth.pt")


def resumed(folder: Any, codec: str) -> None:
    residuals, found = torch.load(folder / "truth.pt")
    model = sharded(Compression(gradients=codec, residual="fp32"))
    loss_of(model, 100).backward()  # residuals of its own, that are forgotten
    model.zero_grad()
    if dist.get_world_size() == 2:
        assert yafsdp_cc.load(folder / "step", model) == {"note": dist.get_rank()}
        loss_of(model, 5).backward()
        assert all(gradient.equal(found[name]) for name, gradient in gradients(model).items())
        return
    with pytest.warns(UserWarning, match="note differed between ranks and is left out"):
        assert yafsdp_cc.load(folder / "step", model) == {}
    model.set_reshard_after_forward(False)  # another assembly owes what this one does
    now = unsent(model)
    assert all(torch.allclose(now[name], residuals[name], rtol=1e-5, atol=1e-9) for name in residuals)
    ledger = Ledger(model, sharded(None))
    for step in range(5):
        ledger.step(step)
    ledger.check()


@pytest.mark.parametrize(
    ("readers", "codec"), [(2, "onebit"), (4, "onebit"), (1, "onebit"), (2, "powersgd"), (4, "powersgd")]
)
def test_residuals_are_resumed_by_any_number_of_ranks(readers, codec, tmp_path):
    """Bit for bit by as many as before."""
    on_ranks(2, saved, tmp_path, codec)
    on_ranks(readers, resumed, tmp_path, codec)


def divided(momentum: float, **more: Any) -> tuple[Any, Any]:
    """A model whose gradients are sums over ranks, as torchtitan's, and plain SGD or its 1-bit momentum."""
    model = slopes.sharded(**more)
    for module in (model, *model.parts):
        module.set_gradient_divide_factor(1.0)
    return model, (OneBitSGD if momentum else torch.optim.SGD)(model.parameters(), lr=0.01, momentum=momentum)


def divided_saved(folder: Any, momentum: float) -> None:
    model, optimizer = divided(momentum)
    slopes.trained(model, optimizer, range(3))
    yafsdp_cc.save(folder / "step", model, optimizer)


def divided_resumed(folder: Any, momentum: float) -> None:
    given = [sum(each) for each in zip(*(slopes.drawn(s, r) for s in range(3) for r in range(2)), strict=True)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    over_replicas, within = {"mesh": mesh}, {"mesh": mesh, "compression": {"scope": "shard"}}
    for more in ({}, over_replicas, *([] if momentum else [within])):
        model, optimizer = divided(momentum, **more)
        yafsdp_cc.load(folder / "step", model, optimizer)
        for _ in range(40 if momentum else 1):
            model([torch.zeros_like(each) for each in given]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for part, fresh, total in zip(model.parts, slopes.Slopes().parts, given, strict=True):
            moved = part.weight.full_tensor() - fresh.weight
            assert torch.allclose(moved, total * (-0.01 / (1 - momentum)), atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_residuals_are_resumed_in_the_unit_of_the_divisor(momentum, tmp_path):
    on_ranks(2, divided_saved, tmp_path, momentum)
    on_ranks(4, divided_resumed, tmp_path, momentum)


@ranks(2)
def test_matrices_too_small_for_factors_take_residuals_of_another_codec(tmp_path: Any) -> None:
    def fresh(codec: str) -> Any:
        return yafsdp_cc.shard(nn.Sequential(nn.Linear(40, 10)), compression=Compression(codec, residual="fp32"))

    for codec, other in (("int4", "powersgd"), ("powersgd", "int4"), ("powersgd", "powersgd")):
        model, resumed = fresh(codec), fresh(other)
        loss_of(model, 0).backward()
        yafsdp_cc.save(tmp_path / "step", model)
        yafsdp_cc.load(tmp_path / "step", resumed)
        owed, found = unsent(model), unsent(resumed)
        assert all(torch.allclose(found[name], each, atol=1e-9) for name, each in owed.items())


@pytest.mark.parametrize(("feedback", "scope"), [(True, "auto"), (True, "shard"), ("ef21", "auto"), ("ef21", "shard")])
@ranks(4)
def test_means_are_made_of_what_each_rank_has_saved(feedback: Any, scope: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(Compression("int4", feedback=feedback, residual="fp32", scope=scope), mesh=mesh)
    for module in (model, model[0], model[2], model[4]):
        module.set_gradient_divide_factor(3.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    yafsdp_cc.follow_scaler(model, scaler)
    for step in range(2):
        scaler.scale(loss_of(model, step)).backward()
        model.zero_grad()
    state = require_state(model)
    for _ in range(2):
        truth = mean_residuals(state), mean_estimates(state)
        made = means_of_ranks(state, all_gather_objects(local_residuals(state), all_groups(mesh)))
        for means, others in zip(truth, made, strict=True):
            for name, each in others.items():
                expected = means[name].to_local() if means else torch.zeros(())
                assert torch.allclose(each.to_local(), expected.expand_as(each.to_local()), rtol=1e-5, atol=1e-9), name
            assert means.keys() <= others.keys()
        carry_over_residuals(state, made[0])  # which the next sums add


@ranks(2)
def test_residuals_of_other_tensor_parallel_parts_are_said_to_be_left_out() -> None:
    model = sharded("int4")
    loss_of(model, 0).backward()
    state = require_state(model)
    saved = local_residuals(state)
    (places,) = (each["places"] for each in saved.values() if "0.weight" in each["places"])
    places["0.weight"][1:] = [[30, 40], [30, 0]]  # the second half of its rows
    with pytest.warns(UserWarning, match=r"residuals, .* of 0.weight are left out, as tensor parallelism divides them"):
        residuals, _ = means_of_ranks(state, [saved])
    assert residuals.keys() == unsent(model).keys() - {"0.weight"} != set()


@ranks(2)
def test_residuals_are_resumed_in_the_unit_of_the_scale_that_there_is(tmp_path: Any) -> None:
    truth = None
    for init_scale in (2.0**10, 2.0**4):
        model = sharded(Compression(gradients="onebit", residual="int8"))
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        yafsdp_cc.follow_scaler(model, scaler)
        if truth is None:
            scaler.scale(loss_of(model, 0)).backward()
            yafsdp_cc.save(tmp_path / "step", model)
            truth = unsent(model)
        yafsdp_cc.load(tmp_path / "step", model)
        assert all(each.equal(truth[name]) for name, each in unsent(model).items())
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**12})
        yafsdp_cc.follow_scaler(model, scaler)
        assert all(each.equal(truth[name]) for name, each in unsent(model).items())


@ranks(2)
def test_what_is_carried_over_to_the_next_sums_follows_the_scale() -> None:
    """A load by another number of ranks leaves such gradients."""
    model, scaler = sharded("int4"), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    yafsdp_cc.follow_scaler(model, scaler)
    scaler.scale(loss_of(model, 0)).backward()
    state, truth = require_state(model), unsent(model)
    carry_over_residuals(state, mean_residuals(state))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**12})
    yafsdp_cc.follow_scaler(model, scaler)
    assert truth
    assert all(torch.allclose(found, truth[name], rtol=1e-6, atol=0) for name, found in unsent(model).items())


@ranks(2)
def test_residuals_are_resumed_in_units_of_the_scale(tmp_path: Any) -> None:
    def fresh() -> tuple[Any, torch.amp.GradScaler]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return sharded(Compression(gradients="onebit")), scaler

    def step(model: Any, scaler: torch.amp.GradScaler, number: int) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.scale(loss_of(model, number)).backward()
        found = gradients(model)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        return found

    model, scaler = fresh()
    yafsdp_cc.follow_scaler(model, scaler)
    for number in range(5):
        step(model, scaler, number)
    yafsdp_cc.save(tmp_path / "scaled", model, scaler=scaler.state_dict())
    truth = step(model, scaler, 5)
    for followed in (False, True):  # before the load already, or only after it
        model, scaler = fresh()
        if followed:
            yafsdp_cc.follow_scaler(model, scaler)
        scaler.load_state_dict(yafsdp_cc.load(tmp_path / "scaled", model)["scaler"])
        yafsdp_cc.follow_scaler(model, scaler)
        found = step(model, scaler, 5)
        assert all(found[name].equal(gradient) for name, gradient in truth.items())


@ranks(2)
def test_a_warm_up_goes_on_where_it_was(tmp_path: Any) -> None:
    config, found = Compression(gradients="onebit", warmup_steps=3), []
    for model in (sharded(config), sharded(config)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            if step == 2 and found:
                yafsdp_cc.load(tmp_path / "step", model)
            elif step == 2:
                yafsdp_cc.save(tmp_path / "step", model)
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model[2].weight.full_tensor())
    assert found[0].equal(found[1])
    model.set_reshard_after_forward(False)
    loss_of(model, 5).backward()  # put together without what sums exactly
    yafsdp_cc.load(tmp_path / "step", model)
    loss_of(model, 2).backward()


@ranks(2)
def test_gradients_that_wait_for_the_last_micro_batch_are_resumed(tmp_path: Any) -> None:
    model = sharded(Compression(gradients="int8", residual="fp32"))
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    yafsdp_cc.save(tmp_path / "step", model)
    kept = unsent(model)
    loss_of(model, 1).backward()  # forgotten
    for _ in range(2):
        yafsdp_cc.load(tmp_path / "step", model)
        assert all(each.equal(kept[name]) for name, each in unsent(model).items())
        yafsdp_cc.save(tmp_path / "step", model)


@ranks(2)
def test_what_another_compression_does_not_encode_is_said_to_be_left_out(tmp_path: Any) -> None:
    model = sharded("onebit")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    yafsdp_cc.save(tmp_path / "step", model, optimizer)
    held = unsent(model)
    other = sharded(Compression(gradients="int8", overrides={"0.*": "fp32"}))
    for each, left_out in ((other, "of 0.weight, which"), (sharded(None), "of 0.weight, 2.weight, 4.weight, which")):
        with pytest.warns(
            UserWarning, match=f"residuals, gradients that were still to be sent, {left_out} this model does not"
        ):
            yafsdp_cc.load(tmp_path / "step", each, torch.optim.SGD(each.parameters(), lr=0.1))
    assert all(torch.allclose(each, held[name]) for name, each in unsent(other).items())
