"""``parameters()`` of a module gives the sharded parameters, or within a forward the tensors that it computes with.

Between ``unshard()`` and ``reshard()`` modules show unsharded weights outside of forwards, too. After a forward that
does not reshard, FSDP2's modules show them until the backward. So do modules of this package's ``fully_shard``, as
attributes and in ``parameters()``, after a forward with a graph; a forward under ``torch.no_grad()`` leaves nothing
behind. The backward, ``reshard()``, ``state_dict()`` and ``load_state_dict()`` show the sharded parameters again, for
optimizers, clipping and checkpoints.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map_only

from yafsdp_cc.engine.param import owner_of
from yafsdp_cc.engine.protocols import Observer
from yafsdp_cc.engine.state import engine_of
from yafsdp_cc.forms.extensions import forward_dtype
from yafsdp_cc.tensor.dtensor import FlatDTensor, is_unsharded, mark_unsharded

if TYPE_CHECKING:
    from collections.abc import ItemsView, Iterator, Sequence, ValuesView

    from yafsdp_cc.engine.param import FSDPParam
    from yafsdp_cc.engine.param_group import ParamGroup
    from yafsdp_cc.engine.spec import ParamGroupSpec
    from yafsdp_cc.engine.state import FSDPState


class ModuleParameters(dict[str, "torch.nn.Parameter | None"]):
    """``module._parameters`` of a module that holds sharded parameters.

    ``d[name]`` is always the sharded parameter. ``items()`` and ``values()``, and so ``named_parameters()``, return
    what the module computes with now: the unsharded weight that ``FSDPParam.register_unsharded`` has set, else the
    sharded parameter; hooks of a backward get the sharded one. Within a forward a parameter of another unit appears as
    ``CastWhenUsed``, so that ``next(self.parameters()).dtype`` is the compute dtype.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module._parameters)
        self._attributes = module.__dict__

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return self._visible().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self._visible().values()

    def _visible(self) -> dict[str, Any]:
        held: dict[str, Any] = dict(super().items())
        # Hooks of a backward run without grad mode; forwards that activation checkpointing runs again run with it.
        in_backward = torch._C._current_graph_task_id() != -1
        is_run_again = in_backward and torch.is_grad_enabled()
        for name, parameter in held.items():
            param = owner_of(parameter.shard_spec) if isinstance(parameter, FlatDTensor) else None
            engine = None if param is None else engine_of(param)
            if param is None or engine is None:
                continue
            engine.drop_interrupted()
            in_forward = engine.context.in_forward or is_run_again
            shown = self._attributes.get(name)
            # a forward that raised leaves its weights in its modules, where nobody may see them afterwards
            if shown is not None and (in_forward or (not in_backward and is_unsharded(shown))):
                held[name] = shown
            elif in_forward and param.flat is not None and (dtype := forward_dtype(param.flat)) != parameter.dtype:
                held[name] = CastWhenUsed.of(parameter, dtype)
        return held

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (dict(super().items()),)  # a copy of the module gets a plain dict


_LOOKS = {
    getattr(torch.Tensor, name).__get__ for name in ("dtype", "shape", "device", "layout", "ndim", "is_meta", "is_cpu")
} | {torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size}
"""Functions that read no elements of a tensor."""


class CastWhenUsed(DTensor):
    """A sharded parameter of another unit as a forward sees it, in the dtype that its own unit computes in.

    Reading dtype or shape costs nothing. Any other operation runs on the cast parameter, and gradients flow through it.
    """

    _parameter: torch.nn.Parameter

    @classmethod
    def of(cls, parameter: torch.nn.Parameter, dtype: torch.dtype) -> CastWhenUsed:
        sharded = cast("FlatDTensor", parameter)
        known = sharded._spec.tensor_meta
        assert known is not None
        spec = DTensorSpec(
            sharded.device_mesh, sharded.placements, tensor_meta=TensorMeta(known.shape, known.stride, dtype)
        )
        nothing = torch.empty(0, dtype=dtype, device=sharded._local_tensor.device)
        shown = cast("CastWhenUsed", DTensor.__new__(cls, nothing, spec, requires_grad=False))
        shown._parameter = parameter
        shown._is_param = True  # makes isinstance(shown, nn.Parameter) true
        return shown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _LOOKS:
                return func(*args, **kwargs)
        is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
        args, kwargs = tree_map_only(cls, cls._sharded if is_attribute else cls._cast, (args, kwargs))
        return func(*args, **kwargs)

    def _sharded(self) -> torch.nn.Parameter:
        return self._parameter

    def _cast(self) -> torch.Tensor:
        return self._parameter.to(self.dtype)

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """Return the whole parameter, cast. A collective."""
        return cast("DTensor", self._cast()).full_tensor(**options)

    def to_local(self, **options: Any) -> torch.Tensor:
        """Return this rank's elements, cast."""
        return cast("DTensor", self._cast()).to_local(**options)

    def redistribute(self, *arguments: Any, **options: Any) -> DTensor:
        """Return the parameter, cast, in another layout."""
        return cast("DTensor", self._cast()).redistribute(*arguments, **options)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self._parameter!r} as {self.dtype}"


def install_module_parameters(module: torch.nn.Module) -> None:
    """Let ``module.parameters()`` return the tensors that forwards compute with."""
    module.__dict__["_parameters"] = ModuleParameters(module)


def remove_module_parameters(module: torch.nn.Module) -> None:
    """Undo ``install_module_parameters``."""
    module.__dict__["_parameters"] = dict(dict.items(module._parameters))


def named_sharded_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield ``model.named_parameters()``, with the sharded parameter wherever one was sharded."""
    for prefix, module in model.named_modules():
        for name, parameter in dict.items(module._parameters):
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter


# Unsharded weights outside of forwards --------------------------------------------------------------------------------


def unshard_until_reshard(group: ParamGroup, *, elsewhere: bool = True) -> None:
    """Gather the weights of ``group`` and hold them until ``release_held``.

    Args:
        group: its attribute ``held`` gets the weights.
        elsewhere: whether to avoid a buffer that other groups need.
    """
    if group.held is not None and group.is_in(group.held.buffer):
        return
    group.release_held()
    group.context.gather_stream.wait_for_caller()  # the caller may just have written to the shard
    others = [each.unsharded.buffer for each in group.context.groups if each is not group]
    group.held = group.use(group.overflow() if elsewhere and group.unsharded.buffer in others else group.unsharded)


def register_until_reshard(state: FSDPState, spec: ParamGroupSpec, group: ParamGroup | None) -> None:
    """Show to the modules the weights that ``group`` holds, and the replicated ones of ``spec``.

    Args:
        group: None where all parameters of ``spec`` are replicated.
    """
    if group is not None and group.held is not None and not group.registers_held:
        unshard_until_reshard(group)  # gather again if the weights have changed
        group.registers_held = True
        group.context.wait(group.held.buffer.handle)
        group.register_unsharded(group.leaves(group.held))
    state.replicated.refresh()
    state.wait_for_transfers()
    replicated: Sequence[FSDPParam] = () if group is None else group.replicated
    # the root group's modules are the whole model, so show the replicated parameters of all units
    if group is None or group is state.root_group:
        replicated = [param for flat in spec.replicated for param in flat.params]
    state.replicated.register_unsharded(replicated)
    for param in (*(() if group is None else group.params), *replicated):
        module, attribute = param.sites[0]
        mark_unsharded(module.__dict__[attribute], param.spec)


class StayUnsharded(Observer):
    """Observer that shows unsharded weights to modules that do not reshard, after a forward with a graph."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState = weakref.proxy(state)  # the engine refers to its observers: no reference cycle

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
    """Release weights held outside of forwards: modules show the sharded parameters again.

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
    """Reshard ``spec`` before ``state_dict()`` and ``load_state_dict()`` outside of forwards; yield the hooks."""

    def hook(*_: Any) -> None:
        under_way = torch._C._current_graph_task_id() != -1 or any(
            (state := engine_of(param)) is not None and state.iteration is not None for param in spec.params
        )
        if not under_way:
            reshard(spec)

    for module in {module for param in spec.params for module, _ in param.sites}:
        yield module.register_state_dict_pre_hook(hook)
        yield module.register_load_state_dict_pre_hook(hook)
