"""Shards in host memory (``CPUOffloadPolicy``), and how they get to the device and back.

    host, pinned    | weights | ─┐                                   ┌─ | gradient so far |  ◄─┐
    device                       └► staging, cast ► weight buffer    └► staging, add the sum ──┘

Copies of weights are enqueued on the stream of the all-gathers, copies of gradients on the stream of the reduces,
behind the sum. The host runs ahead of the streams, so it must wait before the program may read or write host memory: at
the end of each forward for weights, of each backward for gradients. A copy need not wait for the host, which has
written the memory before it enqueues the copy.

The device casts and adds. fp32 is copied while the device computes and costs the host nothing. A cast on the host would
halve the bytes copied, but cost 6 bytes of memory traffic per element in the thread that launches kernels, and a third
buffer. A sum on the host would wait for its copy in mid-backward, or keep a second set of gradients until the end; on
the device it is one more copy, in the idle direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from yafsdp_cc.engine.param import FlatParam, ShardedGrad, grad_dtype_of
from yafsdp_cc.engine.replicated import ReplicatedFlatParam

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.fsdp import OffloadPolicy

    from yafsdp_cc.engine.param import Divisor, FSDPParam
    from yafsdp_cc.engine.streams import CommStream

STAGING_BYTES = 16 << 20
"""Largest size of a staging buffer: enough for a copy to take longer than its launch."""


class HostTransfer:
    """Copies between host and device on the current stream; casts and sums use a staging buffer, one after the other.

    Args:
        stream: any ``CommStream`` of the device; records the events that ``wait`` waits for.
        nbytes: bytes of the largest tensor that passes through the staging buffer.
    """

    def __init__(self, stream: CommStream, device: torch.device, nbytes: int) -> None:
        self._stream = stream
        self._staging = torch.empty(min(nbytes, STAGING_BYTES), dtype=torch.uint8, device=device)
        self._last: torch.Event | None = None

    def to_device(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source``, on the host, to ``target``, on the device, which casts it."""
        if source.dtype == target.dtype:
            target.copy_(source, non_blocking=True)
        else:
            for part, staging, cast in self.parts(source, target):
                staging.copy_(part, non_blocking=True)
                cast.copy_(staging)
        self.record()

    def parts(self, on_host: Tensor, beside: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield parts of ``on_host``, each with a staging buffer on the device and the same part of ``beside``."""
        step = max(1, self._staging.numel() // on_host.itemsize)  # the buffer of a rank without elements is empty
        for start in range(0, on_host.numel(), step):
            count = min(step, on_host.numel() - start)
            staging = self._staging.narrow(0, 0, count * on_host.itemsize).view(on_host.dtype)
            yield on_host.narrow(0, start, count), staging, beside.narrow(0, start, count)

    def record(self) -> None:
        """Make ``wait`` wait for all work enqueued on the current stream so far."""
        self._last = self._stream.record(self._last)

    def wait(self) -> None:
        """Block the host until all copies that ``record`` has recorded are over."""
        if self._last is not None:
            self._last.synchronize()

    @property
    def nbytes(self) -> int:
        return self._staging.nbytes


@dataclass
class HostTransfers:
    """All copies between host memory and the device of one engine."""

    weights: HostTransfer
    grads: HostTransfer
    replicated: HostTransfer
    """``HostTransfer`` for copies of replicated parameters, on the caller's stream."""

    def wait(self) -> None:
        """Block the host until all copies are over, so that it may read and write shards in host memory."""
        for transfer in (self.weights, self.grads, self.replicated):
            transfer.wait()

    @property
    def nbytes(self) -> int:
        """Bytes of the three staging buffers on the device."""
        return self.weights.nbytes + self.grads.nbytes + self.replicated.nbytes


@dataclass(eq=False)
class HostMemory:
    """Host memory in which a parameter group's shards and gradients lie."""

    is_pinned: bool
    """Whether host memory is allocated page-locked."""
    transfers: HostTransfers = field(init=False)
    """``HostTransfers`` of the model's present engine."""

    @classmethod
    def of(cls, policy: OffloadPolicy | None, device: torch.device) -> HostMemory | None:
        """Return the host memory that ``policy`` asks for, or None; it is not pinned if ``device`` is a CPU."""
        return cls(policy.pin_memory and device.type != "cpu") if isinstance(policy, CPUOffloadPolicy) else None

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a new buffer of zeros in host memory, pinned if the policy asks for it."""
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self.is_pinned)


class HostShardedGrad(ShardedGrad):
    """Sharded gradients in host memory: the device divides and adds them, and copies them back."""

    def __init__(self, host: HostMemory, buffer: Tensor, params: Sequence[FSDPParam]) -> None:
        self._host = host
        super().__init__(buffer, params)

    def _new_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._host.zeros(numel, dtype)

    def _set(self, grad: Tensor, total: Tensor, divisor: Divisor) -> None:
        transfer = self._host.transfers.grads
        for part, staging, summed in transfer.parts(grad, total):
            super()._set(staging, summed, divisor)
            part.copy_(staging, non_blocking=True)
        transfer.record()

    def _add(self, grad: Tensor, total: Tensor, divisor: Divisor) -> None:
        transfer = self._host.transfers.grads
        for part, staging, summed in transfer.parts(grad, total):
            staging.copy_(part, non_blocking=True)
            super()._add(staging, summed, divisor)
            part.copy_(staging, non_blocking=True)
        transfer.record()


class HostFlatParam(FlatParam):
    """A ``FlatParam`` whose shard, and so the state of an optimizer, is in host memory."""

    def __init__(self, host: HostMemory, *rest: Any) -> None:
        self.host = host
        super().__init__(*rest)

    @property
    def cast_bytes(self) -> int:
        """Bytes of the shard if the device casts it to the dtype of the forward, else 0."""
        return self.sharded.nbytes if self.sharded.dtype != self.compute_dtype else 0

    @property
    def device_bytes(self) -> int:
        return 0

    @property
    def host_bytes(self) -> int:
        return super().device_bytes

    def send_buffer(self, own: Tensor, *, in_place: bool) -> Tensor:
        self.host.transfers.weights.to_device(own, self.sharded)
        return own

    def read(self, target: Tensor, start: int = 0) -> None:
        part = self.sharded.narrow(0, start, target.numel())
        if part.dtype == target.dtype:
            self.host.transfers.weights.to_device(target, part)
        else:  # the staging buffer is made for casts to the dtype of the forward alone
            target.copy_(part)

    def make_sharded_grad(self) -> ShardedGrad:
        if self.sharded_grad is None:
            buffer = self.host.zeros(self.sharded.numel(), grad_dtype_of(self.params))
            self.sharded_grad = HostShardedGrad(self.host, buffer, self.params)
        return self.sharded_grad


class HostReplicatedFlatParam(HostFlatParam, ReplicatedFlatParam):
    """Replicated parameters in host memory; the forward sees copies on the device."""

    def _new_copies(self) -> Tensor:
        device = "meta" if self.sharded.is_meta else self.device
        return torch.empty(self.sharded.numel(), dtype=self.compute_dtype, device=device)

    def read(self, target: Tensor, start: int = 0) -> None:
        self.host.transfers.replicated.to_device(target, self.sharded.narrow(0, start, target.numel()))

    @property
    def device_bytes(self) -> int:
        return self.copied_bytes

    @property
    def host_bytes(self) -> int:
        return super().host_bytes - self.copied_bytes


def make_transfers(
    parts: Iterable[FlatParam], device: torch.device, gather_stream: CommStream, reduce_stream: CommStream
) -> HostTransfers | None:
    """Make the ``HostTransfers`` of an engine for all offloaded ``parts``; return None if none are offloaded."""
    offloaded = [part for part in parts if isinstance(part, HostFlatParam)]
    if not offloaded:
        return None
    replicated = [part for part in offloaded if isinstance(part, HostReplicatedFlatParam)]
    sharded = [part for part in offloaded if part not in replicated]
    trained = [part.sharded.nbytes for part in offloaded if part.sharded.is_floating_point()]
    transfers = HostTransfers(
        HostTransfer(gather_stream, device, max((part.cast_bytes for part in sharded), default=0)),
        HostTransfer(reduce_stream, device, max(trained, default=0)),
        HostTransfer(gather_stream, device, max((part.cast_bytes for part in replicated), default=0)),
    )
    for part in offloaded:
        part.host.transfers = transfers
    return transfers
