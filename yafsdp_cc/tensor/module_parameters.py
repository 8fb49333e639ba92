"""What a module's ``parameters()`` give: the sharded ones, or those that a forward computes with.

The latter within a forward, and where modules see unsharded weights outside of one (``unsharded``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map_only

from yafsdp_cc.engine.param import owner_of
from yafsdp_cc.engine.state import engine_of
from yafsdp_cc.forms.extensions import forward_dtype
from yafsdp_cc.tensor.dtensor import FlatDTensor, is_unsharded

if TYPE_CHECKING:
    from collections.abc import ItemsView, Iterator, ValuesView


class ModuleParameters(dict[str, "torch.nn.Parameter | None"]):
    """``module._parameters`` of a module that holds sharded parameters.

    By key it gives the sharded ones at all times. To iterate over ``items()`` or ``values()``, as
    ``named_parameters()`` and all that is made of it do, gives the attributes that ``FSDPParam.register_unsharded`` has
    set; hooks of a backward see the sharded ones. A forward that looks there for a dtype
    (``next(self.parameters()).dtype``) finds its own also where the parameter is of another unit (``CastWhenUsed``).
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
        # Hooks of a backward run without grad mode; what activation checkpointing runs again there does not.
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
            # What a forward that raised has left in its modules is no weight to be seen afterwards.
            if shown is not None and (in_forward or (not in_backward and is_unsharded(shown))):
                held[name] = shown
            elif in_forward and param.flat is not None and (dtype := forward_dtype(param.flat)) != parameter.dtype:
                held[name] = CastWhenUsed.of(parameter, dtype)
        return held

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (dict(super().items()),)  # of a copy of the module


_LOOKS = {
    getattr(torch.Tensor, name).__get__ for name in ("dtype", "shape", "device", "layout", "ndim", "is_meta", "is_cpu")
} | {torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size}
"""What needs no elements."""


class CastWhenUsed(DTensor):
    """A sharded parameter of another unit as a forward sees it: in the dtype that this unit computes in.

    Its dtype and shape cost nothing. Any operation is one on the cast parameter, through which gradients flow.
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
        shown._is_param = True  # to isinstance(shown, nn.Parameter)
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
    """Let ``module.parameters()`` give what forwards compute with, wherever the module's attributes do."""
    module.__dict__["_parameters"] = ModuleParameters(module)


def remove_module_parameters(module: torch.nn.Module) -> None:
    """Take back ``install_module_parameters``."""
    module.__dict__["_parameters"] = dict(dict.items(module._parameters))


def named_sharded_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield ``model.named_parameters()``, the sharded ones wherever one was sharded."""
    for prefix, module in model.named_modules():
        for name, parameter in dict.items(module._parameters):
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter
