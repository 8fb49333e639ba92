"""Parameters of a group: their shards, their unsharded weights and gradients in buffers, and their ``.grad``.

    FlatParam         | w1        |·| w2               |·| w3     |····|     world * chunk elements; · padding
    shards of ranks   | chunk 0         | chunk 1         | chunk 2    |

A ``FlatParam`` holds the parameters of one dtype (and codec) of a group; each ``FSDPParam`` is one of them, and its
range of the chunk is the local tensor of the DTensor that users see. ``UnshardedParams`` and
``UnshardedGrads`` are a group's weights and gradients in a buffer.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from yafsdp_cc.engine.buffers import offsets_of
from yafsdp_cc.engine.step_state import StepState, transient, unreduced

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from yafsdp_cc.engine.buffers import Buffer
    from yafsdp_cc.engine.communicator import CommContext
    from yafsdp_cc.engine.layout import Extent, Layout, ShardSpec
    from yafsdp_cc.engine.protocols import AllGather, AllReduce, Collective, ReduceScatter

_graph_task = torch._C._current_graph_task_id
_GRAD_REFERENCES, _LOCAL_REFERENCES = 2, 3
"""Results of ``sys.getrefcount`` for a gradient and for its local tensor if only an ``FSDPParam`` refers to them."""


class FSDPParam(StepState):
    """One parameter of a group, sharded or, where it is too small for that, replicated.

    Args:
        spec: how the parameter is sharded.
        sites: the modules that hold the parameter, each with its attribute's name; several where it is tied.
        extent: the parameter's place in the flat buffer.
        wrap: makes the sharded tensor that users see from this rank's range of the parameter or of its gradient.
    """

    is_withheld: bool = transient(False)
    """Whether ``grad`` has a sum that becomes ``parameter.grad`` only if some rank has used the parameter."""
    is_left_out: bool = transient(False)
    """Whether the sum under way is kept out of ``.grad``: a frozen parameter's is of residuals or estimates alone."""
    written: bool = unreduced(False)
    """Whether a backward has written to ``unsharded_grad`` since the last reduce."""
    is_owed: bool = unreduced(False)
    """Whether the parameter was trained in a backward whose gradients are kept: it gets their sum, also if it is frozen
    by then. Ranks agree on ``is_owed``, and not on ``written``."""
    factor: float = 1.0
    """Factor that a backward multiplies the parameter's gradients by; 0 makes zeros of infinite ones, too."""

    def __init__(
        self,
        spec: ShardSpec,
        sites: Sequence[tuple[nn.Module, str]],
        extent: Extent,
        wrap: Callable[[Tensor, ShardSpec], DTensor],
    ) -> None:
        self.spec = spec
        self.wrap = wrap
        spec.owner = weakref.ref(self)
        self.sites = tuple(sites)
        self.shown: Tensor | None = None
        """Tensor that forwards read as the parameter. It is in the ``__dict__`` of its modules, read before
        ``Module.__getattr__``, unless the program has replaced the parameter there (``ModuleParameters``)."""
        self._lists = tuple(
            (module._flat_weights, module._flat_weights_names.index(attribute))
            for module, attribute in sites
            # an RNN's forward reads the list ``_flat_weights``, in which weight_norm puts weights that it computes
            if isinstance(module, nn.RNNBase) and attribute in module._flat_weights_names
        )
        self.extent = extent
        self.notes: Mapping[str, Any] = {}
        """Attributes that users and frameworks had set on the parameter before sharding; views in forwards get them."""
        self.index = -1
        """Index of the parameter among all parameters of the engine."""
        self.span = (0, 0)
        """Range of this rank's chunk that holds the parameter's elements."""
        self.unit: nn.Module
        """Module that was sharded with this parameter, the first if several modules were sharded together."""
        self.flat: FlatParam | None = None
        """``FlatParam`` that the parameter is a part of; None where the parameter is replicated."""
        self.engine: weakref.ref[object] | None = None
        """Weak reference to the parameter's present engine, an ``FSDPState`` (``state.engine_of``)."""
        self.parameter: nn.Parameter
        """The parameter that users see; its local tensor is ``local``."""
        self.local: Tensor
        """This rank's elements of the parameter, a range of its shard."""
        self.grad: DTensor
        """Sharded tensor that ``parameter.grad`` is set to: the same object in each step, unless others refer to it."""
        self.local_grad: Tensor
        self.unsharded_grad: Tensor | None = None
        """View of the gradient buffer that the backward under way writes the gradient to."""
        self.accepts_in: int | None = None
        """Id of the backward (graph task) that may write to ``unsharded_grad``; None: every backward may."""
        self.acquire_grad_buffer: Callable[[], None]
        """Function that sets ``unsharded_grad``, unless the backward under way wants no gradients of parameters."""

    @property
    def is_held(self) -> bool:
        """Whether the modules still hold this parameter, not another in its place."""
        return all(module._parameters.get(attribute) is self.parameter for module, attribute in self.sites)

    def accumulate_grad(self, grad: Tensor) -> None:
        """Write a gradient of the parameter to the gradient buffer: copy the first one, with a cast, add later ones."""
        if not self.parameter.requires_grad:  # a parameter frozen since the forward gets no gradient
            return
        target = self.unsharded_grad
        if target is None or (self.accepts_in is not None and self.accepts_in != _graph_task()):
            self.acquire_grad_buffer()
            # no buffer: ``torch.autograd.grad`` of inputs wants no gradients of parameters
            if (target := self.unsharded_grad) is None:
                return
        grad = grad if self.factor == 1 else grad * self.factor if self.factor else torch.zeros_like(grad)
        if grad.is_sparse or (self.written and type(grad) is not Tensor):
            grad = grad.to_dense() if grad.is_sparse else torch.empty_like(target).copy_(grad)
        (target.add_ if self.written else target.copy_)(grad)
        self.written = True

    def local_range(self, chunk: Tensor) -> Tensor:
        """Return this rank's part of the parameter in ``chunk``, a buffer as long as this rank's chunk."""
        start, end = self.span
        return chunk.narrow(0, start, end - start).view(self.spec.local_shape)

    def set_parameter(self, parameter: nn.Parameter) -> None:
        """Put ``parameter`` into the modules of ``sites`` in place of the parameter that they hold."""
        for module, attribute in self.sites:
            module._parameters[attribute] = parameter
        for weights, index in self._lists:
            weights[index] = parameter

    def register_unsharded(self, view: Tensor) -> None:
        """Let the modules' forwards read ``view``, or the sharded parameter itself, as the parameter."""
        if self.spec.tensor_parallel is not None and view is not self.parameter:
            view = self.spec.tensor_parallel.wrap_unsharded(view)
        view._is_param = True  # makes isinstance(view, nn.Parameter) true
        if self.notes:
            view.__dict__.update(self.notes)
        self.shown = view
        for module, attribute in self.sites:
            if module._parameters.get(attribute) is self.parameter:
                module.__dict__[attribute] = view
        for weights, index in self._lists:
            weights[index] = view

    def register_sharded(self) -> None:
        """Let the modules read the sharded parameter again."""
        self.shown = None
        for module, attribute in self.sites:
            module.__dict__.pop(attribute, None)
        for weights, index in self._lists:
            weights[index] = self.parameter


def owner_of(spec: ShardSpec) -> FSDPParam | None:
    """Return the parameter that is sharded by ``spec``; None if that parameter is gone, or in no engine."""
    owner = None if spec.owner is None else spec.owner()
    assert owner is None or isinstance(owner, FSDPParam)
    return owner


class Group(Protocol):
    """The part of ``ParamGroup`` that collectives and error messages need."""

    name: str
    registered: list[Sequence[Tensor]]

    @property
    def role(self) -> str: ...

    def gathered(self, flat: FlatParam) -> tuple[int | None, Tensor]: ...


class Divisor:
    """The number that a sum over ranks is divided by, once, at the end, to give the mean (post-divide)."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor = factor
        self.casts = device.type == "cuda"
        """Whether ``torch.div`` casts within its kernel, as on CUDA; on other devices a cast would allocate."""
        of = {dtype: torch.full((1,), factor, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)}
        self.of = of | {torch.bfloat16: of[torch.float32]}
        """Tensor [1] of ``factor`` by the sum's dtype. A Python number would become a new tensor in every division, and
        a 0-d tensor would not cast bf16 sums to fp32."""
        self.inverse = 1 / factor if math.frexp(factor)[0] == 0.5 else None
        """1 / ``factor`` if ``factor`` is a power of two, so that multiplying by it divides exactly; else None."""


class ShardedGrad:
    """Flat buffer of which the parameters' ``.grad`` are views, except a ``.grad`` made while an older one was kept.

    Args:
        buffer: [chunk], in the parameters' ``grad_dtype``.
        params: the parameters whose gradients it holds.
    """

    def __init__(self, buffer: Tensor, params: Sequence[FSDPParam]) -> None:
        self.params = params
        self._use(buffer)

    def _use(self, buffer: Tensor) -> None:
        self.buffer, self._has_all = buffer, True
        for param in self.params:
            self._hold(param, param.local_range(buffer))
        self._viewers = _viewers(buffer)

    def _hold(self, param: FSDPParam, local: Tensor) -> None:
        param.local_grad, param.grad = local, param.wrap(local, param.spec)

    def _is_kept(self, params: Sequence[FSDPParam]) -> bool:
        """Return whether the program refers to a gradient of ``params``, its ``to_local()`` or a view of it."""
        return _viewers(self.buffer) > self._viewers or any(
            sys.getrefcount(param.grad) > _GRAD_REFERENCES or sys.getrefcount(param.local_grad) > _LOCAL_REFERENCES
            for param in params
        )

    def add(self, parts: Iterable[tuple[int, Tensor]], divisor: Divisor, used: Sequence[bool]) -> None:
        """Divide a sum over ranks and add it to the gradients, or overwrite them with it where ``.grad`` is None.

        If this rank has not ``used`` a parameter, ``.grad`` stays None until ``hand_out_grads``: another rank may have.

        Args:
            parts: offset and values of each part of the sum, which together fill the buffer; values are overwritten.
            divisor: the number that turns the sum into the mean.
            used: for each parameter, whether this rank wrote a gradient.
        """
        before = {each: each.grad if each.is_withheld else each.parameter.grad for each in self.params}
        cleared = [param for param, grad in before.items() if grad is None]
        fresh, dtype = len(cleared) == len(before), self.buffer.dtype
        is_other = fresh and any(each.parameter.grad_dtype not in (None, dtype) for each in self.params)
        if cleared and (is_other or not self._has_all or self._is_kept(cleared)):
            # the program may refer to gradients of an earlier step, which must not change
            if fresh:
                self._use(self._new_buffer(self.buffer.numel(), grad_dtype_of(self.params)))
            for param in () if fresh else cleared:  # gradients of other parameters stay in the old buffer
                self._has_all = False
                self._hold(param, self._new_buffer(param.local_grad.numel(), dtype).view_as(param.local_grad))
        before = {param: grad for param, grad in before.items() if not param.is_left_out}
        ours = self._has_all and before.keys() == {*self.params} and all(p.grad is grad for p, grad in before.items())
        for start, part in parts:
            if fresh or ours:
                is_whole = part.numel() == self.buffer.numel()
                target = self.buffer if is_whole else self.buffer.narrow(0, start, part.numel())
                (self._add if ours else self._set)(target, part, divisor)
            else:
                self._add_to_each(start, part, divisor, before)
        for param, is_used in zip(self.params, used, strict=True):
            if is_used and param.parameter.grad is None:
                param.parameter.grad = param.grad
            param.is_withheld = param.parameter.grad is None

    def _add_to_each(self, start: int, part: Tensor, divisor: Divisor, before: dict[FSDPParam, Tensor | None]) -> None:
        for param, grad in before.items():
            target = param.local_grad
            if grad is not None:  # the user may have assigned ``.grad``
                _check_assigned(grad, param)  # without elements, too: this rank would wait for those that raise
                target = cast("DTensor", grad).to_local()
            first, last = max(param.span[0], start), min(param.span[1], start + part.numel())
            if first >= last:
                continue
            target = target.view(-1).narrow(0, first - param.span[0], last - first)
            (self._set if grad is None else self._add)(target, part.narrow(0, first - start, last - first), divisor)

    def _new_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.buffer.device)

    def _set(self, grad: Tensor, total: Tensor, divisor: Divisor) -> None:
        if grad.dtype == total.dtype or divisor.casts:
            torch.div(total, divisor.of[total.dtype], out=grad)
        else:
            grad.copy_(total.div_(divisor.of[total.dtype]))

    def _add(self, grad: Tensor, total: Tensor, divisor: Divisor) -> None:
        if grad.dtype != total.dtype and not divisor.casts:
            grad.add_(total.div_(divisor.of[total.dtype]))
        elif divisor.inverse is None:  # ``addcdiv_`` gives the bits of ``div_`` and ``add_``, in one pass
            grad.addcdiv_(total, divisor.of[total.dtype])
        else:
            grad.add_(total, alpha=divisor.inverse)


def _check_assigned(grad: Any, param: FSDPParam) -> None:
    """Raise a ``TypeError`` if ``grad``, perhaps assigned by the user, is not sharded as ``param`` is."""
    held: ShardSpec | None = getattr(grad, "shard_spec", None)
    if held is None or not held.matches(param.spec):
        what = f"a {type(grad).__name__} of shape {list(grad.shape)}" if held is None else f"sharded as {held} is"
        raise TypeError(
            f"{param.spec} has a .grad that is {what}: change the gradient that it has in place, or set it to None"
        )


def grad_dtype_of(params: Sequence[FSDPParam]) -> torch.dtype:
    """Return the dtype of the ``.grad`` of parameters in one flat buffer.

    Raises:
        ValueError: the ``grad_dtype`` of two parameters differ.
    """
    first, *others = (each.parameter.grad_dtype or each.parameter.dtype for each in params)
    for param, other in zip(params[1:], others, strict=True):
        if other != first:
            raise ValueError(
                f"'{params[0].spec.name}' has grad_dtype {first} and '{param.spec.name}', sharded together with it, "
                f"{other}: set grad_dtype before shard(), or the same for both"
            )
    return first


def _viewers(buffer: Tensor) -> int:
    """Return how many tensors view the memory of ``buffer``."""
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))


@dataclass(eq=False)
class FlatParam:
    """Parameters of one dtype in a flat buffer, a chunk for each rank; subclasses in ``forms`` store it otherwise."""

    params: Sequence[FSDPParam]
    """Parameters in the order in which they lie in the flat buffer."""
    layout: Layout
    rank: int
    """Index of this rank among the ranks of a shard, and of its chunk ``sharded`` in the flat buffer."""
    sharded: Tensor
    """This rank's shard [chunk] in the parameters' own dtype, which the optimizer updates."""
    compute_dtype: torch.dtype
    """Dtype of the unsharded weights in a weight buffer; uint8 where an all-gather extension fills it."""
    reduce_dtype: torch.dtype
    """Dtype of the unsharded gradients."""
    divisor: Divisor
    """Divisor of summed gradients; it may be replaced at any time."""
    device: torch.device
    """Device that forwards run on."""
    sharded_grad: ShardedGrad | None = field(default=None, init=False)
    all_gather: AllGather = field(init=False)
    reduce_scatter: ReduceScatter = field(init=False)
    all_reduce: AllReduce | None = field(default=None, init=False)
    """All-reduce of partial sums; None without replicas. ``sharding.assembly`` makes a ``FlatParam``'s collectives."""
    reduce_context: CommContext = field(init=False)
    """Communicator and scratch buffers of this flat parameter's reduces."""
    group: Group = field(init=False)
    """``ParamGroup`` of these parameters in the present engine; replicated ones have none."""
    add_sum: Callable[[Iterable[tuple[int, Tensor]], Sequence[bool]], None] = field(init=False)
    """Function that receives each sum over the ranks of a shard: ``add_to_grad``, or with replicas the method
    ``PartialReduceOutput.add``, which ``ReplicaSums.bind`` sets in each new engine."""

    def __post_init__(self) -> None:
        self.add_sum = self.add_to_grad
        for param in self.params:
            param.flat = self

    @property
    def name(self) -> str:
        """Full name of the first parameter in the flat buffer."""
        return self.params[0].spec.name

    @property
    def version(self) -> int:
        """Number that rises whenever torch sees a write to the shard."""
        return self.sharded._version

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of summed gradients."""
        return torch.float64 if self.reduce_dtype == torch.float64 else torch.float32

    @property
    def trainable(self) -> bool:
        return any(param.parameter.requires_grad for param in self.params)

    @property
    def takes_sums(self) -> bool:
        """Whether the next sum over ranks has gradients of a parameter, perhaps of one that was frozen since."""
        return self.trainable or any(param.is_owed for param in self.params)

    @property
    def device_bytes(self) -> int:
        """Bytes of the shard and of its gradient on the device that forwards run on."""
        return self.sharded.nbytes + (self.sharded_grad.buffer.nbytes if self.sharded_grad is not None else 0)

    @property
    def host_bytes(self) -> int:
        """Bytes of the shard and of its gradient in host memory; 0 unless they are offloaded."""
        return 0

    @property
    def unsharded_numel(self) -> int:
        """Number of elements of ``compute_dtype`` that the unsharded weights take in a weight buffer."""
        return self.layout.numel

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return views of ``whole``, a buffer of weights or gradients: one for each parameter, in its shape."""
        return [whole.narrow(0, place.offset, place.numel).view(place.shape) for place in self.layout.extents]

    def use_sharded(self, sharded: Tensor) -> None:
        """Use ``sharded`` as this rank's chunk from now on."""
        self.sharded = sharded

    def extension_all_gather(self) -> AllGather | None:
        """Return the all-gather that calls the extension of a tensor subclass; None: no extension."""
        return None

    def send_buffer(self, own: Tensor, *, in_place: bool) -> Tensor:
        """Return the shard in the dtype of ``own`` [chunk]: the shard itself if that is its dtype and not ``in_place``,
        else ``own``, with a copy of the shard."""
        return self.sharded if not in_place and own.dtype == self.sharded.dtype else own.copy_(self.sharded)

    def read(self, target: Tensor, start: int = 0) -> None:
        """Copy the elements of the shard from ``start`` on to ``target``, cast to its dtype."""
        target.copy_(self.sharded.narrow(0, start, target.numel()))

    @property
    def sum_collectives(self) -> Sequence[Collective]:
        """Collectives that sum the gradients: the reduce-scatter, and with replicas the all-reduce over them."""
        return (self.reduce_scatter,) if self.all_reduce is None else (self.reduce_scatter, self.all_reduce)

    def make_sharded_grad(self) -> ShardedGrad:
        """Return the buffer of sharded gradients, which the first call makes: frozen parameters need none."""
        if self.sharded_grad is None:
            numel, dtype = self.layout.chunks[self.rank], grad_dtype_of(self.params)
            buffer = torch.zeros(numel, dtype=dtype, device=self.sharded.device)
            self.sharded_grad = ShardedGrad(buffer, self.params)
        return self.sharded_grad

    def add_to_grad(self, parts: Iterable[tuple[int, Tensor]], used: Sequence[bool]) -> None:
        """Divide a sum over ranks and add it to ``.grad``; the arguments are those of ``ShardedGrad.add``."""
        self.make_sharded_grad().add(parts, self.divisor, used)


def owe(params: Iterable[FSDPParam]) -> bool:
    """Note that ``params``, if they are trained, get the next sum; return whether one of them does."""
    trained = [param for param in params if param.parameter.requires_grad]
    for param in trained:
        param.is_owed = True
    return bool(trained)


def _weight_sizes(flats: Sequence[FlatParam]) -> list[int]:
    weights = [flat.unsharded_numel * flat.compute_dtype.itemsize for flat in flats]
    return [*weights, *(flat.all_gather.scratch_bytes() for flat in flats)]


def unsharded_bytes(flats: Sequence[FlatParam]) -> int:
    """Return the bytes of a buffer for the weights of ``flats`` and the scratch of their all-gathers."""
    return offsets_of(_weight_sizes(flats))[1]


def unsharded_grad_bytes(flats: Iterable[FlatParam]) -> int:
    """Return the bytes of a buffer for the gradients of ``flats``."""
    return offsets_of([flat.layout.numel * flat.reduce_dtype.itemsize for flat in flats])[1]


class UnshardedParams:
    """Views of a group's unsharded weights in one buffer, made once for each pair of group and buffer.

    [Note: saved views] Autograd saves views of the weight buffer for the backward, and refuses them if their version
    has changed. The collectives write through ``flat``, the forward reads through ``views``: aliases of the same memory
    with version counters of their own, so that refilling the buffer between forward and backward is invisible to
    autograd. The engine must therefore see to it that the buffer holds this group's weights again before the backward
    reads a saved view.
    """

    def __init__(self, buffer: Buffer, flats: Sequence[FlatParam]) -> None:
        self.buffer = buffer
        sizes = _weight_sizes(flats)
        offsets, _ = offsets_of(sizes)
        places = zip(offsets[: len(flats)], flats, strict=True)
        self.flat = [buffer.view(start, flat.unsharded_numel, flat.compute_dtype) for start, flat in places]
        """View of ``buffer`` for each ``FlatParam``'s unsharded weights, [world * chunk]; collectives write to it."""
        self.scratch = [
            buffer.view(offset, size, torch.uint8) if size else None
            for offset, size in zip(offsets[len(flats) :], sizes[len(flats) :], strict=True)
        ]
        """Scratch memory (uint8) of each ``FlatParam``'s all-gather; None for an all-gather that needs none."""
        self._aliases = [whole.data for whole in self.flat]
        self._versions = [alias._version for alias in self._aliases]
        self.views = [view for flat, alias in zip(flats, self._aliases, strict=True) for view in flat.views(alias)]
        # Leaves that collect gradients of operations that reentrant checkpointing runs again. They are views: autocast
        # caches casts of leaves that are no views, and would reuse a cast of older weights within one context.
        with torch.no_grad():
            self.leaves = [view.view_as(view) for view in self.views]

    def was_written(self) -> bool:
        """Return whether the program has written to weights through ``views`` since the last call."""
        before, self._versions = self._versions, [alias._version for alias in self._aliases]
        return before != self._versions


class UnshardedGrads:
    """Views of a group's unsharded gradients in one buffer."""

    def __init__(self, buffer: Buffer, flats: Sequence[FlatParam]) -> None:
        self.buffer = buffer
        self.flats = flats
        self.params = [param for flat in flats for param in flat.params]
        offsets, _ = offsets_of([flat.layout.numel * flat.reduce_dtype.itemsize for flat in flats])
        places = zip(offsets, flats, strict=True)
        self.flat = [buffer.view(start, flat.layout.numel, flat.reduce_dtype) for start, flat in places]
        """View of ``buffer`` for each ``FlatParam``'s unsharded gradients, [world * chunk]."""
        self.views = [view for flat, whole in zip(flats, self.flat, strict=True) for view in flat.views(whole)]
        padded = zip(flats, self.flat, strict=True)
        self._padding = [whole[start:end] for flat, whole in padded for start, end in flat.layout.gaps]

    def zero_unwritten(self) -> list[list[bool]]:
        """Zero gradients that no backward has written, perhaps another group's; return which are written, by flat."""
        for param, view in zip(self.params, self.views, strict=True):
            if not param.written:
                view.zero_()
        for gap in self._padding:
            gap.zero_()
        return [[param.written for param in flat.params] for flat in self.flats]
