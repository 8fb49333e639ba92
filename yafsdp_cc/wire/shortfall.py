"""How well a codec suits what it is given: of what messages should say, the share that they leave unsaid.

With h what is due and D(m) what is said, that is ω = ‖h − D(m)‖² / ‖h‖². After a message its residual is
E = h − a·D(m), so both come from the residual and the message: h − D(m) = E − (1 − a)·D(m).

A codec that says a share δ = 1 − ω of each message has residuals of at most ‖E‖² ≤ 4·ω/δ²·‖g‖² (Karimireddy et al.,
"Error Feedback Fixes SignSGD", 2019, lemma 3), so that messages of gradients g which keep up with them say no less than
about δ²/4 of what is due. ``least`` is that for half the δ that a codec has of normal noise, as real gradients are far
from alike. They are further from it where residuals are momentum (a < 1), in which noise averages out: by about √a.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.wire import kernels
from yafsdp_cc.wire.codec import codec_of
from yafsdp_cc.wire.feedback import CLASSIC, Recursion

if TYPE_CHECKING:
    from torch import Tensor

    from yafsdp_cc.wire.codec import Codec
    from yafsdp_cc.wire.feedback import Residual


SUMS = 3


class Shortfall:
    """Of the messages of one exchange, while somebody wants to know.

    Args:
        device: of the messages.
        said: the share that they say of noise.
        recursion: of their residuals.
    """

    def __init__(self, device: torch.device, said: float, recursion: Recursion = CLASSIC) -> None:
        self.recursion = recursion
        self.least = (max(said, 0.0) / 4) ** 2 * recursion.taken**0.5
        """The share that they have to say for residuals not to grow."""
        self.sums = torch.zeros(SUMS, dtype=torch.float64, device=device)
        """Squares of what was left unsaid, of what was due, and of what was said."""
        self.seen = False
        """Whether there has been a message."""

    @torch.no_grad()
    def look(self, codec: Codec, messages: Tensor, residual: Residual) -> None:
        """Take in ``messages`` [messages, bytes] that have just been written, and what they left in ``residual``."""
        self.seen = True
        n = residual.values.shape[1]
        step = min(kernels.PART, n) if kernels.is_native(codec, messages.device) else n
        room = torch.empty(step, dtype=torch.float32, device=messages.device)
        for row, message in enumerate(messages):
            kept = residual.rows(row, row + 1)
            for start in range(0, n, step):
                said = room[: min(step, n - start)]
                kernels.decode_sum(codec, message.unsqueeze(0), n, None, 0, said, start)
                left = kept.columns(start, start + len(said)).load()[0].sub_(said, alpha=1 - self.recursion.taken)
                self.add(left, left + said, said)

    @torch.no_grad()
    def add(self, *parts: Tensor) -> None:
        """Take in what was left unsaid, what was due, and what was said."""
        self.seen = True
        self.sums += torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square()


@cache
def said_of_noise(codec: str, block: int) -> float:
    """The share of normal numbers that a message says: 0.64 by onebit, 0.99 by int4."""
    return 1 - relative_error(codec_of(codec, block))


@torch.no_grad()
def relative_error(codec: Codec) -> float:
    """Return ‖h − D(m)‖² / ‖h‖² for normal numbers h: 0.00005 with int8, 0.016 with int4."""
    values = torch.randn(1, 64 * codec.block, generator=torch.Generator().manual_seed(0))
    message = torch.zeros(1, codec.message_bytes(values.shape[1]), dtype=torch.uint8)
    codec.encode(values, None, message)
    decoded = torch.empty_like(values)
    codec.decode(message, decoded)
    return ((values - decoded).square().sum() / values.square().sum()).item()
