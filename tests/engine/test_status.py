"""``print(state)`` and the message of a failed collective name the phase of each group at every point of a step."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests import simulated_cuda
from tests.internals import set_patience, state_of
from tests.ranks import ranks, short_timeout
from tests.twins import refusal


class Spied(nn.Module):
    """A layer that notes what the engine does within its forward, and within its backward."""

    def __init__(self, said: dict[str, str]) -> None:
        super().__init__()
        self.inner, self.said = nn.Linear(64, 64), said

    def forward(self, x: Tensor) -> Tensor:
        name = next(name for name, module in SPY[0].named_modules() if module is self)
        self.said[f"forward {name}"] = str(state_of(SPY[0]))
        y = self.inner(x)
        y.register_hook(lambda _: self.said.update({f"backward {name}": str(state_of(SPY[0]))}))
        return y.tanh()


SPY: list[nn.Module] = []


@ranks(2)
def test_a_step_goes_through_its_phases() -> None:
    said: dict[str, str] = {}
    model = yafsdp_cc.shard(nn.Sequential(*(Spied(said) for _ in range(4))), units=[Spied])
    SPY[:] = [model]
    assert "between forwards and backwards\n  4 at rest" in str(state_of(model))
    for _ in range(2):  # the second forward knows the order of the groups
        model(torch.randn(2, 64)).sum().backward()
    lines = said["forward 1"].splitlines()
    assert lines[0].endswith("in a forward")
    assert lines[1:] == [
        "  1: weights in use (block weight buffer 1)",
        "  2: weights being gathered (block weight buffer 0)",
        "  and 2 more at rest",
    ], lines
    lines = said["backward 2"].splitlines()
    assert lines[0].endswith("in a backward")
    assert lines[1:] == [
        "  1: weights being gathered (block weight buffer 1)",
        "  2: weights in use (block weight buffer 0), gradients being written (block gradient buffer 0)",
        "  3: gradients being reduced",
        "  and 1 more at rest",
    ], lines
    assert str(state_of(model)).startswith("engine of FSDPSequential, 0 steps: between forwards and backwards")


@ranks(1, fresh=True)
def test_operations_that_a_gpu_has_ended_are_not_under_way() -> None:
    simulated_cuda.install()  # a device whose work is over when it is enqueued
    said: dict[str, str] = {}
    layers = nn.Sequential(*(Spied(said) for _ in range(4))).cuda()
    model = yafsdp_cc.shard(layers, units=[Spied], mesh=init_device_mesh("cuda", (1,)))
    SPY[:] = [model]
    for _ in range(2):
        model(torch.randn(2, 64, device="cuda")).sum().backward()
    assert said["forward 1"].splitlines()[1:] == [
        "  1: weights in use (block weight buffer 1)",
        "  2: weights unsharded (block weight buffer 0)",
        "  and 2 more at rest",
    ]
    assert said["backward 2"].splitlines()[1:] == [
        "  1: weights unsharded (block weight buffer 1)",
        "  2: weights in use (block weight buffer 0), gradients being written (block gradient buffer 0)",
        "  and 2 more at rest",
    ]


@ranks(2)
def test_gradients_that_wait_for_a_later_reduce_are_told() -> None:
    model = yafsdp_cc.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), units=[nn.Linear])
    model.set_requires_gradient_sync(False)
    model(torch.randn(2, 64)).sum().backward()
    assert re.search(r"\n  0: .*gradients kept for a later reduce", str(state_of(model)))
    model[0].unshard()
    assert re.search(r"\n  0: weights held by unshard\(\) \(.*", str(state_of(model)))


@ranks(4)
def test_sums_over_a_shard_that_wait_for_one_over_replicas_are_told() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = yafsdp_cc.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), units=[nn.Linear], mesh=mesh)
    model.set_requires_all_reduce(False)
    model(torch.randn(2, 64)).sum().backward()
    assert re.search(r"\n  0: .*gradients summed over the shard, kept for a sum over replicas", str(state_of(model)))
    model.set_requires_all_reduce(True)
    model(torch.randn(2, 64)).sum().backward()
    assert "gradients" not in str(state_of(model))


@ranks(2)
def test_a_rank_that_waits_in_vain_says_for_what() -> None:
    set_patience(0.5)
    model = yafsdp_cc.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), units=[nn.Linear])
    model(torch.randn(2, 64)).sum().backward()
    if dist.get_rank() == 1:
        return
    with short_timeout(1):
        said = refusal(lambda: [model(torch.randn(2, 64)).sum().backward() for _ in range(3)])
    waits = r"\n +in a (forward|backward), waiting for the operation of [01] on block \w+ buffer \d"
    assert re.search(waits, said), said
