"""Batches that all ranks skip together, because one of them has failed in a forward or backward.

A rank that fails stops issuing collectives, and the other ranks would wait for it for ever. So each rank keeps a list
of the collectives that it has issued in a ``skip_together`` block, and a thread of each rank waits for the key of the
process group's store by which a failed rank tells the others:

    rank 0     forward, backward, ...     │ waits in collective 7                   woken; PeerFailedError at 8 ─┐
    rank 1     forward ✗ after 4 ── tells all ─┐                                                                 │
    threads                              │ close the lists:    7 issued here, 4 there, none from here on          │
    rank 1                                     └── issues 5, 6 and 7 as rank 0 did, with zeros ──────────────────┤
    all                                        what was issued is complete; one vote: skip; state put back ◄─────┘

The lists of issued collectives are prefixes of one sequence, that of the program. Once the lists are closed, each rank
issues the rest of the longest list, without activations and without an order known beforehand: an all-gather needs only
a shard, a reduce only a buffer. Only the point where ranks stop depends on timing: every rank undoes what the batch has
changed (``rollback``).

No rank waits for ever: ranks that the first incomplete collective lacks have yet to issue it, and they wait only for
earlier collectives, which are complete.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from yafsdp_cc.batches.rollback import BatchRollback
from yafsdp_cc.compression.state import compressed_sums
from yafsdp_cc.engine import streams
from yafsdp_cc.engine.collectives import FINAL_REDUCE
from yafsdp_cc.engine.protocols import Observer
from yafsdp_cc.fsdp2.module import require_state
from yafsdp_cc.ranks.checks import all_gather_objects
from yafsdp_cc.ranks.groups import group_once, new_group, timeout_of
from yafsdp_cc.ranks.mesh import shard_group
from yafsdp_cc.replicas.sync import refuse_sync
from yafsdp_cc.tensor import reductions

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.state import FSDPState

_log = logging.getLogger("yafsdp_cc")

_ANSWER = 60.0
"""Seconds to wait for the lists of all ranks in the store; threads publish them at once, whatever a rank runs."""
_WAIT = timedelta(hours=1)
"""Longest wait of a thread for a key of the store, before it waits again."""

FORWARD, GATHER, REDUCE, REPLICATED = "forward", "gather", "reduce", "replicated"
"""Kinds of ``_Op``: collectives of observers before a forward; of parameter groups; of replicated parameters."""


class PeerFailedError(RuntimeError):
    """Raised where another rank has failed in this batch: leaves the ``skip_together`` block, which catches it."""


class OutsideOnlyError(Exception):
    """Raised by a collective within ``skip_together`` outside of forwards and backwards: it belongs after the block."""


class SkippableBatch:
    """The outcome of the batch in a ``skip_together`` block."""

    def __init__(self) -> None:
        self.skipped = False
        """Whether all ranks have skipped the batch; known at the end of the ``skip_together`` block."""
        self.errors: dict[int, str] = {}
        """Exceptions that made all ranks skip the batch, and where they were raised, by global rank."""
        self.saved_bytes = 0


_COUNTS, _SKIP, _RAISE = range(3)
"""Votes of the ranks on a batch: the batch counts, all ranks skip it, or all raise; the highest vote decides."""


class _Op(NamedTuple):
    model: int
    kind: str
    name: str = ""
    """Name of the parameter group; for replicated parameters ``FSDPState.final_reduce``; for a forward ""."""
    flag: bool = False
    """Whether a forward records a graph, an all-gather fills an overflow buffer, or the sum of a reduce continues over
    replicas."""


# Logs of issued collectives, and news of failures -----------------------------------------------------------------


@dataclass
class _CollectiveLog:
    """Log of the collectives that this rank has issued in the ``skip_together`` block number ``block``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    block: int = 0
    """Number of the ``skip_together`` block that is open, or was open last."""
    ops: list[_Op] = field(default_factory=list)
    closed: int = 0
    """Number of the last ``skip_together`` block in which a rank has failed."""
    reason: str = ""
    has_ended: bool = False
    """Whether a rank has failed and takes no part in training any more."""
    handled: int = 0
    """Number of failures of ranks that this rank's waiting thread has handled."""

    @property
    def is_closed(self) -> bool:
        return self.closed == self.block

    def open(self) -> None:
        with self.lock:
            self.block += 1
            self.ops = []

    def add(self, op: _Op) -> None:
        """Record that ``op`` is about to be issued; raise ``PeerFailedError`` if a rank has failed."""
        with self.lock:
            if self.is_closed:
                raise PeerFailedError(self.reason)
            self.ops.append(op)

    def close(self, block: int, reason: str, has_ended: bool) -> list[_Op]:
        """Close the log of block number ``block``, perhaps not begun yet, to further entries; return its entries."""
        with self.lock:
            self.closed, self.reason, self.has_ended = block, reason, self.has_ended or has_ended
            self.handled += 1
            return list(self.ops) if block == self.block else []


class _Peers:
    """The ranks of a mesh: their vote, their lists of collectives, and this rank's thread that waits for failures."""

    def __init__(self, ranks: list[int], votes: dist.ProcessGroup) -> None:
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        self.log = _CollectiveLog()
        self.failures = 0
        """Number of ``skip_together`` blocks with a failed rank that this rank has ended so far."""
        self.in_a_row = 0
        """Number of batches skipped since the last batch that every rank kept."""
        self._group = weakref.ref(votes)  # weak: ``destroy_process_group`` shall free the group
        store: Any = _get_default_store()
        self._store: Store = store.clone()
        name = zlib.crc32(repr(self.ranks).encode())
        _meetings[name] += 1
        self._prefix = f"yafsdp_cc/skip/{name}/{_meetings[name]}"
        # the waiting thread needs a connection of its own: a store answers the requests of one connection in turn, and
        # that of the thread waits
        own = store.clone()
        mine = (self._prefix, self.rank, self.log)
        thread = threading.Thread(
            target=_wait_for_failures, args=(own, *mine), name="yafsdp_cc.skip_together", daemon=True
        )
        thread.start()
        # a thread that still waits in C++ when the interpreter exits would abort it
        weakref.finalize(self, _stop, self._store, *mine, thread, os.getpid())

    @classmethod
    def of(cls, mesh: DeviceMesh) -> _Peers:
        """Return the ``_Peers`` of ``mesh``, made at the first call, which is a collective."""
        ranks, group = mesh.mesh.flatten().tolist(), shard_group(mesh)
        # ranks vote over gloo: a vote over NCCL would wait for the device
        votes = group_once(group, ("votes", *ranks), lambda: new_group(ranks, timeout_of(group), "gloo"))
        if votes not in _known:
            _known[votes] = cls(ranks, votes)
        return _known[votes]

    def vote(self, level: int) -> int:
        """Vote for ``level``, one of ``_COUNTS``, ``_SKIP`` and ``_RAISE``; return the highest level of all ranks."""
        number = torch.tensor([level], device="cpu")
        try:
            dist.all_reduce(number, dist.ReduceOp.MAX, self._group())
        except RuntimeError as error:
            raise RuntimeError(
                "a rank has not come to the end of a block of skip_together: it has ended, hangs, or waits for other "
                "ranks in a collective of its own within the block (of the loss, say), which belongs behind it: see "
                f"its output\n{error}"
            ) from error
        return int(number)

    def exchange(self, item: Any) -> list[Any]:
        """Return the ``item`` that each rank has passed. A collective."""
        group = self._group()
        assert group is not None
        return all_gather_objects(item, [group])

    def tell(self, reason: str, *, has_ended: bool) -> None:
        """Tell the threads of all ranks that this rank has failed in the present block."""
        text = json.dumps({"block": self.log.block, "reason": reason, "has_ended": has_ended})
        for rank in range(len(self.ranks)):
            self._store.set(f"{self._prefix}/{self.failures}/{rank}", text)

    def missing(self) -> list[_Op]:
        """Wait until all lists are closed; return the collectives that other ranks have issued and this one has not."""
        keys = [f"{self._prefix}/{self.failures}/{rank}/issued" for rank in range(len(self.ranks))]
        try:
            self._store.wait(keys, timedelta(seconds=_ANSWER))
        except RuntimeError as error:
            silent = [self.ranks[rank] for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(
                f"a batch cannot be skipped: no answer from ranks {silent}, which have ended or hang: see their output"
            ) from error
        counts = [int(self._store.get(key)) for key in keys]
        longest = counts.index(max(counts))
        own = self.log.ops
        if len(own) == counts[longest]:
            return []
        found = [_Op(*each) for each in json.loads(self._store.get(f"{keys[longest]}/ops"))]
        if found[: len(own)] != own:
            theirs, ours = next((a, b) for a, b in zip(found, own, strict=False) if a != b)
            raise RuntimeError(
                f"a batch cannot be skipped: rank {self.ranks[longest]} has issued {_text(theirs)} where this one has "
                f"issued {_text(ours)}; every rank must run the same units in the same order"
            )
        return found[len(own) :]

    def forget(self) -> None:
        """Remove this rank's keys from the store, at the end of a ``skip_together`` block with a failed rank."""
        failure_key = f"{self._prefix}/{self.failures}/{self.rank}"
        for key in (failure_key, f"{failure_key}/issued", f"{failure_key}/issued/ops"):
            with suppress(RuntimeError):  # some kinds of stores cannot delete keys
                self._store.delete_key(key)
        self.failures += 1


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, _Peers] = weakref.WeakKeyDictionary()
"""``_Peers`` by the process group in which their ranks vote."""
_meetings: Counter[int] = Counter()
"""Number of ``_Peers`` made so far, by checksum of their ranks; all of these ranks have the same number."""


def _wait_for_failures(store: Store, prefix: str, rank: int, log: _CollectiveLog) -> None:
    """Wait in a thread for failures; then close this rank's list of collectives, and publish it in the store."""
    while True:
        failure_key = f"{prefix}/{log.handled}/{rank}"
        try:
            store.wait([failure_key], _WAIT)
            text = store.get(failure_key).decode()
            if not text:
                return
            failure = json.loads(text)
            ops = log.close(failure["block"], failure["reason"], failure["has_ended"])
            store.set(f"{failure_key}/issued/ops", json.dumps(ops))
            store.set(f"{failure_key}/issued", str(len(ops)))
        except dist.DistNetworkError:
            return  # the process that held the store has ended, and all ranks are about to end
        except RuntimeError:
            time.sleep(1.0)  # the wait for a failure has timed out: wait again


def _stop(store: Store, prefix: str, rank: int, log: _CollectiveLog, thread: threading.Thread, process: int) -> None:
    """End the thread that waits for failures, unless this process was forked from the one in which it runs."""
    if os.getpid() == process:
        with suppress(RuntimeError):
            store.set(f"{prefix}/{log.handled}/{rank}", "")
            thread.join(5.0)


class _Recorder(Observer):
    """Records the collectives that the engine of one model is about to issue; the last of the engine's observers."""

    def __init__(self, log: _CollectiveLog, state: FSDPState, number: int) -> None:
        self._log, self._state, self._number = log, state, number
        self._kind, self._before = "", 0
        """Kind of the log's last entry, "" once its collectives are issued; and ``fingerprint.count`` before it."""

    def add(self, kind: str, name: str = "", *, flag: bool = False) -> None:
        self._log.add(_Op(self._number, kind, name, flag))
        self._kind, self._before = kind, self._state.context.fingerprint.count

    def before_forward(self) -> None:
        self._kind = ""  # the other observers, called before, have issued a forward's first collectives

    def before_gather(self, group: str, *, overflows: bool) -> None:
        self.add(GATHER, group, flag=overflows)

    def before_reduce(self, group: str) -> None:
        replicas = self._state.context.replicas
        self.add(REDUCE, group, flag=replicas is not None and replicas.sums)

    def after_reduce(self, group: str) -> None:
        self._kind = ""

    def after_backward(self) -> None:
        self.add(REPLICATED, self._state.final_reduce)

    @property
    def is_within(self) -> bool:
        """Whether the collectives of the log's last entry may have been issued only in part."""
        if self._kind in (GATHER, REPLICATED):
            return self._state.context.fingerprint.count == self._before
        return bool(self._kind)


class _ForwardRecorder(Observer):
    """Records that a forward begins, before other observers issue collectives."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def before_forward(self) -> None:
        self._recorder.add(FORWARD, flag=torch.is_grad_enabled())


# The block ----------------------------------------------------------------------------------------------------------

_ENDS = (StopIteration, StopAsyncIteration, OutsideOnlyError)
"""Exceptions that skip no batch: their rank raises them at the end of the block, other ranks a ``RuntimeError``."""

_open: list[_Block] = []
"""The ``skip_together`` block that is open, as the only entry; empty outside of one."""


def check_outside_of_block(what: str) -> None:
    """Raise an ``OutsideOnlyError`` within ``skip_together``: a failed rank could not take part in ``what``."""
    if _open:
        raise OutsideOnlyError(
            f"{what} within skip_together: a rank that has failed cannot take part in it, only in the collectives of "
            "forwards and backwards. It belongs before or behind the block"
        )


reductions.refusals.append(check_outside_of_block)


class _Block:
    """One batch of some models, from its beginning to the ranks' vote on whether to skip it."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.states = [_checked_state(model) for model in models]
        info = self.states[0].context.info
        for state in self.states[1:]:
            if state.context.info.mesh != info.mesh:
                raise ValueError(
                    f"skip_together: its models are sharded across {info.mesh} and {state.context.info.mesh}; what is "
                    "skipped together takes one mesh"
                )
        self.batch = SkippableBatch()
        self._peers = _Peers.of(info.mesh)
        self._recorders = [_Recorder(self._peers.log, state, number) for number, state in enumerate(self.states)]
        self._versions = self._weights()
        self._outdated = [state.outdated for state in self.states]

    def open(self) -> None:
        """Save the state that the batch may change, and start to record collectives."""
        if self._peers.log.has_ended:
            raise RuntimeError(f"a rank takes part no longer, start the run again: {self._peers.log.reason}")
        self._peers.log.open()
        try:
            for state in self.states:
                _rollbacks[state].save(state)
        except BaseException as error:  # a rank without memory for the rollback's copies cannot skip batches
            self.abandon(error)
            raise
        self.batch.saved_bytes = sum(_rollbacks[state].nbytes for state in self.states)
        for state, recorder in zip(self.states, self._recorders, strict=True):
            state.context.observers = (_ForwardRecorder(recorder), *state.context.observers, recorder)
            state.outdated = False  # a new engine is assembled by collectives, which must wait until the block is over
        _open.append(self)

    def close(self) -> None:
        """Stop recording collectives."""
        _open.remove(self)
        for state, was_outdated in zip(self.states, self._outdated, strict=True):
            state.context.observers = state.context.observers[1:-1]
            state.outdated |= was_outdated

    def discard(self) -> None:
        """Forget the state that ``open`` has saved."""
        for state in self.states:
            _rollbacks[state].discard()

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks that this one takes no part in training any more."""
        with suppress(RuntimeError):
            self._peers.tell(_described(error), has_ended=True)

    def settle(self, error: Exception | None, limit: int) -> None:
        """Vote on the batch, and restore the saved state if it is skipped.

        Raises:
            RuntimeError: on all ranks: weights have changed, too many batches were skipped, or a rank has ended.
            Exception: ``error``, if all ranks are to raise.
        """
        peers, log = self._peers, self._peers.log
        own = None if isinstance(error, PeerFailedError) else error
        level, reason = _COUNTS, ""
        if own is not None:
            if _is_of_communication(own) or any(recorder.is_within for recorder in self._recorders):
                self.abandon(own)
                raise own
            level = _RAISE if isinstance(own, _ENDS) else _SKIP
            reason = _described(own)
            peers.tell(reason, has_ended=False)
        _free_frames(error)
        if any(state.retired for state in self.states):
            level, reason = _RAISE, "how a model is sharded was changed inside skip_together: do that behind the block"
        elif self._weights() != self._versions:
            level = _RAISE
            reason = (
                "weights have changed inside skip_together, which cannot take that back: optimizer.step() belongs "
                "behind the block, like all that changes weights"
            )
        if own is not None or log.is_closed:
            if log.has_ended:
                raise RuntimeError(f"a rank takes part no longer: {log.reason}") from error
            self._catch_up()
        verdict = peers.vote(level)
        if verdict == _COUNTS:
            peers.in_a_row = 0
            return
        self._put_back()
        self._agree(reason, verdict)
        if verdict == _RAISE:
            raise own or RuntimeError(f"a batch is given up on all ranks: {self._errors}")
        if peers.in_a_row > limit:
            raise RuntimeError(f"{peers.in_a_row} batches in a row were skipped, the last one: {self._errors}") from own

    def _weights(self) -> list[int]:
        """Return the version counters of all shards of the block's models, to tell whether weights have changed."""
        return [part.version for state in self.states for spec in state.specs for part in spec.parts]

    def _catch_up(self) -> None:
        """Issue the collectives that other ranks have issued and this one has not."""
        for state in self.states:
            _let_go(state)
        for op in self._peers.missing():
            _issue(self.states[op.model], op)
        for state in self.states:  # completing a reduce may issue its sum over replicas, which must precede the vote
            state.context.wait_for_reduces()

    def _put_back(self) -> None:
        """Complete the issued collectives, and undo what the batch has changed."""
        for state in self.states:
            if state.retired:
                continue
            state.context.wait_for_reduces()
            _let_go(state)
            state.reset()
        for state in self.states:
            _rollbacks[state].restore()

    def _agree(self, reason: str, verdict: int) -> None:
        """Exchange the ranks' errors; if all skip, check that the rollback left ranks alike, and count the batch."""
        peers, batch = self._peers, self.batch
        # read the log before the exchange: after it, a faster rank may fail in the next block and close the log
        has_failed = peers.log.is_closed
        found = peers.exchange((reason, [_condition(state) for state in self.states]))
        conditions = [condition for _, condition in found]
        batch.errors = {peers.ranks[rank]: text for rank, (text, _) in enumerate(found) if text}
        if has_failed:
            peers.forget()
        if verdict == _RAISE:
            return
        if any(each != conditions[0] for each in conditions):
            raise RuntimeError(
                f"a batch was skipped ({self._errors}), and ranks are not alike after it, which is a bug: {conditions}"
            )
        batch.skipped = True
        peers.in_a_row += 1
        for state in self.states:
            state.context.counters.skipped_batches += 1
        if dist.get_rank() == self.states[0].context.info.first_rank:
            count = self.states[0].context.counters.skipped_batches
            _log.warning("all ranks skip a batch, number %d of those skipped: %s", count, self._errors)

    @property
    def _errors(self) -> str:
        return "; ".join(f"rank {rank}: {text}" for rank, text in self.batch.errors.items())


_rollbacks: weakref.WeakKeyDictionary[FSDPState, BatchRollback] = weakref.WeakKeyDictionary()
"""``BatchRollback`` of each engine that ``_checked_state`` has accepted; the next batch reuses its copies."""


@contextmanager
def skip_together(model: nn.Module, *others: nn.Module, limit: int = 10) -> Iterator[SkippableBatch]:
    """Make all ranks skip a batch whose forward or backward raises on any of them. A collective, at both ends.

    ::

        for batch in loader:
            with yafsdp_cc.skip_together(model) as attempt:
                loss = model(batch)
                loss.backward()
            if attempt.skipped:
                continue
            optimizer.step()
            optimizer.zero_grad()

    If any rank's block raises a subclass of ``Exception``, such as ``torch.OutOfMemoryError``, all ranks leave the
    block, and gradients, residuals and phases of compression, buffers of modules and random states are as before the
    block, bit for bit. Gradients of earlier micro-batches remain. To skip a batch on purpose, raise.

    Inside of the block, forwards and backwards of these models may be the only collectives, and nothing may change
    weights.

    Args:
        model: the model that was passed to ``shard``.
        others: further sharded models that are called in the block, on the same mesh.
        limit: how many batches may be skipped in a row before ``skip_together`` raises.

    Yields:
        The outcome of the batch, known after the block.

    Raises:
        ValueError: a model is not sharded, only a part of a sharded model, or sharded with ``sync``; or meshes differ.
        NotImplementedError: a part of a model makes collectives of its own: tensor parallelism, ``SyncBatchNorm``.
        RuntimeError: entered within another block, a forward or a backward; and on all ranks, behind the block: weights
            have changed in it, or more than ``limit`` batches in a row were skipped.
        OutsideOnlyError: the block reads a norm, a sum or a ``full_tensor()`` of sharded tensors, by a collective.
        StopIteration: raised in the block; this is no failure, and the other ranks raise a ``RuntimeError``.
    """
    refuse_sync("skip_together", model, *others)
    block = _Block((model, *others))
    block.open()
    error: Exception | None = None
    try:
        try:
            yield block.batch
        except Exception as raised:
            error = raised
        except BaseException as raised:
            block.abandon(raised)
            raise
        finally:
            block.close()
        block.settle(error, limit)
    finally:
        del error  # break the cycle: the exception's traceback refers to this frame
        block.discard()


def _checked_state(model: nn.Module) -> FSDPState:
    """Return the engine of ``model``; raise if its batches cannot be skipped."""
    if _open:
        raise RuntimeError("skip_together inside skip_together: pass all models to one, skip_together(model, other)")
    state = require_state(model)
    if state.model is not model:
        raise ValueError(f"skip_together takes the whole sharded model; this {type(model).__name__} is a part of one")
    state.drop_interrupted()
    if state.iteration is not None or torch._C._current_graph_task_id() != -1:
        raise RuntimeError("skip_together inside a forward or backward: enter it before the forward")
    if state.backwards or state.interrupted:
        state.reset()
    if state in _rollbacks:
        return state  # the engine was checked at its first block
    state.contents.check()  # this check may be a collective: do it now, as a rank that fails may reach no forward
    for param in state.params:
        if param.spec.tensor_parallel is not None:
            raise NotImplementedError(
                f"skip_together: '{param.spec.name}' is tensor-parallel, and a rank that has failed cannot take part "
                "in the collectives that its module makes"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise NotImplementedError(
                f"skip_together: '{name}' is a SyncBatchNorm, and a rank that has failed cannot take part in the "
                "collectives that it makes: use BatchNorm or another norm"
            )
    _rollbacks[state] = BatchRollback()
    return state


# A rank that has failed ----------------------------------------------------------------------------------------------


def _let_go(state: FSDPState) -> None:
    """Release the weights and gradients of the batch, once the reduces that this rank has issued are complete.

    Their sums over replicas may be incomplete: other ranks may wait for collectives that this rank has not issued.
    """
    context = state.context
    if context.last_reduce is not None:
        context.wait(context.last_reduce)
    for group in state.groups:
        group.reset()
    state.backwards.clear()
    context.passes += 1


@torch.no_grad()
def _issue(state: FSDPState, op: _Op) -> None:
    """Issue the collective ``op``, which other ranks have issued, with zeros for gradients."""
    context = state.context
    if op.kind == FORWARD:
        context.wait_for_reduces()
        context.gather_stream.wait_for_caller()
        context.passes += 1
        with torch.set_grad_enabled(op.flag):
            for observer in context.observers:
                observer.before_forward()
            state.expire_weights()
    elif op.kind == REPLICATED:
        context.wait_for_reduces()
        if context.replicas is not None:
            context.replicas.all_reduce_kept()
        context.reduced.clear()
        context.fingerprint.agree(FINAL_REDUCE, op.name, state.replicated.flats)
        state.replicated.all_reduce([0.0] * len(state.params))
    else:
        group = next(each for each in state.groups if each.name == op.name)
        if op.kind == GATHER:
            unsharded = group.overflow() if op.flag else group.unsharded
            group._all_gather(unsharded)
            if op.flag:
                context.wait(unsharded.buffer.handle)
        else:
            _reduce_zeros(group, sums_over_replicas=op.flag)


def _reduce_zeros(group: ParamGroup, *, sums_over_replicas: bool) -> None:
    context = group.context
    if context.replicas is not None and context.replicas.sums != sums_over_replicas:
        # a completed reduce continues over replicas if ``sums`` says so: complete reduces before ``sums`` changes
        context.wait_for_reduces()
        context.replicas.sums = sums_over_replicas
    # ``take_grads`` takes a buffer of the pool where ``requires_gradient_sync`` is set; ``BatchRollback`` restores the
    # setting
    group.spec.settings.requires_gradient_sync = True
    group.take_grads()
    group.accepts_in = -1
    group.reduce()


def _condition(state: FSDPState) -> list[object]:
    """Return the parts of an engine's state that decide about collectives, and so must be equal on all ranks."""
    gathered = [group.is_in(group.unsharded.buffer) for group in state.groups]
    return [gathered, [compressed.codec_name for _, compressed in compressed_sums(state)]]


def _described(error: BaseException) -> str:
    """Describe an exception and where it was raised, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}{where}"


def _is_of_communication(error: BaseException | None) -> bool:
    """Return whether an exception, or a cause of it, was raised while collectives were issued or completed."""
    while error is not None:
        if any(frame.f_code.co_filename == streams.__file__ for frame, _ in traceback.walk_tb(error.__traceback__)):
            return True
        error = error.__cause__
    return False


def _free_frames(error: BaseException | None) -> None:
    """Free what the frames of an exception refer to, activations most of all."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _text(op: _Op) -> str:
    return f"'{op.kind} {op.name}'" if op.name else f"'{op.kind}'"
