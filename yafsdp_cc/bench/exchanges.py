"""One buffer of fp32 summed over ranks, or gathered from them, in every way that is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from yafsdp_cc.bench.contestants import EXCHANGES
from yafsdp_cc.wire import codecs
from yafsdp_cc.wire.codec import codec_of
from yafsdp_cc.wire.encoded import EncodedGather, EncodedReduce
from yafsdp_cc.wire.exchange import Gather, Reduce
from yafsdp_cc.wire.feedback import Residual
from yafsdp_cc.wire.post import Post

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

assert codecs  # which register themselves


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
    reduce = Reduce(_group(), buffers.whole.device)
    reduce.reserve(buffers.whole.numel(), buffers.whole.dtype)
    return _summed(reduce, buffers)


def encoded_reduce(buffers: Buffers, *, codec: str) -> Callable[[], object]:
    """The engine's own, encoded, with what was not said kept in bf16."""
    how, world, device = codec_of(codec), dist.get_world_size(), buffers.whole.device
    residual = Residual(world - 1, buffers.chunk.numel(), torch.bfloat16, how.block, device)
    post = Post(_group(), device)
    return _summed(EncodedReduce(post, how, buffers.whole.numel(), None, residual, codec), buffers)


def _summed(reduce: Reduce | EncodedReduce, buffers: Buffers) -> Callable[[], object]:
    def exchange() -> None:
        _wait(reduce.send(buffers.whole, asynchronous=False))
        for start, part in reduce.totals(buffers.whole):
            buffers.chunk.narrow(0, start, part.numel()).copy_(part)

    return exchange


def torch_all_gather(buffers: Buffers) -> Callable[[], object]:
    """As the backend does it."""
    return lambda: dist.all_gather_into_tensor(buffers.gathered, buffers.own)


def exact_gather(buffers: Buffers) -> Callable[[], object]:
    """The engine's own, exact."""
    gather = Gather(_group(), buffers.whole.device)
    return lambda: _wait(gather.send(buffers.gathered, buffers.own, asynchronous=False))


def encoded_gather(buffers: Buffers, *, codec: str) -> Callable[[], object]:
    """The engine's own, encoded."""
    gather = EncodedGather(Gather(_group(), buffers.whole.device), codec_of(codec))
    messages = buffers.whole.new_empty(gather.message_bytes(buffers.whole.numel()), dtype=torch.uint8)

    def exchange() -> None:
        _wait(gather.send(messages, buffers.own, asynchronous=False))
        gather.finish(messages, buffers.gathered)

    return exchange


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


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
