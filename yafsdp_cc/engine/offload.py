"""What is different where shards are in host memory: the same parts of an engine, with copies where those have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from yafsdp_cc.engine.flat import Flat, Gradients
from yafsdp_cc.engine.host import Crossing, Crossings
from yafsdp_cc.engine.small import SmallBlock
from yafsdp_cc.wire.exchange import Gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.draft import Draft
    from yafsdp_cc.engine.dtensor import FlatDTensor
    from yafsdp_cc.engine.flat import Divisor, Piece
    from yafsdp_cc.engine.host import Host
    from yafsdp_cc.engine.lanes import Lane


class HostGradients(Gradients):
    """Gradients in host memory: the device divides and adds, the host keeps."""

    def __init__(
        self, host: Host, buffer: Tensor, pieces: Sequence[Piece], wrap: Callable[[Tensor, Piece], FlatDTensor]
    ) -> None:
        self._host = host
        super().__init__(buffer, pieces, wrap)

    def _fresh(self) -> Tensor:
        return self._host.zeros(self.buffer.numel(), self.buffer.dtype)

    def _start(self, gradient: Tensor, total: Tensor, divisor: Divisor) -> None:
        crossing = self._host.crossings.gradients
        for part, room, summed in crossing.parts(gradient, total):
            super()._start(room, summed, divisor)
            part.copy_(room, non_blocking=True)
        crossing.mark()

    def _add(self, gradient: Tensor, total: Tensor, divisor: Divisor) -> None:
        crossing = self._host.crossings.gradients
        for part, room, summed in crossing.parts(gradient, total):
            room.copy_(part, non_blocking=True)
            super()._add(room, summed, divisor)
            part.copy_(room, non_blocking=True)
        crossing.mark()


class HostFlat(Flat):
    """A flat whose shard, and so whatever an optimizer makes for it, is in host memory."""

    def __init__(self, host: Host, *rest: Any) -> None:
        super().__init__(*rest)
        self._host = host

    @property
    def cast_bytes(self) -> int:
        """Bytes that are cast on their way to the device."""
        return self.master.nbytes if self.master.dtype != self.compute else 0

    @property
    def owned_bytes(self) -> int:
        """Bytes on the engine's device."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, beside the device."""
        return super().owned_bytes

    def train(self, wrap: Callable[[Tensor, Piece], FlatDTensor]) -> Gradients:
        """The gradients of this flat, made when its first parameter is to be trained; ``wrap`` makes ``.grad``."""
        if self.gradients is None:
            buffer = self._host.zeros(self.master.numel(), self.master.dtype)
            self.gradients = HostGradients(self._host, buffer, self.pieces, wrap)
        return self.gradients


class HostBlock(SmallBlock):
    """Small parameters in host memory; the forward sees copies on the device."""

    def __init__(self, host: Host, device: torch.device, *rest: Any) -> None:
        self._host = host
        self._device = device
        super().__init__(*rest)

    def _room(self, master: Tensor) -> Tensor:
        return torch.empty(master.numel(), dtype=self._dtype, device="meta" if master.is_meta else self._device)

    def _copy(self) -> None:
        self._host.crossings.small.bring(self.compute, self.master)

    @property
    def cast_bytes(self) -> int:
        """Bytes that are cast on their way to the device."""
        return self.master.nbytes if self.master.dtype != self._dtype else 0

    @property
    def owned_bytes(self) -> int:
        """Bytes on the engine's device."""
        return self.copied_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, beside the device."""
        return super().owned_bytes - self.copied_bytes

    def train(self, wrap: Callable[[Tensor, Piece], FlatDTensor]) -> Gradients:
        """The gradients of this block, made when its first parameter is to be trained."""
        if self.gradients is None:
            buffer = self._host.zeros(self.master.numel(), self.master.dtype)
            self.gradients = HostGradients(self._host, buffer, self.pieces, wrap)
        return self.gradients


class FromHost(Gather):
    """Gathers shards in host memory: each rank's own goes right to its place in the slot, the others come there."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, crossing: Crossing) -> None:
        super().__init__(group, device)
        self._crossing = crossing

    def send(self, whole: Tensor, shard: Tensor, asynchronous: bool) -> list[dist.Work]:
        """Fill ``whole`` (world × n) with every rank's ``shard`` (n), cast to the dtype of ``whole``."""
        return self.exchange(whole, self.brought(whole, shard), asynchronous)

    def brought(self, whole: Tensor, shard: Tensor) -> Tensor:
        """This rank's range of ``whole``, with the ``shard`` in it, cast."""
        own = self.own(whole)
        self._crossing.bring(own, shard)
        return own

    def bring(self, target: Tensor, shard: Tensor) -> None:
        """Copy a part of the shard to ``target``, on the device, cast to its dtype."""
        if shard.dtype == target.dtype:
            self._crossing.bring(target, shard)
        else:  # the room is for shards that are cast to the dtype of the forward
            target.copy_(shard)


def crossings_of(drafts: Sequence[Draft], device: torch.device, gathers: Lane, reduces: Lane) -> Crossings | None:
    """The crossings of an engine of these drafts, which use them from now on; None if all live on the device."""
    hosts = dict.fromkeys(draft.host for draft in drafts if draft.host is not None)
    if not hosts:
        return None
    flats = [flat for draft in drafts for flat in draft.flats if isinstance(flat, HostFlat)]
    blocks = [block for draft in drafts for block in draft.blocks if isinstance(block, HostBlock)]
    parts: list[HostFlat | HostBlock] = [*flats, *blocks]
    trained = [part.master.nbytes for part in parts if part.master.is_floating_point()]  # now or later
    crossings = Crossings(
        Crossing(gathers, device, max((flat.cast_bytes for flat in flats), default=0)),
        Crossing(reduces, device, max(trained, default=0)),
        Crossing(gathers, device, max((block.cast_bytes for block in blocks), default=0)),
    )
    for host in hosts:
        host.crossings = crossings
    return crossings
