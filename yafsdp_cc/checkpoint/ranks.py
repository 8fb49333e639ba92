"""The ranks that save and load together, and how they agree.

They talk over gloo, in groups of their own: a save in the background must not mix with the training's collectives.
"""

from __future__ import annotations

import pickle
import warnings
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from yafsdp_cc.engine.checks import all_gather_objects, refused_together
from yafsdp_cc.engine.full_params import ranks_of_model
from yafsdp_cc.engine.module import ShardedModule, require_state

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


class Ranks(NamedTuple):
    """Two groups of the same ranks, None without a process group."""

    front: dist.ProcessGroup | None
    """For the thread that trains."""
    back: dist.ProcessGroup | None
    """For what writes, in this thread or another, one save at a time."""


_known: dict[tuple[int, ...], tuple[dist.ProcessGroup, Ranks]] = {}
"""For global ranks: the world that they are ranks of, and their groups."""


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks of a sharded model, all ranks for any other. Makes the groups at first, so call it on all of them."""
    if not dist.is_initialized():
        return Ranks(None, None)
    members = list(range(dist.get_world_size()))
    if isinstance(model, ShardedModule):
        members = ranks_of_model(require_state(model))
    world = dist.group.WORLD
    assert world is not None
    known = _known.get(tuple(members))
    if known is None or known[0] is not world:
        partial = len(members) < dist.get_world_size()
        front, back = (
            dist.new_group(members, backend="gloo", use_local_synchronization=partial) for _ in Ranks._fields
        )
        known = _known[tuple(members)] = world, Ranks(front, back)
    return known[1]


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number, and how many there are."""
    return (0, 1) if group is None else (group.rank(), group.size())


def together(group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """``refused_together``, also for a single process."""
    return nullcontext() if group is None else refused_together(group)


def everybody(item: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's ``item``."""
    return [item] if group is None else all_gather_objects(item, [group])


@contextmanager
def by_torch(doing: str) -> Iterator[None]:
    """Around calls into torch's checkpoints: a rank's failure raised as itself, without every rank's traceback.

    Raises:
        pickle.UnpicklingError: on all ranks: a file that one read wants code to be run.
        RuntimeError: on all ranks: what else went wrong on one.
    """
    try:
        with nullcontext() if dist.is_initialized() else _without_a_warning():
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        kind = pickle.UnpicklingError if isinstance(cause, pickle.UnpicklingError) else RuntimeError
        raise kind(f"{doing}: rank {rank}: {type(cause).__name__}: {cause}") from cause


@contextmanager
def _without_a_warning() -> Iterator[None]:
    """A single process is what was asked for. Not for threads: filters are everybody's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
