"""Ranks with different numbers of batches, held against one process over the batches that there were."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.internals import mean_residuals_of
from tests.models import WIDTH, Mlp
from tests.ranks import on_ranks, ranks
from tests.twins import inputs, seeded, square, whole

COUNTS = {2: [3, 1], 3: [0, 2, 4], 4: [1, 3, 0, 2]}


def _batches(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


ALWAYS, LAST = "each micro-batch is reduced", "the last micro-batch is reduced"


def _trains(world: int, options: dict[str, Any], accumulates: str) -> None:
    """Steps of two micro-batches if it ``accumulates``; what is encoded is late by the residuals, and nothing else."""
    counts = COUNTS[world]
    rank, options = dist.get_rank(), dict(options)
    if options.pop("replicas", False):
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = yafsdp_cc.shard(seeded(Mlp), **options), seeded(Mlp)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    is_encoded, steps = "compression" in options, 0
    late = {name: torch.zeros(parameter.shape) for name, parameter in plain.named_parameters()}
    with yafsdp_cc.uneven(model) as batches:
        for batch in batches(_batches(rank, step) for step in range(counts[rank])):
            there = [each for each in range(world) if steps < counts[each]]
            assert batches.weight == (world / len(there) if rank in there else 0)
            is_last = not accumulates or steps % 2 == 1 or steps + 1 == max(counts)
            model.set_requires_gradient_sync(is_last or accumulates == ALWAYS)
            square(model, batch).backward()
            (sum(square(plain, _batches(each, steps)) for each in there) / len(there)).backward()  # type: ignore[union-attr]
            steps += 1
            if not is_last:
                continue
            residuals = mean_residuals_of(model) if is_encoded else {}
            for name, parameter in model.named_parameters():
                truth = plain.get_parameter(name)
                late[name] += truth.grad - whole(parameter.grad)
                owed = residuals.get(name, torch.zeros(parameter.shape))
                text = f"{options}, {accumulates}, {name}, step {steps}: by {(late[name] - owed).abs().max()}"
                torch.testing.assert_close(late[name], owed, rtol=1e-5, atol=1e-6, msg=text)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if is_encoded:
                for name, parameter in model.named_parameters():
                    plain.get_parameter(name).data.copy_(whole(parameter.detach()))
    assert steps == max(counts)
    assert batches.weight == 1
    if is_encoded:
        assert any(each.abs().max() > 1e-5 for each in late.values()), "nothing was encoded"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), plain.get_parameter(name).detach(), rtol=0, atol=1e-5)


def _trains_in_all_ways(world: int) -> None:
    int8, int4 = (yafsdp_cc.Compression(gradients=codec, residual="fp32") for codec in ("int8", "int4"))
    ways: list[tuple[dict[str, Any], str]] = [({}, ALWAYS), ({}, LAST), ({"compression": int8}, LAST)]
    if world == 2:
        ways += [({}, ""), ({"compression": int4}, "")]
    ways.append(({"compression": int8, "replicas": world == 4}, ALWAYS))
    if world == 4:
        ways.append(({"replicas": True}, LAST))
    for options, accumulates in ways:
        _trains(world, options, accumulates)


@pytest.mark.parametrize("world", COUNTS)
def test_means_are_over_the_ranks_with_data(world: int) -> None:
    """With accumulation of both kinds, and where gradients are encoded: Σ decoded = Σ means − residual."""
    on_ranks(world, _trains_in_all_ways, world)


@ranks(2)
def test_refused() -> None:
    with pytest.raises(ValueError, match="Mlp is not sharded"), yafsdp_cc.uneven(Mlp()):
        pass
    model: Any = yafsdp_cc.shard(seeded(Mlp), units=["blocks.*"])
    with pytest.raises(ValueError, match="is a part of one"), yafsdp_cc.uneven(model.blocks[0]):
        pass
    mixes: Any = yafsdp_cc.shard(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)))
    experts: Any = seeded(Mlp)
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "shard"))["shard"]
    yafsdp_cc.fully_shard(experts.blocks[0], mesh=alone)
    for each, told in (
        (mixes, "those of the SyncBatchNorm '1' come"),
        (yafsdp_cc.fully_shard(experts), "parameters on other ranks"),
    ):
        with pytest.raises(ValueError, match=told), yafsdp_cc.uneven(each):
            pass


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, such as the encodings of Hugging Face's tokenizers."""


@ranks(2)
def test_a_loop_may_pop_entries_of_its_batches() -> None:
    """Batches within lists, tuples and dicts are copied, too, for the rank whose data has ended."""
    model = yafsdp_cc.shard(seeded(Mlp))
    wrappings: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda batch: batch, lambda wrapped: wrapped),
        (lambda batch: (0, batch), lambda wrapped: wrapped[1]),
        (lambda batch: [batch], lambda wrapped: wrapped[0]),
        (lambda batch: {"inner": (batch,)}, lambda wrapped: wrapped["inner"][0]),
    ]
    for kind, (wrap, unwrap) in product((dict, Encoding), wrappings):
        own = [kind({"x": inputs()[0], "labels": 1}) for _ in range(1 + dist.get_rank())]
        with yafsdp_cc.uneven(model) as batches:
            for batch in map(unwrap, batches(map(wrap, own))):
                assert batch.pop("labels") == 1
                batch["seen"] = True
                square(model, batch["x"]).backward()
        assert [each.keys() for each in own] == [{"x", "seen"}] * len(own)  # the loop had the batches themselves


class Rollout(Mlp):
    """A model with another method than its forward, an output kept aside, and a parameter that may be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def twice(self, x: Tensor) -> Any:
        out = super().forward(x)
        return {"out": out, "hidden": [out]}

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x * self.scale)
        self.aside = out.square().mean()
        return out


def _chain(model: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + F.pad(model(x), (0, WIDTH - 5))
    return x.square().mean()


def _parts(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model.leave(model.blocks[1](model.blocks[0](model.enter(x)))).square().mean()
    return loss


WAYS: list[Callable[[Any, Tensor], Tensor]] = [
    _chain,
    _parts,
    lambda model, x: model.twice(x)["out"].square().mean(),
    lambda model, x: model(x).sum() * 0 + model.aside,
]


@ranks(2)
def test_a_gradient_is_weighed_once_whichever_way_it_takes() -> None:
    """Parameters are sharded, replicated or ignored, and a repeated batch has an infinite loss."""
    for ignores, way in product((False, True), WAYS):
        model, plain = seeded(Rollout), seeded(Rollout)
        yafsdp_cc.shard(model, units=["blocks.*"], ignored_params={model.scale} if ignores else None)
        yafsdp_cc.register_forward_method(model, "twice")
        model.scale.requires_grad_(not ignores)  # the loop trains the parameter all the same
        with yafsdp_cc.uneven(model) as batches:
            for batch in batches(inputs()[:1] if dist.get_rank() else []):
                model.scale.requires_grad_()
                (way(model, batch) * (1 if batches.weight else math.inf)).backward()
        way(plain, inputs()[0]).backward()
        for name, parameter in plain.named_parameters():
            found = model.get_parameter(name).grad
            if ignores and parameter is plain.scale and found is not None:
                dist.all_reduce(found)
                found /= 2
            elif found is not None:
                found = whole(found)
            torch.testing.assert_close(found, parameter.grad)


def _decoded(fails: bool) -> Any:
    yield inputs()[0]
    if fails:
        raise OSError("a sample cannot be decoded")
    yield from inputs()[:2]


def _loop(model: Any, leaves: bool = False, fails: bool = False) -> None:
    with yafsdp_cc.uneven(model) as batches:
        for _ in range(2):
            for batch in batches(_decoded(fails)):
                square(model, batch).backward()
                if leaves:
                    break


def _inner_loop(model: Any, leaves: bool) -> None:
    with yafsdp_cc.uneven(model) as batches:
        for _ in batches(inputs()):
            for _ in batches(inputs()):
                if leaves:
                    break


@ranks(2)
def test_leaving_the_loop() -> None:
    """A rank that leaves alone, or whose data raises, ends the loop on all ranks; they may leave together."""
    model, is_second, message = yafsdp_cc.shard(seeded(Mlp)), dist.get_rank() == 1, "some ranks have left the loop"
    _loop(model, leaves=True)
    with pytest.raises(RuntimeError, match=message):
        _loop(model, leaves=is_second)
    error, text = (OSError, "cannot be decoded") if is_second else (RuntimeError, message)
    with pytest.raises(error, match=text):
        _loop(model, fails=is_second)
    with pytest.raises(OSError, match="cannot be decoded"):
        _loop(model, fails=True)
    with pytest.raises(RuntimeError, match=message):
        _inner_loop(model, leaves=is_second)
    _loop(model)


def _adds(model: nn.Module, plain: nn.Module, batch: Tensor, step: int) -> None:
    """Add a batch's gradients to those of ``model``, and the mean of all ranks that have a batch to ``plain``'s."""
    square(model, batch).backward()
    there = [rank for rank in range(2) if step < COUNTS[2][rank]]
    torch.stack([square(plain, _batches(rank, step)) for rank in there]).mean().backward()


def _assert_equal_grads(model: nn.Module, plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole(model.get_parameter(name).grad), parameter.grad, msg=name)


@ranks(2)
def test_a_loop_within_a_loop_leaves_its_weight() -> None:
    """An evaluation amid training, by the same ``uneven`` or a helper's own, to its end or to a ``break``, also where
    a progress bar holds it."""
    rank = dist.get_rank()
    for is_helper, breaks in product((False, True), repeat=2):
        model, plain = yafsdp_cc.shard(seeded(Mlp)), seeded(Mlp)
        with yafsdp_cc.uneven(model) as batches:
            for step, batch in enumerate(batches(_batches(rank, step) for step in range(COUNTS[2][rank]))):
                with torch.no_grad(), yafsdp_cc.uneven(model) if is_helper else nullcontext(batches) as inner:
                    bar = inner(inputs()[: 1 + rank])
                    for turn, each in enumerate(bar):
                        assert inner.weight == (1 if turn == 0 else 2 * rank)
                        model(each)
                        if breaks and turn == 1:
                            break
                _adds(model, plain, batch, step)
            assert batches.weight == 1
        assert step == 2
        _assert_equal_grads(model, plain)


@ranks(2)
def test_two_loops_over_one_iterator() -> None:
    """The second goes on where the first was left, and the first, held or freed amid the second, weighs nothing."""
    rank = dist.get_rank()
    for is_held, is_one_object in ((False, False), (True, False), (True, True)):
        model, plain = yafsdp_cc.shard(seeded(Mlp)), seeded(Mlp)
        own = iter([_batches(rank, step) for step in range(COUNTS[2][rank])])
        with yafsdp_cc.uneven(model) as batches:
            first: Any = batches(own)
            turns = first if is_held else iter(first)
            for step, batch in enumerate(turns):
                _adds(model, plain, batch, step)
                if step == 1:
                    break
            for batch in first if is_one_object else batches(own):
                step, turns = step + 1, turns if is_held else None
                _adds(model, plain, batch, step)
            assert batches.weight == 1
        assert step == 2
        _assert_equal_grads(model, plain)


@ranks(2)
def test_batches_taken_by_next() -> None:
    """A batch keeps its weight behind an evaluation, until the next one is taken; not in another block."""
    model, plain, rank = yafsdp_cc.shard(seeded(Mlp)), seeded(Mlp), dist.get_rank()
    with yafsdp_cc.uneven(model) as batches:
        own = batches(_batches(rank, step) for step in range(COUNTS[2][rank]))
        for step in range(2):
            batch = next(own)
            for each in batches(inputs()[: 1 + rank]):
                model(each)
            _adds(model, plain, batch, step)
        for batch in own:
            _adds(model, plain, batch, 2)
            break
        taken = batches(inputs())
        next(taken)
    _assert_equal_grads(model, plain)
    for each in (own, taken):
        with pytest.raises(RuntimeError, match=r"or after the block, .* own = iter"), yafsdp_cc.uneven(model):
            next(each)


@ranks(2)
def test_an_ignored_parameter_has_the_weight_of_the_innermost_loop() -> None:
    """Beside it is one made in inference mode, which nothing can train."""
    model, plain, rank = seeded(Rollout), seeded(Rollout), dist.get_rank()
    with torch.inference_mode():
        model.table = nn.Parameter(torch.ones(2), requires_grad=False)
    yafsdp_cc.shard(model, ignored_params={model.scale, model.table})
    square(plain, inputs()[rank]).backward()
    with yafsdp_cc.uneven(model) as outer:
        for _ in outer(range(1 + rank)):
            with yafsdp_cc.uneven(model) as inner:
                for batch in inner([inputs()[rank]]):
                    model.zero_grad()
                    square(model, batch).backward()
                    torch.testing.assert_close(model.scale.grad, plain.scale.grad)
            model.zero_grad()
            square(model, inputs()[rank]).backward()
            torch.testing.assert_close(model.scale.grad, plain.scale.grad * outer.weight)


@ranks(2)
def test_refused_in_the_loop() -> None:
    """Loops that take turns, and a batch of a class that no other rank can find."""

    class Sample:
        pass

    model = yafsdp_cc.shard(seeded(Mlp))
    with pytest.raises(RuntimeError, match=r"batches\(zip\(images, texts\)\)"), yafsdp_cc.uneven(model) as batches:
        for _ in zip(batches(inputs()), batches(inputs()), strict=True):
            pass
    with pytest.raises(RuntimeError, match=r"uneven gives .* by pickle, .*Sample"), yafsdp_cc.uneven(model) as batches:
        for _ in batches([Sample()] * dist.get_rank()):
            pass


@ranks(2)
def test_a_model_in_front_of_another_is_weighed_if_it_is_given() -> None:
    """A loop that was left weighs nothing when Python frees it, amid another one."""
    torch.manual_seed(0)
    front, model = nn.Linear(64, WIDTH), seeded(Mlp)
    plain = nn.Sequential(copy.deepcopy(front), copy.deepcopy(model))
    x = torch.randn(2, 3, 64)
    yafsdp_cc.shard(front)
    yafsdp_cc.fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    with yafsdp_cc.uneven(model, front) as batches:
        left: Any = batches([x[0]] if dist.get_rank() == 0 else [])
        square(model, front(next(left))).backward()
    with yafsdp_cc.uneven(model, front) as batches:
        for batch in batches([x[1]] if dist.get_rank() == 0 else []):
            left = None
            square(model, front(batch)).backward()
    for each in x:
        square(plain, each).backward()
    for one, other in zip((*front.parameters(), *model.parameters()), plain.parameters(), strict=True):
        assert torch.allclose(whole(one.grad), other.grad, rtol=1e-4, atol=1e-6)
