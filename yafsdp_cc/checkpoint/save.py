"""``save``: writes model, optimizer and a run's own data to one folder that is either complete or absent."""

from __future__ import annotations

import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from yafsdp_cc.checkpoint import compression, files, replicas
from yafsdp_cc.checkpoint.files import Replacement
from yafsdp_cc.checkpoint.ranks import (
    Ticks,
    apart,
    by_torch,
    check_arguments,
    check_is_one_model,
    check_is_one_value,
    meet,
    place_in,
    together,
)
from yafsdp_cc.checkpoint.state import MODEL, OPTIMIZER, as_sequence, check_plain, host_copy, state_of, unwrapped
from yafsdp_cc.checkpoint.writer import CheckpointWriter
from yafsdp_cc.ranks.checks import all_gather_objects
from yafsdp_cc.replicas.sync import local_of, synchronize_replicas
from yafsdp_cc.tensor.reductions import LazyReduction

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from yafsdp_cc.checkpoint.ranks import Group
    from yafsdp_cc.checkpoint.state import Optimizers

_logger = logging.getLogger("yafsdp_cc")


@cache
def _background() -> ThreadPoolExecutor:
    """Return an executor of one thread: asynchronous saves run in the order of the calls, alike on all ranks."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="yafsdp_cc.save")


_under_way: set[Future[None]] = set()
"""Asynchronous saves of this rank that wait to be written or are being written."""

for _forget in (_background.cache_clear, _under_way.clear):
    os.register_at_fork(after_in_child=_forget)  # threads do not survive a fork


@torch.inference_mode(False)  # an evaluation may save, and in inference mode nobody can detach a parameter
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    asynchronous: bool = False,
    **extra: Any,
) -> Future[None]:
    """Write a checkpoint in torch.distributed.checkpoint's own format, for any number of ranks to load. A collective.

    Every rank writes its part, so all must see the same file system. An earlier checkpoint at ``path`` remains until
    the new one is complete, whenever the job is killed. Training state is not changed. Buffers and ignored parameters
    are saved from one rank.

    Args:
        path: the folder to write.
        model: sharded by this package, by FSDP2, or plain.
        optimizer: the optimizer of this model's parameters; or several, of different parameters.
        asynchronous: copy everything to host memory, return, and write in a thread. Training may continue at once; the
            process group must live until the writing is over.
        **extra: further data to save, each rank's own: plain data and tensors, such as the data loader's
            ``state_dict()`` and ``torch.get_rng_state()``.

    Returns:
        A future, done already unless ``asynchronous``: then ``.result()`` waits for the writing and raises its errors.

    Raises:
        TypeError: something cannot be loaded again without running code from the file; the message names it.
        ValueError: ranks were given different paths or have state of different names, there is something else than a
            checkpoint at ``path``, or that of another stage of a pipeline, or the optimizer is of another model, or
            keeps a rank's part as a plain tensor.
        RuntimeError: a rank could not write, because the disk is full, for example, or did not come before the timeout
            of the process group; all ranks raise, and what was at ``path`` before is untouched.
    """
    check_arguments("save", path, model)
    model = unwrapped(model)
    check_is_one_model("save()", model)
    optimizers = as_sequence(optimizer)
    target = files.place(path)
    settings = {"path": str(Path(path).absolute()), "asynchronous": asynchronous, "optimizers": len(optimizers)}
    ranks = meet("save()", model, settings)
    check_is_one_value("save()", model, ranks.front)
    synchronize_replicas(model)
    # issue the collectives of compression and replicas before anything that can fail on one rank alone
    compressed = {**compression.sharded_state(model), **replicas.sharded_state(model)}
    state, paths, content = collect(model, optimizers, lambda: extra, compressed, ranks.front)
    if asynchronous:
        future = _background().submit(_write, target, tree_map(host_copy, state), paths, content, Ticks(ranks.back))
        _under_way.add(future)
        future.add_done_callback(_under_way.discard)
        future.add_done_callback(_log_failure)
        return future
    wait_for_saves()
    _write(target, state, paths, content, Ticks(ranks.back))
    done: Future[None] = Future()
    done.set_result(None)
    return done


def collect(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    extra_of: Callable[[], dict[str, Any]],
    compressed: dict[str, Any],
    group: Group,
) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]], bytes]:
    """Return a checkpoint's sharded state and the bytes of this rank's extra file. A collective.

    The state is the live tensors and other values by name, and for each name its path in the nested state.
    ``extra_of`` returns the data of the extra file, and may raise on one rank alone; ``compressed`` are the entries of
    compression and replicas for the sharded state.
    """
    with together(group) as told:
        extra = extra_of()
        check_plain(extra, "extra", tensors=(Tensor, nn.Parameter))
        compression.check_names(extra)
        nested = {**state_of(model, optimizers), **compressed}
        own = compression.local_state(model, tuned=compression.RESIDUALS not in compressed)
        content = files.pack_extra({**extra, **own})
        state, paths = flatten_state_dict(nested)
        names = sorted(state)
        told.own = zlib.crc32("\n".join(names).encode()), _plain_parts(nested)
    _check_alike(names, told.of_ranks, group)
    # compute lazy sums over ranks now: an asynchronous save would issue their collectives amid those of training
    return tree_map_only(LazyReduction, LazyReduction.value, state), paths, content


def wait_for_saves() -> None:
    """Wait until no asynchronous save of this rank is under way."""
    wait(_under_way.copy())


def _write(path: Path, state: dict[str, Any], paths: dict[str, Any], content: bytes, ticks: Ticks) -> None:
    group, (rank, world) = ticks.group, place_in(ticks.group)
    with closing(ticks), ExitStack() as stack:
        with by_torch(f"saving {path}", group) as which:
            with together(group), ticks.beside():
                replacement = stack.enter_context(closing(Replacement(path, files.CHECKPOINT))) if rank == 0 else None
            new, *_ = all_gather_objects(None if replacement is None else str(replacement.new), group)
            folder, writer = Path(str(new)), CheckpointWriter(paths)
            writer.agree(state, **which)
            with together(group) as extra, ticks.beside():
                if not folder.is_dir():
                    raise ValueError(f"does not see {folder}, made by rank 0: choose a path that all ranks share")
                if rank == 0:
                    files.check_space(folder, writer.total)
                files.write(folder / files.extra_name(rank, world), content)
                extra.own = zlib.crc32(content)
            with together(group) as tensors, ticks.beside():
                tensors.own = writer.write(folder, state)
        with together(group), ticks.beside():
            if replacement is not None:
                files.write(folder / files.METADATA, writer.table(tensors.of_ranks, extra.of_ranks))
                with apart(path, group):
                    replacement.commit()


def _check_alike(names: list[str], of_ranks: Sequence[tuple[int, dict[str, bool]]], group: Group) -> None:
    """Raise a ``ValueError`` for a name that only some ranks have, and for a plain tensor that is each rank's part.

    Each of ``of_ranks`` is a checksum of a rank's ``names``, and its ``_plain_parts``.
    """
    sums, parts_by_rank = zip(*of_ranks, strict=True)
    if len(set(sums)) > 1:
        everywhere = all_gather_objects(names, group)
        counts = Counter(name for each in everywhere for name in each)
        some = sorted(name for name, count in counts.items() if count < len(everywhere))
        has = [rank for rank, each in enumerate(everywhere) if some[0] in each]
        raise ValueError(
            f"ranks {has} alone have '{some[0]}'{f' and {len(some) - 1} more' if some[1:] else ''} to save; every rank "
            "must have made the same steps with the same model"
        )
    for name in parts_by_rank[0] if len(sums) > 1 else ():
        if all(name in each for each in parts_by_rank) and any(each[name] for each in parts_by_rank):
            raise ValueError(
                f"the optimizer has {name} as a plain tensor of the shape of each rank's part, of which a checkpoint "
                "would keep one: make it by torch.zeros_like(parameter), and compute on its .to_local()"
            )


def _plain_parts(state: dict[str, Any]) -> dict[str, bool]:
    """Return the plain tensors in optimizer state that have the shape of this rank's part of a sharded parameter, each
    with whether that shape differs from the whole parameter's."""
    return {
        f"'{kind}' of '{name}' {list(weight.shape)}": each.shape != weight.shape
        for name, values in state.get(OPTIMIZER, {}).get("state", {}).items()
        if isinstance(weight := state[MODEL].get(name), DTensor)
        for kind, value in values.items()
        for each in tree_leaves(value)
        if type(each) is Tensor and each.numel() != 1 and each.shape == local_of(weight).shape
    }


def _log_failure(future: Future[None]) -> None:
    if (error := future.exception()) is not None:  # the caller may never ask the future for its result
        _logger.error("a checkpoint was not saved: %s", error)
