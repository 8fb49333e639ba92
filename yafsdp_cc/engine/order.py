"""The order in which units run: recorded, and used to gather ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yafsdp_cc.engine.unit import Unit


class Order:
    """Gathers the unit that followed in the last forward; before there was one, the next in the model.

    A unit that does not come where it came last costs a prefetch that is lost, nothing more. Every rank runs the same
    forwards, so every rank prefetches alike.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._expected: Sequence[Unit] = units
        self._cursor = 0
        self._passed: list[Unit] = []

    def begin(self) -> None:
        """A forward of the root module begins."""
        self._cursor = 0
        self._passed = []
        for unit in self._expected[:2]:
            unit.prefetch()

    def passed(self, unit: Unit) -> None:
        """``unit`` is about to run."""
        self._passed.append(unit)
        for named in unit.forward_prefetch:
            named.prefetch()
        expected, cursor = self._expected, self._cursor
        if cursor >= len(expected) or expected[cursor] is not unit:
            try:
                cursor = expected.index(unit, cursor)
            except ValueError:
                return
        self._cursor = cursor + 1
        if self._cursor < len(expected) and not unit.forward_prefetch:
            expected[self._cursor].prefetch()

    def end(self) -> None:
        """The forward of the root module is over."""
        self._expected = self._passed
