"""Norms of sharded tensors: numbers of which every rank holds a share, summed when somebody looks.

    local ranges ── |x|^p summed ──> share ── stack, norm of norms ──> share ── first use: one all-reduce ──> the norm

Shares are sums of p-th powers (or maxima), so norms of norms stay shares and ``clip_grad_norm_`` communicates once,
however many parameters it is given.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map

from yafsdp_cc.engine.ranks import reduce_over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.engine.tensor import FlatDTensor

aten = torch.ops.aten


class Kind(NamedTuple):
    """What is reduced: absolute values to a p-norm, or signed values to their maximum or minimum."""

    order: float
    signed: bool = False

    @property
    def is_sum(self) -> bool:
        return math.isfinite(self.order)

    @property
    def of_nothing(self) -> float:
        """The norm of a rank that holds nothing."""
        if self.order < 0:
            return math.inf
        return -math.inf if self.signed else 0.0

    def share(self, norms: torch.Tensor) -> torch.Tensor:
        """Float64 shares from norms: what adds up (p-th powers) or what has a maximum."""
        norms = norms.double()
        if not self.is_sum:
            return norms if self.order > 0 else -norms
        return norms if self.order in (0, 1) else norms.pow(self.order)

    def whole(self, shares: torch.Tensor) -> torch.Tensor:
        """Inverse of ``share``, once the shares are reduced."""
        if not self.is_sum:
            return shares if self.order > 0 else -shares
        if self.order == 2:
            return shares.sqrt()
        return shares if self.order in (0, 1) else shares.pow(1 / self.order)


MAX, MIN = Kind(math.inf, signed=True), Kind(-math.inf, signed=True)


class Across(NamedTuple):
    """The ranks that have a share: their mesh, and groups to reduce over one after another."""

    mesh: DeviceMesh
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first in every group: the one that counts what all of them know."""
        return all(group.rank() == 0 for group in self.groups)


class Shares:
    """This rank's shares of some numbers, and the numbers themselves once they are known."""

    def __init__(self, local: torch.Tensor, kind: Kind, across: Across) -> None:
        self.local = local
        self.kind = kind
        self.across = across
        self._whole: torch.Tensor | None = None

    def derived(self, local: torch.Tensor) -> Shares:
        """Shares of the same kind, across the same ranks."""
        return Shares(local, self.kind, self.across)

    def whole(self) -> torch.Tensor:
        """The numbers, float64; the first call is one all-reduce over each group."""
        if self._whole is None:
            self._whole = self.kind.whole(self._reduced())
        return self._whole

    def _reduced(self) -> torch.Tensor:
        if self.kind.is_sum:
            return self._over_groups(self.local.clone(), dist.ReduceOp.SUM)
        # A maximum may lose a NaN on the way (how backends compare it is anyone's guess): it travels as a flag beside.
        is_nan = self.local.isnan()
        both = torch.stack([self.local.masked_fill(is_nan, -math.inf), is_nan.to(self.local.dtype)])
        self._over_groups(both, dist.ReduceOp.MAX)
        return both[0].masked_fill(both[1] > 0, math.nan)

    def _over_groups(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        reduce_over(self.across.groups, tensor, op, self.across.mesh)
        return tensor

    @staticmethod
    def settle(unknown: Sequence[Shares]) -> None:
        """Learn all these numbers: one all-reduce over each group, however many there are."""
        alike: defaultdict[tuple[Kind, Across], list[Shares]] = defaultdict(list)
        for shares in unknown:
            alike[shares.kind, shares.across].append(shares)
        for members in alike.values():
            joined = members[0].derived(torch.cat([shares.local.reshape(-1) for shares in members]))
            parts = joined.whole().split([shares.local.numel() for shares in members])
            for shares, part in zip(members, parts, strict=True):
                shares._whole = part.view(shares.local.shape)


class LazyNorm(DTensor):
    """Numbers that all ranks will agree on: a replicated DTensor whose value is communicated when first used.

    Stacking, casting, viewing and the same norm again keep it lazy; any other operation makes one all-reduce, is given
    the plain value and answers with a plain tensor. So every rank has to do the same things with it.
    """

    _shares: Shares
    _value: torch.Tensor | None

    def value(self) -> torch.Tensor:
        """The plain tensor: global shape, this dtype. A collective when called first."""
        if self._value is None:
            self._value = self._shares.whole().to(self.dtype)
        return self._value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = _kept_lazy(func, args, kwargs)
        if lazy is not None:
            return lazy
        args, kwargs = tree_map(lambda x: x.value() if isinstance(x, LazyNorm) else x, (args, kwargs))
        return func(*args, **kwargs)

    def full_tensor(self, **_: Any) -> torch.Tensor:
        """The plain tensor, the same bits on every rank. A collective when the value is used first."""
        return self.clone()

    def to_local(self, **_: Any) -> torch.Tensor:
        """As ``full_tensor``: every rank has the whole value."""
        return self.clone()

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **_: Any) -> DTensor:
        """A plain replicated DTensor of the value."""
        mesh = self._shares.across.mesh
        return DTensor.from_local(self.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._value is None:
            return f"LazyNorm({self._shares.kind}, this rank's share {self._shares.local.tolist()})"
        return f"LazyNorm({self._value})"

    def __format__(self, format_spec: str) -> str:
        return format(self.value().item() if self.dim() == 0 else self.value(), format_spec)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.value().clone()

    def __reduce_ex__(self, proto: object) -> NoReturn:
        raise TypeError("pickling a norm that is still in shares: call .full_tensor() or .item() first")


def reduced(
    tensors: Sequence[FlatDTensor],
    kind: Kind,
    reduce: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    dtypes: Sequence[torch.dtype],
) -> list[LazyNorm]:
    """One lazy number, 0-d, of ``dtypes[i]`` for each tensor; ``reduce`` makes 0-d tensors of non-empty local ones."""
    counted = [flat._cut.counts and flat._local_tensor.numel() > 0 for flat in tensors]
    norms = reduce([flat._local_tensor for flat, counts in zip(tensors, counted, strict=True) if counts])
    if len(norms) < len(tensors):
        dtype = norms[0].dtype if norms else torch.float64
        nothing = tensors[0]._local_tensor.new_full((), kind.of_nothing, dtype=dtype)
        present = iter(norms)
        norms = [next(present) if counts else nothing for counts in counted]
    rows = kind.share(torch.stack(list(norms))).unbind()
    return [
        _lazy(Shares(row, kind, Across(flat._cut.global_mesh, flat._cut.groups)), dtype)
        for row, flat, dtype in zip(rows, tensors, dtypes, strict=True)
    ]


def norms_of(tensors: Sequence[FlatDTensor], order: float, dtype: torch.dtype | None = None) -> list[LazyNorm]:
    """The ``order``-norm of each whole tensor, lazily, in ``dtype`` (None: the tensor's own)."""

    def reduce(locals_: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not locals_:
            return []
        # Half-precision ranges are summed in float32.
        precise = max((torch.promote_types(local.dtype, torch.float32) for local in locals_), key=lambda d: d.itemsize)
        if len(locals_) == 1:
            return [torch.linalg.vector_norm(locals_[0], order, dtype=precise)]
        return torch._foreach_norm(locals_, order, dtype=precise)

    return reduced(tensors, Kind(order), reduce, [dtype or flat.dtype for flat in tensors])


class NormCall(NamedTuple):
    """Arguments of a norm over all elements of a tensor."""

    tensor: Any
    order: float
    dtype: torch.dtype | None


NORMS = {
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim_dtype,
}


def norm_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NormCall | None:
    """The call of one of ``NORMS``, or None if it keeps or spares a dimension."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    tensor, dims = given["self"], given.get("dim")
    everything = not dims or sorted(dim % max(tensor.dim(), 1) for dim in dims) == list(range(tensor.dim()))
    if not everything or given.get("keepdim", False):
        return None
    order = given.get("ord", given.get("p"))
    return NormCall(tensor, 2.0 if order is None else float(order), given.get("dtype"))


_SAME_SHARES = {aten.detach.default, aten.alias.default}
_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.select.int,
}
_JOINS = {aten.stack.default, aten.cat.default}


def _kept_lazy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyNorm | None:
    """The result of an operation that can be done on shares, or None."""
    if func in _JOINS:
        return _joined(func, *args, **kwargs)
    first = args[0] if args else None
    # Once the value is known it is the truth, also after changes in place.
    if not isinstance(first, LazyNorm) or first._value is not None:
        return None
    shares = first._shares
    if func in _SAME_SHARES:
        return _lazy(shares, first.dtype)
    if func in _VIEWS:
        return _lazy(shares.derived(func(shares.local, *args[1:], **kwargs)), first.dtype)
    if func is aten._to_copy.default:
        device = kwargs.get("device") or shares.local.device
        moved = shares if device == shares.local.device else shares.derived(shares.local.to(device))
        return _lazy(moved, kwargs.get("dtype") or first.dtype)
    if (
        func in NORMS
        and (call := norm_call(func, args, kwargs))
        and Kind(call.order) == shares.kind
        and call.order != 0
    ):
        local = shares.local.sum() if shares.kind.is_sum else shares.local.max()
        return _lazy(shares.derived(local), call.dtype or first.dtype)
    return None


def _joined(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyNorm | None:
    """Stacked or concatenated shares. What all ranks know already is the first rank's to count."""
    unknown = [x._shares for x in tensors if isinstance(x, LazyNorm) and x._value is None]
    if not unknown:
        return None
    kind, across = unknown[0].kind, unknown[0].across
    if any((shares.kind, shares.across) != (kind, across) for shares in unknown):
        Shares.settle(unknown)
        return None
    rows = []
    for x in tensors:
        if isinstance(x, LazyNorm) and x._value is None:
            rows.append(x._shares.local)
            continue
        known = x.value() if isinstance(x, LazyNorm) else x
        rows.append(kind.share(known if across.is_first else torch.full_like(known, kind.of_nothing)))
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return _lazy(unknown[0].derived(func(rows, dim)), dtype)


def _lazy(shares: Shares, dtype: torch.dtype) -> LazyNorm:
    local = shares.local
    shell, spec = _outside(shares.across.mesh, local.shape, dtype, local.device)
    lazy = cast("LazyNorm", _shell(LazyNorm, shell, spec, requires_grad=False))
    lazy._shares = shares
    lazy._value = None
    return lazy


_shell = DTensor.__new__


@lru_cache(maxsize=64)
def _outside(
    mesh: DeviceMesh, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, DTensorSpec]:
    """What DTensor wants to see: a local tensor for dtype and device (the shares are float64), and a spec. Nobody reads
    or writes the elements of the former, so all lazy norms of one kind share it."""
    local = torch.empty(shape, dtype=dtype, device=device)
    return local, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=TensorMeta(shape, local.stride(), dtype))
