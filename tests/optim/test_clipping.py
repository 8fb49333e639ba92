"""Gradients that are clipped before they are sent, against AdamW on clipped ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import yafsdp_cc
from tests.internals import LocalClip, awaits_exact_step, flat_param, has_exact_sum, unsharded_params
from tests.optim.lossless import Lossless
from tests.optim.slopes import FORMS, SETTINGS, Slope, Slopes, drawn, sharded, weights
from tests.ranks import on_ranks, ranks
from tests.soak import also
from tests.streams import streams
from yafsdp_cc.optim import OneBitAdam, OneBitLamb, OneBitSGD

LIMIT = 20.0
"""Of a mean gradient whose norm is about 80 with two ranks."""


def spike(step: int) -> float:
    """How much larger than usual all gradients of a step are: those after a warm-up of five, and some later."""
    return {5: 100.0, 6: 0.5, 11: 50.0, 17: 5.0}.get(step, 1.0)


def trained(model: Any, optimizer: Any, steps: range, clips: bool, scale: float = 1.0) -> None:
    for step in steps:
        model([each * spike(step) * scale for each in drawn(step, dist.get_rank())]).backward()
        if clips:
            clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()


def led(model: Any, limit: float | None = LIMIT, **more: Any) -> OneBitAdam:
    return OneBitAdam(model.parameters(), **SETTINGS, **{"warmup_steps": 5, "max_grad_norm": limit} | more)


def far(one: Any, other: Any) -> float:
    """How far weights are apart, by how far they went."""
    start = [each.detach() for each in Slopes().parameters()]
    triples = list(zip(weights(one), weights(other), start, strict=True))[::2]
    return max(float((a - b).norm() / (a - c).norm()) for a, b, c in triples)


@pytest.mark.parametrize(
    ("world", "gradients", "mesh_shape"),
    [(2, "int8", (2,)), (2, "onebit", (2,)), also(4, "int8", (4,)), (4, "int8", (2, 2))],
)
@ranks("world")
def test_large_gradients_are_clipped_in_the_momentum_as_adamw_has_it(world, gradients, mesh_shape):
    mesh = None
    if len(mesh_shape) > 1:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    more: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    clipped, raw = sharded(gradients, **more), sharded(gradients, **more)
    exact = yafsdp_cc.shard(Slopes(), units=[Slope], **more)
    trained(exact, torch.optim.AdamW(exact.parameters(), **SETTINGS), range(25), clips=True)
    for model, limit in ((clipped, LIMIT), (raw, None)):
        optimizer = led(model, limit, refreshes=1000)  # all of the second moment: what is left is the first
        trained(model, optimizer, range(5), clips=True)
        trained(model, optimizer, range(5, 25), clips=False)  # what a loop would clip is the momentum
    assert far(exact, clipped) < (0.1 if gradients == "int8" else 0.4), far(exact, clipped)
    assert far(exact, raw) > 0.5, far(exact, raw)


@FORMS
@ranks(2)
def test_the_limit_is_one_of_all_gradients_encoded_or_not(form: str) -> None:
    """The second moment of what is encoded, beside biases and a part that are not, against AdamW in one process."""
    model = sharded(Lossless.name, compression={"overrides": {"parts.1.*": "fp32"}})
    optimizer = led(model, form=form, refreshes=1000)
    whole = Slopes()
    adamw = torch.optim.AdamW(whole.parameters(), **SETTINGS)
    for step in range(14):
        for rank in range(2):
            (whole([each * spike(step) for each in drawn(step, rank)]) / 2).backward()
        clip_grad_norm_(whole.parameters(), LIMIT)
        adamw.step()
        adamw.zero_grad()
        trained(model, optimizer, range(step, step + 1), clips=step < 5 or form == "gradient")
    for mine, theirs in list(zip(model.parameters(), whole.parameters(), strict=True))[::4]:
        found, wanted = optimizer.state[mine]["exp_avg_sq"].full_tensor(), adamw.state[theirs]["exp_avg_sq"]
        # in the momentum form ranks clip what they send by estimates of their share
        assert (found - wanted).norm() < (1e-5 if form == "gradient" else 0.2) * wanted.norm()


@pytest.mark.parametrize("to_none", [True, False])
@ranks(2)
def test_gradients_without_a_codec_that_are_cleared_before_the_step_are_in_no_norm(to_none: bool) -> None:
    """DINO clears gradients of its last layer so at first; AdamW in one process is the truth."""
    model = sharded(Lossless.name, compression={"overrides": {"parts.1.*": "fp32"}})
    optimizer = led(model, form="gradient", refreshes=1000, warmup_steps=2)
    whole = Slopes()
    adamw = torch.optim.AdamW(whole.parameters(), **SETTINGS)
    for step in range(5):
        for rank in range(2):
            (whole(drawn(step, rank)) / 2).backward()
        model(drawn(step, dist.get_rank())).backward()
        for each, own in ((model, optimizer), (whole, adamw)):
            each.parts[1].zero_grad(set_to_none=to_none)
            clip_grad_norm_(each.parameters(), LIMIT)
            own.step()
            own.zero_grad()
    found, wanted = optimizer.state[model.parts[0].weight], adamw.state[whole.parts[0].weight]
    torch.testing.assert_close(found["exp_avg_sq"].full_tensor(), wanted["exp_avg_sq"], rtol=1e-4, atol=1e-9)


@ranks(2)
def test_what_is_far_off_on_one_rank_is_clipped_there() -> None:
    def momenta(factor: float) -> list[torch.Tensor]:
        """Their norms after a step in which one rank's gradients of one weight are so much larger."""
        model = sharded("int8")
        optimizer = led(model)
        trained(model, optimizer, range(8), clips=False)
        slopes = drawn(8, dist.get_rank())
        if dist.get_rank() == 1:
            slopes[1] = factor * slopes[1]
        model(slopes).backward()
        return [parameter.grad.full_tensor().norm() for parameter in model.parameters()][::2]

    usual, spiked = momenta(1.0), momenta(1e4)
    assert spiked[0] == usual[0]
    assert spiked[2] == usual[2]
    assert spiked[1] < 2 * usual[1], (spiked, usual)


@ranks(2)
def test_micro_batches_are_clipped_each_by_itself() -> None:
    once, twice = sharded(), sharded()
    for model in (once, twice):
        optimizer = led(model)
        for step in range(14):
            slopes = [each * spike(step) for each in drawn(step, dist.get_rank())]
            if model is once:
                model(slopes).backward()
            else:
                for sends in (False, True):
                    model.set_requires_gradient_sync(sends)
                    model([each / 2 for each in slopes]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert far(once, twice) < 0.3


@ranks(2)
def test_a_loss_scale_changes_nothing() -> None:
    plain, with_scale = sharded(), sharded()
    optimizers = [led(each, refreshes=1) for each in (plain, with_scale)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    yafsdp_cc.follow_scaler(with_scale, scaler)
    for step in range(14):
        slopes = [each * spike(step) for each in drawn(step, dist.get_rank())]
        plain(slopes).backward()
        optimizers[0].step()
        scaler.scale(with_scale(slopes)).backward()
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert scaler.get_scale() > 1024
    assert all(one.equal(other) for one, other in zip(weights(plain), weights(with_scale), strict=True))


@pytest.mark.parametrize("form", ["momentum", "gradient"])
@pytest.mark.parametrize("limit", [None, LIMIT])
@ranks(2)
def test_nothing_races_on_streams(limit: float | None, form: str) -> None:
    """Exact gradients and norms, which a lane writes and the optimizer reads and frees."""
    with streams():
        model = sharded("int8")
        optimizer = led(model, limit, warmup_steps=2, form=form)
        trained(model, optimizer, range(8), clips=True)


# Again and elsewhere --------------------------------------------------------------------------------------------------


def following() -> Any:
    """A model whose weights are sent as deltas, and so are not quite the optimizer's."""
    return sharded(compression={"residual": "int8", "weights": "ternary"}, zero_stage=2)


def seen(model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        model(drawn(0, 0))
    return unsharded_params(model)


def saved(folder: Any, at: int) -> None:
    model = following()
    optimizer = led(model)
    trained(model, optimizer, range(at), clips=False)
    yafsdp_cc.save(folder / "step", model, optimizer)
    used = seen(model)
    trained(model, optimizer, range(at, at + 8), clips=False)
    found = weights(model)
    if dist.get_rank() == 0:
        torch.save((used, found), folder / "truth.pt")


def resumed(folder: Any, at: int) -> None:
    model = following()
    optimizer = led(model)
    trained(model, optimizer, range(40, 47), clips=False, scale=3.0)  # limits of its own, that are forgotten
    yafsdp_cc.load(folder / "step", model, optimizer)
    trained(model, optimizer, range(at, at + 8), clips=False)
    _, truth = torch.load(folder / "truth.pt")
    assert all(one.equal(other) for one, other in zip(weights(model), truth, strict=True))


@pytest.mark.parametrize("at", [3, 4, 5, 14])
def test_a_resumed_run_goes_on_bit_for_bit(at, tmp_path):
    """Before what can be learned of the warm-up is, just after, and later."""
    on_ranks(2, saved, tmp_path, at)
    on_ranks(2, resumed, tmp_path, at)


def elsewhere(folder: Any) -> None:
    model = following()
    optimizer, counters = led(model), yafsdp_cc.counters_of(model)
    yafsdp_cc.load(folder / "step", model, optimizer)
    used, _ = torch.load(folder / "truth.pt")
    for name, weight in seen(model).items():  # the exact step begins where the run was, not at the optimizer's weights
        torch.testing.assert_close(weight, used[name], rtol=0, atol=1e-6)
        assert not weight.equal(model.get_parameter(name).full_tensor())
    sent = []
    for step in range(16, 20):
        before = counters.reduced_bytes
        trained(model, optimizer, range(step, step + 1), clips=False)
        sent.append(counters.reduced_bytes - before)
    assert sent[0] > 10 * sent[1] == 10 * sent[3]  # one exact step, from which limits are learned
    assert not awaits_exact_step(optimizer)


def test_other_ranks_learn_their_limits_from_one_exact_step(tmp_path):
    on_ranks(4, saved, tmp_path, 16)
    on_ranks(2, elsewhere, tmp_path)


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
@ranks(2)
def test_a_run_is_given_a_limit_later(kind: Any, tmp_path: Any) -> None:
    """Its exact step has all of the momentum."""

    def fresh(limit: float | None) -> tuple[Any, Any]:
        model = sharded("int8")
        return model, kind(model.parameters(), **SETTINGS, warmup_steps=5, max_grad_norm=limit)

    one, other = fresh(None), fresh(1e6)
    trained(*one, range(15), clips=False)
    yafsdp_cc.save(tmp_path / "step", *one)
    yafsdp_cc.load(tmp_path / "step", *other)
    assert awaits_exact_step(other[1])
    for each in (one, other):
        trained(*each, range(15, 17), clips=False)
    assert not awaits_exact_step(other[1])
    assert 0 < far(one[0], other[0]) < 0.02
    assert not has_exact_sum(flat_param(other[0], 0))


@ranks(2)
def test_who_clips_and_does_not_tell_is_warned_before_it_matters() -> None:
    said = "the loop clips gradients .by now to 0.2.* of their norm.*, and OneBit.* does not know the limit"
    for kind in (OneBitAdam, OneBitLamb):
        model = sharded()
        optimizer = kind(model.parameters(), warmup_steps=5)
        trained(model, optimizer, range(4), clips=True)
        with pytest.warns(UserWarning, match=said):
            trained(model, optimizer, range(4, 5), clips=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, optimizer, range(5, 7), clips=True)
        for limit, clips, more in ((None, False, {}), (LIMIT, True, {}), (None, True, {"form": "gradient"})):
            model = sharded()
            trained(model, led(model, limit, **more), range(7), clips=clips)
        model = sharded()  # nobody could tell it
        trained(model, OneBitSGD(model.parameters(), warmup_steps=2), range(4), clips=True)
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"max_grad_norm=.*: the limit of clip_grad_norm_, more than 0"):
            led(model, limit)


# One limit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_limit_is_a_share_of_the_whole(dtype):
    clip = LocalClip(2.0)
    gradients = torch.full((100,), 0.3, dtype=dtype)  # of norm 3
    clip.clip("a", gradients, 1.0)
    clip.clip("b", torch.zeros(100), 1.0)
    assert clip.is_blind
    assert clip.state() is None
    clip.learn(12.0)
    assert not clip.is_blind
    assert clip.state() == {"a": pytest.approx(0.25, rel=0.01)}
    clip.clip("a", gradients, 8.0)  # of a loss times 8: the limit is 2 · 8 / 4
    assert gradients.norm().item() == pytest.approx(3.0, rel=0.01)
    clip.clip("a", gradients, 1.0)
    assert gradients.norm().item() == pytest.approx(0.5, rel=0.01)
    clip.learn(1.0)
    assert clip.state() == {"a": pytest.approx(0.25 + 0.3 * 0.25, rel=0.01)}


def test_what_is_not_finite_is_neither_clipped_nor_learned_from():
    clip = LocalClip(1.0)
    clip.clip("a", torch.ones(4), 1.0)
    clip.learn(float("nan"))
    assert clip.is_blind
    clip.clip("a", torch.ones(4), 1.0)
    clip.learn(1.0)
    broken = torch.tensor([1.0, torch.inf, 3.0, torch.nan])
    clip.clip("a", broken, 1.0)
    assert broken.nan_to_num(7.0, 8.0).tolist() == [1.0, 8.0, 3.0, 7.0]
    clip.learn(1.0)
    assert clip.state() == {"a": 2.0}
    huge = torch.tensor([1e30, 1.0])  # finite, and its norm in fp32 is not
    clip.clip("a", huge, 1.0)
    assert huge.tolist() == [0.0, 0.0]
    clip.learn(1.0)
    assert clip.state() == {"a": 2.0}
    infinite = torch.tensor([torch.inf, 1.0])
    clip.clip("a", infinite, 1.0)
    assert infinite.isnan().tolist() == [True, False]  # found by a scaler
    other = LocalClip(1.0)
    other.load_state(clip.state(), torch.device("cpu"))
    assert other.state() == {"a": 2.0}
    other.load_state(None, torch.device("cpu"))
    assert other.is_blind
