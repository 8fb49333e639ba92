"""The small group: norms, biases and other tiny parameters, whole on every rank.

Cutting them would save nothing and cost a collective each. Their gradients cross ranks once per backward, in fp32
(fp64 if one of them is) and never encoded, in one buffer that also carries what ranks must tell each other then:

    | gradients of the group | which parameters each rank used | fingerprint of what it issued |
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.flat import Divisor, Gradients, Piece
from yafsdp_cc.engine.layout import VECTOR, align
from yafsdp_cc.engine.mailbox import Mailbox
from yafsdp_cc.profiling.spans import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.lanes import Lane, Ticket
    from yafsdp_cc.engine.replicas import Replicas
    from yafsdp_cc.engine.tensor import FlatDTensor
    from yafsdp_cc.wire.exchange import Gather, Reduce


class SmallBlock:
    """Parameters of one dtype in one flat buffer (``master``), and their copies in the dtype of the forward."""

    def __init__(self, pieces: Sequence[Piece], master: Tensor, compute: torch.dtype, divisor: Divisor) -> None:
        self.pieces = pieces
        self.divisor = divisor
        self.start = self.end = 0
        """Where the block's gradients lie on the wire."""
        self._dtype = compute
        self.gradients: Gradients | None = None
        self.use(master)

    def use(self, master: Tensor) -> None:
        """Take ``master`` for the values of the parameters."""
        self.master = master
        room = self._room(master)
        self._copies = room is not None
        self._copied = self._seen = -1
        self.compute = master.detach() if room is None else room
        self.leaves = [
            self.compute.narrow(0, piece.extent.offset, piece.extent.numel).view(piece.extent.shape)
            for piece in self.pieces
        ]
        for piece, leaf in zip(self.pieces, self.leaves, strict=True):
            piece.copy = leaf

    def _room(self, master: Tensor) -> Tensor | None:
        """Where copies of the values go; None where the forward sees the values themselves."""
        return torch.empty_like(master, dtype=self._dtype) if master.dtype != self._dtype else None

    def _copy(self) -> None:
        self.compute.copy_(self.master)

    def refresh(self) -> None:
        """Bring the copies up to date with the masters."""
        if self._copies and self._copied != self.master._version:
            self._copy()
            self._copied = self.master._version
        self._seen = self.compute._version

    def edited(self) -> bool:
        """Whether somebody has written to the copies, and not to the masters, since they were refreshed."""
        return self._copies and self.compute._version != self._seen

    def forget(self) -> None:
        """Have the copies made anew."""
        self._copied = -1

    def train(self, wrap: Callable[[Tensor, Piece], FlatDTensor]) -> Gradients:
        """The gradients of this block, made when its first parameter is to be trained."""
        if self.gradients is None:
            self.gradients = Gradients(torch.zeros_like(self.master), self.pieces, wrap)
        return self.gradients

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that the forward sees."""
        return self.compute.nbytes if self._copies else 0

    @property
    def owned_bytes(self) -> int:
        """Bytes on the engine's device."""
        gradients = self.gradients.buffer.nbytes if self.gradients is not None else 0
        return self.master.nbytes + self.copied_bytes + gradients

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, beside the device."""
        return 0


class SmallGroup:
    """All small parameters below one root, and their reduction."""

    def __init__(
        self,
        blocks: Sequence[SmallBlock],
        words: int,
        gather: Gather,
        reduce: Reduce,
        device: torch.device,
        ticket: Ticket,
    ) -> None:
        """``words`` is how many numbers cross ranks beside the gradients."""
        self.blocks = tuple(blocks)
        self.pieces: tuple[Piece, ...] = tuple(piece for block in blocks for piece in block.pieces)
        self._leaves: tuple[Tensor, ...] = tuple(leaf for block in blocks for leaf in block.leaves)
        self._gather = gather
        self._reduce = reduce
        self._ticket = ticket
        self._elements = 0
        for block in blocks:
            block.start, self._elements = self._elements, self._elements + block.master.numel()
            block.end = self._elements
        self._words = words
        self._said = array("d", bytes(8 * words))
        self._saying = torch.frombuffer(self._said, dtype=torch.float64)
        size = align(self._elements + words, VECTOR * gather.world)
        double = any(block.master.dtype == torch.float64 for block in blocks)
        self._wire = torch.zeros(size, dtype=torch.float64 if double else torch.float32, device=device)
        self._mail = Mailbox(words, self._wire.dtype, device)
        self._totals = torch.zeros_like(self._wire) if gather.world > 1 else self._wire
        reduce.reserve(size, self._wire.dtype)
        for block in blocks:
            for piece in block.pieces:
                start = block.start + piece.extent.offset
                piece.target = self._wire.narrow(0, start, piece.extent.numel).view(piece.extent.shape)
        self.span = Span("small", "", self._wire.nbytes)

    @property
    def dtype(self) -> torch.dtype:
        """Of what crosses ranks."""
        return self._wire.dtype

    def wire_bytes(self, replicas: Replicas | None) -> int:
        """Bytes that this rank sends in one reduction."""
        across = 0 if replicas is None else replicas.sent_bytes(self._wire[: self._wire.numel() // self._reduce.world])
        return self._reduce.sent_bytes(self._wire) + self._gather.sent_bytes(self._wire) + across

    @property
    def owned_bytes(self) -> int:
        buffers = self._wire.nbytes + (self._totals.nbytes if self._totals is not self._wire else 0)
        return buffers + sum(block.owned_bytes for block in self.blocks)

    @property
    def host_bytes(self) -> int:
        return sum(block.host_bytes for block in self.blocks)

    def refresh(self) -> None:
        """Bring the copies in the dtype of the forward up to date."""
        for block in self.blocks:
            block.refresh()

    def trained(self) -> tuple[list[Piece], list[Tensor]]:
        """The parameters that require a gradient, and their leaves."""
        pieces, leaves = [], []
        for piece, leaf in zip(self.pieces, self._leaves, strict=True):
            requires_grad = piece.parameter.requires_grad
            if leaf.requires_grad is not requires_grad:
                leaf.requires_grad_(requires_grad)
            if requires_grad:
                pieces.append(piece)
                leaves.append(leaf)
        return pieces, leaves

    def show(self) -> None:
        """Let the owner modules see the whole weights."""
        for piece, leaf in zip(self.pieces, self._leaves, strict=True):
            piece.show(leaf)

    def hide(self) -> None:
        """Let the owner modules see the parameters again."""
        for piece in self.pieces:
            piece.hide()

    def collect(self, pieces: Sequence[Piece], gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients of a backward into the wire buffer: copied on first touch, added afterwards."""
        for piece, gradient in zip(pieces, gradients, strict=True):
            if gradient is not None:
                piece.deposit(gradient)
        for piece, leaf in zip(self.pieces, self._leaves, strict=True):
            if leaf.grad is not None:  # from ops that reentrant checkpointing ran again
                piece.deposit(leaf.grad)
                leaf.grad = None

    def send(self, words: Sequence[float], lane: Lane, replicas: Replicas | None) -> Tensor:
        """Sum the gradients and ``words`` over ranks and replicas; the summed words, on the group's device."""
        for piece in self.pieces:
            if not piece.written:
                assert piece.target is not None
                piece.target.zero_()
        self._said[:] = array("d", words)
        self._mail.send(self._saying, self._wire.narrow(0, self._elements, self._words))
        if self._gather.world > 1 or replicas is not None:
            with self.span:
                lane.issue(self._ticket, partial(self._exchange, replicas), after=lane.reached())
                self._ticket.wait()
        return self._totals.narrow(0, self._elements, self._words)

    def _exchange(self, replicas: Replicas | None, asynchronous: bool) -> Sequence[dist.Work]:
        for work in self._reduce.send(self._wire, asynchronous):
            work.wait()
        total = self._reduce.total(self._wire)
        if replicas is not None:
            for work in replicas.send(total, asynchronous):
                work.wait()
        return self._gather.send(self._totals, total, asynchronous)

    def land(self, wrap: Callable[[Tensor, Piece], FlatDTensor]) -> list[bool]:
        """Add the summed gradients, divided, to ``.grad``; for each piece, whether this rank had written it."""
        written = [piece.written for piece in self.pieces]
        first = 0
        for block in self.blocks:
            last = first + len(block.pieces)
            if any(piece.parameter.requires_grad for piece in block.pieces):
                total = self._totals.narrow(0, block.start, block.end - block.start)
                block.train(wrap).land([(0, total)], block.divisor, written[first:last])
            first = last
        for piece in self.pieces:
            piece.written = False
        return written
