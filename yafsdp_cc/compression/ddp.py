"""Compression for torch's DDP: ``ddp.register_comm_hook(CompressionHookState("int8"), encoded_mean)``."""

# DDP compares the hook's annotations with types: postponed annotations, which are strings, would be refused.

from itertools import accumulate
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakIdRef

from yafsdp_cc.compression.codec import AUTO
from yafsdp_cc.compression.config import Compression, compression_of
from yafsdp_cc.compression.fsdp2 import CompressedCommunication, exact_mean, real_view
from yafsdp_cc.engine.cuda_streams import comm_stream
from yafsdp_cc.engine.streams import CommHandle, CommStream


class CompressionHookState(CompressedCommunication):
    """State of the DDP communication hook ``encoded_mean``.

    Args:
        compression: as of ``shard``, but with one codec, and for gradients alone. ``warmup_steps`` counts backwards
            that reduce gradients.
        group: the ranks of the DDP; None: all.

    Raises:
        ValueError: the compression has a setting that a hook of DDP cannot serve.
        RuntimeError: there is no process group yet.
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
        if ranks is None:
            raise RuntimeError(
                "CompressionHookState before there is a process group: make it after "
                "torch.distributed.init_process_group and the DistributedDataParallel"
            )
        self.group = ranks
        self.sums = self._all_reduces
        """Compressed sum of each bucket, by references to the bucket's parameters in order."""
        self.steps = 0
        """Number of backwards that have begun."""
        self.stream: CommStream | None = None
        self.handle: CommHandle

    def drop_residuals(self, model: nn.Module) -> None:
        parameters = set(map(WeakIdRef, model.parameters()))
        for key in [key for key in self.sums if not parameters.isdisjoint(key)]:
            del self.sums[key]

    def __getstate__(self) -> NoReturn:
        raise TypeError("the residuals of CompressionHookState are not saved: make a new one where training goes on")


def encoded_mean(state: CompressionHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by encoded messages that every rank sends to all others: a DDP communication hook.

    DDP rebuilds its buckets after the first step, and residuals start anew then. On CUDA messages are encoded and
    exchanged on a side stream beside the backward.
    """
    if not isinstance(state, CompressionHookState):
        raise TypeError(
            f"register_comm_hook(state, encoded_mean) with a state of type {type(state).__name__}: give it "
            "CompressionHookState('int8')"
        )
    total, parameters = bucket.buffer(), bucket.parameters()
    if total.is_sparse:
        raise ValueError(
            f"encoded_mean takes dense gradients, and that of a parameter of shape {tuple(parameters[0].shape)} is "
            "sparse: make its nn.Embedding with sparse=False"
        )
    index, key = bucket.index(), tuple(map(WeakIdRef, parameters))
    state.steps += index == 0
    future = torch.futures.Future[Any](devices=[total.device] if total.is_cuda else [])

    def average(async_op: bool) -> tuple[()]:
        if state.is_exact(state.steps):
            exact_mean(total, state.group)
        else:
            if key not in state.sums:
                for stale in [other for other in state.sums if not set(other).isdisjoint(key)]:
                    del state.sums[stale]
            sent = [real_view(each) for each in parameters]  # a DDP bucket holds complex numbers as pairs
            starts = accumulate((each.numel() for each in sent), initial=0)
            places = [(start, each.shape) for start, each in zip(starts, sent, strict=False)]
            state.all_reduce_mean(total, state.group, f"ddp/{index}/{total.numel()}", key, places)
        # for CUDA this records an event on the side stream, which DDP waits for at the end of the backward
        future.set_result(total)
        return ()

    if state.stream is None:
        state.stream = comm_stream(total.device)
        state.handle = state.stream.handle()
    state.stream.wait_for_caller()
    state.stream.issue(state.handle, average)
    return future
