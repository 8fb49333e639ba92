"""A lab for a test, or the reason why this machine cannot have one; and ranks' bodies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from yafsdp_cc.tools.netlab import Lab, Traffic, Unavailable

MEGABYTE = 1 << 20


@contextmanager
def lab_of(**options: Any) -> Iterator[Lab]:
    lab = Lab(**options)
    with ExitStack() as stack:
        try:
            stack.enter_context(lab)
        except Unavailable as reason:
            pytest.skip(str(reason))  # no namespaces or no tc on this machine: there is no network to shape
        yield lab


def reduced(lab: Lab, count: int = MEGABYTE) -> Traffic:
    """What this rank sends and receives in an all-reduce of ``count`` bytes."""
    tensor = torch.ones(count // 4)
    dist.barrier()
    before = lab.traffic()
    dist.all_reduce(tensor)
    dist.barrier()
    assert tensor[0] == dist.get_world_size()
    rank = dist.get_rank()
    return lab.traffic()[rank].since(before[rank])
