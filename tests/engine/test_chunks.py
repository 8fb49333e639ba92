import itertools
import math
import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from yafsdp_cc.tensor.chunks import chunk_metadata


def chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def elements(shape, found):
    """Row-major indices of the elements of chunks, one chunk after another."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for each in found:
        for index in itertools.product(*(range(size) for size in each.sizes)):
            yield sum((o + i) * stride for o, i, stride in zip(each.offsets, index, strides, strict=True))


def test_the_drawn_example():
    assert chunk_metadata((4, 4), 5, 14) == [chunk((1, 1), (1, 3)), chunk((2, 0), (1, 4)), chunk((3, 0), (1, 2))]


def test_every_range_of_many_shapes():
    rng = random.Random(0)
    shapes = [(), (1,), (7,), (1, 1, 1), (2, 1, 3), (3, 4), (2, 3, 2), (3, 1, 2, 4), (0, 4), (4, 0)]
    shapes += [tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 4))) for _ in range(8)]
    for shape in shapes:
        numel = math.prod(shape)
        for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
            found = chunk_metadata(shape, start, stop)
            assert list(elements(shape, found)) == list(range(start, stop)), (shape, start, stop)
            assert len(found) <= max(2 * len(shape) - 1, 1), (shape, start, stop)


def test_the_whole_tensor_is_one_chunk():
    assert chunk_metadata((3, 4, 5), 0, 60) == [chunk((0, 0, 0), (3, 4, 5))]
    assert chunk_metadata((), 0, 1) == [chunk((), ())]


def test_a_range_beyond_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"elements 3:13 do not lie within a tensor of shape \[3, 4\]"):
        chunk_metadata((3, 4), 3, 13)
