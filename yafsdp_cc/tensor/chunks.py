"""Methods of a sharded tensor that ``torch.distributed.checkpoint`` calls, in a rank or a process that saves for it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

if TYPE_CHECKING:
    from yafsdp_cc.engine.layout import ShardSpec


class SavedInChunks:
    """A tensor of which each rank saves and loads the chunks that its ``shard_spec`` names, as views of the local
    tensor.

    A pickled shard is useless without the other ranks. Only multiprocessing's own pickler may send a shard to the
    process that saves for this rank, as its elements in shared memory and the list of its chunks.
    """

    _local_tensor: torch.Tensor
    shard_spec: ShardSpec | _Chunks

    def __init_subclass__(cls) -> None:
        ForkingPickler.register(cls, SavedInChunks._for_another_process)

    def _for_another_process(self) -> tuple[Any, ...]:
        return _sent, (self._local_tensor, _Chunks(chunks_of(self.shard_spec), self.shard_spec.global_shape))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return chunks_of(self.shard_spec)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self._local_tensor), self.shard_spec.global_shape
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for chunk in chunks_of(self.shard_spec)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        first = 0
        for chunk in chunks_of(self.shard_spec):
            numel = math.prod(chunk.sizes)
            if index.offset == chunk.offsets:
                local = self._local_tensor
                return local if local.shape == chunk.sizes else local.view(-1)[first : first + numel].view(chunk.sizes)
            first += numel
        raise ValueError(f"no chunk at {index.offset} on this rank: {self.shard_spec}")


class _Chunks(NamedTuple):
    chunks: list[ChunkStorageMetadata]
    global_shape: torch.Size


class _SentShard(SavedInChunks, torch.Tensor):
    """A shard in the process that saves it; a Tensor subclass, because torch saves only tensors by chunks."""


def _sent(local: torch.Tensor, chunks: _Chunks) -> _SentShard:
    shard = local.as_subclass(_SentShard)
    shard._local_tensor, shard.shard_spec = local, chunks
    return shard


# The chunks of a rank's shard ----------------------------------------------------------------------------------------


def chunks_of(spec: ShardSpec | _Chunks) -> list[ChunkStorageMetadata]:
    """Return this rank's elements as chunks of the whole tensor; a tensor without elements is one empty chunk."""
    if isinstance(spec, _Chunks):
        return spec.chunks
    if spec.bounds is None or math.prod(spec.global_shape) == 0:
        chunks = [ChunkStorageMetadata(torch.Size((0,) * len(spec.shape)), spec.shape)]
    else:
        chunks = chunk_metadata(spec.shape, *spec.local_range())
    if spec.tensor_parallel is None:
        return chunks
    first = spec.tensor_parallel.offsets
    return [ChunkStorageMetadata(torch.Size(map(operator.add, first, each.offsets)), each.sizes) for each in chunks]


def chunk_metadata(shape: Sequence[int], start: int, stop: int) -> list[ChunkStorageMetadata]:
    """Return the row-major range ``start:stop`` of a tensor as chunks, the form in which checkpoints address parts.

    Elements 5 to 14 of a ``[4, 4]`` tensor are three chunks::

        . . . .
        . a a a      a  offsets (1, 1), sizes (1, 3)
        b b b b      b  offsets (2, 0), sizes (1, 4)
        c c . .      c  offsets (3, 0), sizes (1, 2)

    Returns:
        At most ``2 * len(shape) - 1`` chunks, whose elements are consecutive and in order; none for an empty range.

    Raises:
        ValueError: the range does not lie within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start}:{stop} do not lie within a tensor of shape {list(shape)}")
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    chunks = []
    while start < stop:
        offsets = [start // stride % size for size, stride in zip(shape, strides, strict=True)]
        sizes = list(shape)
        for dim, stride in enumerate(strides):
            if start % stride == 0 and start + stride <= stop:  # a row of ``dim`` begins here: take all that fit
                sizes[dim] = min((stop - start) // stride, shape[dim] - offsets[dim])
                break
            sizes[dim] = 1
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        start += math.prod(sizes)
    return chunks
