"""Methods of a sharded tensor that ``torch.distributed.checkpoint`` calls, here or in a process that saves for it."""

from __future__ import annotations

import math
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

    A pickled shard is useless without the other ranks. Only multiprocessing's own pickler may send one to the process
    that saves for this rank: its elements in shared memory, and which chunks they are.
    """

    _local_tensor: torch.Tensor
    shard_spec: ShardSpec | _Chunks

    def __init_subclass__(cls) -> None:
        ForkingPickler.register(cls, SavedInChunks._for_another_process)

    def _for_another_process(self) -> tuple[Any, ...]:
        return _sent, (self._local_tensor, _Chunks(self.shard_spec.chunks, self.shard_spec.global_shape))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.shard_spec.chunks

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self._local_tensor), self.shard_spec.global_shape
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for chunk in self.shard_spec.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        first = 0
        for chunk in self.shard_spec.chunks:
            numel = math.prod(chunk.sizes)
            if index.offset == chunk.offsets and self._local_tensor.shape == chunk.sizes:
                return self._local_tensor
            if index.offset == chunk.offsets:
                return self._local_tensor.view(-1)[first : first + numel].view(chunk.sizes)
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
