"""Sums that all ranks get whole, and alike, from messages that do not say all: what they still have to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.wire.exchange import Works
    from yafsdp_cc.wire.feedback import Recursion, Residual
    from yafsdp_cc.wire.momentum import Momentum
    from yafsdp_cc.wire.shortfall import Shortfall


class SharedSum(ABC):
    """Sums one buffer over the ranks of a group, such as replicas.

    Args:
        group: the ranks.
        device: of the buffer.
        numel: elements of the buffer.
        residual: [1, numel], where what was not said is kept; None: it is lost.
        recursion: how the residual is carried.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        numel: int,
        residual: Residual | None,
        recursion: Recursion,
    ) -> None:
        self.group = group
        self.world: int = group.size()
        self.residual = residual
        self.momentum: Momentum | None = None
        """The first moment that all ranks know, where residuals are momentum too."""
        self.shortfall: Shortfall | None = None
        """Of messages, where somebody wants to know."""
        self.owed: Tensor | None = None
        """[numel], what is added to the next sum: what residuals held in an earlier run."""
        self._device = device
        self._numel = numel
        self._recursion = recursion

    @property
    def owned_bytes(self) -> int:
        """Bytes of its own, the residual's among them."""
        return 0 if self.residual is None else self.residual.nbytes

    @property
    def waiting(self) -> Tensor | None:
        """[numel], what is in no residual and added to the next sum."""
        return self.owed

    def unsaid(self) -> Tensor:
        """[numel] fp32: what this rank has still to say, and its part of what is owed."""
        total = torch.zeros(self._numel, dtype=torch.float32, device=self._device)
        if self.residual is not None:
            total += self.residual.load()[0]
        return total if self.owed is None else total.add_(self.owed, alpha=1 / self.world)

    @abstractmethod
    def sent_bytes(self) -> int:
        """Bytes that this rank sends."""

    @abstractmethod
    def watch(self) -> Shortfall:
        """Look at messages from the next one on, until ``shortfall`` is None again."""

    def planned_bytes(self) -> int:
        """Bytes that this rank sends in a step, on average."""
        return self.sent_bytes()

    @abstractmethod
    def send(self, total: Tensor, asynchronous: bool) -> Works:
        """Start the sum of ``total`` (numel), which may be used up."""

    def finish(self, total: Tensor) -> None:
        """Overwrite ``total`` with the sum, the same bits on every rank."""
        self._sum(total)
        if self.owed is not None:
            total.add_(self.owed)
            self.owed = None
        if self.momentum is not None:
            self.momentum.add_to(total, 0)
            self.momentum.decay()

    @abstractmethod
    def forget(self) -> None:
        """See to what an exchange that was given up has left."""

    @abstractmethod
    def _sum(self, total: Tensor) -> None:
        """Overwrite ``total`` with what all messages say."""
