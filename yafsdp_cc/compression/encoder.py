"""Encoders: how one buffer is encoded for a sum and its messages decoded, and how well a codec suits what it is given.

An ``Encoder`` serves one ``CompressedSum`` (``compressed_sum``): there is one for codecs and one for low rank, each of
a reduce-scatter and of an all-reduce.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from yafsdp_cc.compression import kernels
from yafsdp_cc.compression.codec import Noise, codec_of
from yafsdp_cc.compression.error_feedback import CLASSIC, Recursion, Residual, lost_share

if TYPE_CHECKING:
    from yafsdp_cc.compression.codec import Codec
    from yafsdp_cc.engine.communicator import CommContext, Works

SENT, RECEIVED = "sent messages", "received messages"
"""Scratch buffers of messages, shared by all sums of a stream."""

SUMS = 3


class CompressionError:
    """Measures how well a codec suits what it is given: the share ω = ‖h − D(m)‖² / ‖h‖² that messages lose.

    h is what is due and D(m) what is decoded. After a message its residual is E = h − a·D(m), so both come from the
    residual and the message: h − D(m) = E − (1 − a)·D(m).

    A codec that keeps a share δ = 1 − ω of each message has residuals of at most ‖E‖² ≤ 4·ω/δ²·‖g‖² (Karimireddy et
    al., "Error Feedback Fixes SignSGD", 2019, lemma 3), so that messages which keep up with gradients g keep no less
    than about δ²/4 of what is due. ``least`` is that for half the δ that a codec has of normal noise, as real gradients
    are far from alike. They are further from it where residuals are momentum (a < 1), in which noise averages out: by
    about √a.

    Args:
        device: of the messages.
        kept: the share of noise that messages keep.
        recursion: of their residuals.
    """

    def __init__(self, device: torch.device, kept: float, recursion: Recursion = CLASSIC) -> None:
        self.recursion = recursion
        self.least = (max(kept, 0.0) / 4) ** 2 * recursion.taken**0.5
        """The share that messages have to keep for residuals not to grow."""
        self.sums = torch.zeros(SUMS, dtype=torch.float64, device=device)
        """Squares of what was lost, of what was due, and of what was decoded."""
        self.seen = False
        """Whether there has been a message."""

    @torch.no_grad()
    def observe(self, codec: Codec, messages: Tensor, residual: Residual) -> None:
        """Take in ``messages`` [messages, bytes] that have just been written, and what they left in ``residual``."""
        self.seen = True
        n = residual.values.shape[1]
        step = min(kernels.PART, n) if kernels.is_native(codec, messages.device) else n
        scratch = torch.empty(step, dtype=torch.float32, device=messages.device)
        for row, message in enumerate(messages):
            left_of_row = residual.rows(row, row + 1)
            for start in range(0, n, step):
                decoded = scratch[: min(step, n - start)]
                kernels.decode_sum(codec, message.unsqueeze(0), n, None, 0, decoded, start)
                left = left_of_row.columns(start, start + len(decoded)).load()[0]
                lost = left.sub_(decoded, alpha=1 - self.recursion.taken)
                self.add(lost, lost + decoded, decoded)

    @torch.no_grad()
    def add(self, *parts: Tensor) -> None:
        """Take in what was lost, what was due, and what was decoded."""
        self.seen = True
        self.sums += torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square()


@cache
def kept_of_noise(codec: str, block: int) -> float:
    """Return the share of the squares of normal noise that a message keeps: 0.64 by onebit, 0.99 by int4."""
    return 1 - lost_share(codec_of(codec, block))


class Feedback(NamedTuple):
    """What an encoder uses of its ``CompressedSum`` in one ``start``."""

    residual: Residual | None
    recursion: Recursion
    noise: Noise | None
    """For stochastic rounding, where there is no residual."""
    error: CompressionError | None


class SharedFactors(Protocol):
    """What all ranks hold alike of a low-rank sum (``powersgd.LowRank``), as far as checkpoints know it."""

    factors: Tensor
    """Fp32, of all matrices."""
    sends_right: bool
    """Whether the next message is of right factors."""


class Encoder(ABC):
    """Makes messages of a buffer's values, exchanges them, and decodes their sum. Keeps nothing but its settings."""

    context: CommContext

    @property
    def factors(self) -> SharedFactors | None:
        """Of low rank; None of codecs."""
        return None

    def bind(self, context: CommContext) -> None:
        """Use this communicator, and reserve scratch buffers for messages."""
        self.context = context

    @property
    @abstractmethod
    def kept(self) -> float:
        """The share of noise that messages keep, between 0 and 1."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Elements that ``decode`` fills at once; their starts are multiples of it."""

    @abstractmethod
    def start(self, values: Tensor, feedback: Feedback, async_op: bool) -> Works:
        """Encode ``values``, keep what is lost in the residual, and start the exchange."""

    @abstractmethod
    def decode(self, own: Tensor | None, start: int, total: Tensor) -> None:
        """Fill ``total`` fp32 with elements from ``start`` on of the sum of all messages.

        Args:
            own: of a reduce-scatter, those elements of this rank's own chunk, which was not encoded.
            start: a multiple of ``step``.
            total: overwritten.
        """

    @abstractmethod
    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends by the next ``start``."""

    def planned_bytes(self) -> int:
        """Return the bytes that this rank sends per ``start``, on average."""
        return self.sent_bytes()

    @property
    def nbytes(self) -> int:
        """Bytes of its own buffers, which are not scratch."""
        return 0

    def restart(self) -> None:
        """Drop what an interrupted exchange may have left different on some ranks."""


def other_chunks(buffer: Tensor, world: int, rank: int) -> list[tuple[int, Tensor]]:
    """Return the chunks of other ranks in ``buffer`` [world * chunk], as those below and those above ``rank``.

    Each as [chunks, chunk], with the number of its first message among all.
    """
    chunks = buffer.view(world, -1)
    return [(first, part) for first, part in ((0, chunks[:rank]), (rank, chunks[rank + 1 :])) if part.shape[0]]
