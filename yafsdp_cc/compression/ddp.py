"""Compressed communication for torch's DDP: ``ddp.register_comm_hook(GradientWire("int8"), encoded_mean)``."""

# DDP reads the hook's annotations, and wants them to be the types themselves: no import of annotations here.

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from yafsdp_cc.compression.all_reduce import CompressedAllReduce
from yafsdp_cc.compression.config import AUTO, Compression, compression_of
from yafsdp_cc.compression.fsdp2 import CommContexts, GroupMean, exact_mean


class GradientWire:
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
            raise TypeError("GradientWire takes a Compression or the name of a codec such as 'int8', got None")
        if config.overrides or config.weights is not None:
            what = (
                "overrides: a bucket of DDP crosses in one piece" if config.overrides else "weights: DDP gathers none"
            )
            raise ValueError(f"GradientWire with {what}; leave them out, or use yafsdp_cc.shard")
        if config.gradients == AUTO:
            raise ValueError(
                "GradientWire with gradients='auto': how much of a reduce is exposed is known to DDP's own schedule, "
                "which a hook does not see; name a codec, or use yafsdp_cc.shard"
            )
        ranks = group if group is not None else dist.group.WORLD
        assert ranks is not None
        self.config = config
        self.group = ranks
        self.mean = GroupMean(config, CommContexts(), ranks)
        self.sent_bytes = 0
        """Bytes that this rank has sent through it so far."""
        self.steps = 0
        """Backwards that have begun."""

    @property
    def sums(self) -> dict[tuple[int, ...], CompressedAllReduce]:
        """The sums of buckets, by the parameters of each in its order."""
        return self.mean.sums


def encoded_mean(state: GradientWire, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by encoded messages that every rank sends to all others: a DDP communication hook.

    Buckets are put together anew after the first step; residuals start then.
    """
    total, future = bucket.buffer(), torch.futures.Future[Any]()
    state.steps += bucket.index() == 0
    if state.steps <= state.config.warmup_steps:
        exact_mean(total, state.group)
        future.set_result(total)
        return future
    places, start = [], 0
    for parameter in bucket.parameters():
        places.append((start, parameter.shape))
        start += parameter.numel()
    key = tuple(id(parameter) for parameter in bucket.parameters())
    if key not in state.sums:
        for stale in [other for other in state.sums if not set(other).isdisjoint(key)]:
            del state.sums[stale]
    state.sent_bytes += state.mean.average(total, key, f"ddp/{bucket.index()}/{total.numel()}", places)
    future.set_result(total)
    return future
