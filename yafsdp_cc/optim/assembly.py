"""Assembles matrices that are sharded evenly on the ranks that update them: one all-to-all to the owners, and one back.

    shards of W      | rank 0 | rank 1 | rank 2 |        gradients, each rank's range to the owner
                        └────────┼────────┘
    owner of W              | whole W |                  its update, by ranges to those who hold them

Matrices of several units share the two messages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from yafsdp_cc.engine.mesh import shard_group, shard_rank, to_mesh_device
from yafsdp_cc.engine.param import owner_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from yafsdp_cc.engine.layout import ShardSpec

_BUCKET = 1 << 26
"""Elements of all ranks that one exchange moves, unless two units have more."""


def buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters of one exchange: of one mesh and dtype, and of at least two units if there are two.

    Thus a unit causes one message more on average than without assembly, or less.
    """
    kinds: dict[Any, dict[Any, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for each in parameters:
        spec: ShardSpec = each.shard_spec  # type: ignore[attr-defined]
        owner = owner_of(spec)
        kinds[spec.mesh, each.dtype][None if owner is None else owner.flat].append(each)
    for kind in kinds.values():
        units = list(kind.values())
        while units:
            elements = accumulate(sum(each.shard_spec.numel for each in unit) for unit in units)  # type: ignore[attr-defined]
            count = max(bisect_right(list(elements), _BUCKET), 2)
            if len(units) == count + 1:
                count += 1
            yield [each for unit in units[:count] for each in unit]
            units = units[count:]


class MatrixExchange:
    """Moves matrices between the flat ranges of the shards and the ranges that ranks update."""

    def __init__(self, specs: Sequence[ShardSpec]) -> None:
        self._specs = specs
        self._mesh = specs[0].mesh
        self._group, self._rank = shard_group(self._mesh), shard_rank(self._mesh)

    def assemble(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the flat range of each matrix that this rank updates. A collective.

        Args:
            shards: this rank's shard of each matrix, flat, all of one dtype.
        """
        return self._move(shards, [_bounds_of(spec) for spec in self._specs])

    def distribute(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """Return the flat range of each matrix in this rank's shard. A collective.

        Args:
            updates: the range of each that this rank updates, flat, all of one dtype.
        """
        return self._move(updates, [_bounds_of(spec)[::-1] for spec in self._specs])

    def _move(self, tensors: Sequence[Tensor], bounds: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """Move ranges between ranks; ``bounds`` has for each matrix those before and those after."""
        ranks, own = range(self._group.size()), self._rank
        sent, received = [], []
        for peer in ranks:
            sent.append([_overlap(before, own, after, peer) for before, after in bounds])
            received.append([_overlap(before, peer, after, own) for before, after in bounds])
        starts = [(before[own], after[own]) for before, after in bounds]
        parts = [
            tensor[part.start - first : part.stop - first]
            for to_peer in sent
            for tensor, (first, _), part in zip(tensors, starts, to_peer, strict=True)
        ]
        message = to_mesh_device(torch.cat(parts), self._mesh)
        theirs, ours = ([message.itemsize * sum(map(len, each)) for each in of_peers] for of_peers in (received, sent))
        arrived = message.new_empty(sum(theirs) // message.itemsize)
        # send bytes, as gloo supports fewer dtypes
        dist.all_to_all_single(arrived.view(torch.uint8), message.view(torch.uint8), theirs, ours, group=self._group)
        found = [tensors[0].new_empty(after[own + 1] - after[own]) for _, after in bounds]
        offset = 0
        for from_peer in received:
            for tensor, (_, first), part in zip(found, starts, from_peer, strict=True):
                tensor[part.start - first : part.stop - first] = arrived[offset : offset + len(part)]
                offset += len(part)
        return found


def _bounds_of(spec: ShardSpec) -> tuple[Sequence[int], Sequence[int]]:
    """Return the bounds of a matrix's shards, and of the ranges that ranks update."""
    assert spec.bounds is not None
    assert spec.update_bounds is not None
    return spec.bounds, spec.update_bounds


def _overlap(bounds: Sequence[int], rank: int, others: Sequence[int], other: int) -> range:
    """Return the elements that ``rank``'s range of ``bounds`` and ``other``'s range of ``others`` share."""
    start = max(bounds[rank], others[other])
    return range(start, max(min(bounds[rank + 1], others[other + 1]), start))
