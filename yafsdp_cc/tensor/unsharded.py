"""Unsharded weights outside of forwards: between ``unshard()`` and ``reshard()``, and as FSDP2's modules show them.

After a forward that does not reshard, FSDP2's modules show unsharded weights until the backward. So do modules of this
package's ``fully_shard``, as attributes and in ``parameters()``, after a forward with a graph whose backward may come;
a forward under ``torch.no_grad()``, or which runs its backward itself, shows none. The backward, ``reshard()``,
``state_dict()`` and ``load_state_dict()`` show the sharded parameters again, for optimizers, clipping and checkpoints.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from yafsdp_cc.engine.protocols import Observer
from yafsdp_cc.engine.state import engine_of
from yafsdp_cc.tensor.shown import mark_unsharded

if TYPE_CHECKING:
    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.spec import ParamGroupSpec
    from yafsdp_cc.engine.state import FSDPState


def unshard_until_reshard(group: ParamGroup, *, elsewhere: bool = True) -> None:
    """Gather the weights of ``group`` and hold them until ``release_held``.

    Args:
        group: its attribute ``held`` gets the weights.
        elsewhere: whether to gather into an overflow buffer where other groups share the group's own.
    """
    if group.held is not None and group.is_in(group.held.buffer):
        return
    group.release_held()
    group.context.gather_stream.wait_for_caller()  # the caller's stream may still write to the shard
    others = [each.unsharded.buffer for each in group.context.groups if each is not group]
    group.held = group.use(group.overflow() if elsewhere and group.unsharded.buffer in others else group.unsharded)


def register_until_reshard(state: FSDPState, spec: ParamGroupSpec, group: ParamGroup | None) -> None:
    """Show the unsharded weights that ``group`` holds to its modules, and the replicated ones of ``spec``.

    Args:
        group: None where all parameters of ``spec`` are replicated.
    """
    if group is not None and group.held is not None and not group.registers_held:
        unshard_until_reshard(group)  # gathers again if the weights have changed since
        group.registers_held = True
        group.context.wait(group.held.buffer.handle)
        group.register_unsharded(group.leaves(group.held))
    state.replicated.refresh()
    state.wait_for_transfers()
    replicated: Sequence[FSDPParam] = () if group is None else group.replicated
    # the module of the root group is the whole model: show it the replicated parameters of all units
    if group is None or group is state.root_group:
        replicated = [param for flat in spec.replicated for param in flat.params]
    state.replicated.register_unsharded(replicated)
    for param in (*(() if group is None else group.params), *replicated):
        module, attribute = param.sites[0]
        mark_unsharded(module.__dict__[attribute], param.spec)
    held = () if group is None or group.held is None else zip(group.params, group.held.leaves, strict=True)
    for param, leaf in (*held, *zip(state.replicated.params, state.replicated.leaves, strict=True)):
        if leaf.requires_grad and not leaf._post_accumulate_grad_hooks:  # a leaf is shown many times: add only one hook
            leaf.register_post_accumulate_grad_hook(partial(_refuse_late_grad, weakref.ref(param)))


def _refuse_late_grad(of: weakref.ref[FSDPParam], leaf: torch.Tensor) -> None:
    """Raise if a gradient has reached ``leaf``, an unsharded parameter, and no later reduce of this step adds it."""
    param = of()
    state = None if param is None else engine_of(param)
    if param is None or state is None or state.backwards or state.awaits_backward or not state.is_idle:
        return
    leaf.grad = None
    raise RuntimeError(
        f"a gradient of the unsharded '{param.spec.name}' came too late to be reduced: it is of something that was "
        "computed before the forward of the model, such as a penalty after unshard(), or that has its own backward "
        "after the loss's. Add it to the loss, or compute it of full_tensor()"
    )


class StayUnsharded(Observer):
    """Observer that shows unsharded weights to modules that do not reshard, after a forward with a graph."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState = weakref.proxy(state)  # no cycle: the engine refers to its observers

    def after_forward(self) -> None:
        state = self._state
        groups: dict[ParamGroupSpec, ParamGroup | None] = {group.spec: group for group in state.order}
        own = state.specs[-1]
        if own.modules == (state.called,):
            groups.setdefault(own, state.root_group)
        for spec, group in groups.items():
            stays = spec.settings.stays_unsharded
            if spec.modules == (state.model,) if stays is None else stays:
                if group is not None:
                    unshard_until_reshard(group)
                register_until_reshard(state, spec, group)


def reshard(spec: ParamGroupSpec, *, expires: bool = False) -> None:
    """Release the weights that ``spec`` holds outside of forwards: its modules show the sharded parameters again.

    Args:
        expires: whether the next forward gathers the weights anew even if a buffer has them; the same on all ranks.
    """
    param = next(spec.params, None)
    state = None if param is None else engine_of(param)
    if state is None:
        return
    for group in state.groups:
        if group.spec is spec:
            group.release_held()
            if expires:
                group.context.passes += 1
                group.expire(group.flats)
    if not state.context.in_forward and torch._C._current_graph_task_id() == -1:
        for flat in spec.replicated:
            for replicated in flat.params:
                replicated.register_sharded()


def reshard_for_state_dicts(spec: ParamGroupSpec) -> Iterator[Any]:
    """Let hooks reshard ``spec`` before ``state_dict()`` and ``load_state_dict()``; yield the handles of the hooks."""

    def hook(*_: Any) -> None:
        under_way = torch._C._current_graph_task_id() != -1 or any(
            (state := engine_of(param)) is not None and state.iteration is not None for param in spec.params
        )
        if not under_way:
            reshard(spec)

    for module in {module for param in spec.params for module, _ in param.sites}:
        yield module.register_state_dict_pre_hook(hook)
        yield module.register_load_state_dict_pre_hook(hook)
