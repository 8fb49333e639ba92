"""One forward of the root module and the backwards through it; within it, each call of a unit."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from yafsdp_cc.engine.graph import gate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from yafsdp_cc.engine.flat import Piece
    from yafsdp_cc.engine.root import Root
    from yafsdp_cc.engine.unit import Unit
    from yafsdp_cc.engine.windows import Weights
    from yafsdp_cc.profiling.spans import Handle

_graph_task = torch._C._current_graph_task_id
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Passage:
    """The root gate of one forward, and the calls of units behind it.

    The gate is made on the first use of its anchor. Its backward is the last of the passage: when it returns, every
    gradient is final.

    What a backward must do for its calls is settled by the forward, as the calls in reverse, inner ones within outer:

        forward    a ( b ) c           backward    begin c, end c, begin a, begin b, end b, end a

    An output or a gate that the backward reaches moves it on to that point of the sequence. So a rank on which some
    of a unit's parameters go unused, and perhaps the whole of it, issues the same collectives in the same order as
    the others.
    """

    def __init__(self, root: Root) -> None:
        self.root = root
        self.calls: list[Call] = []
        self.ungated: set[Unit] = set()
        """Units that ran without grad mode, and so have no gate."""
        self.trained: list[Piece] = []
        """Parameters of the small group behind the gate."""
        self.trains = False
        """Whether something that requires a gradient has come up, as far as every rank can tell."""
        self.pending: dict[Unit, int] = {}
        """Calls of each unit that the backward has not ended."""
        self._steps: list[tuple[Call, bool]] = []
        self._next = 0
        self._anchor: Tensor | None = None
        self.stream = root.gather_lane.stream()
        """Where the gates and the views of weights are made, and so where all of the engine's backward runs."""
        self.gated = False
        """Whether a backward may come."""
        self.finished = False
        """Whether one has come, gone through all of it, and left no graph for another one."""

    def anchor(self) -> Tensor:
        """What every unit's gate hangs on, so that the root gate comes after all of them."""
        if self._anchor is None:
            self.gate([])
        assert self._anchor is not None
        return self._anchor

    def gate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Make the root gate over ``tensors`` and the small group's parameters; the gated tensors."""
        self.gated = True
        self.trains = bool(tensors)
        self.trained, leaves = self.root.small.trained()
        self.root.small.show()
        self._anchor, *gated = gate(self, self.root.leaf, *tensors, *leaves)
        for piece, view in zip(self.trained, gated[len(tensors) :], strict=True):
            piece.show(view)
        return list(gated[: len(tensors)])

    def close(self) -> None:
        """The forward is over; the anchor would keep its own graph alive."""
        self._anchor = None

    def advance(self, call: Call, ends: bool) -> None:
        """Do all that comes up to the begin or the end of ``call``."""
        if not self._steps:
            self._settle()
        place = call.place[ends]
        while self._next <= place:
            self._step()

    def before_backward(self, _: Tensor | None = None) -> None:
        """The backward has come to this passage: what it runs again sees the small group as leaves."""
        self.root.arrive(self)

    def after_backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        root = self.root
        root.arrive(self)
        root.end_calls(self, -1)
        inputs = len(gradients) - len(self.trained)
        if root.whole_backward():
            if not self._steps:
                self._settle()
            while self._next < len(self._steps):
                self._step()
            root.finish(self, gradients[inputs:])
            self.finished = not _keeps_graph()
            self._settle()
        return (*gradients[:inputs], *(None for _ in self.trained))

    def upcoming(self) -> list[Unit]:
        """Units of the calls that the backward begins next."""
        units: list[Unit] = []
        for call, ends in self._steps[self._next : self._next + 4]:
            if not ends and call.unit.read_in_backward:
                units.append(call.unit)
        return units[:2]

    def _settle(self) -> None:
        """Put the sequence together, from its start."""
        self._steps, self._next = [], 0
        self.pending = {}
        open_calls: list[Call] = []
        expected = [call for call in self.calls if call.expected]
        for call in sorted(expected, key=lambda call: (-max(call.last, call.index), call.index)):
            while open_calls and not open_calls[-1].encloses(call):
                self._place(open_calls.pop(), True)
            open_calls.append(call)
            self.pending[call.unit] = self.pending.get(call.unit, 0) + 1
            self._place(call, False)
        while open_calls:
            self._place(open_calls.pop(), True)

    def _place(self, call: Call, ends: bool) -> None:
        call.place[ends] = len(self._steps)
        self._steps.append((call, ends))

    def _step(self) -> None:
        call, ends = self._steps[self._next]
        self._next += 1
        if ends:
            call.end()
        else:
            call.begin()


class Call:
    """One forward of a unit whose backward may come."""

    def __init__(self, unit: Unit, weights: Weights, passage: Passage) -> None:
        self.unit = unit
        self.weights = weights
        self._passage = weakref.ref(passage)  # whose graph, in the end, holds this call
        self.index = self.last = len(passage.calls)
        """This call's place among those of the pass, and that of the last call within it."""
        self.place = [-1, -1]
        """Where in the sequence of the backward it begins and ends."""
        self.expected = False
        """Whether the backward is to come here on every rank that trains the same parameters."""
        self._fills = weights.slot.fills
        self._stamp = unit.stamp()
        # Under hooks for saved tensors, which activation checkpointing is made of, what the backward reads is made
        # again when it is needed, and not what this forward has seen.
        self._packed = _saved_tensor_hooks(False) is not None
        self._begun = False
        self._holds = False
        self._task = -1
        self._span: Handle | None = None
        passage.calls.append(self)

    @property
    def passage(self) -> Passage:
        passage = self._passage()
        assert passage is not None
        return passage

    def encloses(self, other: Call) -> bool:
        """Whether ``other`` was made within this call's forward."""
        return self.index < other.index <= self.last

    def leave(self) -> None:
        """The forward of this call is over."""
        self.last = len(self.passage.calls) - 1

    def before_backward(self, passage: Passage, _: Tensor | None = None) -> None:
        """A gradient has reached an output."""
        task = _graph_task()
        unit, root = self.unit, self.unit.root
        if task == self._task:
            self._join()
            return
        self._task = task
        root.arrive(passage)
        root.end_calls(passage, self.last)
        if unit.stamp() != self._stamp:
            raise RuntimeError(
                f"parameters of unit '{unit.name}' were changed between this forward and its backward "
                "(an optimizer step in between?); run the backward first, or the forward again"
            )
        if self.expected and root.whole_backward():
            passage.advance(self, ends=False)
            self._join()
        else:
            root.begin_call(self)
            self.begin()

    def _join(self) -> None:
        """Let the stream of this output wait too: another node has begun the call, perhaps on another stream."""
        if self._holds:
            self.unit.root.journal.wait(self.weights.slot.ready)

    def after_backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """All of this call's gradients are written."""
        passage, root = self.passage, self.unit.root
        root.arrive(passage)
        root.end_calls(passage, self.index)
        if not self._begun:  # no output told: the gradient came in by another way
            self._check_untouched()
        if self.expected and root.whole_backward():
            passage.advance(self, ends=True)
        elif self._begun:
            root.active.pop()
            self.end()
        return gradients

    def begin(self) -> None:
        """Put the weights back in place, and make room for gradients."""
        unit, root = self.unit, self.unit.root
        self._begun = True
        if not self._packed:  # not within a checkpoint, so those that the backward has come to are over
            for other in root.units:
                other.let_go()
        if unit.read_in_backward and not (self._packed and unit.recomputed == _graph_task()):
            self._holds = unit.regain(self.weights, needed=not self._packed)
        unit.show(unit.leaves(self.weights))
        if root.whole_backward():
            unit.claim()
            for upcoming in unit.backward_prefetch or self.passage.upcoming():
                upcoming.prefetch()
        self._span = unit.backward_span.start()

    def end(self) -> None:
        """The backward is through with this call."""
        unit, root = self.unit, self.unit.root
        unit.backward_span.end(self._span)
        unit.hide()
        unit.collect(self.weights)
        if self._holds:
            self.weights.slot.release(root.gather_lane)
        self._begun = self._holds = False
        self._task = -1
        self._span = None
        if not (self.expected and root.whole_backward()):
            return
        passage = self.passage
        passage.pending[unit] -= 1
        last = passage.pending[unit] == 0
        if last:
            unit.let_go()
        for upcoming in unit.backward_prefetch or passage.upcoming():
            upcoming.prefetch()
        if last:
            unit.conclude()

    def _check_untouched(self) -> None:
        slot = self.weights.slot
        if self.unit.read_in_backward and (slot.fills != self._fills or not self.unit.holds(slot)):
            raise RuntimeError(
                f"a gradient reached the inside of unit '{self.unit.name}' without passing its output, when its "
                "weights were gone: its forward hands out tensors in an object that cannot be looked into, or keeps "
                "them aside. Return them in a tuple, list, dict or dataclass, or in a class registered with pytree"
            )
