"""A unit: modules whose parameters are gathered together before use and whose gradients are reduced together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from yafsdp_cc.engine.graph import gate, narrow
from yafsdp_cc.engine.journal import Note
from yafsdp_cc.engine.passage import Call, Passage
from yafsdp_cc.engine.slots import Slot
from yafsdp_cc.engine.supply import Supply
from yafsdp_cc.engine.tree import cast, gate_tensors, map_tensors
from yafsdp_cc.engine.windows import GradientSpace, Weights, gradient_bytes
from yafsdp_cc.profiling.spans import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yafsdp_cc.engine.draft import Draft
    from yafsdp_cc.engine.flat import Flat, Piece
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.plan import Role
    from yafsdp_cc.profiling.spans import Handle

_graph_task = torch._C._current_graph_task_id
"""The backward under way in this thread, or -1."""


class Unit(Supply):
    """The life of one unit, in three parts: its forward calls, its weights, its gradients.

    Weights are wanted by ``enter`` (before a forward) and ``Call.before_backward``; gradients are claimed by the
    latter and sent by ``reduce`` when the last gate of the unit has run.
    """

    def __init__(self, root: Root, draft: Draft, role: Role) -> None:
        name, flats = draft.name, draft.flats
        super().__init__(root, name, flats)
        self.draft = draft
        self.role = role
        self.modules = draft.modules
        self.pieces: tuple[Piece, ...] = tuple(piece for flat in flats for piece in flat.pieces)
        self.index = -1
        policy = draft.policy
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype
        # An embedding's backward needs its indices alone.
        needless = all(type(module) is nn.Embedding for module in draft.modules)
        self.read_in_backward = draft.settings.read_in_backward and not needless
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] = ()
        self.recomputed = -1
        """The last backward that has run this unit again."""
        self.small: tuple[Piece, ...] = ()
        """Parameters of the small group that its modules use."""
        self.borrows = False
        """Whether a module of this unit uses a parameter of the root's unit, tied to one elsewhere."""
        self.shown: list[Sequence[Tensor]] = []
        """What the owner modules see as their parameters, innermost call last."""
        self.gradient_home: GradientSpace | None = None
        self.gradient_space: GradientSpace | None = None
        """Where gradients are written; set from the first claim to the reduce."""
        self._claimed = False
        self.alone = False
        """Whether no other unit's gradients are written where this one's are."""
        self.carried: GradientSpace | None = None
        """Whole gradients kept across micro-batches while synchronisation is off."""
        self.training: tuple[Flat, ...] = ()
        """The flats that take part in the reduce."""
        for piece in self.pieces:
            piece.claim = self.claim
        self._shows_held = False
        self.reduce_note = Note.of("reduce", name)
        self.forward_span = Span("forward", name)
        self.backward_span = Span("backward", name)
        self.reduce_span = Span("reduce", name)

    @property
    def stays_whole(self) -> bool:
        """Whether the weights have a slot to themselves and are not gathered from near ranks either."""
        return self.second is None and (self.draft.settings.keeps or self.role == "root")

    # Forward -----------------------------------------------------------------------------------------------------

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Entry]:
        """Before a forward: whole weights in place, inputs cast and gated."""
        if _graph_task() != -1:
            return args, kwargs, self._enter_again()
        root = self.root
        opened = root.passage is None
        passage = root.open() if opened else root.passage
        assert passage is not None
        borrowed = None
        if opened and self.borrows:
            assert root.unit is not None
            _, _, borrowed = root.unit.enter((), {})
        weights = self.acquire()
        root.order.passed(self)
        if (dtype := self.input_dtype) is not None:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: cast(tensor, dtype))
        call: Call | None = None
        shown: Sequence[Tensor] = weights.views
        if torch.is_grad_enabled():
            call = Call(self, weights, passage)
            args, kwargs, shown = self._gate(call, args, kwargs)
        else:
            passage.ungated.add(self)
        self.show(shown)
        opener = passage if opened else None
        return args, kwargs, Entry(opener, weights, call, self.forward_span.start(), borrowed=borrowed)

    def leave(self, entry: Entry, output: Any) -> Any:
        """After a forward: the slot may be refilled, and the outputs say when the backward begins."""
        self.forward_span.end(entry.span)
        self.hide()
        if entry.again:
            if entry.weights is self.home:
                self._kept += 1
            return output
        output = self._hand_out(entry, output)
        entry.weights.slot.release(self.root.gather_lane)
        if not self.draft.settings.keeps_after_forward:
            self.let_hold_go()
        if entry.borrowed is not None:
            assert self.root.unit is not None
            self.root.unit.leave(entry.borrowed, None)
        if entry.opened is not None:
            self.root.close()
        if entry.weights.edited():
            raise RuntimeError(
                f"a forward of unit '{self.name}' has written to a weight in place, which is lost with the gathered "
                "copy: change weights outside of the forward, for example under yafsdp_cc.whole_parameters(model, "
                "write=True)"
            )
        return output

    def _hand_out(self, entry: Entry, output: Any) -> Any:
        call, address, dtype = entry.call, entry.weights.slot.address, self.output_dtype
        hook = None
        if call is not None:
            call.leave()
            hook = partial(call.before_backward, call.passage)

        def hand_out(tensor: Tensor) -> Tensor:
            if type(tensor) is Tensor and tensor.layout is torch.strided and _address(tensor) == address:
                tensor = tensor.clone()  # a view of the weights, and their slot will be refilled
            if dtype is not None:
                tensor = cast(tensor, dtype)
            if hook is not None and tensor.requires_grad:
                tensor.register_hook(hook)
            return tensor

        return map_tensors(output, hand_out)

    def _gate(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any, Sequence[Tensor]]:
        # A node's backward runs on the stream that it was made on. All of the engine's run on one, whatever streams
        # the model uses, so that gradients are written one after the other and before they are sent.
        home = call.passage.stream
        if home is not None and home != self.root.gather_lane.stream():
            with torch.cuda.stream(home):
                return self._gate_here(call, args, kwargs)
        return self._gate_here(call, args, kwargs)

    def _gate_here(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any, Sequence[Tensor]]:
        anchor = call.passage.anchor()

        def through(tensors: list[Tensor]) -> list[Tensor]:
            nonlocal anchor
            call.expected = call.passage.trains = call.passage.trains or bool(tensors) or self.trains()
            anchor, *gated = gate(call, anchor, *tensors)
            return list(gated)

        args, kwargs = gate_tensors(through, args, kwargs)
        shown = [
            narrow(anchor, piece, view) if piece.parameter.requires_grad else view
            for piece, view in zip(self.pieces, call.weights.views, strict=True)
        ]
        return args, kwargs, shown

    def _enter_again(self) -> Entry:
        """Before a forward that activation checkpointing runs again inside the backward.

        Its graph is thrown away, so nothing is gated; but what it saves is read by the backward, so the slot is held
        until that is over.
        """
        if torch.is_grad_enabled() and self.root.called_without_grad(self):
            raise RuntimeError(
                f"unit '{self.name}' is run again by reentrant activation checkpointing, which hides its gradients "
                "from the engine; pass use_reentrant=False to torch.utils.checkpoint.checkpoint "
                "(gradient_checkpointing_kwargs={'use_reentrant': False} in Hugging Face models)"
            )
        self.recomputed = _graph_task()
        weights = self.acquire()
        self.show(self.leaves(weights))
        return Entry(None, weights, None, self.forward_span.start(), again=True)

    def trains(self) -> bool:
        """Whether one of the parameters that its modules use requires a gradient."""
        return any(piece.parameter.requires_grad for piece in (*self.pieces, *self.small))

    def leaves(self, weights: Weights) -> Sequence[Tensor]:
        """The weights as leaves of a graph of their own."""
        for piece, leaf in zip(self.pieces, weights.leaves, strict=True):
            if leaf.requires_grad is not piece.parameter.requires_grad:
                leaf.requires_grad_(piece.parameter.requires_grad)
        return weights.leaves

    def collect(self, weights: Weights) -> None:
        """Take over gradients from the leaves, where ops that reentrant checkpointing ran again have left them."""
        for piece, leaf in zip(self.pieces, weights.leaves, strict=True):
            if leaf.grad is not None:
                piece.deposit(leaf.grad)
                leaf.grad = None

    def show(self, views: Sequence[Tensor]) -> None:
        """Let the owner modules see whole weights."""
        self.shown.append(views)
        for piece, view in zip(self.pieces, views, strict=True):
            piece.show(view)

    def hide(self) -> None:
        """Let the owner modules see what they saw before."""
        self.shown.pop()
        if self.shown:
            for piece, view in zip(self.pieces, self.shown[-1], strict=True):
                piece.show(view)
        else:
            for piece in self.pieces:
                piece.hide()

    def show_held(self) -> None:
        """Let the owner modules see the weights that are held."""
        if self.held is not None and not self._shows_held:
            self.hold()  # anew, where the weights have changed since
            self._shows_held = True
            self.root.journal.wait(self.held.slot.ready)
            self.show(self.leaves(self.held))
            self.root.small.refresh()
            self.root.wait_for_copies()
            for piece in self.small:
                piece.show_copy()

    def let_hold_go(self) -> None:
        """Release what ``hold`` has taken."""
        super().let_hold_go()
        if self._shows_held:
            self._shows_held = False
            self.hide()
            for piece in self.small if self.root.passage is None else ():  # a forward shows them until its own end
                piece.hide()

    # Gradients ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Find room for the gradients that the backward under way is about to write, if it is to write any."""
        root = self.root
        if self._claimed or not root.whole_backward():
            return
        space = self.gradient_space
        if space is None:
            self.training = tuple(flat for flat in self.flats if flat.trainable)
            if not self.training:
                return
            for flat in self.training:
                root.reductions.train(flat)
            space = self.gradient_space = self._room()
            space.slot.owner = self
            root.journal.wait(space.slot.ready)  # the reduce that reads the slot has left it
            for piece in self.pieces:
                piece.written = False
        for piece, target in zip((p for flat in space.flats for p in flat.pieces), space.targets, strict=True):
            piece.target = target
        self._claimed = True

    def rest(self) -> None:
        """Write no more gradients before the next claim; those written remain."""
        self._claimed = False
        for piece in self.pieces:
            piece.target = None

    def _room(self) -> GradientSpace:
        root = self.root
        if not self.draft.settings.synchronises and not self.alone and not self.accumulates:
            if self.carried is None or self.carried.flats != self.training:
                self.carried = self._gradient_spill()
                root.reductions.tell_carried(root.units)
            return self.carried
        home = self._gradient_home()
        if home.slot.owner is None:
            return home
        root.counters.spills += 1  # the slot is an enclosing unit's, or that of one whose gates have not all run
        return self._gradient_spill()

    def _gradient_home(self) -> GradientSpace:
        if self.gradient_home is None or self.gradient_home.flats != self.training:
            slot = self.root.reductions.home(self)
            self.gradient_home = GradientSpace(slot, self.training)
        return self.gradient_home

    def _gradient_spill(self) -> GradientSpace:
        root = self.root
        slot = Slot(gradient_bytes(self.training), root.device, root.reductions.lane)
        return GradientSpace(slot, self.training)

    @property
    def accumulates(self) -> bool:
        """Whether gradients that are not to be sent yet can be kept in what their messages have still to say."""
        return all(self.root.reductions.accumulates(flat) for flat in self.flats if flat.trainable)

    @property
    def pends(self) -> bool:
        """Whether gradients are kept there."""
        return any(self.root.reductions.pends(flat) for flat in self.flats)

    def conclude(self) -> None:
        """All gradients of a backward are written: send them, or keep them for a later backward that does."""
        if self.draft.settings.synchronises:
            self.reduce()
        elif self.gradient_space is not None and self.gradient_space is not self.carried and self.accumulates:
            space, used = self._finished(self.gradient_space)
            self.root.reductions.keep(space, used)

    def reduce(self) -> None:
        """Send the gradients; they land in the shard when the next reduce is issued, or at the end of the backward."""
        self.claim()
        space = self.gradient_space
        if space is None:
            return
        payload = sum(map(self.root.reductions.payload, space.flats, space.wholes))
        tuner = self.root.autotuner
        if tuner is not None:
            tuner.before_reduce(self)
        with self.reduce_span.of(payload):
            self.root.reductions.send(self.reduce_note, *self._finished(space))
        if tuner is not None:
            tuner.after_reduce()

    def _finished(self, space: GradientSpace) -> tuple[GradientSpace, list[list[bool]]]:
        """The gradients in ``space``, zero where there are none; of each flat, which pieces this rank has written."""
        for piece in (piece for flat in space.flats for piece in flat.pieces):
            if not piece.written:
                assert piece.target is not None
                piece.target.zero_()  # the slot holds another unit's gradient there
        for gap in space.gaps:
            gap.zero_()
        used = [[piece.written for piece in flat.pieces] for flat in space.flats]
        self.rest()
        self.gradient_space = None
        return space, used

    def forget(self) -> None:
        """Drop what an interrupted forward or backward left behind."""
        self._kept = 0
        if self.shown:
            del self.shown[1:]
            self.hide()
        self.held, self._shows_held = None, False
        if self.gradient_space is not None:
            self.gradient_space.slot.owner = None
            self.gradient_space = None
        self.rest()


class Entry(NamedTuple):
    """One forward under way."""

    opened: Passage | None
    """The pass that this forward is the whole of: no forward of the root module is around it."""
    weights: Weights
    call: Call | None
    span: Handle | None
    again: bool = False
    """Whether activation checkpointing runs it inside a backward."""
    borrowed: Entry | None = None
    """The root's unit, entered for a parameter tied to it."""


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
