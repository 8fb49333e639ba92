"""How much memory activations take, by how many blocks are recomputed in the backward: arithmetic of one probe."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """What one of the repeated blocks holds, in bytes."""

    kept: int
    """From its forward to its backward, its output with it."""
    recomputed: int
    """The same where it is checkpointed: its output, which is the input of the next block."""
    transient: int
    """More than that, at the peak of its backward."""


class Activations(NamedTuple):
    """Bytes that a forward and backward hold beside weights, gradients and what the engine owns."""

    blocks: tuple[Block, ...]
    """In the order of the forward."""
    outside: int
    """At the peak between the forward and the backward of the last block (logits and loss), beside the blocks'."""
    lowest: int
    """At the peak when no block holds anything: the backward of the embedding."""

    def peak(self, checkpointed: int = 0) -> int:
        """Return the bytes at the peak of a step where the first ``checkpointed`` blocks are recomputed.

        A block's backward comes when all later blocks have let go of theirs, so the first blocks are the ones to
        checkpoint: what they do not keep is not kept under any peak.
        """
        held, peaks = 0, [self.lowest]
        for index, block in enumerate(self.blocks):
            peaks.append(held + block.kept + block.transient)
            held += block.recomputed if index < checkpointed else block.kept
        return max(*peaks, held + self.outside)

    def fewest_checkpointed(self, room: int) -> int | None:
        """Return how many blocks must be checkpointed for ``room`` bytes to do; None where none suffices."""
        return next((count for count in range(len(self.blocks) + 1) if self.peak(count) <= room), None)
