"""A wire that is not there: one rank in one process, on one device, in a world of any size.

Every other rank is a twin, with the same numbers everywhere. So what is gathered, summed and exchanged has the size it
would have, ranks agree wherever they compare, and weights, put together of as many equal parts, mean nothing.

    fabric = Fabric(far=LinkCost(15e-6, 1 / 25e9), near=LinkCost(5e-6, 1 / 350e9), machine=8)
    begin(0, 256, fabric)                              # in the place of init_process_group
    mesh = init_device_mesh("cuda", (256,))           # and then as ever: shard(model, mesh=mesh), fully_shard(...)

On a GPU a collective takes the time that the links would: a delay, and the bytes that a rank sends by their pace. It is
a kernel on a few multiprocessors, where NCCL's would be, that carries operands to results part by part, as fast as the
link lets it (``paced``). On a CPU nothing takes time.

Groups are called "nccl", and take tensors as NCCL does: what is not asynchronous runs on the current stream, the rest
on a stream of the group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from yafsdp_cc.bench.paced import SUMMED, Carrier, Terms
from yafsdp_cc.compression.autotune import LinkCost

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKEND = "modelled"
_FOREVER = timedelta(hours=1)
_KINDS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)


class Fabric(NamedTuple):
    """What carries bytes between ranks, of which each has a link of its own."""

    far: LinkCost
    """Between machines."""
    near: LinkCost
    """Within one."""
    machine: int = 8
    """Ranks of each, the first ones on the first."""

    def is_near(self, ranks: Sequence[int]) -> bool:
        """Whether all of these are on one machine."""
        return len({rank // self.machine for rank in ranks}) == 1


class Traffic:
    """What this rank has sent."""

    def __init__(self) -> None:
        self.sent_bytes = 0


def begin(rank: int, world: int, fabric: Fabric) -> Traffic:
    """Make this process rank ``rank`` of ``world``, the only one there is, as ``init_process_group`` does.

    Once for a process: its fabric stays.
    """
    carriers: dict[bool, Carrier] = {}
    traffic = Traffic()

    def group(options: Any, _: Any) -> Twins:
        near = fabric.is_near(options.global_ranks_in_group or range(world))
        if torch.cuda.is_available() and near not in carriers:
            carriers[near] = Carrier(fabric.near if near else fabric.far, torch.device("cuda"))
        return Twins(options.group_rank, options.group_size, traffic, carriers.get(near))

    dist.Backend.register_backend(BACKEND, group, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=world, timeout=_FOREVER)
    return traffic


class Done(dist.Work):
    """What has been enqueued, and what it reads and writes."""

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


class Twins(dist.ProcessGroup):
    """A group of ranks with the same numbers.

    Args:
        traffic: where bytes are counted.
        carrier: what takes the time of a link; None: nothing does.
    """

    def __init__(self, rank: int, world: int, traffic: Traffic, carrier: Carrier | None) -> None:
        made: Any = super().__init__
        made(rank, world)
        self._traffic = traffic
        self._place, self._world, self._carrier = rank, world, carrier
        self._side: torch.cuda.Stream | None = None
        self._summed: tuple[Tensor, float] | None = None
        """What has just been summed in chunks, and how many times each term counts."""

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
        """[world × n] of [n]. What has just been summed in chunks is gathered as the sums that all have made."""
        summed, self._summed = self._summed, None
        sent = self._others(output.nbytes)
        if summed is None or (summed[0].shape, summed[0].dtype) != (output.shape, output.dtype):
            return self._carry(output, source, Terms(), sent, opts)
        return self._carry(output, summed[0], Terms(scale=summed[1]), sent, opts, own=source)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """[n] of [world × n]."""
        scale = 1.0 if _kind(opts) == dist.ReduceOp.AVG else float(self._world)
        terms = Terms(self._world, self._place, scale)
        work = self._carry(output, source, terms, self._others(source.nbytes), opts)
        self._summed = source, scale
        return work

    def alltoall_base(self, output: Tensor, source: Tensor, received: Any, sent: Any, opts: Any = None) -> dist.Work:
        """Of every rank what it says to itself; where that is nothing, as much as is said to it.

        Raises:
            ValueError: other sizes are received than sent.
        """
        if received != sent:
            raise ValueError(f"a twin says as much as it is told, not {received} elements for {sent}")
        if sent:
            return self._carry(output, source, Terms(), source.nbytes - sent[self._place] * source.itemsize, opts)
        work = self._carry(output, source, Terms(self._world, self._place), self._others(source.nbytes), opts)
        self._summed = source, float(self._world)
        return work

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        (tensor,) = tensors
        scale = float(self._world) if _kind(opts) == dist.ReduceOp.SUM else 1.0
        return self._carry(tensor, tensor, Terms(scale=scale), 2 * self._others(tensor.nbytes), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        (tensor,) = tensors
        return self._carry(tensor, tensor, Terms(), tensor.nbytes, opts)

    all_gather_single: Any = _allgather_base
    reduce_scatter_single: Any = _reduce_scatter_base
    all_to_all_single: Any = alltoall_base

    # What is done once, and takes no time

    def allgather(self, outputs: Any, sources: Any, opts: Any = None) -> dist.Work:
        for each, source in zip(outputs, sources, strict=False):  # only one rank gets what is gathered to it
            for output in each:
                output.copy_(source)
        return Done(None)

    gather: Any = allgather

    def scatter(self, outputs: Any, sources: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        for output, each in zip(outputs, sources, strict=False):
            output.copy_(each[self._place])
        return Done(None)

    def barrier(self, opts: Any = None) -> dist.Work:
        return Done(None)

    # How

    def _others(self, size: int) -> int:
        """Of the bytes of all ranks, those of all but this one."""
        return size // self._world * (self._world - 1)

    def _carry(
        self, output: Tensor, source: Tensor, terms: Terms, sent: int, opts: Any, own: Tensor | None = None
    ) -> dist.Work:
        """Write the sum of ``terms`` of the source, as often as there is room for it; ``own`` is this rank's part."""
        self._summed = None
        self._traffic.sent_bytes += sent
        if self._carrier is None or output.device.type != "cuda":
            _write(output, source, terms)
            self._put(own, output)
            return Done(None)
        current = torch.cuda.current_stream(output.device)
        side = current if opts is None or not opts.asyncOp else self._stream(output.device)
        if side != current:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            if terms != Terms() and source.dtype not in SUMMED:  # a few numbers that ranks compare
                _write(output, source, terms)
                source, terms = output, Terms()
            self._carrier.carry(output, source, terms, sent, side)
            self._put(own, output)
        return Done(None if side == current else side.record_event(), output, source)

    def _put(self, own: Tensor | None, output: Tensor) -> None:
        """Write this rank's part of what has been gathered, where it is not what the others' are."""
        if own is not None:
            output.view(self._world, -1)[self._place].copy_(own.view(-1))

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._side is None:
            self._side = torch.cuda.Stream(device, priority=-1)
        return self._side


def _write(output: Tensor, source: Tensor, terms: Terms) -> None:
    """What ``Carrier.carry`` writes, at once."""
    term = source.reshape(terms.terms, -1)[terms.which]
    output.view(-1, term.numel()).copy_(term * terms.scale if terms.scale != 1 else term.clone())


def _kind(opts: Any) -> Any:
    """Which of all reductions.

    Raises:
        ValueError: not one that twins know.
    """
    kind = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known in _KINDS:
        if kind == known:
            return known
    raise ValueError(f"twins sum, average and compare, and have no {getattr(kind, 'op', kind)}")
