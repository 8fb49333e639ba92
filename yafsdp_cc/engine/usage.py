"""Which parameters have a gradient after a backward: those that any rank has used, though each knows only its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from yafsdp_cc.engine.flat import Piece


class Usage:
    """Of the parameters whose sums have landed in one backward.

    Args:
        landed: parameters, and which of them this rank has written.
        places: how many parameters the model has.
        says: whether a sum has brought something of a parameter that nobody may have used.
    """

    def __init__(
        self, landed: Sequence[tuple[Sequence[Piece], Sequence[bool]]], places: int, says: Callable[[Piece], bool]
    ) -> None:
        self.words = [0.0] * places
        """1 where this rank knows of a gradient; to be summed over ranks."""
        self._landed = landed
        self._unused: list[Piece] = []
        for pieces, wrote in landed:
            for piece, written in zip(pieces, wrote, strict=True):
                if written:
                    self.words[piece.place] = 1.0
                elif piece.parameter.requires_grad:
                    self._unused.append(piece)
                    if piece.parameter.grad is None and says(piece):
                        self.words[piece.place] = 1.0

    def hand_out(self, totals: Tensor, is_shared: bool) -> None:
        """Give parameters a ``.grad`` that another rank alone has used, and call what waits for gradients.

        Args:
            totals: ``words``, summed over ranks.
            is_shared: whether there is another rank.
        """
        # Their gradients stay None unless another rank has some; where they have one already, there is nothing to ask.
        unused = [piece for piece in self._unused if piece.parameter.grad is None]
        if unused and is_shared:
            # On CUDA the host waits here for the whole backward.
            counts = totals[: len(self.words)].tolist()
            for piece in unused:
                if counts[piece.place]:
                    piece.parameter.grad = piece.gradient
        for piece in dict.fromkeys(piece for pieces, _ in self._landed for piece in pieces):
            hooks = piece.parameter._post_accumulate_grad_hooks
            if hooks and piece.parameter.grad is not None:
                for hook in hooks.values():
                    hook(piece.parameter)
