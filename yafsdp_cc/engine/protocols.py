"""The protocols by which the engine calls collectives: all that it knows of compression, which implements them.

Every ``FlatParam`` has an ``AllGather`` and a ``ReduceScatter``, and with replicas an ``AllReduce``. They are made by
``sharding.Collectives``; all-gathers at each assembly of the engine, sums at the first one, and these live as long as
the ``FlatParam``. Each assembly ``bind``s them to its communicators and scratch buffers.

Rules for implementations:

1. ``start`` latches whatever mode it runs in, and ``finish`` goes by that.
2. Modes, codecs and scales change in ``Observer.before_forward`` or in the optimizer, never between ``start`` and
   ``finish``. All ranks change alike.
3. ``start`` raises only what all ranks raise, before it issues anything or changes a residual.
4. ``finish`` issues no collective.
5. Steady state allocates nothing.
6. A non-finite block keeps its residual and arrives as non-finite: it reaches every rank as ``found_inf``.

On CUDA ``start`` and ``finish`` are enqueued on the communication stream one behind the other. On CPU ``start`` runs
in the issuing thread and ``finish`` in the thread that waits, never two at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from yafsdp_cc.engine.communicator import CommContext, Works


class Collective(ABC):
    """What all collectives of a ``FlatParam`` have."""

    context: CommContext
    sent_bytes = 0
    """Bytes that this rank has sent by the last ``start``."""
    feeds_back = False
    """Of sums: whether one may bring gradients of a parameter that no rank has used, by error feedback."""

    def bind(self, context: CommContext) -> None:
        """Use this communicator and these scratch buffers from now on. Nothing is in flight.

        Several all-gathers may be in flight at once: they may use scratch buffers within ``start`` and within
        ``finish``, but keep nothing there in between (for that there is ``AllGather.scratch_bytes``). The engine runs
        sums one at a time, so a sum may keep data there from ``start`` to ``finish``.
        """
        self.context = context

    def reset(self) -> None:
        """Drop what was started or deferred, after a forward or backward that raised. Nothing is in flight."""

    @abstractmethod
    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends per operation once warm-up is over, on average."""

    def encoding(self) -> str:
        """Return the name of the codec that it sends by, for the memory plan; empty where it sends exact numbers."""
        return ""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of persistent buffers by label ("residual", "kept weights"), for the memory plan."""
        return {}


class AllGather(Collective):
    """Fills the unsharded weights of one ``FlatParam``."""

    has_finish = True
    """Whether ``finish`` has anything to do."""
    builds_on_held = False
    """Whether ``start`` uses what ``output`` still holds: the weight buffer is a part of its state."""

    def scratch_bytes(self) -> int:
        """Return the bytes that it needs beside the weights in each weight buffer."""
        return 0

    @abstractmethod
    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        """Issue the collectives that fill ``output``.

        Args:
            output: [world * chunk], the dtype of the forward.
            held: version of the shard whose weights ``output`` still contains; None: anything. The present one after
                ``expire``.
            scratch: [scratch_bytes()] uint8 beside ``output``; None where there is none.
            async_op: whether to return works rather than order the current stream.
        """

    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        """Complete ``output`` once the collectives are over."""

    def stepped(self, before: int, after: int) -> None:
        """An optimizer step has led from one version of the shard to another. In the same order on all ranks."""

    def expire(self) -> None:
        """The shard may have been written to without a change of its version. In the same order on all ranks."""


class ReduceScatter(Collective):
    """Sums the unsharded gradients of one ``FlatParam``, each chunk at the rank that owns it."""

    @property
    def defers(self) -> bool:
        """Whether ``defer`` can take gradients in now."""
        return False

    @abstractmethod
    def start(self, grads: Tensor, async_op: bool) -> Works:
        """Issue the collectives that sum ``grads`` [world * chunk], which stays as it is until ``finish`` is through.

        Only ``start`` itself may change it (NCCL sums in place; compression may clip).
        """

    @abstractmethod
    def finish(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the sum over ranks [chunk] in parts: the offset of each, and the part, not divided.

        Parts are fp32 or fp64, and exact ones on CUDA perhaps bf16. A part may be changed by whoever gets it, and is
        valid until the next one.
        """

    def defer(self, grads: Tensor) -> None:
        """Take ``grads`` in, to be summed with those of the next ``start``; only where ``defers``."""
        raise NotImplementedError


class AllReduce(Collective):
    """Sums the partial reduce output of one ``FlatParam`` over replicas, in place: the same bits on all of them."""

    @abstractmethod
    def start(self, total: Tensor, async_op: bool) -> Works:
        """Issue the collectives that sum ``total`` [chunk], fp32 or fp64."""

    def finish(self, total: Tensor) -> None:
        """Complete ``total`` once the collectives are over."""


class Transfers(Protocol):
    """Copies of shards and gradients between host memory and the device, where shards are offloaded."""

    @property
    def nbytes(self) -> int:
        """Bytes that they take on the device."""

    def wait(self) -> None:
        """Hold the host until it may read and write its own memory."""


class Contents(Protocol):
    """What the modules of a model hold."""

    is_written: bool
    """Whether all parameters and buffers were seen to have values, in this assembly or an earlier one."""

    def check(self) -> None:
        """Raise if a parameter was replaced or converted, or one was added that is to be trained."""


class Observer:
    """Is called in the host thread of a forward or backward, in the same order on all ranks."""

    def assembled(self, state: object) -> None:
        """The engine was assembled, perhaps anew; ``state`` is its ``FSDPState``. Nothing is in flight."""

    def before_forward(self) -> None:
        """A forward of the root begins; collectives may be issued, each ``record``ed."""

    def after_forward(self) -> None:
        """A forward of the root is over through which a gradient may come."""

    def before_backward(self) -> None:
        """The backward has reached the first output."""

    def before_gather(self, group: str, *, overflows: bool) -> None:
        """The all-gather of the parameter group of this name is about to be issued, perhaps to an overflow buffer."""

    def before_reduce(self, group: str) -> None:
        """The reduce of the parameter group of this name is about to be issued."""

    def after_reduce(self, group: str) -> None:
        """It was issued."""

    def before_wait(self) -> None:
        """The host is about to wait for a collective."""

    def after_wait(self) -> None:
        """It has waited."""

    def after_backward(self) -> None:
        """All reduces of a backward were issued; their results are waited for next."""
