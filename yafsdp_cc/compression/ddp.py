"""Compression for torch's DDP: ``ddp.register_comm_hook(CompressionHookState("int8"), encoded_mean)``."""

# DDP reads the hook's annotations, and wants them to be the types themselves: no import of annotations here.

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from yafsdp_cc.compression.config import AUTO, Compression, compression_of
from yafsdp_cc.compression.fsdp2 import CompressedCommunication, exact_mean
from yafsdp_cc.engine.streams import CommHandle, CommStream, comm_stream


class CompressionHookState(CompressedCommunication):
    """State of the DDP communication hook ``encoded_mean``.

    Args:
        compression: as of ``shard``; of gradients alone, all by one codec. Steps of a warm-up are backwards that
            reduce gradients, here.
        group: the ranks of the DDP; None: all.

    Raises:
        ValueError: the compression asks for what cannot be done here.
        TypeError: ``compression`` is none.
    """

    def __init__(self, compression: Compression | str, group: dist.ProcessGroup | None = None) -> None:
        config = compression_of(compression)
        if config is None:
            raise TypeError("CompressionHookState takes a Compression or the name of a codec such as 'int8', got None")
        if config.overrides or config.weights is not None:
            what = (
                "overrides: a bucket of DDP is encoded as a whole" if config.overrides else "weights: DDP gathers none"
            )
            raise ValueError(f"CompressionHookState with {what}; leave them out, or use yafsdp_cc.shard")
        if config.gradients == AUTO:
            raise ValueError(
                "CompressionHookState with gradients='auto': how much of a reduce is exposed is known to DDP's own "
                "schedule, which a hook does not see; name a codec, or use yafsdp_cc.shard"
            )
        super().__init__(config)
        ranks = group if group is not None else dist.group.WORLD
        assert ranks is not None
        self.group = ranks
        self.sums = self._all_reduces
        """The sums of buckets, by the parameters of each in its order."""
        self.steps = 0
        """Backwards that have begun."""
        self.stream: CommStream | None = None
        """Where buckets are averaged, from the first one on."""
        self.handle: CommHandle
        """The last average."""


def encoded_mean(state: CompressionHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by encoded messages that every rank sends to all others: a DDP communication hook.

    Buckets are put together anew after the first step; residuals start then. On CUDA all of this is on a side stream,
    and the backward goes on meanwhile.
    """
    total, parameters = bucket.buffer(), bucket.parameters()
    index, key = bucket.index(), tuple(map(id, parameters))
    state.steps += index == 0
    future = torch.futures.Future[Any](devices=[total.device] if total.is_cuda else [])

    def average(async_op: bool) -> tuple[()]:
        if state.is_exact(state.steps):
            exact_mean(total, state.group)
        else:
            if key not in state.sums:
                for stale in [other for other in state.sums if not set(other).isdisjoint(key)]:
                    del state.sums[stale]
            places, start = [], 0
            for parameter in parameters:
                places.append((start, parameter.shape))
                start += parameter.numel()
            state.all_reduce_mean(total, state.group, f"ddp/{index}/{total.numel()}", key, places)
        future.set_result(total)  # records an event on this stream, for DDP to wait for at the end of the backward
        return ()

    if state.stream is None:
        state.stream = comm_stream(total.device)
        state.handle = state.stream.handle()
    state.stream.wait_for_caller()
    state.stream.issue(state.handle, average)
    return future
