"""What a step changes: each member is declared once, in the class that has it, and resets and rollbacks follow.

``FSDPState.reset`` drops what an interrupted forward or backward has left, ``FSDPState.is_idle`` looks for gradients on
their way, and a batch that all ranks skip is rolled back to copies of the members: all three go by the declarations.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self


@dataclass(frozen=True)
class _Member:
    default: Any
    """The value at first and after a drop; a class or function is called for it."""
    is_dropped: bool = True
    """Whether a reset drops it."""
    is_saved: bool = True
    """Whether a batch that is skipped has it back."""

    def make(self) -> Any:
        return self.default() if callable(self.default) else self.default


def transient(default: Any) -> Any:
    """Declare what belongs to a forward or backward under way, and is gone between two of them."""
    return _Member(default, is_saved=False)


def unreduced(default: Any) -> Any:
    """Declare gradients on their way, which may wait for a later backward; false where there are none."""
    return _Member(default)


def history(default: Any) -> Any:
    """Declare what was learnt from earlier steps, the same on all ranks."""
    return _Member(default, is_dropped=False)


class StepState:
    """Base of classes with members that a step changes: class attributes that these three functions declare."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        for name, member in _members_of(cls):
            setattr(made, name, member.make())
        return made

    def has_unreduced(self) -> bool:
        """Return whether a gradient is on its way."""
        members = _members_of(type(self))
        return any(getattr(self, name) for name, each in members if each.is_dropped and each.is_saved)

    def drop_members(self) -> None:
        """Give all members but the history their first values."""
        for name, member in _members_of(type(self)):
            if member.is_dropped:
                setattr(self, name, member.make())

    def save_members(self) -> Callable[[], None]:
        """Return a function that gives gradients on their way and the history the values they have now."""
        saved = [(name, _copied(getattr(self, name))) for name, each in _members_of(type(self)) if each.is_saved]

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


def _copied(value: Any) -> Any:
    return copy.copy(value) if hasattr(value, "__len__") and not isinstance(value, (str, tuple)) else value
