"""A parameter group: parameters that are gathered together before use and whose gradients are reduced together.

    SHARDED ──unshard──► UNSHARDED (in a weight buffer) ──last use──► SHARDED: another group takes the buffer
    FREE ──take_grads──► written ──_take──► read by a reduce ──its handle is over──► FREE: another group takes it
    (of gradient buffers; without gradient sync the group keeps its own, or its reduce-scatters store the gradients)

``unshard`` and ``unshard_for_backward`` return weights that are ready. ``state`` calls ``acquire_grad_buffer`` when the
backward reaches the group, and ``post_backward`` when its last gate has run: ``reduce``, unless gradients are to wait.
[Note: overflow buffers] A group whose assigned buffer is in use gets one of its own, an overflow buffer, and
``Counters.overflow_buffers`` counts it: an enclosing group still computes in the buffer, a call of the same group is
not over, or a second graph is alive. It costs memory and an all-gather, and never a wrong number. Its memory may have
been read by other streams before, so its first fill waits for the caller (``last_use``); ``in_flight`` keeps a gradient
buffer alive until the reduce that reads it is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from yafsdp_cc.engine.buffers import Buffer, BufferPool
from yafsdp_cc.engine.param import (
    FSDPParam,
    UnshardedGrads,
    UnshardedParams,
    owe,
    unsharded_bytes,
    unsharded_grad_bytes,
)
from yafsdp_cc.engine.step_state import StepState, transient, unreduced
from yafsdp_cc.engine.streams import CommHandle
from yafsdp_cc.profiling import Span, span

if TYPE_CHECKING:
    import torch.distributed as dist

    from yafsdp_cc.engine.collectives import CollectiveFingerprint
    from yafsdp_cc.engine.communicator import CommContext
    from yafsdp_cc.engine.hsdp import ReplicaSums
    from yafsdp_cc.engine.param import FlatParam
    from yafsdp_cc.engine.protocols import Observer
    from yafsdp_cc.engine.spec import Counters, ParamGroupSpec, Role
    from yafsdp_cc.engine.streams import CommStream
    from yafsdp_cc.ranks.mesh import MeshInfo

OF_ENGINE = "_is_of_yafsdp_cc"
"""Name of the attribute that marks the engine's own hooks on modules."""
_graph_task = torch._C._current_graph_task_id
_will_execute = torch._C._will_engine_execute_node
_log = logging.getLogger("yafsdp_cc")
_Result = TypeVar("_Result")


class _ContextStep(StepState):
    """Members of a ``GroupContext`` that a step changes."""

    in_forward: bool = transient(False)
    """Whether a forward of the root, or of a group by itself, is under way."""
    last_reduce: CommHandle | None = transient(None)
    """Handle of this backward's last reduce or store of gradients (``_defer``), which ends last on their stream."""
    in_flight: list[Buffer] = transient(list)
    """Gradient buffers that the reduce stream may still read; this list keeps overflow buffers alive."""
    reduced: list[tuple[FlatParam, list[bool]]] = unreduced(list)
    """Flat parameters reduced since gradients were last made final, and for each of their parameters whether this rank
    wrote a gradient. A backward without sums over replicas leaves them to a later one."""


@dataclass(eq=False)
class GroupContext(_ContextStep):
    """State that the groups of one root share: streams, buffers, and reduces in flight."""

    info: MeshInfo
    gather: CommContext
    """Communicator, scratch buffers and fingerprint of all-gathers; ``reduce`` has those of reduces."""
    reduce: CommContext
    gather_stream: CommStream
    """Stream of all-gathers; reduces are issued on ``reduce_stream``, perhaps the same one."""
    reduce_stream: CommStream
    fingerprint: CollectiveFingerprint
    """Record of the collectives that were issued, which ranks compare."""
    counters: Counters
    """Counts for users, which continue when the engine is made anew."""
    leaf_node: Any
    """Autograd's node of a leaf that a backward reaches if and only if it wants the parameters' gradients."""
    observers: tuple[Observer, ...] = ()
    groups: tuple[ParamGroup, ...] = ()
    """The groups of the root in module order."""
    replicas: ReplicaSums | None = None
    """Partial sums of gradients, which are summed over replicas; None without replicas."""
    passes: int = 0
    """Number of forwards, backwards and ``reshard()`` calls so far: after each, the caller may write to shards."""
    weight_pools: dict[Role, BufferPool] = field(default_factory=dict)
    grad_pools: dict[Role, BufferPool] = field(default_factory=dict)
    traces: bool = False
    """Whether a profiler records ranges; read once per forward and backward."""
    has_warned: bool = False
    describe: Callable[[CommHandle | None], str] = field(init=False)
    """Function that returns, as text, what this rank is doing and waits for: ``sharding.status.describe``."""
    _bound: set[FlatParam] = field(default_factory=set)

    @property
    def device(self) -> torch.device:
        return self.info.device

    @property
    def wants_grads(self) -> bool:
        """Whether the backward under way wants the parameters' gradients, unlike ``torch.autograd.grad`` of inputs."""
        return bool(_will_execute(self.leaf_node))

    def wait(self, handle: CommHandle) -> None:
        """Wait for an operation; if it fails, raise an error that tells what the other ranks were doing.

        On a GPU the stream waits, not the host: torch's watchdog ends ranks on a hang, ``sharding.watch`` tells of it.
        """
        if not handle.pending:
            return
        for observer in self.observers:
            observer.before_wait()
        self.explained(handle.wait, handle)
        for observer in self.observers:
            observer.after_wait()

    def explained(self, communicate: Callable[[], _Result], waited: CommHandle | None = None) -> _Result:
        """Call ``communicate``, which issues an operation or waits for ``waited``, and return its result; if it fails,
        raise an error that tells what all ranks were doing."""
        try:
            return communicate()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.fingerprint.explain(error, self.describe(waited)) from error

    def bind_reduce(self, flat: FlatParam) -> None:
        """Allocate buffers for the reduces and gradients of ``flat`` at first use: frozen parameters need none."""
        if flat not in self._bound:
            self._bound.add(flat)
            self.wait_for_reduces()  # no reduce may use scratch buffers while they grow
            flat.reduce_scatter.bind(flat.reduce_context)
            flat.make_sharded_grad()
            if self.replicas is not None:
                self.replicas.bind(flat)

    def issue_reduce(self, buffer: Buffer, start: Callable[[bool], Sequence[dist.Work]], finish: Any = None) -> None:
        """Issue an operation that reads gradients in ``buffer``, after the caller's stream has written them."""
        if self.last_reduce is not None and not self.reduce_stream.is_ordered:
            self.wait(self.last_reduce)  # this operation and the last one use the same scratch buffers
        self.reduce_stream.wait_for_caller()
        self.explained(partial(self.reduce_stream.issue, buffer.handle, start, finish))
        self.last_reduce = buffer.handle
        self.in_flight.append(buffer)

    def wait_for_reduces(self) -> None:
        """Wait for all reduces and stores of gradients (``_defer``): the last one issued is last on the stream, too."""
        if self.last_reduce is not None:
            self.wait(self.last_reduce)
            if self.replicas is not None:
                self.explained(self.replicas.wait)
            self.last_reduce = None
            self.in_flight.clear()

    def is_communicating(self) -> bool:
        """Return whether the last operation of any communication stream is under way. Any thread may ask."""
        over_replicas = () if self.replicas is None else (self.replicas.stream,)
        return any(each.is_running() for each in (self.gather_stream, self.reduce_stream, *over_replicas))

    def release(self) -> None:
        """Drop the references to groups, buffers and observers."""
        for pool in (*self.weight_pools.values(), *self.grad_pools.values()):
            for buffer in pool.buffers:
                buffer.owner = None  # groups and buffers refer to each other: break the cycle
        self.groups = self.observers = ()
        self.weight_pools.clear()
        self.grad_pools.clear()

    def warn_of_kept_grads(self) -> None:
        """Warn once of the memory for unsharded gradients that are kept from one backward to the next."""
        if not self.has_warned and self.gather.comm.rank == 0:
            unsynced = (group for group in self.groups if not group.spec.settings.requires_gradient_sync)
            keeping = [group for group in unsynced if not group.is_alone_in_grad_buffer]
            nbytes = sum(unsharded_grad_bytes([flat for flat in group.flats if flat.trainable]) for group in keeping)
            is_planned = any(group.spec.role is not None for group in keeping)  # ``shard`` sets roles, and makes plans
            _log.warning(
                "set_requires_gradient_sync(False) keeps unsharded gradients on every rank: %d bytes more per rank. "
                "Where every micro-batch may be reduced, leaving it on costs none%s",
                nbytes,
                "; zero_stage=1 of shard() has them in its plan" if is_planned else "",
            )
        self.has_warned = True


class ParamGroup(StepState):
    """One parameter group of an engine; its ``role`` decides which buffers it takes."""

    held: UnshardedParams | None = transient(None)
    """Weights gathered outside of a forward, by ``unshard()`` of the module."""
    registered: list[Sequence[Tensor]] = transient(list)
    """Weights that the group's modules show: one entry for ``held``, one per forward or backward, innermost last."""
    registers_held: bool = transient(False)
    """Whether the group's modules show the weights in ``held`` as their parameters."""
    accepts_in: int | None = transient(None)
    """Graph task of the backward that last called ``acquire_grad_buffer``; None once it accepts no more gradients."""
    grads: UnshardedGrads | None = unreduced(None)
    """The gradient buffer, from ``take_grads``, when the backward reaches the group, to ``_take``, when its reduce is
    issued; the reduce reads the buffer until ``buffer.handle`` is over."""
    owes_reduce: bool = unreduced(False)
    """Whether a backward has reached the group, on all ranks, and kept what gradients any of them may have."""
    deferred: dict[FlatParam, list[bool]] = unreduced(dict)
    """For each ``FlatParam`` whose gradients its reduce-scatter has stored, which of its parameters have gradients."""

    def __init__(self, context: GroupContext, spec: ParamGroupSpec, role: Role) -> None:
        self.context = context
        self.spec = spec
        self.name = name = spec.name
        self.role = role
        self.flats = spec.flats
        self.params: tuple[FSDPParam, ...] = tuple(param for flat in spec.flats for param in flat.params)
        self.index = -1
        """Index of this group among the groups of its role."""
        self.unsharded: UnshardedParams
        """The group's unsharded weights in its assigned buffer."""
        self.is_alone_in_grad_buffer = False
        """Whether no other group writes gradients to this group's buffer."""
        self.replicated: tuple[FSDPParam, ...] = ()
        """Replicated parameters that the group's modules use."""
        self.uses_root_params = False
        """Whether a module of this group also holds a parameter of the root's group, as tied weights do."""
        self._looks_up = _look_up(spec.modules, self.params)
        self.forward_span, self.backward_span = Span("forward", name), Span("backward", name)
        self.forward_prefetch: tuple[ParamGroup, ...] = ()
        """Groups that ``GroupSettings.forward_prefetch`` names."""
        self.backward_prefetch: tuple[ParamGroup, ...] = ()
        self.own_grad_buffer: Buffer | None = None
        """Buffer for gradients that are kept from one backward to the next, or are too large for the pool's buffers."""
        self._known_grads: dict[tuple[tuple[FlatParam, ...], bool], UnshardedGrads] = {}
        """Views of gradients in the pool's or the group's buffer, by flat parameters and whether gradients are kept."""
        for param in self.params:
            param.acquire_grad_buffer = self.acquire_grad_buffer

    @property
    def trainable(self) -> bool:
        """Whether one of the parameters that the group's modules use requires a gradient."""
        return any(param.parameter.requires_grad for param in (*self.params, *self.replicated))

    @property
    def unshards_in_backward(self) -> bool:
        """Whether the backward of a forward that begins now needs the weights; an embedding's only does with hooks."""
        looks_up = self._looks_up and not any(map(_has_hooks, self.spec.modules))
        return self.spec.settings.unshards_in_backward and not looks_up

    # Weights -----------------------------------------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """Return each shard's version, which changes whenever the shard does."""
        return tuple([flat.sharded._version for flat in self.flats])

    def is_in(self, buffer: Buffer) -> bool:
        """Return whether ``buffer`` holds, or is being filled with, this group's present weights."""
        return buffer.owner is self and not buffer.expired and buffer.versions == self.versions()

    def expire(self, flats: Sequence[FlatParam]) -> None:
        """Let weights of ``flats`` that were gathered before the last forward or backward ended be gathered anew."""
        for unsharded in (self.unsharded, self.held):
            buffer = None if unsharded is None else unsharded.buffer
            if buffer is not None and buffer.owner is self and buffer.filled_in < self.context.passes:
                buffer.expired = {*buffer.expired, *flats}  # what ``reshard`` has expired stays expired
        for flat in flats:
            flat.all_gather.expire()

    def gathered(self, flat: FlatParam) -> tuple[int | None, Tensor]:
        """Return the version of the weights of ``flat`` in the assigned buffer (None: it has none), and their view."""
        buffer, place = self.unsharded.buffer, self.flats.index(flat)
        self.context.wait(buffer.handle)
        return buffer.versions[place] if buffer.owner is self else None, self.unsharded.flat[place]

    def prefetch(self) -> None:
        """Gather the weights into the assigned buffer unless it has users. A skipped or lost one costs only time."""
        buffer = self.unsharded.buffer
        if self.flats and buffer.users == 0 and not self.is_in(buffer):
            self._all_gather(self.unsharded)

    def unshard(self, prefetch: Callable[[ParamGroup], None] | None = None) -> UnshardedParams:
        """Return the weights, gathered and ready, in a buffer that nobody refills until ``release``; ``prefetch`` is
        called to gather the weights of the groups that come next."""
        if self.held is not None and not self.is_in(self.held.buffer):
            self.release_held()  # the weights have changed since ``unshard()``
        unsharded = self.use(self.held or self.unsharded)
        # On a GPU ``prefetch`` comes first: the caller's stream prepares the next shard (``AllGather.prepare``) before
        # it waits. On a CPU a prefetch before the wait would share the network with the all-gather that is waited for.
        is_first = self.context.gather_stream.is_ordered
        if prefetch is not None and is_first:
            prefetch(self)
        self.context.wait(unsharded.buffer.handle)
        if prefetch is not None and not is_first:
            prefetch(self)
        return unsharded

    def unshard_for_backward(self, unsharded: UnshardedParams, lent: int, *, needed: bool) -> UnshardedParams | None:
        """Gather the weights into the buffer that a forward read them from; return them if the backward uses them now.

        Args:
            unsharded: the weights that the forward has read.
            lent: number of the buffer's users that gather again after a refill, as backwards that this one interrupts.
            needed: whether the backward certainly reads the weights; else another group may keep the buffer.
        """
        buffer = unsharded.buffer
        if not self.is_in(buffer):
            if buffer.users and not needed:
                return None
            if self.held is not None and self.held.buffer is buffer:
                lent += 1  # held weights are refilled in place, so that the modules show the new ones
            if buffer.users > lent:
                raise RuntimeError(
                    f"the weights of unit '{self.name}' are needed where others are in use, as after an interrupted "
                    "backward, or by torch.autograd.grad within the forward of another unit: run the forward again, "
                    "and call autograd.grad after the forward"
                )
            self._all_gather(unsharded)
        buffer.users += 1
        self.context.wait(buffer.handle)
        return unsharded

    def unshard_again(self, unsharded: UnshardedParams) -> None:
        """Gather the weights anew if another group has used their buffer; ``users`` still counts this group's use."""
        if not self.is_in(unsharded.buffer):
            self._all_gather(unsharded)
        self.context.wait(unsharded.buffer.handle)

    def release(self, unsharded: UnshardedParams) -> None:
        """End one use of the weights that ``unshard`` has returned."""
        buffer, stream = unsharded.buffer, self.context.gather_stream
        self.collect_grads(unsharded)
        buffer.users = max(buffer.users - 1, 0)
        if stream.is_ordered:
            buffer.last_use = stream.record(buffer.last_use)

    def collect_grads(self, unsharded: UnshardedParams | None) -> None:
        """Move gradients from the leaves of ``unsharded``, in an overflow buffer, to leaves in the assigned one."""
        if unsharded is not None and unsharded is not self.unsharded:
            for leaf, kept in zip(unsharded.leaves, self.unsharded.leaves, strict=True):
                if leaf.grad is not None:
                    kept.grad, leaf.grad = leaf.grad if kept.grad is None else kept.grad + leaf.grad, None

    def forget(self, unsharded: UnshardedParams) -> None:
        """Invalidate the weights in their buffer, because the program has written to them."""
        if unsharded.buffer.owner is self:
            unsharded.buffer.owner = None

    def release_held(self) -> None:
        """End the use of the weights that ``unshard()`` of the module has gathered."""
        held, self.held = self.held, None
        if held is not None:
            # an overflow buffer may be freed here: first let a CPU's all-gather end, which writes to it
            held.buffer.handle.wait()
            self.release(held)
        if self.registers_held:
            self.registers_held = False
            self.register_sharded()
            # replicated parameters stay unsharded until a forward or backward under way ends
            for param in () if self.context.in_forward or _graph_task() != -1 else self.replicated:
                param.register_sharded()

    def use(self, unsharded: UnshardedParams) -> UnshardedParams:
        """Begin to use ``unsharded``, or an overflow buffer if other weights are in use there; gather if needed."""
        if not self.is_in(unsharded.buffer):
            if unsharded.buffer.users:
                unsharded = self.overflow()
            self._all_gather(unsharded)
        unsharded.buffer.users += 1
        return unsharded

    def _all_gather(self, unsharded: UnshardedParams) -> None:
        context, buffer, versions = self.context, unsharded.buffer, self.versions()
        held: Sequence[int | None] = buffer.versions if buffer.owner is self else (None,) * len(versions)
        # Frozen weights that the buffer still holds are not gathered again when other weights of the group, an
        # adapter's for example, have changed. Encoded deltas are added to the weights that the buffer holds.
        stale = [
            (flat.all_gather, output, before, room)
            for flat, output, before, room, version in zip(
                self.flats, unsharded.flat, held, unsharded.scratch, versions, strict=True
            )
            if before != version or flat in buffer.expired
        ]

        def start(async_op: bool) -> list[dist.Work]:
            works: list[dist.Work] = []
            for all_gather, output, before, room in stale:
                works += all_gather.start(output, before, room, async_op)
            return works

        def finish() -> None:
            for all_gather, output, _, room in stale:
                all_gather.finish(output, room)

        for observer in context.observers:
            observer.before_gather(self.name, overflows=unsharded is not self.unsharded)
        operation = "gather" if len(stale) == len(held) else f"gather {[each[2] is None for each in stale]}"
        context.fingerprint.agree(operation, self.name, describe=context.describe)
        buffer.owner = None  # an all-gather that raises leaves the buffer without an owner, to be gathered anew
        if prepared := [(all_gather, output) for all_gather, output, *_ in stale if all_gather.prepares]:
            stream = context.gather_stream
            buffer.handle.wait()  # a prefetch into this buffer may still be under way
            stream.join(buffer.last_use)
            for all_gather, output in prepared:
                all_gather.prepare(output)
            buffer.last_use = stream.record(buffer.last_use)
        buffer.used_for = self.name
        buffer.fills += 1
        buffer.filled_in = context.passes
        nbytes = sum(all_gather.planned_bytes() for all_gather, *_ in stale) if context.traces else 0
        completes = any(all_gather.has_finish for all_gather, *_ in stale)
        issue = partial(context.gather_stream.issue, buffer.handle, start, finish if completes else None)
        with span("gather", self.name, nbytes) if context.traces else nullcontext():
            context.explained(partial(issue, after=buffer.last_use))
        buffer.owner, buffer.versions, buffer.expired = self, versions, ()
        context.counters.gathered_bytes += sum(all_gather.sent_bytes for all_gather, *_ in stale)

    def overflow(self) -> UnshardedParams:
        self.context.counters.overflow_buffers += 1
        # a later backward may read the buffer, and autograd refuses inference tensors
        with torch.inference_mode(False):
            buffer = Buffer(unsharded_bytes(self.flats), self.context.device, self.context.gather_stream)
            # the first fill waits until streams that used this memory before have finished with it
            buffer.last_use = self.context.gather_stream.record()
            return UnshardedParams(buffer, self.flats)

    def leaves(self, unsharded: UnshardedParams) -> Sequence[Tensor]:
        """Return the weights as autograd leaves, which require gradients where their parameters do."""
        for param, leaf in zip(self.params, unsharded.leaves, strict=True):
            if leaf.requires_grad is not param.parameter.requires_grad:
                leaf.requires_grad_(param.parameter.requires_grad)
        return unsharded.leaves

    def register_unsharded(self, views: Sequence[Tensor]) -> None:
        """Let the modules read ``views`` as their weights."""
        self.registered.append(views)
        for param, view in zip(self.params, views, strict=True):
            param.register_unsharded(view)

    def register_sharded(self) -> None:
        """Let the modules read as weights what they read before the last ``register_unsharded``."""
        self.registered.pop()
        if self.registered:
            for param, view in zip(self.params, self.registered[-1], strict=True):
                param.register_unsharded(view)
        else:
            for param in self.params:
                param.register_sharded()

    # Gradients ---------------------------------------------------------------------------------------------------

    def acquire_grad_buffer(self) -> None:
        """Provide a buffer for the gradients of the backward under way, if it wants any."""
        task = _graph_task()
        if task == self.accepts_in:
            return
        self.stop_accepting_grads()
        self.accepts_in = task
        for param in self.params:
            param.accepts_in = task
        if not self.context.wants_grads:
            return
        if self.grads is None:
            self.take_grads()
        elif late := next((flat for flat in self.flats if flat.trainable and flat not in self.grads.flats), None):
            raise RuntimeError(
                f"'{late.name}' was unfrozen while gradients of micro-batches are kept for a later reduce: run a "
                "backward with set_requires_gradient_sync(True) first"
            )
        if self.grads is not None:
            for param, view in zip(self.grads.params, self.grads.views, strict=True):
                param.unsharded_grad = view

    def take_grads(self) -> None:
        """Take a buffer for gradients that the next reduce is to sum, if the group has any; none is written yet."""
        context = self.context
        flats = tuple(flat for flat in self.flats if flat.takes_sums)
        if not flats:
            return
        for flat in flats:
            context.bind_reduce(flat)
        keeps = not (self.spec.settings.requires_gradient_sync or self.is_alone_in_grad_buffer)
        if keeps and all(flat.reduce_scatter.defers for flat in flats):
            keeps = False  # ``post_backward`` hands gradients to the reduce-scatters, which store them
        if (flats, keeps) not in self._known_grads:
            buffer = self.grad_buffer(unsharded_grad_bytes(flats), keeps=keeps)
            self._known_grads[flats, keeps] = UnshardedGrads(buffer, flats)
            if keeps:
                context.warn_of_kept_grads()
        self.grads = grads = self._known_grads[flats, keeps]
        if grads.buffer.owner is not None:
            # The buffer still has gradients of an enclosing group, or of one whose backward is not over: make another.
            context.counters.overflow_buffers += 1
            buffer = Buffer(unsharded_grad_bytes(flats), context.device, context.reduce_stream)
            self.grads = grads = UnshardedGrads(buffer, flats)
        grads.buffer.owner = self
        context.wait(grads.buffer.handle)  # the previous owner's reduce may still read the buffer
        grads.buffer.used_for = self.name

    def grad_buffer(self, nbytes: int, *, keeps: bool) -> Buffer:
        """Return the pool's gradient buffer; the group's own if it ``keeps`` gradients, or if ``nbytes`` do not fit."""
        pool = self.context.grad_pools.get(self.role)
        if pool is not None and nbytes <= pool.buffer_bytes and not keeps:
            return pool.assigned(self.index)
        if self.own_grad_buffer is None or self.own_grad_buffer.data.nbytes < nbytes:
            self._known_grads.clear()  # ``_known_grads`` are views of the smaller buffer
            self.own_grad_buffer = Buffer(nbytes, self.context.device, self.context.reduce_stream)
        return self.own_grad_buffer

    def save_members(self) -> Callable[[], None]:
        """Return a function that restores this group's members, and its ownership of its gradient buffer."""
        restore_members, grads = super().save_members(), self.grads

        def restore() -> None:
            restore_members()
            if grads is not None:
                grads.buffer.owner = self

        return restore

    def stop_accepting_grads(self) -> None:
        """Accept no more gradients before the next ``acquire_grad_buffer``; written gradients remain."""
        self.accepts_in = None
        for param in self.params:
            param.unsharded_grad = param.accepts_in = None

    def post_backward(self) -> None:
        """Reduce the gradients of a backward, all of which are written, or keep them for a later backward."""
        self.collect_grads(self.held)
        for param, leaf in zip(self.params, self.unsharded.leaves, strict=True):
            if leaf.grad is not None:  # gradients of operations that activation checkpointing ran again
                param.accumulate_grad(leaf.grad)
                leaf.grad = None
        if self.spec.settings.requires_gradient_sync:
            self.reduce()
            return
        self.owes_reduce = owe(self.params) or self.owes_reduce
        if self.grads is not None:
            self._defer(self.grads)

    def reduce(self) -> None:
        """Issue the group's reduce. ``FlatParam.add_sum`` takes the sum: on a GPU next on the stream, on a CPU when the
        next reduce is issued, the buffer is taken again or the backward ends."""
        self.acquire_grad_buffer()
        grads, context = self.grads, self.context
        self.owes_reduce = False
        if grads is None:
            return
        used = self._take(grads)
        for observer in context.observers:
            observer.before_reduce(self.name)
        sums = context.replicas is None or context.replicas.sums
        operation = "reduce" if sums else "reduce, not over replicas,"
        context.fingerprint.agree(operation, self.name, self.flats, context.describe)
        nbytes = sum(flat.reduce_scatter.planned_bytes() for flat in grads.flats) if context.traces else 0
        with span("reduce", self.name, nbytes) if context.traces else nullcontext():
            for flat, whole, written in zip(grads.flats, grads.flat, used, strict=True):
                finish = partial(flat.add_sum, flat.reduce_scatter.finish(whole), written)
                context.issue_reduce(grads.buffer, partial(flat.reduce_scatter.start, whole), finish)
                context.reduced.append((flat, written))
                context.counters.reduced_bytes += flat.reduce_scatter.sent_bytes
        for observer in context.observers:
            observer.after_reduce(self.name)

    def _defer(self, grads: UnshardedGrads) -> None:
        """Store gradients in reduce-scatters for the next ``reduce``; if one cannot, all stay in their buffer."""
        if not all(flat.reduce_scatter.defers for flat in grads.flats):
            return
        self.deferred.update(zip(grads.flats, self._take(grads), strict=True))
        for flat, whole in zip(grads.flats, grads.flat, strict=True):
            self.context.issue_reduce(grads.buffer, partial(_store, flat, whole))

    def _take(self, grads: UnshardedGrads) -> list[list[bool]]:
        """Zero unwritten gradients, give up the buffer; return which parameters have gradients, written or deferred."""
        self.stop_accepting_grads()
        used = grads.zero_unwritten()
        if self.deferred:
            for flat, written in zip(grads.flats, used, strict=True):
                for place, before in enumerate(self.deferred.pop(flat, ())):
                    written[place] |= before
        self.grads = grads.buffer.owner = None
        for param in grads.params:
            param.written = False
        return used

    def reset(self) -> None:
        """Drop the state of an interrupted forward or backward, with gradients that were not reduced."""
        if self.registered:
            del self.registered[1:]
            self.register_sharded()
        self.registers_held = False  # the modules show no weights in ``held`` any more
        self.release_held()
        if self.grads is not None:
            self.grads.buffer.owner = None
        self.unsharded.buffer.users = 0
        self.stop_accepting_grads()
        self.drop_members()
        for leaf in self.unsharded.leaves:  # reentrant checkpointing may have left gradients there
            leaf.grad = None


def _look_up(modules: Sequence[nn.Module], params: Sequence[FSDPParam]) -> bool:
    """Return whether all ``modules`` are embeddings with plain weights, whose backward reads indices and no weights.

    An embedding is known by its ``forward``, as sharding replaces its class by a subclass. A ``weight`` that each
    forward makes of ``params``, as ``weight_norm`` and parametrizations do, has a backward that reads them.
    """
    embeddings = [each for each in modules if getattr(each.forward, "__func__", None) is nn.Embedding.forward]
    weights = {(each, "weight") for each in embeddings}
    return len(embeddings) == len(modules) and all(
        type(param) is FSDPParam and param.spec.tensor_parallel is None and weights.issuperset(param.sites)
        for param in params
    )


def _has_hooks(module: nn.Module) -> bool:
    """Return whether forwards or backwards of ``module`` run hooks that are not the engine's and may read weights."""
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    others = any(not hasattr(hook, OF_ENGINE) for hooks in kinds for hook in hooks.values())
    return others or bool(_has_any_global_hook())


def prefetch(groups: Sequence[ParamGroup]) -> None:
    """Gather the weights of ``groups``, which are used soon, in this order; no two of them into the same buffer."""
    taken: list[Buffer] = []
    for group in groups:
        if group.unsharded.buffer not in taken:
            taken.append(group.unsharded.buffer)
            group.prefetch()


def _store(flat: FlatParam, grads: Tensor, async_op: bool) -> Sequence[dist.Work]:
    flat.reduce_scatter.defer(grads)
    return ()
