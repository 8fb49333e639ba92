"""What is freed, and when."""

from __future__ import annotations

import gc
import tempfile
import time
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.internals import finish_all_gathers, first_weight_buffer, state_of
from tests.models import WIDTH, Block, stack
from tests.ranks import ranks
from tests.twins import inputs, mine, numbers, square, trains_on, twins


def _tensors() -> int:
    """Tensors that there are, when gloo's threads have let go of what they have sent."""
    counts = []
    for _ in range(10):
        gc.collect()
        counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
        time.sleep(0.02)
    return min(counts)


@pytest.mark.parametrize("backward", [True, False])
@ranks(2)
def test_no_tensor_is_left_over_by_a_step(backward: bool) -> None:
    model, _ = twins(stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counts = []
    for step in range(60):
        loss = square(model, mine(inputs()))
        if backward:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        if step in (9, 59):
            finish_all_gathers(model)
            counts.append(_tensors())
    assert counts[0] == counts[1]


class Marked(torch.autograd.Function):
    """Saves an object that can be watched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Any) -> Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Named(NamedTuple):
    """An output that is looked into."""

    loss: Tensor


class Naming(nn.Module):
    """Returns its loss by name, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = stack()

    def forward(self, x: Tensor) -> Named:
        return Named(self.stack(x).square().mean())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("named", [False, True])
@ranks(1)
def test_what_came_before_the_model_is_freed_with_its_output(named: bool, backward: bool) -> None:
    model, _ = twins(Naming if named else stack)
    gc.collect()
    gc.disable()
    mark = Block()
    freed = weakref.ref(mark)
    x = Marked.apply(numbers(2, WIDTH, grad=True), mark)
    loss = model(x).loss if named else square(model, x)
    if backward:
        loss.backward()
    del loss, x, mark
    assert freed() is None


@ranks(2)
def test_a_deleted_model_leaves_nothing_behind_and_another_takes_its_place() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, _ = twins(stack)
    square(model, mine(inputs())).backward()
    engine, buffer = weakref.ref(state_of(model)), weakref.ref(first_weight_buffer(model))
    del model
    gc.collect()
    assert engine() is None
    assert buffer() is None
    path: list[Any] = [None]
    if rank == 0:
        path[0] = tempfile.mkstemp()[1]
    dist.broadcast_object_list(path)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(path[0], world), rank=rank, world_size=world)
    model, plain = twins(stack)
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)
