"""``StepState``, the base of classes that declare which of their members a step changes.

``FSDPState.reset`` drops what an interrupted forward or backward has left, ``FSDPState.is_idle`` looks for gradients on
their way, and ``BatchRollback`` restores copies of the members: all three look at what members are declared.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class _Member:
    default: Any
    """The member's value in a new ``StepState`` and after ``drop_members``, or a function that makes this value."""
    is_dropped: bool = True
    """Whether ``drop_members`` sets the member to its default again."""
    is_saved: bool = True
    """Whether ``save_members`` copies the member."""

    def make(self) -> Any:
        return self.default() if callable(self.default) else self.default


def transient(default: Any) -> Any:
    """Declare a member for a forward or backward under way; outside of forwards and backwards it has its default."""
    return _Member(default, is_saved=False)


def unreduced(default: Any) -> Any:
    """Declare a member with gradients that wait for a reduce, perhaps a later backward's; it is false without any."""
    return _Member(default)


def history(default: Any) -> Any:
    """Declare a member that records earlier steps, the same on all ranks."""
    return _Member(default, is_dropped=False)


class StepState:
    """Base of classes that declare members by ``transient``, ``unreduced`` and ``history`` (class attributes)."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        for name, member in _members_of(cls):
            setattr(made, name, member.make())
        return made

    def has_unreduced(self) -> bool:
        """Return whether a member declared by ``unreduced`` has gradients that wait for a reduce."""
        members = _members_of(type(self))
        return any(getattr(self, name) for name, each in members if each.is_dropped and each.is_saved)

    def drop_members(self) -> None:
        """Set all members but those declared by ``history`` to their defaults."""
        for name, member in _members_of(type(self)):
            if member.is_dropped:
                setattr(self, name, member.make())

    def save_members(self) -> Callable[[], None]:
        """Return a function that sets ``unreduced`` and ``history`` members back to the values that they have now."""
        saved = [(name, shallow_copy(getattr(self, name))) for name, each in _members_of(type(self)) if each.is_saved]

        def restore() -> None:
            for name, value in saved:
                setattr(self, name, value)

        return restore


_known: dict[type, list[tuple[str, _Member]]] = {}
"""Results of ``_members_of``."""


def _members_of(kind: type) -> list[tuple[str, _Member]]:
    """Return the members that a class and its bases declare, with their names."""
    if kind not in _known:
        named = [pair for base in kind.__mro__ for pair in vars(base).items()]
        _known[kind] = [(name, each) for name, each in named if type(each) is _Member]
    return _known[kind]


def shallow_copy(value: Any) -> Any:
    """Return ``value``, or a copy if it is a mutable container."""
    return copy.copy(value) if isinstance(value, (dict, list, set, deque)) else value
