"""Gradients of replicated parameters, where the backend sums in place as NCCL does: by one all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.internals import set_reduces_in_place
from tests.models import Mlp
from tests.ranks import ranks
from tests.twins import added, inputs, means, mine, same_gradients, square, trains_on, twins


@pytest.mark.parametrize("world", [2, 4])
@ranks("world")
def test_small_gradients_that_are_summed_in_place_are_means(world: int) -> None:
    set_reduces_in_place()
    names = ("replicate", "shard")
    more: dict[str, Any] = {} if world == 2 else {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names)}
    model, plain = twins(Mlp, **more)
    assert any(parameter.placements[-1].is_replicate() for parameter in model.parameters())
    trains_on(model, plain, square, [inputs(step=step) for step in range(3)], within=1e-5)
    first, second = inputs(step=3), inputs(step=4)
    for synchronises, batches in ((False, first), (True, second)):
        model.set_requires_gradient_sync(synchronises)
        square(model, mine(batches)).backward()
    same_gradients(model, added(means(plain, square, first), means(plain, square, second)), within=1e-5)
