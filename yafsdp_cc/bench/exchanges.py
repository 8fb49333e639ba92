"""One buffer of fp32 summed over ranks, or gathered from them, in every way that is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_cc.bench.contestants import EXCHANGES
from yafsdp_cc.compression.all_gather import RoundedAllGather
from yafsdp_cc.compression.codec import codec_of
from yafsdp_cc.compression.compressed_sum import PlainBuffer
from yafsdp_cc.compression.config import Compression
from yafsdp_cc.compression.fsdp2 import constant_schedule
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter
from yafsdp_cc.engine.collectives import ExactAllGather, ExactReduceScatter
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.layout import Extent, Layout
from yafsdp_cc.engine.param import Divisor
from yafsdp_cc.engine.protocols import AllGather, ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Callable


class Buffers(NamedTuple):
    """What one rank exchanges."""

    whole: Tensor
    """[world × chunk], its own numbers; a sum may be made where this rank's own chunk lies."""
    gathered: Tensor
    """[world × chunk], of all ranks after a gather."""
    chunk: Tensor
    """[chunk], the sum after a reduction."""

    @classmethod
    def of(cls, size: int, device: torch.device) -> Buffers:
        """Of so many bytes, other numbers on every rank."""
        draws = torch.Generator().manual_seed(dist.get_rank())
        whole = torch.randn(size // 4, generator=draws).to(device)
        return cls(whole, torch.zeros_like(whole), torch.zeros_like(whole[: len(whole) // dist.get_world_size()]))

    @property
    def own(self) -> Tensor:
        """[chunk], what this rank has for the others to gather."""
        return self.whole.view(dist.get_world_size(), -1)[dist.get_rank()]


def exchange_of(name: str, buffers: Buffers) -> Callable[[], object]:
    """What exchanges the buffers once, as the contestant of this name does."""
    maker, told, _ = EXCHANGES[name]
    return _MAKERS[maker](buffers, **told)


def torch_reduce_scatter(buffers: Buffers) -> Callable[[], object]:
    """As the backend does it."""
    return lambda: dist.reduce_scatter_tensor(buffers.chunk, buffers.whole)


def torch_all_to_all(buffers: Buffers) -> Callable[[], object]:
    """Every rank's chunk to its owner, who sums."""
    received = torch.empty_like(buffers.whole)

    def exchange() -> None:
        dist.all_to_all_single(received, buffers.whole)
        torch.sum(received.view(dist.get_world_size(), -1), dim=0, out=buffers.chunk)

    return exchange


def exact_reduce(buffers: Buffers) -> Callable[[], object]:
    """The engine's own, exact."""
    return _summed(ExactReduceScatter(buffers.whole.numel(), buffers.whole.dtype), buffers)


def encoded_reduce(buffers: Buffers, *, codec: str) -> Callable[[], object]:
    """The engine's own, encoded, with a residual in bf16."""
    schedule = constant_schedule(Compression(codec, residual="bf16"))
    return _summed(CompressedReduceScatter(_plain_buffer(buffers), schedule, codec), buffers)


def _summed(reduce_scatter: ReduceScatter, buffers: Buffers) -> Callable[[], object]:
    reduce_scatter.bind(_context(buffers.whole.device))

    def exchange() -> None:
        for work in reduce_scatter.start(buffers.whole, async_op=False):
            work.wait()
        for start, part in reduce_scatter.finish(buffers.whole):
            buffers.chunk.narrow(0, start, part.numel()).copy_(part)

    return exchange


def torch_all_gather(buffers: Buffers) -> Callable[[], object]:
    """As the backend does it."""
    return lambda: dist.all_gather_into_tensor(buffers.gathered, buffers.own)


def exact_gather(buffers: Buffers) -> Callable[[], object]:
    """The engine's own, exact."""
    shard: Any = _Shard(buffers)
    return _gathered(ExactAllGather(shard), buffers)


def encoded_gather(buffers: Buffers, *, codec: str) -> Callable[[], object]:
    """The engine's own, encoded."""
    schedule = constant_schedule(Compression(weights=codec))
    shard: Any = _Shard(buffers)
    return _gathered(RoundedAllGather(shard, schedule, codec_of(codec)), buffers)


def _gathered(all_gather: AllGather, buffers: Buffers) -> Callable[[], object]:
    all_gather.bind(_context(buffers.whole.device))
    scratch = buffers.whole.new_empty(all_gather.scratch_bytes(), dtype=torch.uint8)

    def exchange() -> None:
        for work in all_gather.start(buffers.gathered, None, scratch, async_op=False):
            work.wait()
        all_gather.finish(buffers.gathered, scratch)

    return exchange


class _Shard:
    """This rank's chunk, as the ``FlatParam`` of an all-gather."""

    def __init__(self, buffers: Buffers) -> None:
        self.layout = _layout(buffers)
        self.sharded = buffers.own
        self.compute_dtype = buffers.whole.dtype

    def send_buffer(self, own: Tensor, *, in_place: bool) -> Tensor:
        return own.copy_(self.sharded) if in_place else self.sharded


def _layout(buffers: Buffers) -> Layout:
    """One parameter that fills the buffer."""
    n = buffers.whole.numel()
    return Layout((Extent((n,), 0, n),), dist.get_world_size(), buffers.chunk.numel())


def _plain_buffer(buffers: Buffers) -> PlainBuffer:
    device = buffers.whole.device
    return PlainBuffer("bench", _layout(buffers), dist.get_rank(), device, Divisor(dist.get_world_size(), device))


def _context(device: torch.device) -> CommContext:
    assert dist.group.WORLD is not None
    return CommContext(Communicator(dist.group.WORLD, device), ScratchBuffers(device), lambda kind, name: None)


_MAKERS: dict[str, Callable[..., Callable[[], object]]] = {
    "torch_reduce_scatter": torch_reduce_scatter,
    "torch_all_to_all": torch_all_to_all,
    "exact_reduce": exact_reduce,
    "encoded_reduce": encoded_reduce,
    "torch_all_gather": torch_all_gather,
    "exact_gather": exact_gather,
    "encoded_gather": encoded_gather,
}
