"""What becomes of an engine that is put together anew."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_cc
from tests.internals import buffers_of, state_of
from tests.models import Mlp, stack
from tests.ranks import ranks
from tests.twins import inputs, square, trains_on, twins


class Listener(logging.Handler):
    """Takes down what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@ranks(2)
def test_groups_that_were_made_end_with_the_world() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    yafsdp_cc.shard(model, separate_reduce_group=True)(torch.ones(2, 32)).sum().backward()
    world = dist.group.WORLD  # is held, as torch.distributed.nn does if it is imported only now
    made = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map if group is not world]
    assert made
    del model
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert [group() for group in made] == [None] * len(made)


@ranks(4)
def test_no_communicator_is_split_off_one_whose_ranks_do_not_all_take_part() -> None:
    """After init_process_group(device_id=...), torch splits NCCL's communicators, which all ranks have to call."""
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    everybody = init_device_mesh("cpu", (4,))
    world, splits = dist.distributed_c10d._get_default_group(), []
    world.bound_device_id = device = torch.device("cuda", 0)
    dist.distributed_c10d._get_split_source = splits.append
    if dist.get_rank() < 2:  # the others never shard
        yafsdp_cc.shard(Mlp(), mesh=halves["shard"], separate_reduce_group=True)
    torch.manual_seed(0)
    yafsdp_cc.shard(Mlp(), mesh=everybody, reshard_after_forward=2)
    assert splits == []
    torch.manual_seed(0)
    yafsdp_cc.shard(Mlp(), mesh=everybody, separate_reduce_group=True)
    assert splits == [world]  # of all ranks
    assert world.bound_device_id == device


class Allocating:
    """A process group's backend that can allocate, as NCCL's."""

    allocated: ClassVar[list[tuple[dist.ProcessGroup, Tensor]]] = []

    def __init__(self, group: dist.ProcessGroup, backend: Any) -> None:
        self.group, self.backend = group, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device == torch.device("cpu")

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append((self.group, torch.zeros(size, dtype=dtype, device=device)))
        return self.allocated[-1][1]


@ranks(2)
def test_buffers_that_the_process_group_allocates() -> None:
    own_backend = dist.ProcessGroup._get_backend
    # gloo has no allocator of its own: this one notes what it is asked for, and all else is gloo's.
    dist.ProcessGroup._get_backend = lambda group, device: Allocating(group, own_backend(group, device))  # type: ignore[method-assign]
    model, plain = twins(stack, separate_reduce_group=True)
    batches = [inputs(step=step) for step in range(2)]
    trains_on(model, plain, square, batches)
    assert not Allocating.allocated
    for module in (*model, model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    trains_on(model, plain, square, batches)
    groups = {tensor.data_ptr(): group for group, tensor in Allocating.allocated}
    buffers = [groups.get(each.data_ptr()) for each in buffers_of(model)]  # those of weights come first
    others = [group for group in buffers if group is not dist.group.WORLD]
    assert len(buffers) == 2 * len(others) > 2
    assert set(buffers) == {dist.group.WORLD, others[0]}
    assert {*buffers} == {*groups.values()}
    assert len(groups) > len(buffers)  # and scratch
    with pytest.raises(ValueError, match="should be a bool"):
        model.set_allocate_memory_from_process_group_for_comm(1)


@ranks(2)
def test_what_an_assembly_leaves_behind() -> None:
    heard = Listener()
    logging.getLogger("yafsdp_cc").addHandler(heard)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 32))
    for block in model:
        yafsdp_cc.fully_shard(block)
    sharded = yafsdp_cc.fully_shard(model)
    gc.collect()
    gc.disable()  # buffers are to go by themselves
    before: list[weakref.ref[object]] = []
    for keeps in (False, True, False):
        sharded.set_reshard_after_forward(not keeps)
        for last in (False, True):
            sharded.set_requires_gradient_sync(last)
            model(torch.ones(2, 32)).sum().backward()
        assert [reference() for reference in before] == [None] * len(before), "buffers of an earlier assembly"
        before = [weakref.ref(each) for each in (state_of(model), *buffers_of(model))]
    assert sum("keeps unsharded gradients" in each for each in heard.said) == (dist.get_rank() == 0)
