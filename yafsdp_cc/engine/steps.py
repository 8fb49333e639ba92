"""Which changes of a shard were optimizer steps: between which of its versions there was nothing else.

    version    3 ──step──► 4 ──step──► 5 ──load_state_dict──► 9 ──step──► 10
               └──────── steps ────────┘                      └── steps ──┘

Weights that were whole at version 3 are near those of 5, as steps are small, and their change can be said in few bits;
of those that were loaded since, it cannot. Every rank runs the same program, so all find the same.

Only ``torch.optim.Optimizer`` tells of its steps. What another one changes counts as anything else does.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yafsdp_cc.engine.flat import Flat

UNKNOWN, BEHIND = -2, -1
"""Versions that no shard has: of weights that came from elsewhere, and of those that were resumed a step behind."""


class Steps:
    """The longest run of optimizer steps that a shard has been through last."""

    def __init__(self) -> None:
        self._first = 0
        self._last = UNKNOWN

    def add(self, before: int, after: int) -> None:
        """A step has led from one version to another."""
        if not self._first <= before <= self._last:  # something else has come between; else a step within a step
            self._first = before
        self._last = after

    def resume(self, before: int, now: int) -> None:
        """Steps, of an earlier run, have led from ``BEHIND`` or the present version itself to the present one."""
        self._first, self._last = before, now

    @property
    def known(self) -> bool:
        """Whether there was any."""
        return self._last != UNKNOWN

    def lead(self, before: int, now: int) -> bool:
        """Whether steps alone have led from one version to the present one."""
        return self._first <= before and now == self._last


def watch(flats: Iterable[Flat]) -> None:
    """From now on, know the steps of these."""
    _listen()
    for flat in flats:
        if flat.steps is None:
            flat.steps = Steps()
            _watched.add(flat)


_watched: weakref.WeakSet[Flat] = weakref.WeakSet()


@cache
def _listen() -> None:
    """Hear of every ``step()`` of every torch optimizer of this process."""
    begun: dict[int, list[tuple[Flat, int]]] = {}

    def before(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        begun[id(optimizer)] = [(flat, flat.master._version) for flat in _watched]

    def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for flat, version in begun.pop(id(optimizer), ()):
            if flat.master._version != version and flat.steps is not None:
                flat.steps.add(version, flat.master._version)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
