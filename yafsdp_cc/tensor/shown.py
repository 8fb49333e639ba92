"""Tensors that modules show in place of sharded parameters, and marks on parameters that no optimizer may be made from.

Within a forward a parameter of another unit is a ``CastWhenUsed``. Outside of forwards a gathered weight, where modules
show one (``tensor.unsharded``), is an ``UnshardedWeight``.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from yafsdp_cc.engine.layout import ShardSpec

SHARDED_AS = "_yafsdp_cc_sharded_as"
"""Attribute of a parameter that was replaced by a sharded one: the sharded one's ``ShardSpec``."""


LEFT_OVER = "_yafsdp_cc_left_over"
"""Attribute of a sharded parameter in whose place ``unshard_model`` has put a plain one: its own ``ShardSpec``."""

COPY_OF = "_yafsdp_cc_copy_of"
"""Attribute of a whole parameter that ``whole_parameters`` has shown: the sharded one's ``ShardSpec``."""

REPLICA_SYNC = "_yafsdp_cc_replica_sync"
"""Attribute of parameters whose replicas are synchronized: the ``ReplicaSync``, and whether they are trained."""


class ReplacedParameter(torch.nn.Parameter):
    """A parameter that was replaced by a sharded one, as lists of ``parameters()`` from before still have it.

    A ``ReplacedParameter`` has neither elements nor a gradient, so its norm or penalty would be 0: any use is refused.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        spec = next(each.__dict__[SHARDED_AS] for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise RuntimeError(
            f"'{spec.name}' was taken from the model before it was sharded, and has neither elements nor gradients any "
            "more: take it from model.parameters() after shard(), or in a forward as an attribute of its module"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReplacedParameter({self.__dict__[SHARDED_AS]})"


def mark_replaced(parameter: torch.nn.Parameter, spec: ShardSpec) -> None:
    """Mark ``parameter``, which has no elements any more, as replaced by the one that ``spec`` describes."""
    parameter.__dict__[SHARDED_AS] = spec
    if type(parameter) is torch.nn.Parameter:  # a parameter of a tensor subclass keeps its class
        parameter.__class__ = ReplacedParameter


UNSHARDED_OF = "_yafsdp_cc_unsharded_of"
"""Attribute of unsharded weights that modules see outside of forwards: the ``ShardSpec`` of the sharded parameter."""


class UnshardedWeight(torch.Tensor):
    """An unsharded weight that modules show outside of forwards. As writes are lost, they are counted or refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """The weight outside of autograd; its version counter counts writes to ``.data``, unlike a plain tensor's."""
        return self.detach()

    @data.setter
    def data(self, _: torch.Tensor) -> None:
        """Refuse: a tensor assigned to ``.data`` would be lost with the gathered weight."""
        spec: ShardSpec = self.__dict__[UNSHARDED_OF]
        raise RuntimeError(
            f"'{spec.name}' shows its gathered weights until the backward or reshard(): what is assigned to its .data "
            "would be lost with them. Call reshard() of the module before, or write under "
            "yafsdp_cc.whole_parameters(model, write=True)"
        )


def mark_unsharded(weight: torch.Tensor, spec: ShardSpec) -> None:
    """Mark ``weight`` as the unsharded form of the parameter of ``spec``, which no optimizer may be made from."""
    weight.__dict__[UNSHARDED_OF] = spec
    if type(weight) is torch.Tensor:  # a DTensor of tensor parallelism keeps its class
        weight.__class__ = UnshardedWeight


_LOOKS = {
    getattr(torch.Tensor, name).__get__ for name in ("dtype", "shape", "device", "layout", "ndim", "is_meta", "is_cpu")
} | {torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size}
"""Functions of a tensor that read none of its elements."""


class CastWhenUsed(DTensor):
    """A stand-in that a forward sees for a sharded parameter of another unit, in the dtype in which that unit computes.

    Reading dtype or shape costs nothing. Any other operation runs on the cast parameter, and gradients flow through it.
    """

    _parameter: torch.nn.Parameter

    @classmethod
    def of(cls, parameter: torch.nn.Parameter, dtype: torch.dtype) -> CastWhenUsed:
        sharded = cast("DTensor", parameter)
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
        is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__", "requires_grad_")
        args, kwargs = tree_map_only(cls, attrgetter("_parameter") if is_attribute else cls._cast, (args, kwargs))
        return func(*args, **kwargs)

    def _cast(self) -> torch.Tensor:
        return self._parameter.to(self.dtype)

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """Return the whole parameter, cast. A collective."""
        return cast("DTensor", self._cast()).full_tensor(**options)

    def to_local(self, **options: Any) -> torch.Tensor:
        """Return the parameter's elements on this rank, cast."""
        return cast("DTensor", self._cast()).to_local(**options)

    def redistribute(self, *arguments: Any, **options: Any) -> DTensor:
        """Return a DTensor of the parameter, cast, with other placements. A collective."""
        return cast("DTensor", self._cast()).redistribute(*arguments, **options)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self._parameter!r} as {self.dtype}"
