"""The same wire under torch's own FSDP2, through the hooks that it offers.

    compress(fsdp2_model, "int8")       every reduce-scatter, and with ``weights`` every gather

A group of FSDP2 holds all parameters of a module, norms and biases too, and all are encoded. Residuals belong to the
hooks: they live as long as these, and start empty. Hooks see numbers and not whose they are: where some parameters of a
group go unused, what is left unsaid is told apart by how many numbers there are.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from yafsdp_cc.compression import AUTO, EXACT, LOW_RANK, ROUNDING, Compression, compression_of
from yafsdp_cc.engine.module import ShardedModule
from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.encoded import EncodedReduce, EncodedSum, counts_of
from yafsdp_cc.wire.exchange import Gather
from yafsdp_cc.wire.factored import FactoredSum
from yafsdp_cc.wire.feedback import Recursion, Residual
from yafsdp_cc.wire.lowrank import LowRank, matrices_of
from yafsdp_cc.wire.post import Post

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import ReduceOp

    from yafsdp_cc.wire.shared import SharedSum


# As torch 2.13 calls them; the older names warn there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Compressing:
    """What ``compress`` has put in place: what it has sent, and the way back."""

    def __init__(self, hooks: Sequence[_Reducing | _Gathering | _Summing]) -> None:
        self._hooks = tuple(hooks)
        self.removed = False
        """Whether ``remove`` has been called."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent through it so far."""
        return sum(hook.sent_bytes for hook in self._hooks)

    def remove(self) -> None:
        """Let torch's own exchanges do it from now on. What is still in residuals is lost."""
        self.removed = True
        for hook in self._hooks:
            hook.forget()


def compress(
    model: nn.Module, compression: Compression | str, *, replicas: dist.ProcessGroup | None = None
) -> Compressing:
    """Encode what a model that torch's ``fully_shard`` has sharded sends. (``shard`` takes a compression itself.)

    Args:
        model: with modules that ``fully_shard`` was called on.
        compression: as of ``shard``. ``overrides`` are not for this: a group's parameters cross together. Steps of a
            warm-up are backwards that send gradients, here.
        replicas: a group over which gradients are summed and averaged besides, encoded: those that hold the same part,
            of a model that ``fully_shard`` was told the mesh of one replica only. What crosses within one is exact
            then.

    Raises:
        ValueError: nothing in the model is sharded, it has a compression already, or the compression asks for what
            cannot be done here.
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
    if config.overrides:
        raise ValueError("compress() with overrides: a group of FSDP2 crosses in one piece; pass yafsdp_cc.shard")
    if config.gradients == AUTO:
        raise ValueError(
            "compress() with gradients='auto': what shows of FSDP2's sums is known to its own schedule, which hooks do "
            "not see; name a codec, or pass yafsdp_cc.shard(model, compression='auto')"
        )
    if config.gradients == LOW_RANK:
        raise ValueError(
            "compress() with gradients='powersgd': FSDP2's hooks see rows of all parameters mixed, and low rank needs "
            "whole matrices; pass yafsdp_cc.shard(model, compression='powersgd'), or a GradientWire to DDP"
        )
    if config.weights not in (None, *ROUNDING):
        raise ValueError(
            f"compress() with weights={config.weights!r}: FSDP2 gathers every time into memory made for it, so there "
            "are no weights whose change could be said; take int8 or fp8, or yafsdp_cc.shard with zero_stage=2"
        )
    hooks: list[_Reducing | _Gathering | _Summing] = []
    for number, module in enumerate(modules):
        if replicas is not None:
            summing = _Summing(config, replicas, f"{number}")
            module.set_all_reduce_hook(summing)
            hooks.append(summing)
        else:
            reducing = _Reducing(config, f"{number}")
            module.set_custom_reduce_scatter(reducing)
            hooks.append(reducing)
        if config.weights is not None:
            gathering = _Gathering(config)
            module.set_custom_all_gather(gathering)
            hooks.append(gathering)
    if replicas is None and any(map(_has_replicas, modules)):
        warnings.warn(
            "compress() of a model on a mesh (replicate, shard) encodes the sums within a shard, and those over "
            "replicas stay exact. For the other way round: fully_shard(..., mesh=mesh['shard']) and compress(..., "
            "replicas=mesh['replicate'].get_group())",
            stacklevel=2,
        )
    compressing = Compressing(hooks)
    _compressed.update(dict.fromkeys(modules, compressing))
    return compressing


_compressed: WeakKeyDictionary[nn.Module, Compressing] = WeakKeyDictionary()
"""What each module has been given."""


def _has_replicas(module: nn.Module) -> bool:
    """Whether parameters are the same along the first dimension of a mesh and cut across another."""
    return any(
        isinstance(each, DTensor) and each.device_mesh.ndim > 1 and each.placements[0].is_replicate()
        for each in module.parameters()
    )


class _Reducing(ReduceScatter):
    """One group's reduce-scatter."""

    def __init__(self, config: Compression, name: str) -> None:
        self._config: Compression | None = config
        self._name = name
        self._encoded: dict[int, EncodedReduce] = {}
        """By elements of a rank: FSDP2 sends those parameters of a group that have gradients."""
        self._calls = 0
        self.sent_bytes = 0

    def forget(self) -> None:
        """Encode nothing any more."""
        self._config = None
        self._encoded.clear()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        config = self._config
        self._calls += 1
        if config is None or self._calls <= config.warmup_steps:
            exact: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
            return exact
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(
                f"an encoded reduce-scatter with {op}: call set_force_sum_reduction_for_comms(True) on the module, so "
                "that FSDP2 divides outside of it"
            )
        world, n = group.size(), output_tensor.numel()
        encoded = self._encoded.get(n) or self._start(config, output_tensor, group)
        whole = input_tensor
        if encoded.chunk != n:
            whole = torch.nn.functional.pad(input_tensor.view(world, n), (0, encoded.chunk - n)).view(-1)
        for work in encoded.send(whole, asynchronous=False):
            work.wait()
        self.sent_bytes += encoded.sent_bytes()
        for start, total in encoded.totals(whole):
            if op == dist.ReduceOp.AVG:
                total.div_(world)
            part = min(total.numel(), n - start)
            if part > 0:
                output_tensor.narrow(0, start, part).copy_(total[:part])
        return None

    def _start(self, config: Compression, output: Tensor, group: dist.ProcessGroup) -> EncodedReduce:
        world, n, block = group.size(), output.numel(), config.block
        chunk = -(-n // block) * block
        codec, post = config.make(config.gradients), Post(group, output.device)
        dtype = None if config.gradients == EXACT else config.residual_dtype
        residual = None if dtype is None else Residual(world - 1, chunk, dtype, block, output.device)
        extents = [(rank * chunk, rank * chunk + n) for rank in range(world)]
        counts = counts_of(extents, world * chunk, block, output.device)
        counts = None if counts is None else counts.view(world, -1)
        recursion = Recursion(carry=config.carry)
        encoded = EncodedReduce(post, codec, world * chunk, counts, residual, f"{self._name}/{n}", recursion)
        self._encoded[n] = encoded
        return encoded


class _Gathering(AllGather):
    """One group's all-gather."""

    def __init__(self, config: Compression) -> None:
        self._config: Compression | None = config
        self.sent_bytes = 0

    def forget(self) -> None:
        """Encode nothing any more."""
        self._config = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        config = self._config
        if config is None or config.weights is None or not input_tensor.is_floating_point():
            work: dist.Work | None = _all_gather(output_tensor, input_tensor, group, async_op)
            return work
        world, n, block = group.size(), input_tensor.numel(), config.block
        codec, chunk = config.make(config.weights), -(-n // block) * block
        shard = input_tensor if chunk == n else torch.nn.functional.pad(input_tensor, (0, chunk - n))
        messages = torch.empty(world, codec.message_bytes(chunk), dtype=torch.uint8, device=input_tensor.device)
        own = messages[group.rank()]
        kernels.encode(codec, shard.view(1, -1), own.unsqueeze(0))
        gather = Gather(group, input_tensor.device)
        for work in gather.send(messages.view(-1), own, asynchronous=False):
            work.wait()
        self.sent_bytes += gather.sent_bytes(messages.view(-1))
        rows = output_tensor.view(world, n)
        if chunk == n:
            kernels.decode(codec, messages, rows)
        else:
            kernels.decode(codec, messages, padded := output_tensor.new_empty(world, chunk))
            rows.copy_(padded[:, :n])
        return None


class _Summing:
    """One group's mean over replicas, after its reduce-scatter."""

    def __init__(self, config: Compression, replicas: dist.ProcessGroup, name: str) -> None:
        self._config: Compression | None = config
        self._replicas = replicas
        self._name = name
        self._encoded: dict[int, SharedSum] = {}
        self._calls = 0
        self.sent_bytes = 0

    def forget(self) -> None:
        """Encode nothing any more."""
        self._config = None
        self._encoded.clear()

    def __call__(self, total: Tensor) -> None:
        config = self._config
        self._calls += 1
        if config is None or self._calls <= config.warmup_steps:
            exact_mean(total, self._replicas)
            return
        self.sent_bytes += mean(total, config, self._replicas, self._encoded, total.numel(), self._name)


def exact_mean(total: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite ``total`` with its mean over ``group``."""
    dist.all_reduce(total, group=group)
    total.div_(group.size())


def mean(
    total: Tensor,
    config: Compression,
    group: dist.ProcessGroup,
    sums: dict[Any, SharedSum],
    key: Any,
    name: str,
    places: Sequence[tuple[int, Sequence[int]]] = (),
) -> int:
    """Overwrite ``total`` with its mean over ``group``, encoded; the bytes sent.

    ``sums`` keeps what has been left unsaid, by ``key``; ``places`` says where tensors begin, and their shapes.
    """
    n, block = total.numel(), config.block
    padded = -(-n // block) * block
    encoded = sums.get(key)
    if encoded is None:
        encoded = sums[key] = _sum(total, padded, config, group, name, places)
    work_on = torch.nn.functional.pad(total.to(torch.float32), (0, padded - n))
    sent = encoded.sent_bytes()
    for work in encoded.send(work_on, asynchronous=False):
        work.wait()
    encoded.finish(work_on)
    total.copy_(work_on[:n].div_(group.size()))
    return sent


def _sum(
    total: Tensor,
    padded: int,
    config: Compression,
    group: dist.ProcessGroup,
    name: str,
    places: Sequence[tuple[int, Sequence[int]]],
) -> SharedSum:
    n, block, device = total.numel(), config.block, total.device
    dtype = None if config.gradients == EXACT else config.residual_dtype
    residual = None if dtype is None else Residual(1, padded, dtype, block, device)
    recursion = Recursion(carry=config.carry)
    if config.gradients == LOW_RANK:
        assert residual is not None
        rank = config.matrix_rank
        lowrank = LowRank(*matrices_of(places, rank, 0, n), rank, name, device)
        return FactoredSum(group, device, lowrank, padded, residual, recursion)
    counts = counts_of([(0, n)], padded, block, device)
    counts = None if counts is None else counts.unsqueeze(0)
    return EncodedSum(group, device, config.make(config.gradients), padded, counts, residual, name, recursion)
