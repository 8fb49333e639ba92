"""One buffer of fp32 summed over ranks, or gathered from them, in every way that is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_cc.bench.contestants import EXCHANGES
from yafsdp_cc.compression import kernels
from yafsdp_cc.compression.codec import codec_of
from yafsdp_cc.compression.compressed_sum import PlainBuffer
from yafsdp_cc.compression.config import Compression
from yafsdp_cc.compression.reduce_scatter import CompressedReduceScatter
from yafsdp_cc.compression.schedule import CompressionSchedule
from yafsdp_cc.engine.collectives import ExactReduceScatter
from yafsdp_cc.engine.communicator import CommContext, Communicator, ScratchBuffers
from yafsdp_cc.engine.layout import Extent, Layout
from yafsdp_cc.engine.param import Divisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
    world, rank, numel, device = dist.get_world_size(), dist.get_rank(), buffers.whole.numel(), buffers.whole.device
    layout = Layout((Extent((numel,), 0, numel),), world, numel // world)
    buffer = PlainBuffer(codec, layout, rank, device, Divisor(world, device))
    return _summed(CompressedReduceScatter(buffer, CompressionSchedule(Compression(codec)), codec), buffers)


def _summed(reduce: ExactReduceScatter | CompressedReduceScatter, buffers: Buffers) -> Callable[[], object]:
    reduce.bind(_context(buffers.whole.device))

    def exchange() -> None:
        _wait(reduce.start(buffers.whole, async_op=False))
        for start, part in reduce.finish(buffers.whole):
            buffers.chunk.narrow(0, start, part.numel()).copy_(part)

    return exchange


def torch_all_gather(buffers: Buffers) -> Callable[[], object]:
    """As the backend does it."""
    return lambda: dist.all_gather_into_tensor(buffers.gathered, buffers.own)


def exact_gather(buffers: Buffers) -> Callable[[], object]:
    """The engine's own, exact."""
    comm = _context(buffers.whole.device).comm
    place = comm.own_chunk(buffers.gathered)
    return lambda: _wait(comm.all_gather(buffers.gathered, place.copy_(buffers.own), async_op=False))


def encoded_gather(buffers: Buffers, *, codec: str) -> Callable[[], object]:
    """The engine's own, encoded, as ``RoundedAllGather`` has it."""
    comm, how = _context(buffers.whole.device).comm, codec_of(codec)
    size = how.message_bytes(buffers.chunk.numel())
    messages = buffers.whole.new_empty(comm.world, size, dtype=torch.uint8)

    def exchange() -> None:
        own = messages[comm.rank]
        kernels.encode(how, buffers.own.unsqueeze(0), own.unsqueeze(0))
        _wait(comm.all_gather(messages.view(-1), own, async_op=False))
        kernels.decode(how, messages, buffers.gathered.view(comm.world, -1))

    return exchange


def _context(device: torch.device) -> CommContext:
    assert dist.group.WORLD is not None
    return CommContext(Communicator(dist.group.WORLD, device), ScratchBuffers(device), lambda kind, name: None)


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


_MAKERS: dict[str, Callable[..., Callable[[], object]]] = {
    "torch_reduce_scatter": torch_reduce_scatter,
    "torch_all_to_all": torch_all_to_all,
    "exact_reduce": exact_reduce,
    "encoded_reduce": encoded_reduce,
    "torch_all_gather": torch_all_gather,
    "exact_gather": exact_gather,
    "encoded_gather": encoded_gather,
}
