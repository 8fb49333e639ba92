"""Replicas that have made steps by themselves meet: all get the mean of what each has to say, in the same bits.

    of a chunk    ── encoded as gradients are, with what messages before have left unsaid ──►    mean over replicas
    the rest      ── exactly, and the small group in one reduction as its gradients ──────────►

In between no byte crosses replicas, and their weights differ. So nothing that is to be of all of them is read or
written then: what does so asks ``check_together`` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yafsdp_cc.engine.journal import Journal, Note

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from yafsdp_cc.engine.flat import Flat, Piece
    from yafsdp_cc.engine.replicas import Partial
    from yafsdp_cc.engine.root import Root

_NOTE = Note.of("meet", "replicas")


class Meeting:
    """The exchange, issued at once. A collective.

    Messages are in the units of gradients, times the loss scale, and so is what they leave unsaid.

    Args:
        root: of the model.
        said: asked what this replica says of parameters, of the same ones in all replicas: this rank's elements.
        news: whether this rank has something to tell that all shall know.
    """

    def __init__(self, root: Root, said: Mapping[Piece, Callable[[], Tensor]], news: bool) -> None:
        assert root.reductions.replicas is not None
        assert root.compressed is not None
        self._root = root
        self._replicas = root.reductions.replicas
        self._scale = root.world * root.compressed.loss_scale
        self._partials: dict[Piece, Partial] = {}
        self._small: dict[Piece, Tensor] = {}
        root.journal.write(_NOTE)
        for flat in (flat for unit in root.units for flat in unit.flats):
            if any(piece in said for piece in flat.pieces):
                self._share(flat, said)
        self.news = self._share_small(said, news)
        """Whether any rank had something to tell."""

    def mean_of(self, piece: Piece) -> Tensor:
        """This rank's elements of the mean of what all replicas have said of a parameter."""
        if (small := self._small.get(piece)) is not None:
            return small
        partial = self._partials[piece]
        self._root.journal.wait(partial.ticket)
        return piece.range_of(partial.sum) / (self._scale * self._replicas.world)

    def _share(self, flat: Flat, said: Mapping[Piece, Callable[[], Tensor]]) -> None:
        reductions = self._root.reductions
        reductions.train(flat)  # its parameters may have been frozen until now
        partial = self._replicas.room(flat)
        for piece in flat.pieces:
            if piece in said:
                piece.range_of(partial.sum).copy_(said[piece]()).mul_(self._scale)
                self._partials[piece] = partial
        if flat.steps is not None:  # replicas are to keep the same whole weights, too
            flat.steps.renew(flat.master._version + 1)
        lane = reductions.lane
        reductions.counters.reduced_bytes += self._replicas.share(flat, partial, after=lane.reached())

    def _share_small(self, said: Mapping[Piece, Callable[[], Tensor]], news: bool) -> bool:
        root, small, reductions = self._root, self._root.small, self._root.reductions
        for piece in small.pieces:
            if piece in said:
                piece.deposit(said[piece]())
        sums = root.journal.sums()
        words = [float(news), *[0.0] * (small.words - len(sums) - 1), *sums]
        totals: list[float] = small.send(words, reductions.lane, self._replicas).tolist()
        reductions.counters.reduced_bytes += small.wire_bytes(self._replicas)
        root.journal.check(totals[-Journal.width() :])
        ranks = root.world * self._replicas.world
        self._small = {piece: total / ranks for piece, total in small.totals() if piece in said}
        return totals[0] > 0


def check_idle(root: Root) -> None:
    """Raise a ``RuntimeError`` where gradients have still to be summed, in the place of what replicas have to say."""
    if not root.reductions.is_idle:
        raise RuntimeError(
            "replicas cannot meet while gradients of micro-batches have still to be summed: run the last backward of "
            "the step with set_requires_all_reduce(True) first"
        )


def check_together(root: Root, what: str) -> None:
    """Raise a ``RuntimeError`` where replicas are between two meetings."""
    if root.compressed is not None and root.compressed.are_apart:
        raise RuntimeError(
            f"{what} while replicas make steps by themselves and their weights differ: call optimizer.meet(), on all "
            "ranks, first"
        )
