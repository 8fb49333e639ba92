"""Several backwards before a step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import yafsdp_cc
from tests.models import Mlp, Skipping
from tests.ranks import ranks
from tests.soak import also
from tests.twins import (
    added,
    inputs,
    means,
    mine,
    numbers,
    reload,
    same_gradients,
    sgd,
    square,
    step_both,
    twins,
    whole,
)


@ranks(2)
def test_each_micro_batch_is_reduced_into_the_shard() -> None:
    model, plain = twins(Mlp)
    batches = [inputs(step=step) for step in range(3)]
    for micro in batches:
        square(model, mine(micro)).backward()
    same_gradients(model, added(*(means(plain, square, micro) for micro in batches)))


@pytest.mark.parametrize("world", [2, also(4)])
@ranks("world")
def test_gradients_can_be_kept_whole_until_the_last_micro_batch(world: int) -> None:
    model, plain = twins(Mlp)
    optimizers = sgd(model, plain)
    for round_ in range(2):
        batches = [inputs(step=3 * round_ + micro) for micro in range(3)]
        before = yafsdp_cc.counters_of(model).reduced_bytes
        for micro in batches[:-1]:
            model.set_requires_gradient_sync(False)
            square(model, mine(micro)).backward()
        assert yafsdp_cc.counters_of(model).reduced_bytes == before
        for module in model.modules():  # as frameworks do
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(True, recurse=False)
        square(model, mine(batches[-1])).backward()
        truth = added(*(means(plain, square, micro) for micro in batches))
        same_gradients(model, truth, within=1e-6)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)


@ranks(4)
def test_a_unit_that_the_last_micro_batch_leaves_out_is_summed_over_replicas_all_the_same() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = twins(Skipping, units=[nn.Linear], mesh=mesh)

    def loss(model: nn.Module, batch: tuple[Tensor, bool]) -> Tensor:
        out: Tensor = model(*batch).square().mean()
        return out

    optimizers = sgd(model, plain)
    for step in range(2):  # gradients of the first step are still in the buffer of those of the second
        micros = [[(numbers(3, 64, seed=10 * (2 * step + n) + rank), n == 1) for rank in range(4)] for n in range(2)]
        for sums, batches in enumerate(micros):
            model.set_requires_all_reduce(bool(sums))
            loss(model, mine(batches)).backward()
        truth = added(*(means(plain, loss, batches) for batches in micros))
        same_gradients(model, truth, within=1e-6)
        step_both(model, plain, truth, optimizers)
        reload(plain, model)


@ranks(2)
def test_evaluation_between_held_micro_batches() -> None:
    model, plain = twins(Mlp)
    first, second = inputs(step=0), inputs(step=1)
    model.set_requires_gradient_sync(False)
    square(model, mine(first)).backward()
    with torch.no_grad():
        assert torch.equal(model(mine(second)), plain(mine(second)))
    model.set_requires_gradient_sync(True)
    square(model, mine(second)).backward()
    same_gradients(model, added(means(plain, square, first), means(plain, square, second)), within=1e-6)


@pytest.mark.parametrize("to_none", [True, False])
@ranks(2)
def test_zero_grad(to_none: bool) -> None:
    model, plain = twins(Mlp)
    for step in range(3):
        batches = inputs(step=step)
        square(model, mine(batches)).backward()
        same_gradients(model, means(plain, square, batches))
        model.zero_grad(set_to_none=to_none)
        for parameter in model.parameters():
            assert (parameter.grad is None) == to_none
            assert to_none or not whole(parameter.grad).any()


@ranks(2)
def test_an_exception_between_held_micro_batches_keeps_what_is_held() -> None:
    model, plain = twins(Mlp)
    model.set_requires_gradient_sync(False)
    square(model, mine(inputs(step=0))).backward()
    blow = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        square(model, mine(inputs(step=1)))
    blow.remove()
    model.set_requires_gradient_sync(True)
    square(model, mine(inputs(step=2))).backward()
    same_gradients(model, added(*(means(plain, square, inputs(step=step)) for step in (0, 2))), within=1e-6)


@ranks(2)
def test_synchronisation_switched_between_forward_and_backward() -> None:
    model, plain = twins(Mlp)
    for step, synchronises in enumerate((False, True)):
        loss = square(model, mine(inputs(step=step)))
        model.set_requires_gradient_sync(synchronises)
        loss.backward()
    same_gradients(model, added(*(means(plain, square, inputs(step=step)) for step in range(2))), within=1e-6)


@ranks(2)
def test_a_backward_that_raises_drops_what_is_held_and_says_so() -> None:
    """It may have added a part of its own."""
    messages: list[str] = []
    logging.getLogger("yafsdp_cc").addFilter(lambda record: bool(messages.append(record.getMessage())) or True)
    model, plain = twins(Mlp)
    model.set_requires_gradient_sync(False)
    square(model, mine(inputs(step=0))).backward()
    out = model(mine(inputs(step=1)))
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    model.set_requires_gradient_sync(True)
    square(model, mine(inputs(step=2))).backward()
    same_gradients(model, means(plain, square, inputs(step=2)))
    assert "run all micro-batches of the step again" in messages[-1]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:nothing is sharded")
@pytest.mark.parametrize("kept", ["sums for replicas", "gradients of small parameters"])
@ranks(2)
def test_an_interrupt_drops_what_is_held_beside_units_and_says_so(kept: str) -> None:
    messages: list[str] = []
    logging.getLogger("yafsdp_cc").addFilter(lambda record: bool(messages.append(record.getMessage())) or True)
    if kept == "sums for replicas":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model, plain = twins(Mlp, mesh=mesh)
        model.set_requires_all_reduce(False)
    else:
        model, plain = twins(lambda: nn.Sequential(nn.LayerNorm(32), nn.LayerNorm(32)))
        model.set_requires_gradient_sync(False)
    square(model, mine(inputs(step=0))).backward()
    interrupt = [*model.modules()][-1].register_forward_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(mine(inputs(step=1)))
    interrupt.remove()
    model.set_requires_all_reduce(True)
    model.set_requires_gradient_sync(True)
    square(model, mine(inputs(step=2))).backward()
    same_gradients(model, means(plain, square, inputs(step=2)), within=1e-6)
    assert "run all micro-batches of the step again" in messages[-1]


@pytest.mark.parametrize("cleared", ["", "blocks.1"])
@pytest.mark.parametrize("kept_as", ["gradient", "local", "view"])
@ranks(2)
def test_gradients_that_the_user_keeps_stay_what_they_were(kept_as: str, cleared: str) -> None:
    """Gradients are kept of parameters whose ``.grad`` is set to None; others in the same buffer may accumulate."""
    model, plain = twins(Mlp)
    kept: list[dict[str, Any]] = []
    copies: list[dict[str, Tensor]] = []
    truth: dict[str, Tensor] = {}
    for step in range(3):
        square(model, mine(inputs(step=step))).backward()
        added = means(plain, square, inputs(step=step))
        truth = {name: grad if cleared in name else truth.get(name, 0) + grad for name, grad in added.items()}
        same_gradients(model, truth, within=1e-6)
        grads = {name: parameter.grad for name, parameter in model.named_parameters() if cleared in name}
        copies.append({name: grad.to_local().clone() for name, grad in grads.items()})
        if kept_as != "gradient":
            grads = {name: grad.to_local() for name, grad in grads.items()}
        if kept_as == "view":
            grads = {name: local.view(-1)[:3] for name, local in grads.items()}
        kept.append(grads)
        del grads
        for name, parameter in model.named_parameters():
            parameter.grad = None if cleared in name else parameter.grad
    for grads, copied in zip(kept, copies, strict=True):
        for name, grad in grads.items():
            found = grad.to_local() if kept_as == "gradient" else grad
            expected = copied[name].view(-1)[:3] if kept_as == "view" else copied[name]
            assert found.equal(expected), name


@pytest.mark.parametrize("compression", [None, "int8"])
@ranks(2)
def test_what_is_frozen_between_micro_batches_keeps_the_gradients_of_the_earlier_ones(compression: str | None) -> None:
    model, plain = twins(Mlp, compression=compression)
    name = "blocks.1.0.weight"
    first, second = inputs(step=0), inputs(step=1)
    model.set_requires_gradient_sync(False)
    square(model, mine(first)).backward()
    model.set_requires_gradient_sync(True)
    model.get_parameter(name).requires_grad_(False)
    square(model, mine(second)).backward()
    truth = means(plain, square, first)[name]
    grad = model.get_parameter(name).grad.full_tensor()
    assert (grad - truth).norm() <= (1e-5 if compression is None else 0.05) * truth.norm()


@ranks(2)
def test_a_kept_gradient_has_what_another_rank_wrote_before_the_parameter_was_frozen() -> None:
    model, plain = twins(Skipping)
    batches = [numbers(3, 64, seed=rank) for rank in range(2)]
    model(mine(batches), False).square().mean().backward()
    model.zero_grad(set_to_none=False)
    model.set_requires_gradient_sync(False)
    model(mine(batches), dist.get_rank() == 1).square().mean().backward()  # rank 1 owns the second layer
    model.set_requires_gradient_sync(True)
    model.second.weight.requires_grad_(False)
    model(mine(batches), True).square().mean().backward()
    (plain(batches[0], False).square().mean() / 2).backward()
    assert torch.allclose(whole(model.second.weight.grad), plain.second.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("users", [(0, 1), (0,), (1,)])
@ranks(2)
def test_a_layer_frozen_between_micro_batches_has_on_all_ranks_what_any_wrote_before(users: tuple[int, ...]) -> None:
    """The layer's sharded weight and its replicated bias keep the gradients of a micro-batch without gradient sync."""
    model, plain = twins(Skipping)
    batches = [numbers(3, 64, seed=rank) for rank in range(2)]
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        model(mine(batches), dist.get_rank() not in users).square().mean().backward()
        model.set_requires_gradient_sync(True)
        model.second.requires_grad_(False)
        model(mine(batches), True).square().mean().backward()
        for rank, batch in enumerate(batches):
            for skips in (rank not in users, True):
                (plain(batch, skips).square().mean() / 2).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        same_gradients(model, {name: each.grad for name, each in plain.named_parameters()}, within=1e-5)
        model.second.requires_grad_(True)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("frozen", [False, True])
@ranks(2)
def test_a_unit_that_the_last_micro_batch_leaves_out_has_what_one_rank_alone_wrote_before(frozen: bool) -> None:
    model, plain = twins(Leaving)
    batches = [numbers(3, 64, seed=rank) for rank in range(2)]
    model.set_requires_gradient_sync(False)
    model(mine(batches), passes=dist.get_rank() == 1).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model.blocks[1].requires_grad_(not frozen)
    model(mine(batches), leaves_out=True).square().mean().backward()
    for rank, batch in enumerate(batches):
        for options in ({"passes": rank == 1}, {"leaves_out": True}):
            (plain(batch, **options).square().mean() / 2).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    same_gradients(model, {name: each.grad for name, each in plain.named_parameters()}, within=1e-5)


class Leaving(nn.Module):
    """Three units, of which a forward may leave out the second, or call it without using its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Optional() for _ in range(3))

    def forward(self, x: Tensor, passes: bool = True, leaves_out: bool = False) -> Tensor:
        x = self.blocks[0](x, True)
        x = x if leaves_out else self.blocks[1](x, passes)
        out: Tensor = self.blocks[2](x, True)
        return out


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor, passes: bool) -> Tensor:
        return x + torch.tanh(self.inner(x)) if passes else x * 2


@pytest.mark.parametrize("is_plain", [False, True])
@ranks(2)
def test_an_assigned_gradient_that_is_sharded_otherwise_is_refused_on_all_ranks(is_plain: bool) -> None:
    """Ranks that own nothing of the parameter refuse the gradient, too: they would wait for the others."""
    model, other = yafsdp_cc.shard(Mlp(), units=["blocks.*"]), yafsdp_cc.shard(Mlp())
    for parameter, its in zip(model.parameters(), other.parameters(), strict=True):
        parameter.grad = torch.ones(parameter.shape) if is_plain else torch.ones_like(its.detach())
    with pytest.raises(TypeError, match=r"has a \.grad that is .*or set it to None"):
        square(model, mine(inputs())).backward()
