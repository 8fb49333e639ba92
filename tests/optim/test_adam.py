"""1-bit Adam on sharded models, against its algorithm written out in float64 and against torch's AdamW."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.internals import flat_params, groups_of, shard_numel, unsharded_weights
from tests.optim.lossless import Lossless
from tests.optim.slopes import FORMS, SETTINGS, SHAPES, Reference, Slope, Slopes, drawn, sharded, trained, weights
from tests.ranks import on_ranks, ranks
from tests.soak import also
from yafsdp_cc import Compression
from yafsdp_cc.optim import OneBitAdam, OneBitSGD


@FORMS
@pytest.mark.parametrize("world", [2, also(4)])
@ranks("world")
def test_steps_are_those_of_the_algorithm_in_float64(world, form):
    ranks = dist.get_world_size()
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=4, form=form, refreshes=2)
    references = [
        Reference(model, index, ranks, form, warmup_steps=4, refresh_at=(1, 2, 4, 6, 10, 14, 22), **SETTINGS)
        for index in range(len(SHAPES))
    ]
    for step in range(1, 26):
        trained(model, optimizer, range(step - 1, step))
        found = weights(model)[::2]
        for reference, weight in zip(references, found, strict=True):
            reference.step(step)
            off = (weight.double() - reference.weight).abs() > 2e-6
            # A sum of almost nothing may round to the other sign, and the block's next scale is another one then.
            assert off.float().mean() < 0.03, (step, reference.index)


@ranks(2)
def test_warm_up_and_what_is_never_encoded_are_adamw_bit_for_bit() -> None:
    ours, theirs = sharded(), yafsdp_cc.shard(Slopes(), units=[Slope])
    optimizers = (
        OneBitAdam(ours.parameters(), **SETTINGS, warmup_steps=6),
        torch.optim.AdamW(theirs.parameters(), **SETTINGS, fused=True),
    )
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        trained(model, optimizer, range(6))
    assert all(one.equal(other) for one, other in zip(weights(ours), weights(theirs), strict=True))
    trained(ours, optimizers[0], range(6, 12))
    trained(theirs, optimizers[1], range(6, 12))
    for index, (one, other) in enumerate(zip(weights(ours), weights(theirs), strict=True)):
        assert one.equal(other) is (index % 2 == 1), index  # biases are never encoded


@FORMS
@pytest.mark.parametrize("refreshes", [0, 2])
@ranks(2)
def test_micro_batches_are_one_message(form: str, refreshes: int) -> None:
    once, thrice = sharded(), sharded()
    settings: dict[str, Any] = SETTINGS | {"warmup_steps": 2, "form": form, "refreshes": refreshes}
    optimizers = [OneBitAdam(each.parameters(), **settings) for each in (once, thrice)]
    rank = dist.get_rank()
    for step in range(12):
        batches = [drawn(3 * step + micro, rank) for micro in range(3)]
        once([sum(parts) for parts in zip(*batches, strict=True)]).backward()
        for micro, batch in enumerate(batches):
            thrice.set_requires_gradient_sync(micro == 2)
            thrice(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(weights(once), weights(thrice), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@ranks(2)
def test_a_second_sum_in_a_step_is_refused() -> None:
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), warmup_steps=1)
    trained(model, optimizer, range(3))
    model(drawn(3, 0)).backward()
    with pytest.raises(RuntimeError, match=r"^'parts.2.weight' has a .grad already, .* call optimizer.zero_grad\(\)"):
        model(drawn(4, 0)).backward()
    optimizer.zero_grad()
    trained(model, optimizer, range(4, 6))


def over_replicas(form: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, exact = sharded(mesh=mesh), yafsdp_cc.shard(Slopes(), units=[Slope], mesh=mesh)
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=4, form=form)
    plain = torch.optim.AdamW(exact.parameters(), **SETTINGS)
    trained(model, optimizer, range(30))
    trained(exact, plain, range(30))
    local = torch.cat([each.to_local().detach().flatten() for each in model.parameters()])
    others = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(others, local, group=mesh.get_group("replicate"))
    assert others[0].equal(others[1])
    far = [(a - b).norm() / (a - c).norm() for a, b, c in zip(*map(weights, (exact, model)), start(), strict=True)]
    assert all(0 < each < 0.35 for each in far[::2]), far


def start() -> list[torch.Tensor]:
    return [each.detach() for each in Slopes().parameters()]


@FORMS
def test_replicas_stay_alike_and_go_where_adamw_goes(form):
    on_ranks(4, over_replicas, form)


@pytest.mark.parametrize(
    ("scope", "has_partial_sums"), [(None, False), ("replicate", False), ("shard", False), ("shard", True)]
)
@ranks(2)
def test_the_second_moment_learns_from_exact_sums_that_are_clipped_like_the_others(
    scope: str | None, has_partial_sums: bool
) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if scope else None
    model = sharded(mesh=mesh, compression={"scope": scope or "auto"})
    settings: dict[str, Any] = SETTINGS | {"form": "gradient", "refreshes": 1, "max_grad_norm": 5.0}
    optimizer = OneBitAdam(model.parameters(), **settings, warmup_steps=3)
    weight = model.parts[0].weight
    for step in range(8):
        for sign in (-1, 1):  # what is below 0, and what is above, are two sums of the step
            if has_partial_sums:  # the first one waits for the second one's sum over replicas
                model.set_requires_all_reduce(sign > 0)
            model([each * (sign * each > 0) for each in drawn(step, rank)]).backward()
        before = optimizer.state[weight]["exp_avg_sq"].full_tensor()
        mean = torch.stack([drawn(step, each)[0] for each in range(ranks)]).mean(0)
        if step < 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            used = weight.grad.full_tensor()
        else:
            means = [torch.stack([drawn(step, each)[part] for each in range(ranks)]).mean(0) for part in range(3)]
            biases = [each.sum(1) for each in means]  # gradients of parameters that are never encoded count, too
            norm = torch.cat([each.flatten() for each in [*means, *biases]]).norm()
            used = mean * min(1.0, 5.0 / (norm.item() + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        after = optimizer.state[weight]["exp_avg_sq"].full_tensor()
        # After three of the warm-up: the first and the third after it, then the seventh.
        wanted = 0.95 * before + 0.05 * used**2 if step + 1 in (1, 2, 3, 4, 6) else before
        assert torch.allclose(after, wanted, rtol=1e-4, atol=1e-9), step


def bytes_sent() -> list[int]:
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), warmup_steps=2, refreshes=1)
    counters, sent = yafsdp_cc.counters_of(model), []
    for step in range(5):
        before = counters.reduced_bytes
        trained(model, optimizer, range(step, step + 1))
        sent.append(counters.reduced_bytes - before)
    exact = 4 * sum(shard_numel(flat) for flat in flat_params(model))
    planned = yafsdp_cc.plan_of(model).communication
    return [*(each - planned.replicated for each in sent), exact, planned.reduce]


def test_bytes_of_a_step_are_exact_then_encoded_and_both_at_refreshes():
    (*sent, exact, encoded), _ = on_ranks(2, bytes_sent)
    assert sent == [exact, exact, exact + encoded, encoded, exact + encoded]
    assert encoded < exact / 20


@pytest.mark.parametrize(("stage", "weights_by"), [(2, "int4"), (3, "int8")])
@ranks(2)
def test_weights_are_on_their_way_before_the_next_forward(stage: int, weights_by: str) -> None:
    model = sharded(zero_stage=stage, compression={"weights": weights_by, "block": 64})
    optimizer = OneBitAdam(model.parameters(), warmup_steps=3)
    counters = yafsdp_cc.counters_of(model)
    for step in range(6):
        model(drawn(step, dist.get_rank())).backward()
        before = counters.gathered_bytes
        optimizer.step()
        optimizer.zero_grad()
        early = counters.gathered_bytes - before
    plan = yafsdp_cc.plan_of(model)
    assert plan.communication.gather_forward > 0
    # All of what is kept; else what fits in the buffers, of which three blocks have two.
    whole = plan.communication.gather_forward
    assert early == whole if stage == 2 else 0.5 * whole < early < whole
    before = counters.gathered_bytes
    with torch.no_grad():
        model(drawn(9, 0))
    assert counters.gathered_bytes - before == whole - early
    if stage == 2:
        for index, (group, part) in enumerate(zip(groups_of(model), model.parts, strict=True)):
            (kept,) = unsharded_weights(group)
            everywhere = [torch.empty_like(kept) for _ in range(2)]
            dist.all_gather(everywhere, kept)
            assert everywhere[0].equal(everywhere[1]), index
            far = (kept[: part.weight.numel()] - part.weight.full_tensor().flatten()).abs().max()
            assert 0 < far < 1e-3, index  # of steps of 1e-3, told in four bits


@ranks(2)
def test_few_bits_without_it_are_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = sharded()
        trained(model, OneBitAdam(model.parameters(), warmup_steps=1), range(3))
        fine = sharded("int4")
        trained(fine, torch.optim.AdamW(fine.parameters()), range(2))
    other = sharded()
    with pytest.warns(UserWarning, match="gradients='onebit' and no optimizer of the 1-bit family"):
        trained(other, torch.optim.AdamW(other.parameters()), range(1))


# Beside a GradScaler --------------------------------------------------------------------------------------------------


@FORMS
@ranks(2)
def test_a_scaler_changes_nothing_but_skips_what_is_not_finite(form: str) -> None:
    plain, with_scaler = sharded(), sharded()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    optimizers = [OneBitAdam(each.parameters(), **SETTINGS, warmup_steps=3, form=form) for each in (plain, with_scaler)]
    yafsdp_cc.follow_scaler(with_scaler, scaler)
    trained(plain, optimizers[0], range(14))
    trained(with_scaler, optimizers[1], range(14), scaler)
    assert scaler.get_scale() > 1024
    assert all(one.equal(other) for one, other in zip(*map(weights, (plain, with_scaler)), strict=True))
    before = weights(with_scaler)
    first, *others = drawn(14, dist.get_rank())
    if dist.get_rank() == 1:
        first[0, 0] = torch.inf  # one element, which one rank owns
    scaler.scale(with_scaler([first, *others])).backward()
    scaler.step(optimizers[1])
    scaler.update()
    optimizers[1].zero_grad()
    assert all(one.equal(other) for one, other in zip(before, weights(with_scaler), strict=True))
    assert optimizers[1].steps == 14
    trained(with_scaler, optimizers[1], range(15, 24), scaler)
    assert all(each.isfinite().all() for each in weights(with_scaler))


class Some(Slopes):
    """Uses some of its parts."""

    def forward(self, slopes: list[Any]) -> torch.Tensor:
        used = [part(slope) for part, slope in zip(self.parts, slopes, strict=True) if slope is not None]
        return torch.stack(used).sum()


@pytest.mark.parametrize(("form", "to_none"), [("momentum", True), ("gradient", False)])
@ranks(2)
def test_exact_gradients_of_a_skipped_step_are_dropped(form: Any, to_none: bool) -> None:
    model: Any = yafsdp_cc.shard(Some(), units=[Slope], compression=Compression("onebit"))
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=3, form=form)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    yafsdp_cc.follow_scaler(model, scaler)
    trained(model, optimizer, range(4), scaler)
    first, *others = drawn(4, dist.get_rank())
    for slopes in ([torch.full_like(first, torch.inf), *others], [None, *others]):  # exact sums besides
        scaler.scale(model(slopes)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=to_none)
    assert scaler.get_scale() == 512
    assert all(state["exp_avg_sq"].to_local().isfinite().all() for state in optimizer.state.values())


@pytest.mark.parametrize("unit", [Slope, Some])
@ranks(2)
def test_a_second_moment_has_only_gradients_that_its_parameter_has(unit: type[nn.Module]) -> None:
    """Against AdamW in one process: a part, a unit or less than one, goes unused after a batch that was cleared."""
    model: Any = yafsdp_cc.shard(Some(), units=[unit], compression=Compression(Lossless.name, residual="fp32"))
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=3, form="gradient", refreshes=100)
    whole = Some()
    adamw = torch.optim.AdamW(whole.parameters(), **SETTINGS)

    def loss(of: Any, step: int, rank: int) -> torch.Tensor:
        first, *others = drawn(step, rank)
        total: torch.Tensor = of([first if step % 2 else None, *others])
        return total

    for step in range(9):
        if step == 6:
            (model([*drawn(99, 0)[:2], None]) * 100).backward()
            optimizer.zero_grad()
        for rank in range(2):
            (loss(whole, step, rank) / 2).backward()
        loss(model, step, dist.get_rank()).backward()
        for each in (optimizer, adamw):
            each.step()
            each.zero_grad()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        found, wanted = optimizer.state[mine], adamw.state[theirs]
        assert found["step"] == found.get("variance_step", found["step"]) == wanted["step"]
        torch.testing.assert_close(found["exp_avg_sq"].full_tensor(), wanted["exp_avg_sq"], rtol=1e-4, atol=1e-9)


@ranks(2)
def test_a_scaler_that_nobody_follows_is_refused() -> None:
    model = sharded()
    optimizer, scaler = OneBitAdam(model.parameters(), warmup_steps=3), torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match=r"call yafsdp_cc.follow_scaler\(model, scaler\) before the first backward"):
        trained(model, optimizer, range(1), scaler)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(drawn(1, dist.get_rank()))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="its scale is unknown to the residuals"):
        scaler.step(optimizer)


# Refused --------------------------------------------------------------------------------------------------------------


@ranks(2)
def test_what_cannot_work_is_refused_by_name() -> None:
    def said(match: str, model: Any, **settings: Any) -> None:
        parameters = settings.pop("params", None) or model.parameters()
        with pytest.raises(ValueError, match=match):
            OneBitAdam(parameters, **{"warmup_steps": 10, **settings})

    said("of a model that is sharded with a compression, and one of shape", nn.Linear(4, 4))
    said("of a model that is sharded with a compression", yafsdp_cc.shard(Slopes(), units=[Slope]))
    said(r"Compression\(warmup_steps=3\) another: leave", sharded(compression={"warmup_steps": 3}))
    said(r"Compression\(feedback=False\) has none", sharded("int8", compression={"feedback": False}))
    said("leave carry=0.5 out of the Compression", sharded(compression={"carry": 0.5}))
    said("with compression='auto' the speed of the network does", sharded("auto"))
    said("with compression='auto' the speed", sharded(compression={"overrides": {"parts.0.*": "auto"}}))
    model = sharded()
    some = [model.parts[0].weight, *(part.bias for part in model.parts)]
    said(r"was not given 'parts.1.weight', .*overrides=\{\"parts.1.weight\": \"fp32\"\}", model, params=some)
    groups = [{"params": some}, {"params": [part.weight for part in list(model.parts)[1:]], "betas": (0.5, 0.9)}]
    said("the same betas in all groups", model, params=groups)
    said("form='paper': 'momentum' or 'gradient'", model, form="paper")
    said("warmup_steps=0: at least 1", model, warmup_steps=0)
    said("refreshes=-1", model, refreshes=-1)
    said(r"betas=\(1.0, 0.9\)", model, betas=(1.0, 0.9))
    said("lr=-1", model, lr=-1)
    first = OneBitAdam(model.parameters(), warmup_steps=1)
    with pytest.raises(ValueError, match="give OneBitAdam all parameter groups when it is made"):
        first.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="a model has one OneBitAdam, and a copy would be a second"):
            copied(first)
    trained(model, first, range(3))
    for kind in (OneBitAdam, OneBitSGD):
        with pytest.raises(ValueError, match=r"the model has a OneBitAdam already, .* delete it first"):
            kind(model.parameters(), lr=1e-3, warmup_steps=1)
    trained(model, first, range(3, 5))


@ranks(2)
def test_gradients_that_are_cleared_before_a_step_are_warned_of() -> None:
    """A GAN's other network, or a batch that the loop leaves out: the momentum has them already."""
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), warmup_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, optimizer, range(4))
        model(drawn(4, 0)).backward()
        model.zero_grad()
    with pytest.warns(UserWarning, match=r"they were cleared, .* requires_grad_\(False\)"):
        model(drawn(5, 0)).backward()


@ranks(2)
def test_momenta_that_another_optimizer_takes_are_warned_of() -> None:
    """Ranks free an optimizer and its scheduler at different times: none may raise for want of it."""
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), warmup_steps=1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # the two refer to each other
    trained(model, optimizer, range(3))
    gc.disable()
    del optimizer, scheduler
    if dist.get_rank() == 0:
        gc.collect()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, plain, range(3, 4))
    with pytest.warns(UserWarning, match="another optimizer took momenta for gradients"):
        trained(model, plain, range(4, 5))
    gc.enable()
    gc.collect()
    trained(model, OneBitAdam(model.parameters(), warmup_steps=1), range(3))


@ranks(2)
def test_an_optimizer_is_replaced_between_any_two_lines() -> None:
    """The first one, too, may be made between a forward and its backward."""
    replaced, fresh = sharded(), sharded()
    for _ in range(2):
        fresh.load_state_dict(replaced.state_dict())
        expected = OneBitAdam(fresh.parameters(), **SETTINGS, warmup_steps=2)
        trained(fresh, expected, range(5))
        loss = replaced(drawn(0, dist.get_rank()))
        optimizer = OneBitAdam(replaced.parameters(), **SETTINGS, warmup_steps=2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # the two refer to each other
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(replaced, optimizer, range(1, 5))
        assert all(one.equal(other) for one, other in zip(weights(replaced), weights(fresh), strict=True))
        del optimizer, scheduler, expected


@ranks(2)
def test_parts_that_become_one_model_have_one_optimizer() -> None:
    compression = Compression("onebit", residual="fp32", block=64)
    model, optimizers = Slopes(), []
    for part, slope in zip(model.parts, drawn(0, dist.get_rank()), strict=True):
        yafsdp_cc.fully_shard(part, compression=compression)
        part(slope).backward()
        optimizers.append(OneBitAdam(part.parameters(), warmup_steps=1))
        optimizers[-1].step()
        optimizers[-1].zero_grad()
    yafsdp_cc.fully_shard(model, compression=compression)
    model(drawn(1, dist.get_rank())).backward()
    for optimizer in optimizers[1:]:
        with pytest.raises(RuntimeError, match="no longer sets when sums are encoded: its model was made a part"):
            optimizer.step()


@ranks(2)
def test_an_optimizer_may_come_between_fully_shard_and_the_first_forward() -> None:
    compression = Compression("onebit", residual="fp32", block=64)
    results = []
    for runs_before in (False, True):
        model: Any = Slopes()
        for part in model.parts:
            yafsdp_cc.fully_shard(part, compression=compression)
        yafsdp_cc.fully_shard(model, compression=compression)
        if runs_before:
            with torch.no_grad():
                model(drawn(0, dist.get_rank()))
        optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=2)
        trained(model, optimizer, range(5))
        results.append(weights(model))
        del optimizer
    assert all(one.equal(other) for one, other in zip(*results, strict=True))


@ranks(4)
def test_momentum_that_replicas_do_not_share_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh, compression={"scope": "shard"})
    with pytest.raises(ValueError, match="every replica would have a momentum of its own: leave the scope out"):
        OneBitAdam(model.parameters(), warmup_steps=1)
    trained(model, OneBitAdam(model.parameters(), warmup_steps=1, form="gradient"), range(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@ranks(2)
def test_parameters_of_other_dtypes_train(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = yafsdp_cc.shard(Slopes().to(dtype), units=[Slope], compression=Compression("onebit", block=64))
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=3)
    for step in range(8):
        model([each.to(dtype) for each in drawn(step, dist.get_rank())]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(each.isfinite().all() and each.dtype == dtype for each in weights(model))
    moved = [(a.double() - b.double()).abs().mean() for a, b in zip(weights(model), start(), strict=True)]
    assert min(moved) > 0.01


@pytest.mark.parametrize("gradients", ["int8", "int4", "ternary", "powersgd"])
@ranks(2)
def test_momentum_crosses_in_other_codecs_too(gradients: str) -> None:
    model, exact = sharded(gradients), yafsdp_cc.shard(Slopes(), units=[Slope])
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=4)
    trained(model, optimizer, range(25))
    trained(exact, torch.optim.AdamW(exact.parameters(), **SETTINGS), range(25))
    far = [(a - b).norm() / (a - c).norm() for a, b, c in zip(*map(weights, (exact, model)), start(), strict=True)]
    assert max(far) < 0.6, far
