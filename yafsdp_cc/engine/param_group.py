"""A parameter group: parameters that are gathered together before use and whose gradients are reduced together.

    SHARDED ──unshard──► UNSHARDED (in a weight buffer) ──last use──► SHARDED: another group takes the buffer
    no gradients ──backward writes──► gradient buffer ──reduce──► sharded ``.grad``

``unshard`` and ``unshard_for_backward`` give weights that are ready; ``acquire_grad_buffer`` is called when the
backward comes to the group, and ``reduce`` when the last gate of the group has run. Which of them is called when is
decided by ``state``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from yafsdp_cc.engine.buffers import Buffer, BufferPool
from yafsdp_cc.engine.param import UnshardedGrads, UnshardedParams, unsharded_bytes, unsharded_grad_bytes
from yafsdp_cc.engine.streams import CommHandle
from yafsdp_cc.profiling import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from yafsdp_cc.engine.communicator import CommContext
    from yafsdp_cc.engine.hierarchy import Replicas
    from yafsdp_cc.engine.mesh import MeshInfo
    from yafsdp_cc.engine.param import FlatParam, FSDPParam
    from yafsdp_cc.engine.protocols import Observer
    from yafsdp_cc.engine.replicated import CollectiveFingerprint
    from yafsdp_cc.engine.sharding import Counters, ParamGroupSpec
    from yafsdp_cc.engine.streams import CommStream
    from yafsdp_cc.plan.units import Role

_graph_task = torch._C._current_graph_task_id
_will_execute = torch._C._will_engine_execute_node
_log = logging.getLogger("yafsdp_cc")
_Result = TypeVar("_Result")


@dataclass(eq=False)
class GroupContext:
    """What the groups of one root share: streams, gradient buffers, and what is in flight."""

    info: MeshInfo
    gather: CommContext
    """Communicator, scratch buffers and fingerprint of all-gathers; ``reduce`` has those of reduces."""
    reduce: CommContext
    gather_stream: CommStream
    """Where all-gathers are issued; reduces are on ``reduce_stream``, perhaps the same one."""
    reduce_stream: CommStream
    fingerprint: CollectiveFingerprint
    """What ranks compare."""
    counters: Counters
    """Kept from one assembly to the next."""
    leaf_node: Any
    """Autograd's node of a leaf that a backward reaches if and only if it wants the parameters' gradients."""
    observers: tuple[Observer, ...] = ()
    groups: tuple[ParamGroup, ...] = ()
    """In module order."""
    replicas: Replicas | None = None
    """What sums over replicas, where there are some."""
    passes: int = 0
    """Forwards, backwards and calls of ``reshard()`` that have ended: after each, the caller may write to shards."""
    in_forward: bool = False
    """Whether a forward of the root, or of a group by itself, is under way."""
    weight_pools: dict[Role, BufferPool] = field(default_factory=dict)
    grad_pools: dict[Role, BufferPool] = field(default_factory=dict)
    last_reduce: CommHandle | None = None
    """The reduce or deferral that was issued last in the backward under way."""
    in_flight: list[Buffer] = field(default_factory=list)
    """Gradient buffers that the reduce stream may still read: overflow buffers must outlive that."""
    reduced: list[tuple[FlatParam, list[bool]]] = field(default_factory=list)
    """What was reduced in the backward under way, and which of the parameters this rank has written."""
    traces: bool = False
    """Whether a tool is recording ranges; looked at once per forward and backward."""
    has_warned: bool = False
    _bound: set[FlatParam] = field(default_factory=set)

    @property
    def device(self) -> torch.device:
        return self.info.device

    @property
    def wants_grads(self) -> bool:
        """Whether the backward under way wants the parameters' gradients, unlike ``torch.autograd.grad``."""
        return bool(_will_execute(self.leaf_node))

    def wait(self, handle: CommHandle) -> None:
        """Wait for an operation."""
        if not handle.pending:
            return
        for observer in self.observers:
            observer.before_wait()
        self.explained(handle.wait)
        for observer in self.observers:
            observer.after_wait()

    def explained(self, communicate: Callable[[], _Result]) -> _Result:
        """Return what ``communicate`` does; where it fails, tell what the other ranks were doing."""
        try:
            return communicate()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.fingerprint.explain(error) from error

    def bind_reduce(self, flat: FlatParam) -> None:
        """Make what the gradients of ``flat`` need, unless it is there: frozen parameters need nothing."""
        if flat not in self._bound:
            self._bound.add(flat)
            self.wait_for_reduces()  # scratch buffers may have to grow
            flat.reduce_scatter.bind(flat.reduce_context)
            flat.make_sharded_grad()
            if self.replicas is not None:
                self.replicas.bind(flat)

    def issue_reduce(self, buffer: Buffer, start: Callable[[bool], Sequence[dist.Work]], finish: Any = None) -> None:
        """Issue an operation that reads a gradient buffer, behind what the caller's stream has written to it."""
        if self.last_reduce is not None and not self.reduce_stream.is_ordered:
            self.wait(self.last_reduce)  # both use the scratch buffers
        self.reduce_stream.wait_for_caller()
        self.explained(partial(self.reduce_stream.issue, buffer.handle, start, finish))
        self.last_reduce = buffer.handle
        self.in_flight.append(buffer)

    def wait_for_reduces(self) -> None:
        """Wait for all reduces and deferrals so far; the stream has done those before the last one."""
        if self.last_reduce is not None:
            self.wait(self.last_reduce)
            if self.replicas is not None:
                self.explained(self.replicas.wait)
            self.last_reduce = None
            self.in_flight.clear()

    def release(self) -> None:
        """Let go of groups, buffers and observers."""
        for pool in (*self.weight_pools.values(), *self.grad_pools.values()):
            for buffer in pool.buffers:
                buffer.owner = None  # groups and buffers refer to each other
        self.groups = self.observers = ()
        self.weight_pools.clear()
        self.grad_pools.clear()

    def reset(self) -> None:
        """Drop reduces that are in flight, as after an interrupted backward."""
        for buffer in self.in_flight:
            buffer.handle.abandon()
        self.last_reduce = None
        self.in_flight.clear()
        self.reduced.clear()

    def warn_of_kept_grads(self) -> None:
        """Say once what it costs to keep unsharded gradients from one backward to the next."""
        if not self.has_warned and self.gather.comm.rank == 0:
            keeping = [g for g in self.groups if not (g.spec.settings.reduces or g.is_alone_in_grad_buffer)]
            nbytes = sum(unsharded_grad_bytes([flat for flat in group.flats if flat.trainable]) for group in keeping)
            is_planned = any(group.spec.role is not None for group in keeping)  # by shard()
            _log.warning(
                "set_requires_gradient_sync(False) keeps unsharded gradients on every rank: %d bytes more per rank. "
                "Where every micro-batch may be reduced, leaving it on costs none%s",
                nbytes,
                "; zero_stage=1 of shard() has them in its plan" if is_planned else "",
            )
        self.has_warned = True


class ParamGroup:
    """One group in one assembly of the engine.

    Args:
        context: shared with the other groups of the root.
        spec: its parameters and settings.
        role: which buffers it takes.
    """

    def __init__(self, context: GroupContext, spec: ParamGroupSpec, role: Role) -> None:
        self.context = context
        self.spec = spec
        self.name = name = spec.name
        self.role = role
        self.flats = spec.flats
        self.params: tuple[FSDPParam, ...] = tuple(param for flat in spec.flats for param in flat.params)
        self.index = -1
        """Number among the groups of its role."""
        self.unsharded: UnshardedParams
        """Where the weights are gathered unless that buffer is in use."""
        self.held: UnshardedParams | None = None
        """Weights that ``unshard()`` of the module has asked for outside of a forward."""
        self.registered: list[Sequence[Tensor]] = []
        """What the modules see as their parameters, innermost call last."""
        self.grads: UnshardedGrads | None = None
        """Where gradients are written; set from the first one to the reduce."""
        self.deferred: dict[FlatParam, list[bool]] = {}
        """Which parameters have gradients that ``_defer`` has taken in for the next reduce."""
        self.is_alone_in_grad_buffer = False
        """Whether no other group's gradients are written where this one's are."""
        self.replicated: tuple[FSDPParam, ...] = ()
        """Replicated parameters that its modules use."""
        self.uses_root_params = False
        """Whether a module of it uses a parameter of the root's group, tied to one elsewhere."""
        # An embedding's backward needs its indices alone.
        only_embeddings = all(type(module) is nn.Embedding for module in spec.modules)
        self.unshards_in_backward = spec.settings.unshards_in_backward and not only_embeddings
        self.forward_span, self.backward_span = Span("forward", name), Span("backward", name)
        self._gather_span, self._reduce_span = Span("gather", name), Span("reduce", name)
        self.forward_prefetch: tuple[ParamGroup, ...] = ()
        """Those that the settings of the same name name."""
        self.backward_prefetch: tuple[ParamGroup, ...] = ()
        self.recomputed_in = -1
        """The last backward in which activation checkpointing has run this group again."""
        self.registers_held = False
        self.accepts_in: int | None = None
        """The backward that has asked last whether to write gradients; -1 outside of one."""
        self._assigned_grads: UnshardedGrads | None = None
        self._kept_grads: UnshardedGrads | None = None
        """Gradients kept from one backward to the next, while these do not reduce."""
        self._unpooled: Buffer | None = None
        for param in self.params:
            param.acquire_grad_buffer = self.acquire_grad_buffer

    @property
    def trainable(self) -> bool:
        """Whether one of the parameters that its modules use requires a gradient."""
        return any(param.parameter.requires_grad for param in (*self.params, *self.replicated))

    # Weights -----------------------------------------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """Return what changes whenever a shard does, by ``FlatParam``."""
        return tuple([flat.sharded._version for flat in self.flats])

    def is_in(self, buffer: Buffer) -> bool:
        """Return whether ``buffer`` holds, or is being filled with, this group's present weights."""
        return buffer.owner is self and not buffer.expired and buffer.versions == self.versions()

    def expire(self, flats: Sequence[FlatParam]) -> None:
        """Have weights of ``flats`` that were gathered before the last pass ended gathered anew, whatever their
        versions."""
        for unsharded in (self.unsharded, self.held):
            buffer = None if unsharded is None else unsharded.buffer
            if buffer is not None and buffer.owner is self and buffer.filled_in < self.context.passes:
                buffer.expired = flats
        for flat in flats:
            flat.all_gather.expire()

    def gathered(self, flat: FlatParam) -> tuple[int | None, Tensor]:
        """Return what the assigned buffer holds of ``flat``: its version, None if it is not there, and its room."""
        buffer, place = self.unsharded.buffer, self.flats.index(flat)
        self.context.wait(buffer.handle)
        return buffer.versions[place] if buffer.owner is self else None, self.unsharded.flat[place]

    def prefetch(self) -> None:
        """Gather into the assigned buffer unless somebody uses it. A prefetch that is lost costs time, nothing else."""
        buffer = self.unsharded.buffer
        if self.flats and buffer.users == 0 and not self.is_in(buffer):
            self._all_gather(self.unsharded)

    def unshard(self) -> UnshardedParams:
        """Return the weights, gathered and ready, in a buffer that stays as it is until ``release``."""
        if self.held is not None and not self.is_in(self.held.buffer):
            self.release_held()  # the weights have changed since
        unsharded = self.use(self.held or self.unsharded)
        self.context.wait(unsharded.buffer.handle)
        return unsharded

    def unshard_for_backward(self, unsharded: UnshardedParams, lent: int, *, needed: bool) -> bool:
        """Put the weights back where a forward has read them; return whether the buffer is in use by that now.

        Args:
            unsharded: what the forward has read.
            lent: how many users of the buffer wait for this backward to end, and then gather again.
            needed: whether they are needed for sure; else another group that uses the buffer is left alone.
        """
        buffer = unsharded.buffer
        if not self.is_in(buffer):
            if buffer.users and not needed:
                return False
            if buffer.users > lent:
                raise RuntimeError(
                    f"the weights of unit '{self.name}' are needed where others are in use, as after an interrupted "
                    "backward, or by torch.autograd.grad within the forward of another unit: run the forward again, "
                    "and what differentiates it behind the forward"
                )
            self._all_gather(unsharded)
        buffer.users += 1
        self.context.wait(buffer.handle)
        return True

    def unshard_again(self, unsharded: UnshardedParams) -> None:
        """Put the weights back where another group has used their buffer, which counts their use already."""
        if not self.is_in(unsharded.buffer):
            self._all_gather(unsharded)
        self.context.wait(unsharded.buffer.handle)

    def release(self, unsharded: UnshardedParams) -> None:
        """End one use of the weights that ``unshard`` has returned."""
        buffer = unsharded.buffer
        buffer.users = max(buffer.users - 1, 0)
        stream = self.context.gather_stream
        if stream.is_ordered:
            buffer.last_use = stream.record(buffer.last_use)

    def release_held(self) -> None:
        """Let go of what ``unsharded.hold`` has gathered."""
        held, self.held = self.held, None
        if held is not None:
            held.buffer.handle.wait()  # on a CPU: its all-gather may write to an overflow buffer, which is freed here
            self.release(held)
        if self.registers_held:
            self.registers_held = False
            self.register_sharded()
            for param in () if self.context.in_forward else self.replicated:  # a forward sees them to its own end
                param.register_sharded()

    def use(self, unsharded: UnshardedParams) -> UnshardedParams:
        """Use a buffer, or an overflow buffer where another group uses that; gather unless the weights are there."""
        if not self.is_in(unsharded.buffer):
            if unsharded.buffer.users:
                unsharded = self.overflow()
            self._all_gather(unsharded)
        unsharded.buffer.users += 1
        return unsharded

    def _all_gather(self, unsharded: UnshardedParams) -> None:
        context, buffer, versions = self.context, unsharded.buffer, self.versions()
        held: Sequence[int | None] = buffer.versions if buffer.owner is self else (None,) * len(versions)
        # Frozen weights that lie there still are not gathered again because others, an adapter's, have changed; deltas
        # build on what every rank has there.
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
        whole = len(stale) == len(held)
        context.fingerprint.agree("gather" if whole else f"gather {[each[2] is None for each in stale]}", self.name)
        buffer.owner = None  # unless this goes well: what is half gathered is to be gathered anew
        buffer.fills += 1
        buffer.filled_in = context.passes
        span = handle = None
        if context.traces:
            span = self._gather_span.of(sum(all_gather.planned_bytes() for all_gather, *_ in stale))
            handle = span.start()
        completes = any(all_gather.has_finish for all_gather, *_ in stale)
        issue = partial(context.gather_stream.issue, buffer.handle, start, finish if completes else None)
        context.explained(partial(issue, after=buffer.last_use))
        if span is not None:
            span.end(handle)
        buffer.owner, buffer.versions, buffer.expired = self, versions, ()
        context.counters.gathered_bytes += sum(all_gather.sent_bytes for all_gather, *_ in stale)

    def overflow(self) -> UnshardedParams:
        self.context.counters.overflow_buffers += 1
        with torch.inference_mode(False):  # a later backward may read it
            buffer = Buffer(unsharded_bytes(self.flats), self.context.device, self.context.gather_stream)
            buffer.last_use = self.context.gather_stream.record()  # what lay there before is no longer read then
            return UnshardedParams(buffer, self.flats)

    def leaves(self, unsharded: UnshardedParams) -> Sequence[Tensor]:
        """Return the weights as leaves of a graph of their own."""
        for param, leaf in zip(self.params, unsharded.leaves, strict=True):
            if leaf.requires_grad is not param.parameter.requires_grad:
                leaf.requires_grad_(param.parameter.requires_grad)
        return unsharded.leaves

    def register_unsharded(self, views: Sequence[Tensor]) -> None:
        """Let the modules see these weights."""
        self.registered.append(views)
        for param, view in zip(self.params, views, strict=True):
            param.register_unsharded(view)

    def register_sharded(self) -> None:
        """Let the modules see what they saw before ``register_unsharded``."""
        self.registered.pop()
        if self.registered:
            for param, view in zip(self.params, self.registered[-1], strict=True):
                param.register_unsharded(view)
        else:
            for param in self.params:
                param.register_sharded()

    # Gradients ---------------------------------------------------------------------------------------------------

    def acquire_grad_buffer(self) -> None:
        """Find room for the gradients that the backward under way is about to write, if it wants any."""
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
            flats = tuple(flat for flat in self.flats if flat.trainable)
            if not flats:
                return
            for flat in flats:
                self.context.bind_reduce(flat)
            self.grads = self._free_grads(flats)
            self.grads.buffer.owner = self
            self.context.wait(self.grads.buffer.handle)  # the reduce that reads the buffer has left it
            for param in self.params:
                param.written = False
        else:
            self._check_not_unfrozen(self.grads)
        for param, view in zip(self.grads.params, self.grads.views, strict=True):
            param.unsharded_grad = view

    def _check_not_unfrozen(self, grads: UnshardedGrads) -> None:
        """Raise a ``RuntimeError`` where gradients would be lost: the buffer of earlier micro-batches has no room."""
        for flat in self.flats:
            if flat.trainable and flat not in grads.flats:
                raise RuntimeError(
                    f"'{flat.name}' was unfrozen while gradients of micro-batches are kept for a later reduce: run a "
                    "backward with set_requires_gradient_sync(True) first"
                )

    def stop_accepting_grads(self) -> None:
        """Write no more gradients before the buffer is acquired again; those written remain."""
        self.accepts_in = None
        for param in self.params:
            param.unsharded_grad = param.accepts_in = None

    def _free_grads(self, flats: tuple[FlatParam, ...]) -> UnshardedGrads:
        if not (self.spec.settings.reduces or self.is_alone_in_grad_buffer or self._defers):
            if self._kept_grads is None or self._kept_grads.flats != flats:
                self._kept_grads = self._overflow_grads(flats)
                self.context.warn_of_kept_grads()
            return self._kept_grads
        if self._assigned_grads is None or self._assigned_grads.flats != flats:
            self._assigned_grads = UnshardedGrads(self.grad_buffer(unsharded_grad_bytes(flats)), flats)
        if self._assigned_grads.buffer.owner is None:
            return self._assigned_grads
        # It is an enclosing group's, or of one whose gates have not all run.
        self.context.counters.overflow_buffers += 1
        return self._overflow_grads(flats)

    def grad_buffer(self, nbytes: int) -> Buffer:
        """Return the pool's buffer for gradients, or one of its own where they do not fit, as after unfreezing."""
        pool = self.context.grad_pools.get(self.role)
        if pool is not None and nbytes <= pool.buffer_bytes:
            return pool.assigned(self.index)
        if self._unpooled is None or self._unpooled.data.nbytes < nbytes:
            self._unpooled = Buffer(nbytes, self.context.device, self.context.reduce_stream)
        return self._unpooled

    def _overflow_grads(self, flats: tuple[FlatParam, ...]) -> UnshardedGrads:
        buffer = Buffer(unsharded_grad_bytes(flats), self.context.device, self.context.reduce_stream)
        return UnshardedGrads(buffer, flats)

    @property
    def _defers(self) -> bool:
        """Whether its reduce-scatters can take in gradients that are not to be reduced yet."""
        return all(flat.reduce_scatter.defers for flat in self.flats if flat.trainable)

    @property
    def unplanned_bytes(self) -> int:
        """Bytes of buffers for gradients kept from one backward to the next, or that do not fit into the pool's."""
        kept = None if self._kept_grads is None else self._kept_grads.buffer
        return sum(buffer.data.nbytes for buffer in (kept, self._unpooled) if buffer is not None)

    def accumulate_leaf_grads(self, unsharded: UnshardedParams) -> None:
        """Take over gradients from leaves, where ops that reentrant checkpointing ran again have left them."""
        for param, leaf in zip(self.params, unsharded.leaves, strict=True):
            if leaf.grad is not None:
                param.accumulate_grad(leaf.grad)
                leaf.grad = None

    def post_backward(self) -> None:
        """All gradients of a backward are written: reduce them, or keep them for a later backward that does."""
        if self.spec.settings.reduces:
            self.reduce()
        elif self.grads is not None and self.grads is not self._kept_grads and self._defers:
            self._defer(self.grads)

    def reduce(self) -> None:
        """Issue the reduce; its sum is added to ``.grad`` when the next one is issued or the backward ends."""
        self.acquire_grad_buffer()
        grads, context = self.grads, self.context
        if grads is None:
            return
        used = self._take(grads)
        for observer in context.observers:
            observer.before_reduce(self.name)
        sums = context.replicas is None or context.replicas.sums
        context.fingerprint.agree("reduce" if sums else "reduce, not over replicas,", self.name, self.flats)
        span = handle = None
        if context.traces:
            span = self._reduce_span.of(sum(flat.reduce_scatter.planned_bytes() for flat in grads.flats))
            handle = span.start()
        for flat, whole, written in zip(grads.flats, grads.flat, used, strict=True):
            finish = partial(_complete_reduce, flat, whole, written)
            context.issue_reduce(grads.buffer, partial(flat.reduce_scatter.start, whole), finish)
            context.reduced.append((flat, written))
            context.counters.reduced_bytes += flat.reduce_scatter.sent_bytes
        if span is not None:
            span.end(handle)
        for observer in context.observers:
            observer.after_reduce(self.name)

    def _defer(self, grads: UnshardedGrads) -> None:
        """Let the reduce-scatters take the gradients in, for the next ``reduce``."""
        self.deferred.update(zip(grads.flats, self._take(grads), strict=True))
        for flat, whole in zip(grads.flats, grads.flat, strict=True):
            self.context.issue_reduce(grads.buffer, partial(_defer, flat, whole))

    def _take(self, grads: UnshardedGrads) -> list[list[bool]]:
        """Complete the gradients in the buffer, and return which parameters have some, deferred ones among them."""
        used = grads.zero_unwritten()
        if self.deferred:
            for flat, written in zip(grads.flats, used, strict=True):
                for place, before in enumerate(self.deferred.pop(flat, ())):
                    written[place] |= before
        self.stop_accepting_grads()
        self.grads = grads.buffer.owner = None
        return used

    def reset(self) -> None:
        """Drop what an interrupted forward or backward has left behind, gradients not reduced yet with it."""
        if self.registered:
            del self.registered[1:]
            self.register_sharded()
        self.registers_held = False  # the modules see none of them any more
        self.release_held()
        grads, self.grads = self.grads, None
        if grads is not None:
            grads.buffer.owner = None
        self.deferred.clear()
        self.stop_accepting_grads()
        for leaf in self.unsharded.leaves:  # where reentrant checkpointing leaves gradients
            leaf.grad = None


def prefetch(groups: Sequence[ParamGroup]) -> None:
    """Gather groups that are used soon, first ones first: not into a buffer that an earlier one of them takes."""
    taken: list[Buffer] = []
    for group in groups:
        if group.unsharded.buffer not in taken:
            taken.append(group.unsharded.buffer)
            group.prefetch()


def _complete_reduce(flat: FlatParam, grads: Tensor, used: list[bool]) -> None:
    flat.add_sum(flat.reduce_scatter.finish(grads), used)


def _defer(flat: FlatParam, grads: Tensor, async_op: bool) -> Sequence[dist.Work]:
    flat.reduce_scatter.defer(grads)
    return ()
