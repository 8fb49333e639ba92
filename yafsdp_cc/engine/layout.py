"""Where each parameter of a unit lies in one flat buffer, and which range of it each rank owns. Pure integers.

    pieces   | w1        |·| w2               |·| w3     |····|      · padding
    chunks   | rank 0          | rank 1          | rank 2     |      world × chunk elements

Every piece and every chunk starts at a multiple of ``ALIGNMENT`` elements, so views are aligned for vector loads
in any dtype, and a block of a codec lies in one chunk and in one piece. A piece may straddle chunks; a chunk may hold
none of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT = 256
"""Elements: a block of a codec, which so belongs to one piece."""

VECTOR = 32
"""Elements: 128 bytes in fp32, 64 bytes in bf16; what is not encoded needs no more."""


def align(numel: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple of ``multiple`` that is at least ``numel``."""
    return -(-numel // multiple) * multiple


class Extent(NamedTuple):
    """A parameter's place in the flat buffer, in elements."""

    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """Extents of a unit's parameters in a buffer of ``world`` equal chunks."""

    extents: tuple[Extent, ...]
    world: int
    chunk: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], world: int, alignment: int = ALIGNMENT) -> Layout:
        """Lay out parameters of ``shapes`` in the order given, for ``world`` ranks."""
        extents: list[Extent] = []
        offset = 0
        for shape in shapes:
            extent = Extent(tuple(shape), offset, math.prod(shape))
            extents.append(extent)
            offset = align(extent.end, alignment)
        return cls(tuple(extents), world, align(-(-offset // world), alignment))

    @cached_property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.chunk * self.world

    @property
    def places(self) -> list[tuple[int, tuple[int, ...]]]:
        """Where each parameter begins, and its shape."""
        return [(extent.offset, extent.shape) for extent in self.extents]

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the buffer that belong to no parameter."""
        starts = [*(extent.offset for extent in self.extents), self.numel]
        ends = [0, *(extent.end for extent in self.extents)]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    def bounds(self, extent: Extent) -> tuple[int, ...]:
        """``world + 1`` offsets into the parameter: rank r owns its elements ``bounds[r]`` to ``bounds[r + 1]``."""
        return tuple(min(max(r * self.chunk - extent.offset, 0), extent.numel) for r in range(self.world + 1))

    def owned(self, extent: Extent, rank: int) -> tuple[int, int]:
        """The half-open range of ``rank``'s chunk that holds its part of the parameter (empty ranges are equal)."""
        first, last = rank * self.chunk, (rank + 1) * self.chunk
        start = min(max(extent.offset, first), last)
        return start - first, max(min(extent.end, last), start) - first
