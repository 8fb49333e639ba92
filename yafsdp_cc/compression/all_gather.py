"""All-gathers of encoded weights: rounded where ranks drop them after use, deltas where ranks keep them between
forwards.

``RoundedAllGather`` sends weights in blocks of few bits, which all ranks decode alike, the owner of a chunk too.
``DeltaAllGather`` sends how steps have changed shards since the gather before, in as few bits as gradients:

    owner of a chunk    shard − its chunk of the kept weights ── encode ──► message
    every rank          kept weights + decoded message                      (the owner, too)

A message's rounding error is part of the next difference: the kept weights themselves serve as the residual of error
feedback (Richtárik et al., "EF21", 2021, algorithm 2), rounding to their own dtype included. Every rank adds the same
numbers to the same weights, so kept weights are equal to the bit on all ranks, and near the optimizer's weights.

A chunk is sent in parts, each a message of its own. One part of all ranks is decoded and added at once, so memory for
differences is bounded, and the number of kernels depends on the number of weights, not on that of ranks:

    message of one rank    | part 0 | part 1 | ... |        the last part is what remains
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yafsdp_cc.compression import error_feedback
from yafsdp_cc.compression.codec import counts_of
from yafsdp_cc.compression.error_feedback import CompressionError, lost_share
from yafsdp_cc.engine.collectives import ExactAllGather

if TYPE_CHECKING:
    import torch.distributed as dist

    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.compression.schedule import CompressionSchedule
    from yafsdp_cc.engine.communicator import CommContext, Works
    from yafsdp_cc.engine.layout import Layout
    from yafsdp_cc.engine.param import FlatParam

ENCODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of unsharded weights that may be gathered encoded."""

_UNKNOWN, _BEHIND = -2, -1
"""Values in place of kept weights' version: ``_UNKNOWN`` where a rank keeps none, ``_BEHIND`` for weights of a
checkpoint that lack the last optimizer steps of their shard."""

_ON_CPU, _ON_CUDA = 1 << 18, 1 << 25
"""Number of weights, of all ranks together, that are decoded at once: as many as fit in a processor's cache, or 128 MiB
of fp32 on a GPU, enough to be worth the kernel launches."""

_DIFFERENCE, _CAST = "weight difference", "fp32 weights"


class Messages:
    """Layout of the ranks' messages in one buffer; a message's length depends on that of the chunk it encodes.

    Args:
        size: function from the elements of a chunk to the bytes of its message.
    """

    def __init__(self, layout: Layout, size: Callable[[int], int]) -> None:
        self._layout = layout
        self._sizes = [size(chunk) for chunk in layout.chunks]
        self._starts = list(accumulate(self._sizes, initial=0))
        self.nbytes = self._starts[-1]
        self.uneven: Sequence[int] = self._sizes if layout.uneven_chunks else ()
        """Bytes of each rank's message where their lengths differ, else ()."""

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that ``rank`` sends when all others receive its message."""
        return (self._layout.world - 1) * self._sizes[rank]

    def rows(self, messages: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield messages [ranks, bytes] and weights [ranks, elements] of ranks with equal chunks."""
        for run in self._layout.runs():
            first, last = self._layout.starts[run.start], self._layout.starts[run.stop]
            sent = messages[self._starts[run.start] : self._starts[run.stop]]
            yield sent.view(len(run), -1), weights[first:last].view(len(run), -1)


class EncodedAllGather(ExactAllGather):
    """The base of all-gathers that encode weights in each ``Phase`` with ``encodes_weights``, and else are exact."""

    has_finish = True
    prepares = False
    flat: FlatParam

    def __init__(self, flat: FlatParam, schedule: CompressionSchedule, codec: Codec) -> None:
        super().__init__(flat)
        self.schedule = schedule
        self._codec = codec

    @cached_property
    def _messages(self) -> Messages:
        return Messages(self.flat.layout, self._codec.message_bytes)

    def encoding(self) -> str:
        return self._codec.name

    def scratch_bytes(self) -> int:
        return self._messages.nbytes

    def planned_bytes(self) -> int:
        return self._messages.sent_bytes(self.flat.rank)


class RoundedAllGather(EncodedAllGather):
    """All-gathers weights encoded in few bits, and decodes them into a buffer whose former contents do not matter."""

    _rounds = False

    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        self._rounds = scratch is not None and self.schedule.phase.encodes_weights
        if scratch is None or not self._rounds:
            return super().start(output, held, scratch, async_op)
        comm, shard = self.context.comm, self.flat.sharded
        if self.flat.host_bytes:
            shard = self.flat.send_buffer(comm.own_chunk(output, self.flat.layout.uneven_chunks), in_place=True)
        own = comm.own_chunk(scratch, self._messages.uneven)
        error_feedback.encode(self._codec, shard.unsqueeze(0), own.unsqueeze(0))
        self.sent_bytes = self._messages.sent_bytes(comm.rank)
        return comm.all_gather(scratch, own, async_op, self._messages.uneven)

    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        if scratch is not None and self._rounds:
            for messages, weights in self._messages.rows(scratch, output):
                error_feedback.decode(self._codec, messages, weights)


class DeltaAllGather(EncodedAllGather):
    """Sends encoded deltas to the weights that every rank kept from the gather before.

    Weights in an overflow buffer, which holds nothing that a delta could be added to, are gathered exactly.

    A delta is sent from one version of a shard to another if nothing but optimizer steps has changed it in between:

        version    3 ──step──► 4 ──step──► 5 ──load_state_dict──► 9 ──step──► 10
                   └──────── steps ────────┘                      └── steps ──┘

    Steps are small, so few bits encode their sum well; loaded weights may differ by any amount. Only
    ``torch.optim.Optimizer`` reports its steps: any other change ends the run of versions, on all ranks alike.
    """

    builds_on_held = True

    def __init__(self, flat: FlatParam, schedule: CompressionSchedule, codec: Codec) -> None:
        super().__init__(flat, schedule, codec)
        self._first, self._last = 0, _UNKNOWN
        """First and last version of the shard in the latest run of optimizer steps without other changes."""
        self.always_exact = False
        """Whether ``CodecFallback`` has ended deltas, so that weights are always gathered exactly."""
        self.compression_error: CompressionError | None = None
        """Measured error of the messages since ``watch``; None while compression errors are not measured."""
        unit = 5 * codec.block  # ``Ternary`` packs five blocks together: no part may divide them
        most = (_ON_CUDA if flat.device.type == "cuda" else _ON_CPU) // flat.layout.world
        self._part = max(most // unit, 1) * unit
        """Number of elements of a part of a chunk; each part is a message of its own."""
        self._casts = flat.device.type == "cpu" and flat.compute_dtype != torch.float32
        """Whether torch would allocate an fp32 copy of kept weights in ``sub`` and ``add``: scratch holds the copy."""
        self._resumed: tuple[Tensor, int] | None = None
        """Kept weights [chunk] loaded from a checkpoint, with their version, until they are gathered; else None."""
        self._sends_delta = False
        self._counts = counts_of(flat.layout, codec.block, flat.device, range(flat.rank, flat.rank + 1))

    def bind(self, context: CommContext) -> None:
        super().bind(context)
        numel = min(self._part, max(self.flat.layout.chunks)) * self.flat.layout.world
        context.scratch.reserve(_DIFFERENCE, 4 * numel)
        if self._casts:
            context.scratch.reserve(_CAST, 4 * numel)

    @cached_property
    def _messages(self) -> Messages:
        return Messages(self.flat.layout, lambda elements: sum(size for *_, size in self._parts(elements)))

    def planned_bytes(self) -> int:
        return ExactAllGather.planned_bytes(self) if self.always_exact else super().planned_bytes()

    def watch(self) -> CompressionError:
        """Measure what messages lose, beginning with the next message, until ``compression_error`` is None again."""
        kept = 1 - lost_share(self._codec.name, self._codec.block)
        self.compression_error = CompressionError(self.flat.device, kept)
        return self.compression_error

    def start(self, output: Tensor, held: int | None, scratch: Tensor | None, async_op: bool) -> Works:
        works: list[dist.Work] = []
        has_resumed, self.sent_bytes = False, 0
        if scratch is not None and self._resumed is not None:
            own, version = self._resumed
            self._resumed = None
            if has_resumed := self._can_start_from(version):
                comm, held = self.context.comm, version
                if own.is_cuda:  # keep the stream that allocated ``own`` from reusing its memory too early
                    own.record_stream(torch.cuda.current_stream(own.device))
                chunks = self.flat.layout.uneven_chunks
                works += comm.all_gather(output, comm.own_chunk(output, chunks).copy_(own), async_op, chunks)
                self.sent_bytes = (comm.world - 1) * own.nbytes
                self.context.record("kept weights", self.flat.name)
        is_behind = held != self.flat.version
        self._sends_delta = scratch is not None and is_behind and held is not None and self._can_start_from(held)
        if scratch is not None and self._sends_delta:
            return [*works, *self._send_delta(output, scratch, async_op)]
        return works if has_resumed else super().start(output, held, scratch, async_op)

    def stepped(self, before: int, after: int) -> None:
        # a step from a version outside of the run: something else has changed the shard (nested steps begin inside)
        if not self._first <= before <= self._last:
            self._first = before
        self._last = after

    def _can_start_from(self, version: int) -> bool:
        """Return whether a rank that holds weights of ``version`` needs no exact gather."""
        if self.always_exact or not self.schedule.phase.encodes_weights:
            return False
        return version == self.flat.version or (self._first <= version and self._last == self.flat.version)

    def _send_delta(self, output: Tensor, scratch: Tensor, async_op: bool) -> Works:
        comm, room = self.context.comm, self.context.scratch
        kept = comm.own_chunk(output, self.flat.layout.uneven_chunks)
        message = comm.own_chunk(scratch, self._messages.uneven)
        error, block = self.compression_error, self._codec.block
        if error is not None:
            error.seen = True
        for start, count, offset, size in self._parts(kept.numel()):
            difference = room.take(_DIFFERENCE, count, torch.float32)
            self.flat.read(difference, start)
            difference.sub_(self._in_fp32(kept.narrow(0, start, count)))
            place = self.flat.layout.starts[self.flat.rank] + start
            for first, last in self.flat.layout.gaps:
                if first < place + count and last > place:
                    difference[max(first - place, 0) : last - place].zero_()
            counts = None if self._counts is None else self._counts.narrow(1, start // block, count // block)
            part = message.narrow(0, offset, size).unsqueeze(0)
            error_feedback.encode(self._codec, difference.unsqueeze(0), part, counts=counts)
            if error is not None:
                error_feedback.decode(self._codec, part, decoded := torch.empty_like(difference).unsqueeze(0))
                error.add(difference - decoded[0], difference, decoded[0])
        self.context.record("delta", self.flat.name)
        self.sent_bytes += self._messages.sent_bytes(comm.rank)
        return comm.all_gather(scratch, message, async_op, self._messages.uneven)

    def finish(self, output: Tensor, scratch: Tensor | None) -> None:
        if scratch is None or not self._sends_delta:
            return
        for messages, weights in self._messages.rows(scratch, output):
            for start, count, offset, size in self._parts(weights.shape[1]):
                kept = weights.narrow(1, start, count)
                decoded = self.context.scratch.take(_DIFFERENCE, kept.numel(), torch.float32).view(kept.shape)
                error_feedback.decode(self._codec, messages.narrow(1, offset, size), decoded)
                if self._casts:
                    kept.copy_(decoded.add_(self._in_fp32(kept)))
                else:
                    kept.add_(decoded)

    def _in_fp32(self, kept: Tensor) -> Tensor:
        """Return kept weights in fp32, or unchanged where torch adds fp32 deltas to them without allocating."""
        if not self._casts:
            return kept
        return self.context.scratch.take(_CAST, kept.numel(), torch.float32).view(kept.shape).copy_(kept)

    def _parts(self, chunk: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first element, elements, first byte, bytes) of each part of a chunk."""
        offset = 0
        for start in range(0, chunk, self._part):
            count = min(self._part, chunk - start)
            size = self._codec.message_bytes(count)
            yield start, count, offset, size
            offset += size

    # In checkpoints ------------------------------------------------------------------------------------------------

    def kept_state(self) -> tuple[Tensor, bool] | None:
        """Return this rank's chunk of the kept weights, and whether they lack steps that a delta has yet to send.

        The result is None if the next forward gathers the shards' own values. The call waits for gathers in flight.
        """
        if self._last == _UNKNOWN:  # no optimizer has reported a step of the shard
            return None
        if self._resumed is not None:
            own, version = self._resumed
        else:
            held, weights = self.flat.group.gathered(self.flat)
            version = _UNKNOWN if held is None else held
            own = self.context.comm.own_chunk(weights, self.flat.layout.uneven_chunks)
        return (own, version != self.flat.version) if self._can_start_from(version) else None

    @torch.inference_mode(False)
    @torch.no_grad()
    def resume(self, own: Tensor, behind: bool) -> None:
        """Load the result of ``kept_state``, on all ranks: the next gather fills its buffer with these weights first.

        Args:
            own: [chunk], this rank's part of the kept weights.
            behind: whether the shard has had optimizer steps that the kept weights lack.
        """
        version = _BEHIND if behind else self.flat.version
        self._first, self._last = version, self.flat.version
        self._resumed = own.to(self.flat.device, self.flat.compute_dtype, copy=True), version
        self.is_resumed = True
