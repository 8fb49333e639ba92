"""Lazy reductions of sharded tensors: each rank computes a partial; the all-reduce waits until the value is used.

    local tensors ── |x|^p summed ──> partials ── stack, norm of norms ──> partial ── first use: one all-reduce ──> norm

Partials are sums of p-th powers (or maxima) in float64, so norms of norms stay partial and ``clip_grad_norm_``
communicates once, however many parameters it is given. Sums of sums, such as a penalty over all parameters, stay
partial, too. DTensor's own partial norms belong to one mesh: parameters on several meshes, replicated ones and plain
tensors would need an all-reduce each.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map_only

from yafsdp_cc.engine.agreement import Agreement
from yafsdp_cc.forms.subclasses import PLAIN
from yafsdp_cc.ranks.groups import backend_of
from yafsdp_cc.ranks.mesh import all_reduce_over

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten


class Reduction(NamedTuple):
    """A kind of reduction: absolute values to their p-norm of ``order`` p, or signed values to their sum (order 1),
    maximum or minimum."""

    order: float
    signed: bool = False

    @property
    def is_sum(self) -> bool:
        return math.isfinite(self.order)

    @property
    def of_empty(self) -> float:
        """Partial of a rank that has no elements."""
        return 0.0 if self.is_sum or (self.order > 0 and not self.signed) else -math.inf

    def to_partial(self, results: torch.Tensor) -> torch.Tensor:
        """Convert the ``results`` of one rank to float64 partials, of which ranks take the sum or the maximum."""
        results = results.double()
        if not self.is_sum:
            return results if self.order > 0 else -results
        return results if self.order in (0, 1) else results.pow(self.order)

    def from_partial(self, partials: torch.Tensor) -> torch.Tensor:
        """Convert partials, reduced over ranks, to the result of the sum, norm or extreme."""
        if not self.is_sum:
            return partials if self.order > 0 else -partials
        if self.order in (0, 1):
            return partials
        roots = partials.abs().sqrt() if self.order == 2 else partials.abs().pow(1 / self.order)
        return roots.copysign(partials)  # a plain number in a stack of norms may be negative


SUM, MAX, MIN = Reduction(1, signed=True), Reduction(math.inf, signed=True), Reduction(-math.inf, signed=True)


class Across(NamedTuple):
    """Ranks that hold partials: their mesh and process groups; reducing over one group after the other reaches all."""

    mesh: DeviceMesh
    groups: tuple[dist.ProcessGroup, ...]


@dataclass(eq=False)
class Partials:
    """This rank's partials of some reductions, float64, and after the all-reduce the reductions themselves, float64."""

    local: torch.Tensor
    kind: Reduction
    across: Across
    reduced: torch.Tensor | None = None
    terms: Sequence[tuple[Partials, float]] = ()
    """Sums of which this sum is a linear combination, each with its factor. They are reduced in its place, so that one
    rank may read a loss and then, without another collective, a penalty that is a term of it."""


refusals: list[Callable[[str], None]] = []
"""Functions that raise where a collective outside of forwards and backwards is forbidden (``skip_together``)."""


class ReadAgreement(Agreement):
    """Agreement of the ranks of one shard group on the numbers that they read, such as a norm.

    One replica's ranks may read a number that others do not read, so a read has no place in the order of all ranks'
    operations, and each read asks the ranks of its shard group. Ranks of an NCCL group do not ask: hosts that run ahead
    of their devices would wait for each other at each norm, and NCCL hangs until its time-out where gloo aborts.
    """

    def __init__(self, rank: int, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(rank, ranks, group, device)
        self.has_peers = self.has_peers and backend_of(group, device) == "gloo"

    def agree(self, kind: str, what: str) -> None:
        """Return once all ranks of the shard group are known to issue the same read next.

        Raises:
            RuntimeError: ranks read different numbers, or a rank reads none within the time-out.
        """
        if self.has_peers:
            self.ask((kind, what, (), ()), (), lambda waited: "reading; other ranks may be in a forward or backward")


fingerprints: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""``CollectiveFingerprint`` of the engines without replicas, or else a ``ReadAgreement``, by shard group."""


def check_not_refused(what: str, groups: Sequence[dist.ProcessGroup], mesh: DeviceMesh) -> None:
    """Raise if ``what``, a collective outside of forwards, is forbidden now, or if other ranks issue another one."""
    for refuse in refusals:
        refuse(what)
    for group in groups:
        if group not in fingerprints:  # no engine on this group exists yet
            members = dist.get_process_group_ranks(group)
            fingerprints[group] = ReadAgreement(group.rank(), members, group, torch.device(mesh.device_type))
        fingerprints[group].agree("read", what)


def reduce(unknown: Sequence[Partials]) -> None:
    """Set ``reduced`` of the ``unknown``; those of one kind across the same ranks share one all-reduce per group."""
    alike: defaultdict[tuple[Reduction, Across], list[Partials]] = defaultdict(list)
    bases = chain.from_iterable([base for base, _ in each.terms] if each.terms else [each] for each in unknown)
    for partials in dict.fromkeys(bases):
        if partials.reduced is None:
            alike[partials.kind, partials.across].append(partials)
    for (kind, (mesh, groups)), members in alike.items():
        check_not_refused(
            "a norm, sum, mean or extreme of sharded tensors, such as that of clip_grad_norm_,", groups, mesh
        )
        total = torch.cat([partials.local.reshape(-1) for partials in members])
        if kind.is_sum:
            all_reduce_over(groups, total, dist.ReduceOp.SUM, mesh)
        else:
            # Backends differ in the maximum of a NaN and a number: NaNs travel as a separate flag.
            both = torch.stack([total.masked_fill(total.isnan(), -math.inf), total.isnan().to(total.dtype)])
            all_reduce_over(groups, both, dist.ReduceOp.MAX, mesh)
            total = both[0].masked_fill(both[1] > 0, math.nan)
        parts = kind.from_partial(total).split([partials.local.numel() for partials in members])
        for partials, part in zip(members, parts, strict=True):
            partials.reduced = part.view(partials.local.shape)
    for partials in (each for each in unknown if each.terms):
        partials.reduced = torch.stack([cast("torch.Tensor", base.reduced) * by for base, by in partials.terms]).sum(0)


class LazyReduction(DTensor):
    """A replicated DTensor of norms, sums or extremes whose value is communicated at its first use.

    Detaching, casting, stacking, the same norm again, and adding and scaling sums keep it lazy. Any other operation
    makes one all-reduce and computes with the plain value, so all ranks must run the same operations. Its result is a
    plain tensor, or a ``LazyReduction`` of known value if all its inputs were ``LazyReduction``.
    """

    _partials: Partials
    _value: torch.Tensor | None

    def value(self) -> torch.Tensor:
        """Return the value, a plain tensor with the same bits on every rank. A collective at first use of the value."""
        if self._value is None:
            try:
                reduce([self._partials])
            except RuntimeError as error:
                raise RuntimeError(
                    "reading a sum, mean, norm or extreme of sharded tensors is a collective, which failed: has a part "
                    f"of the ranks read it (if rank == 0)? Call .item() on all of them\n{error}"
                ) from error
            # copy=True: a write to this value shall not reach other ``LazyReduction`` of the same partials
            self._value = cast("torch.Tensor", self._partials.reduced).to(self.dtype, copy=True)
        return self._value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # as in torch, a normal tensor's ``detach()`` is no inference tensor
                return cls.__torch_dispatch__(func, types, args, kwargs)
        lazy = _kept_lazy(func, args, kwargs)
        if lazy is not None:
            return lazy
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, (torch.Tensor, list, tuple))]
        across = [each._partials.across for each in given if isinstance(each, LazyReduction)]
        args, kwargs = tree_map_only(LazyReduction, LazyReduction.value, (args, kwargs))
        result = func(*args, **kwargs)
        is_lazy = across and len(across) == len(given)  # all tensors given are lazy, none in a list
        if not is_lazy or type(result) is not torch.Tensor or any(result is value for value in args):
            return result
        return _lazy(Partials(result, SUM, across[0]), result.dtype, result)

    def full_tensor(self, **_: Any) -> torch.Tensor:
        """Return a copy of the value, a plain tensor. A collective at first use of the value."""
        return _differentiable_copy(self)

    def to_local(self, **_: Any) -> torch.Tensor:
        """Return the value, which every rank has whole; outside of autograd not a copy of it, since checkpoints of
        optimizer state are loaded into what ``to_local`` returns."""
        return self.full_tensor() if self.requires_grad and torch.is_grad_enabled() else self.value()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value as an array, as loggers ask for it. A collective at first use of the value."""
        return self.value().numpy(force=force)

    def tolist(self) -> Any:
        """Return the value as a number or as lists of numbers. A collective at first use of the value."""
        return self.value().tolist()

    def redistribute(self, *_: Any, **__: Any) -> DTensor:
        """Return the value as a plain replicated DTensor. A collective at first use of the value."""
        return DTensor.from_local(self.full_tensor(), self.device_mesh, self.placements, run_check=False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._value is None:
            return f"LazyReduction({self._partials.kind}, partial on this rank: {self._partials.local.tolist()})"
        return f"LazyReduction({self._value})"

    def __format__(self, format_spec: str) -> str:
        return format(self.value().item() if self.dim() == 0 else self.value(), format_spec)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.full_tensor()

    def __reduce_ex__(self, proto: object) -> NoReturn:
        raise TypeError("pickling a norm that is not reduced yet: call .full_tensor() or .item() first")


class _DifferentiableCopy(torch.autograd.Function):
    """Copies the value of a ``LazyReduction``; the copy's gradient is that of the ``LazyReduction``."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyReduction) -> torch.Tensor:
        return lazy.value().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


_differentiable_copy: Callable[[LazyReduction], torch.Tensor] = _DifferentiableCopy.apply


def _lazy(partials: Partials, dtype: torch.dtype, value: torch.Tensor | None = None) -> LazyReduction:
    local = partials.local
    shown, spec = _shown(partials.across.mesh, local.shape, dtype, local.device)
    lazy = cast("LazyReduction", DTensor.__new__(LazyReduction, shown, spec, requires_grad=False))
    lazy._partials, lazy._value = partials, value
    return lazy


@functools.lru_cache(maxsize=64)
def _shown(
    mesh: DeviceMesh, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, DTensorSpec]:
    """Return the local tensor (of this dtype; partials are float64) and the spec that DTensor's constructor requires.
    Nobody reads the local tensor's elements, so each ``LazyReduction`` of the same shape and dtype shares it."""
    local = torch.empty(shape, dtype=dtype, device=device)
    return local, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=TensorMeta(shape, local.stride(), dtype))


# From sharded tensors to lazy reductions ---------------------------------------------------------------------------


class Summand(NamedTuple):
    """A sharded tensor to reduce: this rank's elements, the ranks to reduce over, and the dtype of the result.

    ``counts`` is false where another rank contributes the same elements.
    """

    local: torch.Tensor
    counts: bool
    across: Across
    dtype: torch.dtype


def reduce_lazily(
    summands: Sequence[Summand], kind: Reduction, of_locals: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
) -> list[LazyReduction]:
    """Return a 0-d ``LazyReduction`` for each summand; ``of_locals`` reduces the local tensors that have elements.

    Where ``of_locals`` returns a tensor of a subclass, its ``item()`` is the number.
    """
    present = [each.counts and each.local.numel() > 0 for each in summands]
    locals_ = [each.local for each, is_here in zip(summands, present, strict=True) if is_here]
    # stack the 0-d results: the number of kernels shall not grow with the number of tensors
    numbers = [
        each if type(each) in PLAIN else torch.tensor(each.item(), dtype=each.dtype, device=each.device)
        for each in (of_locals(locals_) if locals_ else ())
    ]
    rows = iter(kind.to_partial(torch.stack(numbers)).unbind() if numbers else ())
    nothing = torch.full((), kind.of_empty, dtype=torch.float64, device=summands[0].local.device)
    return [
        _lazy(Partials(next(rows) if is_here else nothing, kind, each.across), each.dtype)
        for each, is_here in zip(summands, present, strict=True)
    ]


def local_norms(order: float, locals_: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the ``order``-norm of each plain tensor of ``locals_``. Half-precision elements are summed in float32."""
    precise = functools.reduce(torch.promote_types, {local.dtype for local in locals_}, torch.float32)
    if len(locals_) == 1:
        return [torch.linalg.vector_norm(locals_[0], order, dtype=precise)]
    return torch._foreach_norm(locals_, order, dtype=precise)


NORMS = ("linalg_vector_norm", "norm", "_foreach_norm")
"""Names of the operations of ``aten`` that are norms."""


def arguments_over_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return a reduction's arguments by name, without those left out, and with the ``order`` that it has if it is a
    norm; None unless it covers all elements and yields a new 0-d tensor."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    order = given.get("ord", given.get("p"))
    given["order"] = 2.0 if order is None else float(order)
    dims, ndim = given.get("dim"), given["self"].dim() if isinstance(given["self"], torch.Tensor) else 0
    covers_all = not dims or sorted(dim % max(ndim, 1) for dim in dims) == list(range(ndim))
    return given if covers_all and not given.get("keepdim", False) and "out" not in given else None


def _kept_lazy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyReduction | None:
    """Return the lazy result of ``func`` if it can be computed on partials, without an all-reduce; else None."""
    if func is aten.stack.default:
        return _stacked(*args, **kwargs)
    first = args[0] if args else None
    # A reduction whose all-reduce is over has a value, which the program may have changed in place; its partials are as
    # they were before that change.
    if not isinstance(first, LazyReduction) or first._value is not None:
        return None
    partials, dtype = first._partials, kwargs.get("dtype") or first.dtype
    if func in (aten.detach.default, aten.alias.default):
        return _lazy(partials, dtype)
    if func is aten._to_copy.default:
        if not dtype.is_floating_point and torch.promote_types(first.dtype, dtype) != dtype:
            return None  # a later cast back would take from the partials what an integer has lost
        if (device := kwargs.get("device")) not in (None, partials.local.device):
            partials = Partials(partials.local.to(device), partials.kind, partials.across)
        return _lazy(partials, dtype)
    if partials.kind == SUM:
        return _kept_sum(func, first, args, kwargs)
    is_norm = func._schema.name.removeprefix("aten::") in NORMS
    given = arguments_over_all(func, args, kwargs) if is_norm and partials.kind.order else None
    if given is not None and Reduction(given["order"]) == partials.kind:
        local = partials.local.abs().sum() if partials.kind.is_sum else partials.local.max()
        return _lazy(Partials(local, partials.kind, partials.across), dtype)
    return None


def _kept_sum(func: Any, total: LazyReduction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyReduction | None:
    """Return the lazy sum of two sums, or a number times a sum, computed on partials; None if that is impossible."""
    other = args[1] if len(args) == 2 and not kwargs else None
    partials, dtype = total._partials, total.dtype
    terms = partials.terms or [(partials, 1.0)]
    if func is aten.add.Tensor and isinstance(other, LazyReduction) and other._value is None:
        theirs = other._partials
        if (theirs.kind, theirs.across, theirs.local.shape) != (SUM, partials.across, partials.local.shape):
            return None
        dtype, local = torch.promote_types(dtype, other.dtype), partials.local + theirs.local
        return _lazy(Partials(local, SUM, partials.across, None, [*terms, *(theirs.terms or [(theirs, 1.0)])]), dtype)
    if not isinstance(other, (int, float)) or not dtype.is_floating_point:
        return None
    if func is aten.add.Tensor and other == 0:  # Python's ``sum()`` begins with 0
        return _lazy(partials, dtype)
    if func is aten.mul.Tensor or (func is aten.div.Tensor and other):
        by = other if func is aten.mul.Tensor else 1 / other
        return _lazy(Partials(partials.local * by, SUM, partials.across, None, [(x, a * by) for x, a in terms]), dtype)
    return None


def _stacked(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyReduction | None:
    """Return the lazy stack of ``tensors``; None if all values are known. Only the first rank adds known values."""
    unknown = [x._partials for x in tensors if isinstance(x, LazyReduction) and x._value is None]
    if not unknown:
        return None
    kind, across = unknown[0].kind, unknown[0].across
    if any((partials.kind, partials.across) != (kind, across) for partials in unknown):
        reduce(unknown)
        if any(partials.kind != kind for partials in unknown):
            return None
        unknown = []  # ``reduce`` has set all values; return a ``LazyReduction`` all the same
    elif kind == Reduction(math.inf) and len(unknown) < len(tensors):
        reduce(unknown)  # all ranks but the first stack 0 for known values: the maximum would lose negative ones
        unknown = []
    if not unknown and kind == Reduction(math.inf):
        kind = SUM
    is_first = all(group.rank() == 0 for group in across.groups)
    rows = []
    for x in tensors:
        if unknown and isinstance(x, LazyReduction) and x._value is None:
            rows.append(x._partials.local)
            continue
        value = (x.value() if isinstance(x, LazyReduction) else x).double()
        known = kind.to_partial(value.abs()).copysign(value) if kind.is_sum else kind.to_partial(value)
        rows.append(known if is_first else torch.full_like(known, kind.of_empty))
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return _lazy(Partials(torch.stack(rows, dim), kind, across), dtype)
