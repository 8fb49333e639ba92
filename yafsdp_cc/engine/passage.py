"""One forward of the root module and the backwards through it; within it, each call of a unit."""

from __future__ import annotations

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
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Passage:
    """The root gate of one forward, and the calls of units behind it.

    The gate is made on the first use of its anchor. Its backward is the last of the passage: what no unit has sent
    by then is sent, the small group is reduced, and gradients are final when it returns.
    """

    def __init__(self, root: Root) -> None:
        self.root = root
        self.units: list[Unit] = []
        """The unit of each call behind the gate, in the order of the calls."""
        self.ungated: set[Unit] = set()
        """Units that ran without grad mode, and so have no gate."""
        self.pending: dict[Unit, int] = {}
        """Gates of each unit that the backward has not reached."""
        self.unsent: dict[Unit, None] = {}
        """Units whose gradients the backward has not sent."""
        self.trained: list[Piece] = []
        """Parameters of the small group behind the gate."""
        self._anchor: Tensor | None = None
        self.stream = root.gather_lane.stream()
        """Where the gates and the views of weights are made, and so where all of the engine's backward runs."""

    def anchor(self) -> Tensor:
        """What every unit's gate hangs on, so that the root gate comes after all of them."""
        if self._anchor is None:
            self.gate(())
        assert self._anchor is not None
        return self._anchor

    @property
    def gated(self) -> bool:
        """Whether a backward may come."""
        return self._anchor is not None

    def gate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Make the root gate over ``tensors`` and the small group's parameters; the gated tensors."""
        self.trained, leaves = self.root.small.trained()
        self.root.small.show()
        self._anchor, *gated = gate(self, self.root.leaf, *tensors, *leaves)
        for piece, view in zip(self.trained, gated[len(tensors) :], strict=True):
            piece.show(view)
        return list(gated[: len(tensors)])

    def expect(self) -> None:
        """Every call has its backward to come, as at the end of the forward."""
        self.pending.clear()
        for unit in self.units:
            self.pending[unit] = self.pending.get(unit, 0) + 1
        self.unsent = dict.fromkeys(self.pending)

    def before_backward(self, _: Tensor | None = None) -> None:
        """The backward has come to this passage: what it runs again sees the small group as leaves."""
        self.root.arrive(self)

    def after_backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        root = self.root
        root.arrive(self)
        root.end_calls(self, -1)
        inputs = len(gradients) - len(self.trained)
        if root.whole_backward():
            root.finish(self, gradients[inputs:])
            self.expect()
        return (*gradients[:inputs], *(None for _ in self.trained))


class Call:
    """One forward of a unit whose backward may come."""

    __slots__ = (
        "_holds", "_packed", "_span", "_stamp", "_task", "_told",
        "fills", "index", "last", "passage", "unit", "weights",
    )  # fmt: skip

    def __init__(self, unit: Unit, weights: Weights, passage: Passage) -> None:
        self.unit = unit
        self.weights = weights
        self.passage = passage
        self.fills = weights.slot.fills
        self.index = self.last = -1
        """This call's place among those of the pass, and that of the last call within it."""
        self._stamp = unit.stamp()
        # Under hooks for saved tensors, which activation checkpointing is made of, what the backward reads is made
        # again when it is needed, and not what this forward has seen.
        self._packed = _saved_tensor_hooks(False) is not None
        self._told = False
        self._holds = False
        self._task = -1
        self._span: Handle | None = None

    def enrol(self) -> None:
        """Count this call among those whose backward is awaited."""
        passage = self.passage
        self.index = len(passage.units)
        passage.units.append(self.unit)
        passage.pending[self.unit] = passage.pending.get(self.unit, 0) + 1
        passage.unsent[self.unit] = None

    def leave(self) -> None:
        """The forward of this call is over."""
        self.last = len(self.passage.units) - 1

    def before_backward(self, _: Tensor | None = None) -> None:
        """A gradient has reached an output: weights back in place, room for gradients."""
        task = _graph_task()
        unit, root = self.unit, self.unit.root
        if task == self._task:
            if self._holds:  # another output, made perhaps on another stream
                root.wait(self.weights.slot.ready)
            return
        root.arrive(self.passage)
        root.end_calls(self.passage, self.last)
        if unit.stamp() != self._stamp:
            raise RuntimeError(
                f"parameters of unit '{unit.name}' were changed between this forward and its backward "
                "(an optimizer step in between?); run the backward first, or the forward again"
            )
        self._task = task
        self._told = True
        root.begin_call(self)
        whole = root.whole_backward()
        if not self._packed:  # not within a checkpoint, so those that the backward has come to are over
            for other in root.units:
                other.let_go()
        if unit.read_in_backward and not (self._packed and unit.recomputed == task):
            self._holds = unit.regain(self.weights, hold=whole, needed=not self._packed)
        unit.show(unit.leaves(self.weights))
        if whole:
            unit.claim()
            self._prefetch(1)
        self._span = unit.backward_span.start()

    def after_backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """All of this call's gradients are written."""
        root = self.unit.root
        root.arrive(self.passage)
        root.end_calls(self.passage, self.index)
        if root.active and root.active[-1] is self:
            root.active.pop()
        else:  # no output told: the gradient came in by another way
            self._check_untouched()
        self.end()
        return gradients

    def end(self) -> None:
        """The backward is through with this call."""
        unit, root, passage = self.unit, self.unit.root, self.passage
        if self._told:
            unit.backward_span.end(self._span)
            unit.hide()
        unit.collect(self.weights)
        if self._holds:
            self.weights.slot.release(root.gather_lane)
        elif self._told:  # not held by torch.autograd.grad, which leaves the host's order of things to keep it
            self.weights.slot.passed(root.gather_lane)
        self._told = self._holds = False
        self._task = -1
        if not root.whole_backward():
            return
        passage.pending[unit] -= 1
        last = passage.pending[unit] <= 0
        if last:
            unit.let_go()
        self._prefetch(1)
        self._prefetch(2)
        if last and root.synchronises:
            passage.unsent.pop(unit, None)
            unit.reduce()

    def _prefetch(self, distance: int) -> None:
        if self.index >= distance:
            unit = self.passage.units[self.index - distance]
            if unit.read_in_backward:
                unit.prefetch()

    def _check_untouched(self) -> None:
        slot = self.weights.slot
        if self.unit.read_in_backward and (slot.fills != self.fills or not self.unit.holds(slot)):
            raise RuntimeError(
                f"a gradient reached the inside of unit '{self.unit.name}' without passing its output, when its "
                "weights were gone: its forward hands out tensors in an object that cannot be looked into, or keeps "
                "them aside. Return them in a tuple, list, dict or dataclass, or in a class registered with pytree"
            )
