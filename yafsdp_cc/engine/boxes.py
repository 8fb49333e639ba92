"""A flat row-major range of an N-D tensor as boxes, the form in which checkpoints address parts of tensors.

Elements 5 to 14 of a ``[4, 4]`` tensor are three boxes::

    . . . .
    . a a a      a  offsets (1, 1), sizes (1, 3)
    b b b b      b  offsets (2, 0), sizes (1, 4)
    c c . .      c  offsets (3, 0), sizes (1, 2)

Pure integers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Box(NamedTuple):
    """A block of an N-D tensor whose elements are consecutive in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The row-major range ``start:stop`` of a tensor of ``shape``, in order, as at most ``2 * len(shape) - 1`` boxes.

    The elements of the boxes, one box after another, are the elements of the range. An empty range has no boxes.

    Raises:
        ValueError: the range does not lie within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start}:{stop} do not lie within a tensor of shape {list(shape)}")
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found: list[Box] = []
    while start < stop:
        offsets = tuple(start // stride % size for size, stride in zip(shape, strides, strict=True))
        # The outermost dimension in which a whole row begins here and still fits: rows of it, as many as fit.
        dim = next(
            (d for d, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop), len(shape)
        )
        rows = tuple(
            min((stop - start) // strides[d], shape[d] - offsets[d]) for d in range(dim, min(dim + 1, len(shape)))
        )
        found.append(Box(offsets, (1,) * dim + rows + tuple(shape[dim + 1 :])))
        start += found[-1].numel
    return found
