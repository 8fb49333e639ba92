"""Ranks that are threads of one process, by torch's process group for tests: the gradients of one process."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from tests.ranks import on_ranks
from tests.twins import whole
from yafsdp_cc import fully_shard


def train(rank: int, world: int, store: dist.Store, plain: nn.Sequential, errors: list[BaseException]) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
    try:
        model = copy.deepcopy(plain)
        fully_shard(model[0])
        fully_shard(model)
        batches = torch.randn(world, 3, 32, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            model(batches[rank]).square().mean().backward()
        plain = copy.deepcopy(plain)
        (2 * plain(batches.flatten(0, 1)).square().mean()).backward()
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert expected.grad is not None
            assert torch.allclose(whole(found.grad), expected.grad, atol=1e-7), name
    except BaseException as error:
        errors.append(error)
        ProcessLocalGroup.exception_handle(error)
    finally:
        dist.destroy_process_group()


def train_in_threads(world: int) -> None:
    _install_threaded_pg()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 32))
    store = dist.HashStore()
    errors: list[BaseException] = []
    threads = [threading.Thread(target=train, args=(rank, world, store, plain, errors)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _uninstall_threaded_pg()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("world", [2, 4])
def test_trains_as_one_process(world: int) -> None:
    on_ranks(1, train_in_threads, world)
