"""The CUDA lane, whose streams and events are modelled on the CPU: whatever runs at once must not share bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from tests import internals
from tests.models import WIDTH, Checkpointed, Mlp
from tests.ranks import RankError, on_ranks
from tests.soak import also
from tests.streams import streams

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(3):
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def accumulates(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for synchronises in (True, False, False, True, True):
        model.set_requires_gradient_sync(synchronises)
        model(x).square().mean().backward()
        optimizer.step()


def evaluates(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(2):
        model.blocks[0][0].unshard(async_op=True)
        with torch.no_grad():
            model(x)
        steps(model, optimizer, x)


def two_passes(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(2):
        (model(x).square().mean() + model(x + 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def to_the_input(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(2):
        x = x.detach().requires_grad_()
        torch.autograd.grad(model(x).square().mean(), x)
    steps(model, optimizer, x.detach())


def penalised(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    # In the middle of a backward, when the reduces of these weights are under way.
    late = [model.blocks[0][0].weight, model.leave.weight]
    model.enter.register_forward_hook(lambda *args: args[-1] + sum(p.pow(2).sum() + p.to_local().norm() for p in late))
    for _ in range(2):
        (model(x).square().mean() + late[0].full_tensor().norm()).backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def interrupted(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    def fail(_: Any) -> None:
        raise KeyError

    for _ in range(2):
        x = x.detach().requires_grad_()
        x.register_hook(fail)
        loss, inner = model(x).square().mean(), model.blocks[1].register_full_backward_hook(lambda *_: fail(None))  # type: ignore[union-attr,index]
        with pytest.raises(KeyError):
            loss.backward()
        inner.remove()
        steps(model, optimizer, x.detach())


PROGRAMS = [steps, accumulates, evaluates, two_passes, to_the_input, penalised, interrupted]


def run(program: Callable[..., None], kind: type[nn.Module], policy: MixedPrecisionPolicy | None, apart: bool) -> int:
    torch.manual_seed(0)
    with streams() as watched:
        model: Any = yafsdp_cc.shard(kind(6), mp_policy=policy, separate_reduce_group=apart)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        program(model, optimizer, torch.randn(4, WIDTH))
    assert dist.is_initialized()
    return watched.accesses


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(
    ("policy", "kind", "world"),
    [
        (None, Mlp, 1),
        (None, Checkpointed, 2),
        (BF16, Checkpointed, 1),
        (BF16, Mlp, 2),
        also(None, Mlp, 2),
        also(None, Checkpointed, 1),
        also(BF16, Checkpointed, 2),
        also(BF16, Mlp, 1),
    ],
    ids=lambda value: "fp32" if value is None else "bf16" if value is BF16 else getattr(value, "__name__", value),
)
def test_nothing_races(policy: MixedPrecisionPolicy | None, kind: type[nn.Module], world: int, program: Any) -> None:
    assert on_ranks(world, run, program, kind, policy, world == 2)[0] > 1000


@pytest.mark.parametrize(
    ("break_it", "program"),
    [
        (internals.break_buffer_release, steps),
        (internals.break_wait, steps),
        (internals.break_stream_order, steps),
        (internals.break_wait_of_autograd, penalised),
    ],
)
def test_the_model_of_streams_sees_races(break_it: Callable[[], None], program: Any) -> None:
    with pytest.raises(RankError, match="are not in order"):
        on_ranks(1, _broken, break_it, program)


def _broken(break_it: Callable[[], None], program: Any) -> None:
    break_it()
    run(program, Mlp, None, False)
