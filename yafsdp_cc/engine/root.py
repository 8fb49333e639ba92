"""The engine of one sharded model: what its units share, and the beginning and the end of each pass through it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import _get_default_store

from yafsdp_cc.compression import ROUNDING
from yafsdp_cc.compression_autotune import CodecAutotuner
from yafsdp_cc.engine.counters import Counters
from yafsdp_cc.engine.journal import Journal
from yafsdp_cc.engine.lead import settle
from yafsdp_cc.engine.offload import FromHost, crossings_of
from yafsdp_cc.engine.opener import Opener
from yafsdp_cc.engine.order import Order
from yafsdp_cc.engine.passage import Passage
from yafsdp_cc.engine.reductions import Reductions
from yafsdp_cc.engine.slots import Ring, Slot
from yafsdp_cc.engine.strangers import Strangers
from yafsdp_cc.engine.survey import plan_for
from yafsdp_cc.engine.tree import cast, gate_tensors, map_tensors
from yafsdp_cc.engine.windows import Weights, weight_bytes
from yafsdp_cc.wire.change import EncodedChange, Room
from yafsdp_cc.wire.encoded import EncodedGather
from yafsdp_cc.wire.exchange import Gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor, nn

    from yafsdp_cc.engine.delayed import Apart
    from yafsdp_cc.engine.draft import Draft
    from yafsdp_cc.engine.flat import Piece
    from yafsdp_cc.engine.lanes import Lane
    from yafsdp_cc.engine.passage import Call
    from yafsdp_cc.engine.small import SmallGroup
    from yafsdp_cc.engine.unit import Entry, Unit
    from yafsdp_cc.plan import Plan, Role

_graph_task = torch._C._current_graph_task_id
_will_execute = torch._C._will_engine_execute_node


class Root:
    """Rings, lanes, exchanges and the small group of one model, and the state of the pass under way."""

    def __init__(
        self,
        model: nn.Module,
        drafts: Sequence[Draft],
        gather_group: dist.ProcessGroup,
        reduce_group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        device: torch.device,
        gather_lane: Lane,
        reduce_lane: Lane,
        counters: Counters,
        apart: Apart | None = None,
    ) -> None:
        self.model = model
        self.drafts = tuple(drafts)
        self.device = device
        self.world: int = gather_group.size()
        self.gather = Gather(gather_group, device)
        self.gather_lane = gather_lane
        self.counters = counters
        replica, replicated = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
        rank, first = gather_group.rank() + self.world * replica, int(self.drafts[0].ranks.mesh.mesh.min())
        self.journal = Journal(rank, self.world * replicated, _get_default_store(), first)
        self.compressed = next((draft.compressed for draft in drafts if draft.compressed is not None), None)
        ways = reduce_group, replicas, device, reduce_lane
        self.reductions = Reductions(*ways, self.journal, self.counters, self.compressed, apart)
        self.autotuner = self.journal.observer = CodecAutotuner.of(self)
        codec = None if self.compressed is None or self.world == 1 else self.compressed.weights
        self.encoded_change = None if codec is None else EncodedChange(self.gather, codec, Room(device))
        rounds = codec is not None and codec.name in ROUNDING
        self.encoded_gather = EncodedGather(self.gather, codec) if codec is not None and rounds else None
        self.crossings = self.reductions.crossings = crossings_of(drafts, device, gather_lane, reduce_lane)
        self.input_dtype: torch.dtype | None = None
        self.output_dtype: torch.dtype | None = None
        self.post_optim_event: torch.Event | None = None
        """What the gathers of the next pass wait for, instead of the caller's stream."""
        self.outdated = False
        """Whether something was said since that takes another assembly."""
        self.passage: Passage | None = None
        """The forward under way."""
        self._passages: weakref.WeakSet[Passage] = weakref.WeakSet()
        """Those whose graphs there are."""
        self._retired = False
        self._opener: Opener | None = None
        """What called it."""
        self.units: tuple[Unit, ...] = ()
        self.active: list[Call] = []
        """Calls that the backward has come to and not left, outermost first."""
        self.unit: Unit | None = None
        """The unit of what no other unit has taken."""
        self.small: SmallGroup
        self.order: Order
        self.weight_rings: dict[Role, Ring] = {}
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
        self._strangers = Strangers(model, {each for draft in drafts for each in draft.ignored})

    def adopt(self, units: dict[Draft, Unit], small: SmallGroup, root_unit: Unit | None) -> None:
        """Take in the units, in module order, and make the slots."""
        self.units, self.small, self.unit = tuple(units.values()), small, root_unit
        for unit in self.units:
            unit.encode(self.encoded_gather, self.encoded_change if unit.stays_whole else None)
        for role in dict.fromkeys(unit.role for unit in self.units):
            members = [unit for unit in self.units if unit.role == role]
            turns = [unit for unit in members if unit.flats and not unit.draft.settings.keeps]
            keeping = [unit for unit in members if unit.flats and unit.draft.settings.keeps]
            size = max(weight_bytes(unit.flats, unit.encoded) for unit in members)
            depth = max((len(unit.draft.settings.forward_prefetch) for unit in turns), default=0)
            count = min(max(2, 1 + depth) if role == "block" else 1, len(turns))
            ring = Ring(role, count, len(keeping), size, self.device, self.gather_lane)
            if turns or keeping:
                self.weight_rings[role] = ring
            for index, unit in enumerate(members):
                unit.index = index
            for index, unit in enumerate(turns):
                unit.home = Weights(ring.home(index), unit.flats, unit.encoded)
            for slot, unit in zip(ring.kept, keeping, strict=True):
                unit.home = Weights(slot, unit.flats, unit.encoded)
            for unit in members:
                if not unit.flats:  # all it has is small
                    unit.home = Weights(Slot(0, self.device, self.gather_lane), ())
        for unit in self.units:
            if unit.draft.host is not None:
                unit.gather = FromHost(self.gather.group, self.device, unit.draft.host.crossings.weights)
            unit.forward_prefetch = tuple(units[draft] for draft in unit.draft.settings.forward_prefetch)
            unit.backward_prefetch = tuple(units[draft] for draft in unit.draft.settings.backward_prefetch)
        self.reductions.adopt(self.units, small)
        self._pieces: tuple[Piece, ...] = (*(p for unit in self.units for p in unit.pieces), *small.pieces)
        for place, piece in enumerate(self._pieces):
            piece.place = place
        tied = set() if root_unit is None else {module for piece in root_unit.pieces for module, _ in piece.sites}
        for unit in self.units:
            inside = {inner for module in unit.modules for inner in module.modules()}
            unit.small = tuple(p for p in small.pieces if any(module in inside for module, _ in p.sites))
            unit.borrows = unit is not root_unit and not tied.isdisjoint(inside)
        self.order = Order([unit for unit in self.units if unit is not root_unit])
        if self.compressed is not None:
            settle(self)

    @property
    def may_retire(self) -> bool:
        """Whether nothing is under way, no backward awaited and no gradient held that was not reduced to the end."""
        idle = self.passage is None and _graph_task() == -1 and self.reductions.is_idle
        awaited = any(passage.gated and not passage.finished for passage in self._passages)
        return idle and not awaited and all(unit.gradient_space is None for unit in self.units)

    def retire(self) -> None:
        """Let go of what is under way: another assembly takes the parameters over."""
        self._retired = True
        self.recover()
        for unit in self.units:
            unit.retire()
        for ring in self.weight_rings.values():
            for slot in (*ring.slots, *ring.kept):
                slot.ready.wait()
                slot.owner = None
        # Units and this refer to each other: their buffers shall not wait for Python to look for cycles.
        self.units, self.unit, self.order = (), None, Order(())
        self.weight_rings.clear()

    # A forward of the root module --------------------------------------------------------------------------------

    def open(self) -> Passage:
        """Begin a pass: clear what an interrupted one left, see new weights, gather the first units."""
        if self._task != -1 or self.interrupted:
            self.recover()
        for piece in self._pieces:
            piece.check()
        self._strangers.check()
        if self.compressed is not None:
            self.compressed.open(self)
        if self.autotuner is not None:
            self.autotuner.before_forward(self)
        self.small.refresh()
        if not torch.is_grad_enabled():
            self.small.trained()
            self.small.show()
        event, self.post_optim_event = self.post_optim_event, None
        if event is None:
            self.gather_lane.follow(self.gather_lane.reached())
        else:
            self.gather_lane.after(event)
        self.passage = passage = Passage(self)
        self._passages.add(passage)
        self._opener = Opener()
        self.order.begin()
        return passage

    @property
    def is_warm(self) -> bool:
        """Whether weights may be gathered encoded by now."""
        return self.compressed is not None and self.compressed.is_warm

    def close(self) -> None:
        """The forward of the pass is over."""
        if self.passage is not None:
            self.passage.close()
        self.passage = self._opener = None
        self.order.end()
        self.small.hide()
        self.wait_for_copies()
        for block in self.small.blocks:
            if block.edited():
                block.forget()
                names = ", ".join(f"'{piece.cut.name}'" for piece in block.pieces[:3])
                raise RuntimeError(
                    f"a forward has written in place to one of {names}, ..., whose values in {block.compute.dtype} are "
                    "copies: the change is lost. Change parameters outside of the forward"
                )

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], RootEntry]:
        """Before a forward of the root module."""
        if self._opener is not None and not self._opener.is_running():
            self.recover()  # an interrupt, which no hook of a module is told of, has ended the forward
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
        if self._retired:
            raise RuntimeError(
                "how the model is sharded was changed since this forward (fully_shard around it, set_reshard_after_"
                "forward, ...): run the forward again"
            )
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
            self.recover()
        self._task = task
        if self.autotuner is not None:
            self.autotuner.before_backward()
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
        self._task, self._backward_passage = -1, None
        if self.passage is None:
            self.small.hide()
        self.wait_for_copies()

    def wait_for_copies(self) -> None:
        """Hold the host until nothing reads or writes shards in host memory: the caller may, from here on."""
        if self.crossings is not None:
            self.crossings.wait()

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

    def finish(self, passage: Passage, gradients: Sequence[Tensor | None]) -> None:
        """The end of a backward: every gradient summed, divided and in its place."""
        self.small.collect(passage.trained, gradients)
        if any(piece.parameter.requires_grad for piece in self._pieces):
            for unit in self.units:
                if unit.draft.settings.synchronises and (unit.gradient_space is not None or unit.pends):
                    unit.reduce()  # kept from backwards that did not synchronise
            if self.reductions.ends and any(draft.settings.synchronises for draft in self.drafts):
                self.reductions.conclude(self._pieces, self.small)
                if self.autotuner is not None:
                    self.autotuner.after_backward()
        self.reductions.rest()
        for unit in self.units:
            unit.rest()
        stream = self.gather_lane.stream()
        if stream is not None and self._leaf_stream is not None and stream != self._leaf_stream:
            # Only gradients that flow are joined with the stream around backward(); ours have stopped at the gates.
            self._leaf_stream.wait_event(stream.record_event())
        self._end_backward()

    def recover(self) -> None:
        """Drop what an interrupted forward or backward left behind, gradients not reduced yet with it."""
        self.reductions.recover()
        self.wait_for_copies()
        for ring in self.weight_rings.values():
            for slot in (*ring.slots, *ring.kept):
                slot.users = 0
        self.gather_lane.follow(self.gather_lane.reached())  # users that left no mark
        self.active.clear()
        for unit in self.units:
            unit.forget()
        for piece in self.small.pieces:
            piece.written = False
        self.small.hide()
        self.passage = self._opener = None
        self._task = -1
        self.interrupted = False

    # Figures -----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What the engine holds now, and what a training step sends."""
        return plan_for(self)

    @property
    def owned_bytes(self) -> int:
        """Bytes of every buffer that the engine owns now on its device, spills of a pass under way aside."""
        weights = sum(ring.owned_bytes for ring in self.weight_rings.values())
        carried = sum(unit.carried.slot.buffer.nbytes for unit in self.units if unit.carried is not None)
        shards = sum(flat.owned_bytes for unit in self.units for flat in unit.flats)
        second = sum(unit.second.owned_bytes for unit in self.units if unit.second is not None)
        rooms = 0 if self.crossings is None else self.crossings.owned_bytes
        rooms += 0 if self.encoded_change is None else self.encoded_change.room.owned_bytes
        return shards + weights + second + carried + rooms + self.reductions.owned_bytes + self.small.owned_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of shards and gradients in host memory, beside the device."""
        return self.small.host_bytes + sum(flat.host_bytes for unit in self.units for flat in unit.flats)


class RootEntry(NamedTuple):
    """One forward of the root module under way."""

    passage: Passage | None
    unit: Entry | None
