"""The exchange between replicas of a model around optimizer steps: the base of ``Overlap``, ``Outer`` and ``Gossip``.

A replica is a whole model, sharded across ranks with fast links among them. Synchronous data parallelism sums gradients
over all ranks in every backward. Here a backward sums them over the ranks of its replica alone, and a ``ReplicaSync``
exchanges gradients or weights with the ranks that hold the same shard in other replicas, around the optimizer's step:

    replica 0    | shard 0 | shard 1 |     reduce-scatter among the ranks of a row, in every backward
                      │         │
    replica 1    | shard 0 | shard 1 |     whatever a ReplicaSync sends along a column, before and after a step

The engine knows nothing of these exchanges: a ``ReplicaSync`` works on the local tensors of parameters of any sharded
or plain model.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from yafsdp_cc.engine.communicator import Communicator
from yafsdp_cc.engine.layout import Layout
from yafsdp_cc.engine.spec import specs_below
from yafsdp_cc.fsdp2.module import (
    BEFORE_UNSHARD,
    ShardedModule,
    check_shows_shards,
    ranks_of_model,
    require_state,
    undo_later,
)
from yafsdp_cc.optim.matrix import MatrixOptimizer
from yafsdp_cc.optim.one_bit import OneBitOptimizer
from yafsdp_cc.ranks.checks import all_gather_objects, check_dense, check_settings
from yafsdp_cc.ranks.mesh import broadcast_values, shard_group
from yafsdp_cc.tensor.dtensor import follow_optimizers
from yafsdp_cc.tensor.module_parameters import named_sharded_parameters
from yafsdp_cc.tensor.shown import REPLICA_SYNC

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.engine.streams import CommStream

_REFUSED = (LBFGS, MatrixOptimizer, OneBitOptimizer)
"""Optimizers that ``ReplicaSync`` refuses: their steps do more than update elements by their own gradient and state."""


class _Bound(NamedTuple):
    """Attribute of each parameter whose replicas are synchronized.

    A dictionary from parameters to their ``ReplicaSync``, which refers to the parameters, would never free them.
    """

    sync: ReplicaSync | None
    is_trained: bool
    """Whether the parameter was trainable when the replicas were joined."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # ``torch.save`` saves a parameter's attributes, whose types ``torch.load`` must know

    @staticmethod
    def of(parameter: Tensor) -> _Bound:
        found = getattr(parameter, REPLICA_SYNC, None)
        return found if isinstance(found, _Bound) else _UNBOUND


_UNBOUND = _Bound(None, False)


def _trained_by(parameter: Tensor) -> ReplicaSync | None:
    """Return the ``ReplicaSync`` of a parameter; None if it has none, or was frozen when the replicas were joined."""
    bound = _Bound.of(parameter)
    return bound.sync if bound.is_trained else None


class ReplicaSync(ABC):
    """Settings and state of the synchronization of one model's replicas. Each kind of synchronization is a subclass.

    An instance serves one model: pass it as ``sync`` to ``shard``, or to ``join_replicas``.
    """

    finishes_alone: ClassVar[bool] = False
    """Whether ``finish`` issues no collective, so that state dicts may call it."""
    writes_weights: ClassVar[bool] = True
    """Whether the ``ReplicaSync`` writes weights in every step, beside the optimizer's own writes."""

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        """The trained parameters by full name."""
        self.comm: Communicator
        """Communicator of the ranks that hold this shard, one in each replica."""
        self.device: torch.device
        self.members: list[int] = []
        """Global ranks of all replicas; of this replica alone, if replicas come and go."""
        self._frozen: dict[str, nn.Parameter] = {}
        self._ignored: dict[nn.Parameter, str] = {}
        """Parameters that sharding ignores, which each rank has for itself, and their names."""
        self._stepped_by: weakref.ref[Optimizer] | None = None
        self._versions: list[int] = []
        """Version counters of the local tensors when ``remember_weights`` was called last."""
        self._in_use: Optimizer | None = None
        """Optimizer of the steps since the last ``settle`` or ``resume``, kept alive for ``finish``; else None."""

    def __repr__(self) -> str:
        """Return the constructor call that makes an equal object: ranks compare these texts."""
        given = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    # Methods that each subclass defines

    @abstractmethod
    def before_step(self, optimizer: Optimizer) -> None:
        """Called before the optimizer's step, when ``.grad`` has the replica's mean gradient."""

    @abstractmethod
    def after_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer's step."""

    @abstractmethod
    def finish(self) -> None:
        """Complete all exchanges, so that all replicas hold the same weights and optimizer state."""

    @abstractmethod
    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends to other replicas per step, on average."""

    @abstractmethod
    def memory(self) -> Mapping[str, int]:
        """Return the bytes of this object's buffers by name, for the memory plan, including those that a step makes."""

    def prepare(self) -> None:
        """Make buffers, after ``parameters`` and ``comm`` were set and all replicas have the same weights."""

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the state to save beside model and optimizer, by name: a tensor like each of ``locals()``, in their
        order.

        A collective, called after ``finish``. The state is the same on all replicas. Training goes on from it, too, so
        that a job that continues and one that resumes make the same steps.
        """
        return {}

    def load_state(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Resume from weights that were just loaded, with the saved result of ``state`` if there is one."""

    def compare_steps(self) -> None:
        """Raise a ``RuntimeError`` if replicas have made different numbers of steps. A collective."""

    # Methods that no subclass overrides

    def connect(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        """Make ``comm``, and copy the first replica's weights and buffers to all replicas."""
        if mesh is None:
            raise ValueError(f"mesh=None: {type(self).__name__} needs the ranks that hold the same shard, as a 1D mesh")
        group = shard_group(mesh)
        tensors = {f"tensor {n}": each for n, each in enumerate(self.described(model))}
        check_settings({"sync": self, "the number of tensors": len(tensors), **tensors}, [group], "join_replicas()")
        self.comm = Communicator(group, self.device)
        self.members = sorted({rank for ranks in all_gather_objects(self.members, [group]) for rank in ranks})
        synchronized = (*self.parameters.values(), *self._frozen.values(), *model.buffers())
        broadcast_values([held_of(each) for each in synchronized], mesh)

    def described(self, model: nn.Module) -> list[str]:
        """Describe each parameter and buffer that replicas synchronize: they compare the descriptions."""
        check_dense(model.named_buffers(), "join_replicas()")
        return [
            f"{name} {list(local_of(each).shape)} {each.dtype}{', not trained' if name in self._frozen else ''}"
            for name, each in (*self.parameters.items(), *self._frozen.items(), *model.named_buffers())
        ]

    def bind(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        """Synchronize ``model`` from now on. A collective: all replicas take the first one's weights and buffers.

        Args:
            mesh: 1D, the ranks that hold the same shard, one in each replica; None if replicas come and go.
        """
        if any(_trained_by(each) is self for each in self.parameters.values()):
            raise ValueError(f"this {type(self).__name__} synchronizes a model already: make another one")
        check_shows_shards(model, "join_replicas()")
        ignored = {each for spec in specs_below(model) for each in spec.ignored}
        self._ignored = {each: name for name, each in model.named_parameters() if each in ignored}
        every = {name: each for name, each in model.named_parameters() if each not in self._ignored}
        named = {name: each for name, each in every.items() if each.requires_grad}
        for name, each in named.items():
            if _trained_by(each) is not None:
                raise ValueError(f"the replicas of this {type(model).__name__} are synchronized already ('{name}' is)")
            if each.is_complex():
                raise ValueError(
                    f"'{name}' is {each.dtype} and requires a gradient, but replicas exchange real numbers: store its "
                    "real view (torch.view_as_real), or freeze it with requires_grad_(False)"
                )
        if not named:
            raise ValueError(f"this {type(model).__name__} has no parameter that is trained: nothing to synchronize")
        self.parameters = named
        self._frozen = {name: each for name, each in every.items() if name not in named}
        self.device = local_of(next(iter(named.values()))).device
        self.members = _ranks_of(model)
        with torch.no_grad():
            self.connect(model, mesh)
        self.prepare()
        for parameter in every.values():
            setattr(parameter, REPLICA_SYNC, _Bound(self, parameter.requires_grad))
        if self.finishes_alone:
            hook = model.register_state_dict_pre_hook(_settle)
            if isinstance(model, ShardedModule):
                undo_later(model, hook.remove)
        _watch_optimizers()

    def settle(self) -> None:
        """Call ``finish``, after which another optimizer may make the next step."""
        with torch.inference_mode(False), torch.no_grad():  # a later step cannot write to tensors of inference mode
            self.finish()
        self._in_use = None

    def resume(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Call ``load_state``, after which another optimizer may make the next step."""
        self.load_state(state)
        self._in_use = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that has stepped the model last; None before the first step, and once it is freed."""
        return None if self._stepped_by is None else self._stepped_by()

    def locals(self) -> list[Tensor]:
        """Return the local tensor of each parameter."""
        return [local_of(each) for each in self.parameters.values()]

    def remember_weights(self) -> None:
        """Note the version of each parameter: ``changed`` tells which have changed since."""
        self._versions = [each._version for each in self.locals()]

    def changed(self) -> list[str]:
        """Return the names of parameters that the program has changed since ``remember_weights``."""
        found = zip(self.parameters, self.locals(), self._versions, strict=False)  # no versions before the first step
        return [name for name, local, version in found if local._version != version]

    def refuse_changes(self, when: str, *, warns: bool = False) -> None:
        """Raise a ``RuntimeError``, or warn, if the program has changed weights since ``remember_weights``.

        A replica whose program has changed nothing does not raise: ``warns`` is for calls in which it would then wait.
        """
        if changed := self.changed():
            told = (
                f"'{changed[0]}', or a parameter that shares its buffer, was changed {when}. Call "
                "yafsdp_cc.synchronize_replicas(model) on all ranks before it"
            )
            if not warns:
                raise RuntimeError(told)
            warnings.warn(told, stacklevel=2)

    def adopt(self, optimizer: Optimizer) -> None:
        """Check an optimizer before its first step on this model, and remember it."""
        if self._in_use is optimizer:
            return
        name = type(optimizer).__name__
        if self._in_use is not None:
            raise ValueError(
                f"two optimizers, a {type(self._in_use).__name__} and a {name}, step this model, whose replicas "
                "exchange something once per step: make one optimizer with several parameter groups, or call "
                "yafsdp_cc.synchronize_replicas(model) before another one takes over"
            )
        if isinstance(optimizer, _REFUSED):
            raise ValueError(
                f"{type(self).__name__} needs an optimizer of torch.optim that treats each element by itself (AdamW, "
                f"SGD, ...); {name} does not. Leave sync out, or choose another optimizer"
            )
        self._in_use = optimizer
        if self.optimizer is optimizer:
            return
        self._stepped_by = weakref.ref(optimizer)
        if self.finishes_alone:
            optimizer.register_state_dict_pre_hook(lambda _: self.settle())

    def check_parameters(self, optimizer: Optimizer) -> None:
        """Raise a ``ValueError`` where a step would change a parameter that replicas do not synchronize."""
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is None or _trained_by(parameter) is self or parameter in self._ignored:
                continue
            name = next((name for name, each in self._frozen.items() if each is parameter), None)
            if name is not None:
                raise ValueError(
                    f"'{name}' has a gradient, but was frozen when replicas were joined, which do not synchronize it: "
                    "set requires_grad before shard(..., sync=...) or join_replicas(...)"
                )
            raise ValueError(
                f"{type(optimizer).__name__} steps a parameter of shape {list(parameter.shape)} that is not of the "
                "model whose replicas are synchronized: make an optimizer for each model"
            )


def _ranks_of(model: nn.Module) -> list[int]:
    """Return the global ranks that hold a part of this replica's model, whoever has sharded its modules."""
    if isinstance(model, ShardedModule):
        return ranks_of_model(require_state(model))
    meshes = [each.device_mesh for _, each in named_sharded_parameters(model) if isinstance(each, DTensor)]
    if not meshes and dist.is_initialized():  # a ``Membership`` makes groups itself, and needs no process group
        return [dist.get_rank()]
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def join_replicas(model: nn.Module, mesh: DeviceMesh | None, sync: ReplicaSync) -> None:
    """Synchronize the replicas of a model by a ``ReplicaSync`` instead of a sum in every backward. A collective.

    ``shard(model, mesh=mesh, sync=...)`` calls ``join_replicas`` by itself. After ``fully_shard`` with
    ``mesh["shard"]``, or for plain models on single ranks, call it before the optimizer's first step.

    Args:
        model: this rank's model, plain or sharded across the ranks of its replica. It gets the first replica's weights.
        mesh: 1D, the ranks that hold the same shard, one in each replica: ``mesh["replicate"]``. None for an ``Outer``
            with a ``Membership``.
        sync: ``Overlap()``, ``Outer(...)`` or ``Gossip(...)`` of ``yafsdp_cc.replicas``.

    Raises:
        ValueError: the replicas of ``model`` are synchronized already, or ``sync`` serves another model.
    """
    sync.bind(model, mesh)


def sync_of(model: nn.Module) -> ReplicaSync | None:
    """Return the ``ReplicaSync`` of ``model``; None if it has none."""
    return next((sync for _, each in named_sharded_parameters(model) if (sync := _trained_by(each)) is not None), None)


def _settle(model: nn.Module, *_: Any) -> None:
    """Complete exchanges before a state dict is made: a hook of the model, which does nothing on a copy of the model.

    A copy, or a pickle, of a model has the model's hooks, and its parameters have no ``_Bound``.
    """
    if (sync := sync_of(model)) is not None:
        sync.settle()


def synchronize_replicas(model: nn.Module) -> None:
    """Let all replicas of ``model`` hold the same weights and optimizer state. A collective; ``save`` calls it.

    Call it between steps, before the model is evaluated or its state dict is taken. It exchanges what replicas have not
    exchanged yet, and waits for exchanges in flight. Without a ``ReplicaSync`` it does nothing.
    """
    sync = sync_of(model)
    if sync is not None:
        sync.settle()
        sync.compare_steps()


BEFORE_UNSHARD.append(synchronize_replicas)


def refuse_sync(call: str, *models: nn.Module) -> None:
    """Raise a ``ValueError`` for a model with a ``ReplicaSync``: its replicas differ, and ``call`` needs equal ones."""
    for model in models:
        if (sync := sync_of(model)) is not None:
            raise ValueError(
                f"{call} takes all ranks for one model, and replicas of {type(sync).__name__} have weights and batches "
                "of their own between exchanges: leave it out, or shard without sync"
            )


# Around an optimizer's step ----------------------------------------------------------------------------------------


@cache
def _watch_optimizers() -> None:
    follow_optimizers()  # its hooks must run first: they increase versions that ``remember_weights`` notes
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    sync = _sync_of(optimizer)
    if sync is None or _is_within_step(optimizer):
        return
    sync.check_parameters(optimizer)
    sync.adopt(optimizer)
    if any(each is not None for each in (*args[1:], *kwargs.values())):  # the first argument is the optimizer
        raise ValueError(
            f"{type(optimizer).__name__}.step() was given a closure, which would compute gradients in the middle of "
            "an exchange between replicas: compute them before, and call step()"
        )
    if getattr(optimizer, "found_inf", None) is not None:
        raise ValueError(
            "a GradScaler scales and skips steps of a fused optimizer by itself, on each replica differently: train in "
            "bf16 without one"
        )
    with torch.no_grad():
        sync.before_step(optimizer)


def _after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    sync = _sync_of(optimizer)
    if sync is not None and not _is_within_step(optimizer):
        with torch.no_grad():
            sync.after_step(optimizer)


def step_on(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Run the optimizer's own step, without an exchange, on those of ``parameters`` that have a ``.grad``."""
    chosen = set(parameters)
    groups = optimizer.param_groups
    optimizer.param_groups = [{**each, "params": [p for p in each["params"] if p in chosen]} for each in groups]
    try:
        inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        optimizer.param_groups = groups


def _is_within_step(optimizer: Optimizer) -> bool:
    """Return whether the step whose hooks run is a part of another step of ``optimizer``.

    Where a class's ``step()`` calls ``super().step()``, torch runs global hooks for each of the two classes that has
    had an instance. The call stack shows that; a count of steps under way would stay wrong once a step has raised.
    """
    hooked = sys._getframe(2)  # torch's wrapper of ``step()``, which has called the caller
    frame = hooked.f_back
    while frame is not None:
        if frame.f_code is hooked.f_code and frame.f_locals.get("self") is optimizer:
            return True
        if frame.f_code is step_on.__code__ and frame.f_locals.get("optimizer") is optimizer:
            return True
        frame = frame.f_back
    return False


def _sync_of(optimizer: Optimizer) -> ReplicaSync | None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    trained = (_trained_by(each) for each in parameters)
    left_out = (_Bound.of(each).sync for each in parameters if each.grad is not None)
    return next((sync for sync in chain(trained, left_out) if sync is not None), None)


class StepCount:
    """Sums over replicas by which they compare their numbers of steps, and learn which parameters any has used.

    Args:
        others: what else must be alike on all replicas, for the error.
    """

    def __init__(self, comm: Communicator, stream: CommStream, parameters: int, others: str = "") -> None:
        self._comm, self._stream, self._others = comm, stream, others
        self._handle = stream.handle()
        self._made = 0
        self._sums = torch.zeros(2 + parameters, dtype=torch.int64, device=comm.device)
        self.nbytes = self._sums.nbytes

    def start(self, made: int, used: Sequence[bool] = ()) -> None:
        """Start the sums: after ``made`` steps, of which the last is under way and has ``used`` these parameters."""
        self._made = made
        number = 2 * made + bool(used)  # odd in a step's sum, else even: replicas must agree in that, too
        flags = used or [False] * (len(self._sums) - 2)
        self._sums.copy_(torch.tensor([number, number**2, *flags], device="cpu"))
        self._stream.wait_for_caller()
        self._stream.issue(self._handle, lambda async_op: self._comm.all_reduce(self._sums, async_op))

    def wait(self) -> None:
        self._handle.wait()

    def used(self) -> list[bool]:
        """Return whether each parameter has a gradient on any replica.

        Raises:
            RuntimeError: replicas have made different numbers of steps, and would exchange unlike things.
        """
        self.wait()
        total, squares, *used = self._sums.tolist()
        if self._comm.world * squares != total * total:
            raise RuntimeError(
                f"replicas have made different numbers of steps (this one {self._made}), so what they exchange would "
                "not match. optimizer.step() must run equally often on each: where a GradScaler skips a step on one "
                f"replica, it must skip that step on all{self._others}"
            )
        return [count > 0 for count in used]


# Local tensors -----------------------------------------------------------------------------------------------------


def sum_over(comm: Communicator, tensor: Tensor) -> None:
    """Sum ``tensor`` over the ranks of ``comm``, in place, and wait for the sum."""
    for work in comm.all_reduce(tensor, async_op=False):
        work.wait()


_RUN = 1 << 22
"""Number of elements of optimizer state that are copied or averaged at a time."""


def held_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a parameter or buffer; a plain one itself, whose memory ``writable`` may replace."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_of(tensor: Any) -> Tensor:
    """Return the local tensor of a parameter, gradient or state, without a copy."""
    return held_of(tensor).detach()


def read_grads(grads: Iterable[Tensor | None], views: Iterable[Tensor]) -> None:
    """Copy this rank's elements of gradients to ``views``; zeros where a gradient is None."""
    for grad, view in zip(grads, views, strict=True):
        if grad is None:
            view.zero_()
        elif grad.is_sparse:
            raise ValueError(
                f"a gradient of shape {list(grad.shape)} is sparse, and replicas sum dense ones: make its nn.Embedding "
                "with sparse=False"
            )
        else:
            view.copy_(local_of(grad))


def set_grad(parameter: nn.Parameter, total: Tensor | None, divisor: int) -> None:
    """Set this rank's elements of ``.grad`` to ``total / divisor``; ``.grad`` to None without a ``total``."""
    if total is None:
        parameter.grad = None
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    torch.div(total, divisor, out=local_of(parameter.grad))


def runs_of(parameters: Sequence[nn.Parameter]) -> Iterator[slice]:
    """Yield runs of adjacent parameters with about ``_RUN`` elements of this rank each."""
    first = elements = 0
    for place, parameter in enumerate(parameters, 1):
        elements += local_of(parameter).numel()
        if elements >= _RUN or place == len(parameters):
            yield slice(first, place)
            first, elements = place, 0


class LocalBuffer:
    """A flat fp32 buffer with room for this rank's elements of each of the tensors ``like``.

    Args:
        align: number of elements; each tensor's part begins at a multiple of it, and gaps between parts are zero.
        device: device of the buffer; None: that of the tensors.
    """

    def __init__(self, like: Sequence[Tensor], align: int = 1, device: torch.device | None = None) -> None:
        self.align, self._layout = align, Layout.of([each.shape for each in like], 1, align)
        self.data = torch.zeros(self._layout.numel, dtype=torch.float32, device=device or like[0].device)
        self.views = self.split(self.data)
        self._paddings = [self.data[start:end] for start, end in self._layout.gaps]

    def split(self, data: Tensor) -> list[Tensor]:
        """Return a view of each tensor's part of ``data``, a buffer of this layout."""
        return [data[each.offset : each.end].view(each.shape) for each in self._layout.extents]

    def zero_padding(self) -> None:
        """Zero the gaps between parts, which decoding may have set: codecs of few bits have no level for zero."""
        if self._paddings:
            torch._foreach_zero_(self._paddings)

    def counts(self) -> Tensor:
        """Return the number of elements in each block of ``align``, gaps left out, [1, blocks] int32."""
        sizes = [each.numel for each in self._layout.extents]
        found = [min(self.align, size - start) for size in sizes for start in range(0, size, self.align)]
        return torch.tensor([found], dtype=torch.int32, device="cpu").to(self.data.device)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes
