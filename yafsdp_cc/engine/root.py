"""The engine of one sharded model: what its units share, and the beginning and the end of each pass through it."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from yafsdp_cc.engine.flat import Divisor
from yafsdp_cc.engine.journal import Journal, Note
from yafsdp_cc.engine.lanes import lane_for
from yafsdp_cc.engine.mailbox import Mailbox
from yafsdp_cc.engine.order import Order
from yafsdp_cc.engine.passage import Passage
from yafsdp_cc.engine.slots import Ring, Slot
from yafsdp_cc.engine.tensor import flat_dtensor
from yafsdp_cc.engine.tree import cast, gate_tensors, map_tensors
from yafsdp_cc.engine.windows import GradientSpace, Weights, gradient_bytes, weight_bytes
from yafsdp_cc.wire.exchange import Gather, Reduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from yafsdp_cc.engine.flat import Flat, Piece
    from yafsdp_cc.engine.lanes import Ticket
    from yafsdp_cc.engine.passage import Call
    from yafsdp_cc.engine.small import SmallGroup
    from yafsdp_cc.engine.tensor import FlatDTensor
    from yafsdp_cc.engine.unit import Entry, Unit
    from yafsdp_cc.plan import Plan, Role

_graph_task = torch._C._current_graph_task_id
_will_execute = torch._C._will_engine_execute_node
_ids = itertools.count()
_SMALL = Note.of("reduce", "small group")
_log = logging.getLogger("yafsdp_cc")


@dataclass
class Counters:
    """What the engine has done since ``shard``, on this rank.

    ``gathered_bytes`` and ``reduced_bytes`` are what this rank sent for weights and for gradients (the small group
    counts with the latter); ``spills`` how often a unit needed a buffer of its own because its slot was in use.
    """

    gathered_bytes: int = 0
    reduced_bytes: int = 0
    spills: int = 0
    owned_bytes: int = 0
    """Bytes of all buffers that the engine owns now."""


class Root:
    """Rings, lanes, exchanges and the small group of one model, and the state of the pass under way."""

    def __init__(
        self,
        gather_group: dist.ProcessGroup,
        reduce_group: dist.ProcessGroup,
        device: torch.device,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.device = device
        self.policy = policy
        self.world: int = gather_group.size()
        self.divisor = Divisor(self.world, device)
        self.gather = Gather(gather_group)
        self.reduce = Reduce(reduce_group, device)
        self.gather_lane = lane_for(device)
        self.reduce_lane = self.gather_lane if reduce_group is gather_group else lane_for(device)
        self.counters = Counters()
        self.journal = Journal(gather_group.rank(), self.world, _get_default_store())
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype
        self.synchronises = True
        """Whether a backward reduces its gradients, or keeps them whole for a later one."""
        self.passage: Passage | None = None
        """The forward under way."""
        self.units: tuple[Unit, ...] = ()
        self.active: list[Call] = []
        """Calls that the backward has come to and not left, outermost first."""
        self.unit: Unit | None = None
        """The unit of what no other unit has taken."""
        self.small: SmallGroup
        self.plan: Plan
        self.order: Order
        self.weight_rings: dict[Role, Ring] = {}
        self.gradient_rings: dict[Role, Ring] = {}
        self._own_gradient_slots: list[Slot] = []
        # A leaf below the root gate: a backward reaches it if and only if it wants the parameters' gradients.
        with torch.enable_grad():
            self.leaf = torch.empty(0, device=device, requires_grad=True)
            self._leaf_node: Any = self.leaf.view_as(self.leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._leaf_stream = self.gather_lane.stream()
        """Where autograd ends the leaf, and with which it joins the stream around ``backward()``."""
        self._task = -1
        """The backward under way, or -1; still set where an exception has ended it."""
        self.interrupted = False
        """A forward was given up before it could be entered in full."""
        self._backward_passage: Passage | None = None
        self._sent: list[tuple[Slot, Flat, list[bool]]] = []
        """Reduces issued in the backward under way."""
        self._sums: Mailbox
        self._told = False
        self._key = f"yafsdp_cc/journal/{next(_ids)}"

    def adopt(self, units: Sequence[Unit], small: SmallGroup, slots: dict[Role, int], root_unit: Unit | None) -> None:
        """Take in the units, in module order, and make the slots: ``slots`` says how many of each role."""
        self.units, self.small, self.unit = tuple(units), small, root_unit
        self._sums = Mailbox(Journal.width(), small.dtype, self.device)
        for role, count in slots.items():
            members = [unit for unit in units if unit.role == role]
            if not members:
                continue
            size = max(weight_bytes(unit.flats) for unit in members)
            self.weight_rings[role] = Ring(role, min(count, len(members)), size, self.device, self.gather_lane)
            size = max(gradient_bytes([flat for flat in unit.flats if flat.trainable]) for unit in members)
            if size:
                count = min(2 if role == "block" else 1, len(members))
                self.gradient_rings[role] = Ring(role, count, size, self.device, self.reduce_lane)
            for index, unit in enumerate(members):
                unit.index = index
                unit.home = Weights(self.weight_rings[role].home(index), unit.flats)
        for unit in units:
            for flat in unit.flats:
                if flat.trainable:
                    self.train(flat)
        for block in small.blocks:
            if any(piece.parameter.requires_grad for piece in block.pieces):
                block.train(self.wrap_gradient)
        self._pieces: tuple[Piece, ...] = (*(p for unit in units for p in unit.pieces), *small.pieces)
        for place, piece in enumerate(self._pieces):
            piece.place = place
        tied = set() if root_unit is None else {module for piece in root_unit.pieces for module, _ in piece.sites}
        for unit in units:
            inside = {inner for module in unit.modules for inner in module.modules()}
            unit.small = tuple(p for p in small.pieces if any(module in inside for module, _ in p.sites))
            unit.borrows = unit is not root_unit and not tied.isdisjoint(inside)
        self.order = Order([unit for unit in units if unit is not root_unit])

    @staticmethod
    def wrap_gradient(local: Tensor, piece: Piece) -> FlatDTensor:
        """The ``.grad`` of a parameter whose range of the gradient shard is ``local``."""
        return flat_dtensor(local, piece.cut)

    # A forward of the root module --------------------------------------------------------------------------------

    def open(self) -> Passage:
        """Begin a pass: clear what an interrupted one left, see new weights, gather the first units."""
        if self._task != -1 or self.interrupted:
            self._recover()
        for piece in self._pieces:
            piece.check()
        self.small.refresh()
        if not torch.is_grad_enabled():
            self.small.trained()
            self.small.show()
        self.gather_lane.follow(self.gather_lane.reached())
        self.passage = passage = Passage(self)
        self.order.begin()
        return passage

    def close(self) -> None:
        """The forward of the pass is over."""
        if self.passage is not None:
            self.passage.close()
        self.passage = None
        self.order.end()
        self.small.hide()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], RootEntry]:
        """Before a forward of the root module."""
        if self.passage is not None:  # called from within its own forward
            return args, kwargs, RootEntry(None, None)
        passage = None
        if _graph_task() == -1:
            passage = self.open()
            if (dtype := self.input_dtype) is not None:
                args, kwargs = map_tensors((args, kwargs), lambda tensor: cast(tensor, dtype))
            if torch.is_grad_enabled():
                args, kwargs = gate_tensors(passage.gate, args, kwargs)
        entry = None
        if self.unit is not None:
            args, kwargs, entry = self.unit.enter(args, kwargs)
        return args, kwargs, RootEntry(passage, entry)

    def leave(self, entry: RootEntry, output: Any) -> Any:
        """After a forward of the root module."""
        if entry.unit is not None:
            assert self.unit is not None
            output = self.unit.leave(entry.unit, output)
        passage = entry.passage
        if passage is None:
            return output
        self.close()
        dtype, gated = self.output_dtype, passage.gated

        def finish(tensor: Tensor) -> Tensor:
            if dtype is not None:
                tensor = cast(tensor, dtype)
            if gated and tensor.requires_grad:
                tensor.register_hook(passage.before_backward)
            return tensor

        return map_tensors(output, finish) if gated or dtype is not None else output

    # A backward --------------------------------------------------------------------------------------------------

    def arrive(self, passage: Passage) -> None:
        """A backward has come to ``passage``."""
        self._backward_passage = passage
        task = _graph_task()
        if task == self._task:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True went through a sharded model: weights that a second backward "
                "would read are gone by then. Compute gradient penalties on an unsharded model"
            )
        if self._task != -1:
            self._recover()
        self._task = task
        if not self.whole_backward():  # its root gate may never be reached
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if self.passage is None:
            self.small.trained()
            self.small.show()

    def _end_backward(self) -> None:
        while self.active:
            self.active.pop().end()
        for unit in self.units:
            unit.let_go()
        self._task = -1
        self._backward_passage = None
        if self.passage is None:
            self.small.hide()

    def begin_call(self, call: Call) -> None:
        """The backward has come to the output of ``call``; that may be the output of a call within it, too."""
        place = len(self.active)
        while place and self.active[place - 1].passage is call.passage and self.active[place - 1].index > call.index:
            place -= 1
        self.active.insert(place, call)

    def end_calls(self, passage: Passage, index: int) -> None:
        """The backward has passed all calls of ``passage`` after ``index``, and all passes made later.

        Autograd runs nodes from the latest to the earliest. Their own gates have told so, but for calls behind whose
        gate nothing needed a gradient.
        """
        active = self.active
        while active and (active[-1].passage is not passage or active[-1].index > index):
            active.pop().end()

    def whole_backward(self) -> bool:
        """Whether the backward under way wants the parameters' gradients, unlike ``torch.autograd.grad``."""
        return bool(_will_execute(self._leaf_node))

    def called_without_grad(self, unit: Unit) -> bool:
        """Whether the forward behind the backward under way ran ``unit`` without a graph."""
        passage = self._backward_passage
        if passage is None or unit not in passage.ungated:
            return False
        return not any(call.unit is unit for call in passage.calls)

    def train(self, flat: Flat) -> None:
        """Make what the gradients of ``flat`` need, if it was frozen until now."""
        if flat.gradients is None:
            self._land()  # the receive buffer may have to grow
            self.reduce.reserve(flat.layout.numel, flat.wire)
            flat.train(self.wrap_gradient)

    def gradient_slot(self, unit: Unit) -> Slot:
        """Where the unit's gradients are written; a slot of its own if unfrozen ones do not fit in the ring's."""
        size = gradient_bytes(unit.training)
        ring = self.gradient_rings.get(unit.role)
        if ring is not None and size <= ring.slots[0].buffer.numel():
            return ring.home(unit.index)
        slot = Slot(size, self.device, self.reduce_lane)
        self._own_gradient_slots.append(slot)
        return slot

    def send(self, unit: Unit, space: GradientSpace, used: list[list[bool]]) -> None:
        """Reduce the gradients in ``space``: summed at their owners, divided there, added to ``.grad``."""
        self.journal.write(unit.reduce_note)
        slot = space.slot
        for flat, whole, wrote in zip(space.flats, space.wholes, used, strict=True):

            def start(asynchronous: bool, whole: Tensor = whole) -> list[dist.Work | None]:
                return [self.reduce.send(whole, asynchronous)]

            def tail(flat: Flat = flat, whole: Tensor = whole, wrote: list[bool] = wrote) -> None:
                assert flat.gradients is not None
                flat.gradients.land(self.reduce.totals(whole), self.divisor, wrote)

            if self.reduce.one_at_a_time:
                self._land()
            self.reduce_lane.issue(slot.ready, start, tail, after=self.reduce_lane.reached())
            self._sent.append((slot, flat, wrote))
            self.counters.reduced_bytes += self.reduce.sent_bytes(whole)
        slot.owner = None

    def _land(self) -> None:
        """See the latest reduce through; the lane has done those before it."""
        if self._sent:
            self.wait(self._sent[-1][0].ready)

    def wait(self, ticket: Ticket) -> None:
        """Wait, and where that fails say what the other ranks were doing."""
        try:
            ticket.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}\nEvery rank must issue the same operations in the same order; what they did last:\n"
                f"{self.journal.compare(self._key)}"
            ) from error

    def finish(self, passage: Passage, gradients: Sequence[Tensor | None]) -> None:
        """The end of a backward: every gradient summed, divided and in its place."""
        self.small.collect(passage.trained, gradients)
        if self.synchronises and any(piece.parameter.requires_grad for piece in self._pieces):
            for unit in self.units:
                if unit.gradient_space is not None:  # kept from backwards that did not synchronise
                    unit.reduce()
            self._exchange_last()
        else:
            for unit in self.units:
                unit.rest()
        stream = self.gather_lane.stream()
        if stream is not None and self._leaf_stream is not None and stream != self._leaf_stream:
            # Only gradients that flow are joined with the stream around backward(); ours have stopped at the gates.
            self._leaf_stream.wait_event(stream.record_event())
        self._end_backward()

    def _exchange_last(self) -> None:
        """Reduce the small group, and learn which parameters other ranks have used and whether they agree."""
        words = [0.0] * len(self._pieces)
        unused: list[Piece] = []
        sent = [(flat.pieces, wrote) for _, flat, wrote in self._sent]
        sent.append((self.small.pieces, [piece.written for piece in self.small.pieces]))
        for pieces, wrote in sent:
            for piece, written in zip(pieces, wrote, strict=True):
                if written:
                    words[piece.place] = 1.0
                elif piece.parameter.requires_grad:
                    unused.append(piece)
        self._land()
        self._sent.clear()
        self.journal.write(_SMALL)
        totals = self.small.send(words + self.journal.sums(), self.reduce_lane)
        self.counters.reduced_bytes += self.small.wire_bytes
        self.small.land(self.divisor, self.wrap_gradient)
        self._check(totals)
        # Their gradients stay None unless another rank has some; where they have one already, there is nothing to ask.
        unused = [piece for piece in unused if piece.parameter.grad is None]
        if unused and self.world > 1:  # on CUDA the host waits here for the whole backward
            counts = totals[: len(words)].tolist()
            for piece in unused:
                if counts[piece.place]:
                    piece.parameter.grad = piece.gradient
        for pieces, _ in sent:
            for piece in pieces:
                hooks = piece.parameter._post_accumulate_grad_hooks
                if hooks and piece.parameter.grad is not None:
                    for hook in hooks.values():
                        hook(piece.parameter)

    def _check(self, totals: Tensor) -> None:
        """Raise where ranks have issued different collectives. On CUDA one backward late, so as not to wait for it."""
        sums = self._sums.receive(totals[-self.journal.width() :])
        if sums is not None and not self.journal.agrees(sums):
            raise RuntimeError(
                "ranks ran units in different orders, so their gradients are worthless; every rank must run the same "
                f"forward (parameters inside a unit may go unused)\n{self.journal.compare(self._key)}"
            )

    def _recover(self) -> None:
        """Drop what an interrupted forward or backward left behind, gradients not reduced yet with it."""
        for slot, _, _ in self._sent:
            slot.ready.abandon()
        self._sent.clear()
        for ring in self.weight_rings.values():
            for slot in ring.slots:
                slot.users = 0
        self.gather_lane.follow(self.gather_lane.reached())  # users that left no mark
        gradient_slots = [slot for ring in self.gradient_rings.values() for slot in ring.slots]
        for slot in (*gradient_slots, *self._own_gradient_slots):
            slot.owner = None
        self.active.clear()
        for unit in self.units:
            unit.forget()
        for piece in self.small.pieces:
            piece.written = False
        self.small.hide()
        self.passage = None
        self._task = -1
        self.interrupted = False

    # Figures -----------------------------------------------------------------------------------------------------

    @property
    def owned_bytes(self) -> int:
        """Bytes of every buffer that the engine owns now, spills of a pass under way aside."""
        rings = (*self.weight_rings.values(), *self.gradient_rings.values())
        slots = sum(slot.buffer.nbytes for slot in self._own_gradient_slots)
        carried = sum(unit.carried.slot.buffer.nbytes for unit in self.units if unit.carried is not None)
        shards = sum(flat.owned_bytes for unit in self.units for flat in unit.flats)
        return (
            shards + slots + carried + sum(ring.owned_bytes for ring in rings) + self.reduce.owned_bytes
            + self.small.owned_bytes
        )  # fmt: skip

    def tell_carried(self) -> None:
        """Say once what it costs to keep whole gradients across micro-batches."""
        if not self._told:
            self._told = True
            size = sum(gradient_bytes([flat for flat in u.flats if flat.trainable]) for u in self.units)
            _log.warning(
                "set_requires_gradient_sync(False) keeps whole gradients on every rank: %d bytes more per rank. "
                "Left on, each micro-batch is reduced into the shard and costs none",
                size,
            )


class RootEntry(NamedTuple):
    """One forward of the root module under way."""

    passage: Passage | None
    unit: Entry | None
