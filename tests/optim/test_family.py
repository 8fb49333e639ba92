"""What all optimizers that lead the wire do: go on at any number of ranks, under a scaler, and refuse in words."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import yafsdp_cc
from tests.compression.ledger import net, unsent
from tests.optim.lossless import backward, loss_of, sharded, whole
from tests.optim.slopes import drawn
from tests.optim.slopes import sharded as slopes
from tests.ranks import on_ranks, ranks
from tests.soak import also
from yafsdp_cc.compression import error_feedback
from yafsdp_cc.optim import OneBitAdam, OneBitLamb, OneBitSGD, ZeroOneAdam

FAMILY: dict[str, Callable[..., Any]] = {
    "adam-momentum": partial(OneBitAdam, lr=0.01, warmup_steps=3),
    "adam-gradient": partial(OneBitAdam, lr=0.01, warmup_steps=3, form="gradient"),
    "sgd-momentum": partial(OneBitSGD, lr=0.05, weight_decay=0.1, warmup_steps=3),
    "sgd-gradient": partial(OneBitSGD, lr=0.05, weight_decay=0.1, form="gradient"),
    "lamb-momentum": partial(OneBitLamb, lr=0.01, warmup_steps=3),
    "lamb-gradient": partial(OneBitLamb, lr=0.01, warmup_steps=3, form="gradient"),
    "zero-one": partial(ZeroOneAdam, lr=0.01, refreshes=2),
}


# At any number of ranks


def narrow() -> nn.Module:
    """Matrices of which the last of four ranks has nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 51), nn.Tanh(), nn.Linear(51, 40), nn.Tanh(), nn.Linear(40, 30))


def made(kind: str, codec: str, **settings: Any) -> tuple[Any, Any]:
    compression = yafsdp_cc.Compression(codec, residual="fp32")
    model = yafsdp_cc.shard(narrow(), units=[nn.Linear], compression=compression)
    return model, FAMILY[kind](model.parameters(), **settings)


def steps(model: Any, optimizer: Any, first: int, last: int) -> None:
    """With the same batch on all ranks, so that the mean is the same for any number of them."""
    for step in range(first, last):
        model.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()


def kept(kind: str, codec: str, folder: Any) -> None:
    model, optimizer = made(kind, codec)
    steps(model, optimizer, 0, 8)
    yafsdp_cc.save(folder / "step", model, optimizer)
    steps(model, optimizer, 8, 14)
    found = whole(model.parameters())
    if dist.get_rank() == 0:
        torch.save(found, folder / "truth.pt")


def gone_on(kind: str, codec: str, folder: Any) -> None:
    truth = torch.load(folder / "truth.pt")
    others = {"momentum": 0.5} if kind.startswith("sgd") else {"betas": (0.5, 0.9)}
    model, optimizer = made(kind, codec, **others)
    steps(model, optimizer, 20, 22)  # of another run, all forgotten, also the settings
    yafsdp_cc.load(folder / "step", model, optimizer)
    assert optimizer.steps == 8
    steps(model, optimizer, 8, 14)
    for mine, theirs in zip(whole(model.parameters()), truth, strict=True):
        if codec == "onebit":
            assert mine.equal(theirs)
        else:
            assert (mine - theirs).norm() <= 2e-5 * theirs.norm()


SOAKED = ("sgd-gradient", "lamb-gradient")
"""What they keep of gradients is what Adam keeps of them."""


@pytest.mark.parametrize("kind", [also(kind) if kind in SOAKED else kind for kind in FAMILY])
def test_a_run_goes_on_at_any_number_of_ranks(kind, tmp_path):
    """With a codec that loses nothing, as it would have gone on; with one bit and as many ranks, bit for bit."""
    for codec, readers in (("lossless", (1, 3)), ("onebit", (2,))):
        folder = tmp_path / codec
        folder.mkdir()
        on_ranks(2, kept, kind, codec, folder)
        for world in readers:
            on_ranks(world, gone_on, kind, codec, folder)


# Frozen and cleared


@pytest.mark.parametrize(
    ("kind", "mesh", "micro"),
    [
        *((kind, (2,), 1) for kind in ("none", *FAMILY)),
        *((kind, (2, 1), 1) for kind in ("none", "adam-momentum")),
        *((kind, (2,), 2) for kind in ("none", "adam-momentum", "adam-gradient")),
    ],
)
@ranks(2)
def test_a_parameter_that_is_frozen_while_its_unit_is_trained_keeps_what_waits_for_it(
    kind: str, mesh: tuple[int, ...], micro: int
) -> None:
    names = ("replicate", "shard")[-len(mesh) :]
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    compression = yafsdp_cc.Compression("topk", residual="fp32", fallback=False)
    model: Any = yafsdp_cc.shard(net(), mesh=device_mesh, units=[nn.Sequential], compression=compression)
    optimizer = FAMILY.get(kind, partial(torch.optim.AdamW, lr=0.01))(model.parameters())

    def state(name: str) -> dict[str, torch.Tensor]:
        parameter = model.get_parameter(name)
        moments = {key: each for key, each in optimizer.state[parameter].items() if isinstance(each, DTensor)}
        found = {key: whole([each])[0] for key, each in {"": parameter.detach(), **moments}.items()}
        return {"waits": unsent(model)[name], **found}

    def train(step: int) -> None:
        for number in range(micro):
            model.set_requires_gradient_sync(number == micro - 1)
            loss_of(model, 20 * number + step, dist.get_rank()).backward()
        assert (model[2].weight.grad is None) == (not model[2].weight.requires_grad)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(6):
        train(step)
    before = {name: state(name) for name in ("0.weight", "2.weight")}
    assert before["2.weight"]["waits"].any()
    model[2].weight.requires_grad_(False)
    for step in range(6, 10):
        train(step)
    for key, each in state("2.weight").items():
        assert each.equal(before["2.weight"][key]), key
    assert not state("0.weight")[""].equal(before["0.weight"][""])
    model[2].weight.requires_grad_(True)
    train(10)
    assert not state("2.weight")["waits"].equal(before["2.weight"]["waits"])


@ranks(2)
def test_what_waits_for_a_frozen_parameter_is_kept_where_a_message_cannot_be_made() -> None:
    compression = yafsdp_cc.Compression("topk", residual="fp32", fallback=False)
    model: Any = yafsdp_cc.shard(net(), units=[nn.Sequential], compression=compression)
    backward(model, 0)
    model[2].weight.requires_grad_(False)
    before = unsent(model)["2.weight"]
    with mock.patch.object(error_feedback, "encode", side_effect=MemoryError), pytest.raises(MemoryError):
        backward(model, 1)
    assert before.any()
    assert unsent(model)["2.weight"].equal(before)


@pytest.mark.parametrize("mesh", [(2,), (2, 1)], ids=["shard", "replicas"])
@ranks(2)
def test_gradients_that_are_cleared_in_place_are_in_no_second_moment(mesh: tuple[int, ...]) -> None:
    found = []
    for to_none, factor in ((True, torch.nan), (False, torch.nan), (False, 1.0)):
        names = ("replicate", "shard")[-len(mesh) :]
        model = sharded("int8", mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
        optimizer = FAMILY["adam-gradient"](model.parameters(), refreshes=2)
        for step in range(6):
            if step == 3:  # in a step that sums exactly besides, a batch does not count
                (loss_of(model, 99, 0) * factor).backward()
                optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        found.append(whole([optimizer.state[model[0].weight]["exp_avg_sq"]])[0])
    assert found[0].isfinite().all()
    assert found[1].equal(found[0])
    torch.testing.assert_close(found[2], found[0], rtol=0.01, atol=0)  # residuals have a part of that batch


# As torch's optimizers are used


@pytest.mark.parametrize("kind", FAMILY)
@ranks(2)
def test_steps_under_a_scaler_are_those_without(kind: str) -> None:
    model, twin = sharded("onebit", residual="int8"), sharded("onebit", residual="int8")
    optimizer, plain = FAMILY[kind](model.parameters()), FAMILY[kind](twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    yafsdp_cc.follow_scaler(model, scaler)
    scales = set()
    for step in range(9):
        model.zero_grad()
        scaler.scale(loss_of(model, step, dist.get_rank())).backward()
        scales.add(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        backward(twin, step)
        plain.step()
        # Powers of two change no rounding.
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert (mine.full_tensor() - other.full_tensor()).norm() <= 1e-6 * other.full_tensor().norm()
    assert len(scales) > 2
    before = whole(model.parameters())
    model.zero_grad()
    (scaler.scale(loss_of(model, 9, 0)) * (torch.inf if dist.get_rank() == 0 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.steps == 9
    assert all(now.equal(then) for now, then in zip(whole(model.parameters()), before, strict=True))
    assert all(each.isfinite().all() for each in unsent(model).values())

    def closure() -> float:
        backward(twin, 9)
        return 0.25

    assert plain.step(closure) == 0.25
    assert plain.steps == 10


@ranks(2)
def test_learning_rates_are_tensors_too() -> None:
    rate = torch.tensor(2.0**-7)
    for kind, make in FAMILY.items():
        model, twin = sharded("onebit"), sharded("onebit")
        optimizer, plain = make(model.parameters(), lr=rate), make(twin.parameters(), lr=float(rate))
        for step in range(6):
            for each, by in ((model, optimizer), (twin, plain)):
                backward(each, step)
                by.step()
        assert all(a.equal(b) for a, b in zip(*(whole(each.parameters()) for each in (model, twin)), strict=True)), kind


@pytest.mark.parametrize("kind", ["none", "adam-gradient"])
@ranks(2)
def test_a_new_optimizer_adds_no_micro_batch_of_before(kind: str) -> None:
    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            for number in range(2):
                model.set_requires_gradient_sync(number == 1)
                loss_of(model, 20 * number + step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()

    used, fresh = sharded(), sharded()
    settings = {} if kind == "none" else {"refreshes": 0}
    train(used, FAMILY.get(kind, partial(torch.optim.AdamW, lr=0.01))(used.parameters(), **settings), range(5))
    fresh.load_state_dict(used.state_dict())
    for model in (used, fresh):
        train(model, FAMILY["adam-momentum"](model.parameters(), refreshes=0), range(6, 12))
    assert all(a.equal(b) for a, b in zip(*(whole(each.parameters()) for each in (used, fresh)), strict=True))


# In words


@ranks(2)
def test_what_cannot_work_is_said() -> None:
    model = sharded("onebit")
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "momentum": 0.5}]
    for kind, given, words in (
        (partial(OneBitSGD), net().parameters(), r"of shape \[60, 40\] is not: yafsdp_cc.shard\(model, compression="),
        (partial(OneBitSGD, momentum=0), parameters, "momentum=0 must be more than 0 .* torch.optim.SGD does"),
        (partial(OneBitSGD, momentum=1.0), parameters, "momentum=1.0 must be more than 0 and less than 1"),
        (partial(OneBitSGD, lr=-1), parameters, "lr=-1, weight_decay=0.0: 0 or more"),
        (partial(OneBitSGD, warmup_steps=-1), parameters, "warmup_steps=-1: a number of steps, 0 or more"),
        (partial(OneBitSGD, form="both"), parameters, "form='both': 'momentum' or 'gradient'"),
        (OneBitSGD, groups, "the same momentum in all groups"),
        (OneBitSGD, parameters[1:], "was not given '0.weight', .* give it all parameters"),
        (partial(OneBitLamb, warmup_steps=0), parameters, "warmup_steps=0: at least 1"),
        (partial(OneBitLamb, warmup_steps=1, trust=(2, 1)), parameters, r"trust=\(2, 1\): the least trust ratio"),
        (partial(ZeroOneAdam, refreshes=0), parameters, "refreshes=0: at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            kind(given)
    optimizer = OneBitSGD([{"params": parameters[:1]}, {"params": parameters[1:]}])
    backward(model, 0)
    module = net()
    for ours, plain in (
        (optimizer, torch.optim.SGD(module.parameters(), momentum=0.9, nesterov=True)),
        (optimizer, torch.optim.SGD(module.parameters(), momentum=0.9, dampening=0.1)),
        (optimizer, torch.optim.SGD(module.parameters(), momentum=0.9, maximize=True)),
    ):
        with pytest.raises(ValueError, match=r"(nesterov=True|dampening=0.1|maximize=True), which .* does not have"):
            ours.load_state_dict(plain.state_dict())
    differing = optimizer.state_dict()
    differing["param_groups"][1]["momentum"] = 0.5
    with pytest.raises(ValueError, match=r"the same momentum in all groups: .* not \[0.9, 0.5\]"):
        optimizer.load_state_dict(differing)
    optimizer.param_groups[1]["momentum"] = 0.5  # as OneCycleLR does that is given a list
    with pytest.raises(ValueError, match=r"the same momentum in all groups: .* not \[0.9, 0.5\]"):
        optimizer.step()
    assert optimizer.steps == 0
    with pytest.raises(RuntimeError, match=r"has a .grad already, .* call optimizer.zero_grad"):
        loss_of(model, 1, 0).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("stage", "form", "warns"),
    [(2, "momentum", True), (2, "gradient", True), (1, "momentum", False)],
)
@ranks(2)
def test_unsharded_gradients_of_exact_steps_are_warned_of_or_in_the_plan(stage: int, form: str, warns: bool) -> None:
    model = slopes(zero_stage=stage)
    optimizer = OneBitAdam(model.parameters(), warmup_steps=2, form=form)
    messages: list[str] = []
    logging.getLogger("yafsdp_cc").addFilter(lambda record: bool(messages.append(record.getMessage())) or True)
    for sends in (False, True):
        model.set_requires_gradient_sync(sends)
        model(drawn(0, dist.get_rank())).backward()
    optimizer.step()
    expected = ["zero_stage=1 of shard() has them in its plan"] if warns and dist.get_rank() == 0 else []
    assert [each.rpartition("; ")[2] for each in messages] == expected
    if not warns:
        assert yafsdp_cc.counters_of(model).owned_bytes == yafsdp_cc.plan_of(model).owned_bytes
