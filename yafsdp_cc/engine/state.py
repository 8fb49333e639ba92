"""Forwards and backwards of a sharded model: when its groups are unsharded, and when their gradients are reduced.

One ``FSDPState`` serves all groups below a root module. One ``IterationState`` is one forward of the root and the
backwards through it; within it, each ``GroupCall`` is one forward of a group:

    pre_forward    all-gather, gate the inputs, show views of the weights to the modules, prefetch the next group
    post_forward   let the buffer be filled again; hook the outputs
    pre_backward   (an output's gradient has come) gather again, prefetch, make room for gradients
    post_backward  (the gate of the group's last call has run) reduce; the root gate, last of all, waits and makes
                   gradients final

The forward settles the plan of the backward: the forward's calls in reverse, inner calls within outer ones:

    forward    a ( b ) c           backward    begin c, end c, begin a, begin b, end b, end a

When autograd reaches an output or a gate of a call, the engine runs the plan up to that point. So a rank on which
some parameters of a group go unused, and perhaps the whole group, issues the same collectives in the same order as the
other ranks.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.utils._pytree import tree_leaves

from yafsdp_cc.engine.autograd import convert_tensors, gate, gate_tensors, hook_outputs, narrow
from yafsdp_cc.engine.collectives import FINAL_REDUCE
from yafsdp_cc.engine.cuda_streams import on_stream
from yafsdp_cc.engine.param import owe
from yafsdp_cc.engine.param_group import prefetch
from yafsdp_cc.engine.replicated import hand_out_grads, usage_flags
from yafsdp_cc.engine.step_state import StepState, history, transient, unreduced
from yafsdp_cc.profiling import NVTX_LISTENS, Span
from yafsdp_cc.ranks.checks import all_gather_objects
from yafsdp_cc.ranks.mesh import all_groups

if TYPE_CHECKING:
    from types import FrameType

    from yafsdp_cc.engine.param import FlatParam, FSDPParam, UnshardedParams
    from yafsdp_cc.engine.param_group import GroupContext, ParamGroup
    from yafsdp_cc.engine.protocols import Contents, Transfers
    from yafsdp_cc.engine.replicated import ReplicatedParams
    from yafsdp_cc.engine.spec import Collectives, ParamGroupSpec
    from yafsdp_cc.profiling import Handle

STATE, GROUP = "_yafsdp_cc_state", "_yafsdp_cc_group"
"""Names of the attributes of sharded modules with their ``FSDPState`` and their ``ParamGroup`` (None for the root)."""

_PACKAGE = Path(__file__).parents[1]
_OWN_FOLDERS = tuple(map(str, (_PACKAGE / "engine", _PACKAGE / "sharding", Path(torch.__file__).parent / "_dynamo")))
_MODULE_CALL = nn.Module.__module__
_REPLICATED_SPAN = Span("replicated")
_graph_task = torch._C._current_graph_task_id
"""Function that returns the id of the backward (autograd's graph task) under way in this thread, or -1."""
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def engine_of(param: FSDPParam) -> FSDPState | None:
    """Return the engine that ``param`` is a parameter of; None before an engine is made, and once it is gone."""
    engine = None if param.engine is None else param.engine()
    assert engine is None or isinstance(engine, FSDPState)
    return engine


class _ModelStep(StepState):
    """Members of an ``FSDPState`` that a step changes."""

    iteration: IterationState | None = transient(None)
    """Iteration of the root's forward under way; None outside of forwards."""
    _caller: _Caller | None = transient(None)
    """Caller of the forward of the root module that is under way."""
    interrupted: bool = transient(False)
    """Whether an exception ended a forward in ``pre_forward_of``, before the module itself ran."""
    entered: dict[nn.Module, list[Callable[[Any], Any] | None]] = transient(dict)
    """Functions to run on the outputs of modules whose forwards are under way, the innermost forward's last."""
    backwards: list[Backward] = transient(list)
    """Backwards under way, each within the one before it; an exception that ends one leaves it in this list."""
    _hooked: dict[FSDPParam, None] = transient(dict)
    """Parameters whose post-accumulate-grad hooks are to run, in order, when the outermost backward returns."""
    awaited_backwards: int = history(0)
    """Number of forwards whose backwards may come, all with weights of the version ``_awaited_version``."""
    _awaited_version: int = history(-1)
    seen: tuple[int, bool, bool] = history((0, True, True))
    """At the last forward: ``steps``, whether gradients were enabled, and whether the model was in training mode."""
    _keeps_grads: bool = unreduced(False)
    """Whether a backward has left gradients that a later backward is to sum."""
    _has_new_grads: bool = history(False)
    """Whether a backward has made gradients final since the last forward."""
    _orders: dict[nn.Module, list[ParamGroup]] = history(dict)
    """Groups that the last forward of each called module has run, in order; for the root at first in module order."""


@dataclass(eq=False, repr=False)
class FSDPState(_ModelStep):
    """The engine of one root module; a setting that needs other buffers has another engine assembled in its place."""

    model: nn.Module
    """The root module."""
    specs: Sequence[ParamGroupSpec]
    """Specs of all groups, in module order, the root's own last."""
    groups: Sequence[ParamGroup]
    """Groups with sharded parameters and, the root's aside, groups with replicated ones alone, in module order."""
    root_group: ParamGroup | None
    """Group of the sharded parameters that are in no other group; None if there are none."""
    replicated: ReplicatedParams
    collectives: Collectives
    """Factory of the collectives of all groups with compression; the exact factory (``spec.EXACT``) without any."""
    context: GroupContext
    """Communicators, streams and counters that the groups share."""
    leaf: Tensor
    """Input of the root gates; a backward reaches this leaf if and only if it wants the parameters' gradients."""
    transfers: Transfers | None
    """Copies of offloaded shards and gradients between host memory and the device; None if none are offloaded."""
    contents: Contents = field(init=False)

    def __post_init__(self) -> None:
        policy = self.specs[-1].policy if self.specs[-1].modules == (self.model,) else None
        self._input_dtype = None if policy is None or not policy.cast_forward_inputs else policy.param_dtype
        self._input_device = None if self.context.device.type == "cpu" else self.context.device
        self._output_dtype = None if policy is None else policy.output_dtype
        self.flats: tuple[FlatParam, ...] = tuple(flat for group in self.groups for flat in group.flats)
        """All sharded ``FlatParam``, in module order."""
        sharded = [param for group in self.groups for param in group.params]
        self.params: tuple[FSDPParam, ...] = (*sharded, *self.replicated.params)
        for index, param in enumerate(self.params):
            param.index = index
        self.root_replicated: tuple[FSDPParam, ...] = ()
        """Replicated parameters of no group's modules: a rank's forward may use them before its first group, or not."""
        self.outdated = False
        """Whether a setting has changed that takes effect only when the engine is made anew."""
        self.retired = False
        """Whether this engine has given up its buffers and parameters (``retire``)."""
        self.steps = 0
        """Number of steps of torch's optimizers over parameters of this engine, or over the memory of its shards."""
        self.post_optim_event: tuple[torch.Event, list[tuple[int, ...]]] | None = None
        """Event that all-gathers wait for instead of the caller's stream, and the weights' versions at that event."""
        self._iterations: weakref.WeakSet[IterationState] = weakref.WeakSet()
        """Iterations whose graphs are alive on this rank; ranks may differ, as Python frees graphs when it likes."""
        self._orders[self.model] = [group for group in self.groups if group is not self.root_group]
        self.called = self.model
        """Module, the root or a part of it, whose forward was called last."""
        self.order: list[ParamGroup] = []
        """Groups that the last forward of ``called`` has run so far, in order."""
        self._cursor = 0
        self._leaf_stream = self.context.gather_stream.caller()
        """Stream of autograd's node of ``leaf``; at the end of ``backward()`` the caller's stream waits for it."""

    def __repr__(self) -> str:
        what = "retired" if self.retired else self.context.describe(None)
        return f"engine of {type(self.model).__name__}, {self.steps} steps: {what}"

    @property
    def is_idle(self) -> bool:
        """Whether no gradient waits for a reduce: all that backwards have written are fully reduced."""
        replicas = self.context.replicas
        outputs = () if replicas is None else replicas.outputs
        # not ``self.params``: ranks differ in which parameters have gradients, and all have to return the same
        return not any(each.has_unreduced() for each in (self, self.context, *self.groups, *outputs))

    def step_states(self) -> Iterator[StepState]:
        """Return all objects of the engine that have members which a step changes."""
        replicas = self.context.replicas
        yield from (self, self.context, self.context.fingerprint, *self.groups, *self.params)
        yield from () if replicas is None else (replicas, *replicas.outputs)

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward of a forward is under way or may come, alike on all ranks where a weight is trained.

        Forwards are counted, as ranks differ in which graphs are alive: a log of one rank may keep a loss, or a thread
        of gloo for a moment. No backward comes once the weights have changed; it would raise.
        """
        is_in_forward = self.iteration is not None and self.iteration.has_gate
        return is_in_forward or (self.awaited_backwards > 0 and self._awaited_version == self._version())

    def may_retire(self) -> bool:
        """Return whether another engine may take the parameters over: nothing is under way, and no backward is awaited.

        Ranks tell each other whether a forward's graph is alive, in a collective that no rank leaves out: with a frozen
        model only ranks whose inputs require gradients await a backward.
        """
        if self.iteration is not None or _graph_task() != -1 or not self.is_idle:
            return False
        has_graph = any(iteration.awaited_version == self._awaited_version for iteration in self._iterations)
        if any(all_gather_objects(self.awaits_backward and has_graph, all_groups(self.context.info.mesh))):
            return False
        self.awaited_backwards = 0
        return True

    def retire(self) -> None:
        """Release this engine's buffers, so that another one may take the parameters over."""
        is_under_way = self.iteration is not None or self.interrupted or not self.is_idle
        if is_under_way or self.backwards or any(group.held is not None for group in self.groups):
            self.reset()
        for group in self.groups:
            group.unsharded.buffer.handle.wait()
        self.retired = True
        # Groups and this state refer to each other: without this, buffers would stay until Python collects cycles.
        self.groups, self.root_group, self.flats, self._orders, self.order = (), None, (), {}, []
        self.context.release()

    def _version(self) -> int:
        """Return the sum of all shards' versions, which rises whenever torch sees a write to a weight."""
        return sum([flat.sharded._version for flat in (*self.flats, *self.replicated.flats)])

    # A forward of the root module ----------------------------------------------------------------------------------

    def pre_root_forward(self, called: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        """Begin a forward of the root module, or of the part of it that was ``called``; return its arguments, and the
        function to run on its output."""
        self.drop_interrupted()
        if self.iteration is not None:  # the model was called within its own forward
            return args, kwargs, lambda output: output
        iteration = None
        if _graph_task() == -1:
            iteration = self.begin_iteration(called)
        elif torch.is_grad_enabled() and all(each.task != _graph_task() for each in self.backwards):
            if any(param.parameter.requires_grad for param in self.params):
                _check_recomputation("the model")
            self.enter_backward()  # a recomputed forward may come before the backward reaches any output
        if (self._input_dtype, self._input_device) != (None, None):
            args, kwargs = convert_tensors((args, kwargs), self._input_dtype, self._input_device)
        if iteration is not None and torch.is_grad_enabled():
            args, kwargs = gate_tensors(iteration.gate, args, kwargs)
        end = None
        if self.root_group is not None:
            args, kwargs, end = self.pre_forward(self.root_group, args, kwargs)
        return args, kwargs, partial(self.post_root_forward, iteration, end)

    def post_root_forward(self, iteration: IterationState | None, end: Callable[[Any], Any] | None, output: Any) -> Any:
        """End a forward of the root module, also one that raised (``output`` is None then); return what callers get.

        Args:
            iteration: None where activation checkpointing has run the forward again.
            end: function that ends the forward of the root's own group; None without such a group.
            output: output of the module.
        """
        if end is not None:
            output = end(output)
        if iteration is None:
            return convert_tensors(output, self._output_dtype)
        self.end_iteration(output)
        hook = iteration.pre_backward if iteration.has_gate else None
        return hook_outputs(output, self._output_dtype, hook, iteration.first_node)

    def drop_interrupted(self) -> None:
        """Reset if an interrupt, of which no hook of a module learns, has ended the forward under way."""
        if self._caller is not None and not self._caller.is_running():
            self.reset()

    def begin_iteration(self, called: nn.Module) -> IterationState:
        """Begin a forward of ``called``: reset after an interrupted one, take in new weights, gather first groups."""
        if self.backwards or self.interrupted:
            self.reset()
        self.contents.check()
        context, self._hooked = self.context, {}  # drop hooks of gradients that an exception kept from running
        context.traces = profiler._is_profiler_enabled or NVTX_LISTENS
        for observer in context.observers:  # before weights expire, as an observer may raise (``skip_together``)
            observer.before_forward()
        self.expire_weights()
        self.replicated.refresh()
        if not torch.is_grad_enabled():
            self.replicated.register_unsharded()
        stepped, self.post_optim_event = self.post_optim_event, None
        if stepped is not None:
            context.gather_stream.wait_event(stepped[0])
        if stepped is None or stepped[1] != [group.versions() for group in self.groups]:
            context.gather_stream.wait_for_caller()  # the optimizer's step is on the caller's stream
        self._caller = _Caller()  # ``drop_interrupted`` finds an interrupt of what follows by ``_caller``
        self.iteration = iteration = IterationState(self, context.gather_stream.caller())
        self._iterations.add(iteration)
        context.in_forward = True
        self.called, self.order, self._cursor = called, [], 0
        prefetch(self._orders.get(called, [])[:2])
        return iteration

    @property
    def is_cleared(self) -> bool:
        """Whether gradients were made final since the last forward, and every ``.grad`` is None again."""
        return self._has_new_grads and all(param.parameter.grad is None for param in self.params)

    def expire_weights(self) -> None:
        """Let weights be gathered anew that may have been written since the last forward without torch counting it.

        [Note: Weights that are gathered once for several forwards] An optimizer's step and what torch counts raise the
        versions of shards. Writes by hand to the ``.data`` of a shard, its NumPy array or its address do not, and one
        rank alone cannot tell: all ranks have to gather alike. So, by what is the same on all ranks, weights are used
        again only where somebody relies on that and nothing hints at a write: between micro-batches, where gradients
        are there and no optimizer has stepped, and in evaluation if the settings keep weights. They are gathered anew
        where gradients were cleared without an optimizer of torch's, as by a loop that makes its own steps, from
        ``train()`` to ``eval()`` or back, where averages are swapped in, and, without such an optimizer, each time.
        """
        now, is_cleared = (self.steps, torch.is_grad_enabled(), self.model.training), self.is_cleared
        (steps, _, is_training), before = now, self.seen
        self.seen, self._has_new_grads = now, False
        keeps = steps != before[0] or (steps > 0 and is_training is before[2] and not is_cleared)
        if keeps and now[1] and before[1]:
            return
        for group in self.groups:
            stays = group.spec.settings.keeps_unsharded
            if not (stays and keeps):
                # Delta all-gathers build on the buffer's weights after a step, in this run or before its checkpoint.
                gathers = [(flat, flat.all_gather) for flat in group.flats if flat.trainable or not stays]
                group.expire([flat for flat, by in gathers if not (by.is_resumed or (steps and by.builds_on_held))])

    def end_iteration(self, output: Any) -> None:
        """End the forward of an iteration, whose module returns ``output``."""
        iteration, self.iteration, self._caller = self.iteration, None, None
        if iteration is not None:
            iteration.anchor = None  # the anchor is in the graph, which the iteration would keep alive
            if iteration.trains or iteration.trained:  # this forward counts as open: its backward may come
                iteration.awaited_version = version = self._version()
                if version != self._awaited_version:
                    self.awaited_backwards, self._awaited_version = 0, version
                self.awaited_backwards += 1
        self.context.in_forward = False
        self.context.passes += 1
        self._orders[self.called] = self.order
        self.replicated.register_sharded()
        self.wait_for_transfers()
        for flat in self.replicated.flats:
            flat.check_unwritten()
        if iteration is None or not (iteration.trains or iteration.trained):
            return
        # after a backward within the forward none comes later, unless an output requires a gradient
        if not iteration.was_reached or any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(output)):
            for observer in self.context.observers:
                observer.after_forward()

    def _prefetch_after(self, group: ParamGroup) -> None:
        """Gather the group that followed ``group`` in the last forward. A wrong guess costs one all-gather, no more.

        Every rank runs the same forwards, so every rank prefetches alike.
        """
        self.order.append(group)
        if group.forward_prefetch:
            prefetch(group.forward_prefetch)
        expected, cursor = self._orders.get(self.called, []), self._cursor
        if cursor >= len(expected) or expected[cursor] is not group:
            try:
                cursor = expected.index(group, cursor)
            except ValueError:
                return
        self._cursor = cursor + 1
        if self._cursor < len(expected) and not group.forward_prefetch:
            expected[self._cursor].prefetch()

    # A forward of a group ------------------------------------------------------------------------------------------

    def pre_forward(self, group: ParamGroup, args: Any, kwargs: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        """Begin a forward of a group's module: put weights in place, cast inputs and pass them through its gate; return
        the arguments, and the function to run on its output."""
        policy = group.spec.policy
        dtype = policy.param_dtype if policy.cast_forward_inputs else None
        if _graph_task() != -1:
            args, kwargs = convert_tensors((args, kwargs), dtype)
            return args, kwargs, partial(self.post_forward, self._pre_recomputation(group))
        self.drop_interrupted()
        is_outermost = self.iteration is None
        iteration = self.begin_iteration(group.spec.modules[0]) if self.iteration is None else self.iteration
        borrowed = None
        if is_outermost and group.uses_root_params:
            assert self.root_group is not None
            _, _, borrowed = self.pre_forward(self.root_group, (), {})
        unsharded = group.unshard(self._prefetch_after)
        device = self._input_device if is_outermost else None
        if (dtype, device) != (None, None):
            args, kwargs = convert_tensors((args, kwargs), dtype, device)
        call: GroupCall | None = None
        views: Sequence[Tensor] = unsharded.views
        if torch.is_grad_enabled():
            call = GroupCall(group, unsharded, iteration)
            stream, here = iteration.stream, self.context.gather_stream.caller()
            with nullcontext() if stream is None or stream == here else on_stream(stream):
                args, kwargs, views = self._gate(call, args, kwargs)
        group.register_unsharded(views)
        span = group.forward_span.start() if self.context.traces else None
        entered = GroupForward(group, unsharded, call, span, iteration if is_outermost else None, borrowed)
        return args, kwargs, partial(self.post_forward, entered)

    def post_forward(self, entered: GroupForward, output: Any) -> Any:
        """End a forward of a group's module: the buffer may be refilled, hooks of the outputs begin the backward."""
        group, unsharded = entered.group, entered.unsharded
        if entered.span is not None:
            group.forward_span.end(entered.span)
        dtype = group.spec.policy.output_dtype
        if _graph_task() != -1:
            # The recomputed forward has saved views of the weights, which the backward reads.
            self.enter_backward().keep_recomputed(group, unsharded)
            return convert_tensors(output, dtype)
        hook, first_node = None, 0
        if (call := entered.call) is not None:
            iteration = call.iteration
            call.last = len(iteration.calls) - 1
            # The hook keeps the iteration alive: the graph may outlive every other reference to the iteration.
            hook = partial(call.pre_backward, iteration)
            first_node = iteration.first_node
        group.register_sharded()
        output = hook_outputs(output, dtype, hook, first_node, unsharded.buffer.address)
        group.release(unsharded)
        if not group.spec.settings.keeps_after_forward:
            group.release_held()
        if entered.borrowed is not None:
            entered.borrowed(None)
        if entered.iteration is not None:
            self.end_iteration(output)
        if unsharded.was_written():
            group.forget(unsharded)
            raise RuntimeError(
                f"a forward of unit '{group.name}', or what came after its unshard(), has written to a weight in "
                "place, which is lost with the gathered copy: change sharded weights, for example under "
                "yafsdp_cc.whole_parameters(model, write=True)"
            )
        return output

    def _gate(self, call: GroupCall, args: Any, kwargs: Any) -> tuple[Any, Any, Sequence[Tensor]]:
        """Return the inputs behind the group's gate, and views of weights behind ``Narrow`` nodes (``autograd``)."""
        group, iteration = call.group, call.iteration
        if iteration.anchor is None:
            iteration.gate([])
        anchor: Any = iteration.anchor

        def through(tensors: list[Tensor]) -> list[Tensor]:
            nonlocal anchor
            # The backward is planned by ``is_expected``, which is equal on all ranks that train the same parameters.
            iteration.trains = call.is_expected = iteration.trains or bool(tensors) or group.trainable
            anchor, *gated = gate(call, anchor, *tensors)
            return list(gated)

        args, kwargs = gate_tensors(through, args, kwargs)
        views = [
            narrow(anchor, param, view) if param.parameter.requires_grad else view
            for param, view in zip(group.params, call.unsharded.views, strict=True)
        ]
        return args, kwargs, views

    def _pre_recomputation(self, group: ParamGroup) -> GroupForward:
        """Begin a forward that activation checkpointing runs again inside the backward.

        The graph of a recomputed forward is thrown away, so nothing is gated. The backward reads the tensors that this
        forward saves, so the weight buffer is kept until the backward is over.
        """
        if torch.is_grad_enabled():
            _check_recomputation(f"unit '{group.name}'")
        self.enter_backward()
        unsharded = group.unshard()
        group.register_unsharded(group.leaves(unsharded))
        span = group.forward_span.start() if self.context.traces else None
        return GroupForward(group, unsharded, None, span)

    # A backward ----------------------------------------------------------------------------------------------------

    def _stop_awaiting(self, iteration: IterationState) -> None:
        """Uncount a forward whose backward has come, unless that backward keeps the graph for another one."""
        iteration.was_reached = True
        if not _keeps_graph():
            if iteration.awaited_version == self._awaited_version:
                self.awaited_backwards -= 1
            iteration.awaited_version = None

    def reach(self, iteration: IterationState) -> Backward:
        """Take note that a backward has come to ``iteration``; return that backward."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True went through a sharded model: weights that a second backward "
                "would read are gone by then. Compute gradient penalties on an unsharded model"
            )
        backward = self.enter_backward()
        # With gradients, the root gate's backward lowers the count of open forwards; without, it may never run.
        if not backward.wants_grads:
            self._stop_awaiting(iteration)
        return backward

    def check_flow(self, name: str, grads: Sequence[Tensor | None]) -> None:
        """Raise a ``RuntimeError`` if a backward within another one has reached weights and no input.

        Behind the gate the inner backward would run the nodes of the outer one: custom functions would run on zeros,
        and tensors that the outer backward needs would be freed.
        """
        if len(self.backwards) > 1 and grads and all(grad is None for grad in grads):
            raise RuntimeError(
                f"a backward within a backward has come to the weights of {name}, and to none of its inputs: compute "
                "that loss from the inputs themselves, not from detached ones, with retain_graph=True, or add it to "
                "the loss of the outer backward"
            )

    def enter_backward(self) -> Backward:
        """Return the backward that autograd is running in this thread, begun if it is a new one."""
        task = _graph_task()
        if self.backwards and self.backwards[-1].task == task:
            return self.backwards[-1]
        self.drop_interrupted()
        if self.retired:
            raise RuntimeError(
                "how the model is sharded was changed since this forward (fully_shard around it, set_reshard_after_"
                "forward, ...): run the forward again"
            )
        if self.backwards and not self.backwards[0].is_running():
            self.reset()
        while self.backwards and (last := self.backwards[-1]).task != task:
            if last.is_running() and all(each.task != task for each in self.backwards):
                return self._begin_backward(task)  # the new backward runs within the last one
            self._end_backward(last)  # a custom function has caught an exception of its own backward
        return self.backwards[-1] if self.backwards else self._begin_backward(task)

    def _begin_backward(self, task: int) -> Backward:
        wants_grads = self.context.wants_grads
        reduces = wants_grads and not any(each.reduces for each in self.backwards)
        backward = Backward(task, wants_grads, reduces)
        end = partial(self._return_from_backward, backward)
        backward.is_running = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        with torch.no_grad():
            if not self.backwards:
                self.context.traces = profiler._is_profiler_enabled or NVTX_LISTENS
                if self.iteration is None:  # recomputed forwards see the replicated parameters as leaves
                    self.replicated.register_unsharded()
            if reduces or not self.backwards:
                for observer in self.context.observers:
                    observer.before_backward()
        self.backwards.append(backward)
        return backward

    def finish_backward(self, backward: Backward) -> None:
        """End a backward: reduce what is not reduced yet, and make gradients final unless a later backward does."""
        context = self.context
        if any(param.parameter.requires_grad for param in self.params):
            backward.release_recomputed()
            for group in self.groups:  # a backward within this one, or an earlier one, may have left gradients
                group.collect_grads(group.held)
                on_leaves = any(leaf.grad is not None for leaf in group.unsharded.leaves)
                if on_leaves or group.grads is not None or group.deferred or group.owes_reduce:
                    group.post_backward()
            sums_over_replicas = context.replicas is None or context.replicas.sums
            is_synced = any(spec.settings.requires_gradient_sync for spec in self.specs)
            self._keeps_grads = not (sums_over_replicas and is_synced)
            if not self._keeps_grads:
                self._make_grads_final()
            else:
                owe(chain(self.replicated.params, *(flat.params for flat, _ in context.reduced)))
        context.wait_for_reduces()  # wait also for stores of deferred gradients, which read their buffers
        for group in self.groups:
            group.stop_accepting_grads()
        stream = context.gather_stream.caller()
        if stream is not None and self._leaf_stream is not None and stream != self._leaf_stream:
            # autograd's caller waits for streams of leaves alone; gradients of sharded parameters end at ``Narrow``
            self._leaf_stream.wait_event(stream.record_event())
        self._end_backward(backward)

    @property
    def final_reduce(self) -> str:
        """Name of the reduce behind which gradients are final; ranks compare it, as one may have skipped a backward."""
        return f"replicated parameters, backwards awaited: {self.awaited_backwards}"

    def _make_grads_final(self) -> None:
        """Wait for all reduces, reduce replicated gradients, and learn which parameters other ranks have used."""
        context, replicated = self.context, self.replicated
        for observer in context.observers:
            observer.after_backward()
        context.wait_for_reduces()
        if context.replicas is not None:
            context.explained(context.replicas.all_reduce_kept)
        reduced: dict[FSDPParam, bool] = {}
        for flat, used in context.reduced:
            for param, was_written in zip(flat.params, used, strict=True):
                reduced[param] = was_written or reduced.get(param, False)
        reduced |= {param: param.written for param in replicated.params}
        flags = usage_flags(reduced, len(self.params), self._is_fed)
        context.reduced.clear()
        context.fingerprint.agree(FINAL_REDUCE, self.final_reduce, replicated.flats, context.describe)
        with _REPLICATED_SPAN if context.traces else nullcontext():
            totals = context.explained(partial(replicated.all_reduce, flags))
        context.counters.reduced_bytes += replicated.sent_bytes
        replicated.add_to_grads()
        self._has_new_grads = True
        self.wait_for_transfers()
        is_alone = context.gather.comm.world == 1 and context.replicas is None
        self._hooked.update(dict.fromkeys(hand_out_grads(reduced, None if is_alone else totals)))
        for observer in context.observers:
            observer.after_final_reduce()

    def _is_fed(self, param: FSDPParam) -> bool:
        """Return whether error feedback has brought a gradient of ``param``, which perhaps no rank has used."""
        if param.flat is None or not any(each.feeds_back for each in param.flat.sum_collectives):
            return False
        self.wait_for_transfers()
        return bool(param.local_grad.any())

    def _end_backward(self, backward: Backward) -> None:
        """End ``backward`` and the backwards within it, unless it has ended already."""
        if backward not in self.backwards:
            return
        while backward in self.backwards:
            last = self.backwards.pop()
            for call in [*reversed(last.begun)]:
                call.end(last)
            last.release_recomputed()
        if self.backwards:
            self.backwards[-1].gather_again()
            return
        self.context.passes += 1
        if self.iteration is None:
            self.replicated.register_sharded()
            for group in self.groups:
                group.release_held()
        self.wait_for_transfers()

    def _return_from_backward(self, backward: Backward) -> None:
        """End ``backward``, which has run all its nodes, and after the outermost one run post-accumulate-grad hooks."""
        self._end_backward(backward)
        if not self.backwards:
            hooked, self._hooked = self._hooked, {}
            with torch.no_grad():
                for param in hooked:  # all ranks run hooks in this order, since hooks may communicate
                    for hook in (param.parameter._post_accumulate_grad_hooks or {}).values():
                        hook(param.parameter)

    def wait_for_transfers(self) -> None:
        """Block the host until no copy reads or writes shards in host memory, so that the caller may do so."""
        if self.transfers is not None:
            self.transfers.wait()

    def reset(self) -> None:
        """Drop the state of an interrupted forward or backward, and gradients that are not reduced yet."""
        context = self.context
        if any(each.has_unreduced() for each in self.step_states()):
            logging.getLogger("yafsdp_cc").warning(
                "a forward or backward was interrupted: gradients not reduced yet are dropped, those kept by "
                "set_requires_gradient_sync(False) too. Call zero_grad(), and run all micro-batches of the step again"
            )
        for buffer in context.in_flight:
            buffer.handle.abandon()
        if context.replicas is not None:
            context.replicas.abandon()
        for group in self.groups:  # prefetches under way read state of collectives that is dropped below
            group.unsharded.buffer.handle.wait()
        for flat in self.flats:
            for collective in (flat.all_gather, *flat.sum_collectives):
                collective.reset()
        self.wait_for_transfers()
        context.gather_stream.wait_for_caller()  # an interrupted user of a buffer has recorded no event to wait for
        for group in self.groups:
            group.reset()
        for leaf in self.replicated.leaves:
            leaf.grad = None
        self.replicated.register_sharded()
        for iteration in self._iterations:
            iteration._steps = []
        for each in self.step_states():
            each.drop_members()


class GroupForward(NamedTuple):
    """One forward of a group under way, from ``pre_forward`` to ``post_forward``."""

    group: ParamGroup
    unsharded: UnshardedParams
    call: GroupCall | None
    span: Handle | None
    iteration: IterationState | None = None
    """Iteration that consists of this forward alone; None within a forward of the root module."""
    borrowed: Callable[[Any], Any] | None = None
    """Function that ends a forward of the root's group, begun for a parameter that this group shares with it."""


@dataclass(eq=False)
class IterationState:
    """One forward of the root and the backwards through it: the root gate, and the calls of groups behind it.

    The root gate is made when its anchor is used first. Its backward node runs last of all: when that returns, every
    gradient is final.
    """

    state: FSDPState
    stream: torch.Stream | None
    """The caller's stream, on which all gates are made; None on a CPU.

    A node's backward runs on the stream that the node was made on. All nodes of the engine are made on one stream,
    whatever streams the model uses, so gradients are written one after the other and before they are reduced.
    """
    calls: list[GroupCall] = field(default_factory=list)
    trained: list[FSDPParam] = field(default_factory=list)
    """Replicated parameters whose gradients pass through the root gate."""
    trains: bool = False
    """Whether an input or a parameter seen so far requires a gradient: all ranks then expect a backward."""
    has_gate: bool = False
    """Whether the root gate was made, so that a backward may come."""
    was_reached: bool = False
    """Whether a backward has come to this iteration, perhaps within its forward."""
    awaited_version: int | None = None
    """Version of the weights at this forward, while it is counted in ``awaited_backwards``."""
    anchor: Tensor | None = None
    """Output of the root gate and input of every group's gate, so that the backward runs the root gate last."""
    first_node: int = 0
    """Number that autograd has given the root gate: nodes that a forward makes have rising numbers."""
    _pending: Counter[ParamGroup] = field(default_factory=Counter)
    """Number of calls of each group that the backward has not ended."""
    _steps: list[tuple[GroupCall, bool]] = field(default_factory=list)
    """Plan of the backward: calls in order, each with True where it ends and False where it begins."""
    _next: int = 0

    def gate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pass ``tensors`` and the replicated parameters through a ``Gate`` of the root; return the gated tensors."""
        self.has_gate = True
        self.trains = bool(tensors) or any(param.parameter.requires_grad for param in self.state.root_replicated)
        self.trained, inputs = self.state.replicated.register_unsharded()
        self.anchor, *gated = gate(self, self.state.leaf, *tensors, *inputs)
        assert self.anchor.grad_fn is not None
        self.first_node = self.anchor.grad_fn._sequence_nr()
        for param, view in zip(self.trained, gated[len(tensors) :], strict=True):
            param.register_unsharded(view)
        return list(gated[: len(tensors)])

    def pre_backward(self, _: Tensor) -> None:
        """Take note that a gradient has reached an output of the root."""
        self.state.reach(self)

    def post_backward(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Finish the backward when the root gate has run; gradients of replicated parameters go no further."""
        state = self.state
        backward = state.reach(self)
        backward.end_calls(self, -1)
        inputs = len(grads) - len(self.trained)
        state.check_flow("the model", grads[:inputs])
        if backward.wants_grads:
            state.replicated.accumulate_grads(self.trained, grads[inputs:])
            if backward.reduces:
                self.advance(backward, None, ends=True)
                state.finish_backward(backward)
                self._steps = []  # another backward makes a new plan
            state._stop_awaiting(self)
        return (*grads[:inputs], *(None for _ in self.trained))

    def advance(self, backward: Backward, call: GroupCall | None, *, ends: bool) -> None:
        """Run the plan of the backward up to where ``call`` begins or, with ``ends``, ends; None: the whole plan."""
        if not self._steps:
            self._plan_backward()
        place = len(self._steps) - 1 if call is None else call.places[ends]
        while self._next <= place:
            step, step_ends = self._steps[self._next]
            self._next += 1
            if not step_ends:
                step.begin(backward)
                continue
            step.end(backward)
            self._pending[step.group] -= 1
            is_over = self._pending[step.group] == 0
            backward.release_recomputed(step.group, only_last=not is_over)
            # On a GPU the reduce, which takes longer, is issued before the all-gather, as kernels of both wait for free
            # multiprocessors. On a CPU a reduce waits for the one before it, and would hold up the all-gather.
            reduces_first = self.state.context.reduce_stream.is_ordered
            if is_over and reduces_first:
                step.group.post_backward()
            self.prefetch_for_backward(step.group)
            if is_over and not reduces_first:
                step.group.post_backward()

    def prefetch_for_backward(self, group: ParamGroup) -> None:
        """Gather the groups that the backward begins next, or those that ``group``'s settings name instead."""
        steps = self._steps[self._next : self._next + 4]
        upcoming = [call.group for call, ends in steps if not ends and call.needs_weights]
        if groups := group.backward_prefetch or upcoming[:2]:
            prefetch(groups)

    def _plan_backward(self) -> None:
        """Plan the backward anew: calls in reverse, inner calls within outer ones."""
        self._steps, self._next = [], 0
        expected = [call for call in self.calls if call.is_expected]
        self._pending = Counter(call.group for call in expected)
        open_calls: list[GroupCall] = []
        for call in sorted(expected, key=attrgetter("last"), reverse=True):  # of equal calls the earlier comes first
            # An open call ended no earlier than this one, and so encloses it, unless it also began later.
            while open_calls and open_calls[-1].index > call.index:
                self._steps.append((open_calls.pop(), True))
            open_calls.append(call)
            self._steps.append((call, False))
        self._steps += [(call, True) for call in reversed(open_calls)]
        for place, (call, ends) in enumerate(self._steps):
            call.places[ends] = place


class GroupCall:
    """One forward of a group whose backward may come."""

    def __init__(self, group: ParamGroup, unsharded: UnshardedParams, iteration: IterationState) -> None:
        self.group = group
        self.unsharded = unsharded
        self._iteration = weakref.ref(iteration)  # weak, as the iteration's graph refers to this call
        self.index = self.last = len(iteration.calls)
        """Index of this call in ``iteration.calls``; ``last`` is the index of the last call within this one."""
        self.places = [-1, -1]
        """Indices of this call's begin and end in the plan of the backward."""
        self.is_expected = False
        """Whether the backward reaches this call on every rank that trains the same parameters."""
        self.needs_weights = group.unshards_in_backward
        """Whether the backward of this call gathers the group's weights."""
        self._fills = unsharded.buffer.fills
        self._versions = unsharded.buffer.versions
        # Activation checkpointing saves tensors by hooks: the backward then reads recomputed tensors. Other hooks, also
        # those within a checkpoint, may keep views of the buffer: the backward then reads the buffer of this forward.
        pack, _ = _saved_tensor_hooks(False) or (None, None)
        self._is_packed = pack is not None
        self._is_recomputed = getattr(pack, "__module__", None) == "torch.utils.checkpoint"
        iteration.calls.append(self)

    @property
    def iteration(self) -> IterationState:
        iteration = self._iteration()
        assert iteration is not None
        return iteration

    def pre_backward(self, iteration: IterationState, _: Tensor | None = None) -> None:
        """Take note that a gradient has reached an output of this forward of the group."""
        state, group = iteration.state, self.group
        backward = state.reach(iteration)
        if self not in backward.reached:
            backward.reached.add(self)
            backward.end_calls(iteration, self.last)
            if group.versions() != self._versions:
                raise RuntimeError(
                    f"parameters of unit '{group.name}' were changed between this forward and its backward "
                    "(an optimizer step in between?); run the backward first, or the forward again"
                )
            if backward.plans(self):
                iteration.advance(backward, self, ends=False)
            else:
                self.begin(backward)
        # Let the stream of this output wait: a node on another stream may have begun the call.
        if (begun := backward.begun.get(self)) is not None and begun.used is not None:
            self.group.context.wait(begun.used.buffer.handle)
        if self.group.grads is not None:
            self.group.context.wait(self.group.grads.buffer.handle)

    def post_backward(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Take note that this call's gate has run: all gradients of the call are written."""
        iteration = self.iteration
        state = iteration.state
        backward = state.reach(iteration)
        backward.reached.add(self)  # the hook of an output that is a view of an input runs after this gate
        backward.end_calls(iteration, self.index)
        state.check_flow(f"unit '{self.group.name}'", grads)
        buffer, is_begun = self.unsharded.buffer, any(self in each.begun for each in state.backwards)
        if self.needs_weights and not is_begun and (buffer.fills != self._fills or not self.group.is_in(buffer)):
            raise RuntimeError(
                f"a gradient reached the inside of unit '{self.group.name}' without passing its output, when its "
                "weights were gone: its forward hands out tensors in an object that cannot be looked into, or keeps "
                "them aside. Return them in a tuple, list, dict or dataclass, or in a class registered with pytree"
            )
        if backward.plans(self):
            iteration.advance(backward, self, ends=True)
        else:
            backward.end_calls(iteration, self.index - 1)  # ``index - 1``: end this call, too
        return grads

    def begin(self, backward: Backward) -> None:
        """Begin the backward of this call: put the weights back in place, and make room for gradients."""
        group = self.group
        if not self._is_packed:  # this call is in no checkpoint, so the backward has left the last checkpoint
            backward.release_recomputed()
        again = backward.recomputed.get(group, ()) if self._is_recomputed else ()
        unsharded, used = again[-1] if again else self.unsharded, None
        if self.needs_weights or again:
            lent = sum(each.count_uses(unsharded) for each in self.iteration.state.backwards[:-1])
            # a recomputed forward lends its buffer until the backward of its group begins, which gathers again
            lent += sum(each.buffer is unsharded.buffer for each in chain(*backward.recomputed.values()))
            used = group.unshard_for_backward(unsharded, lent, needed=bool(again) or not self._is_recomputed)
            self._fills = self.unsharded.buffer.fills
        # if nothing is gathered, hooks that read a weight get the sharded one, not another group's in the buffer
        group.register_unsharded([p.parameter for p in group.params] if used is None else group.leaves(used))
        if backward.wants_grads:
            group.acquire_grad_buffer()
        if backward.reduces:
            self.iteration.prefetch_for_backward(group)
        backward.begun[self] = BegunCall(used, group.backward_span.start() if group.context.traces else None)

    def end(self, backward: Backward) -> None:
        """End the backward of this call: release its weight buffer."""
        group, begun = self.group, backward.begun.pop(self)
        if begun.span is not None:
            group.backward_span.end(begun.span)
        group.register_sharded()
        if begun.used is not None:
            group.release(begun.used)


class BegunCall(NamedTuple):
    """Weights in use and profiler span of a ``GroupCall`` whose backward has begun."""

    used: UnshardedParams | None
    span: Handle | None


@dataclass(eq=False)
class Backward:
    """One run of autograd's engine through the model.

    A custom function whose own backward calls ``backward()`` makes one run within another. The inner run writes its
    gradients and issues all-gathers alone. The outer run reduces all gradients, which are final when it returns.
    """

    task: int
    """Id that autograd has given this run (graph task)."""
    wants_grads: bool
    """Whether this run wants the parameters' gradients, unlike ``torch.autograd.grad``."""
    reduces: bool
    """Whether this run reduces gradients, as no run around it does. A run that reduces follows the plan of its
    iteration; any other begins calls as it reaches them."""
    is_running: weakref.ref[object] = field(init=False)
    """Reference to a callback that autograd keeps while this run lasts; dead once an exception has ended the run."""
    reached: set[GroupCall] = field(default_factory=set)
    """Forwards of groups (``GroupCall``) of which this backward has reached an output, or the gate."""
    begun: dict[GroupCall, BegunCall] = field(default_factory=dict)
    """Forwards of groups (``GroupCall``) whose backward has begun and not ended in this run of autograd."""
    recomputed: dict[ParamGroup, list[UnshardedParams]] = field(default_factory=dict)
    """Weights in use by forwards that activation checkpointing has run again, by group."""

    def plans(self, call: GroupCall) -> bool:
        """Return whether ``call`` is begun and ended in the order of its iteration's plan.

        A call outside of the plan begins when this run reaches one of its outputs, and ends when this run reaches its
        gate or has passed it.
        """
        return self.reduces and call.is_expected

    def end_calls(self, iteration: IterationState, index: int) -> None:
        """End calls that no plan ends: those of ``iteration`` after ``index``, and those of other iterations.

        Autograd runs nodes from the latest to the earliest, so it has passed calls after ``index``. A call has not been
        ended by its own gate if no tensor behind that gate needed a gradient.
        """
        for call in [*reversed(self.begun)]:
            if not self.plans(call) and (call.iteration is not iteration or call.index > index):
                call.end(self)

    def keep_recomputed(self, group: ParamGroup, unsharded: UnshardedParams) -> None:
        """Keep the buffer of a recomputed forward of ``group``: the backward reads weights that the forward saved."""
        self.recomputed.setdefault(group, []).append(unsharded)
        if any(call.group is group for call in self.begun):
            del group.registered[-2]
        else:
            group.register_sharded()

    def release_recomputed(self, group: ParamGroup | None = None, *, only_last: bool = False) -> None:
        """End uses of buffers by recomputed forwards that the backward has read: all, or ``group``'s, or its last."""
        for each in tuple(self.recomputed) if group is None else (group,):
            uses = self.recomputed.pop(each, [])
            self.recomputed |= {each: uses[:-1]} if only_last and uses[1:] else {}
            for unsharded in uses[-1:] if only_last else uses:
                each.release(unsharded)

    def count_uses(self, unsharded: UnshardedParams) -> int:
        """Return how often this backward uses the buffer of ``unsharded``."""
        used = (begun.used for begun in self.begun.values() if begun.used is not None)
        return sum(each.buffer is unsharded.buffer for each in chain(used, *self.recomputed.values()))

    def gather_again(self) -> None:
        """Gather weights again whose buffers a backward within this one has used."""
        for call, begun in self.begun.items():
            if begun.used is not None:
                call.group.unshard_again(begun.used)
                call._fills = call.unsharded.buffer.fills
        for group, recomputed in self.recomputed.items():
            for unsharded in recomputed:
                group.unshard_again(unsharded)


class _Caller:
    """The innermost frame around a forward that belongs neither to the engine and its hooks nor to ``torch._dynamo``.

    Where torch calls a module with hooks, ``_frame`` is that of ``_call_impl``, not of ``inner`` within it: after a
    forward that raised, hooks run when ``inner`` has ended.
    """

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "inner" and frame.f_globals.get("__name__") == _MODULE_CALL:
            frame = frame.f_back
        self._frame = frame
        self._thread = get_ident()

    def is_running(self) -> bool:
        """Return whether the frame is still on the stack of its thread, perhaps another one than this."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def _check_recomputation(name: str) -> None:
    """Raise a ``RuntimeError`` if a backward recomputes ``name`` and calls ``backward()`` on the result itself.

    Only activation checkpointing without ``use_reentrant`` recomputes forwards under hooks for saved tensors.
    """
    if _saved_tensor_hooks(False) is None:
        raise RuntimeError(
            f"{name} is run again by reentrant activation checkpointing, or by the backward of a custom function (of "
            "tiles, say), which hides its gradients from the engine; pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint (gradient_checkpointing_kwargs={'use_reentrant': False} in Hugging Face "
            "models), and have a custom function run parts of a unit again, not the unit"
        )
