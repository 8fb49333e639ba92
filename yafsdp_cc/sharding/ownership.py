"""Decides which rank owns which matrix, so that each lies whole on one rank (``shard(ownership="matrix")``).

Optimizers such as Muon and Shampoo update a matrix as a whole. Where one rank owns all of it, that rank's reduced
gradient is all that the update needs, and its weights reach the other ranks by the usual all-gather. The matrices of
all units are assigned together, so that all ranks have an equal amount of work.

A stack of matrices, such as the weights of experts, is divided between ranks at the borders of its matrices. A stack is
one piece of its unit's buffer, so ranks get consecutive parts of that unit, in module order:

    experts.up [4, m, n]   experts.down [4, n, m]
    rank 0 | 0 0 0         1 1 1 1 | ...            three matrices to rank 0, the next five to rank 1

Where weights are gathered twice per step (ZeRO-3) and a unit has fewer matrices than ranks, a few ranks would send all
of its weights. Such a unit is sharded evenly, and its matrices are assembled on their owners for the update
(``optim.matrix``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from yafsdp_cc.sharding.units import present

if TYPE_CHECKING:
    from yafsdp_cc.sharding.units import Division, OwnedParameter

Ownership = Literal["flat", "matrix"] | Collection[str]
"""Argument ``ownership`` of ``shard``: ``"flat"``, ``"matrix"``, or ``*`` patterns of parameter names."""

FLAT, MATRIX = "flat", "matrix"
_DIMENSIONS = (2, 3)
"""Number of dimensions of a matrix, and of a stack of matrices such as the weights of experts."""


Parts: TypeAlias = "dict[OwnedParameter, int]"
"""A unit's parameters that consist of matrices, each with the number of equal parts that it may be divided into."""


class MatrixOwners(NamedTuple):
    """The ranks that own the matrices of a parameter."""

    ranks: tuple[int, ...]
    """Rank that owns each equal part of the parameter, ascending. A matrix is one part; a part of a stack has one
    matrix or several."""
    is_assembled: bool = False
    """Whether the parameter is sharded evenly, and its owners assemble it for updates; else they hold their parts."""


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """Return the floating-point operations of one Newton-Schulz iteration, the quintic one of Muon.

    For X [m, n], m ≤ n: X Xᵀ and its product with X take 2m²n each, the square of X Xᵀ takes 2m³.

    Args:
        shape: [..., m, n], rows and columns in either order; for a stack, the operations of all its matrices are added.
    """
    *stack, rows, columns = shape
    least, most = sorted((rows, columns))
    return math.prod(stack) * (4 * least * least * most + 2 * least**3)


def assign_owners(
    division: Division,
    ownership: Ownership,
    world: int,
    *,
    alignment: int = 1,
    keeps_unsharded: bool = True,
    work: Counter[int] | None = None,
) -> dict[OwnedParameter, MatrixOwners]:
    """Return the ranks that own matrices, for each parameter that consists of matrices.

    Args:
        division: the model's units and replicated parameters. Replicated matrices, which every rank has whole, are
            returned with rank 0.
        ownership: which parameters have owners. "flat": none. "matrix": those of two or three dimensions in repeated
            blocks, embeddings aside. Patterns: those whose full names fit.
        world: number of ranks of a shard.
        alignment: number of elements at multiples of which shards begin.
        keeps_unsharded: whether weights are gathered once per step. If not, units with fewer matrices than ranks are
            sharded evenly.
        work: floating-point operations per Newton-Schulz iteration of each rank so far; new ones are added.

    Raises:
        ValueError: ``ownership`` is a text other than "flat" and "matrix", or a pattern fits nothing or a non-matrix.
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
    owners = dict.fromkeys((each for each in division.replicated if each in chosen), MatrixOwners((0,)))
    parts = [{each: _parts(each, alignment) for each in unit.parameters if each in chosen} for unit in division.units]
    given: Counter[int] = Counter() if work is None else work
    return owners | _balanced([each for each in parts if each], world, keeps_unsharded, given)


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
        for each in division.parameters
        if each.parameter.ndim in _DIMENSIONS and all(module in inside for module, _ in each.sites)
    }
    if not chosen:
        raise ValueError(
            'ownership="matrix" takes the matrices of the repeated blocks, in fully_shard those of its module, and '
            'there is none beside embeddings: name parameters, as in ownership=["layers.*.weight"], or blocks by '
            "shard(..., units=...), or leave it out"
        )
    return chosen


def _named(division: Division, patterns: Collection[str]) -> set[OwnedParameter]:
    chosen: set[OwnedParameter] = set()
    for pattern in patterns:
        found = [each for each in division.parameters if fnmatchcase(each.name, pattern)]
        if not found:
            near = get_close_matches(pattern, [each.name for each in division.parameters], n=1)
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


def _balanced(
    units: Sequence[Parts], world: int, keeps_unsharded: bool, work: Counter[int]
) -> dict[OwnedParameter, MatrixOwners]:
    """Assign each matrix, those with most operations first, to the rank with the least work so far.

    Of ranks with equal work the one with the fewest elements of the unit gets the matrix: a unit's sum takes as long as
    its largest part. Units with divided stacks come last, and even out what other units have left uneven.
    """
    elements: Counter[int] = Counter()
    singles: list[tuple[Counter[int], OwnedParameter, int]] = []
    ranks: dict[OwnedParameter, list[int]] = defaultdict(list)
    assembled: set[OwnedParameter] = set()
    divided: list[Parts] = []
    for unit in units:
        counts = unit
        if not keeps_unsharded and _falls_short_of(world, unit):
            assembled |= unit.keys()
            counts = {each: math.prod(each.parameter.shape[:-2]) for each in unit}
        elif max(unit.values()) > 1:
            divided.append(unit)
            continue
        of_unit: Counter[int] = Counter()
        singles += [(of_unit, each, count) for each, count in counts.items() for _ in range(count)]
    for of_unit, each, count in sorted(singles, key=lambda single: -(_flops(single[1]) // single[2])):
        rank = min(range(world), key=lambda rank: (work[rank], of_unit[rank], elements[rank], rank))
        ranks[each].append(rank)
        work[rank] += _flops(each) // count
        for counted in (of_unit, elements):
            counted[rank] += each.parameter.numel() // count
    owners = {each: MatrixOwners(tuple(sorted(found)), each in assembled) for each, found in ranks.items()}
    for unit in divided:
        owners |= _in_order(unit, work, world)
    return owners


def _falls_short_of(world: int, unit: Parts) -> bool:
    """Return whether a unit has fewer matrices than ranks, none of them divided by tensor parallelism."""
    matrices = sum(math.prod(each.parameter.shape[:-2]) for each in unit)
    return matrices < world and all(present(each.parameter) is each.parameter for each in unit)


def _in_order(unit: Parts, work: Counter[int], world: int) -> dict[OwnedParameter, MatrixOwners]:
    """Assign the parts of a unit to ranks in order, to each in proportion to what its work so far lacks of an equal
    share of all work."""
    of_each = {each: _flops(each) // parts for each, parts in unit.items()}
    if not any(of_each.values()):  # all parameters are frozen: assign equally many elements
        of_each = {each: each.parameter.numel() // parts for each, parts in unit.items()}
    total = sum(of_each[each] * parts for each, parts in unit.items())
    share = (sum(work.values()) + total) / world
    lacking = [max(share - work[rank], 0.0) for rank in range(world)]
    ends = [total * end / (sum(lacking) or 1) for end in accumulate(lacking)]
    owners, done = {}, 0
    for each, parts in unit.items():
        ranks = []
        for _ in range(parts):
            rank = min(bisect_right(ends, done + of_each[each] / 2), world - 1)
            ranks.append(rank)
            done += of_each[each]
            work[rank] += _flops(each) // parts
        owners[each] = MatrixOwners(tuple(ranks))
    return owners


def _parts(owned: OwnedParameter, alignment: int) -> int:
    """Return into how many equal parts a parameter may be divided at most, at aligned borders of its matrices.

    A parameter whose rows or columns tensor parallelism has divided stays in one part: all tensor-parallel ranks
    must have the same owner for it.
    """
    shape = _updated_shape(owned)
    if len(shape) < 3 or math.prod(shape) != present(owned.parameter).numel():
        return 1
    count, numel = shape[0], math.prod(shape[1:])
    aligned = (each for each in range(1, count + 1) if count % each == 0 and count // each * numel % alignment == 0)
    return max(aligned, default=1)


def _flops(owned: OwnedParameter) -> int:
    return newton_schulz_flops(_updated_shape(owned)) if owned.parameter.requires_grad else 0


def _updated_shape(owned: OwnedParameter) -> torch.Size:
    """Return the shape of the tensor that a shard group updates, the same on all tensor-parallel ranks.

    The tensor is the whole parameter, except where tensor parallelism divides a stack evenly, but no matrix: then it is
    this rank's part of the stack.
    """
    parameter = owned.parameter
    if isinstance(parameter, DTensor):
        cuts = [(dim, each.dim) for dim, each in enumerate(parameter.placements) if isinstance(each, Shard)]
        parts = math.prod(parameter.device_mesh.size(dim) for dim, _ in cuts)
        local = present(parameter).shape
        is_stack = all(cut % parameter.ndim < parameter.ndim - 2 for _, cut in cuts)
        if is_stack and math.prod(local) * parts == parameter.numel():
            return local
    return parameter.shape
