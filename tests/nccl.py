"""NCCL's arithmetic without a GPU: 2 to 512 ranks in one process, a thread each, whose collectives meet in one place.

gloo sums in fp32 whatever is sent. NCCL adds in the dtype that is sent and rounds at every hop, in an order of its own:
a ring starts the sum of chunk c at rank c + 1 and ends it at rank c, a tree adds in pairs. ``Nccl(world).run(body)``
calls ``body`` with each rank's ``Rank``, a process group for the package's own ``Communicator``, and computes every
collective once all ranks have issued it. The order of a sum, or a broken one, is a function.

Where NCCL would hang, ranks raise ``Hang``: some wait in a collective that another rank has left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")

Sum = Callable[[Tensor], Tensor]
"""From what each rank contributes to each chunk, [world, world, n], to the sums of the chunks, [world, n]."""


class Hang(Exception):
    """A collective that not all ranks have issued; other errors of ranks are results of the body."""


def ring(contributions: Tensor) -> Tensor:
    """Sum chunk c in the order of ranks c + 1, c + 2, ..., c, rounded at each hop."""
    world = contributions.shape[0]
    chunks = torch.arange(contributions.shape[1])
    total = contributions[(chunks + 1) % world, chunks]
    for hop in range(2, world + 1):
        total += contributions[(chunks + hop) % world, chunks]
    return total


def tree(contributions: Tensor) -> Tensor:
    """Sum pairs of ranks, then pairs of pairs, rounded at each addition; a rank without a partner waits."""
    level = contributions
    while (count := level.shape[0]) > 1:
        level = torch.cat([level[0 : count - 1 : 2] + level[1::2], level[count - count % 2 :]])
    return level[0]


INTEGERS = {torch.uint8, torch.int8, torch.int32, torch.int64}
CARRIED = {torch.float32, torch.float64, torch.bfloat16, torch.float16, *INTEGERS}
"""Dtypes that every version of NCCL takes."""

ORDERS = {"ring": ring, "tree": tree}


class _Call(NamedTuple):
    """What a rank has issued; ``key`` is the same on all ranks."""

    key: tuple[Any, ...]
    output: Tensor
    input: Tensor
    splits: tuple[Sequence[int], Sequence[int]] = ((), ())


class Rank:
    """What ``Communicator`` calls of a process group, over NCCL on this rank."""

    def __init__(self, nccl: Nccl, rank: int) -> None:
        self._nccl = nccl
        self._rank = rank

    def size(self) -> int:
        return self._nccl.world

    def rank(self) -> int:
        return self._rank

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "nccl")

    def _allgather_base(self, output: Tensor, input: Tensor, options: Any) -> None:
        assert output.numel() == input.numel() * self.size(), "NCCL gathers equal chunks"
        self._issue("all-gather", output, input)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options: Any) -> None:
        assert options.reduceOp == dist.ReduceOp.SUM
        assert input.numel() == output.numel() * self.size(), "NCCL scatters equal chunks"
        self._issue("reduce-scatter", output, input)

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        assert options.reduceOp == dist.ReduceOp.SUM
        self._issue("all-reduce", tensors[0], tensors[0])

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        self._issue(f"broadcast from {options.rootRank}", tensors[0], tensors[0])

    def reduce(self, tensors: list[Tensor], options: Any) -> None:
        assert options.reduceOp == dist.ReduceOp.SUM
        self._issue(f"reduce to {options.rootRank}", tensors[0], tensors[0])

    def alltoall_base(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], options: Any
    ) -> None:
        even = [input.numel() // self.size()] * self.size()
        splits = (received or even, sent or even)
        assert (output.numel(), input.numel()) == (sum(splits[0]), sum(splits[1]))
        self._nccl.meet(self._rank, _Call(("all-to-all", input.dtype), output, input, splits))

    def _issue(self, kind: str, output: Tensor, input: Tensor) -> None:
        assert output.dtype == input.dtype
        assert input.dtype in CARRIED
        self._nccl.meet(self._rank, _Call((kind, input.dtype, input.numel()), output, input))


class Nccl:
    """The ranks of one communicator.

    Args:
        world: how many.
        add: how they sum.
    """

    def __init__(self, world: int, add: Sum = ring) -> None:
        self.world = world
        self._add = add
        self._turn = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._round = 0
        self._ended = 0
        self._error: Exception | None = None

    def rank(self, rank: int) -> Any:
        """Return the process group of one rank."""
        return Rank(self, rank)

    def run(self, body: Callable[[Rank], Any]) -> list[Any]:
        """Run ``body`` on every rank; return what each one returned, or the exception that it raised."""
        results: list[Any] = [None] * self.world
        threads = [threading.Thread(target=self._run, args=(body, rank, results)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        with self._turn:
            while self._ended < self.world:
                self._turn.wait_for(lambda: len(self._calls) + self._ended == self.world)
                self._finish_round()
        for thread in threads:
            thread.join()
        return results

    def _run(self, body: Callable[[Rank], Any], rank: int, results: list[Any]) -> None:
        try:
            results[rank] = body(self.rank(rank))
        except Exception as error:
            results[rank] = error
        with self._turn:
            self._ended += 1
            self._turn.notify_all()

    def meet(self, rank: int, call: _Call) -> None:
        """Issue ``call`` and wait until all ranks have issued theirs."""
        with self._turn:
            self._calls[rank] = call
            if len(self._calls) + self._ended == self.world:
                self._turn.notify_all()
            before = self._round
            self._turn.wait_for(lambda: self._round > before)
            if self._error is not None:
                raise self._error

    @torch.no_grad()
    def _finish_round(self) -> None:
        calls = [self._calls[rank] for rank in sorted(self._calls)]
        keys = {call.key for call in calls}
        if self._ended and calls:
            self._error = Hang(f"{len(calls)} of {self.world} ranks wait in {keys}, the others have left")
        elif len(keys) > 1:
            self._error = Hang(f"ranks wait in different collectives: {keys}")
        elif calls:
            self._compute(calls)
        self._calls.clear()
        self._round += 1
        self._turn.notify_all()

    def _compute(self, calls: Sequence[_Call]) -> None:
        kind, inputs = calls[0].key[0], [call.input for call in calls]
        if kind == "all-to-all":
            self._exchange(calls)
            return
        root = int(kind.split()[-1]) if " " in kind else 0
        if kind.startswith("broadcast"):
            outputs = [inputs[root]] * self.world
        elif kind.startswith("reduce to"):
            calls[root].output.copy_(self._add(torch.stack([each.repeat(self.world, 1) for each in inputs]))[root])
            return
        elif kind == "all-gather":
            outputs = [torch.cat(inputs)] * self.world
        elif kind == "reduce-scatter":
            outputs = list(self._add(torch.stack(inputs).view(self.world, self.world, -1)))
        else:
            stacked = torch.stack(inputs)
            padded = torch.nn.functional.pad(stacked, (0, -stacked.shape[1] % self.world))
            outputs = [self._add(padded.view(self.world, self.world, -1)).view(-1)[: stacked.shape[1]]] * self.world
        for call, output in zip(calls, outputs, strict=True):
            call.output.copy_(output)

    def _exchange(self, calls: Sequence[_Call]) -> None:
        sent = [call.input.split(list(call.splits[1])) for call in calls]
        for rank, call in enumerate(calls):
            theirs = [parts[rank] for parts in sent]
            assert list(call.splits[0]) == [part.numel() for part in theirs], "sizes differ between sender and receiver"
            call.output.copy_(torch.cat(theirs))
