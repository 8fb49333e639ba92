"""Parameters of tensor subclasses: their inner tensors, the tensors that are sharded, and how their class is restored.

Three kinds of parameters of tensor subclasses can be sharded:

* Classes with FSDP2's all-gather extension, ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, around one tensor of
  the parameter's own shape and dtype (torchao's ``WeightWithDynamicFloat8CastTensor``). That tensor is sharded along
  dimension 0, trained or not; the extension decides what is gathered (``forms.extensions``).
* Trained parameters of classes around several tensors, or that cannot be made again from their tensors, and frozen ones
  with the extension. Each rank has a tensor of the class with some of the rows, made by the class's own operations as
  in FSDP2; the extension of the class, or of the local tensor, decides what is gathered (``forms.extensions``).
* Other frozen parameters of any class that is a plain tensor with attributes (bitsandbytes' ``Params4bit``), or that
  lists its tensors in ``__tensor_flatten__`` (torchao's ``NF4Tensor``): their bytes are sharded and gathered unchanged.

The forward sees a tensor of the parameter's class with its attributes and metadata, or the extension's result.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.dlpack import from_dlpack

from yafsdp_cc.engine.layout import align

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
PLAIN = (nn.Parameter, Tensor, FakeTensor)
"""Classes of plain parameters and plain local tensors; ``FakeTensor`` occurs in estimates of memory."""
PART_ALIGNMENT = 64
"""Alignment of inner tensors in a flat buffer, in bytes."""


class Part(NamedTuple):
    """One inner tensor of a tensor subclass, and its place in a flat buffer of bytes."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, offset: int, tensor: Tensor) -> Part:
        return cls(offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Number of bytes from the first byte of the inner tensor to its last."""
        if not math.prod(self.shape):
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def within(self, data: Tensor) -> Tensor:
        """Return the inner tensor as a view of ``data``, the flat buffer of bytes."""
        own = data.narrow(0, self.offset, self.nbytes).view(self.dtype)
        return own.as_strided(self.shape, self.stride)

    def beginning_within(self, data: Tensor) -> Tensor:
        """Return the inner tensor as a view of ``data``, with a storage that begins where the inner tensor does."""
        own: Tensor = from_dlpack(data.narrow(0, self.offset, self.nbytes))
        return own.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Form:
    """Recipe to construct tensors of a subclass from plain tensors.

    ``kind`` is the subclass, or ``Tensor`` where the constructed tensor is plain.
    """

    kind: type[Tensor]
    names: tuple[str, ...]
    """Names of the attributes that hold the inner tensors; none for a class whose own memory holds the elements."""
    context: Any
    """Metadata from ``__tensor_flatten__``, or the attributes of a tensor whose own memory holds the elements."""

    @classmethod
    def of(cls, tensor: Tensor) -> Form | None:
        """Return how to construct tensors like ``tensor``; None if its class does not list its inner tensors."""
        kind = type(tensor)
        if kind in PLAIN:
            return cls(Tensor, (), {})
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            return cls(kind, tuple(names), context)
        if tensor.layout is not torch.strided or (not tensor.is_meta and _wraps(tensor)):
            return None
        return cls(kind, (), dict(vars(tensor)))

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Return the inner tensors of ``tensor`` in the order of ``names``, sharing its memory."""
        if not self.names:
            with torch._C.DisableTorchFunctionSubclass():
                return [tensor.detach().as_subclass(Tensor)]
        return [getattr(tensor, name) for name in self.names]

    def made_of(self, parts: list[Tensor], size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Return a tensor of ``kind`` with the inner tensors ``parts``, sharing their memory."""
        if self.kind is Tensor:
            return parts[0]
        if self.names:
            inner = dict(zip(self.names, parts, strict=True))
            made: Tensor = self.kind.__tensor_unflatten__(inner, self.context, size, stride)  # type: ignore[attr-defined]
            return made
        made = torch.Tensor._make_subclass(self.kind, parts[0], False)
        # copy quantisation state: a forward may change that of this tensor, not that of others
        made.__dict__.update({name: _copied(value) for name, value in self.context.items()})
        return made


class PackedForm(NamedTuple):
    """Recipe to construct a tensor of a subclass from one flat buffer of bytes, in which its inner tensors lie."""

    form: Form
    parts: tuple[Part, ...]
    size: torch.Size
    stride: tuple[int, ...]

    def made_of(self, data: Tensor) -> Tensor:
        """Return the tensor whose inner tensors are views of ``data``, a flat buffer of bytes."""
        if len(self.parts) == 1:
            views = [self.parts[0].within(data)]
        else:  # some subclasses take only inner tensors that begin at the same offset of their storages
            views = [part.beginning_within(data) for part in self.parts]
        return self.form.made_of(views, self.size, self.stride)


def _wraps(tensor: Tensor) -> bool:
    """Return whether ``tensor`` was made by ``_make_wrapper_subclass`` and has no memory of its own."""
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == 0
    except (RuntimeError, NotImplementedError):
        return True


def _copied(value: object) -> object:
    is_state = hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type))
    return copy.copy(value) if is_state else value


@dataclass(frozen=True, eq=False)
class TensorSubclass:
    """The tensor subclass of a parameter, and how the parameter is sharded.

    The tensor that is sharded has its ``TensorSubclass`` as an attribute (``subclass_of``), whose ``restore`` makes
    tensors of the class again.
    """

    form: Form
    keeps_class: bool
    """Whether each rank's local tensor is of the parameter's class rather than plain."""
    packed: PackedForm | None
    """Recipe to construct a parameter from its gathered bytes; None: an all-gather extension has its own."""

    @property
    def extends_all_gather(self) -> bool:
        return self.packed is None

    def restore(self, whole: Tensor) -> Tensor:
        """Return a tensor of the subclass that shares memory with ``whole``, the elements of the plain parameter."""
        return self.around(whole) if self.packed is None else self.packed.made_of(whole.view(-1).view(torch.uint8))

    def around(self, rows: Tensor) -> Tensor:
        """Return a tensor of the subclass around ``rows``, a plain tensor of some or all rows of a parameter."""
        return self.form.made_of([rows], rows.size(), rows.stride())

    def metadata(self) -> Iterator[Tensor]:
        """Yield the tensors in the parameter's attributes or metadata, such as scales, which every rank has whole."""
        yield from _tensors_of(self.form.context, set())

    @property
    def name(self) -> str:
        """Full name of the tensor subclass."""
        return _name_of(self.form.kind)


def _tensors_of(value: object, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen or isinstance(value, (nn.Module, type)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    held = value if isinstance(value, (dict, list, tuple)) else getattr(value, "__dict__", ())
    for each in held.values() if isinstance(held, dict) else held:
        yield from _tensors_of(each, seen)


def _properties(parameter: nn.Parameter) -> Iterator[tuple[str, Any]]:
    """Yield the properties that the class of ``parameter`` has beyond those of every tensor."""
    for kind in type(parameter).__mro__:
        if kind in (nn.Parameter, Tensor):
            return
        for name, value in vars(kind).items():
            if isinstance(value, property):
                with suppress(AttributeError):
                    yield name, getattr(parameter, name)


SUBCLASS = "_yafsdp_cc_subclass"
"""Attribute of a parameter that holds its ``TensorSubclass``, or that of the parameter which it replaces."""


def tensors_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold the elements of ``tensor``: its inner tensors, or itself."""
    if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of all inner tensors of ``tensor``."""
    return sum(each.nbytes for each in tensors_of(tensor))


def as_plain(tensor: Tensor) -> Tensor:
    """Return a plain copy of ``tensor``, which the class of ``tensor`` makes; a plain tensor itself."""
    if type(tensor) in PLAIN:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def check_plain(name: object, local: Tensor, what: str, instead: str) -> None:
    """Raise a ``NotImplementedError``, that ``what`` takes only plain tensors, if ``local`` is of a subclass."""
    if type(local) not in PLAIN:
        raise NotImplementedError(
            f"{what} takes plain tensors, and what this rank has of {name} is a {_name_of(type(local))}: {instead}"
        )


def subclass_of(parameter: Tensor) -> TensorSubclass | None:
    """Return the tensor subclass that ``parameter`` has, or had before it was made plain; None if it never had one."""
    found: TensorSubclass | None = parameter.__dict__.get(SUBCLASS)
    return found


def plain_parameter(name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Return the plain parameter that is sharded in place of one of a tensor subclass; other parameters unchanged.

    The plain parameter shares memory with ``parameter``. If a frozen one has several inner tensors, their bytes move to
    one buffer and they become views of it. A parameter that is sharded as a tensor of its class is returned unchanged.

    Raises:
        ValueError: a parameter of this class cannot be sharded; the message says why, and what to do.
    """
    is_dtensor = hasattr(parameter, "_local_tensor")
    if type(parameter) in PLAIN or is_dtensor or isinstance(parameter, nn.parameter.UninitializedParameter):
        return parameter
    form, extends = Form.of(parameter), _extends_all_gather(name, parameter)
    if form is None:
        raise ValueError(
            f"{_described(name, parameter)}, whose class has no __tensor_flatten__ that would tell what it is made of: "
            f"{_REMEDY}"
        )
    parts = form.parts(parameter)
    if nested := [type(part).__name__ for part in parts if type(part) not in PLAIN]:
        raise ValueError(
            f"{_described(name, parameter)} around a {nested[0]}: only what wraps plain tensors can be "
            f"sharded. {_REMEDY}"
        )
    is_master = [part.shape == parameter.shape and part.dtype == parameter.dtype for part in parts]
    is_restored = not form.names or _is_restored(parameter, form, parts)
    is_floating = parameter.is_floating_point() and parameter.ndim > 0
    keeps_class = parameter.requires_grad or (extends and is_floating and _divides_rows(parameter, form))
    extends = extends and is_master == [True] and is_floating
    if keeps_class and not (extends and is_restored):
        _check_rows(name, parameter, form)
        parameter.__dict__[SUBCLASS] = TensorSubclass(form, True, None)
        return parameter
    if not is_restored:
        raise ValueError(
            f"{_described(name, parameter)}, whose __tensor_unflatten__(inner_tensors, metadata, outer_size, "
            f"outer_stride) does not make one of its class again: {_REMEDY}"
        )
    values, packed = (parts[0], None) if extends else _bytes_of(name, parameter, form, parts)
    plain = with_grad_dtype(nn.Parameter(values.detach(), parameter.requires_grad), parameter)
    if not form.names:  # torch looks up entries of state dicts such as ``weight.absmax`` on the parameter
        plain.__dict__.update(vars(parameter) | dict(_properties(parameter)))
    plain.__dict__[SUBCLASS] = TensorSubclass(form, False, packed)
    return plain


def with_grad_dtype(fresh: AnyTensor, of: Tensor) -> AnyTensor:
    """Return ``fresh`` with the ``grad_dtype`` of the tensor that it replaces: constructors take no ``grad_dtype``."""
    if of.grad_dtype != of.dtype:
        fresh.grad_dtype = of.grad_dtype
    return fresh


def empty_like(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter like ``parameter`` on ``device``."""
    values = torch.empty_like(parameter, device=device)
    fresh = with_grad_dtype(nn.Parameter(values, parameter.requires_grad), parameter)
    if (subclass := subclass_of(parameter)) is not None:
        fresh.__dict__[SUBCLASS] = subclass
    return fresh


def leave_meta(plain: nn.Parameter, original: nn.Parameter) -> None:
    """Give ``plain``, a parameter on the meta device, the memory of the parameter ``original`` that it replaces."""
    subclass = subclass_of(plain)
    if subclass is None or original.is_meta:
        return
    fresh = with_grad_dtype(nn.Parameter(subclass.form.parts(original)[0].detach(), plain.requires_grad), plain)
    fresh.__dict__.update(vars(plain))
    torch.utils.swap_tensors(plain, fresh)


_REMEDY = "pass it in ignored_params, which leaves it whole on every rank"


def _described(name: str, parameter: nn.Parameter) -> str:
    return f"{name!r} is a {_name_of(type(parameter))}"


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _extends_all_gather(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has FSDP2's all-gather extension; raise a ``ValueError`` if it has only half of it."""
    has = [hasattr(parameter, f"fsdp_{each}_all_gather") for each in ("pre", "post")]
    if any(has) and not all(has):
        found, missing = ("pre", "post") if has[0] else ("post", "pre")
        raise ValueError(
            f"{_described(name, parameter)}, which has fsdp_{found}_all_gather and no fsdp_{missing}_all_gather: an "
            "all-gather extension is both of them"
        )
    return all(has)


def _is_restored(parameter: nn.Parameter, form: Form, parts: list[Tensor]) -> bool:
    """Return whether the class can make a tensor of its own again from the inner tensors and metadata."""
    try:
        return type(form.made_of(parts, parameter.size(), parameter.stride())) is form.kind
    except (AttributeError, TypeError):
        return False


@torch.no_grad()
def _divides_rows(parameter: nn.Parameter, form: Form) -> bool:
    """Return whether a parameter's class makes tensors of some rows, around as many rows of each inner tensor."""
    firsts: list[tuple[int, ...]] = []
    with suppress(Exception):  # operations of the subclass may raise anything
        row = parameter.new_zeros((2, *parameter.shape[1:])).narrow(0, 0, 1)
        firsts = [tuple(each.shape[:1]) for each in tensors_of(row)] if type(row) is form.kind else []
    return set(firsts) == {(1,)}


def _check_rows(name: str, parameter: nn.Parameter, form: Form) -> None:
    """Raise a ``ValueError`` if a trained parameter cannot be sharded as a tensor of its class."""
    described = f"{_described(name, parameter)} of {list(parameter.shape)} and requires a gradient"
    if not form.names:
        raise ValueError(
            f"{described}, but its class has no __tensor_flatten__ that would tell what it wraps, and no "
            "fsdp_pre_all_gather and fsdp_post_all_gather, FSDP2's all-gather extension, which would tell what to "
            f"gather: freeze it with requires_grad_(False), or {_REMEDY}"
        )
    if not _divides_rows(parameter, form):
        raise ValueError(
            f"{described}: one around {', '.join(form.names)} is sharded by rows, which its new_zeros(...).narrow(0, "
            "start, length) would have to give as one of the class whose tensors have as many rows each. Freeze it "
            f"with requires_grad_(False), or {_REMEDY}"
        )


def _bytes_of(name: str, parameter: nn.Parameter, form: Form, parts: list[Tensor]) -> tuple[Tensor, PackedForm]:
    """Return the bytes of a frozen parameter, which are sharded and never cast, and how to construct it from them."""
    if any(part.is_meta for part in parts):
        raise ValueError(
            f"{_described(name, parameter)} on the meta device, which has no quantisation to tell what its bytes "
            "mean: load and quantise it before sharding"
        )
    if kept := next((key for key, each in vars(parameter).items() if not form.names and _shares(each, parts[0])), None):
        raise ValueError(
            f"{_described(name, parameter)} that keeps its own elements once more, in attribute {kept!r}, so that "
            f"sharding would free nothing: {_REMEDY}"
        )
    if len(parts) == 1:
        values = parts[0].contiguous()
        return values, PackedForm(form, (Part.of(0, values),), parameter.size(), parameter.stride())
    layout = []
    end = 0
    for part in parts:
        layout.append(Part.of(end, part.contiguous()))
        end = align(end + layout[-1].nbytes, PART_ALIGNMENT)
    data = torch.zeros(end, dtype=torch.uint8, device=parts[0].device)
    for attribute, place, part in zip(form.names, layout, parts, strict=True):
        # this assignment frees the memory that the inner tensor had before
        setattr(parameter, attribute, place.beginning_within(data).copy_(part))
    return data, PackedForm(form, tuple(layout), parameter.size(), parameter.stride())


def _shares(value: object, data: Tensor) -> bool:
    return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
