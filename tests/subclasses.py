"""Tensor subclasses as parameters, in small: what torchao and bitsandbytes make, with nothing of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from typing_extensions import Self

T = TypeVar("T", bound=Tensor)
aten = torch.ops.aten
_KEEP_CLASS = {
    *(aten.empty_like.default, aten.new_zeros.default, aten.slice.Tensor, aten.copy_.default, aten.view.default),
    *(aten.as_strided.default, aten._to_copy.default, aten.split.Tensor, aten.clone.default, aten.detach.default),
}
"""Operations after which FSDP2 wants a tensor of the class again."""
FLOAT8 = torch.float8_e4m3fn


def _wrapper(kind: type[T], like: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> T:
    made: Any = Tensor._make_wrapper_subclass(
        kind, like.size(), strides=like.stride(), dtype=dtype, device=device or like.device
    )
    return cast("T", made)


class Unsharded8(Tensor):
    """Float8 values and their scale, as the forward sees a weight: [m, n], with the dtype of the forward."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Unsharded8:
        return _wrapper(cls, data, dtype)

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.values, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Unsharded8:
        return Unsharded8(inner["values"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.as_strided.default, aten.detach.default, aten.view.default, aten.t.default):
            own = args[0]
            return Unsharded8(func(own.values, *args[1:], **(kwargs or {})), own.scale, own.dtype)
        plain = pytree.tree_map_only(Unsharded8, Unsharded8.whole, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def whole(self) -> Tensor:
        """The weight in the dtype of the forward."""
        return (self.values.float() * self.scale).to(self.dtype)


class Float8Weight(Tensor):
    """A weight that is trained in its own precision, and gathered in float8 with one scale: torchao's in small."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Float8Weight:
        return _wrapper(cls, data, data.dtype)

    def __init__(self, data: Tensor) -> None:
        self.master = data

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["master"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Float8Weight:
        return cls(inner["master"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(Float8Weight, lambda each: each.master, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return pytree.tree_map_only(Tensor, cls, result) if func in _KEEP_CLASS else result

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        largest = self.master.abs().amax().float()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest.clamp(1e-12) / torch.finfo(FLOAT8).max
        return ((self.master / scale).to(FLOAT8),), scale

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (values,) = outputs
        if out is not None:
            assert isinstance(out, Unsharded8)
            out.scale = scale
            return None
        return Unsharded8(values, scale, dtype), (values,)


class RowScaledWeight(Float8Weight):
    """The same with a scale for each row, gathered too, and a plain weight in memory of its own for the forward.

    By the second generation of the extension's signature.
    """

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        assert (outer_stride, type(module), mp_policy.output_dtype) == ((outer_size[1], 1), nn.Linear, None)
        scale = row_scale(self.master)
        return ((self.master / scale).to(FLOAT8), scale), outer_size[0]

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], rows: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        values, scale = outputs
        whole = (values.float() * scale).to(dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole[:rows])
            return None
        return whole, (whole,)


class PaddedWeight(Float8Weight):
    """One that pads its shard as FSDP2 asks of it where the ranks do not divide the rows."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        rows = -(-outer_size[0] // mesh.size())
        (values,), scale = super().fsdp_pre_all_gather(mesh)
        padded = values.new_zeros(rows, outer_size[1])
        padded[: values.size(0)] = values
        return (padded,), scale


def tensor_scale(weight: Tensor) -> Tensor:
    """Return the scale of a ``Float8Weight``."""
    return weight.abs().amax().float().clamp(1e-12) / torch.finfo(FLOAT8).max


def row_scale(weight: Tensor) -> Tensor:
    """Return the scales of a ``RowScaledWeight``, [rows, 1]."""
    return weight.abs().amax(1, keepdim=True).float().clamp(1e-12) / torch.finfo(FLOAT8).max


class _Rounded(torch.autograd.Function):
    """A weight in the precision of float8; its gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale_of: Callable[[Tensor], Tensor]) -> Tensor:
        scale = scale_of(weight)
        return ((weight / scale).to(FLOAT8).float() * scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class RoundedLinear(nn.Linear):
    """What one process computes with such a weight, without any tensor subclass."""

    scale_of: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, _Rounded.apply(self.weight, self.scale_of), self.bias)


class Codes(Tensor):
    """A frozen weight as 4-bit codes of 16 levels, two to a byte, with a scale for each 32 elements: NF4 in small."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, levels: Tensor, size: Any) -> Codes:
        return _wrapper(cls, torch.empty(size, device="meta"), torch.float32, codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, levels: Tensor, size: Any) -> None:
        self.codes, self.scales, self.levels = codes, scales, levels

    @classmethod
    def of(cls, weight: Tensor) -> Codes:
        """Quantise ``weight``, of an even number of blocks."""
        levels = torch.linspace(-1, 1, 16)
        blocks = weight.detach().reshape(-1, 32)
        scales = blocks.abs().amax(1)
        nearest = (blocks / scales[:, None])[..., None].sub(levels).abs().argmin(-1).to(torch.uint8).view(-1, 2)
        return cls(nearest[:, 0] << 4 | nearest[:, 1], scales, levels, weight.size())

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales", "levels"], self.size()

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Codes:
        return cls(inner["codes"], inner["scales"], inner["levels"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return Codes(args[0].codes, args[0].scales, args[0].levels, args[0].size())
        plain = pytree.tree_map_only(Codes, Codes.whole, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def whole(self) -> Tensor:
        """The weight in fp32."""
        nibbles = torch.stack([self.codes >> 4, self.codes & 15], 1).view(-1, 32).long()
        return (self.levels[nibbles] * self.scales[:, None]).view(self.size())


class Bare(Tensor):
    """A weight around two tensors that every operation runs on, as torch's ``TwoTensor``, without an extension."""

    def __new__(cls, one: Tensor, other: Tensor) -> Self:
        return _wrapper(cls, one, one.dtype)

    def __init__(self, one: Tensor, other: Tensor) -> None:
        assert one.storage_offset() == other.storage_offset()  # as TwoTensor wants it
        self.one, self.other = one, other

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Make one whose two tensors differ."""
        return cls(weight.clone(), weight / 2)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["one", "other"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Self:
        return cls(inner["one"], inner["other"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        both = [
            func(*own[0], **own[1])
            for name in ("one", "other")
            for own in [pytree.tree_map_only(cls, lambda each, name=name: getattr(each, name), (args, kwargs or {}))]
        ]
        leaves, tree = pytree.tree_flatten(both[0])
        pairs = zip(leaves, pytree.tree_leaves(both[1]), strict=True)
        made = [cls(*pair) if isinstance(pair[0], Tensor) else pair[0] for pair in pairs]
        return return_and_correct_aliasing(func, args, kwargs or {}, pytree.tree_unflatten(made, tree))


class Pair(Bare):
    """The same with an extension: forwards see it as it is."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        rows = -(-outer_size[0] // mesh.size()) - self.size(0)  # those that FSDP2 has the extension pad
        return tuple(nn.functional.pad(each, (0, 0, 0, rows)) for each in (self.one, self.other)), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        if out is None:
            return type(self)(*outputs).to(dtype), outputs
        assert isinstance(out, Pair)
        for own, gathered in zip((out.one, out.other), outputs, strict=True):
            if own.dtype != gathered.dtype:
                own.copy_(gathered)
        return None


class Halves(Pair):
    """The same, as a plain weight in the forward: the mean of its two tensors, the second gathered in bf16."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        (one, other), _ = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return (one, other.bfloat16()), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        one, other = outputs
        whole = (one + other.to(one.dtype)).to(dtype) / 2
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole[: out.size(0)])
        return None


class HalvesLinear(nn.Linear):
    """What one process computes with such a weight, ``weight`` and ``other``, without any tensor subclass."""

    other: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, _mean_of_halves(self.weight, self.other), self.bias)


class _Mean(torch.autograd.Function):
    """The mean of two weights, one rounded to bf16; the gradient of each is that of their mean."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return (one + other.bfloat16().float()) / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


_mean_of_halves: Callable[[Tensor, Tensor], Tensor] = _Mean.apply


class PackedBytes(nn.Parameter):
    """A frozen weight as bytes of a plain tensor, and what they mean in its attributes: bitsandbytes' in small."""

    state: Any

    @staticmethod
    def of(weight: Tensor, storage: torch.dtype) -> PackedBytes:
        """Quantise ``weight`` to 8 bits, stored in ``storage``, which need not be one byte long."""
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        data = (weight.detach() / scales).round().to(torch.int8).view(-1).view(storage)
        packed = Tensor._make_subclass(PackedBytes, data.view(-1, 1), False)
        packed.state = _State(scales, weight.size())  # type: ignore[attr-defined]
        return packed  # type: ignore[return-value]

    def whole(self) -> Tensor:
        """The weight in fp32."""
        values = self.detach().as_subclass(Tensor).view(-1).view(torch.int8).view(self.state.size)
        return values * self.state.scales


class _State:
    def __init__(self, scales: Tensor, size: torch.Size) -> None:
        self.scales, self.size = scales, size


class LowRank(nn.Module):
    """``base``, frozen, and an adapter of rank 4 that is trained."""

    def __init__(self, base: nn.Parameter, width: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base: Any = self.base
        return torch.tanh(x @ base.whole().to(x.dtype).T + self.up(self.down(x)))
