"""What stays here of a sum whose messages are on their way until the next backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class Late:
    """The sum of one chunk that lands late; at most one is under way.

    Args:
        chunk: elements of it.
    """

    def __init__(self, chunk: int, device: torch.device) -> None:
        self.own = torch.zeros(chunk, dtype=torch.float32, device=device)
        """This rank's gradients, which no message says: where they were written, others are by now."""
        self.sum: Tensor | None = None
        """Of these and all messages, where somebody has seen it through before it is to land."""
        self.used: list[bool] | None = None
        """Of each parameter, whether this rank has written a gradient; None: nothing is under way."""
        self.scale = 1.0
        """What losses are multiplied by now, in multiples of what they were when it was sent."""

    @property
    def is_under_way(self) -> bool:
        return self.used is not None

    def begin(self, used: list[bool]) -> None:
        """The messages of these parameters were sent."""
        self.used, self.sum, self.scale = used, None, 1.0

    def clear(self) -> None:
        """Nothing is under way."""
        self.used = self.sum = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint of this rank; what is under way has been seen through."""
        total = torch.zeros(0) if self.sum is None else self.sum.cpu()
        return {"own": self.own.cpu(), "sum": total, "used": self.used, "scale": self.scale}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` once returned."""
        self.own.copy_(state["own"])
        self.sum = None if state["used"] is None else state["sum"].to(self.own.device)
        self.used, self.scale = state["used"], state["scale"]

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + (0 if self.sum is None else self.sum.nbytes)
