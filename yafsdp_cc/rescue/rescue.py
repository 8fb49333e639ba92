"""``Rescue``: snapshots of training in the memory of two nodes, from which a run that lost ranks goes on.

A snapshot is a checkpoint in ``save``'s own format. Each rank writes its files to its node's memory; a rank of the next
node, its buddy, gets a copy of them; and every node gets the table of contents, last of all. Whichever one node
vanishes, the others have every file. The snapshot before the last is removed when the next one begins.

    training   ──step 40──copy to the host──step 41────────step 42──────── ... ──step 50──copy to the host──
    a thread                               └write, send to the buddy, table┘             └...
"""

from __future__ import annotations

import io
import os
import pickle
import random
import secrets
import shutil
import sys
import time
import warnings
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only

from yafsdp_cc.checkpoint import compression, files
from yafsdp_cc.checkpoint.load import load_from
from yafsdp_cc.checkpoint.ranks import by_torch, check_is_one_model, meet, place_in, together
from yafsdp_cc.checkpoint.reader import METADATA, CheckpointReader
from yafsdp_cc.checkpoint.save import collect, save
from yafsdp_cc.checkpoint.state import as_sequence, unwrapped
from yafsdp_cc.checkpoint.writer import CheckpointWriter
from yafsdp_cc.fsdp2.module import ShardedModule, require_state
from yafsdp_cc.ranks.checks import all_gather_objects
from yafsdp_cc.replicas.sync import local_of, refuse_sync
from yafsdp_cc.rescue.memory import MEMORY, folder_of_run
from yafsdp_cc.rescue.nodes import LostError, Nodes, Transfer, fetch, files_in, transfer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from yafsdp_cc.checkpoint.ranks import Ranks
    from yafsdp_cc.checkpoint.state import Optimizers
    from yafsdp_cc.engine.param_group import GroupContext

STEPS, RANDOM = "steps", "random_states"
"""Names in the extra files for the number of finished steps and for the random states."""
_WAIT = 0.002
"""Seconds between looks whether training still communicates, while the copy to the buddy waits for that."""


_all: weakref.WeakSet[Rescue] = weakref.WeakSet()


def wait_for_snapshots() -> None:
    """Return when no snapshot of this rank is under way; to be called before process groups are destroyed."""
    for each in list(_all):
        each._wait()


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
        every: number of steps from one snapshot to the next, and so the most that are made again.
        path: a folder on a file system that all ranks share, for checkpoints that outlive all nodes.
        save_every: number of steps from one checkpoint at ``path`` to the next, a multiple of ``every``.
        **states: objects with ``state_dict`` and ``load_state_dict``, such as schedulers and loaders, and generators.

    Raises:
        TypeError: one of ``states`` has no state, or ``model`` is none.
        ValueError: ``every`` or ``save_every`` is no number of steps, or there is no memory that outlives a process.
    """

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
            raise ValueError(
                f"save_every={save_every} needs the path of the checkpoints: Rescue(..., path='checkpoints/last')"
            )
        for name, each in states.items():
            if not (isinstance(each, torch.Generator) or hasattr(each, "load_state_dict")):
                raise TypeError(f"{name} is a {type(each).__name__}, which has no state_dict() and load_state_dict()")
            if name in (STEPS, RANDOM):
                raise ValueError(f"Rescue keeps something of its own as '{name}': choose another name")
        self._model, self._optimizer = unwrapped(model), optimizer
        self._optimizers = as_sequence(optimizer)
        self._every, self._path, self._save_every = every, path, save_every
        self._states = states
        self._folder = Path(os.environ.get(MEMORY) or folder_of_run("run", os.environ.get("TORCHELASTIC_RUN_ID", "0")))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{self._folder} cannot be made ({error}): snapshots need a memory that outlives a process, /dev/shm"
            ) from error
        self._steps: int | None = None
        """Number of finished steps; None before ``restore``."""
        self._started = 0
        """Number of finished steps when the snapshot that is under way was begun."""
        self._copied: dict[str, Any] = {}
        """Copy on the host of the state in the last snapshot, whose memory the next one uses again."""
        self._thread = ThreadPoolExecutor(1, "yafsdp_cc.rescue")
        self._job: Future[None] | None = None
        _all.add(self)
        self._engine: GroupContext | None = None

    def restore(self) -> int:
        """Load the newest snapshot of which every file is in some node's memory, else the checkpoint at ``path``.

        A collective. On any number of ranks; with another number than before, states that differed between ranks are
        left as they are, and a warning names them. Rank 0 says on one line what was taken, and from where.

        Returns:
            The number of steps that are finished; 0 where there is nothing to go on from.

        Raises:
            ValueError: what there is fits another model, or all of it is damaged.
            RuntimeError: not all ranks have called this.
        """
        settings: dict[str, object] = {
            "every": self._every,
            "path": None if self._path is None else str(Path(self._path).absolute()),
            "save_every": self._save_every,
            "names of states": sorted(self._states),
        }
        self._ranks = ranks = meet("Rescue.restore()", self._model, settings, beside=True)
        check_is_one_model("Rescue.restore()", self._model)
        refuse_sync("Rescue", self._model)
        self._nodes = Nodes(self._folder, ranks.back)
        finished = [int(each.read_text() or 0) for each in self._folder.glob("steps-*")]
        here = [each.name for each in self._folder.glob("step-*") if _is_whole(each)]
        found = all_gather_objects((here, max(finished, default=0), secrets.token_hex(4)), ranks.back)
        self._life = found[0][2]
        lost = max(each[1] for each in found)
        names = {name for each in found for name in each[0]}
        taken = self._load(sorted(names, key=lambda name: (_step_of(name), name), reverse=True))
        self._steps = taken.steps
        self._tell_progress()
        for each in self._folder.glob("step-*") if self._nodes.is_first else ():
            if each.name != taken.snapshot:
                shutil.rmtree(each, ignore_errors=True)
        all_gather_objects(None, ranks.back)
        if taken.snapshot and len(self._nodes.members) > 1:
            self._started, self._job = taken.steps, self._thread.submit(self._copy_again, taken.snapshot)
        if self._nodes.rank == 0 and (taken.source or lost):
            again = f"; steps {taken.steps + 1} to {lost} are made again" if lost > taken.steps else ""
            _say(f"going on {taken.source or 'from the beginning'}{again}")
        return taken.steps

    def _load(self, snapshots: list[str]) -> _Taken:
        """Load the first of ``snapshots`` whose files are all in some node's memory, unless the checkpoint is newer."""
        ranks = self._ranks
        saved = _step_at(self._path, ranks)
        damage: Exception | None = None
        for name in snapshots:
            if _step_of(name) < saved:
                break
            folder, moved, losses = self._folder / name, list[Transfer](), list[LostError]()

            def bring(
                names: Any, folder: Path = folder, moved: list[Transfer] = moved, losses: list[LostError] = losses
            ) -> None:
                try:
                    moved += fetch(names, folder, self._nodes, ranks.back)
                except LostError as loss:  # torch raises another error for it
                    losses.append(loss)
                    raise

            try:
                with together(ranks.front):
                    folder.mkdir(exist_ok=True)
                bring([METADATA])
                with together(ranks.front):  # a table damaged on one node fails on all ranks
                    reader = CheckpointReader(folder, bring)
                bring(_extras(reader))
                extra = load_from(partial(_same, reader), self._model, self._optimizers, ranks)
            except (ValueError, pickle.UnpicklingError) as error:
                damage = damage or (None if losses else error)
                if self._nodes.rank == 0:
                    _say(f"a snapshot cannot be used: {error}")
                continue
            self._take(extra)
            came = sorted({each.name for each in moved if each.name.endswith(".distcp")})
            parts = f" ({len(came)} of {len(reader.names)} parts from another node)" if came else ""
            return _Taken(_step_of(name), f"behind step {_step_of(name)}, from memory{parts}", name)
        if saved >= 0 and self._path is not None:
            target = files.complete(files.place(self._path))
            self._take(load_from(lambda: CheckpointReader(target), self._model, self._optimizers, ranks))
            return _Taken(saved, f"behind step {saved}, from {self._path}")
        if damage is not None:
            raise damage
        return _Taken(0)

    def _take(self, extra: dict[str, Any]) -> None:
        """Restore the objects in ``states``, and the random states, from a loaded ``extra``."""
        for name, each in self._states.items():
            if name not in extra:
                continue
            if isinstance(each, torch.Generator):
                each.set_state(extra[name])
            else:
                each.load_state_dict(extra[name])
        if RANDOM in extra:
            _set_random_states(extra[RANDOM])

    def step(self) -> None:
        """Count a finished step, and begin a snapshot if it is time for one. A collective then.

        Call it behind the optimizer's step and whatever else a step changes.

        Raises:
            RuntimeError: ``restore`` was not called; or the snapshot before could not be written, as a rank has died or
                the memory is full.
        """
        if self._steps is None:
            raise RuntimeError("call Rescue.restore() before the first step: it says how many steps are finished")
        self._steps += 1
        self._tell_progress()
        if self._steps % self._every == 0:
            self._snapshot()
        if self._save_every and self._steps % self._save_every == 0:
            assert self._path is not None
            save(self._path, self._model, self._optimizer, asynchronous=True, **self._extra())

    def close(self) -> None:
        """Wait for the snapshot under way, and remove this run's snapshots: training is over. A collective."""
        self._wait()
        self._thread.shutdown()
        if self._steps is not None:
            all_gather_objects(None, self._ranks.back)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _extra(self) -> dict[str, Any]:
        states = {
            name: each.get_state() if isinstance(each, torch.Generator) else each.state_dict()
            for name, each in self._states.items()
        }
        return {**states, STEPS: self._steps, RANDOM: _random_states()}

    def _tell_progress(self) -> None:
        with suppress(OSError):  # a full memory: the number is only for a message of ``restore``
            (self._folder / f"steps-{self._nodes.rank}").write_text(str(self._steps))

    def _wait(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        self._started -= self._every  # ``_let_training_go_first`` returns at once: training waits
        try:
            job.result()
        except Exception as error:
            raise RuntimeError(
                f"the snapshot behind step {self._started + self._every} was not written: {error}"
            ) from error

    def _snapshot(self) -> None:
        assert self._steps is not None
        self._wait()
        if isinstance(self._model, ShardedModule):
            self._engine = require_state(self._model).context
        compressed = compression.sharded_state(self._model, means=False)
        state, content = collect(self._model, self._optimizers, self._extra(), compressed, self._ranks.front)
        self._copied = _copy_to_host(state, self._copied)
        state = tree_map_only(io.BytesIO, lambda stream: io.BytesIO(stream.getvalue()), self._copied)
        copied = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            copied = torch.cuda.Event()
            copied.record()
        self._started = self._steps
        self._job = self._thread.submit(self._write, self._steps, state, content, copied)

    def _write(self, step: int, state: dict[str, Any], content: bytes, copied: torch.cuda.Event | None) -> None:
        """Write a snapshot; runs in the background thread."""
        group, (rank, world) = self._ranks.back, place_in(self._ranks.back)
        folder = self._folder / f"step-{step}.{self._life}"
        if copied is not None:
            copied.synchronize()
        with together(group):
            if self._nodes.is_first:
                self._remove_all_but_the_last(folder)
            folder.mkdir(exist_ok=True)
            files.check_space(folder, 2 * (len(content) + sum(map(_bytes_of, tree_flatten(state)[0]))))
            files.write(folder / files.extra_name(rank, world), content)
        writer = _MemoryWriter(folder, all_gather_objects(zlib.crc32(content), group))
        # The planner puts replicated tensors into rank 0's file: a node that has lost its memory then fetches that file
        # and those of its own ranks, and no others.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        with by_torch(f"the snapshot behind step {step}", group) as which:
            state_dict_saver.save(state, storage_writer=writer, planner=planner, **which)
        own = (f"__{rank}_0.distcp", files.extra_name(rank, world))
        sizes = [(name, (folder / name).stat().st_size) for name in own if (folder / name).exists()]
        found = all_gather_objects((sizes, writer.table), group)
        copies = [
            Transfer(name, size, source, buddy)
            for source, (names, _) in enumerate(found)
            if (buddy := self._nodes.buddy_of(source)) is not None
            for name, size in names
        ]
        transfer(copies, folder, group, self._let_training_go_first)
        all_gather_objects(None, group)  # a barrier: now every file is on two nodes
        if self._nodes.is_first:
            files.write(folder / f"{METADATA}.part", next(table for _, table in found if table))
            os.replace(folder / f"{METADATA}.part", folder / METADATA)

    def _copy_again(self, snapshot: str) -> None:
        """Copy files of a snapshot that one node alone has to its buddy, so that another node may be lost before the
        next snapshot; runs in the background thread."""
        folder, nodes, group = self._folder / snapshot, self._nodes, self._ranks.back
        found = all_gather_objects(files_in(folder), group)
        copies = []
        for name in sorted({name for each in found for name in each}):
            sources = [rank for rank, each in enumerate(found) if name in each]
            source = sources[len(copies) % len(sources)]  # ranks of a node share the work
            buddy = nodes.buddy_of(source)
            if buddy is not None and {nodes.of[each] for each in sources} == {nodes.of[source]}:
                copies.append(Transfer(name, found[source][name], source, buddy))
        transfer(copies, folder, group, self._let_training_go_first)

    def _remove_all_but_the_last(self, new: Path) -> None:
        """Remove all snapshots but the last one, and the new one that other ranks may write already."""
        whole = [each for each in self._folder.glob("step-*") if _is_whole(each)]
        last = max(whole, key=lambda each: _step_of(each.name), default=None)
        for each in self._folder.glob("step-*"):
            if each not in (last, new):
                shutil.rmtree(each, ignore_errors=True)

    def _let_training_go_first(self, sent: float) -> None:
        """Wait while training communicates, unless the copy would not be over before the next snapshot."""
        assert self._steps is not None
        while self._engine is not None and self._engine.is_communicating():
            if sent * self._every < self._steps - self._started:
                return
            time.sleep(_WAIT)


class _Taken(NamedTuple):
    """The snapshot or checkpoint that ``restore`` has loaded, or that there was none."""

    steps: int
    source: str = ""
    """Description for the line that rank 0 prints; "" where there was nothing to load."""
    snapshot: str = ""
    """Name of the snapshot's folder; "" for a checkpoint."""


class _MemoryWriter(CheckpointWriter):
    """Writes the files of tensors; leaves the table of contents in ``table`` of rank 0, to be sent to every node."""

    table = b""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return super(CheckpointWriter, self).prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.table = self.table_of(metadata, results)


def _say(text: str) -> None:
    print(f"yafsdp-cc: {text}", file=sys.stderr, flush=True)


def _same(reader: CheckpointReader) -> CheckpointReader:
    return reader


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-").partition(".")[0])


def _is_whole(folder: Path) -> bool:
    return (folder / METADATA).exists()


def _extras(reader: CheckpointReader) -> list[str]:
    sums = reader.extra_sums or []
    return [files.extra_name(rank, len(sums)) for rank in range(len(sums))]


def _step_at(path: str | os.PathLike[str] | None, ranks: Ranks) -> int:
    """Return the number of steps of the checkpoint at ``path``; -1 where there is none. A collective."""
    if path is None:
        return -1
    step: Any = -1
    with together(ranks.front):
        folder = files.complete(files.place(path))
        if folder.exists():
            with warnings.catch_warnings():  # what differed between ranks is told when the checkpoint is loaded
                warnings.simplefilter("ignore")
                step = files.read_extra(folder, *place_in(ranks.front)).get(STEPS)
            if not isinstance(step, int):
                raise ValueError(
                    f"{folder} does not tell its step, as Rescue did not save it: read it by load(), and name another "
                    "path here"
                )
    return int(step)


def _bytes_of(value: Any) -> int:
    return local_of(value).nbytes if isinstance(value, Tensor) else 0


def _copy_to_host(state: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state`` on the host, in the memory of the copy ``before`` where that has the same shapes.

    Copies from a GPU are only enqueued, to pinned memory.
    """
    copied: dict[str, Any] = {}
    for name, value in state.items():
        known = before.get(name)
        if isinstance(value, dict):
            copied[name] = _copy_to_host(value, known if isinstance(known, dict) else {})
        elif not isinstance(value, Tensor):
            copied[name] = value
        elif isinstance(known, Tensor) and (known.shape, known.dtype) == (value.shape, value.dtype):
            local_of(known).copy_(local_of(value.detach()), non_blocking=True)
            copied[name] = known
        else:
            copied[name] = _host_copy(value.detach())
    return copied


def _host_copy(tensor: Tensor) -> Tensor:
    copy = tensor.to("cpu", copy=True)
    if not tensor.is_cuda:
        return copy
    if isinstance(copy, DTensor):
        copy._local_tensor = copy._local_tensor.pin_memory()
        return copy
    return copy.pin_memory()


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (str(kind), torch.from_numpy(keys.astype("int64")), *map(float, rest))
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy as np

        kind, keys, place, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype("uint32"), int(place), int(has_gauss), cached))
