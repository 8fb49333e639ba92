"""``Rescue``: snapshots of training in the memory of two nodes, from which a run that lost ranks goes on.

A snapshot is a checkpoint in ``save``'s own format. Each rank writes its files to its node's memory; a rank of the next
node, its buddy, gets a copy of them; and every node gets the table of contents, last of all. Whichever one node
vanishes, the others have every file. The next snapshot is written over the one before the last. It begins so early
that, if it takes as long as the last one, it is whole ``every`` steps after that one began: here 2 of 10 steps early.

    training   ──step 40──copy to the host──step 41────────step 42──────── ... ──step 48──copy to the host──
    a thread                               └write, send to the buddy, table┘             └...
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import secrets
import shutil
import sys
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from yafsdp_cc.checkpoint import compression, files
from yafsdp_cc.checkpoint.files import METADATA
from yafsdp_cc.checkpoint.load import load, load_from
from yafsdp_cc.checkpoint.ranks import (
    Ranks,
    Ticks,
    by_torch,
    check_is_one_model,
    check_is_one_value,
    meet,
    place_in,
    together,
)
from yafsdp_cc.checkpoint.reader import CheckpointReader
from yafsdp_cc.checkpoint.save import collect, save, wait_for_saves
from yafsdp_cc.checkpoint.state import as_sequence, host_copy, unwrapped
from yafsdp_cc.checkpoint.writer import CheckpointWriter, part_name, size_of_part
from yafsdp_cc.fsdp2.module import drop_unreduced, require_state, sharded_parts
from yafsdp_cc.ranks.checks import all_gather_objects, table_of_ranks
from yafsdp_cc.replicas.sync import local_of, refuse_sync
from yafsdp_cc.rescue.memory import MEMORY, folder_of_run, locked_by_rank
from yafsdp_cc.rescue.nodes import LostError, Nodes, copy_to_buddies, fetch, files_in

if TYPE_CHECKING:
    from yafsdp_cc.checkpoint.state import Optimizers
    from yafsdp_cc.engine.param_group import GroupContext

STEPS, RANDOM = "steps", "random_states"
"""Names in the extra files for the number of finished steps and for the random states."""


class Rescue:
    """Keeps snapshots of training in memory, and goes on from the last one after ranks or a node have died.

        rescue = yafsdp_cc.Rescue(model, optimizer, every=10, path="checkpoints/last", save_every=1000,
                                  scheduler=scheduler, loader=loader)
        for step in range(rescue.restore(), 100_000):
            ...
            rescue.step()

    Snapshots have what ``save`` writes, residuals of compression among it, the random states of Python, NumPy and
    torch, and the state of the objects that are given by name. All ranks make all calls.

    Args:
        model: sharded by this package, by FSDP2, or plain.
        optimizer: the optimizer of this model's parameters; or several, of different parameters.
        every: largest number of steps that a restart repeats. A snapshot begins earlier, by as many steps as the last
            one took, and training waits for a late snapshot.
        path: a folder on a file system that all ranks share, for checkpoints that outlive all nodes.
        save_every: number of steps from one checkpoint at ``path`` to the next, a multiple of ``every``.
        **states: objects with ``state_dict`` and ``load_state_dict``, such as schedulers and loaders, and generators.

    Raises:
        TypeError: one of ``states`` has no state, or is a sharded model; or ``model`` is no module.
        ValueError: ``every`` or ``save_every`` is no number of steps, or there is no memory that outlives a process.
    """

    _closed: ClassVar[int] = 0
    """Number of closed Rescues of this program, which is the name of the next one's folder, also after a restart."""
    _open: ClassVar[dict[Path, weakref.ref[Rescue]]] = {}
    """The Rescue of each run's folder that is between ``restore`` and ``close``; a program may have dropped it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        every: int = 10,
        path: str | os.PathLike[str] | None = None,
        save_every: int = 0,
        **states: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Rescue(model, optimizer) takes a module, and was given a {type(model).__name__}")
        if every < 1 or save_every < 0 or save_every % every:
            raise ValueError(f"every={every}, save_every={save_every}: every must be 1 or more, save_every a multiple")
        if save_every and path is None:
            raise ValueError(f"save_every={save_every} needs the path of the checkpoints: Rescue(..., path='last')")
        self._states: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
        """For each object that was given by name, functions that return and restore its state."""
        for name, each in states.items():
            if name in (STEPS, RANDOM, "asynchronous"):
                raise ValueError(f"Rescue gives save() something of its own as '{name}': choose another name")
            held = [*each.parameters()] if isinstance(each, nn.Module) else []
            held += [p for group in each.param_groups for p in group["params"]] if isinstance(each, Optimizer) else []
            if any(isinstance(parameter, DTensor) for parameter in held):
                raise TypeError(
                    f"{name} is a {type(each).__name__} of sharded parameters, and states by name are each rank's own: "
                    "give all models as one, Rescue(nn.ModuleDict({'g': G, 'd': D}), [opt_g, opt_d])"
                )
            if isinstance(each, torch.Generator):
                self._states[name] = each.get_state, each.set_state
            elif hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
                self._states[name] = each.state_dict, each.load_state_dict
            else:
                raise TypeError(f"{name} is a {type(each).__name__}, which has no state_dict() and load_state_dict()")
        self._states[RANDOM] = _random_states, _set_random_states  # restored last: restoring others may draw numbers
        self._model, self._optimizers = unwrapped(model), as_sequence(optimizer)
        self._every, self._save_every = every, save_every
        run = os.environ.get(MEMORY) or folder_of_run("run", os.environ.get("TORCHELASTIC_RUN_ID", "0"))
        # absolute, as a program may change its working directory
        self._path, self._run = None if path is None else Path(path).absolute(), Path(run).absolute()
        try:
            self._run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{self._run} cannot be made ({error}): snapshots need a memory that outlives a process, /dev/shm"
            ) from error
        self._lock: IO[bytes] | None = None
        """Lock file of the folder of snapshots, on the first rank of a node; None on other ranks."""
        self._steps = -1
        """Number of finished steps; -1 before ``restore``, and after ``close``."""
        self._started = self._whole = 0
        """Numbers of finished steps in the snapshot that was begun last, and in the newest one known to be whole.
        ``_whole`` changes only where training waits for a snapshot, so after the same step on every rank."""
        self._took = every // 2
        """Steps of training that the last snapshot took, equal on all ranks; the next one begins as many steps earlier.
        Half of ``every`` at first, and at most: a snapshot that begins before the last one is due would wait for it."""
        self._kept: dict[str, Any] = {}
        """Host copy of the state in the last snapshot; the next snapshot's copy uses the same memory."""
        self._writer: CheckpointWriter | None = None
        """Writer of the last snapshot, which writes the next one if that has the same names and tensors."""
        self._job: Future[None] | None = None
        """Background writing of a snapshot, or copying of the one restored; None as soon as training waits for it."""
        self._save: Future[None] | None = None
        """The last asynchronous save at ``path``."""
        self._stepped = stepped = weakref.WeakSet[Optimizer]()
        """Optimizers that have stepped since the last call of ``step``."""
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.add(optimizer))
        weakref.finalize(self, hook.remove)
        self._engines: list[GroupContext] = []

    @torch.inference_mode(False)  # tensors made in inference mode cannot be trained on
    def restore(self) -> int:
        """Load the newest snapshot of which every file is in some node's memory, else the checkpoint at ``path``.

        A collective, on any number of ranks. With another number than before, states that differed between ranks are
        left as they are, and a warning names them. Rank 0 says on one line what was loaded, and from where. A running
        program may call ``restore`` again, to go back after a loss spike; the call waits for a snapshot under way.

        Returns:
            The number of steps that are finished; 0 where there is nothing to go on from.

        Raises:
            ValueError: all snapshots and the checkpoint are damaged or of another model; or another run that is going
                on has its snapshots in the same place.
            RuntimeError: not all ranks have called this; or training goes on, and there is nothing to go back to yet;
                or another Rescue of this program has snapshots.
        """
        gc.collect()  # frees a dropped Rescue that a cycle of references still holds
        other = Rescue._open[self._run]() if self._run in Rescue._open else self
        if other not in (None, self):
            raise RuntimeError(
                "Rescue.restore(): this program has another Rescue, and snapshots of both would take each other's "
                "place: call close() of that one first"
            )
        with suppress(RuntimeError):  # raised if the last snapshot was not written: an earlier one is loaded
            self._wait()
        wait_for_saves()
        self._writer = None  # a program may have made another process group
        settings: dict[str, object] = {"every": self._every, "path": self._path, "save_every": self._save_every}
        settings["names of states"] = sorted(self._states)
        self._ranks = ranks = meet("Rescue.restore()", self._model, settings, beside=True)
        check_is_one_model("Rescue.restore()", self._model)
        refuse_sync("Rescue", self._model)
        if ranks.front and ranks.front[0].size() < dist.get_world_size():
            raise ValueError(
                f"Rescue.restore(): the model is on {ranks.front[0].size()} of {dist.get_world_size()} ranks, and the "
                "snapshots of other stages of a pipeline, or of another model, would be of other steps: save each by "
                "save(), at a path of its own"
            )
        if self._steps < 0:
            self._folder = self._run / str(Rescue._closed)
        with together(ranks.front):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._nodes = Nodes(self._folder, ranks.back)
        with together(ranks.front):
            if self._nodes.is_first:
                self._lock = self._lock or locked_by_rank(self._folder)
        told = (self._folder / f"steps-{rank}" for rank in range(place_in(ranks.back)[1]))  # files of others are stale
        finished = [int(each.read_text() or 0) for each in told if each.exists()]
        here = (self._whole_snapshots(), max(finished, default=0), secrets.token_hex(4))
        snapshots, last, lives = zip(*all_gather_objects(here, ranks.back), strict=True)
        self._life, lost = lives[0], max(last)
        steps, source, snapshot = self._load({name for each in snapshots for name in each})
        if not source and self._steps > 0:
            raise RuntimeError(
                f"Rescue.restore(): training is behind step {self._steps}, and there is nothing to go back to yet: the "
                f"first snapshot is whole {self._every} steps after the start"
            )
        self._steps = self._started = self._whole = steps
        Rescue._open[self._run] = weakref.ref(self)
        self._next = steps + self._every - self._took
        self._tell_progress()
        if self._nodes.is_first:
            self._remove_all_but(snapshot)
        folder = self._folder / snapshot
        found = all_gather_objects(files_in(folder) if snapshot else {}, ranks.back)
        if snapshot and len(self._nodes.members) > 1:  # the next node to be lost may alone have a file
            self._job = _in_thread(copy_to_buddies, found, folder, self._nodes, ranks.back, self._may_send)
        is_later = any(each.parents[1] != self._folder for each in self._run.glob(f"*/step-*/{METADATA}"))
        if self._nodes.rank == 0 and (source or lost or is_later):
            again = f"; steps {steps + 1} to {lost} are made again" if lost > steps else ""
            again += "; a later Rescue of this program has snapshots, which are left to that one" if is_later else ""
            again += "; a Rescue that was dropped without close() has made it" if other is None else ""
            print(f"yafsdp-cc: going on {source or 'from the beginning'}{again}", file=sys.stderr, flush=True)
        return steps

    def _load(self, snapshots: Collection[str]) -> tuple[int, str, str]:
        """Load the newest undamaged state among the named ``snapshots`` and the checkpoint at ``path``.

        Return the number of finished steps, the source in words, and the snapshot's name ("" for no snapshot).
        """
        path, found, damage = self._path, [(_step_of(name), name) for name in snapshots], list[Exception]()

        @contextmanager
        def trying(name: str) -> Iterator[None]:
            try:
                yield
            except (ValueError, FileNotFoundError, pickle.UnpicklingError) as error:
                if self._nodes.rank == 0:
                    what = "a snapshot" if name else "the checkpoint"
                    print(f"yafsdp-cc: {what} cannot be used: {error}", file=sys.stderr, flush=True)
                if not isinstance(error.__cause__ or error, LostError):
                    damage.append(error)

        with trying(""):
            if path is not None and (saved := _step_at(path, self._ranks)) >= 0:
                found.append((saved, ""))
        if found:
            drop_unreduced(self._model)
        for step, name in sorted(found, reverse=True):  # a snapshot is tried before a checkpoint of its step
            with trying(name):
                if name or path is None:
                    extra, source = self._load_snapshot(self._folder / name)
                else:
                    extra, source = load(path, self._model, self._optimizers), str(path)
                source = f"behind step {step}, from {source}"
                break
        else:
            if damage:
                raise damage[0]
            return 0, "", ""
        odd = [f"no state for '{key}'" for key in sorted(self._states.keys() - extra.keys())]
        more = sorted(extra.keys() - self._states - {STEPS})
        odd += [f"a state of '{key}' that nothing takes" for key in more]
        if self._nodes.rank == 0 and odd and RANDOM in extra:  # with RANDOM, ``extra`` is complete and by ``Rescue``
            warnings.warn(
                f"Rescue.restore(): what was saved behind step {step} has {', '.join(odd)}. An object without a saved "
                "state is left as the program made it: give each the name that it had",
                stacklevel=4,
            )
        for key, (_, restore) in self._states.items():
            if key in extra:
                restore(extra[key])
        return step, source, name

    def _load_snapshot(self, folder: Path) -> tuple[dict[str, Any], str]:
        """Load a snapshot, of which this node may lack files; return its extra data, and in words where it was.

        If no node has one of the files, raise a ``LostError``, or a ``ValueError`` with a ``LostError`` as its cause.
        """
        ranks, parts = self._ranks, set[str]()

        @contextmanager
        def present(names: Collection[str]) -> Iterator[None]:
            came = fetch(names, folder, self._nodes, ranks.back)
            yield
            parts.update(each.name for each in came if each.name.endswith(".distcp"))
            kept = {METADATA, files.extra_name(*place_in(ranks.back)), *parts}
            for each in came:  # delete other ranks' extra files: each may have residuals as large as the model
                if each.target == self._nodes.rank and each.name not in kept:
                    (folder / each.name).unlink()

        with together(ranks.front):
            folder.mkdir(exist_ok=True)
        with present([METADATA]), together(ranks.front):  # a damaged table of contents raises on all ranks
            reader = CheckpointReader(folder, present)
        extra = load_from(reader, self._model, self._optimizers, ranks)
        return extra, f"memory ({len(parts)} of {len(reader.names)} parts from another node)" if parts else "memory"

    @torch.inference_mode(False)  # inference mode refuses copies of parameters
    def step(self) -> None:
        """Count a finished step; begin a snapshot if it is time for one, a collective, and wait for one that is late.

        Call ``step`` after the optimizer's step and after whatever else a step changes.

        Raises:
            RuntimeError: ``restore`` was not called; or the last snapshot could not be written, as a rank has died or
                the memory is full.
        """
        if self._steps < 0:
            raise RuntimeError("call Rescue.restore() before the first step: it says how many steps are finished")
        self._steps += 1
        self._tell_progress()
        if self._path is not None and self._save_every and self._steps % self._save_every == 0:
            wait_for_saves()  # each save holds a host copy of all state: with a slow disk, they would fill the memory
            with together(self._ranks.front):
                extra = self._extra()
            self._save = save(self._path, self._model, self._optimizers, asynchronous=True, **extra)
        if self._steps >= self._next:  # ``_steps`` is larger if a snapshot failed and the program went on
            self._snapshot()
        # All ranks wait for a late snapshot after the same step, and without a deadlock. A rank that waits has issued
        # all collectives of the step, so the others end it, too. The background threads need nothing but each other:
        # they let training go first only on ranks that do not wait, until the step ends. No thread waits for a rank
        # whose snapshot is whole. Copies that ``restore`` makes were over before ``_snapshot`` began the late snapshot.
        # ``save`` writes the checkpoint at ``path`` with threads and a group of its own.
        if self._steps - self._whole >= self._every:
            self._wait()
        self._stepped.clear()

    def close(self) -> None:
        """Wait for the snapshot and saves under way, and remove the snapshots: this training is over. A collective.

        A program that is started again trains again, from the checkpoint at ``path`` or from the beginning. Call
        ``close`` after the loop, not in a ``finally``: a rank that raises alone would wait for the others in ``close``.

        Raises:
            RuntimeError: the last checkpoint at ``path`` was not written. Snapshots stay; a second call removes them.
        """
        wait_for_saves()  # a program may destroy the process group next, which saves at ``path`` need
        with suppress(RuntimeError):  # raised if the snapshot under way has failed, which is removed anyway
            self._wait()
        saved, self._save = self._save, None
        if self._steps >= 0:
            with together(self._ranks.back):
                if saved is not None and (error := saved.exception()) is not None:
                    raise RuntimeError(
                        f"the last checkpoint at {self._path} was not written ({error}), so snapshots stay: make room "
                        "and save(another_path, model, optimizer), or call close() again, which removes them"
                    )
            Rescue._closed, self._steps = Rescue._closed + 1, -1
            del Rescue._open[self._run]
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()
            self._lock = None
        with suppress(OSError):  # raised if the launcher, or a later Rescue, has files in the folder of the run
            self._run.rmdir()

    def _extra(self) -> dict[str, Any]:
        """Return the data of the extra file; an object's ``state_dict`` may raise on one rank alone."""
        return {STEPS: self._steps, **{name: state_of() for name, (state_of, _) in self._states.items()}}

    def _tell_progress(self) -> None:
        with suppress(OSError):  # the memory may be full: the number is only for a message of ``restore``
            (self._folder / f"steps-{self._nodes.rank}").write_text(str(self._steps))

    def _wait(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        try:
            job.result()
        except Exception as error:
            raise RuntimeError(f"the snapshot behind step {self._started} was not written: {error}") from error
        self._whole = self._started

    def _snapshot(self) -> None:
        self._wait()
        self._next = self._steps + self._every - self._took
        states = [require_state(part) for _, part in sharded_parts(self._model)]
        self._engines = [each.context for each in states]
        has_grads = any(each.grad is not None for each in self._model.parameters())
        if self._optimizers and not self._stepped and (has_grads or not all(each.is_idle for each in states)):
            warnings.warn(
                "Rescue.step(): there are gradients that no optimizer step has taken, and a snapshot has none: call "
                "step() behind each optimizer.step(), not behind each micro-batch. (Where a GradScaler has left a step "
                "out, nothing is lost.)",
                stacklevel=4,  # ``inference_mode`` wraps ``step``
            )
        if not self._kept:  # stages of a pipeline that loaded one checkpoint differ only after a step
            check_is_one_value("Rescue.step()", self._model, self._ranks.front)
        refuse_sync("Rescue", self._model)  # ``join_replicas`` may have been called after ``restore``
        compressed = compression.sharded_state(self._model, means=False)
        state, paths, content = collect(self._model, self._optimizers, self._extra, compressed, self._ranks.front)
        before, self._kept = self._kept, {name: _copy_over(self._kept.get(name), each) for name, each in state.items()}
        is_in_place = [*map(id, _tensors_in(before))] == [*map(id, _tensors_in(self._kept))]
        if self._writer is None or self._writer.paths != paths or not is_in_place:
            # The lowest rank writes what several have: a node that has lost its memory fetches fewer files then.
            self._writer = CheckpointWriter(paths, dedup_save_to_lowest_rank=True)
        copied = None
        if device := next((each.device for each in _tensors_in(state) if each.is_cuda), None):
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
        self._started = self._steps
        self._job = _in_thread(self._write, self._writer, self._kept, content, copied)

    def _write(
        self, writer: CheckpointWriter, state: dict[str, Any], content: bytes, copied: torch.cuda.Event | None
    ) -> None:
        """Write a snapshot; runs in the background thread."""
        folder = self._folder / f"step-{self._started}.{self._life}"
        group, (rank, world) = self._ranks.back, place_in(self._ranks.back)
        if copied is not None:
            copied.synchronize()
        with together(group):
            if self._nodes.is_first:
                self._begin_folder(folder)
        with together(group) as told:
            if not (folder / part_name(rank)).exists():
                size = sum(local_of(each).nbytes for each in _tensors_in(state))
                files.check_space(folder, 2 * (len(content) + size))
            files.write(folder / files.extra_name(rank, world), content)
            told.own = len(content), zlib.crc32(content), writer.write(folder, state) if writer.is_agreed else None
        lengths, sums, numbers = zip(*told.of_ranks, strict=True)
        if None in numbers:  # some rank's state has changed its form: what others have written is written again
            with by_torch("agreeing on what each rank writes", group) as which:
                writer.agree(state, **which)
            with together(group) as told:
                told.own = writer.write(folder, state)
            numbers = tuple(told.of_ranks)
        sizes = [
            {part_name(each): size_of_part(of_entries), files.extra_name(each, world): length}
            for each, (of_entries, length) in enumerate(zip(numbers, lengths, strict=True))
        ]
        copy_to_buddies(sizes, folder, self._nodes, group, self._may_send)
        with together(group) as told:  # ``together`` waits until every file is on two nodes
            told.own = self._steps, writer.table(numbers, sums)
        last = max(steps for steps, _ in told.of_ranks)
        self._took = min(last - self._started + 1, self._every // 2)  # the step under way is one more
        with together(group):  # the snapshot is whole once every node has the table of contents
            if self._nodes.is_first:
                files.write(folder / f"{METADATA}.part", told.of_ranks[0][1])
                os.replace(folder / f"{METADATA}.part", folder / METADATA)

    def _whole_snapshots(self) -> list[str]:
        return [each.parent.name for each in self._folder.glob(f"step-*/{METADATA}")]

    def _begin_folder(self, new: Path) -> None:
        """Make a new snapshot's folder from that of the snapshot before the last, whose files are overwritten in place.

        A snapshot from before the last ``restore`` is removed instead: its folder may hold files that were fetched from
        other nodes, which no rank of this node would overwrite.
        """
        *_, before, last = ["", "", *sorted(self._whole_snapshots(), key=_step_of)]
        old = before if before.endswith(f".{self._life}") else ""
        self._remove_all_but(old, last)
        if old:
            (self._folder / old / METADATA).unlink()
            (self._folder / old).rename(new)
        else:
            new.mkdir(parents=True)  # some systems remove a user's files at the logout, the run's folder among them

    def _remove_all_but(self, *snapshots: str) -> None:
        for each in self._folder.glob("step-*"):
            if each.name not in snapshots:
                shutil.rmtree(each, ignore_errors=True)

    def _may_send(self, sent: float) -> bool:
        """Return whether a copy may go on: if training does not communicate, or waits for it, or would have to wait.

        The copy is spread over the steps until training would wait for it, as many as the last snapshot took: if the
        copy needs them all, the next snapshot gets one step more, up to half of ``every``.
        """
        left = min(self._next, self._whole + self._every) - self._started
        is_idle = self._job is None or not any(each.is_communicating() for each in self._engines)
        return is_idle or sent * left < self._steps - self._started


def _in_thread(function: Callable[..., None], *args: object) -> Future[None]:
    """Call a function in a thread that is no daemon, so that the end of the program waits for it."""
    future = Future[None]()

    def run() -> None:
        try:
            function(*args)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="yafsdp_cc.rescue").start()
    return future


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-").partition(".")[0])


def _step_at(path: Path, ranks: Ranks) -> int:
    """Return the number of finished steps of the checkpoint at ``path``, equal on all ranks; -1 if there is none."""
    step: Any = -1
    is_there = False
    with together(ranks.front), closing(Ticks(ranks.back)) as ticks, ticks.beside():
        with files.reading(path), suppress(FileNotFoundError):
            folder = files.complete(files.place(path))
            is_there = folder.is_file() or bool(os.listdir(folder))  # ``glob`` would not raise without permission
        if is_there:
            step = next((read().get(STEPS) for read in files.extra_readers(folder)), None)
            if not isinstance(step, int):
                raise ValueError(
                    f"{folder} does not tell its step, as Rescue did not save it: read it by load(), and name another "
                    "path here"
                )
    steps = all_gather_objects(step, ranks.front)
    if len(set(steps)) > 1:
        seen = table_of_ranks(f"a checkpoint behind step {each}" if each >= 0 else "none" for each in steps)
        raise ValueError(f"ranks see other checkpoints at {path}: mount one file system there on all nodes\n{seen}")
    return int(step)


def _tensors_in(state: dict[str, Any]) -> list[Tensor]:
    return [each for each in state.values() if isinstance(each, Tensor)]


def _copy_over(before: Any, value: Any) -> Any:
    """Return a host copy of one ``value`` of the state; a tensor's copy is in the memory of ``before``, its last copy.

    Copies from a GPU into the memory of ``before``, which is pinned, are only enqueued.
    """
    if not isinstance(value, Tensor):
        return tree_map(host_copy, value)
    if isinstance(before, Tensor) and (before.shape, before.dtype) == (value.shape, value.dtype):
        local_of(before).copy_(local_of(value), non_blocking=True)
        return before
    copy = host_copy(value)
    if value.is_cuda and isinstance(copy, DTensor):
        copy._local_tensor = copy._local_tensor.pin_memory()
    elif value.is_cuda:
        copy = copy.pin_memory()
    return copy


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    legacy: Any = np.random.get_state()
    kind, keys, *rest = legacy
    states["numpy"] = (str(kind), torch.from_numpy(keys.astype("int64")), *map(float, rest))
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:  # earlier versions have saved no state of NumPy
        kind, keys, place, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype("uint32"), int(place), int(has_gauss), cached))
