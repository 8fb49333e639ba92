"""A second shard of the weights, within a few ranks near each other: what is gathered again need not come from afar.

    first gather of a step, over all ranks    | a | b | c | d |   every rank then keeps half of it:   a b | c d
    every later one, over ranks 0, 1 or 2, 3  | a   b | c   d |

It holds whole weights in the dtype of the forward, over fewer ranks, until they change (Wang et al., "ZeRO++", 2023,
section 4.2: hierarchical partitioning).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yafsdp_cc.wire.exchange import Gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.flat import Flat


class SecondShard:
    """This rank's part of each of a unit's flats, whole divided by the number of near ranks."""

    def __init__(self, near: dist.ProcessGroup, device: torch.device, flats: Sequence[Flat]) -> None:
        self.gather = Gather(near, device)
        self.stamp: tuple[int, ...] = ()
        """The versions of the weights that it was taken from."""
        self.parts = [
            torch.empty(flat.layout.numel // self.gather.world, dtype=flat.compute, device=device) for flat in flats
        ]

    def take(self, wholes: Sequence[Tensor], stamp: tuple[int, ...]) -> None:
        """Keep this rank's part of what has just been gathered."""
        for part, whole in zip(self.parts, wholes, strict=True):
            part.copy_(whole.narrow(0, self.gather.rank * part.numel(), part.numel()))
        self.stamp = stamp

    @property
    def owned_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
