"""Compressed communication for torch's own FSDP2, through the hooks that it offers.

    compress(fsdp2_model, "int8")       every reduce-scatter, and with ``weights`` every all-gather

A group of FSDP2 holds all parameters of a module, norms and biases too, and all are encoded. Residuals belong to the
hooks, live as long as the hooks do, and start at zero. FSDP2 sends only the parameters of a group that have gradients:
each set of parameters that is sent has a residual of its own.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.all_reduce import CompressedAllReduce
from yafsdp_cc.compression.codec import AUTO, LOW_RANK
from yafsdp_cc.compression.config import ROUNDING, Compression, compression_of, compression_of_run
from yafsdp_cc.compression.error_feedback import PlainBuffer
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter
from yafsdp_cc.compression.schedule import CompressionSchedule
from yafsdp_cc.config import run_settings
from yafsdp_cc.engine.collectives import sum_scale
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.layout import Extent, Layout, align
from yafsdp_cc.engine.param import Divisor
from yafsdp_cc.fsdp2.module import ShardedModule
from yafsdp_cc.ranks.mesh import all_gather_single, reduce_scatter_single

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ReduceOp

    from yafsdp_cc.compression.codec import Codec


def compress(
    model: nn.Module, compression: Compression | str | None = None, *, replicas: dist.ProcessGroup | None = None
) -> CompressedCommunication:
    """Compress the communication of a model that torch's ``fully_shard`` has sharded.

    Models of this package take a ``compression`` when they are sharded.

    Args:
        model: a model with modules that ``fully_shard`` was called on.
        compression: as of ``shard``; left out, that of the run file. ``overrides`` are refused: a group's parameters
            are sent together. ``warmup_steps`` counts backwards that reduce gradients.
        replicas: the group of ranks that hold the same shard, where ``fully_shard`` was given the mesh of one replica
            only: gradients are averaged over it, encoded. Reduce-scatters are exact then.

    Raises:
        ValueError: nothing in the model is sharded, it is compressed already, or the compression has a setting that
            FSDP2's hooks cannot serve.
        TypeError: an argument is of the wrong type.
    """
    config = compression_of(compression) or compression_of_run()
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if any(isinstance(module, ShardedModule) for module in modules):
        raise ValueError("compress() on a model of this package: pass shard(model, compression=...)")
    if config is None:
        raise TypeError("compress() takes a Compression or the name of a codec such as 'int8', got None")
    for name, one in run_settings().items():
        if not name.startswith("compression."):
            raise ValueError(
                f"{name} ({one.source}) does not reach a model of torch's fully_shard, which compress() was called on: "
                "leave it out and pass it there, or call yafsdp_cc.shard(model) instead"
            )
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"replicas takes a process group, such as mesh['replicate'].get_group(); got {replicas!r}")
    if not modules:
        raise ValueError(
            f"compress() on a {type(model).__name__} in which torch's fully_shard has sharded nothing: call it first, "
            "or yafsdp_cc.shard(model, compression=...) instead; for DDP there is CompressionHookState"
        )
    if any(module in _compressed and not _compressed[module].removed for module in modules):
        raise ValueError("compress() on a model that is compressed already: call .remove() on what it returned first")
    _check(config)
    shared = CompressedCommunication(config)
    for number, module in enumerate(modules):
        sums: _Hook
        if replicas is not None:
            module.set_all_reduce_hook(sums := _AllReduceHook(shared, f"{number}", replicas))
        else:
            module.set_custom_reduce_scatter(sums := _ReduceScatterHook(shared, f"{number}"))
        if config.weights is not None:
            module.set_custom_all_gather(_AllGatherHook(shared, sums, config.make(config.weights)))
    if replicas is None and any(map(_has_replicas, modules)):
        warnings.warn(
            "compress() of a model on a mesh (replicate, shard) encodes the sums within a shard, and those over "
            "replicas stay exact. For the other way round: fully_shard(..., mesh=mesh['shard']) and compress(..., "
            "replicas=mesh['replicate'].get_group())",
            stacklevel=2,
        )
    _compressed.update(dict.fromkeys(modules, shared))
    return shared


_compressed: WeakKeyDictionary[nn.Module, CompressedCommunication] = WeakKeyDictionary()
"""The ``CompressedCommunication`` that compresses each module."""
_made: WeakSet[CompressedCommunication] = WeakSet()


def drop_residuals(model: nn.Module) -> None:
    """Drop the residuals for ``model`` of ``compress`` and DDP's hook: they belong to its weights before a load."""
    for each in list(_made):
        each.drop_residuals(model)


def _check(config: Compression) -> None:
    if config.overrides:
        raise ValueError("compress() with overrides: a group of FSDP2 is encoded as a whole; pass yafsdp_cc.shard")
    if config.gradients == AUTO:
        raise ValueError(
            "compress() with gradients='auto': how much of a reduce is exposed is known to FSDP2's own schedule, which "
            "hooks do not see; name a codec, or pass yafsdp_cc.shard(model, compression='auto')"
        )
    if config.gradients == LOW_RANK:
        raise ValueError(
            "compress() with gradients='powersgd': FSDP2's hooks see rows of all parameters mixed, and low rank needs "
            "whole matrices; pass yafsdp_cc.shard(model, compression='powersgd'), or a CompressionHookState to DDP"
        )
    if config.weights not in (None, *ROUNDING):
        raise ValueError(
            f"compress() with weights={config.weights!r}: FSDP2 gathers every time into memory made for it, so there "
            "are no kept weights to send a delta to; take int8 or fp8, or yafsdp_cc.shard with zero_stage=2"
        )


def _has_replicas(module: nn.Module) -> bool:
    """Return whether parameters are replicated along the first dimension of a mesh and sharded along another."""
    return any(
        isinstance(each, DTensor) and each.device_mesh.ndim > 1 and each.placements[0].is_replicate()
        for each in module.parameters()
    )


class CompressedCommunication:
    """The result of ``compress``: counts the bytes that were sent, and can be removed.

    ``CompressedCommunication`` also holds the compressed sums of all hooks of a model, FSDP2's or DDP's; each sum is
    made at first use and has a residual.
    """

    def __init__(self, config: Compression) -> None:
        self.config = config
        self.sent_bytes = 0
        self.backwards = 0
        """Largest number of backwards in which one unit of FSDP2 has reduced gradients; not used with DDP."""
        self.removed = False
        # the hooks count warm-up steps themselves, not the schedule
        self._schedule = CompressionSchedule(replace(config, warmup_steps=0))
        self._all_reduces: dict[Any, CompressedAllReduce] = {}
        self._reduce_scatters: dict[Any, CompressedReduceScatter] = {}
        self._contexts: dict[dist.ProcessGroup, CommContext] = {}
        _made.add(self)

    def remove(self) -> None:
        """Use torch's own collectives from now on. Residuals are dropped."""
        self.removed = True
        self._all_reduces.clear()
        self._reduce_scatters.clear()
        self._contexts.clear()

    def drop_residuals(self, model: nn.Module) -> None:
        """Drop all residuals if this object compresses a module of ``model``."""
        if any(_compressed.get(module) is self for module in model.modules()):
            self._all_reduces.clear()
            self._reduce_scatters.clear()

    def follow_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Rescale residuals whenever the scale of the losses changes, as ``yafsdp_cc.follow_scaler`` does.

        Call ``follow_scaler`` once, before the first scaled backward. Each encoded sum reads ``scaler.get_scale()``,
        which synchronizes a GPU.

        Args:
            scaler: the scaler of the losses; it is not changed, and referenced weakly.
        """
        self._schedule.follow(scaler)

    def is_exact(self, backward: int) -> bool:
        """Return whether the backward of this number, from 1, sums exactly: in the warm-up, or after ``remove``."""
        return self.removed or backward <= self.config.warmup_steps

    def context(self, group: dist.ProcessGroup, device: torch.device) -> CommContext:
        """Return the communicator of ``group``, and the scratch buffers that all of its collectives share."""
        if group not in self._contexts:
            # Record nothing: only the engine compares a fingerprint of its collectives between ranks.
            context = CommContext(Communicator(group, device), ScratchBuffers(device), lambda kind, name: None)
            self._contexts[group] = context
        return self._contexts[group]

    def reduce_scatter(
        self, output: Tensor, grads: Tensor, group: dist.ProcessGroup, name: str, key: Any, *, is_mean: bool
    ) -> None:
        """Fill ``output`` [n] with this rank's chunk of the sum, or the mean, of ``grads`` [world * n].

        Args:
            name: seed of random numbers.
            key: identifies the residual.
            is_mean: whether to divide by the number of ranks.
        """
        output, grads = real_view(output).view(-1), real_view(grads).view(-1)
        world, n, device = group.size(), output.numel(), grads.device
        chunk = align(n, self.config.block)
        if key not in self._reduce_scatters:
            layout = Layout(tuple(Extent((n,), rank * chunk, n) for rank in range(world)), (chunk,) * world)
            buffer = PlainBuffer(name, layout, group.rank(), device, Divisor(world, device), grads.dtype)
            made = self._reduce_scatters[key] = CompressedReduceScatter(buffer, self._schedule, self.config.gradients)
            made.bind(self.context(group, device))
        compressed = self._reduce_scatters[key]
        self._schedule.follow_scale()
        if chunk != n:
            grads = pad(grads.view(world, n), (0, chunk - n)).view(-1)
        for work in compressed.start(grads, async_op=False):
            work.wait()
        self.sent_bytes += compressed.sent_bytes
        for start, part in compressed.finish(grads):
            if is_mean:
                part.div_(world)
            count = min(part.numel(), n - start)
            if count > 0:
                output.narrow(0, start, count).copy_(part[:count])

    def all_reduce_mean(
        self,
        total: Tensor,
        group: dist.ProcessGroup,
        name: str,
        key: Any,
        places: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> None:
        """Overwrite ``total`` [n], floating-point or complex, with its mean over ``group``.

        Args:
            name: seed of random numbers.
            key: identifies the residual.
            places: where each tensor in ``total`` begins, and its shape; needed for low rank.
        """
        total = real_view(total).view(-1)
        world, n, device = group.size(), total.numel(), total.device
        if key not in self._all_reduces:
            if self.config.gradients != LOW_RANK:  # only low rank needs the shape of each tensor
                places = [(0, (n,))]
            extents = tuple(Extent(tuple(shape), start, torch.Size(shape).numel()) for start, shape in places)
            layout = Layout(extents, (align(n, self.config.block),))
            buffer = PlainBuffer(name, layout, 0, device, Divisor(world, device))
            made = self._all_reduces[key] = CompressedAllReduce(buffer, self._schedule, self.config.gradients)
            made.bind(self.context(group, device))
        compressed = self._all_reduces[key]
        self._schedule.follow_scale()
        padded = pad(total.to(torch.float32), (0, compressed.chunk - n))
        for work in compressed.start(padded, async_op=False):
            work.wait()
        self.sent_bytes += compressed.sent_bytes
        compressed.finish(padded)
        total.copy_(padded[:n].div_(world))


def real_view(values: Tensor) -> Tensor:
    """Return complex ``values`` as a real view [..., 2], which codecs can encode; return others unchanged."""
    return torch.view_as_real(values) if values.is_complex() else values


def exact_mean(total: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite ``total`` with its mean over ``group``."""
    scale = sum_scale(total.dtype, group.size())
    dist.all_reduce(total if scale == 1 else total.mul_(1 / scale), group=group)
    total.div_(group.size() / scale)


# Hooks of one module -----------------------------------------------------------------------------------------------


_SETS = 8
"""Largest number of residuals of one group, one for each set of its parameters that FSDP2 has sent together."""


class _Hook:
    def __init__(self, shared: CompressedCommunication, name: str) -> None:
        self._shared = shared
        self._name = name
        self.calls = 0
        self._sets: set[tuple[int, ...]] = set()
        """Sets of parameters, by their ids, that have a residual."""

    def _sent(self) -> tuple[int, ...]:
        """Count this call; return the ids of the parameters that FSDP2 sends, in order, or () if their sum is exact.

        FSDP2 gives a hook no more than a buffer. The function that calls the hook has the parameters as an argument, so
        only ``__call__`` may call ``_sent``. Residuals of any number of sets could fill the memory.
        """
        self.calls += 1
        self._shared.backwards = max(self._shared.backwards, self.calls)
        if self._shared.is_exact(self.calls):
            return ()
        sent = tuple(map(id, sys._getframe(2).f_locals["fsdp_params"]))
        if len(self._sets) == _SETS and sent not in self._sets:
            warnings.warn(
                f"unit '{self._name}' has sent {_SETS} sets of parameters, as backwards reach now some of them and now "
                "others: further sets are summed exactly. Make what is used together a unit of its own",
                stacklevel=2,
            )
            return ()
        self._sets.add(sent)
        return sent

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatterHook(_Hook, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not (sent := self._sent()):
            exact: dist.Work | None = reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
            return exact
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(
                f"an encoded reduce-scatter sums, and FSDP2 asks for {op}: call "
                "set_force_sum_reduction_for_comms(True) on the module, so that FSDP2 divides outside of it"
            )
        name, is_mean = f"{self._name}/{output_tensor.numel()}", op == dist.ReduceOp.AVG
        self._shared.reduce_scatter(output_tensor, input_tensor, group, name, sent, is_mean=is_mean)
        return None


class _AllReduceHook(_Hook):
    """Averages gradients of one parameter group of FSDP2 over replicas, after their reduce-scatter."""

    def __init__(self, shared: CompressedCommunication, name: str, replicas: dist.ProcessGroup) -> None:
        super().__init__(shared, name)
        self._replicas = replicas

    def __call__(self, total: Tensor) -> None:
        if sent := self._sent():
            self._shared.all_reduce_mean(total, self._replicas, self._name, sent)
        else:
            exact_mean(total, self._replicas)


class _AllGatherHook(_Hook, AllGather):
    """All-gathers rounded weights of one parameter group of FSDP2, whose gradients the hook ``sums`` sums."""

    def __init__(self, shared: CompressedCommunication, sums: _Hook, codec: Codec) -> None:
        super().__init__(shared, sums._name)
        self._sums, self._codec = sums, codec

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        # a frozen unit reduces nothing, so count by other units, of which some have reduced in this backward already
        backward = 1 + max(self._sums.calls, self._shared.backwards - 1)
        if self._shared.is_exact(backward) or not input_tensor.is_floating_point():
            exact: dist.Work | None = all_gather_single(output_tensor, input_tensor, group, async_op)
            return exact
        world, n, codec = group.size(), input_tensor.numel(), self._codec
        chunk = align(n, codec.block)
        messages = torch.empty(world, codec.message_bytes(chunk), dtype=torch.uint8, device=input_tensor.device)
        own, shard = messages[group.rank()], input_tensor if chunk == n else pad(input_tensor, (0, chunk - n))
        error_feedback.encode(codec, shard.view(1, -1), own.unsqueeze(0))
        comm = self._shared.context(group, input_tensor.device).comm
        for work in comm.all_gather(messages.view(-1), own, async_op=False):
            work.wait()
        self._shared.sent_bytes += comm.peer_bytes(messages.nbytes)
        rows = output_tensor.view(world, n)
        decoded = rows if chunk == n else rows.new_empty(world, chunk)
        error_feedback.decode(codec, messages, decoded)
        if decoded is not rows:
            rows.copy_(decoded[:, :n])
        return None
