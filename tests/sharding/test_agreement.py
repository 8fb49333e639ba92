"""Ranks that were given different models, arguments or orders: every rank says so, and what."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from tests.internals import set_patience
from tests.models import WIDTH, Block, Mlp, stack
from tests.ranks import on_ranks, ranks, short_timeout
from tests.twins import inputs, means, mine, refusal, seeded, square, twins
from yafsdp_cc.ranks import checks


@pytest.mark.parametrize("odd", [0, 2, 3])
def test_weights_that_differ_between_ranks_are_named_on_every_rank(odd: int) -> None:
    assert on_ranks(4, _differ, odd) == [True] * 4


def _differ(odd: int) -> bool:
    model = seeded(Mlp)
    if dist.get_rank() == odd:
        with torch.no_grad():
            model.blocks[1][2].weight.view(-1)[77] += 1e-3
    with pytest.raises(ValueError, match=r"blocks\.1\.2\.weight(?s:.*)pass sync_module_states=True"):
        yafsdp_cc.shard(model)
    return True


def test_the_same_numbers_in_another_order_differ_too() -> None:
    assert on_ranks(2, _permuted) == [True] * 2


def _permuted() -> bool:
    model = seeded(Mlp)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.leave.weight.copy_(model.leave.weight.flip(0).clone())
    with pytest.raises((RuntimeError, ValueError), match=r"leave\.weight"):
        yafsdp_cc.shard(model)
    return True


@pytest.mark.parametrize("what", ["shape", "dtype", "frozen", "missing"])
def test_models_that_differ_between_ranks_are_refused(what: str) -> None:
    assert on_ranks(2, _other_model, what) == [True] * 2


def _other_model(what: str) -> bool:
    model: Any = seeded(Mlp)
    if dist.get_rank() == 1:
        if what == "shape":
            model.leave = nn.Linear(WIDTH, 6)
        elif what == "dtype":
            model.leave.bfloat16()
        elif what == "frozen":
            model.leave.weight.requires_grad_(False)
        else:
            model.leave.bias = None
    numbers = [len([*seeded(Mlp).parameters()]) - (what == "missing") * rank for rank in range(2)]
    for sync in (False, True):
        with pytest.raises(ValueError, match=r"leave(?s:.*)Build the same model on every rank") as caught:
            yafsdp_cc.shard(model, sync_module_states=sync)
        assert "sync_module_states" not in str(caught.value)  # would not help
        counts = f"models differ, rank 0 has {numbers[0]} parameters, rank 1 has {numbers[1]}; first in parameter"
        assert (counts in str(caught.value)) == (what == "missing")
    return True


OPTIONS: dict[str, dict[str, Any]] = {
    "units": {"units": [nn.Linear]},
    "mp_policy": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "reshard_after_forward": {"reshard_after_forward": False},
    "separate_reduce_group": {"separate_reduce_group": True},
    "sync_module_states": {"sync_module_states": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_arguments_that_differ_between_ranks_are_named_on_every_rank(option: str) -> None:
    for message in on_ranks(2, _other_arguments, option, timeout=8):
        assert option in message, message


def _other_arguments(option: str) -> str:
    with short_timeout(3):
        given = OPTIONS[option] if dist.get_rank() == 1 else {}
        return refusal(lambda: yafsdp_cc.shard(stack(), **{"units": [Block], **given}))


def _complex_parameter(model: Any) -> None:
    model[1].inner.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex64))


def _no_blocks(model: Any) -> None:
    for index in range(len(model)):
        model[index] = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(_complex_parameter, "1.inner.bias"), (_no_blocks, "Block")],
)
def test_what_one_rank_refuses_every_rank_refuses(spoil: Callable[[Any], Any], says: str) -> None:
    for message in on_ranks(2, _one_refuses, spoil, timeout=20):
        assert says in message, message


def _one_refuses(spoil: Callable[[Any], Any]) -> str:
    model = seeded(stack)
    spoilt = spoil(model) if dist.get_rank() == 1 else None
    with short_timeout(2):
        message = refusal(lambda: yafsdp_cc.shard(model, units=[Block]))
        refusal(dist.barrier)  # so that the rank that refuses first does not end the other's wait by its own end
    del spoilt
    return message


def test_running_units_in_another_order_on_one_rank_is_an_error_in_time() -> None:
    errors = on_ranks(2, _other_order, patience=5)
    for error in errors:
        assert "rank 0: " in error, errors
        assert "rank 1: " in error, errors
        assert "blocks.2" in error, errors


def test_parameters_frozen_on_one_rank_are_named_before_their_gradients_are_used() -> None:
    for error in on_ranks(2, _frozen_on_one, patience=5):
        assert "freeze the same parameters" in error, error
        assert "without 0.inner.bias, frozen (1 in all)" in error, error
        assert "rank 0: " in error, error


def _frozen_on_one() -> str:
    model, _ = twins(stack, units=[Block])
    model(mine(inputs())).sum().backward()
    if dist.get_rank() == 1:
        model.get_parameter("0.inner.bias").requires_grad_(False)  # replicated: what ranks send is as long as before
    return refusal(lambda: model(mine(inputs())).sum().backward())


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x


def _other_order() -> str:
    model, _ = twins(Turns, units=[nn.Linear])
    orders = [[0, 1, 2, 3], [0, 2, 1, 3]]
    try:
        for _ in range(3):
            x = mine(inputs())
            out = model(x, mine(orders))
            out.square().mean().backward()
            model.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


@ranks(3)
def test_a_rank_that_takes_no_part_any_more_is_named_as_such() -> None:
    set_patience(0.5)
    model, _ = twins(Turns, units=[nn.Linear])
    model(mine(inputs()), [0, 1, 2, 3]).sum().backward()
    if dist.get_rank() == 1:
        return
    with short_timeout(1):
        said = refusal(lambda: [model(mine(inputs()), [0, 1, 2, 3]).sum().backward() for _ in range(3)])
    assert said.startswith("an operation failed: no answer from rank 1, which ended or hangs"), said
    assert "rank 1: no answer" in said, said
    assert "same order" not in said, said


@ranks(2)
def test_no_rank_is_blamed_where_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True)
    client = dist.TCPStore("localhost", server.port, is_master=False)
    monkeypatch.setattr(checks, "_own_store", lambda: client)
    assert dist.group.WORLD is not None
    del server
    assert checks.missing_in(dist.group.WORLD) == ""
    assert dist.group.WORLD not in checks._missing


@ranks(2, patience=4)
def test_a_tensor_that_one_rank_alone_reads_before_an_engine_is_made() -> None:
    """gloo would abort where the two ranks' messages differ in length."""
    set_patience(1.0)
    model = yafsdp_cc.fully_shard(seeded(Mlp))
    if dist.get_rank() == 0:
        said = refusal(lambda: model.enter.weight.full_tensor())
        assert "an operation failed: no answer from rank 1, which ended or hangs" in said, said
    else:
        said = refusal(lambda: square(model, mine(inputs())).backward())
        assert "no answer from rank 0, which has ended, or is in another collective, such as a forward" in said, said


@ranks(4, patience=4)
def test_a_norm_that_one_rank_of_a_replica_reads_alone() -> None:
    """Its replica is told; a replica may read without the others."""
    set_patience(1.0)
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=4)
    mesh = init_device_mesh("cpu", (2, 2))
    model, plain = twins(Mlp, mesh=mesh)
    square(model, mine(inputs())).backward()
    truth = means(plain, square, inputs())
    if dist.get_rank() < 2:
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        expected = torch.nn.utils.get_total_norm([grad for grad in truth.values() if grad is not None])
        torch.testing.assert_close(norm.full_tensor(), expected)
    if dist.get_rank() == 2:
        said = refusal(lambda: model.enter.weight.grad.norm().item())
    else:
        said = refusal(lambda: [square(model, mine(inputs())).backward() for _ in range(3)])
    if dist.get_rank() == 2:
        assert "an operation failed: no answer from rank 3, which ended or hangs" in said, said
        assert "rank 2: 0 operations, the last: ; next: read a norm, sum, mean or extreme" in said, said
    else:
        assert said.startswith("an operation failed: "), said
