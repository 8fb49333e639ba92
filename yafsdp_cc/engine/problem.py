"""What codecs are chosen for: a backward and its links, as all ranks have measured them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from yafsdp_cc.wire.choice import choose, steady

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yafsdp_cc.engine.unit import Unit
    from yafsdp_cc.wire.choice import Leg
    from yafsdp_cc.wire.pace import Pace

TOLERANCE = 0.01
"""Of a step: what the wire may show if that says more. A trial of fast links and a small message costs as much."""


class Problem(NamedTuple):
    """What is chosen for, the same on all ranks."""

    units: tuple[Unit, ...]
    legs: tuple[Leg, ...]
    step: float
    """Seconds from one optimizer step to the next."""
    link: Pace
    budget: float
    errors: Mapping[str, float] = MappingProxyType({})
    """What is left out for each element, by codec."""

    @property
    def tolerance(self) -> float:
        """Seconds that the wire may show if that says more."""
        return TOLERANCE * self.step

    def choose(self) -> list[int]:
        """The numbers of the legs' options, where nothing has been chosen before."""
        return choose(self.legs, self.tolerance, self.budget)

    def choose_from(self, now: Sequence[int]) -> list[int]:
        """The same, where options of ``now`` stay if they are nearly as good."""
        return steady(self.legs, now, self.tolerance, self.budget)
