"""How long a backward computes before each reduce, by the clock of the host or of the device."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from yafsdp_cc.engine.flat import Flat

SAMPLES = 8
"""Backwards that are looked back upon."""

Mark: TypeAlias = Any
"""A point in time: seconds, or an event on the caller's stream."""


class Stretch(NamedTuple):
    """What comes before one reduce: from the one before, or from the start of the backward."""

    flat: Flat
    """The first that is reduced."""
    begun: Mark
    ended: Mark
    waits: list[tuple[Mark, Mark]]
    """In between, for communication."""
    gathered: int
    """Bytes of weights that this rank has sent since."""


class Measured(NamedTuple):
    """The same in numbers."""

    flat: Flat
    seconds: float
    gathered: float


class Meter:
    """Notes when reduces are sent, while it ``watches``; on CUDA by events, so that nobody waits for anything."""

    def __init__(self, device: torch.device) -> None:
        self.watches = False
        self._device = device
        self._streams = device.type == "cuda"
        self._runs = False
        self._done: deque[list[Stretch]] = deque(maxlen=SAMPLES)
        self._now: list[Stretch] = []
        self._begun: Mark = None
        self._waits: list[tuple[Mark, Mark]] = []
        self._gathered = 0

    def begin(self, gathered: int) -> None:
        """A backward begins; ``gathered`` is the number of bytes of weights sent so far."""
        self._runs = self.watches
        if self._runs:
            self._now, self._gathered = [], gathered
            self.sent()

    def wait_begins(self) -> Mark:
        """The caller is about to wait for communication; give what this returns to ``wait_ends``."""
        return self._mark() if self._runs else None

    def wait_ends(self, begun: Mark) -> None:
        if begun is not None:
            self._waits.append((begun, self._mark()))

    def sends(self, flat: Flat, gathered: int) -> None:
        """A reduce is about to be sent."""
        if self._runs:
            self._now.append(Stretch(flat, self._begun, self._mark(), self._waits, gathered - self._gathered))
            self._gathered, self._waits = gathered, []

    def sent(self) -> None:
        """It has been: what was spent on it is nobody's compute."""
        if self._runs:
            self._begun, self._waits = self._mark(), []

    def end(self) -> None:
        """The backward has sent all it had."""
        if self._runs and self._now:
            self._done.append(self._now)
        self._runs, self._now = False, []

    def forget(self) -> None:
        """Begin anew."""
        self._done.clear()

    def measured(self) -> list[Measured]:
        """Medians over the latest backwards that were like the last one, in its order. Host and device are at rest."""
        if not self._done:
            return []
        order = [stretch.flat for stretch in self._done[-1]]
        alike = [each for each in self._done if [stretch.flat for stretch in each] == order]
        if len(alike) > 2:
            alike = alike[1:]  # the very first one has met cold caches
        return [
            Measured(
                same[-1].flat,
                median(max(self._seconds(stretch), 0.0) for stretch in same),
                median(stretch.gathered for stretch in same),
            )
            for same in zip(*alike, strict=True)
        ]

    def _seconds(self, stretch: Stretch) -> float:
        spans = [(stretch.begun, stretch.ended), *stretch.waits]
        lasted = [self._between(*span) for span in spans]
        return lasted[0] - sum(lasted[1:])

    def _between(self, begun: Mark, ended: Mark) -> float:
        return float(begun.elapsed_time(ended) / 1e3 if self._streams else ended - begun)

    def _mark(self) -> Mark:
        if not self._streams:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
