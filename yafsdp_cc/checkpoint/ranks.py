"""The ranks that save and load together, in process groups of their own."""

from __future__ import annotations

import pickle
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from yafsdp_cc.engine.mesh import group_once
from yafsdp_cc.engine.module import ShardedModule, ranks_of_model, require_state

if TYPE_CHECKING:
    from collections.abc import Iterator

Group: TypeAlias = "tuple[dist.ProcessGroup, ...]"
"""A group of gloo, as ``engine.checks`` takes it; empty for a process that is alone."""


class Ranks(NamedTuple):
    """Two groups of the same ranks: a save in the background must not mix with other collectives."""

    front: Group
    """For the thread that trains."""
    back: Group
    """For what writes, in this thread or another, one save at a time."""


def ranks_of(model: nn.Module) -> Ranks:
    """Return the ranks of a sharded model, or all. Makes the groups at first, so call it on all of them."""
    if not dist.is_initialized():
        return Ranks((), ())
    members = list(range(dist.get_world_size()))
    if isinstance(model, ShardedModule):
        members = ranks_of_model(require_state(model))
    world = dist.group.WORLD
    assert world is not None
    is_part = len(members) < dist.get_world_size()
    make = partial(dist.new_group, members, backend="gloo", use_local_synchronization=is_part)
    front, back = ((group_once(world, (use, *members), make),) for use in Ranks._fields)
    return Ranks(front, back)


def place_in(group: Group) -> tuple[int, int]:
    """Return this rank's number, and how many there are."""
    return (group[0].rank(), group[0].size()) if group else (0, 1)


@contextmanager
def by_torch(doing: str, group: Group) -> Iterator[dict[str, Any]]:
    """Give torch's checkpoints the arguments for ``group``, and raise a rank's failure as itself, without tracebacks.

    Raises:
        pickle.UnpicklingError: on all ranks: a file that one read wants code to be run.
        RuntimeError: on all ranks: what else went wrong on one.
    """
    try:
        if group:
            yield {"process_group": group[0]}
        else:
            with warnings.catch_warnings():  # a single process is what was asked for
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield {"no_dist": True}
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        kind = pickle.UnpicklingError if isinstance(cause, pickle.UnpicklingError) else RuntimeError
        raise kind(f"{doing}: rank {rank}: {type(cause).__name__}: {cause}") from cause
