"""The protocols by which the engine calls collectives. ``compression`` implements them: the engine knows no more of it.

Every ``FlatParam`` has an ``AllGather`` and a ``ReduceScatter``, and with replicas an ``AllReduce``.
``spec.Collectives`` makes all-gathers each time that a model's engine is assembled, sums the first time, for as long as
the ``FlatParam`` lives. Each new engine ``bind``s them to its communicators and scratch buffers.

Rules for implementations:

1. ``start`` latches the mode that it runs in (exact or encoded, say), and ``finish`` uses the latched mode.
2. Modes, codecs and scales change in ``Observer.before_forward`` or in the optimizer, never between ``start`` and
   ``finish``. All ranks change alike.
3. ``start`` raises only what all ranks raise, before it issues anything or changes a residual.
4. ``finish`` issues no collective; with replicas ``PartialReduceOutput.add`` then issues the sum over replicas.
5. In the steady state a collective allocates nothing.
6. A non-finite block keeps its residual and arrives as non-finite: it reaches every rank as ``found_inf``.

On CUDA ``start`` and ``finish`` are enqueued on the communication stream in this order. On CPU ``start`` runs in the
issuing thread and ``finish`` in the thread that waits, never two at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.engine.communicator import CommContext, Works


class Collective(ABC):
    """Base of all collectives of a ``FlatParam``."""

    context: CommContext
    sent_bytes = 0
    """Number of bytes that this rank sent in the last ``start``."""
    feeds_back = False
    """Whether a sum may bring gradients of a parameter that no rank has used, from residuals of error feedback."""

    def bind(self, context: CommContext) -> None:
        """Use the communicator and scratch buffers of ``context`` from now on. No collective may be in flight.

        Several all-gathers may be in flight at once: they may use scratch buffers within ``start`` and within
        ``finish``, but must keep nothing in them in between (``AllGather.scratch_bytes`` is for that). The engine runs
        sums one at a time, so a sum may keep data in scratch buffers from ``start`` to ``finish``.
        """
        self.context = context

    def reset(self) -> None:
        """Drop started and deferred sums, after a forward or backward that raised. No collective may be in flight."""

    @abstractmethod
    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends per operation once warm-up is over, on average."""

    def encoding(self) -> str:
        """Return the name of the codec, for the memory plan; empty if numbers are sent exactly."""
        return ""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of persistent buffers by label ("residual", "kept weights"), for the memory plan."""
        return {}


class AllGather(Collective):
    """Collective that fills the unsharded weights of one ``FlatParam``."""

    has_finish = True
    """Whether ``finish`` has anything to do."""
    prepares = False
    """Whether ``prepare`` has anything to do before the next ``start``."""
    builds_on_held = False
    """Whether ``start`` builds on the weights that ``output`` still holds, as deltas do."""
    is_resumed = False
    """Whether the weights that ``output`` holds, and ``start`` builds on, continue those of a checkpoint."""

    def scratch_bytes(self) -> int:
        """Return the bytes of scratch that each weight buffer needs beside the weights."""
        return 0

    def prepare(self, output: Tensor) -> None:
        """Write this rank's chunk of ``output`` on the caller's stream, which has finished with ``output``."""
        raise NotImplementedError

    @abstractmethod
    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        """Issue the collectives that fill ``output``.

        Args:
            output: [world * chunk], in ``FlatParam.compute_dtype``.
            held: version of the shard whose weights ``output`` still contains; None if it contains anything else. After
                ``expire`` it may be the present version.
            scratch: [scratch_bytes()] uint8, in the buffer that ``output`` is in; None if that is 0 bytes.
            async_op: whether to return works to wait for; else the current stream waits.
        """

    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        """Complete ``output``, by decoding for example, once the collectives of ``start`` are over."""

    def stepped(self, before: int, after: int) -> None:
        """Take note that an optimizer step changed the shard's version. All ranks call this in the same order."""

    def expire(self) -> None:
        """Take note that the shard may have changed under the same version. All ranks call this in the same order."""


class ReduceScatter(Collective):
    """Collective that sums the unsharded gradients of one ``FlatParam``, each chunk at the rank that owns it."""

    @property
    @abstractmethod
    def defers(self) -> bool:
        """Whether ``defer`` can store gradients now; it cannot in a warm-up, for example, which sums them exactly."""

    @abstractmethod
    def start(self, grads: Tensor, async_op: bool) -> Works:
        """Issue the collectives that sum ``grads`` [world * chunk], which nobody else changes until ``finish`` is over.

        Only ``start`` itself may change ``grads`` (NCCL sums in place; compression may clip).
        """

    @abstractmethod
    def finish(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the sum over ranks [chunk] in parts: the offset of each, and the part, not divided by the number of
        ranks. The collectives are over when the first part is taken.

        Parts are fp32 or fp64; those of an exact sum on CUDA may be bf16. The caller may change a part, which is valid
        until the next is taken.
        """

    def defer(self, grads: Tensor) -> None:
        """Store ``grads`` to be summed with those of the next ``start``. The engine calls this only if ``defers``."""
        raise NotImplementedError


class AllReduce(Collective):
    """Collective that sums one ``FlatParam``'s partial sum over replicas in place; all replicas get the same bits."""

    @abstractmethod
    def start(self, total: Tensor, async_op: bool) -> Works:
        """Issue the collectives that sum ``total`` [chunk], fp32 or fp64."""

    def finish(self, total: Tensor) -> None:
        """Complete ``total``, by decoding for example, once the collectives of ``start`` are over."""


class Transfers(Protocol):
    """Copies of shards and gradients between host memory and the device, where shards are offloaded."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device of the buffers that offloaded shards and gradients pass through."""

    def wait(self) -> None:
        """Block the host until the copies are over, so that it may read and write shards in its memory."""


class Contents(Protocol):
    """The parameters and buffers that a model's modules hold."""

    is_written: bool
    """Whether all parameters and buffers were seen to have values, by this engine or an earlier one."""

    def check(self) -> None:
        """Raise if a parameter was replaced or converted, or a trainable one was added."""


class Observer:
    """Object that the engine tells of its events, such as gathers and reduces, in the same order on all ranks.

    Methods run in the host thread of the forward or backward.
    """

    def assembled(self, state: object) -> None:
        """Take note that the engine ``state``, an ``FSDPState``, was made, perhaps anew. No collective is in flight."""

    def before_forward(self) -> None:
        """Take note that a root's forward begins; collectives issued here must be ``record``ed in the fingerprint."""

    def after_forward(self) -> None:
        """Take note that a forward of the root with a graph is over, and its backward may come."""

    def before_backward(self) -> None:
        """Take note that a backward has reached the model."""

    def before_gather(self, group: str, *, overflows: bool) -> None:
        """Take note that the all-gather of parameter group ``group`` is issued next, perhaps to an overflow buffer."""

    def before_reduce(self, group: str) -> None:
        """Take note that the reduce of the parameter group ``group`` is about to be issued."""

    def after_reduce(self, group: str) -> None:
        """Take note that the reduce of the parameter group ``group`` was issued."""

    def before_wait(self) -> None:
        """Take note that the host is about to wait for a collective."""

    def after_wait(self) -> None:
        """Take note that the host's wait for a collective is over."""

    def after_backward(self) -> None:
        """Take note that all reduces of a backward were issued; the engine waits for them next."""

    def after_final_reduce(self) -> None:
        """Take note that the mean gradients of a backward are in ``.grad``, where only hooks may have changed them."""
