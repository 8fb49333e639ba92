"""Gradients and losses against one process: real architectures from small random configs, 2 and 4 ranks, fp32."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import yafsdp_cc
from tests import reference
from tests.models import CASES, import_models, joined
from tests.ranks import ranks
from tests.soak import SOAK, also

OWN = ("mlp", "transformer", "mixture")
"""Cases whose models are not Hugging Face's."""
STEPS, CLIP = 10 if SOAK else 5, 0.5
RUNS = [(also if world == 4 and name not in OWN else pytest.param)(name, world) for name in CASES for world in (2, 4)]
ZERO = 1e-9
"""Of the whole gradient's norm. Less is a gradient that is zero by mathematics: a key's bias under softmax."""


@pytest.fixture(scope="module", autouse=True)
def _import_before_forking() -> None:
    """Importing a model's code takes longer than training it here; ranks inherit what the parent has imported."""
    import_models()


@pytest.mark.parametrize(("name", "world"), RUNS)
@ranks("world")
def test_first_step_gradients_equal_the_sum_over_ranks_bit_for_bit(name: str, world: int) -> None:
    case = CASES[name]
    batches = case.batches(dist.get_world_size())
    plain = case.model()
    _, whole = reference.gradients(plain, lambda: case.loss(plain, joined(batches)))
    reference.gate(plain, case.gated)
    _, exact = reference.mean_gradients(plain, case.loss, batches)
    model = yafsdp_cc.shard(case.model())
    case.loss(model, batches[dist.get_rank()]).backward()
    found = whole_gradients(model)
    assert found.keys() == exact.keys()
    _all_zero_or_close(found, whole)
    differ = {name: _difference(found[name], truth) for name, truth in exact.items()}
    assert not any(differ.values()), {name: text for name, text in differ.items() if text}


CHECKPOINTABLE = [name for name in CASES if name not in OWN]


@pytest.mark.parametrize("name", CHECKPOINTABLE)
@ranks(2)
def test_gradient_checkpointing_of_hugging_face(name: str) -> None:
    case = CASES[name]
    batches = case.batches(2)
    plain = case.model()
    _, whole = reference.gradients(plain, lambda: case.loss(plain, joined(batches)))
    model = yafsdp_cc.shard(case.model())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.is_gradient_checkpointing
    for _ in range(2):
        model.zero_grad()
        case.loss(model, batches[dist.get_rank()]).backward()
        _all_zero_or_close(whole_gradients(model), whole)
    assert yafsdp_cc.counters_of(model).overflow_buffers == 0


def _all_zero_or_close(found: reference.Gradients, truth: reference.Gradients) -> None:
    norm = torch.stack([g.norm() for g in truth.values() if g is not None]).norm().item()
    for name, gradient in truth.items():
        if gradient is None:
            continue
        ours = found[name]
        assert ours is not None, name
        if gradient.norm() < ZERO * norm:
            assert ours.norm() < ZERO * norm, name
        else:
            assert reference.far_apart(ours, gradient) <= 1e-6, name


@pytest.mark.parametrize(("name", "world"), RUNS)
@ranks("world")
def test_losses_over_clipped_steps(name: str, world: int) -> None:
    case = CASES[name]
    rank = dist.get_rank()
    plain = case.model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)

    def joined_gradients(step: int) -> tuple[float, reference.Gradients]:
        batch = joined(case.batches(world, step))
        return reference.gradients(plain, lambda: case.loss(plain, batch))

    truth = reference.train(plain, optimizer, joined_gradients, STEPS, CLIP)

    model = yafsdp_cc.shard(case.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        loss = case.loss(model, case.batches(world, step)[rank])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    assert losses == pytest.approx(truth, rel=1e-5, abs=0)


def whole_gradients(model: nn.Module) -> reference.Gradients:
    """Every gradient of a sharded model, whole on every rank; a collective."""
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def whole(sharded: Tensor | None) -> Tensor | None:
    return None if sharded is None else sharded.full_tensor()  # type: ignore[attr-defined, no-any-return]


def _difference(found: Tensor | None, truth: Tensor | None) -> str:
    if found is None or truth is None:
        return "" if found is truth else f"found {_kind(found)}, the truth is {_kind(truth)}"
    if found.dtype != truth.dtype or found.shape != truth.shape:
        return f"found {found.dtype} {tuple(found.shape)}, the truth is {truth.dtype} {tuple(truth.shape)}"
    return "" if torch.equal(found, truth) else f"off by {reference.far_apart(found, truth):.1e}"


def _kind(gradient: Tensor | None) -> str:
    return "no gradient" if gradient is None else "a gradient"
