"""Compressed communication for torch's own FSDP2, through the hooks that it offers.

    compress(fsdp2_model, "int8")       every reduce-scatter, and with ``weights`` every all-gather

A group of FSDP2 holds all parameters of a module, norms and biases too, and all are encoded. Residuals belong to the
hooks: they live as long as these, and start empty. Hooks see numbers and not whose they are: where some parameters of a
group go unused, residuals are told apart by how many numbers there are.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from yafsdp_cc.compression import kernels
from yafsdp_cc.compression.all_reduce import CompressedAllReduce
from yafsdp_cc.compression.compressed_sum import PlainBuffer
from yafsdp_cc.compression.config import AUTO, LOW_RANK, ROUNDING, Compression, compression_of
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter
from yafsdp_cc.compression.schedule import CompressionSchedule
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.dtensor import all_gather_single
from yafsdp_cc.engine.layout import Extent, Layout, align
from yafsdp_cc.engine.module import ShardedModule
from yafsdp_cc.engine.param import Divisor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import ReduceOp

_reduce_scatter = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)  # the older name warns in torch 2.13


class CompressedCommunication:
    """What ``compress`` returns: the bytes that were sent through it, and the way back."""

    def __init__(self, hooks: Sequence[_Hook]) -> None:
        self._hooks = tuple(hooks)
        self.removed = False
        """Whether ``remove`` has been called."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent through it so far."""
        return sum(hook.sent_bytes for hook in self._hooks)

    def remove(self) -> None:
        """Let torch's own collectives do it from now on. Residuals are dropped."""
        self.removed = True
        for hook in self._hooks:
            hook.remove()


def compress(
    model: nn.Module, compression: Compression | str, *, replicas: dist.ProcessGroup | None = None
) -> CompressedCommunication:
    """Compress the communication of a model that torch's ``fully_shard`` has sharded.

    Models of this package take a ``compression`` when they are sharded.

    Args:
        model: with modules that ``fully_shard`` was called on.
        compression: as of ``shard``. ``overrides`` are not for this: a group's parameters are sent together. Steps of a
            warm-up are backwards that reduce gradients, here.
        replicas: a group over which gradients are averaged besides, encoded: the ranks that hold the same shard, of a
            model that ``fully_shard`` was given the mesh of one replica only. Reduce-scatters are exact then.

    Raises:
        ValueError: nothing in the model is sharded, it is compressed already, or the compression asks for what cannot
            be done here.
        TypeError: an argument is of the wrong type.
    """
    config = compression_of(compression)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if any(isinstance(module, ShardedModule) for module in modules):
        raise ValueError("compress() on a model of this package: pass shard(model, compression=...)")
    if config is None:
        raise TypeError("compress() takes a Compression or the name of a codec such as 'int8', got None")
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"replicas takes a process group, such as mesh['replicate'].get_group(); got {replicas!r}")
    if not modules:
        raise ValueError(
            f"compress() on a {type(model).__name__} in which torch's fully_shard has sharded nothing: call it first, "
            "or yafsdp_cc.shard(model, compression=...) instead; for DDP there is GradientWire"
        )
    if any(module in _compressed and not _compressed[module].removed for module in modules):
        raise ValueError("compress() on a model that is compressed already: call .remove() on what it returned first")
    _check(config)
    contexts = CommContexts()
    hooks: list[_Hook] = []
    for number, module in enumerate(modules):
        if replicas is not None:
            all_reduce = _AllReduceHook(config, contexts, replicas, f"{number}")
            module.set_all_reduce_hook(all_reduce)
            hooks.append(all_reduce)
        else:
            reduce_scatter = _ReduceScatterHook(config, contexts, f"{number}")
            module.set_custom_reduce_scatter(reduce_scatter)
            hooks.append(reduce_scatter)
        if config.weights is not None:
            all_gather = _AllGatherHook(config, contexts)
            module.set_custom_all_gather(all_gather)
            hooks.append(all_gather)
    if replicas is None and any(map(_has_replicas, modules)):
        warnings.warn(
            "compress() of a model on a mesh (replicate, shard) encodes the sums within a shard, and those over "
            "replicas stay exact. For the other way round: fully_shard(..., mesh=mesh['shard']) and compress(..., "
            "replicas=mesh['replicate'].get_group())",
            stacklevel=2,
        )
    compressed = CompressedCommunication(hooks)
    _compressed.update(dict.fromkeys(modules, compressed))
    return compressed


_compressed: WeakKeyDictionary[nn.Module, CompressedCommunication] = WeakKeyDictionary()
"""What each module has been given."""


def _check(config: Compression) -> None:
    if config.overrides:
        raise ValueError("compress() with overrides: a group of FSDP2 crosses in one piece; pass yafsdp_cc.shard")
    if config.gradients == AUTO:
        raise ValueError(
            "compress() with gradients='auto': how much of a reduce is exposed is known to FSDP2's own schedule, which "
            "hooks do not see; name a codec, or pass yafsdp_cc.shard(model, compression='auto')"
        )
    if config.gradients == LOW_RANK:
        raise ValueError(
            "compress() with gradients='powersgd': FSDP2's hooks see rows of all parameters mixed, and low rank needs "
            "whole matrices; pass yafsdp_cc.shard(model, compression='powersgd'), or a GradientWire to DDP"
        )
    if config.weights not in (None, *ROUNDING):
        raise ValueError(
            f"compress() with weights={config.weights!r}: FSDP2 gathers every time into memory made for it, so there "
            "are no kept weights to send a delta to; take int8 or fp8, or yafsdp_cc.shard with zero_stage=2"
        )


def _has_replicas(module: nn.Module) -> bool:
    """Return whether parameters are the same along the first dimension of a mesh and sharded across another."""
    return any(
        isinstance(each, DTensor) and each.device_mesh.ndim > 1 and each.placements[0].is_replicate()
        for each in module.parameters()
    )


# What hooks share with DDP's ---------------------------------------------------------------------------------------


class CommContexts:
    """One communicator and one set of scratch buffers for each process group, for all collectives of a model."""

    def __init__(self) -> None:
        self._known: dict[dist.ProcessGroup, CommContext] = {}

    def of(self, group: dist.ProcessGroup, device: torch.device) -> CommContext:
        if group not in self._known:
            self._known[group] = CommContext(Communicator(group, device), ScratchBuffers(device), _record_nothing)
        return self._known[group]


def _record_nothing(kind: str, name: str) -> None:
    """Stand for a fingerprint of collectives, which only the engine compares."""


def constant_schedule(config: Compression) -> CompressionSchedule:
    """Return a schedule that encodes: hooks count steps of the warm-up themselves."""
    return CompressionSchedule(replace(config, warmup_steps=0))


def exact_mean(total: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite ``total`` with its mean over ``group``."""
    dist.all_reduce(total, group=group)
    total.div_(group.size())


class GroupMean:
    """Averages buffers over a group by compressed all-reduces, each of which keeps a residual.

    Args:
        config: the user's settings.
        contexts: of the model.
        group: the ranks.
    """

    def __init__(self, config: Compression, contexts: CommContexts, group: dist.ProcessGroup) -> None:
        self.sums: dict[Any, CompressedAllReduce] = {}
        """By what tells buffers apart."""
        self._schedule = constant_schedule(config)
        self._contexts = contexts
        self._group = group

    def average(self, total: Tensor, key: Any, name: str, places: Sequence[tuple[int, Sequence[int]]] = ()) -> int:
        """Overwrite ``total`` with its mean, and return the bytes sent.

        Args:
            total: [n], floating-point.
            key: of the residual.
            name: for random numbers.
            places: where each tensor in it begins, and its shape; needed for low rank.
        """
        if key not in self.sums:
            self.sums[key] = self._make(total, name, places)
        compressed, n = self.sums[key], total.numel()
        padded = pad(total.to(torch.float32), (0, compressed.chunk - n))
        for work in compressed.start(padded, async_op=False):
            work.wait()
        compressed.finish(padded)
        total.copy_(padded[:n].div_(self._group.size()))
        return compressed.sent_bytes

    def _make(self, total: Tensor, name: str, places: Sequence[tuple[int, Sequence[int]]]) -> CompressedAllReduce:
        config, n, device = self._schedule.config, total.numel(), total.device
        if config.gradients != LOW_RANK:  # tensors need not begin at blocks of their own
            places = [(0, (n,))]
        extents = tuple(Extent(tuple(shape), start, torch.Size(shape).numel()) for start, shape in places)
        layout = Layout(extents, 1, align(n, config.block))
        buffer = PlainBuffer(name, layout, 0, device, Divisor(self._group.size(), device))
        compressed = CompressedAllReduce(buffer, self._schedule, config.gradients)
        compressed.bind(self._contexts.of(self._group, device))
        return compressed


# Hooks -------------------------------------------------------------------------------------------------------------


class _Hook:
    """What the hooks of a module have."""

    def __init__(self, config: Compression, contexts: CommContexts) -> None:
        self._config = config
        self._contexts = contexts
        self._removed = False
        self._calls = 0
        self.sent_bytes = 0

    def remove(self) -> None:
        """Encode nothing any more."""
        self._removed = True
        self._contexts = CommContexts()

    def _is_exact(self) -> bool:
        """Return whether this call, a further one, is in the warm-up."""
        self._calls += 1
        return self._removed or self._calls <= self._config.warmup_steps

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatterHook(_Hook, ReduceScatter):
    """One group's reduce-scatter."""

    def __init__(self, config: Compression, contexts: CommContexts, name: str) -> None:
        super().__init__(config, contexts)
        self._name = name
        self._schedule = constant_schedule(config)
        self._sums: dict[int, CompressedReduceScatter] = {}
        """By elements of a rank: FSDP2 sends those parameters of a group that have gradients."""

    def remove(self) -> None:
        super().remove()
        self._sums.clear()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._is_exact():
            exact: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
            return exact
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(
                f"an encoded reduce-scatter with {op}: call set_force_sum_reduction_for_comms(True) on the module, so "
                "that FSDP2 divides outside of it"
            )
        world, n = group.size(), output_tensor.numel()
        if n not in self._sums:
            self._sums[n] = self._make(n, input_tensor, group)
        compressed, grads = self._sums[n], input_tensor
        if compressed.chunk != n:
            grads = pad(input_tensor.view(world, n), (0, compressed.chunk - n)).view(-1)
        for work in compressed.start(grads, async_op=False):
            work.wait()
        self.sent_bytes += compressed.sent_bytes
        for start, part in compressed.finish(grads):
            if op == dist.ReduceOp.AVG:
                part.div_(world)
            count = min(part.numel(), n - start)
            if count > 0:
                output_tensor.narrow(0, start, count).copy_(part[:count])
        return None

    def _make(self, n: int, grads: Tensor, group: dist.ProcessGroup) -> CompressedReduceScatter:
        world, device = group.size(), grads.device
        chunk = align(n, self._config.block)
        layout = Layout(tuple(Extent((n,), rank * chunk, n) for rank in range(world)), world, chunk)
        name = f"{self._name}/{n}"
        buffer = PlainBuffer(name, layout, group.rank(), device, Divisor(world, device), grads.dtype)
        compressed = CompressedReduceScatter(buffer, self._schedule, self._config.gradients)
        compressed.bind(self._contexts.of(group, device))
        return compressed


class _AllGatherHook(_Hook, AllGather):
    """One group's all-gather of rounded weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        name = self._config.weights
        if self._removed or name is None or not input_tensor.is_floating_point():
            exact: dist.Work | None = all_gather_single(output_tensor, input_tensor, group, async_op)
            return exact
        world, n, block = group.size(), input_tensor.numel(), self._config.block
        codec, chunk = self._config.make(name), align(n, block)
        shard = input_tensor if chunk == n else pad(input_tensor, (0, chunk - n))
        messages = torch.empty(world, codec.message_bytes(chunk), dtype=torch.uint8, device=input_tensor.device)
        own = messages[group.rank()]
        kernels.encode(codec, shard.view(1, -1), own.unsqueeze(0))
        comm = self._contexts.of(group, input_tensor.device).comm
        for work in comm.all_gather(messages.view(-1), own, async_op=False):
            work.wait()
        self.sent_bytes += comm.peer_bytes(messages.nbytes)
        rows = output_tensor.view(world, n)
        if chunk == n:
            kernels.decode(codec, messages, rows)
        else:
            kernels.decode(codec, messages, padded := output_tensor.new_empty(world, chunk))
            rows.copy_(padded[:, :n])
        return None


class _AllReduceHook(_Hook):
    """One group's mean over replicas, after its reduce-scatter."""

    def __init__(self, config: Compression, contexts: CommContexts, replicas: dist.ProcessGroup, name: str) -> None:
        super().__init__(config, contexts)
        self._replicas = replicas
        self._name = name
        self._mean = GroupMean(config, contexts, replicas)

    def remove(self) -> None:
        super().remove()
        self._mean.sums.clear()

    def __call__(self, total: Tensor) -> None:
        if self._is_exact():
            exact_mean(total, self._replicas)
        else:
            self.sent_bytes += self._mean.average(total, total.numel(), self._name)
