"""What a module's ``parameters()`` give: the sharded ones, and within a forward those that it computes with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map_only

from yafsdp_cc.engine.dtensor import FlatDTensor
from yafsdp_cc.engine.extensions import forward_dtype

if TYPE_CHECKING:
    from collections.abc import ItemsView, ValuesView

    from yafsdp_cc.engine.param import FSDPParam


class ShownParameters(dict[str, "torch.nn.Parameter | None"]):
    """``module._parameters`` of a module that holds sharded parameters.

    By key it gives the sharded ones at all times. To iterate over ``items()`` or ``values()``, as
    ``named_parameters()`` and all that is made of it do, gives what a forward computes with while it is under way: a
    module that looks there for weights finds the attributes that ``FSDPParam.register_unsharded`` has set, and one that
    looks for a dtype (``next(self.parameters()).dtype``) finds that of the forward, also where the parameter is of
    another unit (``CastWhenUsed``).
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module._parameters)
        self._attributes = module.__dict__

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return self._shown().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self._shown().values()

    def _shown(self) -> dict[str, Any]:
        held: dict[str, Any] = dict(super().items())
        sharded = {name: param for name, parameter in held.items() if (param := _param_in_forward(parameter))}
        for name, param in sharded.items():
            if name in self._attributes:
                held[name] = self._attributes[name]
            elif param.flat is not None and (dtype := forward_dtype(param.flat)) != param.parameter.dtype:
                held[name] = CastWhenUsed.of(param.parameter, dtype)
        return held

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (dict(super().items()),)  # of a copy of the module


def _param_in_forward(parameter: torch.nn.Parameter | None) -> FSDPParam | None:
    """Return the ``FSDPParam`` of a sharded parameter, where a forward that sees it is under way, or run again by
    activation checkpointing."""
    owner = parameter.shard_spec.owner if isinstance(parameter, FlatDTensor) else None
    param: FSDPParam | None = None if owner is None else owner()
    if param is None or param.state is None:
        return None
    param.state.drop_interrupted()
    # Hooks of a backward run without grad mode, and see the sharded parameters.
    is_run_again = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
    return param if param.state.context.in_forward or is_run_again else None


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


def show_unsharded(module: torch.nn.Module) -> None:
    """Let ``module.parameters()`` give unsharded parameters inside of a forward."""
    module.__dict__["_parameters"] = ShownParameters(module)


def show_as_held(module: torch.nn.Module) -> None:
    """Take back ``show_unsharded``."""
    module.__dict__["_parameters"] = dict(dict.items(module._parameters))
