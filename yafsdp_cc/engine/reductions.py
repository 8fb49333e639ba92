"""Gradients on their way: from the slots that a backward writes, over the ranks, into the shards and ``.grad``."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.compression import AUTO
from yafsdp_cc.engine.compressed import Phase
from yafsdp_cc.engine.delayed import OwnPost
from yafsdp_cc.engine.journal import Journal, Note
from yafsdp_cc.engine.lanes import alone
from yafsdp_cc.engine.mailbox import Mailbox
from yafsdp_cc.engine.replicas import Replicas
from yafsdp_cc.engine.slots import Ring, Slot
from yafsdp_cc.engine.tensor import flat_dtensor
from yafsdp_cc.engine.usage import Usage
from yafsdp_cc.engine.windows import GradientSpace, gradient_bytes, told_of_wholes
from yafsdp_cc.wire.chunks import ChunkSum
from yafsdp_cc.wire.exchange import Reduce
from yafsdp_cc.wire.post import Post

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from yafsdp_cc.engine.compressed import Compressed
    from yafsdp_cc.engine.counters import Counters
    from yafsdp_cc.engine.delayed import Apart
    from yafsdp_cc.engine.flat import Flat, Piece
    from yafsdp_cc.engine.host import Crossings
    from yafsdp_cc.engine.lanes import Lane, Start
    from yafsdp_cc.engine.small import SmallGroup
    from yafsdp_cc.engine.tensor import FlatDTensor
    from yafsdp_cc.engine.unit import Unit
    from yafsdp_cc.plan import Role

_SMALL = Note.of("reduce", "small group")
_log = logging.getLogger("yafsdp_cc")


class Reductions:
    """Gradient slots, the exchange that empties them, and what of the backward under way has been sent."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        device: torch.device,
        lane: Lane,
        journal: Journal,
        counters: Counters,
        compressed: Compressed | None = None,
        apart: Apart | None = None,
    ) -> None:
        self.device = device
        self.compressed = compressed
        self.lane = lane
        self.journal = journal
        self.counters = counters
        self.exchange = Reduce(group, device)
        self.post = Post(group, device)
        self._encoded: dict[Flat, ChunkSum] = {}
        self._apart = apart
        self._late = lane.ticket()
        """The latest landing of a sum that was under way since an earlier backward."""
        self.replicas = None if replicas is None else Replicas(replicas, device, lane, compressed)
        self.rings: dict[Role, Ring] = {}
        self.crossings: Crossings | None = None
        """By which gradients reach host memory, where some are there."""
        self.concludes = True
        """Whether a backward waits for what it has sent, and reduces the small group."""
        self._own_slots: list[Slot] = []
        self._trained: set[Flat] = set()
        self._sent: list[tuple[Slot, Flat]] = []
        """Reduces issued in the backward under way."""
        self._landed: list[tuple[Flat, list[bool]]] = []
        """What lands in it, and which of the parameters this rank has written."""
        self._sums: Mailbox
        self._told = False

    def adopt(self, units: Sequence[Unit], small: SmallGroup) -> None:
        """Make the slots of ``units``, in module order, and the gradients of all that is trained."""
        self._sums = Mailbox(Journal.width(), small.dtype, self.device)
        for role in dict.fromkeys(unit.role for unit in units):
            members = [unit for unit in units if unit.role == role]
            size = max(gradient_bytes([flat for flat in unit.flats if flat.trainable]) for unit in members)
            if size:
                most = max(unit.draft.settings.gradient_slots for unit in members)
                count = min(most if role == "block" else 1, len(members))
                self.rings[role] = Ring(role, count, 0, size, self.device, self.lane)
                for unit in members:
                    unit.alone = count == len(members)
        for unit in units:
            for flat in unit.flats:
                if flat.trainable or flat.gradients is not None:  # frozen by now, it may have something to say yet
                    self.train(flat)
        for block in small.blocks:
            if any(piece.parameter.requires_grad for piece in block.pieces):
                block.train(self.wrap)

    def train(self, flat: Flat) -> None:
        """Make what the gradients of ``flat`` need, if it was frozen until now."""
        if flat not in self._trained:
            self._trained.add(flat)
            self._land()  # the receive buffer may have to grow
            if not self._encode(flat) or (self.compressed is not None and self.compressed.may_be_exact):
                self.exchange.reserve(flat.layout.numel, flat.wire)
            if self.replicas is not None:
                self.replicas.reserve(flat, self.exchange.rank)
            flat.train(self.wrap)

    def _encode(self, flat: Flat) -> bool:
        """Make what encodes the gradients of ``flat``, if it is to be; whether it is."""
        compressed = self.compressed
        if compressed is None or compressed.over_replicas or not compressed.encodes(flat):
            return False
        name = flat.pieces[0].cut.name
        if flat.codec == AUTO:
            self._encoded[flat] = compressed.chosen_for(flat, self.post, self.exchange, name)
            return False
        apart = self._apart if flat.is_delayed else None
        post = self.post if apart is None else OwnPost(apart, self.post, self.journal)
        self._encoded[flat] = compressed.reduce_for(flat, post, name)
        return True

    def encode_anew(self, flat: Flat) -> None:
        """Let what is now said to be its codec encode the gradients of ``flat``; nothing is under way."""
        if (before := self._encoded.get(flat)) is not None:
            before.see_through()
            self._encode(flat)
            self._encoded[flat].owed = before.owed
        elif self.replicas is not None:
            self.replicas.encode_anew(flat, self.exchange.rank)

    def encoded_of(self, flat: Flat) -> ChunkSum | None:
        """How the gradients of ``flat`` are summed once the warm-up is over, if they are encoded then."""
        return self._encoded.get(flat)

    def accumulates(self, flat: Flat) -> bool:
        """Whether gradients of ``flat`` can be kept in what its messages have still to say."""
        exchange = self.exchange_of(flat)
        return isinstance(exchange, ChunkSum) and exchange.accumulates and not self._sums_both

    def pends(self, flat: Flat) -> bool:
        """Whether gradients of ``flat`` are kept there, to be sent."""
        encoded = self._encoded.get(flat)
        kept = encoded is not None and encoded.kept is not None
        return kept and all(sent is not flat for _, sent in self._sent)  # until it lands, what was sent is kept

    def keep(self, space: GradientSpace, used: list[list[bool]]) -> None:
        """Take the gradients in ``space`` in, for a later ``send``."""
        slot = space.slot
        for flat, whole, wrote in zip(space.flats, space.wholes, used, strict=True):
            self._land_late(flat)
            start = self._prepared(flat, whole, alone(partial(self._encoded[flat].accumulate, whole, wrote)))
            self.lane.issue(slot.ready, start, after=self.lane.reached())
        slot.owner = None

    def exchange_of(self, flat: Flat) -> Reduce | ChunkSum:
        """How the gradients of ``flat`` are summed over the ranks of a shard now."""
        encoded = self._encoded.get(flat)
        if encoded is None or self.compressed is None or not self.compressed.is_warm:
            return self.exchange
        return encoded

    def payload(self, flat: Flat, whole: Tensor) -> int:
        """Bytes that say the gradients of ``flat`` in ``whole`` to all ranks."""
        exchange = self.exchange_of(flat)
        return exchange.payload if isinstance(exchange, ChunkSum) else whole.nbytes

    @staticmethod
    def wrap(local: Tensor, piece: Piece) -> FlatDTensor:
        """The ``.grad`` of a parameter whose range of the gradient shard is ``local``."""
        return flat_dtensor(local, piece.cut)

    def take_over(self, other: Reductions) -> None:
        """What was said to ``other`` holds here too."""
        self.concludes, self._told = other.concludes, other._told
        for flat, encoded in other._encoded.items():
            if flat in self._encoded:
                self._encoded[flat].owed = encoded.owed
        if self.replicas is not None and other.replicas is not None:
            self.replicas.take_over(other.replicas)

    def home(self, unit: Unit) -> Slot:
        """Where the unit's gradients are written; a slot of its own if unfrozen ones do not fit in the ring's."""
        size = gradient_bytes(unit.training)
        ring = self.rings.get(unit.role)
        if ring is not None and size <= ring.slots[0].buffer.numel():
            return ring.home(unit.index)
        slot = Slot(size, self.device, self.lane)
        self._own_slots.append(slot)
        return slot

    def send(self, note: Note, space: GradientSpace, used: list[list[bool]]) -> None:
        """Reduce the gradients in ``space``: summed at their owners, divided there, added to ``.grad``.

        ``used`` says of each flat's pieces whether this rank wrote them.
        """
        self.journal.write(note)
        slot = space.slot
        for flat, whole, wrote in zip(space.flats, space.wholes, used, strict=True):
            exchange, adds = self.exchange_of(flat), flat.holds_exact
            self._land_late(flat)
            late = exchange.late if isinstance(exchange, ChunkSum) else None
            if late is None and self.compressed is not None:
                self.compressed.check_once(flat)
            if isinstance(exchange, ChunkSum) and exchange.kept is not None:
                wrote[:] = [now or before for now, before in zip(wrote, exchange.kept, strict=True)]
            start = self._prepared(flat, whole, partial(exchange.send, whole))
            tail = partial(self._take, exchange, flat, whole, wrote)
            if late is not None and isinstance(exchange, ChunkSum):
                tail = partial(exchange.set_apart, whole, wrote)
            else:
                self._landed.append((flat, wrote))
            if exchange.one_at_a_time:
                self._land()
            self.counters.reduced_bytes += exchange.sent_bytes(whole)
            self.lane.issue(slot.ready, start, tail, after=self.lane.reached())
            self._sent.append((slot, flat))
            if self._sums_both and isinstance(exchange, ChunkSum):
                self._send_exactly(flat, whole, slot, adds)
        slot.owner = None

    def _prepared(self, flat: Flat, whole: Tensor, start: Start) -> Start:
        """The start of a sum of ``whole``, with what is done to it before."""
        return start if self.compressed is None else self.compressed.prepared(flat, whole, start)

    @property
    def _sums_both(self) -> bool:
        return self.compressed is not None and self.compressed.phase is Phase.BOTH

    def _send_exactly(self, flat: Flat, whole: Tensor, slot: Slot, adds: bool) -> None:
        """Sum gradients once more, for ``flat.exact``; what was encoded of them has been taken in before."""
        exchange = self.exchange
        if exchange.one_at_a_time:
            self._land()

        def take() -> None:
            for _ in flat.keeping(exchange.totals(whole), adds):
                pass

        self.counters.reduced_bytes += exchange.sent_bytes(whole)
        self.lane.issue(slot.ready, partial(exchange.send, whole), take, after=self.lane.reached())

    def _land_late(self, flat: Flat) -> None:
        """Have the sum of ``flat`` land that is under way since an earlier backward, if one is."""
        encoded, compressed = self._encoded.get(flat), self.compressed
        if compressed is None or encoded is None or encoded.late is None or encoded.late.used is None:
            return
        if encoded.momentum is not None and not compressed.is_momentum(flat):
            landing = encoded.take_back  # a step of the momentum, and an optimizer that now wants mean gradients
        else:
            compressed.check_once(flat)
            gradients, divisor = flat.train(self.wrap), compressed.divisor_of(flat)
            landing = partial(gradients.land, encoded.late_totals(), divisor, encoded.late.used)
            self._landed.append((flat, encoded.late.used))
        self.lane.issue(self._late, alone(landing), after=self.lane.reached())

    def _take(self, exchange: Reduce | ChunkSum, flat: Flat, whole: Tensor, wrote: list[bool]) -> None:
        totals = exchange.totals(whole)
        if self.replicas is not None:
            self.counters.reduced_bytes += self.replicas.take(flat, totals, wrote, self._add)
        else:
            self._land_in(flat, totals, wrote)

    def _add(self, flat: Flat, total: Tensor, wrote: list[bool]) -> None:
        self._land_in(flat, [(0, total)], wrote)

    def _land_in(self, flat: Flat, totals: Iterable[tuple[int, Tensor]], wrote: list[bool]) -> None:
        assert flat.gradients is not None
        divisor = flat.divisor if self.compressed is None else self.compressed.divisor_of(flat)
        if self.compressed is not None and self.compressed.keeps(flat):
            totals = flat.keeping(totals)
        flat.gradients.land(totals, divisor, wrote)

    def _land(self) -> None:
        """See the latest reduce through, and the latest landing; the lane has done those before."""
        if self._sent:
            self.journal.wait(self._sent[-1][0].ready)
        self.rest()

    def rest(self) -> None:
        """See what has landed of earlier backwards' sums, in one that only keeps its own too."""
        self._late.wait()

    def conclude(self, pieces: Sequence[Piece], small: SmallGroup) -> None:
        """Reduce the small group, and learn which of all ``pieces`` other ranks have used and whether they agree."""
        sent = {flat for _, flat in self._sent}
        for flat in self._encoded:
            if flat not in sent:  # this backward has not come to it
                self._land_late(flat)
        self._land()
        if self.replicas is not None:
            self.replicas.settle()
        landed = [(flat.pieces, wrote) for flat, wrote in self._landed]
        landed.append((small.pieces, [piece.written for piece in small.pieces]))
        late = {
            piece
            for flat, _ in self._landed
            if flat.residual is not None or flat in self._encoded  # which may owe what a residual held
            for piece in flat.pieces
        }
        usage = Usage(landed, len(pieces), lambda piece: piece in late and self._says(piece))
        self._sent.clear()
        self._landed.clear()
        self.journal.write(_SMALL)
        totals = small.send(usage.words + self.journal.sums(), self.lane, self.replicas)
        alone = self.replicas is not None and self.replicas.is_alone
        self.counters.reduced_bytes += small.wire_bytes(None if alone else self.replicas)
        small.land(self.wrap)
        if self.crossings is not None:
            self.crossings.wait()
        # On CUDA these are the numbers of the backward before, so as not to wait for this one.
        sums = self._sums.receive(totals[-self.journal.width() :])
        if sums is not None:
            self.journal.check(sums)
        usage.hand_out(totals, self.exchange.world > 1 or self.replicas is not None)

    def _says(self, piece: Piece) -> bool:
        """Whether a sum has brought something of a parameter that nobody may have used: what was still to be said."""
        if self.crossings is not None:
            self.crossings.wait()
        return bool(piece.local_gradient.any())

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was sent has still to land."""
        kept = any(encoded.kept is not None for encoded in self._encoded.values())
        return not self._sent and not kept and (self.replicas is None or self.replicas.is_idle)

    @property
    def ends(self) -> bool:
        """Whether the backward under way makes its gradients final."""
        return self.concludes and (self.replicas is None or self.replicas.sums)

    def recover(self) -> None:
        """Drop what an interrupted backward has sent or was about to send."""
        for slot, _ in self._sent:
            slot.ready.abandon()
        sent = {flat for _, flat in self._sent}
        self._sent.clear()
        self._landed.clear()
        if self.replicas is not None:
            self.replicas.forget()
        for flat, encoded in self._encoded.items():
            if flat in sent:
                encoded.drop()
            encoded.see_through()
            encoded.forget()
        for slot in (*(slot for ring in self.rings.values() for slot in ring.slots), *self._own_slots):
            slot.owner = None

    def tell_carried(self, units: Sequence[Unit]) -> None:
        """Say once what it costs to keep whole gradients across micro-batches."""
        if not self._told and self.exchange.rank == 0:
            sums_are_steps = self.compressed is not None and self.compressed.beta > 0
            _log.warning("%s", told_of_wholes([unit for unit in units if not unit.alone], sums_are_steps))
        self._told = True

    @property
    def owned_bytes(self) -> int:
        """Bytes of the slots, of the exchanges' own buffers, and of what is still to be said."""
        slots = sum(slot.buffer.nbytes for slot in self._own_slots)
        replicas = 0 if self.replicas is None else self.replicas.owned_bytes
        rings = sum(ring.owned_bytes for ring in self.rings.values())
        return slots + replicas + rings + self.receive_bytes + self.residual_bytes + self.late_bytes

    @property
    def receive_bytes(self) -> int:
        """Bytes of the buffers that gradients are exchanged through."""
        return self.exchange.owned_bytes + self.post.owned_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes of what is still to be said to the ranks of the shard."""
        return sum(encoded.owned_bytes for encoded in self._encoded.values())

    @property
    def late_bytes(self) -> int:
        """Bytes of sums that are under way from one backward to the next."""
        return sum(encoded.late_bytes for encoded in self._encoded.values())
