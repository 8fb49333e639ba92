"""Which rank owns which matrix, where matrices are to lie whole on one rank each (``shard(ownership="matrix")``).

Optimizers such as Muon and Shampoo update a matrix as a whole. Where one rank owns all of it, that rank's reduced
gradient is all that the update needs, and its weights reach the others with the all-gather that there is anyway.
Matrices of all units are divided at once, so that every rank has as much to compute as any other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yafsdp_cc.plan.parameters import OwnedParameter
    from yafsdp_cc.plan.units import Division, UnitSpec

Ownership = Literal["flat", "matrix"] | Collection[str]
"""``"flat"``, ``"matrix"``, or ``*`` patterns over the names of parameters."""

FLAT, MATRIX = "flat", "matrix"
_DIMENSIONS = (2, 3)
"""Of a matrix, and of a stack of matrices such as the weights of experts."""


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """Return the floating-point operations of one Newton-Schulz iteration, the quintic one of Muon.

    For X [m, n], m ≤ n: X Xᵀ and its product with X take 2m²n each, the square of X Xᵀ takes 2m³.

    Args:
        shape: [..., m, n] in either order; of a stack, the sum over its matrices is returned.
    """
    *stack, rows, columns = shape
    least, most = sorted((rows, columns))
    return math.prod(stack) * (4 * least * least * most + 2 * least**3)


def assign_owners(division: Division, ownership: Ownership, world: int) -> dict[OwnedParameter, int]:
    """Return the rank that owns each matrix whole.

    Args:
        division: the model's units and replicated parameters. Small matrices of the latter, which every rank has whole
            anyway, are returned with rank 0.
        ownership: "flat": there are none. "matrix": parameters of two or three dimensions that the repeated blocks
            own, embeddings aside. Patterns: parameters whose full names fit.
        world: the ranks of a shard.

    Raises:
        ValueError: ``ownership`` is none of that, a pattern fits no parameter, or one that is no matrix.
    """
    if isinstance(ownership, str):
        if ownership not in (FLAT, MATRIX):
            raise ValueError(
                f'ownership takes "flat", "matrix" or a list of patterns of parameter names, got {ownership!r}: one '
                f"pattern is [{ownership!r}]"
            )
        chosen = _matrices_of_blocks(division) if ownership == MATRIX else set()
    else:
        chosen = _named(division, ownership)
    owners = dict.fromkeys((each for each in division.replicated if each in chosen), 0)
    return owners | _balanced(division.units, chosen, world)


def _matrices_of_blocks(division: Division) -> set[OwnedParameter]:
    inside = {
        module
        for unit in division.units
        if unit.role == "block"
        for each in unit.modules
        for module in each.modules()
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    chosen = {
        each
        for each in _all(division)
        if each.parameter.ndim in _DIMENSIONS and all(module in inside for module, _ in each.sites)
    }
    if not chosen:
        raise ValueError(
            'ownership="matrix" takes the matrices of the repeated blocks, and no block of this model has one: name '
            'parameters, as in ownership=["layers.*.weight"], or blocks by units=...'
        )
    return chosen


def _named(division: Division, patterns: Collection[str]) -> set[OwnedParameter]:
    chosen: set[OwnedParameter] = set()
    for pattern in patterns:
        found = [each for each in _all(division) if fnmatchcase(each.name, pattern)]
        if not found:
            near = get_close_matches(pattern, [each.name for each in _all(division)], n=1)
            raise ValueError(
                f"ownership names {pattern!r}, which fits no parameter of the model"
                + (f": did you mean {near[0]!r}?" if near else "")
            )
        for each in found:
            if each.parameter.ndim not in _DIMENSIONS:
                raise ValueError(
                    f"ownership names '{each.name}' by {pattern!r}, which has {each.parameter.ndim} dimensions, "
                    f"{list(each.parameter.shape)}: a matrix has two, and a stack of matrices three. Leave it out"
                )
        chosen.update(found)
    return chosen


def _all(division: Division) -> Iterator[OwnedParameter]:
    for unit in division.units:
        yield from unit.parameters
    yield from division.replicated


def _balanced(units: Sequence[UnitSpec], chosen: Collection[OwnedParameter], world: int) -> dict[OwnedParameter, int]:
    """Give each matrix, those that take longest first, to the rank that has least to compute by then.

    Among equals to the one that has least of the unit: a unit's sum takes as long as its largest part.
    """
    members = [(unit, each) for unit in units for each in unit.parameters if each in chosen]
    work: Counter[int] = Counter()
    elements: Counter[int] = Counter()
    of_unit: dict[UnitSpec, Counter[int]] = {unit: Counter() for unit in units}
    owners: dict[OwnedParameter, int] = {}
    for unit, each in sorted(members, key=lambda member: -_flops(member[1])):
        rank = min(range(world), key=lambda rank: (work[rank], of_unit[unit][rank], elements[rank], rank))
        owners[each] = rank
        work[rank] += _flops(each)
        for counted in (of_unit[unit], elements):
            counted[rank] += each.parameter.numel()
    return owners


def _flops(owned: OwnedParameter) -> int:
    # Of the whole matrix, where tensor parallelism has divided it: its ranks are to have the same owners.
    return newton_schulz_flops(owned.parameter.shape) if owned.parameter.requires_grad else 0
