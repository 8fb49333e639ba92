"""Models whose gradients and weights cross ranks encoded: nothing is lost, and every byte is as planned."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.compression.ledger import Ledger, gradients, loss_of, net, sharded, unsent
from tests.internals import gradient_codecs, residuals_of
from tests.models import Skipping
from tests.optim import slopes
from tests.ranks import on_ranks, ranks
from tests.soak import SOAK, also
from yafsdp_cc import Compression

CODECS = ("bf16", "fp8", "int8", "int4", "ternary", "onebit", "topk", "powersgd")


# Nothing is lost


@pytest.mark.parametrize("world", [also(2), 4])
@ranks("world", timeout=600)
def test_what_was_said_and_what_is_still_to_be_said_is_all(world):
    """Over steps of one and of several micro-batches; hundreds of them in ``make soak``."""
    steps = 200 if SOAK else 6
    for codec in CODECS:
        ledger = Ledger(sharded(Compression(gradients=codec, residual="fp32")), sharded(None))
        for step in range(steps):
            ledger.step(step, micro=3 if step % 4 == 1 else 1)
        ledger.check()


@ranks(4)
def test_what_is_said_of_parameters_that_nobody_has_used_is_not_lost() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for codec, more in itertools.product(("onebit", "powersgd"), ({}, {"mesh": mesh})):
        model = yafsdp_cc.shard(
            Skipping(), units=[Skipping], compression=Compression(gradients=codec, residual="fp32"), **more
        )
        model(torch.ones(2, 64), True).sum().backward()
        assert model.second.weight.grad is None  # as without compression, while there is nothing to be said
        model(torch.randn(2, 64), False).square().mean().backward()
        model.zero_grad()
        before = unsent(model)["second.weight"]
        model(torch.ones(2, 64), True).sum().backward()
        after = unsent(model)["second.weight"]
        said = model.second.weight.grad.full_tensor().double()
        assert torch.allclose(said, before - after, atol=1e-8)
        assert after.norm() < before.norm()


@ranks(4)
def test_sums_over_replicas_are_encoded_or_those_within() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for scope, codec in itertools.product(("auto", "shard"), ("onebit", "powersgd")):
        model = sharded(Compression(gradients=codec, residual="fp32", scope=scope), mesh=mesh)
        ledger = Ledger(model, sharded(None, mesh=mesh))
        for step in range(20 if SOAK else 6):
            ledger.step(step)
        ledger.check()
        planned = yafsdp_cc.plan_of(model).communication
        assert (planned.replicas < planned.reduce) == (scope == "auto")
    parts = [torch.empty_like(model[0].weight.to_local()) for _ in range(2)]
    loss_of(model, 0).backward()
    dist.all_gather(parts, model[0].weight.grad.to_local(), group=mesh["replicate"].get_group())
    assert parts[0].equal(parts[1])


@pytest.mark.parametrize("codec", ["int4", "powersgd"])
@ranks(2)
def test_a_step_that_is_not_finite_is_skipped_and_poisons_nothing(codec: str) -> None:
    model = sharded(Compression(gradients=codec, residual="fp32"))
    for step in range(3):
        loss_of(model, step).backward()
    model.zero_grad()
    residuals = [each.clone() for each in residuals_of(model)]
    (loss_of(model, 3) * (math.inf if dist.get_rank() == 0 else 1.0)).backward()
    after = residuals_of(model)
    assert all(each.isfinite().all() for each in after)
    if dist.get_rank() == 0:  # could not be said, so it is as it was
        assert all(one.equal(other) for one, other in zip(residuals, after, strict=True))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].weight.full_tensor()
    scaler.step(optimizer)  # skipped on all ranks
    assert model[0].weight.full_tensor().equal(before)
    model.zero_grad()
    ledger = Ledger(model, sharded(None))
    for step in range(4, 10):
        ledger.step(step)
    ledger.check()


@pytest.mark.parametrize("codec", ["int4", "powersgd"])
@ranks(2)
def test_micro_batches_that_are_not_finite_are_not_left_out_in_silence(codec: str) -> None:
    model = sharded(Compression(gradients=codec, residual="fp32"))
    model.set_requires_gradient_sync(False)
    seen = model(torch.ones(4, 40))
    if dist.get_rank() == 1:
        seen.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([0]), math.inf))  # a row of rank 0's
    seen.sum().backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, 0).backward()
    assert not model[4].weight.grad.full_tensor().isfinite().all()
    model.zero_grad()
    ledger = Ledger(model, sharded(None))
    for step in range(6):
        ledger.step(step, micro=2)
    ledger.check()


@ranks(2)
def test_gradients_that_are_cleared_before_a_step_are_warned_of(tmp_path: Path) -> None:
    """Residuals add a part of cleared gradients to the next ones, as in a GAN whose other network is trained."""
    model = sharded(Compression("int4"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def backward(step: int) -> None:
        loss_of(model, step).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        differences = Compression("int4", feedback="ef21", residual="fp32")
        for other in map(sharded, ("fp32", Compression("fp32", weights="int8"), differences)):
            stepped = torch.optim.SGD(other.parameters(), lr=0.01)
            for step in range(3):
                loss_of(other, step).backward()
                if step == 0:
                    stepped.step()
                other.zero_grad()
        for step in range(3):
            model.set_requires_gradient_sync(False)  # micro-batches
            backward(step)
            model.set_requires_gradient_sync(True)
            backward(step)
            with torch.no_grad():
                loss_of(model, step)
            optimizer.step()
            yafsdp_cc.save(tmp_path / "step", model, optimizer)
            optimizer.zero_grad()
        evaluated = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)

        def closure() -> torch.Tensor:
            evaluated.zero_grad()
            loss = loss_of(model, 3)
            loss.backward()
            return loss

        evaluated.step(closure)
        model.zero_grad()
        backward(3)
        yafsdp_cc.load(tmp_path / "step", model, optimizer)  # residuals, too
        model.zero_grad()
        with yafsdp_cc.skip_together(model):
            backward(3)
            raise ValueError
        backward(4)
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(False)
        x = torch.randn(4, 40, requires_grad=True)
        model(x).sum().backward()
        model.requires_grad_(True)
        backward(5)
        optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"no optimizer has taken them; .* requires_grad_\(False\) on this one"):
        backward(6)


@pytest.mark.parametrize("feedback", ["ef21", True])
@ranks(2)
def test_what_waits_for_a_frozen_parameter_is_no_gradient_of_it(tmp_path: Path, feedback: Any) -> None:
    """Not where its ``.grad`` is kept, of zeros, while its unit is trained, and not what a checkpoint carries over."""

    def build(residual: str) -> tuple[Any, torch.optim.Optimizer]:
        compression = Compression("int4", feedback=feedback, residual=residual)
        model = yafsdp_cc.shard(net(), units=[nn.Sequential], compression=compression)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    model, optimizer = build("fp32")
    train(model, optimizer, 0)
    yafsdp_cc.save(tmp_path / "step", model, optimizer)
    if feedback is True:
        model, optimizer = build("bf16")
        train(model, optimizer, 0)
        yafsdp_cc.load(tmp_path / "step", model, optimizer)
    frozen: Any = model[2].weight.requires_grad_(False)
    before, waits = frozen.detach().full_tensor().clone(), unsent(model)
    for step in range(2):
        train(model, optimizer, step)
    assert frozen.detach().full_tensor().equal(before)
    assert all(each.equal(waits[name]) for name, each in unsent(model).items() if name == "2.weight")


@ranks(2)
def test_residuals_follow_the_scale_of_losses() -> None:
    model, exact = sharded(Compression(gradients="onebit", residual="int8")), sharded(None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    yafsdp_cc.follow_scaler(model, scaler)
    scales = set()
    twin = sharded(Compression(gradients="onebit", residual="int8"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(6):
        for each in (model, twin):
            each.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        loss_of(twin, step).backward()
        scaler.unscale_(optimizer)
        scales.add(scaler.get_scale())
        # Powers of two change no rounding, so all is as without a scale.
        assert all(gradient.equal(gradients(twin)[name]) for name, gradient in gradients(model).items())
        scaler.step(optimizer)
        scaler.update()
    assert len(scales) > 2
    ours, plain = unsent(model), unsent(twin)
    assert all(ours[name].equal(plain[name]) for name in plain)
    with pytest.raises(ValueError, match="is sharded without a compression"):
        yafsdp_cc.follow_scaler(exact, scaler)


# As planned


@pytest.mark.parametrize("across", [False, True])
@ranks(2)
def test_gradients_in_double_precision_are_encoded_as_fp32(across: bool) -> None:
    """Over the ranks of a shard, and over replicas."""
    more: dict[str, Any] = {}
    if across:
        more["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for compression in ("int8", Compression(gradients="powersgd", matrix_rank=64), Compression(weights="fp8")):
        model = yafsdp_cc.shard(net().double(), units=[nn.Linear], compression=compression, **more)
        exact = yafsdp_cc.shard(net().double(), units=[nn.Linear], **more)
        x = torch.randn(4, 40, dtype=torch.float64)
        for number in range(3):
            for each in (model, exact):
                each.set_requires_gradient_sync(number > 0)
                each(x).square().mean().backward()
        for name, gradient in gradients(exact).items():
            assert model.get_parameter(name).grad.dtype == torch.float64
            assert (gradients(model)[name] - gradient).norm() < 0.1 * gradient.norm()


@ranks(2)
def test_bytes_sent_and_held_are_as_planned() -> None:
    for compression in (*CODECS, Compression(gradients="int4", weights="int8"), Compression(feedback=False)):
        model = sharded(compression)
        plan = yafsdp_cc.plan_of(model)
        for step in range(4):  # two of each kind where messages take turns
            loss_of(model, step).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        counters = yafsdp_cc.counters_of(model)
        assert counters.owned_bytes == plan.owned_bytes
        assert counters.reduced_bytes == 4 * (plan.communication.reduce + plan.communication.replicated)
        assert counters.gathered_bytes == 4 * (plan.communication.gather_forward + plan.communication.gather_backward)
    model = sharded("int8")
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        loss_of(model, number).backward()
    planned = yafsdp_cc.plan_of(model).communication
    assert yafsdp_cc.counters_of(model).reduced_bytes == planned.reduce + planned.replicated  # in one message
    text = str(plan)
    assert "if all gradients were" in text
    assert "onebit" in text
    for choice in plan.choices:
        assert choice.reduce == yafsdp_cc.plan_of(sharded(choice.codec)).communication.reduce


@ranks(2)
def test_codecs_are_compared_where_each_rank_owns_other_matrices() -> None:
    def plan_with(codec: str) -> Any:
        layer, chosen = nn.Linear(64, 64, bias=False), Compression(codec, residual="fp32")
        return yafsdp_cc.plan_of(yafsdp_cc.shard(layer, ownership=["weight"], zero_stage=2, compression=chosen))

    for choice in plan_with("int8").choices:
        plan = plan_with(choice.codec)
        assert choice.reduce == plan.communication.reduce
        if choice.codec != "powersgd":  # which has factors besides
            assert choice.residual["fp32"] == plan.residual_bytes


@ranks(2)
def test_residuals_in_int8_round_no_sum_of_micro_batches() -> None:
    """One large gradient in each block makes the steps coarse in which the residual could add up the others."""
    model = slopes.sharded("int8", compression={"residual": "int8"}, zero_stage=1)
    (given, *others), large = slopes.drawn(0, 0), torch.arange(60 * 40).view(60, 40) % slopes.BLOCK == 0
    before = slopes.weights(model)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(8):
        for micro in range(4):
            model.set_requires_gradient_sync(micro == 3)
            model([given.masked_fill(large, 1000.0), *others]).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = (before - slopes.weights(model)[0] + unsent(model)["parts.0.weight"])[~large].double()
    due = 32 * given[~large].double()
    assert (found - due).norm() < 0.01 * due.norm()
    assert yafsdp_cc.counters_of(model).owned_bytes == yafsdp_cc.plan_of(model).owned_bytes


@ranks(2)
def test_nothing_is_encoded_before_the_warm_up_is_over() -> None:
    model = sharded(Compression(gradients="onebit", weights="int8", warmup_steps=2))
    exact = sharded(None)
    for step in range(4):
        found = []
        for each in (model, exact):
            loss_of(each, step).backward()
            found.append(gradients(each))
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            each.zero_grad()
        alike = all(found[0][name].equal(found[1][name]) for name in found[0])
        assert alike == (step < 2), step


@ranks(2)
def test_weights_that_are_exchanged_for_an_evaluation_are_no_step_of_the_warm_up() -> None:
    model, exact = sharded(Compression("onebit", warmup_steps=2)), sharded(None)
    for step in range(3):
        for each in (model, exact):
            loss_of(each, step).backward()
        alike = all(gradients(model)[name].equal(each) for name, each in gradients(exact).items())
        assert alike == (step < 2), step
        for each in (model, exact):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
            loss_of(model, step)
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.copy_(before)
            loss_of(model, step)


def the_same_weights_everywhere() -> None:
    for codec in ("int8", "fp8"):
        model = sharded(Compression(gradients="fp32", weights=codec))
        seen = []
        model[2].register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module.weight.detach().clone()))
        loss_of(model, 0).backward()
        parts = [torch.empty_like(seen[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, seen[0])
        assert all(part.equal(parts[0]) for part in parts)
        weight = model[2].weight.full_tensor()
        step = {"int8": 1 / 254, "fp8": 1 / 16}[codec]
        assert 0 < (seen[0] - weight).abs().max() <= step * weight.abs().max()


def test_encoded_weights_are_the_same_on_all_ranks():
    on_ranks(2, the_same_weights_everywhere)
    on_ranks(3, the_same_weights_everywhere)


@ranks(2)
def test_parameters_may_have_codecs_of_their_own_and_small_ones_are_exact() -> None:
    exact = sharded(None)
    model = sharded(Compression(gradients="onebit", overrides={"0.*": "fp32", "2.weight": "int8"}))
    assert gradient_codecs(model) == ["fp32", "int8", "onebit"]
    for each in (model, exact):
        loss_of(each, 0).backward()
    off = {
        name: ((gradients(model)[name] - gradient).norm() / gradient.norm()).item()
        for name, gradient in gradients(exact).items()
    }
    assert off["0.weight"] == 0.0
    assert off["0.bias"] == off["2.bias"] == off["4.bias"] == 0.0
    assert 0 < off["2.weight"] < 0.02
    assert off["4.weight"] > 0.2


@ranks(2)
def test_patterns_with_fully_shard_are_of_the_root_s_names() -> None:
    def of(pattern: str) -> nn.Sequential:
        model, compression = (
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
            Compression(overrides={pattern: "fp32"}),
        )
        for block in (*model, model):
            yafsdp_cc.fully_shard(block, compression=compression)
        return model

    model = of("0.weight")
    model(torch.ones(1, 64))
    assert gradient_codecs(model) == ["fp32", "int8"]
    for pattern in ("weight", "head.*"):
        with pytest.warns(UserWarning, match=r"fits no parameter of this model: .* such as '0.weight', '0.bias'"):
            of(pattern)(torch.ones(1, 64))


@ranks(2)
def test_a_part_that_has_run_by_itself_ends_its_warm_up_with_the_model() -> None:
    compression = Compression("int8", warmup_steps=2)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(3)))
    for block in model:
        yafsdp_cc.fully_shard(block, compression=compression)
    model[1](torch.randn(4, 64)).square().mean().backward()
    yafsdp_cc.fully_shard(model, compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent, planned = yafsdp_cc.counters_of(model).reduced_bytes, yafsdp_cc.plan_of(model).communication
    model(torch.randn(4, 64)).square().mean().backward()
    assert yafsdp_cc.counters_of(model).reduced_bytes - sent == planned.reduce + planned.replicated


# Refused


def refusals() -> None:
    for wrong, kind, match in (
        ("int9", ValueError, "compression='int9': there is no codec 'int9', only bf16, fp32"),
        (7, TypeError, "compression takes a Compression, the name of a codec such as 'int8', or None; got 7"),
    ):
        with pytest.raises(kind, match=match):
            sharded(wrong)
    with pytest.raises(ValueError, match="compression has scope='replicate', and the mesh has no replicas"):
        sharded(Compression(scope="replicate"))
    with pytest.raises(ValueError, match=r"overrides=\{'0.weight': ...\} comes too late: patterns before it hold"):
        sharded(Compression(overrides={"0.*": "fp32", "0.weight": "int4"}))
    with pytest.raises(ValueError, match=r"overrides=\{'1.*': ...\} fits no parameter .* such as '0.weight', '0.bias'"):
        sharded(Compression(overrides={"0.*": "fp32", "1.*": "fp32"}))
    with pytest.raises(ValueError, match="CompressionHookState with overrides: a bucket of DDP"):
        yafsdp_cc.CompressionHookState(Compression(overrides={"0.*": "fp32"}))
    with pytest.raises(ValueError, match="CompressionHookState with weights: DDP gathers none"):
        yafsdp_cc.CompressionHookState(Compression(weights="int8"))
    with pytest.raises(ValueError, match="compression differs between ranks"):
        sharded("int8" if dist.get_rank() else "int4")


def test_what_cannot_be_is_refused_by_name():
    on_ranks(2, refusals)
    with pytest.raises(ValueError, match=r"^gradients=None: takes the name of a codec, .*'int8'; 'fp32' for none$"):
        Compression(None)  # type: ignore[arg-type]  # the mistake is what is tested
    assert Compression("int4", "int8") == Compression(gradients="int4", weights="int8")
    for wrong, match in (
        ({"gradients": "int7"}, "^gradients='int7': there is no codec 'int7'"),
        ({"overrides": {"a*": "int7"}}, r"^overrides=\{'a\*': 'int7'\}: there is no codec 'int7'"),
        ({"gradients": "onebit", "feedback": False}, "gradients='onebit' with feedback=False: what it leaves out"),
        ({"weights": "int7"}, "^weights='int7': there is no codec 'int7', .*; take int8, fp8, int4"),
        (
            {"weights": "bf16"},
            r"^weights='bf16': MixedPrecisionPolicy\(param_dtype=torch.bfloat16\) sends .*: take int8",
        ),
        ({"weights": "topk"}, "^weights='topk': 99 of 100 weights would stay as they were"),
        ({"weights": "powersgd"}, "^weights='powersgd': factors are of whole matrices"),
        ({"weights": torch.bfloat16}, "^weights=torch.bfloat16: takes the name of a codec, such as 'int8'$"),
        ({"candidates": (8,)}, r"^candidates\.0=8: takes the name of a codec"),
        ({"block": 100}, "^block=100: input should be 64, 128, .* or 4096$"),
        ({"carry": 0.0}, "^carry=0.0: input should be greater than 0$"),
        ({"carry": float("nan")}, "^carry=nan: input should be a finite number$"),
        ({"warmup_steps": -1}, "^warmup_steps=-1: input should be greater than or equal to 0$"),
        ({"matrix_rank": 0}, "^matrix_rank=0: input should be greater than or equal to 1$"),
        ({"gradients": "powersgd", "feedback": False}, "gradients='powersgd' with feedback=False"),
        ({"gradient": "int8"}, "^Compression has no 'gradient', only gradients, weights, feedback"),
        ({"residual": "fp16"}, "^residual='fp16': input should be 'fp32', 'bf16' or 'int8'$"),
    ):
        with pytest.raises(ValueError, match=match):
            Compression(**wrong)
