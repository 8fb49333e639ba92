"""1-bit Adam saved and loaded: at the same number of ranks bit for bit, at others without a loss, and as AdamW's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests.internals import mean_residuals_of, phase_of
from tests.optim.slopes import BLOCK, FORMS, SETTINGS, SHAPES, Slope, Slopes, drawn, sharded, trained, weights
from tests.ranks import on_ranks, ranks
from tests.soak import also
from yafsdp_cc import Compression
from yafsdp_cc.optim import OneBitAdam, OneBitLamb, ZeroOneAdam

if TYPE_CHECKING:
    from pathlib import Path

SAVED_AT, THEN = (3, 5, 6, 14), 8
"""In the warm-up, at its end, in the step after that and later; and how many steps are compared from there on."""


def saved(folder: Any, form: str) -> None:
    model = sharded(compression={"residual": "int8"})
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=5, form=form)
    truth = {}
    for step in range(SAVED_AT[-1] + THEN):
        if step in SAVED_AT:
            yafsdp_cc.save(folder / str(step), model, optimizer)
        trained(model, optimizer, range(step, step + 1))
        truth[step + 1] = weights(model)
    if dist.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")


def resumed(folder: Any, form: str) -> None:
    truth = torch.load(folder / "truth.pt")
    for at in SAVED_AT:
        model = sharded(compression={"residual": "int8"})
        optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=5, form=form)
        trained(model, optimizer, range(40, 47))  # states of its own, that are forgotten
        yafsdp_cc.load(folder / str(at), model, optimizer)
        trained(model, optimizer, range(at, at + THEN))
        assert all(one.equal(other) for one, other in zip(weights(model), truth[at + THEN], strict=True)), at


@FORMS
def test_a_resumed_run_goes_on_bit_for_bit(form, tmp_path):
    on_ranks(2, saved, tmp_path, form)
    on_ranks(2, resumed, tmp_path, form)


def momentum_saved(folder: Any, form: str) -> None:
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=5, form=form)
    trained(model, optimizer, range(14))
    yafsdp_cc.save(folder / "step", model, optimizer)
    momentum, found = _momentum(model, optimizer), weights(model)
    if dist.get_rank() == 0:
        torch.save((momentum, found), folder / "truth.pt")


def _momentum(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """All that updates to come hold of gradients that were, by parameter: the first moment and what is unsaid."""
    unsaid = mean_residuals_of(model)
    beta = SETTINGS["betas"][0]
    momentum = optimizer.form == "momentum"
    return [
        optimizer.state[weight]["exp_avg"].full_tensor()
        + unsaid.get(name, 0.0) * ((1 - beta) / beta if momentum else 1 - beta)
        for name, weight in model.named_parameters()
        if name.endswith("weight")
    ]


def momentum_resumed(folder: Any, form: str) -> None:
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=5, form=form)
    yafsdp_cc.load(folder / "step", model, optimizer)
    truth, parameters = torch.load(folder / "truth.pt")
    assert optimizer.steps == 14
    assert all(one.equal(other) for one, other in zip(weights(model), parameters, strict=True))
    if form == "momentum":
        for one, other in zip(_momentum(model, optimizer), truth, strict=True):
            assert torch.allclose(one, other, atol=1e-7)
    trained(model, optimizer, range(14, 20))


@FORMS
@pytest.mark.parametrize(("before", "after"), [also(4, 2), (2, 4), (2, 1)])
def test_a_run_goes_on_with_other_ranks_and_no_momentum_is_lost(before, after, form, tmp_path):
    on_ranks(before, momentum_saved, tmp_path, form)
    on_ranks(after, momentum_resumed, tmp_path, form)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(OneBitAdam, warmup_steps=1, form="gradient")])
@ranks(2)
def test_gradients_that_another_form_has_not_sent_enter_the_momentum_as_gradients(kind: Any, tmp_path: Any) -> None:
    """The checkpoint's residuals do not fit, so that their mean is carried over."""
    before = sharded(compression={"residual": "bf16"})
    saved = kind(before.parameters(), **SETTINGS)
    trained(before, saved, range(6))
    unsent, beta = mean_residuals_of(before), SETTINGS["betas"][0]
    yafsdp_cc.save(tmp_path / "step", before, saved)
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=1, refreshes=0)
    yafsdp_cc.load(tmp_path / "step", model, optimizer)
    moments = {name: optimizer.state[each]["exp_avg"] for name, each in model.named_parameters() if name in unsent}
    due = {name: beta * each.full_tensor() + (1 - beta) * unsent[name] for name, each in moments.items()}
    model([torch.zeros(shape) for shape in SHAPES]).backward()
    optimizer.step()
    for name, moment in moments.items():
        torch.testing.assert_close(moment.full_tensor(), due[name])


@ranks(2)
def test_a_second_moment_of_many_steps_is_taken_for_what_it_is(tmp_path: Any) -> None:
    """Although the optimizer that loads it has a short warm-up."""
    exact = yafsdp_cc.shard(Slopes(), units=[Slope])
    adamw = torch.optim.AdamW(exact.parameters(), lr=1e-2, betas=(0.9, 0.999))
    trained(exact, adamw, range(40))
    yafsdp_cc.save(tmp_path / "exact", exact, adamw)
    model = sharded("int8")
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.999), warmup_steps=3, refreshes=0)
    yafsdp_cc.load(tmp_path / "exact", model, optimizer)
    before = weights(model)
    trained(exact, adamw, range(40, 41))
    trained(model, optimizer, range(40, 41))
    for old, one, other in zip(before, weights(model), weights(exact), strict=True):
        assert (one - other).norm() < 0.1 * (other - old).norm()


@ranks(2)
def test_a_second_moment_of_few_steps_is_taken_for_what_it_is(tmp_path: Any) -> None:
    """AdamW's step behind it is as long as after AdamW's own training, and LAMB's fresh second moment is the same."""
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999)}
    model, exact, other, another = sharded("int8"), *(yafsdp_cc.shard(Slopes(), units=[Slope]) for _ in "ab"), sharded()
    optimizer = OneBitAdam(model.parameters(), **settings, warmup_steps=20, refreshes=0, form="gradient")
    adamw, loaded = (torch.optim.AdamW(each.parameters(), **settings) for each in (exact, other))
    lamb = OneBitLamb(another.parameters(), **settings, warmup_steps=20)
    trained(model, optimizer, range(60))
    trained(exact, adamw, range(60))
    yafsdp_cc.save(tmp_path / "encoded", model, optimizer)
    with pytest.warns(UserWarning, match="residuals, gradients that were still to be sent"):
        yafsdp_cc.load(tmp_path / "encoded", other, loaded)
    yafsdp_cc.load(tmp_path / "encoded", another, lamb)
    assert all(each.keys() == {"step", "exp_avg", "exp_avg_sq"} for each in loaded.state.values())
    for state in (each for each in lamb.state.values() if "trust" in each):
        seen = state["exp_avg_sq"].full_tensor().double() / (1 - 0.999**20)
        torch.testing.assert_close(state["exp_avg_sq_fresh"].full_tensor().double() / (1 - 0.999**60), seen)
    before = weights(exact), weights(other)
    trained(exact, adamw, range(60, 61))
    trained(other, loaded, range(60, 61))
    for old, new, old_loaded, new_loaded in zip(before[0], weights(exact), before[1], weights(other), strict=True):
        assert float((new_loaded - old_loaded).norm()) == pytest.approx(float((new - old).norm()), rel=0.2)


@ranks(2)
def test_loading_a_state_twice_does_what_loading_it_once_does() -> None:
    model, exact = sharded(), sharded(compression={"overrides": {"parts.0.*": "fp32"}})
    settings: dict[str, Any] = SETTINGS | {"warmup_steps": 3, "refreshes": 0}
    optimizer, again = OneBitAdam(model.parameters(), **settings), OneBitAdam(exact.parameters(), **settings)
    trained(model, optimizer, range(8))
    state = optimizer.state_dict()
    of_three = optimizer.state[model.parts[0].weight]["exp_avg_sq"].full_tensor()
    wanted = of_three * (1 - 0.95**8) / (1 - 0.95**3)  # never encoded from here on: as if of all eight gradients
    for _ in range(2):
        again.load_state_dict(state)
        torch.testing.assert_close(again.state[exact.parts[0].weight]["exp_avg_sq"].full_tensor(), wanted)


def goes_on_alike(fresh: Callable[[], Any], train: Callable[..., Any], path: Path, saved_at: int, end: int) -> None:
    """A run that was saved, and another one that has loaded it, end with the same weights bit for bit."""
    one, other = fresh(), fresh()
    train(*one, range(saved_at))
    yafsdp_cc.save(path, *one)
    yafsdp_cc.load(path, *other)
    for run in (one, other):
        train(*run, range(saved_at, end))
    assert all(a.equal(b) for a, b in zip(weights(one[0]), weights(other[0]), strict=True))


@ranks(2)
def test_moments_are_resumed_in_fp32_whatever_the_parameters_are(tmp_path: Any) -> None:
    def fresh() -> tuple[Any, Any]:
        model = yafsdp_cc.shard(Slopes().bfloat16(), units=[Slope], compression=Compression("onebit", block=64))
        return model, OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=3)

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            model([each.bfloat16() for each in drawn(step, dist.get_rank())]).backward()
            optimizer.step()
            optimizer.zero_grad()

    goes_on_alike(fresh, train, tmp_path / "step", 6, 12)


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
@pytest.mark.parametrize(("saved", "loaded"), [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)])
@ranks(2)
def test_moments_of_other_dtypes_go_on_in_fp32(saved: torch.dtype, loaded: torch.dtype, kind: Any) -> None:
    def train(model: Any, optimizer: Any, dtype: torch.dtype, steps: range) -> None:
        for step in steps:
            model([each.to(dtype) for each in drawn(step, dist.get_rank())]).backward()
            optimizer.step()
            optimizer.zero_grad()

    exact = yafsdp_cc.shard(Slopes().to(saved), units=[Slope])
    adamw = torch.optim.AdamW(exact.parameters(), **SETTINGS)
    train(exact, adamw, saved, range(3))
    model = yafsdp_cc.shard(Slopes().to(loaded), units=[Slope], compression=Compression("onebit", block=BLOCK))
    optimizer = kind(model.parameters(), **SETTINGS, warmup_steps=5)
    optimizer.load_state_dict(adamw.state_dict())
    for one, other in zip(exact.parameters(), model.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[other][name].to_local()
            assert moment.dtype == torch.float32
            assert moment.equal(adamw.state[one][name].to_local().float())
    train(model, optimizer, loaded, range(3, 8))
    assert all(each.isfinite().all() for each in weights(model))


@ranks(2)
def test_a_checkpoint_s_moments_have_the_dtype_that_its_reader_computes_in(tmp_path: Any) -> None:
    """Moments in fp32 go into torch's AdamW in its parameters' bf16, and moments in bf16 into OneBitAdam in fp32."""

    def train(model: Any, optimizer: Any, dtype: torch.dtype) -> set[torch.dtype]:
        model([each.to(dtype) for each in drawn(0, dist.get_rank())]).backward()
        optimizer.step()
        return {value.dtype for state in optimizer.state.values() for value in state.values() if value.ndim}

    def made(dtype: torch.dtype, kind: Any, **settings: Any) -> tuple[Any, Any]:
        model = yafsdp_cc.shard(Slopes().to(dtype), units=[Slope], compression=Compression("onebit", block=BLOCK))
        return model, kind(model.parameters(), **SETTINGS, **settings)

    for dtype, *kinds in (
        (torch.bfloat16, OneBitAdam, OwnAdamW),
        (torch.bfloat16, OneBitAdam, torch.optim.AdamW),
        (torch.float32, InBf16, OneBitAdam),
    ):
        jobs: list[Any] = [made(dtype, kind, **({"warmup_steps": 5} if kind is OneBitAdam else {})) for kind in kinds]
        train(*jobs[0], dtype)
        yafsdp_cc.save(tmp_path / "step", *jobs[0])
        yafsdp_cc.load(tmp_path / "step", *jobs[1])
        assert train(*jobs[1], dtype) == {dtype}


class OwnAdamW(torch.optim.AdamW):
    """A user's class that steps as torch's does."""


class InBf16(torch.optim.Optimizer):
    """Has the state and settings of Adam, in bf16, and changes no weights."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings | {"eps": 1e-8})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            moments = {name: parameter.grad.bfloat16() for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": torch.tensor(1.0), **moments}


class Scaled(nn.Linear):
    """A linear layer with a parameter that has no dimensions."""

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@ranks(2)
def test_a_checkpoint_s_state_has_the_dtypes_that_torch_s_optimizers_have_given_it(tmp_path: Any) -> None:
    """Parameters in bf16 with gradients in fp32 have state in fp32, and so have numbers of one without dimensions."""

    def made(kind: Any, is_sharded: bool, **settings: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Scaled() if kind in (torch.optim.NAdam, torch.optim.ASGD) else nn.Linear(8, 8, False).bfloat16()
        for each in () if isinstance(model, Scaled) else model.parameters():
            each.grad_dtype = torch.float32
        model = yafsdp_cc.shard(model) if is_sharded else model
        return model, kind(model.parameters(), lr=0.05, **settings)

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def held(model: Any, optimizer: Any) -> list[Tensor]:
        values = [each for state in optimizer.state.values() for each in state.values()]
        return [getattr(each, "_local_tensor", each).detach() for each in (*model.parameters(), *values)]

    for kind, is_sharded, settings in (
        (torch.optim.SGD, True, {"momentum": 0.9}),
        (torch.optim.Rprop, True, {}),
        (torch.optim.Muon, False, {}),
        (torch.optim.Adafactor, False, {}),
        (torch.optim.NAdam, True, {}),
        (torch.optim.ASGD, True, {"t0": 0, "lambd": 0.1}),
    ):
        one, other = (made(kind, is_sharded, **settings) for _ in range(2))
        train(*one, range(5))
        yafsdp_cc.save(tmp_path / kind.__name__, *one)
        yafsdp_cc.load(tmp_path / kind.__name__, *other)
        for _ in range(2):
            for a, b in zip(held(*one), held(*other), strict=True):
                assert (a.dtype, a.tolist()) == (b.dtype, b.tolist()), kind
            for run in (one, other):
                train(*run, range(5, 8))


@ranks(2)
def test_factors_and_clipping_are_resumed_together(tmp_path: Any) -> None:
    """How far gradients are clipped decides how they are summed, and that makes the engine anew: not its factors."""

    def fresh() -> tuple[Any, Any]:
        model = yafsdp_cc.shard(Slopes(), units=[Slope], compression="powersgd")
        return model, OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=2, max_grad_norm=1.0)

    goes_on_alike(fresh, trained, tmp_path / "step", 5, 8)


@ranks(2)
def test_adamw_loads_its_checkpoints_and_the_other_way_round(tmp_path: Any) -> None:
    exact = yafsdp_cc.shard(Slopes(), units=[Slope])
    adamw = torch.optim.AdamW(exact.parameters(), **SETTINGS, fused=True)
    trained(exact, adamw, range(8))
    yafsdp_cc.save(tmp_path / "exact", exact, adamw)
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=8)
    yafsdp_cc.load(tmp_path / "exact", model, optimizer)
    trained(model, optimizer, range(8, 12))
    yafsdp_cc.save(tmp_path / "encoded", model, optimizer)
    with pytest.warns(UserWarning, match="residuals, gradients that were still to be sent"):
        yafsdp_cc.load(tmp_path / "encoded", exact, adamw)
    assert all(one.equal(other) for one, other in zip(weights(model), weights(exact), strict=True))
    trained(exact, adamw, range(12, 14))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (OneBitAdam, {"warmup_steps": 2}),
        (OneBitAdam, {"warmup_steps": 2, "form": "gradient"}),
        (OneBitLamb, {"warmup_steps": 2}),
        (ZeroOneAdam, {}),
    ],
)
@ranks(2)
def test_what_is_unfrozen_between_exact_sums_waits_for_one(kind: Any, settings: dict[str, Any]) -> None:
    model = sharded()
    late = model.parts[1].weight
    late.requires_grad_(False)
    optimizer = kind(model.parameters(), **SETTINGS, refreshes=1, **settings)
    trained(model, optimizer, range(5))
    late.requires_grad_(True)
    before = weights(model)[2]
    for step in range(5, 9):  # the first of which has no exact sums besides
        trained(model, optimizer, range(step, step + 1))
        after = weights(model)[2]
        assert after.equal(before) is (step == 5)
        assert after.isfinite().all()
    assert (after - before).abs().max() < 0.2


@pytest.mark.parametrize(
    ("kind", "settings", "first", "seen"),
    [
        (ZeroOneAdam, {"refreshes": 1}, 0, 2),  # of the steps 1, 3, 7, ...
        (OneBitAdam, {"refreshes": 0, "warmup_steps": 2}, 1, 1),
        (OneBitLamb, {"refreshes": 0, "warmup_steps": 2, "form": "gradient"}, 1, 1),
    ],
)
@ranks(2)
def test_a_second_moment_that_begins_in_the_last_exact_step_waits_for_no_other(
    kind: Any, settings: dict[str, Any], first: int, seen: int, tmp_path: Any
) -> None:
    """A part is unfrozen for the last exact step, and the run is saved just after that step."""

    def fresh() -> tuple[Any, Any]:
        model = sharded()
        return model, kind(model.parameters(), **SETTINGS, **settings)

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            model.parts[1].requires_grad_(step >= first)
            trained(model, optimizer, range(step, step + 1))
        found = optimizer.state[model.parts[1].weight]["variance_step"]
        assert found == (seen if steps.stop == 5 else 1)

    goes_on_alike(fresh, train, tmp_path / "step", first + 1, 5)


@ranks(2)
def test_steps_are_counted_that_no_parameter_has_seen(tmp_path: Any) -> None:
    """No parameter is trained in all of the steps."""
    model = sharded()
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=6)
    for first, last in ((True, False), (False, True)):
        for part in model.parts:
            part.requires_grad_(last if part is model.parts[-1] else first)
        trained(model, optimizer, range(5))
    yafsdp_cc.save(tmp_path / "step", model, optimizer)
    another = sharded()
    again = OneBitAdam(another.parameters(), **SETTINGS, warmup_steps=6)
    yafsdp_cc.load(tmp_path / "step", another, again)
    assert again.steps == optimizer.steps == 10
    assert phase_of(again) == phase_of(optimizer) == "encoded"
    plain = torch.optim.AdamW(another.parameters(), **SETTINGS)
    yafsdp_cc.load(tmp_path / "step", another, plain)
    trained(another, plain, range(7))
    yafsdp_cc.save(tmp_path / "plain", another, plain)
    yafsdp_cc.load(tmp_path / "plain", another, again)
    assert again.steps == 5 + 7  # as many as any parameter has seen: AdamW counts no others


@pytest.mark.parametrize("saved", [4, 8])
@ranks(2)
def test_one_rank_alone_asks_for_the_plan_between_an_optimizer_and_a_forward(saved: int, tmp_path: Any) -> None:
    """The optimizer sums exactly at first, and a loaded one in its warm-up, too, in other buffers than encoded sums."""
    trained_model = sharded()
    trained_optimizer = OneBitAdam(trained_model.parameters(), **SETTINGS, warmup_steps=6)
    trained(trained_model, trained_optimizer, range(saved))
    yafsdp_cc.save(tmp_path / "step", trained_model, trained_optimizer)
    model = sharded()
    encoded = yafsdp_cc.plan_of(model).owned_bytes
    optimizer = OneBitAdam(model.parameters(), **SETTINGS, warmup_steps=6)
    made = yafsdp_cc.plan_of(model).owned_bytes if dist.get_rank() == 0 else 0
    yafsdp_cc.load(tmp_path / "step", model, optimizer)
    loaded = yafsdp_cc.plan_of(model).owned_bytes if dist.get_rank() == 0 else 0
    trained(model, optimizer, range(saved, saved + 1))
    if dist.get_rank() == 0:
        assert made > encoded
        assert loaded == yafsdp_cc.plan_of(model).owned_bytes
