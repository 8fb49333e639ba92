"""A modelled network: one rank in one process, on one device, in a world of any size.

Every other rank is taken to hold the same numbers. So what is gathered, summed and exchanged has the size it would
have, ranks agree wherever they compare, and weights, put together of equal parts, mean nothing.

    fabric = Fabric(between_machines=LinkCost(15e-6, 1 / 25e9), within_machine=LinkCost(5e-6, 1 / 350e9), machine=8)
    begin(0, 256, fabric, "cuda")                     # in the place of init_process_group
    mesh = init_device_mesh("cuda", (256,))           # and then as ever: shard(model, mesh=mesh), fully_shard(...)

On a GPU a collective takes the time that the links would: a delay, and the bytes that a rank sends by their rate. It is
a kernel on a few multiprocessors, where NCCL's would be, that copies operands to results part by part, no faster than
the link allows (``paced``). On a CPU nothing takes time.

Groups are called "nccl", and take tensors as NCCL does: what is not asynchronous runs on the current stream, the rest
on a stream of the group. Collectives of one group run one after another, whatever their streams, as those of one of
NCCL's communicators do.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from bench.paced import SUMMED_DTYPES, PacedLink, Summands
from yafsdp_cc.compression.autotune import LinkCost
from yafsdp_cc.sharding import assembly

BACKEND = "modelled"
_FOREVER = timedelta(hours=1)
_REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)


class Fabric(NamedTuple):
    """The links between ranks, of which each has one of its own."""

    between_machines: LinkCost
    within_machine: LinkCost
    machine: int = 8
    """Ranks of each, the first ones on the first."""

    def is_one_machine(self, ranks: Sequence[int]) -> bool:
        """Return whether all of these are on one machine."""
        return len({rank // self.machine for rank in ranks}) == 1


class Traffic:
    """What this rank has sent."""

    def __init__(self) -> None:
        self.sent_bytes = 0


def begin(rank: int, world: int, fabric: Fabric, device: str) -> Traffic:
    """Make this process rank ``rank`` of ``world``, the only one there is, as ``init_process_group`` does.

    Once for a process: its fabric stays. Collectives take time where ``device`` is "cuda". A process that was forked of
    one that has used CUDA cannot use it, and has to name "cpu".
    """
    links: dict[bool, PacedLink] = {}
    traffic = Traffic()

    def group(options: Any, _: Any) -> ModelledGroup:
        within = fabric.is_one_machine(options.global_ranks_in_group or range(world))
        if device == "cuda" and within not in links:
            cost = fabric.within_machine if within else fabric.between_machines
            links[within] = PacedLink(cost, torch.device(device))
        return ModelledGroup(options.group_rank, options.group_size, traffic, links.get(within))

    dist.Backend.register_backend(BACKEND, group, extended_api=True, devices=["cpu", "cuda"])
    # ``shard`` asks a backend for CUDA who has sent what, and here all ranks send what this one does.
    assembly.check_trial_exchange = lambda *_: None
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=world, timeout=_FOREVER)
    return traffic


class Enqueued(dist.Work):
    """A collective that was enqueued; keeps the tensors that it reads and writes."""

    def __init__(self, event: torch.cuda.Event | None, *tensors: Tensor) -> None:
        super().__init__()
        self._event = event
        self._tensors = tensors

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()


class ModelledGroup(dist.ProcessGroup):
    """A group of ranks with the same numbers.

    Args:
        traffic: where bytes are counted.
        link: takes the time of one; None: nothing does.
    """

    def __init__(self, rank: int, world: int, traffic: Traffic, link: PacedLink | None) -> None:
        init: Any = super().__init__
        init(rank, world)
        self._traffic = traffic
        self._rank, self._world, self._link = rank, world, link
        self._side_stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None
        """Behind the last collective."""
        self._reduced: tuple[Tensor, float] | None = None
        """What was reduce-scattered last, and what each summand was multiplied by."""

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def name(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:
        return "nccl"

    # What an engine does at every step

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Gather [n] to [world * n]; after a reduce-scatter of that size the sums of all ranks, as in an all-reduce."""
        reduced, self._reduced = self._reduced, None
        sent = self._others(output.nbytes)
        if reduced is None or (reduced[0].shape, reduced[0].dtype) != (output.shape, output.dtype):
            return self._transfer(output, source, Summands(), sent, opts)
        return self._transfer(output, reduced[0], Summands(scale=reduced[1]), sent, opts, own=source)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Reduce [world * n] to [n]."""
        scale = 1.0 if _reduction(opts) == dist.ReduceOp.AVG else float(self._world)
        summands = Summands(self._world, self._rank, scale)
        work = self._transfer(output, source, summands, self._others(source.nbytes), opts)
        self._reduced = source, scale
        return work

    def alltoall_base(self, output: Tensor, source: Tensor, received: Any, sent: Any, opts: Any = None) -> dist.Work:
        """Receive from every rank what this one sends to itself; where that is nothing, what it sends to them.

        Raises:
            ValueError: other sizes are received than sent.
        """
        if received != sent:
            raise ValueError(f"modelled ranks send what they receive, not {received} elements for {sent}")
        if sent:
            return self._transfer(output, source, Summands(), source.nbytes - sent[self._rank] * source.itemsize, opts)
        work = self._transfer(output, source, Summands(self._world, self._rank), self._others(source.nbytes), opts)
        self._reduced = source, float(self._world)
        return work

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        (tensor,) = tensors
        scale = float(self._world) if _reduction(opts) == dist.ReduceOp.SUM else 1.0
        return self._transfer(tensor, tensor, Summands(scale=scale), 2 * self._others(tensor.nbytes), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        (tensor,) = tensors
        return self._transfer(tensor, tensor, Summands(), tensor.nbytes, opts)

    all_gather_single: Any = _allgather_base
    reduce_scatter_single: Any = _reduce_scatter_base
    all_to_all_single: Any = alltoall_base

    # What is done once, and takes no time

    def allgather(self, outputs: Any, sources: Any, opts: Any = None) -> dist.Work:
        for each, source in zip(outputs, sources, strict=False):  # only one rank gets what is gathered to it
            for output in each:
                output.copy_(source)
        return Enqueued(None)

    gather: Any = allgather

    def scatter(self, outputs: Any, sources: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        for output, each in zip(outputs, sources, strict=False):
            output.copy_(each[self._rank])
        return Enqueued(None)

    def barrier(self, opts: Any = None) -> dist.Work:
        return Enqueued(None)

    # How

    def _others(self, nbytes: int) -> int:
        """Return how many of the bytes of all ranks are those of others."""
        return nbytes // self._world * (self._world - 1)

    def _transfer(
        self, output: Tensor, source: Tensor, summands: Summands, sent: int, opts: Any, own: Tensor | None = None
    ) -> dist.Work:
        """Write the sum, repeated until ``output`` is full; ``own`` is this rank's part of what was gathered."""
        self._reduced = None
        self._traffic.sent_bytes += sent
        if self._link is None or output.device.type != "cuda":
            _write(output, source, summands)
            self._write_own(own, output)
            return Enqueued(None)
        current = torch.cuda.current_stream(output.device)
        stream = current
        if opts is not None and opts.asyncOp:
            if self._side_stream is None:
                self._side_stream = torch.cuda.Stream(output.device, priority=-1)
            stream = self._side_stream
            stream.wait_stream(current)
        if self._last is not None:
            stream.wait_event(self._last)
        with torch.cuda.stream(stream):
            if summands != Summands() and source.dtype not in SUMMED_DTYPES:  # a few numbers that ranks compare
                _write(output, source, summands)
                source, summands = output, Summands()
            self._link.transfer(output, source, summands, sent, stream)
            self._write_own(own, output)
        self._last = stream.record_event(self._last)
        return Enqueued(None if stream == current else stream.record_event(), output, source)

    def _write_own(self, own: Tensor | None, output: Tensor) -> None:
        if own is not None:
            output.view(self._world, -1)[self._rank].copy_(own.view(-1))


def _write(output: Tensor, source: Tensor, summands: Summands) -> None:
    """Write what ``PacedLink.transfer`` does, at once."""
    summand = source.reshape(summands.parts, -1)[summands.which]
    output.view(-1, summand.numel()).copy_(summand * summands.scale if summands.scale != 1 else summand.clone())


def _reduction(opts: Any) -> Any:
    """Return the reduction that was asked for.

    Raises:
        ValueError: it is not modelled.
    """
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known in _REDUCTIONS:
        if asked == known:
            return known
    raise ValueError(f"modelled ranks sum, average and compare, and have no {getattr(asked, 'op', asked)}")
