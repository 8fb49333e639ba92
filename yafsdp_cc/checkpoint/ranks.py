"""The ranks that save and load together, their process groups, and errors of one rank that are raised on all."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from yafsdp_cc.checkpoint.files import version
from yafsdp_cc.fsdp2.module import ShardedModule, ranks_of_model, require_state, sharded_parts
from yafsdp_cc.ranks.checks import all_gather_objects, check_settings, missing_in, named_ranks
from yafsdp_cc.ranks.groups import group_once, new_group, timeout_of
from yafsdp_cc.replicas.sync import local_of, sync_of

Group: TypeAlias = "tuple[dist.ProcessGroup, ...]"
"""A gloo group in a tuple, as ``ranks.checks`` takes it; () for a single process."""
_COMPARED = 16
"""Largest number of a parameter's elements that ranks compare: its first elements tell two parameters apart."""


class Ranks(NamedTuple):
    """Two groups of the same ranks: a save in the background must not mix with other collectives."""

    front: Group
    """Group for the thread that trains."""
    back: Group
    """Group for reading and writing files, in this thread or another, one save at a time."""


def ranks_of(model: nn.Module, *, beside: bool = False) -> Ranks:
    """Return groups of a sharded model's ranks, or of all ranks. The first call is a collective: it makes the groups.

    They have the world group's timeout. With ``beside`` the back group is another one than that of saves.
    """
    if not dist.is_initialized():
        return Ranks((), ())
    members = list(range(dist.get_world_size()))
    if (sync := sync_of(model)) is not None:
        members = sync.members
    elif isinstance(model, ShardedModule):
        members = ranks_of_model(require_state(model))
    world = dist.group.WORLD
    assert world is not None
    patience = timeout_of(world) or default_pg_timeout
    make = partial(new_group, members, patience, "gloo")
    uses = "front", "beside" if beside else "back"
    return Ranks(*((group_once(world, (use, *members), make),) for use in uses))


def check_arguments(call: str, path: object, model: object) -> None:
    """Raise a ``TypeError`` if ``call`` was not given a path and then a model."""
    if isinstance(path, (str, os.PathLike)) and isinstance(model, nn.Module):
        return
    found = ", ".join(type(each).__name__ for each in (path, model))
    raise TypeError(f"{call}(path, model) takes the path of a folder and then a model, and was given ({found})")


def check_is_one_model(call: str, model: nn.Module) -> None:
    """Raise a ``ValueError`` if ranks outside of a parameter's mesh may have other values of it.

    Plain tensors on a mesh with fewer ranks than the model's, such as manually divided experts, have one name for
    several values: a checkpoint would store one, and give it to all.
    """
    states = [require_state(part) for _, part in sharded_parts(model)]
    for mesh, param in ((state.context.info.mesh, param) for state in states for param in state.params):
        everybody = set(mesh.mesh.flatten().tolist())
        if missing := sorted(everybody - set(param.spec.global_mesh.mesh.flatten().tolist())):
            raise ValueError(
                f"{call}: '{param.spec.name}' is sharded across {param.spec.global_mesh}, and ranks {missing} have "
                "another tensor of that name, of which a checkpoint would keep one. Make it a DTensor of the whole "
                "before it is sharded, DTensor.from_local(part, mesh['ep'], [Shard(0)]), or give it a name for each"
            )


def check_is_one_value(call: str, model: nn.Module, group: Group) -> None:
    """Raise a ``ValueError`` on every rank if some have other values under one name, as a pipeline's stages may.

    The first ``_COMPARED`` elements of each rank's part of a parameter are compared, but for rounding, which may differ
    between processors. Ignored parameters beside sharded ones may differ. A model that is sharded as a whole is not
    compared: only its own ranks save it. A collective of ``group``.
    """
    if not group or isinstance(model, ShardedModule) or sync_of(model) is not None:
        return
    with together(group):
        named = {name: param for name, param in model.named_parameters() if type(local_of(param)) is Tensor}
        is_plain = not any(isinstance(param, DTensor) for param in named.values())
        compared = {name: param for name, param in named.items() if is_plain or isinstance(param, DTensor)}
        own = {
            name: (part, local_of(param).reshape(-1)[:_COMPARED].double().tolist())
            for name, param in compared.items()
            if not (param.is_meta or param.is_complex()) and (part := part_of(param)) is not None
        }
    known: dict[tuple[str, tuple[int, ...]], tuple[list[float], int]] = {}
    for rank, values in zip(dist.get_process_group_ranks(group[0]), all_gather_objects(own, group), strict=True):
        for name, (part, found) in values.items():
            expected, other = known.setdefault((name, part), (found, rank))
            most = 1e-3 * max(map(abs, expected), default=0.0)
            if any(abs(one - two) > most for one, two in zip(found, expected, strict=False)):
                raise ValueError(
                    f"{call}: '{name}' has other values on rank {rank} than on rank {other}, and a checkpoint keeps "
                    "one. Stages of a pipeline are saved each at a path of its own, once each is sharded across its "
                    "ranks, shard(stage, mesh=mesh['data']), even if that is one rank"
                )


def _is_alive(group: Group) -> bool:
    return bool(group) and group[0] in dist.distributed_c10d._world.pg_map


@contextmanager
def apart(path: Path, group: Group) -> Iterator[None]:
    """Tell all ranks of this run which ranks' checkpoint is at ``path`` after this block. For a group's first rank.

    Raise a ``ValueError`` if ranks of this run, none of them in ``group``, have saved what is at ``path`` now: stages
    of a pipeline would replace each other's checkpoint.
    """
    key = f"yafsdp_cc/saved/{path}"
    if _is_alive(group):
        store, own = _get_default_store(), dist.get_process_group_ranks(group[0])
        others, saved = json.loads(store.get(key)) if store.check([key]) else (own, ())
        if set(own).isdisjoint(others) and tuple(saved) == version(path):
            raise ValueError(
                f"what is at {path} was saved by {named_ranks(others)} of this run, and this checkpoint would take its "
                "place. Save each model at a path of its own, a stage of a pipeline at f'{path}/{stage}'"
            )
    yield
    if _is_alive(group):
        store.set(key, json.dumps((own, version(path))))


def part_of(parameter: Tensor) -> tuple[int, ...] | None:
    """Return an id of this rank's part of a parameter: equal on ranks that hold the same part; None without a part."""
    if not isinstance(parameter, DTensor):
        return ()
    if (where := parameter.device_mesh.get_coordinate()) is None:
        return None
    return tuple(at for at, how in zip(where, parameter.placements, strict=True) if not how.is_replicate())


def meet(call: str, model: nn.Module, settings: dict[str, object], *, beside: bool = False) -> Ranks:
    """Return the groups of the ranks that make a ``call`` together, after comparing its ``settings``. A collective.

    Raises:
        ValueError: on every rank, naming the first argument that differs.
        RuntimeError: a rank did not come before the timeout of the process group, or is gone.
    """
    try:
        ranks = ranks_of(model, beside=beside)
        check_settings(settings, ranks.front, call)
    except RuntimeError as error:
        if any(parameter.is_meta for parameter in model.parameters()):  # this error names the parameter, on all ranks
            raise
        raise RuntimeError(
            f"{call} is a collective, and not all ranks have called it, or one has ended: call it on every rank, not "
            f"under `if rank == 0` ({error})"
        ) from error
    return ranks


TICK = 2.0
"""Seconds between small collectives of ranks that write, move or read files. With them no collective waits as long as a
slow disk or link takes, so that the process group's timeout is reached only by ranks that hang."""


class Ticks:
    """Lets the ranks of ``group`` meet in a collective every ``TICK`` seconds while they work on files in ``beside``.

    The constructor starts the thread that meets: a program that has come to its end, and waits for a save, can start
    none. A rank without this thread, as in an ``atexit`` handler, does its work first, and then meets the others.
    Close a ``Ticks`` at the end.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._works = SimpleQueue[tuple[Event, Future[None]] | None]()
        self._thread = Thread(target=self._run, name="yafsdp_cc.ticks", daemon=True)
        if place_in(group)[1] > 1:
            with suppress(RuntimeError):  # an interpreter that is ending starts no threads
                self._thread.start()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            is_over, met = work
            told = [False]
            try:
                while not all(told):
                    is_over.wait(TICK)
                    told = all_gather_objects(is_over.is_set(), self.group)
                met.set_result(None)
            except BaseException as error:
                met.set_exception(error)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Meet the other ranks while this block runs, until all have left theirs. A collective that occupies ``group``.

        Raises:
            RuntimeError: a rank has ended or hangs.
        """
        is_over, met = Event(), Future[None]()
        self._works.put((is_over, met))
        try:
            yield
        finally:
            is_over.set()
            if not self._thread.is_alive():
                self._works.put(None)
                self._run()
            met.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self._works.put(None)
            self._thread.join()


def place_in(group: Group) -> tuple[int, int]:
    """Return this rank's number in ``group``, and the number of the group's ranks."""
    return (group[0].rank(), group[0].size()) if group else (0, 1)


_KINDS = (FileNotFoundError, pickle.UnpicklingError, TypeError, ValueError)
"""Types of one rank's exceptions that other ranks raise, too; for any other type they raise a ``RuntimeError``."""


def _raised(error: BaseException) -> tuple[type[Exception], str]:
    """Return the type and the message with which the other ranks raise one rank's ``error``."""
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
    is_clear = str(error) and (isinstance(error, (*_KINDS, OSError)) or type(error) is RuntimeError)
    return kind, str(error) if is_clear else f"{type(error).__name__}: {error}".removesuffix(": ")


class Told:
    """``together`` sends each rank's ``own`` to all ranks at the end of its block: ``of_ranks``, in rank order."""

    own: Any = None
    of_ranks: Sequence[Any] = ()


@contextmanager
def together(group: Group) -> Iterator[Told]:
    """Raise an error of one rank inside the block on every rank, in the same type, so that all leave the same way.

    If several ranks fail, the first one's error is raised, unless all fail in the same way: then each raises its own.
    If only some ranks miss a file, all raise a ValueError: a FileNotFoundError means "there is no checkpoint yet".
    A rank that is interrupted tells the others, and ends by the interrupt.
    """
    mine: BaseException | None = None
    told = Told()
    try:
        yield told
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        mine = error
    answers = all_gather_objects((None if mine is None else _raised(mine), told.own), group)
    if mine is not None and not isinstance(mine, Exception):
        raise mine
    failures, told.of_ranks = zip(*answers, strict=True)
    found = [(rank, *failure) for rank, failure in enumerate(failures) if failure is not None]
    if not found:
        return
    rank, kind, text = found[0]
    if isinstance(mine, kind) and len(found) == len(failures) and {each[1] for each in found} == {kind}:
        raise mine
    if len(failures) == 1:
        raise kind(text) from mine
    raise (ValueError if kind is FileNotFoundError else kind)(f"rank {rank}: {text}") from mine


@contextmanager
def by_torch(doing: str, group: Group) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments by which torch's functions for reading, and for agreeing on plans, use ``group``.

    A rank's failure is raised on all ranks, without torch's wrapping, as by ``together``. A rank that has ended or
    hangs, and a ``group`` that was destroyed meanwhile, are a ``RuntimeError``, whose message begins with ``doing``.
    """
    try:
        if group and group[0].size() > 1:
            try:
                yield {"process_group": group[0]}
            finally:  # without a process group torch's functions do one rank's part, and only warn
                if not _is_alive(group):
                    raise RuntimeError(
                        "destroy_process_group() was called meanwhile. Wait for asynchronous saves before, by result() "
                        "of what save() returns"
                    )
        else:
            with warnings.catch_warnings():  # torch warns of a single process, which is intended
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield {"no_dist": True}
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if rank == place_in(group)[0] and not isinstance(cause, Exception):
            raise cause from error  # an interrupt of this rank
        kind, text = _raised(cause)
        raise kind(f"{doing}: rank {rank}: {text}") from cause
    except RuntimeError as error:
        _, text = _raised(error)
        is_told = text.startswith("rank ")  # by ``together``, so every rank has answered
        if group and not is_told and (missing := missing_in(group[0])) and missing not in text:
            text = f"{missing} has ended or hangs\n{text}"
        raise RuntimeError(f"{doing}: {text}") from error
