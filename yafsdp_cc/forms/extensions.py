"""Parameters of tensor subclasses in the engine: FSDP2's all-gather extension, and frozen bytes with a class.

Shards are plain tensors (``forms.subclasses``), except for classes around several tensors (``ClassParam``); a forward
sees a tensor of the subclass around views of the weight buffer. A frozen parameter's bytes lie in a ``FlatParam`` like
any others (``SubclassParam``). A parameter with an all-gather extension has a ``FlatParam`` to itself, since the
extension takes whole rows, as many on each rank, and its output fills the weight buffer:

    sharded, fp32      | rows 0, 1 of w | rows 2, 3      | row 4, zeros   |      FSDP2's shards along dimension 0
                         fsdp_pre_all_gather, on each rank
    all-gather         | fp8 of rank 0  | fp8 of rank 1  | fp8 of rank 2  | scales of ranks 0, 1, 2 |
                         fsdp_post_all_gather
    weight buffer      | gathered tensors and others of the unsharded tensor |
    gradient buffer    | gradient of w, in the dtype of reduces, and padding  |  reduced like any other

All inner tensors of the unsharded tensor lie in the weight buffer, so that a refill for the backward restores those
that autograd has saved.

Each rank's rows of a parameter whose class is around several tensors are a tensor of the class, as in FSDP2, so the
class's own operations run in an optimizer's update. The extension's methods belong to the class, or were assigned to
the local tensor after sharding. The gradient is always one plain tensor:

    class around a, b      a | rows 0, 1 | rows 2, 3 | row 4, zeros |      the local tensor of rank 0 is the class
                           b | rows 0, 1 | rows 2, 3 | row 4, zeros |      around rows 0 and 1 of both
    gradient, .grad            rows 0, 1 | rows 2, 3 | row 4        |      plain
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for

from yafsdp_cc.engine.layout import Extent, Layout, align
from yafsdp_cc.engine.param import FlatParam, FSDPParam
from yafsdp_cc.engine.protocols import AllGather
from yafsdp_cc.forms.subclasses import (
    PART_ALIGNMENT,
    PLAIN,
    Form,
    PackedForm,
    Part,
    TensorSubclass,
    as_plain,
    nbytes_of,
    tensors_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.engine.communicator import Works

NO_EXTENSION = (
    "and requires a gradient, but its class has no fsdp_pre_all_gather and fsdp_post_all_gather, FSDP2's all-gather "
    "extension, which would tell what to gather: define both, freeze it with requires_grad_(False), or pass it in "
    "ignored_params. After fully_shard(), the local tensor of the parameter may be given them before the first forward"
)


def check_local_tensors(flat: FlatParam) -> None:
    """Raise a ``ValueError`` if a local tensor lacks an all-gather extension, or has one that would never be called."""
    for param in flat.params:
        has = [hasattr(param.local, f"fsdp_{each}_all_gather") for each in ("pre", "post")]
        if isinstance(flat, ExtensionFlatParam):
            if flat.extension.subclass.keeps_class and not all(has):
                raise ValueError(f"'{param.spec.name}' is a {flat.extension.subclass.name} {NO_EXTENSION}")
        elif has[0]:
            raise ValueError(
                f"'{param.spec.name}' was given fsdp_pre_all_gather on its local tensor after sharding, which would "
                "never be called: a flat range has no rows to hand to it. Let the class of the parameter have the "
                "extension, and make it one of that class before fully_shard()"
            )


class SubclassParam(FSDPParam):
    """A frozen parameter of a tensor subclass, sharded as bytes; forwards see a tensor of the class around them."""

    def __init__(self, subclass: TensorSubclass, *rest: Any) -> None:
        super().__init__(*rest)
        self.subclass = subclass

    def register_unsharded(self, view: Tensor) -> None:
        super().register_unsharded(self.subclass.restore(view))


def holds_bytes(param: FSDPParam) -> bool:
    """Return whether the elements of ``param`` are bytes of a quantised weight, which no cast or codec may touch."""
    return type(param) is SubclassParam


def in_class_of(param: FSDPParam, whole: nn.Parameter) -> nn.Parameter:
    """Return the ``whole`` parameter as a tensor of the class that ``param`` had, sharing the memory of ``whole``."""
    if not isinstance(param, SubclassParam) or param.subclass.keeps_class:
        return whole
    made: Any = param.subclass.restore(whole.detach())
    made.requires_grad_(whole.requires_grad)
    made._is_param = True
    return cast("nn.Parameter", made)


class ExtensionParam(SubclassParam):
    """A parameter with an all-gather extension: forwards see the result of ``fsdp_post_all_gather``."""

    def register_unsharded(self, view: Tensor) -> None:
        assert isinstance(self.flat, ExtensionFlatParam)
        is_trained = view.requires_grad and torch.is_grad_enabled()
        FSDPParam.register_unsharded(self, (_stand_in if is_trained else ExtensionFlatParam.unsharded)(self.flat, view))


class _StandIn(torch.autograd.Function):
    """Returns the unsharded tensor in place of a plain placeholder of its shape; the placeholder gets the gradient."""

    @staticmethod
    def forward(ctx: Any, flat: ExtensionFlatParam, placeholder: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return flat.unsharded(placeholder)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        return None, None if grad is None else as_plain(grad)


_stand_in: Callable[[ExtensionFlatParam, Tensor], Tensor] = _StandIn.apply


class Extension(NamedTuple):
    """A parameter's tensor subclass with an all-gather extension, and the arguments of the extension's methods."""

    subclass: TensorSubclass
    mesh: DeviceMesh
    """Mesh of the ranks that the parameter is sharded across."""
    module: nn.Module
    """The first module that holds the parameter."""
    policy: MixedPrecisionPolicy
    dtype: torch.dtype
    """Dtype that the forward computes in."""


def row_layout(shape: Sequence[int], world: int) -> Layout:
    """Lay out one parameter by rows, as FSDP2 does: ``ceil(shape[0] / world)`` on each rank, the last ones padded."""
    extent = Extent(tuple(shape), 0, torch.Size(shape).numel())
    rows = -(-shape[0] // world)
    return Layout((extent,), (rows * torch.Size(shape[1:]).numel(),) * world)


class ExtensionFlatParam(FlatParam):
    """One parameter with an all-gather extension, in the layout of ``row_layout``.

    ``compute_dtype`` is uint8, since the extension decides what the unsharded weights are.
    """

    made: PackedForm
    """Recipe to construct the unsharded tensor from ``made_bytes`` of the weight buffer; set by each all-gather."""
    made_bytes: int

    def __init__(self, extension: Extension, *rest: Any) -> None:
        self.extension = extension
        super().__init__(*rest)

    @property
    def unsharded_numel(self) -> int:
        return self.made_bytes

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.params[0].spec.shape

    @property
    def rows(self) -> Tensor:
        """This rank's rows of the parameter, those that pad the shard included."""
        chunk: Tensor = self.sharded.view(-1, *self.shape[1:])
        return chunk

    def extension_all_gather(self) -> AllGather:
        return ExtensionAllGather(self)

    def method(self, name: str) -> Callable[..., Any]:
        """Return a method of the extension, bound to this rank's rows, those that pad the shard included."""
        found: Callable[..., Any] = getattr(self.extension.subclass.around(self.rows), name)
        return found

    def clear_padding(self) -> None:
        """Zero the rows that pad the shard: an all-gather extension may compute a scale from all rows."""
        _, end = self.params[0].span
        if end < self.sharded.numel():
            self.sharded.narrow(0, end, self.sharded.numel() - end).zero_()

    def views(self, whole: Tensor) -> list[Tensor]:
        if whole.dtype != torch.uint8:
            return super().views(whole)  # ``whole`` is a gradient buffer
        # Autograd's graph gets a placeholder, one element expanded to the parameter's shape, for the unsharded tensor.
        placeholder = whole.narrow(0, 0, self.extension.dtype.itemsize).view(self.extension.dtype)
        return [placeholder.expand(self.shape) if self.shape else placeholder.view(())]

    def unsharded(self, placeholder: Tensor) -> Tensor:
        """Return the tensor that forwards see, made around the weight buffer that ``placeholder`` is a view of."""
        start = placeholder.storage_offset() * placeholder.itemsize
        data = torch.empty(0, dtype=torch.uint8, device=placeholder.device)
        data.set_(placeholder.untyped_storage(), start, (self.made_bytes,), (1,))
        return self.made.made_of(data)


def forward_dtype(flat: FlatParam) -> torch.dtype:
    """Return the dtype of the weights that a forward sees, whatever the weight buffer holds."""
    return flat.extension.dtype if isinstance(flat, ExtensionFlatParam) else flat.compute_dtype


class ExtensionAllGather(AllGather):
    """An all-gather of the tensors that ``fsdp_pre_all_gather`` returns: one collective for each tensor.

    The constructor runs the extension once to learn their sizes: a collective if the extension's methods are.
    """

    def __init__(self, flat: ExtensionFlatParam) -> None:
        self.flat = flat
        self._metadata: dict[int, Any] = {}
        """Metadata from ``fsdp_pre_all_gather``, by the address of the weight buffer that it belongs to."""
        self._takes_mesh_only = self._check_signature() == 1
        self._stride = make_contiguous_strides_for(flat.shape)
        flat.clear_padding()
        world = flat.layout.world
        inputs, metadata = self._pre_all_gather()
        self._inputs: list[Part] = []
        """Place of the first rank's part in the all-gather's output, for each gathered tensor."""
        end = 0
        for tensor in inputs:
            self._inputs.append(Part.of(end, tensor))
            end = align(end + world * tensor.nbytes, PART_ALIGNMENT)
        trial = torch.zeros(end, dtype=torch.uint8, device=flat.device)
        made = self._post_all_gather(trial, metadata)
        form, found = self._form_of(made)
        parts = []
        for tensor in found:
            if (part := self._part_within(trial, tensor)) is None:
                part = Part.of(end, tensor.contiguous())
                end = align(end + part.nbytes, PART_ALIGNMENT)
            parts.append(part)
        # ``made_bytes`` is divisible by the number of ranks, for secondary shards (hpZ), and never 0: autograd's
        # placeholder is a view of the buffer's first element (``ExtensionFlatParam.views``).
        flat.made_bytes = align(max(end, PART_ALIGNMENT), PART_ALIGNMENT * world)
        flat.made = PackedForm(form, tuple(parts), made.size(), made.stride())

    def planned_bytes(self) -> int:
        return (self.flat.layout.world - 1) * sum(part.nbytes for part in self._inputs)

    def encoding(self) -> str:
        return ", ".join(dict.fromkeys(str(part.dtype).removeprefix("torch.") for part in self._inputs))

    def reset(self) -> None:
        self._metadata.clear()

    @torch.no_grad()
    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        comm = self.context.comm
        inputs, self._metadata[output.data_ptr()] = self._pre_all_gather()
        self._check_same("fsdp_pre_all_gather", inputs, self._inputs)
        works: list[Any] = []
        self.sent_bytes = self.planned_bytes()
        for part, tensor in zip(self._inputs, inputs, strict=True):
            gathered = output.narrow(0, part.offset, comm.world * part.nbytes)
            own = comm.own_chunk(gathered)
            part._replace(offset=0).within(own).copy_(tensor)
            works += comm.all_gather(gathered, own, async_op)
        return works

    @torch.no_grad()
    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        before = self.flat.made
        made = self._post_all_gather(output, self._metadata.pop(output.data_ptr()))
        form, found = self._form_of(made)
        self._check_same("fsdp_post_all_gather", found, before.parts)
        for part, tensor in zip(before.parts, found, strict=True):
            if self._part_within(output, tensor) is None:
                part.within(output).copy_(tensor)
        self.flat.made = before._replace(form=form)

    def _check_signature(self) -> int:
        """Return the number of arguments of ``fsdp_pre_all_gather``: 1 (the mesh) in its older form, else 5."""
        signature = inspect.signature(self.flat.method("fsdp_pre_all_gather"))
        count = len(signature.parameters)
        if count not in (1, 5):
            raise ValueError(
                f"'{self.flat.name}': fsdp_pre_all_gather{signature} of its class takes {count} "
                "arguments: FSDP2's takes (mesh), or (mesh, outer_size, outer_stride, module, mp_policy)"
            )
        return count

    @torch.no_grad()
    def _pre_all_gather(self) -> tuple[Sequence[Tensor], Any]:
        """Return the extension's tensors to gather, contiguous, and its metadata."""
        flat, (_, mesh, module, policy, _) = self.flat, self.flat.extension
        extension = flat.method("fsdp_pre_all_gather")
        if self._takes_mesh_only:
            inputs, metadata = extension(mesh)
        else:
            inputs, metadata = extension(mesh, flat.shape, self._stride, module, policy)
        return [tensor.contiguous() for tensor in inputs], metadata

    @torch.no_grad()
    def _post_all_gather(self, output: Tensor, metadata: Any) -> Tensor:
        """Return the unsharded tensor that the extension makes around the gathered ``output``."""
        flat, world = self.flat, self.flat.layout.world
        outputs = tuple(self._gathered(output, part, world) for part in self._inputs)
        made, _ = flat.method("fsdp_post_all_gather")(outputs, metadata, flat.extension.dtype)
        if made.shape != flat.shape:  # the gathered rows include padding: cut it off
            made = torch.as_strided(made, flat.shape, self._stride, 0)
        if made.shape != flat.shape:
            raise ValueError(
                f"'{flat.name}' of {list(flat.shape)} is padded to {flat.layout.numel} elements for {world} ranks, and "
                f"as_strided of a {type(made).__name__} does not take that away again: choose a size of its first "
                f"dimension that {world} divides, or pass it in ignored_params"
            )
        result: Tensor = made
        return result

    @staticmethod
    def _gathered(output: Tensor, part: Part, world: int) -> Tensor:
        whole = Part(part.offset, (world * part.nbytes,), (1,), torch.uint8)
        return whole.beginning_within(output).view(part.dtype).view(-1, *part.shape[1:])

    def _form_of(self, made: Tensor) -> tuple[Form, list[Tensor]]:
        form = Form.of(made)
        if form is None:
            raise ValueError(
                f"fsdp_post_all_gather of '{self.flat.name}' returns a {type(made).__name__}, which has no "
                "__tensor_flatten__ that would tell what it is made of: give the class one, or pass the parameter in "
                "ignored_params"
            )
        return form, form.parts(made)

    @staticmethod
    def _part_within(output: Tensor, tensor: Tensor) -> Part | None:
        """Return the place of ``tensor`` in the memory of ``output``; None if it lies elsewhere."""
        part = Part.of(tensor.data_ptr() - output.data_ptr(), tensor)
        return part if tensor.device == output.device and 0 <= part.offset <= output.nbytes - part.nbytes else None

    def _check_same(self, method: str, tensors: Sequence[Tensor], parts: Sequence[Part]) -> None:
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if found != [(part.shape, part.dtype) for part in parts]:
            raise RuntimeError(
                f"{method} of '{self.flat.name}' gave other tensors than when the buffers were made, {found}: their "
                "shapes and dtypes must stay"
            )


# Local tensors of a parameter's own class -----------------------------------------------------------------------------


class ClassParam(ExtensionParam):
    """A sharded parameter whose local tensor is of the parameter's tensor subclass."""

    def local_range(self, chunk: Tensor) -> Tensor:
        if type(chunk) in PLAIN:
            return super().local_range(chunk)  # ``chunk`` is a plain buffer of gradients
        return chunk.narrow(0, 0, self.spec.local_shape[0])


class ClassFlatParam(ExtensionFlatParam):
    """One parameter whose shard, [rows, ...], is of the parameter's tensor subclass; all ranks have as many rows."""

    _versions = 0

    @property
    def sharded(self) -> Tensor:
        """The shard; its version counter follows those of its inner tensors, which users may write to."""
        wrapped = (*tensors_of(self._sharded), *tensors_of(self.params[0].local))
        if (versions := sum(each._version for each in wrapped)) != self._versions:
            self._versions = versions
            torch._C._increment_version((self._sharded,))
        return self._sharded

    @sharded.setter
    def sharded(self, sharded: Tensor) -> None:
        self._sharded = sharded

    @property
    def device_bytes(self) -> int:
        return super().device_bytes - self.sharded.nbytes + nbytes_of(self.sharded)

    @property
    def rows(self) -> Tensor:
        return self.sharded

    def clear_padding(self) -> None:
        rows = self.params[0].spec.local_shape[0]
        for each in tensors_of(self.sharded):
            each.narrow(0, rows, each.size(0) - rows).zero_()

    def method(self, name: str) -> Callable[..., Any]:
        local = self.params[0].local
        given = vars(local).get(name)
        if given is None:
            found: Callable[..., Any] = getattr(self.sharded, name)
            return found
        # Bind a method of the local tensor to the padded shard: the local tensor lacks the rows that pad it, so that
        # ranks would gather different shapes.
        is_method = inspect.ismethod(given) and given.__self__ is local
        bound: Callable[..., Any] = given.__func__.__get__(self.sharded) if is_method else given
        return bound
