"""Some steps of the run under another choice of codecs, to learn what the model of a backward leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from yafsdp_cc.engine.ranks import groups
from yafsdp_cc.wire.choice import contention, fewest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from yafsdp_cc.engine.problem import Problem


class Comparison(NamedTuple):
    """Of the choice ``before``, under which a problem was measured, with an ``other``."""

    problem: Problem
    before: list[int]
    other: list[int]
    took: float
    """Seconds of a step before."""

    @classmethod
    def of(cls, problem: Problem, before: list[int], took: float) -> Comparison | None:
        """With as few bytes as there can be, or if those are sent now, with what the problem asks for.

        None, where nothing shows, or there is no other.
        """
        asked = problem.choose()
        others = (fewest(problem.legs, problem.budget), asked) if any(asked) else ()
        other = next((each for each in others if each != before), None)
        return None if other is None else cls(problem, before, other, took)

    @torch.no_grad()
    def contention(self, took: float, mesh: DeviceMesh, device: torch.device) -> float:
        """Seconds that each byte takes from the computation beside it, if a step of the other ``took`` so long.

        A collective: all go by the slowest rank.
        """
        agreed = torch.tensor([self.took, took], dtype=torch.float64, device=device)
        for group in groups(mesh):
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        before, other = agreed.tolist()
        return contention(self.problem.legs, self.before, self.other, before - other)
